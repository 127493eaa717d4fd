"""`b2g measure`: the frozen prediction's plan, run on the server: C4 over M in random order, and C1 as baseline.

A session starts server (where it is ours), proxy and load afresh, warms up, and runs each number of flights once.
Nothing here feeds a prediction: what it writes is judged, not learnt from.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

import numpy as np

from b2gmodel.batcher import Placement, Policy
from b2gmodel.errors import B2GError, EvidenceError, ServerError, UsageError
from b2gmodel.ledger import boot_id
from b2gmodel.live.calibrate import Progress, Table, check_batch, estimate, model_info
from b2gmodel.live.gateway import Flight, Gateway
from b2gmodel.live.host import describe_clock, describe_host, describe_software
from b2gmodel.live.kserve import ControlPlane, ModelCounters, ModelSpec
from b2gmodel.live.payloads import make_payloads
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.target import Endpoint, Target
from b2gmodel.live.transport import HttpTransport, Payload
from b2gmodel.records import Measurement, ModelInfo, Prediction, Run, ServerInfo, Session

_IsOver = Callable[[Sequence[Flight]], bool]

_WARMUP_BATCHES: Final = 12
_BLOCKS: Final = 5


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of a session."""

    placement: Literal["C1", "C3", "C4"]
    batch_size: int
    flights: int

    @property
    def concurrency(self) -> int:
        """Closed-loop callers: enough to fill every flight, and no more."""
        return self.batch_size * self.flights

    @property
    def policy(self) -> Policy:
        return Policy.for_placement(
            Placement(self.placement),
            batch_size=self.batch_size,
            flights=self.flights,
            concurrency=self.concurrency,
            queue_limit=self.concurrency,
        )


@dataclass(slots=True)
class _Recording:
    """All flights of a measurement, as columns."""

    columns: Table = field(default_factory=dict)

    def add(self, session: int, order: int, setting: Setting, flights: Sequence[Flight], counted_from: int) -> None:
        for number, flight in enumerate(flights):
            row = {
                "session": session,
                "order": order,
                "placement": setting.placement,
                "flights": setting.flights,
                "size": flight.size,
                "counted": number >= counted_from,
                "failed": flight.failed,
                "sealed_ns": flight.sealed_ns,
                "send_begin_ns": flight.times.send_begin_ns,
                "send_end_ns": flight.times.send_end_ns,
                "first_byte_ns": flight.times.first_byte_ns,
                "response_end_ns": flight.times.response_end_ns,
                "delivered_ns": flight.delivered_ns,
            }
            for name, value in row.items():
                self.columns.setdefault(name, []).append(value)


def measure(
    prediction: Prediction, digest: str, target: Target, *, name: str, progress: Progress
) -> tuple[Measurement, Table]:
    """Run the plan of a frozen prediction.

    Args:
        prediction, digest: as the ledger gave them.
        target: the server; it must serve the model that was calibrated.

    Returns:
        The measurement, its ``raw`` still None, and the columns of its flights.

    Raises:
        UsageError: the prediction's figures were published, so there is no server to measure on; or the server
            does not serve what was calibrated.
        ServerError, EvidenceError: the server failed, or counts do not agree: nothing is measured then.
    """
    k = prediction.k
    if k is None or prediction.server is None:
        raise UsageError(
            "this prediction is of published figures: there is no server to measure on",
            where=prediction.name,
            hint="calibrate a server of yours first",
        )
    recording = _Recording()
    sessions: list[Session] = []
    order_rng = random.Random(prediction.plan.order_seed)  # noqa: S311  (an order, not a secret)
    seen: tuple[ServerInfo, ModelInfo] | None = None
    for number in range(prediction.plan.sessions):
        settings = _settings(prediction, k)
        order_rng.shuffle(settings)
        with target.session((_workload_name(prediction),)) as endpoint:
            session, seen = run_loop(
                _session(prediction, digest, endpoint, settings, number, target.restarts, recording, progress)
            )
        sessions.append(session)
    assert seen is not None
    measurement = Measurement(
        name=name,
        prediction_digest=digest,
        preregistered=True,
        source="b2g measure",
        host=describe_host(),
        software=describe_software(),
        clock=describe_clock(),
        server=seen[0],
        model=seen[1],
        transport=HttpTransport.name,
        k=k,
        payload_bytes=prediction.payload_bytes,
        sessions=tuple(sessions),
        raw=None,
    )
    return measurement, recording.columns


def _workload_name(prediction: Prediction) -> str:
    """The workload whose entry the prediction is about: NAME_dynamic and NAME_null are entries of NAME."""
    return prediction.model.name.removesuffix("_dynamic").removesuffix("_null")


def _settings(prediction: Prediction, k: int) -> list[Setting]:
    plan = prediction.plan
    c4 = [Setting("C3" if flights == 1 else "C4", k, flights) for flights in plan.flights]
    return [*c4, Setting("C1", 1, plan.baseline_concurrency)]


async def _session(
    prediction: Prediction,
    digest: str,
    endpoint: Endpoint,
    settings: Sequence[Setting],
    number: int,
    restarted: bool,
    recording: _Recording,
    progress: Progress,
) -> tuple[Session, tuple[ServerInfo, ModelInfo]]:
    begin_boottime_ns = str(time.clock_gettime_ns(time.CLOCK_BOOTTIME))
    control = ControlPlane(endpoint.host, endpoint.port)
    try:
        about = await control.server_metadata()
        shapes = {tensor.name: tensor.shape for tensor in prediction.model.inputs}
        model = await control.model(prediction.model.name, shapes)
        info = model_info(model, endpoint)
        _check_same_model(prediction.model, info)
        check_batch(model, prediction.k or 1, where="PREDICTION")
        payloads = make_payloads(model, max(setting.concurrency for setting in settings))
        bench = _Bench(endpoint, control, model, payloads, f"{digest}.{number}")
        await bench.warm_up(prediction.k or 1)
        runs = []
        for order, setting in enumerate(settings):
            stage = f"{prediction.name} session {number + 1}/{prediction.plan.sessions} {setting.placement}"
            done = (number + order / len(settings)) / prediction.plan.sessions
            progress(f"{stage} M={setting.flights}", done)
            run, flights, counted_from = await bench.run(setting, order, prediction.plan.seconds_per_run)
            recording.add(number, order, setting, flights, counted_from)
            runs.append(run)
    finally:
        control.close()
    session = Session(
        session_id=uuid.uuid4().hex,
        boot_id=boot_id(),
        begin_boottime_ns=begin_boottime_ns,
        server_restarted=restarted,
        warmup_batches=_WARMUP_BATCHES,
        runs=tuple(runs),
    )
    address = None if endpoint.embedded else endpoint.address
    server = ServerInfo(
        name=str(about.get("name", "")),
        version=str(about.get("version", "")),
        address=address,
        embedded=endpoint.embedded,
    )
    return session, (server, info)


def _check_same_model(predicted: ModelInfo, served: ModelInfo) -> None:
    for aspect in (
        "compute",
        "compute_table_digest",
        "instances",
        "dynamic_batching",
        "max_batch_size",
        "inputs",
    ):
        before, now = getattr(predicted, aspect), getattr(served, aspect)
        if before != now:
            raise UsageError(
                f"the server's model is not the one that was calibrated: its {aspect} differs",
                observed=str(now),
                allowed=str(before),
                where=predicted.name,
                hint="measure on the server that was calibrated, or calibrate and predict anew",
            )


class _Bench:
    """Server, transport and payloads of one session."""

    def __init__(
        self,
        endpoint: Endpoint,
        control: ControlPlane,
        model: ModelSpec,
        payloads: Sequence[Payload],
        run_id: str,
    ) -> None:
        self._endpoint, self._control, self._model = endpoint, control, model
        self._payloads, self._run_id = payloads, run_id

    async def warm_up(self, k: int) -> None:
        await self._drive(Setting("C4", k, 2), "w", lambda flights: len(flights) >= _WARMUP_BATCHES)

    async def run(self, setting: Setting, order: int, seconds: float) -> tuple[Run, list[Flight], int]:
        """One run, its flights in order of delivery, and the number of the first that counts."""
        before = await self._control.counters(self._model.name)
        end_ns = time.monotonic_ns() + round(seconds * 1e9)
        settled = 2 * setting.flights
        # At least three rounds of flights, however slow the server.
        enough = settled + 3 * setting.flights + 2
        flights = await self._drive(
            setting, str(order), lambda seen: time.monotonic_ns() >= end_ns and len(seen) >= enough
        )
        after = await self._control.counters(self._model.name)
        return self._report(setting, order, flights, settled, before, after), flights, settled

    async def _drive(self, setting: Setting, label: str, is_over: _IsOver) -> list[Flight]:
        """Closed loop: each caller sends its next request as soon as it has its result.

        Whether the run is over is decided once a flight, before its callers go on: so they leave or stay together,
        and no batch is left waiting for partners.
        """
        flights: list[Flight] = []
        over = False

        def on_flight(flight: Flight) -> None:
            nonlocal over
            flights.append(flight)
            over = is_over(flights)

        async def caller(payload: Payload) -> None:
            while not over:
                await gateway.submit(payload)

        transport = HttpTransport(self._endpoint.host, self._endpoint.port, self._model)
        gateway = Gateway(setting.policy, transport, run_id=f"{self._run_id}.{label}", on_flight=on_flight)
        try:
            await transport.warm(setting.flights)
            async with asyncio.TaskGroup() as callers:
                for payload in self._payloads[: setting.concurrency]:
                    callers.create_task(caller(payload))
        except* B2GError as errors:
            raise errors.exceptions[0] from None
        finally:
            await transport.aclose()
        return flights

    def _report(
        self,
        setting: Setting,
        order: int,
        flights: Sequence[Flight],
        settled: int,
        before: ModelCounters,
        after: ModelCounters,
    ) -> Run:
        executions = after.executions - before.executions
        booked = after.of(setting.batch_size).since(before.of(setting.batch_size))
        if executions != len(flights) or booked.executions != len(flights):
            raise EvidenceError(
                "the server's count of executions is not ours",
                observed=f"{executions}, of which {booked.executions} of {setting.batch_size} requests",
                allowed=f"{len(flights)}, all of them of {setting.batch_size} requests",
                where=f"{self._model.name}, {setting.placement} M={setting.flights}",
                hint="measure while nobody else uses this model, and with dynamic batching off for C1 and C4",
            )
        counted = flights[settled:]
        delivered_s = np.array([flight.delivered_ns for flight in flights[settled - 1 :]], dtype=np.int64) / 1e9
        sizes = np.array([flight.size for flight in counted])
        duration_s = float(delivered_s[-1] - delivered_s[0])
        if not duration_s > 0:
            raise ServerError("the run was too short to measure a rate", observed=f"{duration_s} s")
        cuts = np.linspace(0, len(counted), min(_BLOCKS, len(counted)) + 1).astype(int)
        blocks = [
            float(sizes[low:high].sum() / (delivered_s[high] - delivered_s[low]))
            for low, high in pairwise(cuts.tolist())
            if delivered_s[high] > delivered_s[low]
        ]
        cycles_s = np.array([flight.cycle_ns for flight in counted]) / 1e9
        return Run(
            placement=setting.placement,
            flights=setting.flights,
            concurrency=setting.concurrency,
            order=order,
            duration_s=duration_s,
            batches=len(counted),
            requests=int(sizes.sum()),
            failed=sum(flight.failed for flight in flights),
            throughput_per_s=float(sizes.sum()) / duration_s,
            cycle_s=estimate(cycles_s) if len(cycles_s) >= 10 else None,
            service_s=booked.service_ns / executions / 1e9,
            queue_s=(after.queue_ns - before.queue_ns) / executions / 1e9,
            server_executions=executions,
            full_batches=int((sizes == setting.batch_size).sum()),
            blocks_per_s=tuple(blocks),
        )
