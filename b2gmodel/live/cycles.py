"""Single-flight cycles, each with its own S and D.

With one batch in flight nothing queues, so what the server's counters gain between two cycles belongs to one
batch. They are read after the batch was delivered, off the timed path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from b2gmodel.batcher import Placement, Policy
from b2gmodel.errors import EvidenceError
from b2gmodel.live.gateway import Flight, Gateway
from b2gmodel.live.kserve import ControlPlane, ModelCounters, ModelSpec
from b2gmodel.live.payloads import make_payloads
from b2gmodel.live.transport import Payload, Transport


@dataclass(frozen=True, slots=True)
class Cycle:
    """One single-flight cycle: the proxy's stamps, and what the server booked for it."""

    flight: Flight
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int

    @property
    def cycle_ns(self) -> int:
        return self.flight.cycle_ns

    @property
    def service_ns(self) -> int:
        """S: compute input, infer and output."""
        return self.compute_input_ns + self.compute_infer_ns + self.compute_output_ns

    @property
    def transport_ns(self) -> int:
        """D = C - S, signed."""
        return self.cycle_ns - self.service_ns


class SingleFlight:
    """Runs cycles of ``k`` requests with one flight, through the same core that serves."""

    def __init__(self, transport: Transport, control: ControlPlane, model: ModelSpec, k: int, *, run_id: str) -> None:
        self._control, self._model, self._k = control, model, k
        self._payloads: Sequence[Payload] = make_payloads(model, k, transport)
        self._flights: list[Flight] = []
        policy = Policy.for_placement(Placement.C3, batch_size=k, flights=1, concurrency=k, queue_limit=k)
        self._gateway = Gateway(policy, transport, run_id=run_id, on_flight=self._flights.append)
        self._counters: ModelCounters | None = None
        self._first: ModelCounters | None = None

    async def run(self, cycles: int) -> list[Cycle]:
        """That many cycles more. Raises ``EvidenceError`` where something else uses the model meanwhile."""
        if self._counters is None:
            self._counters = self._first = await self._control.counters(self._model.name)
        return [await self._cycle() for _ in range(cycles)]

    async def _cycle(self) -> Cycle:
        assert self._counters is not None
        self._flights.clear()
        await asyncio.gather(*(self._gateway.submit(payload) for payload in self._payloads))
        while not self._flights:
            await asyncio.sleep(0)
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
            self._flights[0],
            after.queue_ns - before.queue_ns,
            added.compute_input_ns,
            added.compute_infer_ns,
            added.compute_output_ns,
        )

    def server_totals(self) -> tuple[int, int]:
        """Executions and service time (ns) that the server booked from the first cycle to the last."""
        assert self._counters is not None
        assert self._first is not None
        added = self._counters.of(self._k).since(self._first.of(self._k))
        return added.executions, added.service_ns


def series_s(cycles: Sequence[Cycle]) -> NDArray[np.float64]:
    """Columns C and S in seconds, a row a cycle."""
    return np.array([(cycle.cycle_ns, cycle.service_ns) for cycle in cycles], dtype=np.float64) / 1e9
