"""Scores on cases worked by hand, intervals on truths that we know, and R where it means something."""

from __future__ import annotations

import math

import builders
import numpy as np
import pytest

from b2gmodel.errors import EvidenceError
from b2gmodel.judge import judge
from b2gmodel.measured import MeasuredPoint, measured_curve
from b2gmodel.placement_scores import placement_score, score
from b2gmodel.prediction import predict
from b2gmodel.records import Measurement, Prediction, PredictorScore, Verdict
from b2gmodel.scores import (
    CONSTANT,
    USL,
    SessionLogs,
    clopper_pearson,
    confidence_set,
    height_scores,
    predictor_scores,
    regret,
    smallest_near_peak,
    track_record,
)


def curve_of(rates: dict[int, list[float]]) -> list[MeasuredPoint]:
    return [MeasuredPoint(m, tuple(values), tuple(range(len(values)))) for m, values in rates.items()]


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    """closed-form 320, 640, 800, 800; twice-instances 320, 640, 640, 640; no spread."""
    return predict(builders.calibration(), plan=builders.plan(), software=builders.SOFTWARE, draws=0)


def lines(of: Prediction, rates: dict[int, list[float]]) -> dict[str, PredictorScore]:
    curve = curve_of(rates)
    return {line.predictor: line for line in predictor_scores(of, curve, height_scores(of, curve))}


class TestPlace:
    def test_the_smallest_near_the_peak(self) -> None:
        assert smallest_near_peak(curve_of({1: [50.0], 2: [94.9], 3: [95.0], 4: [100.0]})) == 3

    def test_regret_covers_the_truth(self) -> None:
        """True regrets of 0, 2 and 10 %: the interval holds them in 90 % of 2,000 draws, and more where it is wide."""
        rng = np.random.default_rng(1)
        for truth in (0.0, 0.02, 0.10):
            gains = np.log([1 / (1 - truth), 0.98, 0.97, 0.97])
            covered = 0
            for _ in range(2000):
                noise = rng.normal(scale=0.02, size=(5, 4)) - rng.normal(scale=0.02, size=(5, 1))
                found = regret(SessionLogs.of((gains + noise).T.tolist()))
                assert found.low is not None
                assert found.high is not None
                covered += found.low <= truth <= found.high
            assert covered >= 0.89 * 2000

    def test_no_session_in_common(self) -> None:
        with pytest.raises(EvidenceError, match="no session ran both"):
            SessionLogs.of([[]])


class TestConfidenceSet:
    def test_too_few_sessions_have_none(self) -> None:
        assert confidence_set(curve_of({1: [1.0] * 4, 2: [2.0] * 4}), seed=1) is None

    def test_equal_runs_are_told_apart_only_where_they_differ(self) -> None:
        assert confidence_set(curve_of({1: [1.0] * 5, 2: [2.0] * 5, 3: [2.0] * 5}), seed=1) == (2, 3)

    def test_the_same_seed_gives_the_same_set(self) -> None:
        rng = np.random.default_rng(3)
        curve = curve_of({m: (100 * np.exp(rng.normal(scale=0.02, size=6))).tolist() for m in range(1, 6)})
        assert confidence_set(curve, seed=7) == confidence_set(curve, seed=7)

    def test_a_best_m_is_seldom_left_out(self) -> None:
        """Of six M two share the peak; in 60 draws of five sessions the first of them is left out 10 times at most."""
        rng, out = np.random.default_rng(4), 0
        for _ in range(60):
            heights = [100, 100, 95, 95, 95, 95]
            curve = curve_of(
                {m: (x * np.exp(rng.normal(scale=0.02, size=5))).tolist() for m, x in enumerate(heights, start=1)}
            )
            found = confidence_set(curve, seed=1)
            assert found is not None
            out += 1 not in found
        assert out <= 10


class TestCoverage:
    @pytest.mark.parametrize(
        ("hits", "trials", "low", "high"),
        # R: binom.test(hits, trials, conf.level = 0.9)$conf.int; by hand at the ends: 0.05 ** (1 / n).
        [(0, 4, 0.0, 1 - 0.05**0.25), (4, 4, 0.05**0.25, 1.0), (1, 2, 1 - 0.95**0.5, 0.95**0.5)],
    )
    def test_clopper_pearson(self, hits: int, trials: int, low: float, high: float) -> None:
        found = clopper_pearson(hits, trials)
        assert (found.mean, found.low, found.high) == pytest.approx((hits / trials, low, high))


class TestPredictors:
    def test_by_hand_without_quantiles(self, prediction: Prediction) -> None:
        """Errors beyond M = 1: closed-form 640/500, 800/800, 800/640; a CRPS is then a distance."""
        found = lines(prediction, {1: [100.0], 2: [500.0], 3: [800.0], 4: [640.0]})
        closed, rival, constant = found["closed-form"], found["twice-instances"], found[CONSTANT]
        assert closed.points == 3
        assert closed.mape == pytest.approx((0.28 + 0 + 0.25) / 3)
        assert closed.crps == pytest.approx(closed.mape)
        assert closed.energy_score == pytest.approx(math.hypot(0.28, 0.25))
        assert rival.crps == pytest.approx((0.28 + 0.2 + 0) / 3)
        assert closed.skill_twice_instances == pytest.approx(1 - 0.53 / 0.48)
        # Of 500, 800 and 640 the constant 640 errs least: 0.28, 0.2, 0.
        assert constant.mape == pytest.approx(0.48 / 3)
        assert closed.skill_constant == pytest.approx(1 - 0.53 / 0.48)
        assert (closed.coverage, closed.interval_score) == (None, None)
        assert closed.regret == 0.0
        assert rival.regret == pytest.approx(1 - 500 / 800)
        assert (rival.skill_twice_instances, constant.skill_constant) == (0.0, 0.0)

    def test_what_was_fitted_says_so_and_has_no_skill_of_its_own(self, prediction: Prediction) -> None:
        found = lines(prediction, {1: [320.0], 2: [600.0], 3: [640.0], 4: [650.0]})
        assert (found[USL].kind, found[USL].crps, found[USL].skill_constant) == ("fitted", None, None)
        assert found[CONSTANT].kind == "fitted"

    def test_one_m_alone_leaves_no_skill_on_a_constant(self, prediction: Prediction) -> None:
        found = lines(prediction, {1: [320.0], 3: [700.0]})
        assert found[CONSTANT].crps == 0.0
        assert found["closed-form"].skill_constant is None

    def test_bounds_cover_and_promise_no_height(self, prediction: Prediction) -> None:
        bounds = lines(prediction, {1: [320.0], 2: [600.0], 3: [640.0]})["bounds"]
        assert (bounds.covered, bounds.points) == (2, 2)
        assert (bounds.mape, bounds.crps, bounds.skill_constant) == (None, None, None)

    def test_quantiles_are_an_ensemble(self) -> None:
        """Against the definition: mean abs(x - y) - half the mean abs(x - x'), relative to the measured."""
        spread = predict(builders.calibration(), plan=builders.plan(), software=builders.SOFTWARE, draws=200)
        found = lines(spread, {1: [320.0], 2: [630.0], 3: [790.0]})["closed-form"]
        at = [spread.predictor("closed-form").at(m) for m in (2, 3)]
        columns = [np.array(point.quantiles) / x for point, x in zip(at, (630.0, 790.0), strict=True) if point]
        crps = [np.mean(np.abs(q - 1)) - 0.5 * np.mean(np.abs(q[:, np.newaxis] - q[np.newaxis])) for q in columns]
        assert found.crps == pytest.approx(np.mean(crps))
        paths = np.column_stack(columns)
        apart = np.linalg.norm(paths[:, np.newaxis] - paths[np.newaxis], axis=2)
        assert found.energy_score == pytest.approx(np.mean(np.linalg.norm(paths - 1, axis=1)) - 0.5 * np.mean(apart))
        low, high = np.array([(point.low, point.high) for point in at if point]).T / (630.0, 790.0)
        outside = np.maximum(low - 1, 0) + np.maximum(1 - high, 0)
        assert found.interval_score == pytest.approx(np.mean(high - low + 20 * outside))
        assert found.covered == int(np.sum((low <= 1) & (high >= 1)))


class TestTrackRecord:
    def verdict(self, of: Prediction, rates: dict[int, list[float]]) -> Verdict:
        return judge(of, builders.measurement(of, rates))

    def test_every_m_of_every_verdict_weighs_alike(self, prediction: Prediction) -> None:
        first = self.verdict(prediction, {1: [320.0] * 2, 3: [640.0] * 2})
        second = self.verdict(prediction, {1: [320.0] * 2, 2: [640.0] * 2, 3: [800.0] * 2, 4: [800.0] * 2})
        record = {line.predictor: line for line in track_record([first, second])}
        closed, rival = record["closed-form"], record["twice-instances"]
        assert (closed.points, closed.mape) == (4, pytest.approx(0.25 / 4, rel=1e-5))
        assert rival.mape == pytest.approx((0.2 + 0.2) / 4, rel=1e-5)
        assert closed.skill_twice_instances == pytest.approx(1 - 0.25 / 0.4, rel=1e-4)
        assert (record["bounds"].covered, record["bounds"].points) == (4, 4)

    def test_of_none(self) -> None:
        assert track_record([]) == ()


class TestPlacement:
    """R = (X_C3 - X_C1) / (X_C2 - X_C1), by sessions."""

    def test_by_hand(self) -> None:
        found = score(8, [(100.0, 200.0, 150.0), (110.0, 210.0, 160.0), (90.0, 190.0, 140.0)])
        assert found.undefined is None
        assert found.ratio is not None
        assert (found.ratio.mean, found.ratio.low, found.ratio.high) == pytest.approx((0.5, 0.5, 0.5))
        assert found.gain.mean == pytest.approx(math.exp(np.mean(np.log([1.5, 160 / 110, 140 / 90]))) - 1)

    def test_negative_r_is_a_loss_against_not_batching(self) -> None:
        found = score(8, [(100.0, 120.0, 70.0), (101.0, 122.0, 71.0), (99.0, 118.0, 69.0)])
        assert found.ratio is not None
        assert found.ratio.high is not None
        assert found.ratio.high < 0

    @pytest.mark.parametrize(
        ("server", "why"),
        [
            ((94.0, 95.0, 93.0), "X_C2 - X_C1 is negative"),
            ((99.0, 120.0, 95.0), "X_C2 - X_C1 cannot be told from zero"),
        ],
    )
    def test_it_is_undefined_where_the_server_gains_nothing(self, server: tuple[float, ...], why: str) -> None:
        """As in the prototype at 3,200 KiB: X_C1 = 107, X_C2 = 94, X_C3 = 110."""
        found = score(8, [(107.0, x, 110.0) for x in server])
        assert found.ratio is None
        assert found.undefined is not None
        assert found.undefined.startswith(why)
        assert found.gain.mean == pytest.approx(110 / 107 - 1)

    def test_one_session_has_no_interval(self) -> None:
        found = score(8, [(100.0, 200.0, 150.0)])
        assert (found.ratio, found.undefined) == (None, "one session has no interval")

    def test_the_interval_covers(self) -> None:
        """R = 0.4 with correlated sessions: covered in 90 % of 2,000 draws, within what they can tell."""
        rng, covered, defined = np.random.default_rng(6), 0, 0
        for _ in range(2000):
            noise = rng.normal(scale=6, size=(6, 3)) + rng.normal(scale=6, size=(6, 1))
            found = score(8, [tuple(row) for row in (np.array([100, 150, 120]) + noise).tolist()])
            if found.ratio is not None:
                assert found.ratio.low is not None
                assert found.ratio.high is not None
                defined += 1
                covered += found.ratio.low <= 0.4 <= found.ratio.high
        assert defined > 1990
        assert 0.88 <= covered / defined <= 0.92

    def measured(self, of: Prediction, *runs: object) -> Measurement:
        made = builders.measurement(of, {3: [700.0] * 2})
        sessions = [each.model_copy(update={"runs": (*each.runs, *runs)}) for each in made.sessions]
        return made.model_copy(update={"sessions": tuple(sessions)})

    def test_only_as_many_clients_are_compared(self, prediction: Prediction) -> None:
        one, three = builders.run("C1", 8, 100.0), builders.run("C3", 1, 150.0)
        two = builders.run("C2", 8, 200.0).model_copy(update={"concurrency": 8})
        found = placement_score(self.measured(prediction, one, two, three))
        assert found is not None
        assert found.ratio is not None
        assert (found.concurrency, found.ratio.mean) == (8, pytest.approx(0.5))
        other = two.model_copy(update={"concurrency": 64})
        assert placement_score(self.measured(prediction, one, other, three)) is None
        assert placement_score(self.measured(prediction, one, three)) is None

    def test_it_is_part_of_the_verdict(self, prediction: Prediction) -> None:
        runs = [builders.run("C1", 8, 100.0), builders.run("C3", 1, 150.0)]
        runs.append(builders.run("C2", 8, 200.0).model_copy(update={"concurrency": 8}))
        verdict = judge(prediction, self.measured(prediction, *runs))
        assert verdict.placement is not None
        assert [point.flights for point in measured_curve(self.measured(prediction, *runs))] == [1, 3]
