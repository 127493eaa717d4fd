"""One batch size in single-flight: cycles until S and D are known well enough, and what they come to.

The warm-up is detected (MSER-5) and not counted. A run stops when the half-widths of the 95 % intervals of mean S
and mean D are both below the wanted share of the mean cycle, or when its budget ends; the record says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from b2gmodel.errors import EvidenceError, ServerError
from b2gmodel.flights import Cycle, series_s
from b2gmodel.legs import Legs, split
from b2gmodel.live.cycles import SingleFlight
from b2gmodel.live.kserve import ControlPlane, ModelSpec
from b2gmodel.live.latest import Latest, tell
from b2gmodel.live.stall import refuse_still_flights
from b2gmodel.live.trace import read_marks, start_tracing, stop_tracing
from b2gmodel.live.transport import Transport
from b2gmodel.records import Block, CalibrationPoint, CountersCheck, Estimate, LegTimes
from b2gmodel.stats import block_means, mean_interval, student_interval, warmup_length

_CHUNK_CYCLES: Final = 10
_MIN_CYCLES: Final = 40
_MAX_CYCLES: Final = 100_000
_BLOCKS: Final = 20
_LEVEL: Final = 0.95
_QUANTILES: Final = (0.05, 0.5, 0.95, 0.99)
_TRACED_CYCLES: Final = 20
_DISTURBANCE_PAIRS: Final = 5
_DISTURBANCE_CYCLES: Final = 6

Table = dict[str, list[Any]]
"""Columns of equal length."""


async def calibrate_point(
    transport: Transport,
    control: ControlPlane,
    model: ModelSpec,
    k: int,
    *,
    budget_s: float,
    precision: float,
    trace_file: Path | None,
    run_id: str,
    told: Callable[[float], None],
) -> tuple[CalibrationPoint, Table]:
    """Cycles of ``k`` requests until mean S and D are known to ``precision`` of the cycle, or ``budget_s`` is spent.

    Args:
        trace_file: where the server, on this host, writes its trace; None: the legs are split without it.
        told: called with the share of the way that is done.

    Raises:
        ServerError, EvidenceError: the server failed or stood still, somebody else used the model, or too few cycles
            fitted.
    """
    await transport.warm(1)
    # One batch may take as long as all of them together were given, and no longer.
    flight = SingleFlight(transport, control, model, k, run_id=run_id, flight_limit_s=budget_s)
    begin = time.monotonic()
    cycles: list[Cycle] = []
    stopped_by = None
    while stopped_by is None:
        cycles += await flight.run(_CHUNK_CYCLES if len(cycles) >= _MIN_CYCLES else _MIN_CYCLES // 4)
        elapsed_s = time.monotonic() - begin
        stopped_by, share = _stop(cycles, elapsed_s, budget_s, precision)
        tell(_latest(cycles, k))
        told(share)
    # The first cycles may well be slow: a server loads and tunes what it needs. A pause between two cycles, while
    # the counters are read, is in neither's time, so the times between deliveries are what is judged.
    refuse_still_flights([cycle.flight for cycle in cycles[_CHUNK_CYCLES - 1 :]], where=f"{model.name}, k = {k}")
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
            "disturbance": await measure_disturbance(flight),
            "legs": await measure_legs(flight, control, model, run_id, kept, trace_file),
        }
    )
    return point, _columns(cycles, len(cycles) - len(kept), k)


async def measure_disturbance(
    flight: SingleFlight, pairs: int = _DISTURBANCE_PAIRS, cycles: int = _DISTURBANCE_CYCLES
) -> Estimate:
    """How much longer a cycle is because the counters are read before it, relative, from alternating blocks."""
    differences = []
    for _ in range(pairs):
        read = np.mean([cycle.cycle_ns for cycle in await flight.run(cycles)])
        unread = np.mean([each.cycle_ns for each in await flight.run_unread(cycles)])
        differences.append(float(read / unread) - 1)
    interval = student_interval(np.array(differences), _LEVEL)
    return Estimate(mean=interval.mean, low=interval.low, high=interval.high, level=_LEVEL)


async def measure_legs(
    flight: SingleFlight,
    control: ControlPlane,
    model: ModelSpec,
    run_id: str,
    kept: Sequence[Cycle],
    trace_file: Path | None,
) -> LegTimes:
    """Median legs: of traced cycles of their own where the server's trace can be read, of the kept ones elsewhere."""
    if trace_file is None:
        return leg_times([split(cycle) for cycle in kept], None)
    await start_tracing(control, model.name)
    try:
        traced = await flight.run(_TRACED_CYCLES)
    finally:
        await stop_tracing(control, model.name)
    ids = [f"{run_id}.{cycle.flight.flight_id}" for cycle in traced]
    marks = read_marks(trace_file, ids)
    legs = [split(cycle, marks[batch_id]) for cycle, batch_id in zip(traced, ids, strict=True)]
    service_ns = sum(cycle.service_ns for cycle in traced)
    return leg_times(legs, sum(mark.service_ns for mark in marks.values()) / service_ns - 1)


def leg_times(legs: Sequence[Legs], trace_difference: float | None) -> LegTimes:
    """The median of each leg in seconds, None where it is absent; and how far from the cycle the legs' sum is."""

    def median_s(name: str) -> float | None:
        values = [getattr(each, name) for each in legs]
        return None if None in values else float(np.median(values)) / 1e9

    missed = [abs(each.residual_ns) / each.cycle_ns for each in legs]
    return LegTimes(
        cycles=len(legs),
        **{name.removesuffix("_ns") + "_s": median_s(name) for name in Legs.__slots__},
        residual_share=float(np.median(missed)),
        trace_difference=trace_difference,
    )


def _latest(cycles: Sequence[Cycle], k: int) -> Latest:
    """Means over the cycles just past."""
    cycle_s, service_s = series_s(cycles[-_MIN_CYCLES:]).mean(axis=0).tolist()
    return Latest(len(cycles), 1, k / cycle_s, service_s, cycle_s - service_s)


def _stop(cycles: Sequence[Cycle], elapsed_s: float, budget_s: float, precision: float) -> tuple[str | None, float]:
    """Why to stop (None: go on), and the share of the way there."""
    out_of_time = elapsed_s >= budget_s or len(cycles) >= _MAX_CYCLES
    spent = min(1.0, elapsed_s / budget_s)
    series = series_s(cycles)
    warmup = warmup_length(series[:, 0]) if len(cycles) >= _MIN_CYCLES else None
    if warmup is not None and len(cycles) - warmup >= _MIN_CYCLES // 2:
        kept = series[warmup:]
        widest = max(mean_interval(kept[:, 1]).half_width, mean_interval(kept[:, 0] - kept[:, 1]).half_width)
        share = widest / float(kept[:, 0].mean())
        if share <= precision:
            return "precision", 1.0
        # The half-width falls with the square root of the effort.
        spent = max(spent, min(0.95, (precision / share) ** 2))
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
    if not service_s.all():
        raise ServerError(
            "the server's counters book no time for an execution",
            observed="S = 0",
            allowed="> 0",
            where="model statistics",
            hint="without them S cannot be separated from D: does this server keep batch statistics?",
        )
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
    half = student_interval(of_blocks, _LEVEL).half_width
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
