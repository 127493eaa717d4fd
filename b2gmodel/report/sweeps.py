"""Published concurrency sweeps against what single-flight predicts: the row at concurrency 1 in, a score out.

Rules here: a prediction is made from the row at concurrency 1 alone, and no rate between measured concurrencies is
interpolated. What later rows say about the server goes into :func:`reasons`, in words, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, ValidationError

from b2gmodel.errors import EvidenceError
from b2gmodel.foreign.single_flight import NO_PAYLOAD, model_info, single_flight
from b2gmodel.prediction import REGRET_BOUND, predict
from b2gmodel.predictors import CLOSED_FORM, MVA, TWICE_INSTANCES
from b2gmodel.records import Calibration, Positive, Prediction, Record
from b2gmodel.store import read_bytes

NEAR_PEAK: Final = 0.05
"""A concurrency is near the peak with a throughput at most this much below it; M* holds where it is near the peak."""

HEIGHT_BOUND: Final = 0.05
"""A height holds where it is at most this far from the measured one."""

PREDICTORS: Final = (CLOSED_FORM, MVA, TWICE_INSTANCES)

_US: Final = 1e-6
# What is worth a word: instances this idle, S changed by this much, a lone request queued for this much of S, X fallen.
_IDLE: Final = 0.9
_CHANGED: Final = 0.02
_QUEUED: Final = 0.1
_FELL: Final = 0.1

Times = Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


class SweepPoint(Record):
    """One row as published: throughput in requests a second, mean times of a request in microseconds."""

    concurrency: Annotated[int, Field(ge=1)]
    throughput_infer_per_s: Positive
    latency_avg_us: Times
    p50_us: Times
    p95_us: Times
    p99_us: Times
    server_queue_us: Times
    compute_input_us: Times
    compute_infer_us: Times
    compute_output_us: Times
    server_overhead_us: Times
    client_send_us: Times
    network_us: Times
    client_recv_us: Times

    @property
    def service_s(self) -> float | None:
        """S in seconds: compute input, infer and output, of which a source may state only the lump, as infer."""
        if self.compute_infer_us is None:
            return None
        return (self.compute_infer_us + (self.compute_input_us or 0.0) + (self.compute_output_us or 0.0)) * _US


class Sweep(Record):
    """A published sweep over the concurrency of one client; each request of ``batch_size`` inferences is a batch."""

    id: str
    source: str
    tool: str
    server: str
    model: str
    hardware: str | None
    protocol: str | None
    batch_size: Annotated[int, Field(ge=1)]
    instances: Annotated[int, Field(ge=1)] | None
    instances_inferred: bool
    dynamic_batching: bool | None
    shared_memory: str | None
    colocated: bool | None
    percentile_or_avg: str
    points: Annotated[tuple[SweepPoint, ...], Field(min_length=1)]
    notes: str
    server_run_average_us: dict[str, float] | None = None

    @property
    def alone(self) -> SweepPoint | None:
        """The row at concurrency 1, or None."""
        return self.at(1)

    @property
    def peak(self) -> SweepPoint:
        """The row of the highest throughput."""
        return max(self.points, key=lambda point: point.throughput_infer_per_s)

    def at(self, concurrency: int) -> SweepPoint | None:
        """The row measured at that concurrency, or None."""
        return next((point for point in self.points if point.concurrency == concurrency), None)


class Sweeps(Record):
    """The file of published sweeps: those with a server-side breakdown, and those without."""

    about: str
    sweeps: tuple[Sweep, ...]
    throughput_only: tuple[Sweep, ...]


@dataclass(frozen=True, slots=True)
class Near:
    """The measured throughput at or around a concurrency. ``low`` and ``high`` are the same row where it was measured.

    Attributes:
        flights: the concurrency asked about.
        low, high: nearest measured concurrency at most and at least that, with how far its throughput lies below the
            peak, as a share of the peak; None where nothing was measured on that side.
    """

    flights: int
    low: tuple[int, float] | None
    high: tuple[int, float] | None

    @property
    def regret(self) -> float | None:
        """Share of the peak that is lost at that very concurrency; None where it was not measured."""
        return self.low[1] if self.low is not None and self.low[0] == self.flights else None


@dataclass(frozen=True, slots=True)
class Score:
    """One sweep, predicted from its row at concurrency 1 and compared with its curve.

    Attributes:
        sweep: as published.
        prediction: from that row alone.
        smallest_near: the smallest measured concurrency within 5 % of the peak.
        at_m_star, at_twice: the measured curve around the closed form's M* and the rule's M = 2 g.
        errors: for each predictor, predicted over measured - 1 at each measured concurrency.
    """

    sweep: Sweep
    prediction: Prediction
    smallest_near: int
    at_m_star: Near
    at_twice: Near
    errors: dict[str, dict[int, float]]

    @property
    def m_star(self) -> int:
        return self.prediction.predictor(CLOSED_FORM).m_star

    @property
    def height_per_s(self) -> float:
        """The closed form at the concurrency of the measured peak, requests a second."""
        point = self.prediction.predictor(CLOSED_FORM).at(self.sweep.peak.concurrency)
        assert point is not None
        return point.throughput_per_s

    @property
    def peak_error(self) -> float:
        """Of the closed form, at the concurrency of the measured peak."""
        return self.errors[CLOSED_FORM][self.sweep.peak.concurrency]

    @property
    def is_place_held(self) -> bool | None:
        """Whether M* loses at most the claimed share of the peak; None where M* was not measured."""
        regret = self.at_m_star.regret
        return None if regret is None else regret <= REGRET_BOUND

    @property
    def is_height_held(self) -> bool:
        return abs(self.peak_error) <= HEIGHT_BOUND

    @property
    def errors_beyond_one(self) -> list[float]:
        """Of the closed form, at each measured concurrency of 2 or more."""
        return [error for flights, error in self.errors[CLOSED_FORM].items() if flights > 1]


def read_sweeps(path: Path) -> Sweeps:
    """The published sweeps. Raises ``UsageError`` where they cannot be read, ``EvidenceError`` where malformed."""
    try:
        return Sweeps.model_validate_json(read_bytes(path))
    except ValidationError as error:
        first = error.errors()[0]
        raise EvidenceError(
            "this is no file of published sweeps",
            observed=f"{'.'.join(map(str, first['loc']))}: {first['msg']}",
            where=str(path),
        ) from error


def missing(sweep: Sweep) -> str | None:
    """What the closed form needs and the row at concurrency 1 does not state; None where it states all."""
    alone = sweep.alone
    if alone is None:
        return "no row at concurrency 1"
    if alone.service_s is None:
        return "no compute time at concurrency 1"
    if alone.latency_avg_us is None:
        return "no mean latency at concurrency 1"
    return None


def calibration_of(sweep: Sweep) -> Calibration:
    """The row at concurrency 1 as single-flight: means alone, no law. Raises ``EvidenceError`` if it lacks C or S."""
    alone, lack = sweep.alone, missing(sweep)
    if alone is None or alone.service_s is None or alone.latency_avg_us is None:
        raise EvidenceError("the sweep cannot be predicted", observed=lack, where=sweep.id)
    queue_us = alone.server_queue_us
    return single_flight(
        name=f"public-{sweep.id}",
        source=sweep.source,
        model=model_info(sweep.model, instances=sweep.instances, dynamic_batching=sweep.dynamic_batching),
        transport=sweep.protocol,
        k=sweep.batch_size,
        cycle_s=alone.latency_avg_us * _US,
        service_s=alone.service_s,
        queue_s=None if queue_us is None else queue_us * _US,
        throughput_per_s=alone.throughput_infer_per_s,
        notes=(f"{sweep.server} on {sweep.hardware or 'hardware not stated'}, by {sweep.tool}", NO_PAYLOAD),
    )


def score(sweep: Sweep) -> Score:
    """Predict from the row at concurrency 1, then compare. Raises ``EvidenceError`` as :func:`calibration_of`."""
    flights = [point.concurrency for point in sweep.points]
    prediction = predict(calibration_of(sweep), flights=flights, draws=0)
    errors = {}
    for name in PREDICTORS:
        result = prediction.predictor(name)
        errors[name] = {
            point.concurrency: predicted.throughput_per_s / point.throughput_infer_per_s - 1
            for point in sweep.points
            if (predicted := result.at(point.concurrency)) is not None
        }
    least = (1 - NEAR_PEAK) * sweep.peak.throughput_infer_per_s
    return Score(
        sweep=sweep,
        prediction=prediction,
        smallest_near=min(p.concurrency for p in sweep.points if p.throughput_infer_per_s >= least),
        at_m_star=near(sweep, prediction.predictor(CLOSED_FORM).m_star),
        at_twice=near(sweep, prediction.predictor(TWICE_INSTANCES).m_star),
        errors=errors,
    )


def near(sweep: Sweep, flights: int) -> Near:
    """The measured throughput at or around ``flights``, against the peak; nothing is interpolated."""
    peak = sweep.peak.throughput_infer_per_s
    losses = {point.concurrency: 1 - point.throughput_infer_per_s / peak for point in sweep.points}
    below = max((m for m in losses if m <= flights), default=None)
    above = min((m for m in losses if m >= flights), default=None)
    return Near(
        flights,
        low=None if below is None else (below, losses[below]),
        high=None if above is None else (above, losses[above]),
    )


def reasons(scored: Score) -> tuple[str, ...]:
    """Why the closed form breaks, or could: a clause each, with the evidence of the sweep's later rows.

    Requests in service at once on an instance are X S / g by Little's law, with S as the server booked it for a
    request; the server books the whole of an execution to each request in it, so more than one means merging.
    """
    sweep, alone, peak = scored.sweep, scored.sweep.alone, scored.sweep.peak
    alone_s, cycle_s = scored.prediction.service_s, scored.prediction.cycle_s
    assert alone is not None
    assert alone_s is not None
    assert cycle_s is not None
    instances = sweep.instances or 1
    later = [(p, p.service_s) for p in sweep.points if p.concurrency > 1 and p.service_s is not None]
    # While no more requests are in flight than there are instances, the server has none to merge.
    unmerged = [(p, s) for p, s in later if not sweep.dynamic_batching or p.concurrency <= instances]
    found = []
    if sweep.dynamic_batching and later:
        row, row_s = _nearest(later, peak.concurrency)
        together = row.throughput_infer_per_s * row_s / instances
        found.append(
            f"dynamic batching: at M = {row.concurrency}, {together:.1f} requests were in service at once on an "
            f"instance, in {row_s / alone_s:.1f} times S alone: "
            f"{together * alone_s / row_s:.2f} times the rate of lone requests"
        )
    elif sweep.dynamic_batching:
        found.append("dynamic batching is on, and no later row shows how much it merged")
    if alone.server_queue_us is not None and alone.server_queue_us * _US > _QUEUED * alone_s:
        found.append(
            f"a lone request waits {alone.server_queue_us / 1e3:.1f} ms in the server's queue for others, which counts "
            "as transport here"
        )
    if unmerged:
        row, row_s = _nearest(unmerged, peak.concurrency)
        change = row_s / alone_s - 1
        if abs(change) > _CHANGED:
            on = f" on {instances} instances" if instances > 1 else ""
            word = "longer" if change > 0 else "shorter"
            found.append(f"at M = {row.concurrency}{on}, S is {percent(abs(change), 0)} {word} than alone")
    busy = peak.throughput_infer_per_s * alone_s / instances
    if not later and busy < _IDLE:
        found.append(f"at the peak the instances are busy {percent(busy, 0)} of the time at most: they do not limit it")
    if sweep.colocated is False:
        found.append(
            f"the client is remote: {percent(1 - alone_s / cycle_s, 0)} of C is taken for a delay, but requests share "
            "the link"
        )
    last = sweep.points[-1]
    fall = 1 - last.throughput_infer_per_s / peak.throughput_infer_per_s
    if fall > _FELL:
        found.append(
            f"X falls by {percent(fall, 0)} from M = {peak.concurrency} to {last.concurrency}, which no predictor says"
        )
    found += [f"the prediction itself warns: {each.name}" for each in scored.prediction.diagnostics]
    return tuple(found)


def percent(share: float, digits: int = 1, sign: str = "") -> str:
    """A share in per cent, as the documents write it."""
    return f"{100 * share:{sign}.{digits}f} %"


def _nearest(rows: Sequence[tuple[SweepPoint, float]], concurrency: int) -> tuple[SweepPoint, float]:
    return min(rows, key=lambda row: abs(row[0].concurrency - concurrency))
