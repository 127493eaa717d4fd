"""Intervals of a prediction hold the truth as often as they say: calibrations are simulated from laws that we know.

X(M) of the 90 % intervals is checked at each M within what 2,000 calibrations can tell, and pooled over all M of one
predictor (M of one calibration share its noise, so pooling averages but is no larger sample) within 88 to 92 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import builders
import numpy as np
import pytest

from b2gmodel.closed_form import flights_distribution, optimal_flights
from b2gmodel.laws import Floats, Laws, laws_of
from b2gmodel.merge import merged
from b2gmodel.predictors import Curves, closed_form_curves, mva_curves
from b2gmodel.records import Block, Calibration, CalibrationPoint, Estimate, TransportLaw, TransportPoint

FLIGHTS = (1, 2, 3, 4, 6, 8)
CALIBRATIONS = 2000
DRAWS = 300
SERVICE_S = 0.010
HELD_S = 0.0003
# The null model's X(1..8) a second: one that levels off slowly, and one that is level from 3 on, as a full link is.
SLOW = (55.0, 98.0, 125.0, 140.0, 148.0, 152.0, 154.0, 155.0)
LEVEL = (55.0, 98.0, *[125.0] * 6)


@dataclass(frozen=True)
class Truth:
    """The laws that calibrations are drawn from; relative spreads of C and S over blocks, of X over its intervals."""

    cycle_s: float = 0.025
    null_per_s: tuple[float, ...] | None = None
    null_spread: float = 0.01
    spread: tuple[float, float] = (0.03, 0.02)
    correlation: float = 0.5
    sessions: int = 1
    between: float = 0.0

    def laws(self) -> Laws:
        """Without noise."""
        point = self.point(None)
        return laws_of(builders.calibration(), point, 0, np.random.default_rng(0))

    def point(self, rng: np.random.Generator | None) -> CalibrationPoint:
        """One calibration. Records are made unvalidated: thousands are needed, and all of it is ours."""
        means = np.array([self.cycle_s, SERVICE_S])
        blocks = self._blocks(rng) if rng is not None else means[np.newaxis]
        sessions = np.arange(len(blocks)) * self.sessions // len(blocks)
        estimate = blocks.mean(axis=0)
        return CalibrationPoint.model_construct(
            k=8,
            payload_bytes=builders.PAYLOAD_BYTES,
            cycle_s=Estimate.model_construct(mean=float(estimate[0])),
            service_s=Estimate.model_construct(mean=float(estimate[1])),
            blocks=None
            if rng is None
            else tuple(
                Block.model_construct(session=session, cycle_s=cycle_s, service_s=service_s)
                for session, (cycle_s, service_s) in zip(sessions.tolist(), blocks.tolist(), strict=True)
            ),
            transport_law=None if self.null_per_s is None else self._law(rng),
        )

    def _blocks(self, rng: np.random.Generator) -> Floats:
        c, s = self.spread[0] * self.cycle_s, self.spread[1] * SERVICE_S
        both = self.correlation * c * s
        count = 20 * self.sessions
        blocks = rng.multivariate_normal([self.cycle_s, SERVICE_S], [[c * c, both], [both, s * s]], size=count)
        factors = 1 + self.between * rng.normal(size=(self.sessions, 2))
        return np.asarray(blocks * np.repeat(factors, 20, axis=0))

    def _law(self, rng: np.random.Generator | None) -> TransportLaw:
        true = np.array(self.null_per_s)
        half = 1.959964 * self.null_spread * true
        seen = true if rng is None else true + self.null_spread * true * rng.normal(size=len(true))
        points = tuple(
            TransportPoint.model_construct(
                flights=n,
                batches_per_s=Estimate.model_construct(mean=rate, low=rate - width, high=rate + width, level=0.95),
                service_s=HELD_S,
                queue_s=0.0,
            )
            for n, (rate, width) in enumerate(zip(seen.tolist(), half.tolist(), strict=True), start=1)
        )
        return TransportLaw.model_construct(null_model="n", k=8, batch_bytes=1, points=points)


@dataclass
class Coverage:
    """How often one predictor's intervals and sets held the truth."""

    held: list[list[bool]] = field(default_factory=list)
    narrowed: list[list[bool]] = field(default_factory=list)
    sets: list[bool] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def add(self, curves: Curves, truth: Curves) -> None:
        low, high = np.quantile(curves.values[1:], [0.05, 0.95], axis=0)
        estimate, true = curves.values[0], truth.values[0]
        self.held.append(((low <= true) & (true <= high)).tolist())
        low, high = estimate + 0.8 * (low - estimate), estimate + 0.8 * (high - estimate)
        self.narrowed.append(((low <= true) & (true <= high)).tolist())
        likely = most_probable(flights_distribution(curves.knee[1:].tolist()))
        self.sets.append(optimal_flights(float(truth.knee[0])) in likely)
        self.sizes.append(len(likely))

    @property
    def by_flights(self) -> Floats:
        return np.mean(self.held, axis=0)

    @property
    def pooled(self) -> float:
        return float(np.mean(self.held))

    @property
    def pooled_narrowed(self) -> float:
        return float(np.mean(self.narrowed))

    @property
    def of_sets(self) -> float:
        return float(np.mean(self.sets))


def most_probable(probabilities: dict[int, float], level: float = 0.90) -> set[int]:
    """The smallest set of the most probable M that has at least ``level``."""
    chosen: set[int] = set()
    for flights in sorted(probabilities, key=lambda each: -probabilities[each]):
        if sum(probabilities[each] for each in chosen) >= level:
            break
        chosen.add(flights)
    return chosen


def calibrations(truth: Truth, count: int, draws: int, seed: int) -> Iterator[Laws]:
    of: Calibration = builders.calibration()
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield laws_of(of, truth.point(rng), draws, rng)


def covered(truth: Truth, *, count: int = CALIBRATIONS, draws: int = DRAWS, seed: int = 1) -> dict[str, Coverage]:
    true = truth.laws()
    curves = [closed_form_curves] if truth.null_per_s is None else [closed_form_curves, mva_curves]
    expected = [each(true, FLIGHTS) for each in curves]
    found = {each.name: Coverage() for each in expected}
    for laws in calibrations(truth, count, draws, seed):
        for each, exact in zip(curves, expected, strict=True):
            found[exact.name].add(each(laws, FLIGHTS), exact)
    return found


def test_the_smallest_set_by_hand() -> None:
    assert most_probable({2: 0.05, 3: 0.9, 4: 0.05}) == {3}
    assert most_probable({2: 0.06, 3: 0.85, 4: 0.09}) == {3, 4}
    assert most_probable({1: 0.2, 2: 0.5, 3: 0.3}) == {1, 2, 3}


@pytest.mark.parametrize("null_per_s", [SLOW, LEVEL], ids=["slow", "level"])
def test_intervals_of_x_cover_at_their_level_and_would_not_were_they_a_fifth_narrower(
    null_per_s: tuple[float, ...],
) -> None:
    found = covered(Truth(null_per_s=null_per_s))
    assert set(found) == {"closed-form", "mva"}
    for name, coverage in found.items():
        assert 0.88 <= coverage.pooled <= 0.92, (name, coverage.by_flights)
        assert ((coverage.by_flights > 0.87) & (coverage.by_flights < 0.93)).all(), (name, coverage.by_flights)
        assert coverage.of_sets >= 0.88
        # The negative control: the same check, on intervals that are a fifth narrower.
        assert coverage.pooled_narrowed < 0.88, name


@pytest.mark.parametrize("ratio", [2.99, 3.0, 3.004])
def test_sets_of_m_star_hold_it_also_where_c_over_s_is_close_to_a_whole_number(ratio: float) -> None:
    """C / S is known to about 0.6 %, that is 0.02: here nobody can tell 3 from 4, and the sets say so."""
    coverage = covered(Truth(cycle_s=ratio * SERVICE_S), count=1000)["closed-form"]
    assert coverage.of_sets >= 0.88
    assert np.mean(coverage.sizes) > 1.3


def test_a_knee_of_transport_close_to_a_whole_number() -> None:
    """The null is level at 80.1 a second, below the 100 of compute: N* = 25.05 ms x 80.1 / s = 2.0065."""
    level = Truth(cycle_s=0.02505, null_per_s=(55.0, *[80.1] * 7))
    assert covered(level, count=600)["mva"].of_sets >= 0.88


@pytest.mark.parametrize(("sessions", "between"), [(2, 0.02), (3, 0.02), (5, 0.02), (5, 0.0)])
def test_several_sessions_are_the_units(sessions: int, between: float) -> None:
    """Whether they differ or not."""
    truth = Truth(sessions=sessions, between=between)
    coverage = covered(truth, count=1000)["closed-form"]
    assert 0.87 <= coverage.pooled <= 0.93


def test_blocks_of_sessions_that_differ_are_no_units() -> None:
    """The control: all blocks as if of one session. What differs between sessions is then not seen."""
    truth = Truth(sessions=5, between=0.02)
    ignored, true = Coverage(), closed_form_curves(truth.laws(), FLIGHTS)
    of, rng = builders.calibration(), np.random.default_rng(1)
    for _ in range(500):
        point = truth.point(rng)
        blocks = tuple(block.model_copy(update={"session": 0}) for block in point.blocks or ())
        point = point.model_copy(update={"blocks": blocks})
        ignored.add(closed_form_curves(laws_of(of, point, DRAWS, rng), FLIGHTS), true)
    assert ignored.pooled < 0.6


def starts(count: int, rng: np.random.Generator, between: float = 0.03, within: float = 0.003) -> Calibration:
    """Calibrations of as many starts of one server, merged: C differs by start, and hardly within one."""
    points = []
    for factor in 1 + between * rng.normal(size=count):
        point = Truth(cycle_s=0.025 * factor, spread=(within, within)).point(rng)
        assert point.cycle_s is not None
        points.append(point.model_copy(update={"transport_s": Estimate(mean=point.cycle_s.mean - SERVICE_S)}))
    return merged([in_session(number, point) for number, point in enumerate(points)])


def in_session(number: int, point: CalibrationPoint) -> Calibration:
    return builders.calibration(point).model_copy(update={"session_ids": (str(number),)})


def share_that_holds_x1(count: int, calibrations: int = 300) -> float:
    rng = np.random.default_rng(1)
    held = []
    for _ in range(calibrations):
        of = starts(count, rng)
        x1 = closed_form_curves(laws_of(of, of.points[0], DRAWS, rng), (1,)).values[1:, 0]
        low, high = np.quantile(x1, [0.05, 0.95])
        held.append(low <= 8 / 0.025 <= high)
    return float(np.mean(held))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_merged_starts_hold_what_differs_between_them(count: int) -> None:
    assert 0.85 <= share_that_holds_x1(count) <= 0.95


def test_one_start_does_not_know_what_differs_between_starts() -> None:
    """The negative control of the merging."""
    assert share_that_holds_x1(1) < 0.5


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_transport_law_of_merged_starts_covers_at_its_level(count: int) -> None:
    """What laws draw is normal, by the stated interval: 1.645 of its 1.96 deviations are 90 %."""
    rng, held = np.random.default_rng(1), []
    for _ in range(600):
        rates = 120.0 / (1 + 0.03 * rng.normal(size=count))
        laws = [builders.transport_law([50.0, float(rate)], relative_half_width=0.002) for rate in rates]
        points = [builders.point().model_copy(update={"transport_law": law}) for law in laws]
        of = merged([in_session(number, point) for number, point in enumerate(points)])
        law = of.points[0].transport_law
        assert law is not None
        rate = law.points[1].batches_per_s
        assert rate.high is not None
        held.append(abs(rate.mean - 120.0) <= 1.644854 / 1.959964 * (rate.high - rate.mean))
    assert 0.86 <= np.mean(held) <= 0.94
