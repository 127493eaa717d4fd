"""`b2g measure`: the frozen prediction's plan, run on the server: C4 over M in random order, and C1 as baseline.

A session starts server (where it is ours), proxy and load afresh, warms up, and runs each number of flights once.
Nothing here feeds a prediction: what it writes is judged, not learnt from.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from b2gmodel.errors import UsageError
from b2gmodel.ledger import boot_id
from b2gmodel.live.bench import WARMUP_ROUNDS, Bench, Driven, Setting
from b2gmodel.live.calibrate import Progress, check_batch, model_info
from b2gmodel.live.host import describe_clock, describe_host, describe_software
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.latest import Latest, tell
from b2gmodel.live.payloads import make_payloads
from b2gmodel.live.point import Table
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.target import Endpoint, Target
from b2gmodel.live.transport import Transport
from b2gmodel.live.transports import DEFAULT_TRANSPORT, make_transport
from b2gmodel.records import Measurement, ModelInfo, Prediction, ServerInfo, Session


@dataclass(slots=True)
class _Recording:
    """All flights of a measurement, as columns."""

    columns: Table = field(default_factory=dict)

    def add(self, session: int, order: int, setting: Setting, driven: Driven) -> None:
        for number, flight in enumerate(driven.flights):
            row = {
                "session": session,
                "order": order,
                "placement": setting.placement,
                "flights": setting.flights,
                "size": flight.size,
                "counted": driven.settled <= number < driven.stopped,
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
        with target.session((prediction.model.name,)) as endpoint:
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
        transport=prediction.transport,
        k=k,
        payload_bytes=prediction.payload_bytes,
        sessions=tuple(sessions),
        raw=None,
    )
    return measurement, recording.columns


def _settings(prediction: Prediction, k: int) -> list[Setting]:
    plan = prediction.plan
    c4 = [Setting.of_flights(k, flights) for flights in plan.flights]
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
    control = ControlPlane(endpoint.host, endpoint.port, known=number > 0)
    transport: Transport | None = None
    try:
        about = await control.server_metadata()
        shapes = {tensor.name: tensor.shape for tensor in prediction.model.inputs if tensor.name is not None}
        model = await control.model(prediction.model.name, shapes)
        info = model_info(model, endpoint)
        _check_same_model(prediction.model, info)
        check_batch(model, prediction.k or 1, where="PREDICTION")
        transport = make_transport(prediction.transport or DEFAULT_TRANSPORT, endpoint, model)
        payloads = make_payloads(model, max(setting.concurrency for setting in settings), transport)
        bench = Bench(transport, control, model, payloads, f"{digest}.{number}")
        await bench.warm_up(max(settings, key=lambda setting: setting.concurrency))
        runs = []
        for order, setting in enumerate(settings):
            stage = f"{prediction.name} session {number + 1}/{prediction.plan.sessions} {setting.placement}"
            done = (number + order / len(settings)) / prediction.plan.sessions
            progress(f"{stage} M={setting.flights}", done)
            run, driven = await bench.run(setting, order, prediction.plan.seconds_per_run)
            recording.add(number, order, setting, driven)
            # Beyond single-flight D is not known from this: C holds waiting, too.
            tell(Latest(run.batches, run.flights, run.throughput_per_s, run.service_s))
            runs.append(run)
    finally:
        if transport is not None:
            await transport.aclose()
        control.close()
    session = Session(
        session_id=uuid.uuid4().hex,
        boot_id=boot_id(),
        begin_boottime_ns=begin_boottime_ns,
        server_restarted=restarted,
        warmup_batches=WARMUP_ROUNDS * max(setting.flights for setting in settings),
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
        "engine",
        "instances",
        "dynamic_batching",
        "preferred_batch_sizes",
        "queue_delay_s",
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
