"""One session's runs on a server: a closed loop of callers, as many flights as wanted, and what came of it.

A run counts from where it has settled to where the load stops: the last flights have the machine to themselves and
are faster than the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np

from b2gmodel.batcher import Placement, Policy
from b2gmodel.errors import B2GError, EvidenceError, ServerError
from b2gmodel.flights import Flight
from b2gmodel.live.gateway import Gateway
from b2gmodel.live.kserve import ControlPlane, ModelCounters, ModelSpec
from b2gmodel.live.point import estimate
from b2gmodel.live.transport import Payload, Transport
from b2gmodel.records import Run
from b2gmodel.stats import MIN_BATCHES

WARMUP_ROUNDS: Final = 3
_BLOCKS: Final = 5
_SETTLING_ROUNDS: Final = 2
_LEAST_ROUNDS: Final = 3
# A batch that never comes back must end the run, not hang it.
_FLIGHT_LIMIT_S: Final = 120.0

_IsOver = Callable[[Sequence[Flight]], bool]


@dataclass(frozen=True, slots=True)
class Setting:
    """One run of a session."""

    placement: Literal["C1", "C3", "C4"]
    batch_size: int
    flights: int

    @classmethod
    def of_flights(cls, k: int, flights: int) -> Setting:
        """Batches of ``k`` in the proxy: C3 with one in flight, C4 with more."""
        return cls("C3" if flights == 1 else "C4", k, flights)

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


@dataclass(frozen=True, slots=True)
class Driven:
    """The flights of one run in order of delivery.

    Attributes:
        flights: all of them.
        settled: the number of the first that counts.
        stopped: the number of the first that was delivered after the load had stopped.
    """

    flights: tuple[Flight, ...]
    settled: int
    stopped: int

    @property
    def counted(self) -> tuple[Flight, ...]:
        return self.flights[self.settled : self.stopped]


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

    async def warm_up(self, widest: Setting) -> None:
        """With as many flights as will ever be, so that the server's memory pools have grown before a run counts."""
        rounds = WARMUP_ROUNDS * widest.flights
        start = await self._control.counters(self._model.name)
        driven = await self._drive(widest, "w", lambda seen: len(seen) >= rounds)
        self._booked = await self._control.booked_counters(self._model.name, start.executions + len(driven.flights))

    async def run(self, setting: Setting, order: int, seconds: float) -> tuple[Run, Driven]:
        """One run of at least that many seconds, and a few rounds of flights however slow the server.

        Raises:
            EvidenceError: the server executed something else than our batches meanwhile.
            ServerError: it failed.
        """
        assert self._booked is not None, "warm up first"
        before = self._booked
        end_ns = time.monotonic_ns() + round(seconds * 1e9)
        enough = (_SETTLING_ROUNDS + _LEAST_ROUNDS) * setting.flights + 2
        driven = await self._drive(
            setting, str(order), lambda seen: time.monotonic_ns() >= end_ns and len(seen) >= enough
        )
        after = await self._control.booked_counters(self._model.name, before.executions + len(driven.flights))
        self._booked = after
        self._check_counts(setting, driven, before, after)
        return _report(setting, order, driven, before, after), driven

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
        stopped: int | None = None

        def on_flight(flight: Flight) -> None:
            nonlocal stopped
            flights.append(flight)
            if stopped is None and is_over(flights):
                stopped = len(flights)

        async def caller(payload: Payload) -> None:
            while stopped is None:
                await gateway.submit(payload)

        gateway = Gateway(
            setting.policy,
            self._transport,
            run_id=f"{self._run_id}.{label}",
            on_flight=on_flight,
            flight_limit_s=_FLIGHT_LIMIT_S,
        )
        try:
            await self._transport.warm(setting.flights)
            async with asyncio.TaskGroup() as callers:
                for payload in self._payloads[: setting.concurrency]:
                    callers.create_task(caller(payload))
        except* B2GError as errors:
            raise errors.exceptions[0] from None
        assert stopped is not None
        return Driven(tuple(flights), _SETTLING_ROUNDS * setting.flights, stopped)

    def _check_counts(self, setting: Setting, driven: Driven, before: ModelCounters, after: ModelCounters) -> None:
        ours, executions = len(driven.flights), after.executions - before.executions
        of_our_size = after.of(setting.batch_size).since(before.of(setting.batch_size)).executions
        if executions != ours or of_our_size != ours:
            raise EvidenceError(
                "the server's count of executions is not ours",
                observed=f"{executions}, of which {of_our_size} of {setting.batch_size} requests",
                allowed=f"{ours}, all of them of {setting.batch_size} requests",
                where=f"{self._model.name}, {setting.placement} M={setting.flights}",
                hint="measure while nobody else uses this model, and with dynamic batching off for C1 and C4",
            )


def _report(setting: Setting, order: int, driven: Driven, before: ModelCounters, after: ModelCounters) -> Run:
    counted = driven.counted
    delivered = [flight.delivered_ns for flight in driven.flights[driven.settled - 1 : driven.stopped]]
    delivered_s = np.array(delivered, dtype=np.int64) / 1e9
    sizes = np.array([flight.size for flight in counted])
    duration_s = float(delivered_s[-1] - delivered_s[0])
    if not duration_s > 0:
        raise ServerError("the run was too short to measure a rate", observed=f"{duration_s} s")
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
