"""`b2g calibrate`: single-flight at a ladder of batch sizes, until S and D are known well enough.

The warm-up is detected (MSER-5) and not counted. A run stops when the half-widths of the 95 % intervals of mean S
and mean D are both below the wanted share of the mean cycle, or when its budget ends; the record says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.live.cycles import Cycle, SingleFlight, series_s
from b2gmodel.live.host import describe_clock, describe_host, describe_software
from b2gmodel.live.kserve import ControlPlane, ModelSpec
from b2gmodel.live.target import Endpoint
from b2gmodel.live.transport import HttpTransport
from b2gmodel.records import (
    Block,
    Calibration,
    CalibrationPoint,
    CountersCheck,
    Estimate,
    ModelInfo,
    ServerInfo,
    TensorInfo,
)
from b2gmodel.stats import block_means, mean_interval, warmup_length

_CHUNK_CYCLES: Final = 10
_MIN_CYCLES: Final = 40
_MAX_CYCLES: Final = 100_000
_BLOCKS: Final = 20
_LEVEL: Final = 0.95
_QUANTILES: Final = (0.05, 0.5, 0.95, 0.99)

Table = dict[str, list[Any]]
"""Columns of equal length."""
Progress = Callable[[str, float], None]
"""Told a stage's name and the share of it that is done, at most."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to calibrate.

    Attributes:
        model: its name on the server.
        ladder: batch sizes, each at least 1.
        shapes: dimensions for inputs whose shape the server leaves open.
        budget_s: longest time for one batch size.
        precision: half-width wanted, as a share of the mean cycle.
    """

    model: str
    ladder: tuple[int, ...]
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    budget_s: float = 30.0
    precision: float = 0.02


async def calibrate(
    endpoint: Endpoint, wanted: Wanted, *, name: str, session_id: str, progress: Progress
) -> tuple[Calibration, Table]:
    """Calibrate one model in one session.

    Returns:
        The calibration, its ``raw`` still None, and the columns of its cycles.

    Raises:
        UsageError: no such model, or one that cannot take the wanted batches.
        ServerError, EvidenceError: the server failed, or somebody else used the model.
    """
    control = ControlPlane(endpoint.host, endpoint.port)
    try:
        about = await control.server_metadata()
        model = await control.model(wanted.model, wanted.shapes)
        _check_ladder(model, wanted.ladder)
        points, tables = [], []
        for step, k in enumerate(wanted.ladder):
            stage = f"{model.name} k={k}"

            def told(share: float, step: int = step, stage: str = stage) -> None:
                progress(stage, (step + share) / len(wanted.ladder))

            point, table = await _calibrate_point(endpoint, control, model, k, wanted, session_id, told)
            points.append(point)
            tables.append(table)
    finally:
        control.close()
    calibration = Calibration(
        name=name,
        source="b2g calibrate",
        host=describe_host(),
        software=describe_software(),
        clock=describe_clock(),
        server=ServerInfo(
            name=str(about.get("name", "")),
            version=str(about.get("version", "")),
            address=None if endpoint.embedded else endpoint.address,
            embedded=endpoint.embedded,
        ),
        model=model_info(model, endpoint),
        transport=HttpTransport.name,
        session_ids=(session_id,),
        points=tuple(points),
        raw=None,
        notes=_notes(model, points),
    )
    return calibration, {column: [value for table in tables for value in table[column]] for column in tables[0]}


def model_info(model: ModelSpec, endpoint: Endpoint) -> ModelInfo:
    """The model as records hold it."""
    compute = model.compute if model.compute in ("emulated", "none") else "real"
    return ModelInfo.model_validate(
        {
            "name": model.name,
            "compute": compute,
            "compute_table_digest": endpoint.table_digest,
            "platform": model.platform,
            "max_batch_size": model.max_batch_size,
            "instances": model.instances,
            "dynamic_batching": model.dynamic_batching,
            "inputs": tuple(TensorInfo(name=t.name, datatype=t.datatype, shape=t.shape) for t in model.inputs),
        }
    )


def check_batch(model: ModelSpec, k: int, *, where: str) -> None:
    """Raises ``UsageError`` where the model cannot take batches of ``k``."""
    if model.max_batch_size == 0 and k > 1:
        raise UsageError(
            "the model does not batch (its max_batch_size is 0)",
            observed=k,
            allowed="1",
            where=where,
            hint=f"give {model.name} a max_batch_size in its configuration, or calibrate it with -k 1",
        )
    if k > max(1, model.max_batch_size):
        raise UsageError(
            "the batch is larger than the model takes",
            observed=k,
            allowed=f"1 to {model.max_batch_size}",
            where=where,
            hint="choose a smaller k, or raise max_batch_size in the model's configuration",
        )


def _check_ladder(model: ModelSpec, ladder: Sequence[int]) -> None:
    for k in ladder:
        check_batch(model, k, where="-k")


async def _calibrate_point(
    endpoint: Endpoint,
    control: ControlPlane,
    model: ModelSpec,
    k: int,
    wanted: Wanted,
    session_id: str,
    told: Callable[[float], None],
) -> tuple[CalibrationPoint, Table]:
    transport = HttpTransport(endpoint.host, endpoint.port, model)
    try:
        await transport.warm(1)
        flight = SingleFlight(transport, control, model, k, run_id=f"{session_id}.k{k}")
        begin = time.monotonic()
        cycles: list[Cycle] = []
        stopped_by = None
        while stopped_by is None:
            cycles += await flight.run(_CHUNK_CYCLES if len(cycles) >= _MIN_CYCLES else _MIN_CYCLES // 4)
            elapsed_s = time.monotonic() - begin
            stopped_by, share = _stop(cycles, elapsed_s, wanted)
            told(share)
    finally:
        await transport.aclose()
    warmup = warmup_length(series_s(cycles)[:, 0])
    kept = cycles[warmup if warmup is not None else len(cycles) // 2 :]
    executions, service_ns = flight.server_totals()
    booked_s = service_ns / executions / 1e9
    summed_s = float(series_s(cycles)[:, 1].mean())
    point = _point(kept, k, model.payload_bytes)
    point = point.model_copy(
        update={
            "warmup_cycles": len(cycles) - len(kept),
            "stopped_by": stopped_by,
            "elapsed_s": elapsed_s,
            "counters": CountersCheck(
                executions=executions, service_s=booked_s, relative_difference=summed_s / booked_s - 1
            ),
        }
    )
    return point, _columns(cycles, len(cycles) - len(kept), k)


def _stop(cycles: Sequence[Cycle], elapsed_s: float, wanted: Wanted) -> tuple[str | None, float]:
    """Why to stop (None: go on), and the share of the way there."""
    out_of_time = elapsed_s >= wanted.budget_s or len(cycles) >= _MAX_CYCLES
    spent = min(1.0, elapsed_s / wanted.budget_s)
    series = series_s(cycles)
    warmup = warmup_length(series[:, 0]) if len(cycles) >= _MIN_CYCLES else None
    if warmup is not None and len(cycles) - warmup >= _MIN_CYCLES // 2:
        kept = series[warmup:]
        widest = max(mean_interval(kept[:, 1]).half_width, mean_interval(kept[:, 0] - kept[:, 1]).half_width)
        share = widest / float(kept[:, 0].mean())
        if share <= wanted.precision:
            return "precision", 1.0
        # The half-width falls with the square root of the effort.
        spent = max(spent, min(0.95, (wanted.precision / share) ** 2))
    if out_of_time and len(cycles) < _MIN_CYCLES // 2:
        raise EvidenceError(
            "too few cycles within the budget",
            observed=len(cycles),
            allowed=f">= {_MIN_CYCLES // 2}",
            where="--budget",
            hint="give it more time, or calibrate a smaller batch",
        )
    return ("budget", 1.0) if out_of_time else (None, spent)


def _point(kept: Sequence[Cycle], k: int, payload_bytes: int) -> CalibrationPoint:
    series = series_s(kept)
    cycle_s, service_s = series[:, 0], series[:, 1]
    blocks = block_means(series, min(_BLOCKS, len(series) // 2))
    share_of_blocks = 1.0 - blocks[:, 1] / blocks[:, 0]
    return CalibrationPoint(
        k=k,
        payload_bytes=payload_bytes,
        cycles=len(kept),
        cycle_s=estimate(cycle_s),
        service_s=estimate(service_s),
        transport_s=estimate(cycle_s - service_s),
        queue_s=estimate(np.array([cycle.queue_ns for cycle in kept]) / 1e9),
        transport_share=_around(float(1 - service_s.mean() / cycle_s.mean()), share_of_blocks),
        throughput_per_s=k / float(cycle_s.mean()),
        blocks=tuple(Block(session=0, cycle_s=float(c), service_s=float(s)) for c, s in blocks),
    )


def estimate(series: NDArray[np.float64]) -> Estimate:
    """Mean, interval by batch means, coefficient of variation and quantiles of a series in order of time."""
    interval = mean_interval(series, _LEVEL)
    return Estimate(
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        level=_LEVEL,
        cv=float(series.std(ddof=1)) / abs(interval.mean) if interval.mean else None,
        quantiles={f"p{100 * q:g}": float(np.quantile(series, q)) for q in _QUANTILES},
    )


def _around(value: float, of_blocks: NDArray[np.float64]) -> Estimate:
    half = mean_interval(of_blocks, _LEVEL).half_width
    return Estimate(mean=value, low=value - half, high=value + half, level=_LEVEL)


def _columns(cycles: Sequence[Cycle], warmup: int, k: int) -> Table:
    """The raw table, all times integer nanoseconds on CLOCK_MONOTONIC."""
    times = [cycle.flight.times for cycle in cycles]
    return {
        "k": [k] * len(cycles),
        "warmup": [number < warmup for number in range(len(cycles))],
        "sealed_ns": [cycle.flight.sealed_ns for cycle in cycles],
        "send_begin_ns": [time.send_begin_ns for time in times],
        "send_end_ns": [time.send_end_ns for time in times],
        "first_byte_ns": [time.first_byte_ns for time in times],
        "response_end_ns": [time.response_end_ns for time in times],
        "delivered_ns": [cycle.flight.delivered_ns for cycle in cycles],
        "cycle_ns": [cycle.cycle_ns for cycle in cycles],
        "service_ns": [cycle.service_ns for cycle in cycles],
        "transport_ns": [cycle.transport_ns for cycle in cycles],
        "queue_ns": [cycle.queue_ns for cycle in cycles],
        "compute_input_ns": [cycle.compute_input_ns for cycle in cycles],
        "compute_infer_ns": [cycle.compute_infer_ns for cycle in cycles],
        "compute_output_ns": [cycle.compute_output_ns for cycle in cycles],
    }


def _notes(model: ModelSpec, points: Sequence[CalibrationPoint]) -> tuple[str, ...]:
    notes = []
    if model.compute == "emulated":
        notes.append("the compute is emulated: the instance is held for a tabled time and uses no processor")
    if model.dynamic_batching:
        notes.append("the server's dynamic batching is on for this model: the closed form does not apply above M = 1")
    if any(point.stopped_by == "budget" for point in points):
        notes.append("the budget ended before the wanted precision: intervals are wider than asked for")
    return tuple(notes)
