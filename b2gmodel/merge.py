"""Calibrations of one thing, each of a session of its own, as one: its intervals hold what differs between starts.

Rules here: each session weighs alike, however many cycles it held; intervals are Student's over the sessions' means;
a coefficient of variation is that of cycles within a session, not of means; what one session lacks the whole lacks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, TypeVar

import numpy as np
from scipy.special import ndtri, stdtrit

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.records import (
    Block,
    Calibration,
    CalibrationPoint,
    ComputeLaw,
    ComputePoint,
    CountersCheck,
    Estimate,
    LegTimes,
    LoadedPoint,
    Record,
    TransportLaw,
    TransportPoint,
)
from b2gmodel.stats import student_interval

T = TypeVar("T")
R = TypeVar("R")

_LEVEL: Final = 0.95
_PREDICTED_LEVEL: Final = 0.90


def merged(calibrations: Sequence[Calibration]) -> Calibration:
    """One calibration over the sessions of several.

    Times are means of the sessions' means, and legs means of the sessions' medians. Quantiles are left out, as those
    of all cycles do not follow from each session's. The cycles' file is left to the caller: ``raw`` is None.

    Args:
        calibrations: of one session each, in order; a single one is returned as it is.

    Raises:
        UsageError: none, or they differ in model, server, transport, host, software, batch sizes or laws measured.
        EvidenceError: one of several sessions or of none, a session twice, or a point without times.
    """
    if not calibrations:
        raise UsageError("there is nothing to merge", observed="no calibration", allowed="at least one")
    first = calibrations[0]
    if len(calibrations) == 1:
        return first
    session_ids = _session_ids(calibrations)
    _check_alike(calibrations)
    notes = [note for each in calibrations for note in each.notes]
    return first.model_copy(
        update={
            # Times of different boots must not be compared, and without a boot in common there is none to name.
            "clock": first.clock if all(each.clock == first.clock for each in calibrations) else None,
            "session_ids": session_ids,
            "points": tuple(
                _point(points, first.name) for points in zip(*(each.points for each in calibrations), strict=True)
            ),
            "raw": None,
            "notes": (*dict.fromkeys(notes), _sessions_note(first, len(calibrations))),
        }
    )


def _session_ids(calibrations: Sequence[Calibration]) -> tuple[str, ...]:
    for each in calibrations:
        if len(each.session_ids) != 1:
            raise EvidenceError(
                "only calibrations of one session each can be merged",
                observed=f"{len(each.session_ids)} sessions",
                where=each.name,
            )
    session_ids = tuple(each.session_ids[0] for each in calibrations)
    if len(set(session_ids)) < len(session_ids):
        raise EvidenceError("a session would count twice", observed=", ".join(session_ids), where=calibrations[0].name)
    return session_ids


def _check_alike(calibrations: Sequence[Calibration]) -> None:
    expected = _facts(calibrations[0])
    for each in calibrations[1:]:
        facts = _facts(each)
        for name in expected | facts:
            if facts.get(name) != expected.get(name):
                raise UsageError(
                    f"the calibrations are not of one thing: they differ in {name}",
                    observed=str(facts.get(name)),
                    allowed=str(expected.get(name)),
                    where=each.name,
                    hint="merge calibrations of the same model on the same server, made in the same way",
                )


def _facts(calibration: Calibration) -> dict[str, object]:
    """What calibrations must share to be merged, by a name that can be shown."""
    facts: dict[str, object] = {
        "transport": calibration.transport,
        "batch sizes": [point.k for point in calibration.points],
    }
    for part in ("host", "software", "server", "model"):
        value: Record | None = getattr(calibration, part)
        facts |= {part: None} if value is None else {f"{part} {name}": each for name, each in value}
    if _is_embedded(calibration):
        # Each start of the embedded server has a name of its own.
        del facts["server name"]
    for point in calibration.points:
        facts |= {
            f"payload_bytes at k = {point.k}": point.payload_bytes,
            f"transport law at k = {point.k}": _form(point.transport_law),
            f"compute law at k = {point.k}": _form(point.compute_law),
        }
    return facts


def _is_embedded(calibration: Calibration) -> bool:
    return calibration.server is not None and calibration.server.embedded


def _form(law: TransportLaw | ComputeLaw | None) -> tuple[object, ...] | None:
    """What a law was measured at: all of it that is no result."""
    if law is None:
        return None
    flights = [point.flights for point in law.points]
    if isinstance(law, ComputeLaw):
        return law.k, flights
    return law.null_model, law.k, law.batch_bytes, flights, [point.null_flights for point in law.loaded]


def _sessions_note(calibration: Calibration, sessions: int) -> str:
    if _is_embedded(calibration):
        return f"calibrated over {sessions} starts of the server"
    return f"calibrated over {sessions} sessions of a server that was not started for them"


def _point(points: Sequence[CalibrationPoint], where: str) -> CalibrationPoint:
    first = points[0]
    cycle_s, service_s, transport_s = (
        _in_all([getattr(point, name) for point in points], _over_sessions)
        for name in ("cycle_s", "service_s", "transport_s")
    )
    blocks = _in_all([point.blocks for point in points], _blocks)
    if first.k is None or cycle_s is None or service_s is None or transport_s is None or blocks is None:
        raise EvidenceError(
            "the calibrations do not state what is merged",
            observed="no batch size, C, S, D or blocks",
            where=where,
            hint="merge calibrations that were made by b2g calibrate",
        )
    is_over_budget = any(point.stopped_by == "budget" for point in points)
    stopped_by: Literal["precision", "budget"] | None = "budget" if is_over_budget else first.stopped_by
    return CalibrationPoint(
        k=first.k,
        payload_bytes=first.payload_bytes,
        cycles=_in_all([point.cycles for point in points], sum),
        warmup_cycles=_in_all([point.warmup_cycles for point in points], sum),
        stopped_by=stopped_by,
        elapsed_s=_in_all([point.elapsed_s for point in points], math.fsum),
        cycle_s=cycle_s,
        service_s=service_s,
        transport_s=transport_s,
        queue_s=_in_all([point.queue_s for point in points], _over_sessions),
        transport_share=_share(points, 1.0 - service_s.mean / cycle_s.mean),
        throughput_per_s=first.k / cycle_s.mean,
        blocks=blocks,
        counters=_in_all([point.counters for point in points], _counters),
        disturbance=_in_all([point.disturbance for point in points], _over_sessions),
        legs=_in_all([point.legs for point in points], _legs),
        transport_law=_in_all([point.transport_law for point in points], _transport_law),
        compute_law=_in_all([point.compute_law for point in points], _compute_law),
    )


def _in_all(values: Iterable[T | None], combine: Callable[[list[T]], R]) -> R | None:
    """``combine`` of what every session has; None where one lacks it."""
    seen = list(values)
    known = [value for value in seen if value is not None]
    return combine(known) if len(known) == len(seen) else None


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _over_sessions(estimates: Sequence[Estimate]) -> Estimate:
    interval = student_interval(np.array([each.mean for each in estimates]), _LEVEL)
    return Estimate(
        mean=interval.mean,
        low=interval.low,
        high=interval.high,
        level=_LEVEL,
        cv=_in_all([_deviation(each) for each in estimates], lambda deviations: _cv(deviations, interval.mean)),
    )


def _deviation(estimate: Estimate) -> float | None:
    """Standard deviation of one session's cycles."""
    return None if estimate.cv is None else estimate.cv * abs(estimate.mean)


def _cv(deviations: Sequence[float], mean: float) -> float | None:
    return float(np.sqrt(np.mean(np.square(deviations)))) / abs(mean) if mean else None


def _share(points: Sequence[CalibrationPoint], value: float) -> Estimate | None:
    """Around the share that follows from the merged C and S, by the spread of the sessions' own shares."""
    own = _in_all([point.transport_share for point in points], _over_sessions)
    if own is None or own.low is None:
        return None
    half = own.mean - own.low
    return Estimate(mean=value, low=value - half, high=value + half, level=_LEVEL)


def _blocks(sessions: Sequence[tuple[Block, ...]]) -> tuple[Block, ...]:
    return tuple(
        block.model_copy(update={"session": number}) for number, blocks in enumerate(sessions) for block in blocks
    )


def _counters(checks: Sequence[CountersCheck]) -> CountersCheck:
    """Of the time booked in all sessions, and of the sums of all their cycles."""
    executions = sum(check.executions for check in checks)
    booked_s = math.fsum(check.executions * check.service_s for check in checks)
    summed_s = math.fsum(check.executions * check.service_s * (1 + check.relative_difference) for check in checks)
    return CountersCheck(
        executions=executions, service_s=booked_s / executions, relative_difference=summed_s / booked_s - 1
    )


def _legs(sessions: Sequence[LegTimes]) -> LegTimes:
    means = {
        name: _in_all([getattr(legs, name) for legs in sessions], _mean)
        for name in LegTimes.model_fields
        if name != "cycles"
    }
    return LegTimes.model_validate({"cycles": sum(legs.cycles for legs in sessions), **means})


def _transport_law(laws: Sequence[TransportLaw]) -> TransportLaw:
    return laws[0].model_copy(
        update={
            "points": tuple(_transport_point(points) for points in zip(*(law.points for law in laws), strict=True)),
            "loaded": tuple(_loaded_point(points) for points in zip(*(law.loaded for law in laws), strict=True)),
        }
    )


def _transport_point(points: Sequence[TransportPoint]) -> TransportPoint:
    """The inverse of the mean time a batch, as within one session, with what the sessions say of its spread."""
    flights, sessions = points[0].flights, len(points)
    between_s = np.array([1.0 / point.batches_per_s.mean for point in points])
    batches_per_s = 1.0 / float(between_s.mean())
    # Laws take a 95 % interval for 1.96 standard deviations and draw normal values. Student's own 95 % half-width for
    # two or three sessions would make those far too wide, so this is 1.96 standard errors times Student's over the
    # normal 95 % point, as in ``stats.bootstrap_means``: then 90 % of the draws are Student's 90 % interval.
    error = float(between_s.std(ddof=1)) / math.sqrt(sessions) * batches_per_s
    stretch = float(stdtrit(sessions - 1, 0.5 + _PREDICTED_LEVEL / 2) / ndtri(0.5 + _PREDICTED_LEVEL / 2))
    spread = float(ndtri(0.5 + _LEVEL / 2)) * error * stretch
    # Sessions that agree by chance know a rate no better than their own runs do.
    within = _in_all([_relative_half_width(point.batches_per_s) for point in points], _mean)
    spread = max(spread, (within or 0.0) / math.sqrt(sessions))
    cycle_s = flights / batches_per_s
    service_s = _mean(point.service_s for point in points)
    queue_s = _mean(point.queue_s for point in points)
    return TransportPoint(
        flights=flights,
        batches_per_s=Estimate(
            mean=batches_per_s,
            low=batches_per_s * (1 - spread),
            high=batches_per_s * (1 + spread),
            level=_LEVEL,
        ),
        cycle_s=cycle_s,
        service_s=service_s,
        queue_s=queue_s,
        transport_s=cycle_s - service_s - queue_s,
    )


def _relative_half_width(rate: Estimate) -> float | None:
    return None if rate.low is None or rate.high is None else (rate.high - rate.low) / 2 / rate.mean


def _loaded_point(points: Sequence[LoadedPoint]) -> LoadedPoint:
    return LoadedPoint(
        null_flights=points[0].null_flights,
        cycles=sum(point.cycles for point in points),
        service_s=_mean(point.service_s for point in points),
    )


def _compute_law(laws: Sequence[ComputeLaw]) -> ComputeLaw:
    return ComputeLaw(
        k=laws[0].k,
        points=tuple(
            ComputePoint(flights=points[0].flights, service_s=_mean(point.service_s for point in points))
            for points in zip(*(law.points for law in laws), strict=True)
        ),
    )
