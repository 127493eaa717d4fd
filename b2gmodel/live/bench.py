"""One session's runs on a server: a closed loop of callers, as many flights as wanted, and what came of it.

A run counts from where it has settled to where the load stops: the last flights have the machine to themselves and
are faster than the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np

from b2gmodel.batcher import Placement, Policy
from b2gmodel.errors import B2GError, EvidenceError, ServerError
from b2gmodel.flights import Flight
from b2gmodel.live.direct import Direct
from b2gmodel.live.gateway import Gateway
from b2gmodel.live.kserve import ControlPlane, ModelCounters, ModelSpec
from b2gmodel.live.meter import Meter, Usage
from b2gmodel.live.point import estimate
from b2gmodel.live.stall import refuse_still_flights
from b2gmodel.live.transport import Payload, Transport
from b2gmodel.records import Run
from b2gmodel.stats import MIN_BATCHES

WARMUP_ROUNDS: Final = 3
_BLOCKS: Final = 5
_SETTLING_ROUNDS: Final = 2
_LEAST_ROUNDS: Final = 3
# A batch that never comes back must end the run, not hang it.
_FLIGHT_LIMIT_S: Final = 120.0
_BOOKING_LIMIT_S: Final = 5.0

_IsOver = Callable[[Sequence[Flight]], bool]


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of a session; ``clients`` is the number of closed-loop callers, None for as many as fill the flights."""

    placement: Literal["D0", "C1", "C2", "C3", "C4"]
    batch_size: int
    flights: int
    clients: int | None = None

    @classmethod
    def of_flights(cls, k: int, flights: int) -> Setting:
        """Batches of ``k`` in the proxy: C3 with one in flight, C4 with more."""
        return cls("C3" if flights == 1 else "C4", k, flights)

    @property
    def concurrency(self) -> int:
        """Closed-loop callers: enough to fill every flight, and no more, unless ``clients`` says otherwise."""
        return self.batch_size * self.flights if self.clients is None else self.clients

    @property
    def round_flights(self) -> int:
        """Flights in which every caller has its turn."""
        return max(self.flights, -(-self.concurrency // self.batch_size))

    @property
    def policy(self) -> Policy:
        """Of a placement that has a proxy; D0 has none."""
        return Policy.for_placement(
            Placement(self.placement),
            batch_size=self.batch_size,
            flights=self.flights,
            concurrency=self.concurrency,
            queue_limit=self.concurrency,
        )


@dataclass(frozen=True, slots=True)
class Driven:
    """The flights of one run in order of delivery.

    Attributes:
        flights: all of them.
        settled: the number of the first that counts.
        stopped: the number of the first that was delivered after the load had stopped.
        waits_ns: of each request, when its caller sent it and when it had the answer.
    """

    flights: tuple[Flight, ...]
    settled: int
    stopped: int
    waits_ns: tuple[tuple[int, int], ...] = ()

    @property
    def counted(self) -> tuple[Flight, ...]:
        return self.flights[self.settled : self.stopped]

    @property
    def window_ns(self) -> tuple[int, int]:
        """The deliveries between which flights count: the last before the first of them, and the last of them."""
        return self.flights[self.settled - 1].delivered_ns, self.flights[self.stopped - 1].delivered_ns


@dataclass(frozen=True, slots=True)
class Taken:
    """One run as it was taken: its flights, the server's counters around it, and what it used."""

    driven: Driven
    before: ModelCounters
    after: ModelCounters
    usage: Usage | None


class Bench:
    """Server, transport and payloads of one session.

    Args:
        run_id: goes before the run's and the flight's number in the id of each batch.
    """

    def __init__(
        self,
        transport: Transport,
        control: ControlPlane,
        model: ModelSpec,
        payloads: Sequence[Payload],
        run_id: str,
    ) -> None:
        self._transport, self._control, self._model = transport, control, model
        self._payloads, self._run_id = payloads, run_id
        # What the server has booked so far. It books a batch just after it answers, so each reading waits for all.
        self._booked: ModelCounters | None = None

    async def warm_up(self, widest: Setting, rounds: int = WARMUP_ROUNDS) -> int:
        """With as many flights as will ever be, so that the server's memory pools have grown before a run counts.

        Returns:
            How many batches it took.
        """
        wanted = rounds * widest.flights
        start = await self._control.counters(self._model.name)
        driven = await self._drive(widest, "w", lambda seen: len(seen) >= wanted)
        self._booked = await self._all_booked(widest, start, driven)
        return len(driven.flights)

    async def run(self, setting: Setting, order: int, seconds: float) -> tuple[Run, Driven]:
        """One run of at least that many seconds, and a few rounds of flights however slow the server.

        Raises:
            EvidenceError: the server executed something else than our batches meanwhile, or all stood still.
            ServerError: it failed.
        """
        taken = await self.take(setting, str(order), seconds)
        return _report(setting, order, taken.driven, taken.before, taken.after), taken.driven

    async def take(self, setting: Setting, label: str, seconds: float, meter: Meter | None = None) -> Taken:
        """As ``run``, with what it used where there is a meter, and no report."""
        assert self._booked is not None, "warm up first"
        before = self._booked
        end_ns = time.monotonic_ns() + round(seconds * 1e9)
        enough = (_SETTLING_ROUNDS + _LEAST_ROUNDS) * setting.round_flights + 2
        begun = None if meter is None else meter.read()
        driven = await self._drive(setting, label, lambda seen: time.monotonic_ns() >= end_ns and len(seen) >= enough)
        usage = None if meter is None or begun is None else meter.read().since(begun)
        self._booked = after = await self._all_booked(setting, before, driven)
        self._check_counts(setting, driven, before, after)
        refuse_still_flights(driven.flights, where=self._where(setting))
        return Taken(driven, before, after, usage)

    @asynccontextmanager
    async def kept_busy(self, setting: Setting, label: str) -> AsyncIterator[None]:
        """Keeps the setting's flights in the air for as long as the block runs; what they did is not reported.

        Raises:
            ServerError: the server failed meanwhile.
        """
        over = False
        try:
            async with asyncio.TaskGroup() as beside:
                driven = beside.create_task(self._drive(setting, label, lambda _seen: over))
                try:
                    yield
                finally:
                    over = True
        except* B2GError as errors:
            raise errors.exceptions[0] from None
        assert self._booked is not None, "warm up first"
        executions = self._booked.executions + len(driven.result().flights)
        self._booked = await self._control.booked_counters(self._model.name, executions)

    async def _drive(self, setting: Setting, label: str, is_over: _IsOver) -> Driven:
        """Closed loop: each caller sends its next request as soon as it has its result.

        Whether the run is over is decided once a flight, before its callers go on: so they leave or stay together,
        and no batch is left waiting for partners.
        """
        flights: list[Flight] = []
        waits_ns: list[tuple[int, int]] = []
        stopped: int | None = None

        def on_flight(flight: Flight) -> None:
            nonlocal stopped
            flights.append(flight)
            if stopped is None and is_over(flights):
                stopped = len(flights)
                if isinstance(door, Gateway) and setting.concurrency % setting.batch_size:
                    callers.create_task(door.drain())  # who still waits for partners will not get them

        async def caller(payload: Payload) -> None:
            while stopped is None:
                sent_ns = time.monotonic_ns()
                await door.submit(payload)
                waits_ns.append((sent_ns, time.monotonic_ns()))

        door = self._door(setting, f"{self._run_id}.{label}", on_flight)
        try:
            await self._transport.warm(setting.flights)
            async with asyncio.TaskGroup() as callers:
                for payload in self._payloads[: setting.concurrency]:
                    callers.create_task(caller(payload))
        except* B2GError as errors:
            if isinstance(door, Gateway):
                await door.abort()
            raise errors.exceptions[0] from None
        assert stopped is not None
        return Driven(tuple(flights), _SETTLING_ROUNDS * setting.round_flights, stopped, tuple(waits_ns))

    def _door(self, setting: Setting, run_id: str, on_flight: Callable[[Flight], None]) -> Gateway | Direct:
        """What callers hand their requests to."""
        if setting.placement == "D0":
            return Direct(self._transport, run_id=run_id, on_flight=on_flight, flight_limit_s=_FLIGHT_LIMIT_S)
        return Gateway(
            setting.policy, self._transport, run_id=run_id, on_flight=on_flight, flight_limit_s=_FLIGHT_LIMIT_S
        )

    async def _all_booked(self, setting: Setting, before: ModelCounters, driven: Driven) -> ModelCounters:
        """The counters once the server has booked all that was driven; with C2 it merges, and only requests tell."""
        if setting.placement == "C2":
            return await booked_requests(self._control, self._model.name, before.inferences + requests_of(driven))
        return await self._control.booked_counters(self._model.name, before.executions + len(driven.flights))

    def _check_counts(self, setting: Setting, driven: Driven, before: ModelCounters, after: ModelCounters) -> None:
        check_counts(setting, [flight.size for flight in driven.flights], before, after, self._where(setting))

    def _where(self, setting: Setting) -> str:
        return f"{self._model.name}, {setting.placement} M={setting.flights}"


def check_counts(
    setting: Setting, sizes: Sequence[int], before: ModelCounters, after: ModelCounters, where: str
) -> None:
    """Raises ``EvidenceError`` where the server executed something else than batches of these sizes."""
    executions = after.executions - before.executions
    if setting.placement == "C2":
        requests = after.inferences - before.inferences
        if requests == sum(sizes) and 0 < executions <= requests:
            return
        observed, allowed = f"{requests} requests in {executions} executions", f"{sum(sizes)} requests, in no more"
        hint = "measure while nobody else uses this model"
    else:
        ours = Counter(sizes)
        of_size = {size: after.of(size).since(before.of(size)).executions for size in ours}
        if executions == len(sizes) and of_size == ours:
            return
        of_ours, k = of_size.get(setting.batch_size, 0), setting.batch_size
        observed = f"{executions}, of which {of_ours} of {k} requests"
        allowed = f"{len(sizes)}, {'all' if len(ours) == 1 else ours[k]} of them of {k} requests"
        hint = "measure while nobody else uses this model, and with dynamic batching off for all but C2"
    raise EvidenceError(
        "the server's count of executions is not ours", observed=observed, allowed=allowed, where=where, hint=hint
    )


def requests_of(driven: Driven) -> int:
    """Requests in all flights of a run."""
    return sum(flight.size for flight in driven.flights)


async def booked_requests(control: ControlPlane, name: str, requests: int) -> ModelCounters:
    """The model's statistics once it has booked that many requests in all.

    Raises:
        ServerError: it did not within ``_BOOKING_LIMIT_S``.
    """
    deadline_s = time.monotonic() + _BOOKING_LIMIT_S
    while True:
        counters = await control.counters(name)
        if counters.booked_requests >= requests:
            return counters
        if time.monotonic() > deadline_s:
            raise ServerError(
                "the server did not book our requests in its statistics",
                observed=f"{counters.booked_requests} requests",
                allowed=f"{requests} within {_BOOKING_LIMIT_S:g} s",
                where=name,
            )


def _report(setting: Setting, order: int, driven: Driven, before: ModelCounters, after: ModelCounters) -> Run:
    counted = driven.counted
    delivered = [flight.delivered_ns for flight in driven.flights[driven.settled - 1 : driven.stopped]]
    delivered_s = np.array(delivered, dtype=np.int64) / 1e9
    sizes = np.array([flight.size for flight in counted])
    duration_s = float(delivered_s[-1] - delivered_s[0])
    if not duration_s > 0:
        raise ServerError("the run was too short to measure a rate", observed=f"{duration_s} s")
    assert setting.placement != "D0", "no record of a prediction's measurement holds it"
    cuts = np.linspace(0, len(counted), min(_BLOCKS, len(counted)) + 1).astype(int).tolist()
    cycles_s = np.array([flight.cycle_ns for flight in counted]) / 1e9
    booked = after.of(setting.batch_size).since(before.of(setting.batch_size))
    return Run(
        placement=setting.placement,
        flights=setting.flights,
        concurrency=setting.concurrency,
        order=order,
        duration_s=duration_s,
        batches=len(counted),
        delivered_batches=len(driven.flights),
        requests=int(sizes.sum()),
        failed=sum(flight.failed for flight in driven.flights),
        throughput_per_s=float(sizes.sum()) / duration_s,
        cycle_s=estimate(cycles_s) if len(cycles_s) >= MIN_BATCHES else None,
        service_s=booked.service_ns / booked.executions / 1e9,
        queue_s=(after.queue_ns - before.queue_ns) / booked.executions / 1e9,
        server_executions=booked.executions,
        full_batches=int((sizes == setting.batch_size).sum()),
        blocks_per_s=tuple(
            float(sizes[low:high].sum() / (delivered_s[high] - delivered_s[low]))
            for low, high in pairwise(cuts)
            if delivered_s[high] > delivered_s[low]
        ),
    )
