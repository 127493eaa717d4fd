"""Records -> laws: service and transport of a batch as numbers that a model can use, each with its uncertainty.

Rules here: arrays start with the estimate (row 0); rows 1, 2, ... are draws of the calibration's own uncertainty,
and all arrays of one :class:`Laws` share their rows. Nothing here has seen more batches of the model in flight than
it has instances. Times are float seconds, rates are batches per second.

Sources: Chandy, Herzog and Woo (1975), Parametric analysis of queuing networks, IBM J. Res. Dev. 19(1), for the
flow-equivalent transport; Robertson, Wright and Dykstra (1988), Order Restricted Statistical Inference, for
isotonic regression; Draper and Smith (1998), Applied Regression Analysis, ch. 2, for the test of fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

from b2gmodel.closed_form import cycle_to_service_from_share
from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.records import Block, Calibration, CalibrationPoint, ComputeLaw, TransportLaw, TransportPoint
from b2gmodel.stats import bootstrap_means

Floats = NDArray[np.float64]

LEAST_TRANSPORT_SHARE: Final = 1e-6
"""Of the cycle: a transport measured as shorter (or as negative) counts as this much where a rate is needed."""

_NORMAL_95: Final = 1.959963984540054
_LEAST_DEVIATION: Final = 0.005
"""Relative to a rate: no few blocks know one better, so none outweighs all others."""

_SIGNIFICANT: Final = 0.01
_MATTERS: Final = 0.02


@dataclass(frozen=True, slots=True)
class LinearLaw:
    """y = intercept + slope x, fitted through the means of several samples, and whether a line is right.

    Attributes:
        intercept, slope: in y's unit, and per unit of x.
        covariance: of the two, shape ``[2, 2]``.
        x: the measured x, increasing.
        p_lack_of_fit: probability of samples that lie so far from a line if the line were right; None with two.
        worst_deviation: the largest distance of a sample's mean from the line, relative to that mean.
    """

    intercept: float
    slope: float
    covariance: Floats
    x: tuple[float, ...]
    p_lack_of_fit: float | None
    worst_deviation: float

    def at(self, x: float) -> float:
        """y on the line."""
        return self.intercept + self.slope * x

    def draws_at(self, x: float, draws: int, rng: np.random.Generator) -> Floats:
        """Draws of y on the line, normal, shape ``[draws]``."""
        spread = np.array([1.0, x])
        return rng.normal(self.at(x), float(np.sqrt(spread @ self.covariance @ spread)), draws)

    @property
    def is_wrong(self) -> bool:
        """Whether the samples contradict a line: beyond chance (1 %), and by more than 2 % of a sample."""
        surprising = self.p_lack_of_fit is not None and self.p_lack_of_fit < _SIGNIFICANT
        return surprising and self.worst_deviation > _MATTERS

    def __repr__(self) -> str:
        fit = "not tested (two points)" if self.p_lack_of_fit is None else f"p = {self.p_lack_of_fit:.3g}"
        word = ", a line is wrong here" if self.is_wrong else ""
        return f"{self.intercept:.6g} + {self.slope:.6g} x (lack of fit: {fit}{word})"


def fit_line(x: Sequence[float], samples: Sequence[Floats]) -> LinearLaw:
    """Weighted least squares through the means of samples, and the lack of fit against their own spread.

    Args:
        x: where each sample was taken, increasing.
        samples: one array of independent values (block means) for each x, at least two values in each.

    Raises:
        EvidenceError: fewer than two different x, or a sample of fewer than two values.
    """
    if len(set(x)) < 2 or len(x) != len(samples):
        raise EvidenceError(
            "a line needs two points",
            observed=len(set(x)),
            allowed=">= 2",
            hint="calibrate a ladder of batch sizes: -k 1,2,4,8",
        )
    if min(map(len, samples)) < 2:
        raise EvidenceError("too few blocks to know a point's spread", observed=min(map(len, samples)), allowed=">= 2")
    means = np.array([sample.mean() for sample in samples])
    # A sample without spread would have infinite weight: a millionth of its mean stands for the clock's own grain.
    errors = np.array([max(s.std(ddof=1) / len(s) ** 0.5, abs(s.mean()) * 1e-6, 1e-300) for s in samples])
    design = np.column_stack([np.ones(len(x)), np.asarray(x, dtype=float)])
    weighted = design / errors[:, np.newaxis]
    covariance = np.linalg.inv(weighted.T @ weighted)
    intercept, slope = covariance @ weighted.T @ (means / errors)
    misses = means - (intercept + slope * np.asarray(x, dtype=float))
    free = len(x) - 2
    within = sum(len(sample) - 1 for sample in samples)
    statistic = float(np.sum((misses / errors) ** 2)) / free if free else 0.0
    return LinearLaw(
        intercept=float(intercept),
        slope=float(slope),
        covariance=covariance,
        x=tuple(float(value) for value in x),
        p_lack_of_fit=float(fdtrc(free, within, statistic)) if free else None,
        worst_deviation=float(np.max(np.abs(misses / means))),
    )


def service_line(calibration: Calibration) -> LinearLaw:
    """S(k) = s0 + s1 k in seconds, over the calibration's batch sizes. Raises as :func:`fit_line`."""
    points = points_with_blocks(calibration)
    return fit_line(
        [float(point.k or 0) for point in points],
        [_independent(point, lambda block: block.service_s) for point in points],
    )


def transport_line(calibration: Calibration) -> LinearLaw:
    """D(bytes) = a + b bytes in seconds, over the bytes of the calibration's batches. Raises as :func:`fit_line`."""
    points = points_with_blocks(calibration)
    return fit_line(
        [float((point.k or 0) * point.payload_bytes) for point in points],
        [_independent(point, lambda block: block.cycle_s - block.service_s) for point in points],
    )


def points_with_blocks(calibration: Calibration) -> list[CalibrationPoint]:
    """Those of a stated batch size and spread, by batch size: what a line can be fitted through."""
    return sorted((p for p in calibration.points if p.k is not None and p.blocks), key=lambda point: point.k or 0)


def _independent(point: CalibrationPoint, time_s: Callable[[Block], float]) -> Floats:
    """The blocks of one session, or the means of several: blocks of one start share what it brought."""
    blocks = point.blocks or ()
    times_s = np.array([time_s(block) for block in blocks])
    sessions = np.array([block.session for block in blocks])
    several = np.unique(sessions)
    return times_s if len(several) < 2 else np.array([times_s[sessions == each].mean() for each in several])


@dataclass(frozen=True, slots=True, eq=False)
class Laws:
    """All that predictors know of a system: one batch's cycle, its instances, its transport.

    Attributes:
        batch: requests that a batch stands for; 1 where a publication states rates alone.
        cycle_s: C with one batch in flight, shape ``[1 + draws]``; only row 0 where no uncertainty is stated.
        service_s: S with one batch in flight, shape ``[1 + draws]``.
        busy_service_s: S(j) with j = 1..g instances busy and others in transport, shape ``[1 + draws, g]``.
        transport_rates_per_s: mu(n), n = 1.. batches in transport, constant beyond the last, shape
            ``[1 + draws, n]``; None where the transport law was not measured: transport is then taken for a delay.
        transport_cv, service_cv: coefficients of variation over single-flight cycles; None where not stated.
        is_compute_law_measured: whether S(j) was measured; where not, S(1) stands for all j.
        is_timed: whether the times are those of a batch; a publication's rates give those of a request alone.
    """

    batch: int
    cycle_s: Floats
    service_s: Floats
    busy_service_s: Floats
    transport_rates_per_s: Floats | None
    transport_cv: float | None = None
    service_cv: float | None = None
    is_compute_law_measured: bool = True
    is_timed: bool = True

    @property
    def instances(self) -> int:
        return int(self.busy_service_s.shape[1])

    @property
    def draws(self) -> int:
        """Rows beside the estimate; 0 where the calibration states no uncertainty."""
        return len(self.cycle_s) - 1

    @property
    def transport_s(self) -> Floats:
        """D = C - S, at least a millionth of the cycle, shape ``[1 + draws]``."""
        return np.maximum(self.cycle_s - self.service_s, LEAST_TRANSPORT_SHARE * self.cycle_s)

    @property
    def instance_rates_per_s(self) -> Floats:
        """Batches a second with j = 1..g instances busy, j / S(j), shape ``[1 + draws, g]``."""
        return np.arange(1, self.instances + 1) / self.busy_service_s

    @property
    def compute_limit_per_s(self) -> Floats:
        """Requests a second that the instances can compute, shape ``[1 + draws]``."""
        return np.asarray(self.batch * self.instance_rates_per_s.max(axis=1))

    @property
    def transport_limit_per_s(self) -> Floats | None:
        """Requests a second that the transport can carry, shape ``[1 + draws]``; None where it was not measured."""
        rates = self.transport_rates_per_s
        return None if rates is None else np.asarray(self.batch * rates.max(axis=1))

    @property
    def knee(self) -> Floats:
        """N* = C times the smaller of the two limits, shape ``[1 + draws]``: where the asymptotes meet."""
        limit = self.compute_limit_per_s
        if self.transport_limit_per_s is not None:
            limit = np.minimum(limit, self.transport_limit_per_s)
        return np.asarray(self.cycle_s * limit / self.batch)


def laws_of(calibration: Calibration, point: CalibrationPoint, draws: int, rng: np.random.Generator) -> Laws:
    """The laws at one point of a calibration.

    Args:
        draws: of the uncertainty, from the calibration's sessions (the blocks of its one session) and the
            transport law's intervals.

    Raises:
        EvidenceError: the calibration lacks what the closed form needs, or its times are not physical.
    """
    instances = calibration.model.instances or 1
    if point.cycle_s is None or point.service_s is None or point.k is None:
        cycle_s, service_s = _from_share(calibration, point)
        busy = np.repeat(service_s[:, np.newaxis], instances, axis=1)
        return Laws(1, cycle_s, service_s, busy, None, is_compute_law_measured=instances == 1, is_timed=False)
    times = np.array([[point.cycle_s.mean, point.service_s.mean]])
    if not (times > 0).all():
        raise EvidenceError(
            "the calibration's times are not physical",
            observed=f"S = {point.service_s.mean} s of a cycle of {point.cycle_s.mean} s",
            allowed="> 0",
            where=calibration.name,
            hint="calibrate anew: the server's counters booked no time",
        )
    if point.blocks:
        blocks = np.array([(block.cycle_s, block.service_s) for block in point.blocks])
        sessions = np.array([block.session for block in point.blocks])
        times = np.concatenate([times, bootstrap_means(blocks, sessions, draws, rng)])
    if not (times > 0).all():
        raise EvidenceError(
            "the calibration is too uncertain to predict from: zero lies within reach of its S or C",
            where=calibration.name,
            hint="calibrate for longer, or on more starts of the server",
        )
    cycle_s, service_s = times.T
    laws = Laws(
        batch=point.k,
        cycle_s=cycle_s,
        service_s=service_s,
        busy_service_s=busy_service_s(service_s, instances, point.compute_law),
        transport_rates_per_s=None,
        transport_cv=None if point.transport_s is None else point.transport_s.cv,
        service_cv=point.service_s.cv,
        is_compute_law_measured=instances == 1 or _covers(point.compute_law, instances),
    )
    return laws if point.transport_law is None else _with_transport_law(laws, point.transport_law, rng)


def _with_transport_law(laws: Laws, law: TransportLaw, rng: np.random.Generator) -> Laws:
    """The rates of several batches in transport, and S under as much transport as there is with all instances busy."""
    rates = transport_rates_per_s(law, laws.transport_s, rng)
    growth_s = service_growth_s(law, occupancy(rates, laws.instance_rates_per_s.max(axis=1)))
    return replace(laws, transport_rates_per_s=rates, busy_service_s=laws.busy_service_s + growth_s[:, np.newaxis])


def busy_service_s(service_s: Floats, instances: int, compute: ComputeLaw | None) -> Floats:
    """S(j) for j = 1..g busy instances, shape ``[rows, g]``: the compute law's shape over the calibration's own S."""
    shape = np.ones(instances)
    if compute is not None and _covers(compute, instances):
        measured = {point.flights: point.service_s for point in compute.points}
        shape = np.array([measured[j] for j in range(1, instances + 1)]) / measured[1]
    return np.asarray(service_s[:, np.newaxis] * shape)


def occupancy(rates_per_s: Floats, limit_per_s: Floats) -> Floats:
    """Batches in transport at which it passes ``limit_per_s``, at most the last of the law; shape ``[rows]``.

    Below mu(1) it is less than one on average: by Little's law the rate times D.
    """
    flights = np.arange(1, rates_per_s.shape[1] + 1)
    rising = np.maximum.accumulate(rates_per_s, axis=1)
    beyond = [np.interp(limit, row, flights) for limit, row in zip(limit_per_s, rising, strict=True)]
    return np.where(limit_per_s < rising[:, 0], limit_per_s / rising[:, 0], beyond)


def service_growth_s(law: TransportLaw, inside: Floats) -> Floats:
    """How much longer the model holds its instance with ``inside`` batches in transport than with none, at least 0.

    From the model's own S with null batches in flight beside it, on straight lines between what was measured (the
    share of the null's cycle that is transport says how many were in transport) and level beyond. Where that was not
    measured, by as much as the null's own instance time grows with several batches in flight.

    Args:
        inside: mean number of batches in transport, shape ``[rows]``.
    """
    null = {point.flights: point for point in law.points}
    alone = null.get(1)
    if len(law.loaded) > 1:
        beside = sorted(law.loaded, key=lambda point: point.null_flights)
        times_s = np.array([point.service_s for point in beside])
        at = np.array([_inside(null, point.null_flights) for point in beside])
        return np.interp(inside, at, np.maximum.accumulate(times_s - times_s[0]))
    loaded = [point.service_s for flights, point in null.items() if flights > 1]
    growth_s = max(0.0, float(np.mean(loaded)) - alone.service_s) if alone is not None and loaded else 0.0
    return np.full(len(inside), growth_s)


def _inside(null: Mapping[int, TransportPoint], flights: int) -> float:
    """How many of the null's batches in flight were in transport, on average: all that were not at its instance."""
    point = null.get(flights)
    return float(flights) if point is None else flights * point.transport_s / point.cycle_s


def transport_rates_per_s(law: TransportLaw, transport_s: Floats, rng: np.random.Generator) -> Floats:
    """The flow-equivalent transport: batches a second with n = 1, 2, ... of them in transport.

    With one in transport the rate is the model's own 1 / D. For more it is the null model's: with m batches in
    flight it passed X(m) a second, and by Little's law m - X (S + Q) of them were in transport on average, the
    others at its instance. Between these points the rate is on the straight line; beyond the last it is taken to
    stay (an assumption: nothing was measured there). Chance dips are pooled: the estimate of X(m) never falls, m >= 2.

    Args:
        law: at least one point with two or more in flight.
        transport_s: the model's own D in single-flight, shape ``[rows]``; row 0 is the estimate, for which no
            uncertainty of the law is drawn.

    Returns:
        shape ``[rows, n]``.

    Raises:
        EvidenceError: a law of single-flight alone.
    """
    points = sorted((point for point in law.points if point.flights > 1), key=lambda point: point.flights)
    if not points:
        raise EvidenceError(
            "the transport law holds no point beyond single-flight",
            observed=[point.flights for point in law.points],
            allowed="at least one with 2 or more in flight",
            hint="calibrate the transport anew",
        )
    flights = np.array([point.flights for point in points])
    means = np.array([point.batches_per_s.mean for point in points])
    held_s = np.array([point.service_s + point.queue_s for point in points])
    deviations = np.array([_deviation(point.batches_per_s.low, point.batches_per_s.high) for point in points])
    noise = rng.standard_normal((len(transport_s), len(points)))
    noise[0] = 0.0
    weights = np.maximum(deviations / means, _LEAST_DEVIATION) ** -2.0
    rates = _not_falling(np.maximum(means + noise * deviations, means * 0.05), weights)
    inside = np.maximum.accumulate(np.maximum(flights - rates * held_s, 1.0), axis=1)
    last = int(np.ceil(inside[0, -1]))
    wanted = np.arange(1, last + 1)
    ladder = np.empty((len(transport_s), last))
    for row, own_s in enumerate(transport_s):
        ladder[row] = np.interp(wanted, np.append(1.0, inside[row]), np.append(1.0 / own_s, rates[row]))
        ladder[row, 0] = 1.0 / own_s
    return ladder


def _covers(compute: ComputeLaw | None, instances: int) -> bool:
    return compute is not None and {point.flights for point in compute.points} >= set(range(1, instances + 1))


def _deviation(low: float | None, high: float | None) -> float:
    """Standard deviation behind a 95 % interval; 0 where none is stated."""
    return 0.0 if low is None or high is None else (high - low) / 2 / _NORMAL_95


def _not_falling(rates: Floats, weights: Floats) -> Floats:
    """Isotonic regression of row 0 by pooling adjacent violators; the other rows are pooled in the same places.

    A draw with pools of its own would take a dip of the measurement, and then one of its own noise: its intervals
    would lie too low at the start of a level stretch, and hold the truth too seldom.
    """

    def pooled(pool: slice) -> Floats:
        return np.asarray(rates[:, pool] @ weights[pool] / weights[pool].sum())

    pools: list[slice] = []
    for i in range(rates.shape[1]):
        pools.append(slice(i, i + 1))
        while len(pools) > 1 and pooled(pools[-2])[0] > pooled(pools[-1])[0]:
            last = pools.pop()
            pools[-1] = slice(pools[-1].start, last.stop)
    fitted = np.empty_like(rates)
    for pool in pools:
        fitted[:, pool] = pooled(pool)[:, np.newaxis]
    return fitted


def _from_share(calibration: Calibration, point: CalibrationPoint) -> tuple[Floats, Floats]:
    """C and S of one request's share of a batch, from a published rate and transport share."""
    if point.transport_share is not None and point.throughput_per_s is not None:
        cycle_s = 1.0 / point.throughput_per_s
        return np.array([cycle_s]), np.array([cycle_s / cycle_to_service_from_share(point.transport_share.mean)])
    missing = [
        name
        for name, value in (
            ("the transport share, or S and D", point.transport_share),
            ("the single-flight throughput", point.throughput_per_s),
        )
        if value is None
    ]
    raise EvidenceError(
        "the calibration does not state what the closed form needs",
        observed=f"no {' and no '.join(missing)}",
        where=calibration.name,
        hint="calibrate the model on a server of yours with b2g calibrate",
    )


def choose_point(calibration: Calibration, k: int | None) -> CalibrationPoint:
    """The point for batches of ``k``; None takes the largest batch. Raises ``UsageError`` where there is none."""
    if k is None:
        return max(calibration.points, key=lambda point: point.k or 0)
    point = calibration.point(k)
    if point is None:
        raise UsageError(
            "the calibration has no point for this batch size",
            observed=k,
            allowed=", ".join(str(each.k) for each in calibration.points),
            where="-k",
            hint=f"calibrate it: b2g calibrate --model {calibration.model.name} -k {k}",
        )
    return point
