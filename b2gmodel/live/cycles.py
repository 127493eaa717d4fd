"""Single-flight cycles, each with its own S and D.

With one batch in flight nothing queues, so what the server's counters gain between two cycles belongs to one
batch. They are read after the batch was delivered, off the timed path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from b2gmodel.batcher import Placement, Policy
from b2gmodel.errors import EvidenceError
from b2gmodel.flights import Cycle, Flight
from b2gmodel.live.gateway import Gateway
from b2gmodel.live.kserve import ControlPlane, ModelCounters, ModelSpec
from b2gmodel.live.payloads import make_payloads
from b2gmodel.live.transport import Payload, Transport


class SingleFlight:
    """Runs cycles of ``k`` requests with one flight, through the same core that serves."""

    def __init__(
        self,
        transport: Transport,
        control: ControlPlane,
        model: ModelSpec,
        k: int,
        *,
        run_id: str,
        flight_limit_s: float | None = None,
    ) -> None:
        self._control, self._model, self._k = control, model, k
        self._payloads: Sequence[Payload] = make_payloads(model, k, transport)
        self._flights: list[Flight] = []
        policy = Policy.for_placement(Placement.C3, batch_size=k, flights=1, concurrency=k, queue_limit=k)
        self._gateway = Gateway(
            policy, transport, run_id=run_id, on_flight=self._flights.append, flight_limit_s=flight_limit_s
        )
        self._counters: ModelCounters | None = None
        self._first: ModelCounters | None = None

    async def run(self, cycles: int) -> list[Cycle]:
        """That many cycles more. Raises ``EvidenceError`` where something else uses the model meanwhile."""
        await self._begin()
        return [await self._cycle() for _ in range(cycles)]

    async def _cycle(self) -> Cycle:
        assert self._counters is not None
        flight = await self._fly()
        before = self._counters
        after = await self._control.booked_counters(self._model.name, before.executions + 1)
        self._counters = after
        added = after.of(self._k).since(before.of(self._k))
        if added.executions != 1 or after.executions - before.executions != 1:
            raise EvidenceError(
                "the model executed something that is not ours",
                observed=f"{after.executions - before.executions} executions in one cycle",
                allowed="1",
                where=self._model.name,
                hint="calibrate while nobody else uses this model",
            )
        return Cycle(
            flight,
            after.queue_ns - before.queue_ns,
            added.compute_input_ns,
            added.compute_infer_ns,
            added.compute_output_ns,
        )

    async def run_unread(self, cycles: int) -> list[Flight]:
        """That many cycles back to back, the counters read after the last one alone: what reading them disturbs."""
        await self._begin()
        assert self._counters is not None
        flights = [await self._fly() for _ in range(cycles)]
        self._counters = await self._control.booked_counters(self._model.name, self._counters.executions + cycles)
        return flights

    async def _begin(self) -> None:
        if self._counters is None:
            self._counters = self._first = await self._control.counters(self._model.name)

    async def _fly(self) -> Flight:
        self._flights.clear()
        await asyncio.gather(*(self._gateway.submit(payload) for payload in self._payloads))
        while not self._flights:
            await asyncio.sleep(0)
        return self._flights[0]

    def server_totals(self) -> tuple[int, int]:
        """Executions and service time (ns) that the server booked from the first cycle to the last."""
        assert self._counters is not None
        assert self._first is not None
        added = self._counters.of(self._k).since(self._first.of(self._k))
        return added.executions, added.service_ns
