"""What a statistician would have asked for in advance: scores of each predictor, and of the measured place of the peak.

Rules here: sessions are the units, and what is relative is relative to the measured X(M). Scores of a predictor are
over M > 1: X(1) is what its calibration measured. What is resampled is seeded. Nothing here decides: ``judge`` does.

The 19 predicted quantiles of X(M) are taken for an ensemble of equal weights, and the j-th quantiles of all M for its
j-th curve: comonotone, as one calibration error moves the whole curve. A predictor without quantiles is one curve,
whose CRPS is its absolute error. Gneiting and Raftery (2007), JASA 102, 359-378: interval, CRPS and energy score.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import betaincinv, ndtr, stdtrit

from b2gmodel.errors import EvidenceError
from b2gmodel.laws import Floats
from b2gmodel.measured import LEVEL, MeasuredPoint
from b2gmodel.records import CurvePoint, Estimate, HeightScore, Prediction, PredictorResult, PredictorScore, Verdict
from b2gmodel.usl import fit_usl

USL: Final = "usl (fitted)"
"""The Universal Scalability Law, fitted to the very measurement: a description to compare with, and no prediction."""
CONSTANT: Final = "best constant"
"""The one X for all M > 1 with the least mean relative error: it saw the answer, and shows what a flat curve gives."""
RIVAL: Final = "twice-instances"

MCS_SESSIONS: Final = 5
_MCS_RESAMPLES: Final = 1000
_USL_POINTS: Final = 4


@dataclass(frozen=True, slots=True, eq=False)
class SessionLogs:
    """Log ratios over sessions, one row of figures a comparison: their means, deviations and numbers.

    Attributes:
        means, deviations, counts: shape ``[comparisons]``; a deviation is NaN where there is one session.
    """

    means: Floats
    deviations: Floats
    counts: Floats

    @classmethod
    def of(cls, samples: Sequence[Sequence[float]]) -> SessionLogs:
        """Raises ``EvidenceError`` for a comparison without a session."""
        if not samples or not all(samples):
            raise EvidenceError("no session ran both of what is compared", allowed="at least one")
        return cls(
            np.array([np.mean(each) for each in samples]),
            np.array([np.std(each, ddof=1) if len(each) > 1 else math.nan for each in samples]),
            np.array([len(each) for each in samples], dtype=float),
        )

    def below(self, risk: float, extra: int = 0) -> Floats:
        """Student's lower limits, each exceeded by its mean's truth with probability 1 - ``risk``."""
        return self.means - self._half(risk, extra)

    def above(self, risk: float, extra: int = 0) -> Floats:
        """Student's upper limits; ``extra`` more sessions are taken to have the same mean and spread."""
        return self.means + self._half(risk, extra)

    def _half(self, risk: float, extra: int) -> Floats:
        n = self.counts + extra
        return np.asarray(stdtrit(n - 1, 1 - risk) * self.deviations / np.sqrt(n))


def regret_limits(against_m_star: SessionLogs, extra: int = 0) -> tuple[float, float]:
    """Limits of max log X(M) / X(M*), each with a risk of 5 %; NaN with one session.

    Above: the largest of the upper limits, which need no correction, as the best M's own is among them. Below: the
    largest of the lower limits, each at its share of the risk (Bonferroni), so that picking the best M of several
    after the fact does not make M* look worse than it is.
    """
    risk = (1 - LEVEL) / 2
    low = against_m_star.below(risk / len(against_m_star.means), extra)
    return max(0.0, float(np.max(low))), max(0.0, float(np.max(against_m_star.above(risk, extra))))


def regret(against_m_star: SessionLogs) -> Estimate:
    """1 - X(M*) / max X, with its 90 % interval where there are sessions enough for one."""
    mean = -math.expm1(-max(0.0, float(np.max(against_m_star.means))))
    if np.min(against_m_star.counts) < 2:
        return Estimate(mean=mean)
    low, high = regret_limits(against_m_star)
    return Estimate(mean=mean, low=-math.expm1(-low), high=-math.expm1(-high), level=LEVEL)


def smallest_near_peak(curve: Sequence[MeasuredPoint], share: float = 0.95) -> int:
    """The smallest measured M with that share of the measured peak."""
    peak = max(point.mean for point in curve)
    return next(point.flights for point in curve if point.mean >= share * peak)


def confidence_set(curve: Sequence[MeasuredPoint], seed: int) -> tuple[int, ...] | None:
    """The M that cannot be told from the best: the model confidence set of Hansen, Lunde and Nason (2011), 90 %.

    Losses are -log X(M); sessions are resampled as wholes. The test's size is narrowed so that for two M it is
    Student's at 10 %, as a bootstrap of few sessions spreads too little. None below ``MCS_SESSIONS`` sessions that
    ran every M (docs/adr/0008-sessions-judge.md).
    """
    whole = sorted(set.intersection(*(set(point.sessions) for point in curve)))
    n = len(whole)
    if n < MCS_SESSIONS or len(curve) < 2:
        return None
    from arch.bootstrap import MCS

    by_session = [dict(zip(point.sessions, point.by_session, strict=True)) for point in curve]
    losses = -np.log(np.array([[each[session] for each in by_session] for session in whole]))
    # Equal runs have no spread to divide by: a spread far below any clock's resolution keeps the ratios finite.
    losses += np.random.default_rng(seed).normal(scale=1e-9, size=losses.shape)
    quantile = float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * math.sqrt(n / (n - 1))
    found = MCS(losses, 2 * float(ndtr(-quantile)), reps=_MCS_RESAMPLES, block_size=1, bootstrap="circular", seed=seed)
    found.compute()
    return tuple(curve[int(str(index))].flights for index in found.included)


def clopper_pearson(hits: int, trials: int) -> Estimate:
    """The share of hits with its exact 90 % interval (Clopper and Pearson 1934); trials taken for independent."""
    risk = (1 - LEVEL) / 2
    low = 0.0 if hits == 0 else float(betaincinv(hits, trials - hits + 1, risk))
    high = 1.0 if hits == trials else float(betaincinv(hits + 1, trials - hits, 1 - risk))
    return Estimate(mean=hits / trials, low=low, high=high, level=LEVEL)


def height_scores(prediction: Prediction, curve: Sequence[MeasuredPoint]) -> tuple[HeightScore, ...]:
    """Signed error and CRPS at each measured M of each predictor but the bounds; the fitted law last."""
    scores = [
        _height(predictor.name, point, predicted.throughput_per_s, _crps(predicted, point.mean))
        for predictor in prediction.predictors
        if predictor.kind != "bounds"
        for point in curve
        for predicted in [predictor.at(point.flights)]
        if predicted is not None
    ]
    if len(curve) >= _USL_POINTS:
        try:
            law = fit_usl([point.flights for point in curve], [point.mean for point in curve])
        except EvidenceError:
            return tuple(scores)  # it does not fit, and is a description alone
        scores += [_height(USL, point, law.at(point.flights), None) for point in curve]
    return tuple(scores)


def _height(name: str, point: MeasuredPoint, predicted_per_s: float, crps_per_s: float | None) -> HeightScore:
    interval = point.interval
    return HeightScore(
        predictor=name,
        flights=point.flights,
        predicted_per_s=predicted_per_s,
        measured_per_s=point.mean,
        measured_low=interval.low if interval else None,
        measured_high=interval.high if interval else None,
        error=predicted_per_s / point.mean - 1,
        crps_per_s=crps_per_s,
    )


def _crps(predicted: CurvePoint, measured_per_s: float) -> float:
    import scoringrules

    return float(
        scoringrules.crps_ensemble(measured_per_s, np.array(predicted.quantiles or [predicted.throughput_per_s]))
    )


def predictor_scores(
    prediction: Prediction, curve: Sequence[MeasuredPoint], heights: Sequence[HeightScore]
) -> tuple[PredictorScore, ...]:
    """A line a predictor, and one each for what was fitted to the measurement itself.

    The measured means' own noise counts against intervals, which are of the true X(M).
    """
    scored = [point for point in curve if point.flights > 1]
    by_name: dict[str, list[HeightScore]] = defaultdict(list)
    for height in heights:
        if height.flights > 1:
            by_name[height.predictor].append(height)
    constant = _best_constant(scored)
    crps = {name: _relative_crps(each) for name, each in by_name.items()}
    crps[CONSTANT] = constant.crps
    lines = [_score_one(predictor, curve, scored, by_name[predictor.name]) for predictor in prediction.predictors]
    if USL in by_name:
        lines.append(_fitted(USL, [height.error for height in by_name[USL]]))
    lines.append(constant)
    return tuple(with_skills(line, crps.get(RIVAL), constant.crps) for line in lines)


def with_skills(line: PredictorScore, rival_crps: float | None, constant_crps: float | None) -> PredictorScore:
    """The line with its skill against both rivals, in CRPS; None where either has none, or the rival is exact."""
    return line.model_copy(
        update={
            "skill_twice_instances": _skill(line.crps, rival_crps),
            "skill_constant": _skill(line.crps, constant_crps),
        }
    )


def _skill(crps: float | None, rivals: float | None) -> float | None:
    return None if crps is None or not rivals else 1 - crps / rivals


def _score_one(
    predictor: PredictorResult,
    curve: Sequence[MeasuredPoint],
    scored: Sequence[MeasuredPoint],
    heights: Sequence[HeightScore],
) -> PredictorScore:
    pairs = [(promised, point.mean) for point in scored if (promised := predictor.at(point.flights)) is not None]
    spans = [(x.low, x.high, mean) for x, mean in pairs if x.low is not None and x.high is not None]
    covered = sum(low <= mean <= high for low, high, mean in spans) if spans else None
    means = {point.flights: point.mean for point in curve}
    at_its_own = means.get(predictor.m_star)
    return PredictorScore(
        predictor=predictor.name,
        kind=predictor.kind,
        points=len(pairs),
        regret=None if at_its_own is None else 1 - at_its_own / max(means.values()),
        mape=_mean([abs(height.error) for height in heights]),
        covered=covered,
        coverage=None if covered is None else clopper_pearson(covered, len(spans)),
        interval_score=_interval_score(spans) if predictor.level is not None else None,
        crps=_relative_crps(heights),
        energy_score=_energy_score(pairs) if heights else None,
    )


def _relative_crps(heights: Iterable[HeightScore]) -> float | None:
    return _mean([each.crps_per_s / each.measured_per_s for each in heights if each.crps_per_s is not None])


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _interval_score(spans: Sequence[tuple[float, float, float]]) -> float | None:
    """Width, and 20 times what lies outside a 90 % interval; relative to the measured X(M)."""
    import scoringrules

    if not spans:
        return None
    low, high, mean = np.array(spans).T
    return float(np.mean(scoringrules.interval_score(np.ones(len(mean)), low / mean, high / mean, 1 - LEVEL)))


def _energy_score(pairs: Sequence[tuple[CurvePoint, float]]) -> float | None:
    """The curve as a whole: of the comonotone ensemble of quantile curves, each M relative to its measured X(M)."""
    import scoringrules

    if not pairs:
        return None
    columns = [np.array(promised.quantiles or [promised.throughput_per_s]) / mean for promised, mean in pairs]
    if len({len(column) for column in columns}) > 1:
        return None
    return float(scoringrules.es_ensemble(np.ones(len(pairs)), np.column_stack(columns)))


def _best_constant(scored: Sequence[MeasuredPoint]) -> PredictorScore:
    """Of the measured X(M) themselves, one of which minimises the mean of abs(c / X(M) - 1)."""
    means = np.array([point.mean for point in scored])
    errors = [means[number] / means - 1 for number in range(len(means))]
    best = min(errors, key=lambda each: float(np.mean(np.abs(each))), default=np.array([]))
    return _fitted(CONSTANT, best.tolist()).model_copy(update={"crps": _mean(np.abs(best).tolist())})


def _fitted(name: str, errors: Sequence[float]) -> PredictorScore:
    return PredictorScore(
        predictor=name, kind="fitted", points=len(errors), mape=_mean([abs(error) for error in errors])
    )


def track_record(verdicts: Sequence[Verdict]) -> tuple[PredictorScore, ...]:
    """Each predictor's scores over all verdicts that are valid, each M of each verdict weighing alike.

    A skill compares with the rival over the same verdicts. Energy scores depend on the number of M, and are left out.
    """
    found: dict[str, list[tuple[PredictorScore, Verdict]]] = defaultdict(list)
    for verdict in verdicts:
        for score in verdict.scores:
            found[score.predictor].append((score, verdict))
    return tuple(_pooled([score for score, _ in each], [verdict for _, verdict in each]) for each in found.values())


def _pooled(lines: Sequence[PredictorScore], verdicts: Sequence[Verdict]) -> PredictorScore:
    covered = [line for line in lines if line.covered is not None and line.coverage is not None]
    hits = sum(line.covered or 0 for line in covered)
    trials = sum(line.points for line in covered)
    own = _weighted([(line.crps, line.points) for line in lines])
    rivals = [_weighted([(_crps_of(each, name), line.points) for line, each in zip(lines, verdicts, strict=True)])
              for name in (RIVAL, CONSTANT)]  # fmt: skip
    pooled = PredictorScore(
        predictor=lines[0].predictor,
        kind=lines[0].kind,
        points=sum(line.points for line in lines),
        regret=_mean([line.regret for line in lines if line.regret is not None]),
        mape=_weighted([(line.mape, line.points) for line in lines]),
        covered=hits if covered else None,
        coverage=clopper_pearson(hits, trials) if covered else None,
        interval_score=_weighted([(line.interval_score, line.points) for line in lines]),
        crps=own,
    )
    return with_skills(pooled, *rivals)


def _crps_of(verdict: Verdict, name: str) -> float | None:
    return next((line.crps for line in verdict.scores if line.predictor == name), None)


def _weighted(pairs: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None and weight]
    return float(np.average([value for value, _ in known], weights=[weight for _, weight in known])) if known else None
