"""(Prediction, Measurement) -> Verdict. No file, no clock; the same records give the same verdict, byte for byte.

Each claim of the prediction is held where its whole interval over sessions lies within its bound, refuted where it
lies beyond, and inconclusive otherwise: never held by default, and wrongly held or wrongly refuted in 5 % of cases at
most. The verdict is that of its worst claim, and invalid where the evidence fails. Figures are kept to six digits,
which is more than sessions can tell.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import numpy as np

from b2gmodel.errors import EvidenceError
from b2gmodel.evidence import examine, refuse_foreign
from b2gmodel.measured import MeasuredPoint, measured_baseline, measured_curve
from b2gmodel.measured_diagnostics import of_measurement
from b2gmodel.placement_scores import placement_score
from b2gmodel.records import Check, Claim, Estimate, EvidenceCheck, Measurement, Prediction, Verdict, digest_of
from b2gmodel.scores import (
    SessionLogs,
    confidence_set,
    height_scores,
    predictor_scores,
    regret,
    regret_limits,
    smallest_near_peak,
)

_RISK: Final = 0.05
_MOST_SESSIONS: Final = 1000
_DIGITS: Final = 6

Outcome = Literal["held", "refuted", "inconclusive"]
Decide = Callable[[int], Outcome]
"""The outcome, were there so many more sessions with the same means and spreads."""

_WORST_FIRST: Final[tuple[Outcome, ...]] = ("refuted", "inconclusive", "held")


def judge(prediction: Prediction, measurement: Measurement) -> Verdict:
    """Score a measurement against the prediction that it was made for.

    Raises:
        EvidenceError: the measurement is of another prediction, or of something else than was predicted, or lacks
            M* or anything to compare it with.
    """
    digest = digest_of(prediction)
    refuse_foreign(prediction, digest, measurement)
    curve = measured_curve(measurement)
    m_star = prediction.predictor(prediction.claims[0].predictor).m_star
    at_m_star = _at(curve, m_star, measurement.name)
    others = [point for point in curve if point is not at_m_star]
    if not others:
        raise EvidenceError("the measurement holds one M alone: there is nothing to compare", where=measurement.name)
    against = SessionLogs.of([point.log_ratios(at_m_star) for point in others])
    best = max(curve, key=lambda point: point.mean)
    evidence = examine(prediction, measurement)
    failed = [check for check in evidence if check.outcome == "failed"]
    the_set = confidence_set(curve, prediction.seed)
    checks = () if failed else tuple(
        _place(claim, against, m_star, curve, the_set, measurement) if claim.quantity == "regret_at_m_star"
        else _height(claim, prediction, at_m_star, measurement)
        for claim in prediction.claims
    )  # fmt: skip
    heights = height_scores(prediction, curve)
    verdict = Verdict(
        prediction_digest=digest,
        measurement_digest=digest_of(measurement),
        preregistered=measurement.preregistered,
        outcome="invalid" if failed else min((check.outcome for check in checks), key=_WORST_FIRST.index),
        sessions=len(measurement.sessions),
        m_star=m_star,
        best_flights=best.flights,
        m_95=smallest_near_peak(curve),
        confidence_set=the_set,
        regret=regret(against),
        checks=checks,
        evidence=evidence,
        heights=heights,
        scores=() if failed else predictor_scores(prediction, curve, heights),
        placement=placement_score(measurement),
        diagnostics=of_measurement(prediction, measurement),
        baseline_per_s=measured_baseline(measurement),
        sentence=_invalid(failed) if failed else _sentence(prediction, checks, at_m_star, best),
    )
    return Verdict.model_validate(_rounded(verdict.model_dump()))


def _at(curve: Sequence[MeasuredPoint], m_star: int, name: str) -> MeasuredPoint:
    found = next((point for point in curve if point.flights == m_star), None)
    if found is None:
        raise EvidenceError(
            "the measurement has no run at the predicted M*",
            observed=", ".join(str(point.flights) for point in curve),
            allowed=f"must hold {m_star}",
            where=name,
            hint="measure again with --flights that hold M*",
        )
    return found


def _place(
    claim: Claim,
    against: SessionLogs,
    m_star: int,
    curve: Sequence[MeasuredPoint],
    the_set: tuple[int, ...] | None,
    measurement: Measurement,
) -> Check:
    """The regret of M* against the best M of all that were measured."""
    seen, bound = regret(against), -math.log1p(-claim.bound)

    def decide(extra: int) -> Outcome:
        low, high = regret_limits(against, extra)
        return "held" if high <= bound else "refuted" if low > bound else "inconclusive"

    best = max(curve, key=lambda point: point.mean)
    outcome, more, doubt = _decided(decide, seen, claim.bound, int(np.min(against.counts)), measurement)
    of_set = "" if the_set is None else f", best M within {{{', '.join(map(str, the_set))}}}"
    return Check(
        name="M* is among the best M",
        predictor=claim.predictor,
        outcome=outcome,
        observed=f"M* = {m_star}, best M = {best.flights}{of_set}; regret {_percent(seen)}{doubt}",
        bound=f"regret <= {claim.bound:.1%}",
        more_sessions=more,
    )


def _height(claim: Claim, prediction: Prediction, at_m_star: MeasuredPoint, measurement: Measurement) -> Check:
    """Two one-sided tests (Schuirmann 1987) on the sessions' log(predicted / measured) at M*."""
    promised = prediction.predictor(claim.predictor).at(at_m_star.flights)
    if promised is None:
        raise EvidenceError(
            "the predictor whose height is claimed says nothing at M*", where=f"{prediction.name}, {claim.predictor}"
        )
    logs = SessionLogs.of([[math.log(promised.throughput_per_s / x) for x in at_m_star.by_session]])
    error = float(logs.means[0])

    def decide(extra: int) -> Outcome:
        low, high = float(logs.below(_RISK, extra)[0]), float(logs.above(_RISK, extra)[0])
        if -claim.bound <= low and high <= claim.bound:
            return "held"
        # Noise may err on either side, so that each has half of the risk of refuting what is right.
        low, high = float(logs.below(_RISK / 2, extra)[0]), float(logs.above(_RISK / 2, extra)[0])
        return "refuted" if low > claim.bound or high < -claim.bound else "inconclusive"

    sessions = int(logs.counts[0])
    seen = Estimate(mean=math.expm1(error))
    if sessions > 1:
        low, high = float(logs.below(_RISK)[0]), float(logs.above(_RISK)[0])
        seen = Estimate(mean=seen.mean, low=math.expm1(low), high=math.expm1(high), level=1 - 2 * _RISK)
    distance = Estimate(mean=abs(error))
    outcome, more, doubt = _decided(decide, distance, claim.bound, sessions, measurement)
    return Check(
        name="X(M*) is as high as predicted",
        predictor=claim.predictor,
        outcome=outcome,
        observed=f"{promised.throughput_per_s:.4g} promised, {at_m_star.mean:.4g} request/s measured: "
        f"{_percent(seen, '+')}{doubt}",
        bound=f"{math.expm1(-claim.bound):+.1%} to {math.expm1(claim.bound):+.1%}",
        more_sessions=more,
    )


def _decided(
    decide: Decide, seen: Estimate, bound: float, sessions: int, measurement: Measurement
) -> tuple[Outcome, int | None, str]:
    """The outcome, how many more sessions it needs, and the words for that.

    One session has no interval: what was not pre-registered counts as its source states it, anything else is open.
    """
    if sessions < 2:
        if measurement.preregistered:
            return "inconclusive", 1, "; one session has no interval: needs at least 1 more"
        return ("held" if seen.mean <= bound else "refuted"), None, " (the source states no interval)"
    outcome = decide(0)
    if outcome != "inconclusive":
        return outcome, None, ""
    more = next((n for n in range(1, _MOST_SESSIONS + 1) if decide(n) != "inconclusive"), None)
    if more is None:
        return outcome, None, f"; too close to the bound for {_MOST_SESSIONS} more sessions"
    return outcome, more, f"; needs about {more} more session{'s' if more > 1 else ''}"


def _percent(seen: Estimate, sign: str = "") -> str:
    text = f"{seen.mean:{sign}.1%}"
    return text if seen.low is None or seen.high is None else f"{text} [{seen.low:{sign}.1%}, {seen.high:{sign}.1%}]"


def _sentence(prediction: Prediction, checks: Sequence[Check], at_m_star: MeasuredPoint, best: MeasuredPoint) -> str:
    """Place and height in plain words; a height that no claim is about is told beside what was measured."""
    word = {"held": "held", "refuted": "is refuted", "inconclusive": "is neither held nor refuted"}
    peak = f"the measured peak, {best.mean:.4g} request/s, is at M = {best.flights}"
    if best is not at_m_star:
        peak += f", and M* gives {1 - at_m_star.mean / best.mean:.1%} less"
    place = f"The predicted M* = {at_m_star.flights} {word[checks[0].outcome]}: {peak}."
    claimed = {check.predictor: check for check, claim in zip(checks, prediction.claims, strict=True)
               if claim.quantity == "height_error_at_m_star"}  # fmt: skip
    heights = []
    for name in claimed or [checks[0].predictor]:
        promised = prediction.predictor(name).at(at_m_star.flights)
        assert promised is not None
        error = promised.throughput_per_s / at_m_star.mean - 1
        told = f"{name} promised {promised.throughput_per_s:.4g} and {at_m_star.mean:.4g} were measured at M*"
        told += f", {abs(error):.1%} too {'high' if error > 0 else 'low'}"
        heights.append(
            f"{told}: {word[claimed[name].outcome].removeprefix('is ')}"
            if name in claimed
            else f"{told}; no claim was made of it"
        )
    return f"{place} The height: {'; '.join(heights)}."


def _invalid(failed: Sequence[EvidenceCheck]) -> str:
    reasons = "; ".join(f"{check.name}: {check.observed}, allowed: {check.bound}" for check in failed)
    return f"The evidence fails, and nothing is judged. {reasons}."


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return tuple(_rounded(each) for each in value) if isinstance(value, tuple | list) else value
