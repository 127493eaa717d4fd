"""What a block runs on: transports to the server's model entries, payloads, and the warm-up before the first run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from b2gmodel.errors import UsageError
from b2gmodel.live.bench import Bench, Setting
from b2gmodel.live.calibrate import check_batch
from b2gmodel.live.descriptors import allow_files
from b2gmodel.live.kserve import ControlPlane, ModelSpec
from b2gmodel.live.meter import Meter
from b2gmodel.live.payloads import make_payloads
from b2gmodel.live.study_process import take_in_process
from b2gmodel.live.study_server import model_of
from b2gmodel.live.study_take import Figures, setting_of, take_inside
from b2gmodel.live.target import Endpoint
from b2gmodel.live.transport import Payload
from b2gmodel.live.transports import TransportName, make_transport
from b2gmodel.study_records import Cell, PlacementName, PlannedRun, Study

_SPARE_FILES: Final = 128
_QUIET_S: Final = 0.1
_SETTLED_WITHIN_S: Final = 5.0


@dataclass(slots=True)
class StudyBench:
    """A block's bench, warmed up.

    Attributes:
        study, endpoint, transport: what runs, where, and how batches travel.
        control: the server's control plane.
        models: the server's entries, by placement.
        run_prefix: goes before the run's id in the id of each batch that is sent.
        warmup_batches: how many it took.
    """

    study: Study
    endpoint: Endpoint
    transport: str
    control: ControlPlane
    models: dict[PlacementName, ModelSpec]
    run_prefix: str
    warmup_batches: int = 0
    _benches: dict[str, Bench] = field(default_factory=dict)
    _meter: Meter | None = None

    def model(self, cell: Cell) -> ModelSpec:
        """The entry that the cell addresses."""
        return self.models[cell.placement]

    async def take(self, cell: Cell, run_id: str) -> Figures:
        """One run of the cell.

        Raises:
            ServerError, EvidenceError: the run came to nothing.
        """
        assert self._meter is not None, "warm up first"
        seconds, model = self.study.seconds_per_run, self.model(cell)
        if self.study.clients == "inside":
            return await take_inside(self._benches[model.name], cell, run_id, seconds, self._meter)
        transport = make_transport(self.transport, self.endpoint, model)
        try:
            label = f"{self.run_prefix}.{run_id}"
            return await take_in_process(transport, self.control, model, cell, label, seconds, self._meter)
        finally:
            await transport.aclose()

    async def warm_up(self, widest: Sequence[Setting], clients: int, stack: AsyncExitStack) -> None:
        """Each placement at its widest, so that the server's memory has grown before a run counts.

        Args:
            clients: the most that any run has.
            stack: closes the transports.
        """
        payloads: list[Payload] = []
        for setting in widest:
            model = self.models[setting.placement]
            if model.name not in self._benches:
                transport = make_transport(self.transport, self.endpoint, model)
                stack.push_async_callback(transport.aclose)
                # Payloads in shared memory belong to one transport; all others can send them from anywhere.
                if not payloads or self.transport == TransportName.SHM:
                    payloads = make_payloads(model, clients, transport)
                self._benches[model.name] = Bench(transport, self.control, model, payloads, self.run_prefix)
            self.warmup_batches += await self._benches[model.name].warm_up(setting, self.study.warmup_rounds)
        self._meter = Meter(self.endpoint)

    async def settle(self) -> None:
        """Wait until the server's counters rest: batches that were broken off may still be executed."""
        deadline_s, seen = time.monotonic() + _SETTLED_WITHIN_S, -1
        while time.monotonic() < deadline_s:
            now = sum([(await self.control.counters(name)).executions for name in self._benches])
            if now == seen:
                return
            seen = now
            await asyncio.sleep(_QUIET_S)


@asynccontextmanager
async def opened_bench(
    study: Study, runs: Sequence[PlannedRun], endpoint: Endpoint, run_prefix: str
) -> AsyncIterator[StudyBench]:
    """A bench for these runs of one block.

    Args:
        run_prefix: goes before the run's id in the id of each batch that is sent.

    Raises:
        UsageError: the server does not serve what was planned.
        ServerError: it failed in the warm-up.
    """
    workload, transport, block = study.workload(runs[0].workload), runs[0].transport, runs[0].block
    widest = _widest([run.cell for run in runs])
    allow_files(sum(setting.flights + setting.concurrency for setting in widest) + _SPARE_FILES, where=block)
    async with AsyncExitStack() as stack:
        control = ControlPlane(endpoint.host, endpoint.port)
        stack.callback(control.close)
        models: dict[PlacementName, ModelSpec] = {}
        for setting in widest:
            model = await control.model(model_of(workload, setting.placement), workload.shapes)
            check_batch(model, setting.batch_size, where=f"{block}, {setting.placement}")
            if workload.payload_bytes not in (None, model.payload_bytes):
                raise UsageError(
                    "the server's model takes other requests than were planned",
                    observed=f"{model.payload_bytes} bytes",
                    allowed=f"{workload.payload_bytes} bytes",
                    where=model.name,
                )
            models[setting.placement] = model
        bench = StudyBench(study, endpoint, transport, control, models, run_prefix)
        await bench.warm_up(widest, max(run.cell.concurrency for run in runs), stack)
        yield bench


def _widest(cells: Sequence[Cell]) -> list[Setting]:
    """Each placement's cell with the most requests in flight, and of those with the most clients."""
    widest: dict[PlacementName, Cell] = {}
    for cell in cells:
        seen = widest.get(cell.placement)
        if seen is None or _width(cell) > _width(seen):
            widest[cell.placement] = cell
    return [setting_of(cell) for cell in widest.values()]


def _width(cell: Cell) -> tuple[int, int]:
    return cell.k * cell.flights, cell.concurrency
