"""(Prediction, Measurement) -> Verdict. No file, no clock; the same records give the same verdict.

Place: is M* among the best M? The regret 1 - X(M*) / max X, with an interval over sessions, against the bound that
the prediction itself set. A measurement too thin to tell is inconclusive, never held.
Height: the signed error of X(M) at each M, reported for each predictor; not a claim.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from b2gmodel.errors import EvidenceError
from b2gmodel.measured_diagnostics import of_measurement
from b2gmodel.records import (
    Check,
    Estimate,
    HeightScore,
    Measurement,
    Prediction,
    Verdict,
    digest_of,
)
from b2gmodel.stats import Interval, student_interval
from b2gmodel.usl import fit_usl

USL: Final = "usl (fitted)"
"""The Universal Scalability Law, fitted to the very measurement: a description to compare with, and no prediction."""

_USL_POINTS: Final = 4
_LEVEL: Final = 0.90
# "Not distinguishable from the peak" is a finding only where a difference of one and a half times the bound would
# have shown.
_WIDEST: Final = 3.0

Outcome = Literal["held", "refuted", "inconclusive"]


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """X(M) over sessions, requests a second; the interval is None with one session."""

    flights: int
    by_session: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.by_session))

    @property
    def interval(self) -> Interval | None:
        return student_interval(np.array(self.by_session), _LEVEL) if len(self.by_session) > 1 else None


def measured_curve(measurement: Measurement) -> tuple[MeasuredPoint, ...]:
    """X(M) of C3 and C4, in order of M."""
    found: dict[int, list[float]] = defaultdict(list)
    for session in measurement.sessions:
        for run in session.runs:
            if run.placement in ("C3", "C4"):
                found[run.flights].append(run.throughput_per_s)
    return tuple(MeasuredPoint(flights, tuple(found[flights])) for flights in sorted(found))


def measured_baseline(measurement: Measurement) -> float | None:
    """Mean throughput without batching (C1); None where it was not measured."""
    found = [run.throughput_per_s for session in measurement.sessions for run in session.runs if run.placement == "C1"]
    return float(np.mean(found)) if found else None


def judge(prediction: Prediction, measurement: Measurement) -> Verdict:
    """Score a measurement against the prediction that it was made for.

    Raises:
        EvidenceError: the measurement is of another prediction, or of something else than was predicted, or has
            failed requests or lacks M* or the planned M.
    """
    digest = digest_of(prediction)
    _check_evidence(prediction, digest, measurement)
    curve = measured_curve(measurement)
    predicted = prediction.predictors[0]
    at_m_star = next((point for point in curve if point.flights == predicted.m_star), None)
    if at_m_star is None:
        raise EvidenceError(
            "the measurement has no run at the predicted M*",
            observed=", ".join(str(point.flights) for point in curve),
            allowed=f"must hold {predicted.m_star}",
            where=measurement.name,
            hint="measure again with --flights that hold M*",
        )
    best = max(curve, key=lambda point: point.mean)
    others = [point for point in curve if point.flights != predicted.m_star]
    if not others:
        raise EvidenceError("the measurement holds one M alone: there is nothing to compare", where=measurement.name)
    rival = max(others, key=lambda point: point.mean)
    regret = _regret(at_m_star, rival)
    outcome, how = _place(regret, prediction.claims[0].bound, preregistered=measurement.preregistered)
    check = Check(
        name="M* is among the best M",
        outcome=outcome,
        observed=f"M* = {predicted.m_star}, best M = {best.flights}, {how}",
        bound=f"regret <= {prediction.claims[0].bound:.1%}",
    )
    heights = _heights(prediction, curve)
    return Verdict(
        prediction_digest=digest,
        measurement_digest=digest_of(measurement),
        preregistered=measurement.preregistered,
        outcome=outcome,
        m_star=predicted.m_star,
        best_flights=best.flights,
        regret=1 - at_m_star.mean / best.mean,
        regret_against_best_other=regret,
        checks=(check,),
        heights=heights,
        diagnostics=of_measurement(prediction, measurement),
        baseline_per_s=measured_baseline(measurement),
        sentence=_sentence(prediction, outcome, at_m_star, best),
    )


def _check_evidence(prediction: Prediction, digest: str, measurement: Measurement) -> None:
    if measurement.prediction_digest is not None and measurement.prediction_digest != digest:
        raise EvidenceError(
            "the measurement was made for another prediction",
            observed=measurement.prediction_digest,
            allowed=digest,
            where=measurement.name,
            hint="validate it against its own prediction",
        )
    if measurement.preregistered and measurement.prediction_digest is None:
        raise EvidenceError("a pre-registered measurement must name its prediction", where=measurement.name)
    for aspect in ("model", "transport", "k", "payload_bytes"):
        claimed, seen = getattr(prediction, aspect), getattr(measurement, aspect)
        if claimed != seen:
            raise EvidenceError(
                f"the measurement is of something else: its {aspect} differs",
                observed=str(seen),
                allowed=str(claimed),
                where=measurement.name,
            )
    failed = sum(run.failed or 0 for session in measurement.sessions for run in session.runs)
    if failed:
        raise EvidenceError(
            "flights failed during the measurement", observed=failed, allowed="0", where=measurement.name
        )


def _regret(at_m_star: MeasuredPoint, rival: MeasuredPoint) -> Estimate:
    """1 - X(M*) / X(rival), signed; each session's own ratio cancels what its runs have in common."""
    value = 1 - at_m_star.mean / rival.mean
    sessions = min(len(at_m_star.by_session), len(rival.by_session))
    if sessions < 2:
        return Estimate(mean=value)
    logs = np.log(np.array(at_m_star.by_session[:sessions]) / np.array(rival.by_session[:sessions]))
    interval = student_interval(logs, _LEVEL)
    return Estimate(
        mean=value, low=1 - float(np.exp(interval.high)), high=1 - float(np.exp(interval.low)), level=_LEVEL
    )


def _place(regret: Estimate, bound: float, *, preregistered: bool) -> tuple[Outcome, str]:
    """The outcome of the claim, and what it rests on; ``regret`` is signed, against the best of the other M."""
    if regret.low is None or regret.high is None:
        if preregistered:
            return "inconclusive", "one session has no interval: measure at least 2 sessions"
        outcome: Outcome = "held" if regret.mean <= bound else "refuted"
        return outcome, f"X(M*) is {-regret.mean:+.1%} against the best other M (the source states no interval)"
    interval = f"90 % interval {-regret.high:+.1%} to {-regret.low:+.1%}"
    how = f"X(M*) is {-regret.mean:+.1%} against the best other M ({interval})"
    if regret.high <= bound:
        return "held", how
    if regret.low > 0 and regret.mean > bound:
        return "refuted", how
    if regret.low <= 0 and regret.high - regret.low <= _WIDEST * bound:
        return "held", f"{how}: not distinguishable from the peak"
    return "inconclusive", f"{how}: too wide to tell, measure more sessions"


def _heights(prediction: Prediction, curve: Sequence[MeasuredPoint]) -> tuple[HeightScore, ...]:
    scores = []
    for predictor in prediction.predictors:
        if predictor.kind == "bounds":
            continue
        for point in curve:
            predicted = predictor.at(point.flights)
            if predicted is not None:
                scores.append(_score(predictor.name, point, predicted.throughput_per_s))
    return (*scores, *_usl_scores(curve))


def _usl_scores(curve: Sequence[MeasuredPoint]) -> list[HeightScore]:
    """Nothing where the law has too few points, or does not fit: it is a description alone."""
    if len(curve) < _USL_POINTS:
        return []
    try:
        law = fit_usl([point.flights for point in curve], [point.mean for point in curve])
    except EvidenceError:
        return []
    return [_score(USL, point, law.at(point.flights)) for point in curve]


def _score(name: str, point: MeasuredPoint, predicted_per_s: float) -> HeightScore:
    interval = point.interval
    return HeightScore(
        predictor=name,
        flights=point.flights,
        predicted_per_s=predicted_per_s,
        measured_per_s=point.mean,
        measured_low=interval.low if interval else None,
        measured_high=interval.high if interval else None,
        error=predicted_per_s / point.mean - 1,
    )


def _sentence(prediction: Prediction, outcome: Outcome, at_m_star: MeasuredPoint, best: MeasuredPoint) -> str:
    word = {"held": "held", "refuted": "is refuted", "inconclusive": "is neither held nor refuted"}[outcome]
    peak = f"the measured peak, {best.mean:.4g} request/s, is at M = {best.flights}"
    if best.flights != at_m_star.flights:
        peak += f", and M* gives {1 - at_m_star.mean / best.mean:.1%} less"
    place = prediction.predictors[0]
    promises = [
        f"{each} promised {promised.throughput_per_s:.4g}, {promised.throughput_per_s / at_m_star.mean:.2f} times"
        for each in dict.fromkeys((place.name, prediction.best.name))
        for promised in [prediction.predictor(each).at(place.m_star)]
        if promised is not None
    ]
    return (
        f"The predicted M* = {place.m_star} {word}: {peak}. At M* {at_m_star.mean:.4g} request/s were measured; "
        f"{' that; '.join(promises)} that."
    )
