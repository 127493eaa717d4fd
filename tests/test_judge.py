"""The judge on truths that we know: a right M* held, a wrong one refuted, noise told from knowledge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import builders
import numpy as np
import pytest

from b2gmodel.errors import EvidenceError
from b2gmodel.judge import judge
from b2gmodel.measured import measured_baseline, measured_curve
from b2gmodel.records import Estimate, Prediction, Verdict, canonical_bytes, digest_of
from b2gmodel.scores import USL

FLIGHTS = (1, 2, 3, 4, 6)
# The closed form's own curve for the usual prediction (M* = 3), a little lower, with its peak at M*.
RIGHT = {1: 320.0, 2: 600.0, 3: 700.0, 4: 690.0, 6: 680.0}
# The same server, were the peak at M = 6.
WRONG = {1: 320.0, 2: 400.0, 3: 500.0, 4: 600.0, 6: 700.0}
FLAT = dict.fromkeys(FLIGHTS, 700.0)


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    made = builders.prediction(flights=FLIGHTS)
    assert made.predictors[0].m_star == 3
    return made


def outcomes(
    prediction: Prediction, truth: Mapping[int, float], *, noise: float, sessions: int = 4, times: int = 100
) -> Counter[str]:
    """Verdicts over repeated measurements of ``truth``, each session with a factor of its own on each run."""
    rng = np.random.default_rng(5)
    counts: Counter[str] = Counter()
    for _ in range(times):
        curve = {m: (x * np.exp(rng.normal(scale=noise, size=sessions))).tolist() for m, x in truth.items()}
        counts[judge(prediction, builders.measurement(prediction, curve)).outcome] += 1
    return counts


class TestKnownTruths:
    def test_a_right_m_star_is_held(self, prediction: Prediction) -> None:
        assert outcomes(prediction, RIGHT, noise=0.01) == {"held": 100}

    def test_a_wrong_m_star_is_refuted(self, prediction: Prediction) -> None:
        assert outcomes(prediction, WRONG, noise=0.01) == {"refuted": 100}

    def test_noise_is_inconclusive(self, prediction: Prediction) -> None:
        """With 40 % noise and two sessions nothing can be told."""
        counts = outcomes(prediction, FLAT, noise=0.4, sessions=2)
        assert counts["inconclusive"] >= 90
        assert counts["held"] == 0

    def test_a_flat_top_is_not_refuted(self, prediction: Prediction) -> None:
        """The best of four others is picked after the fact, which favours it: each has its share of the risk."""
        assert outcomes(prediction, FLAT, noise=0.02)["refuted"] == 0

    def test_a_slight_noise_does_not_hide_a_large_regret(self, prediction: Prediction) -> None:
        assert outcomes(prediction, WRONG, noise=0.05)["held"] == 0


def place(prediction: Prediction, at_m_star: list[float], rival: list[float], **changes: Any) -> Verdict:
    return judge(prediction, builders.measurement(prediction, {1: rival, 3: at_m_star}, **changes))


class TestOneVerdict:
    def test_by_hand(self, prediction: Prediction) -> None:
        curve = {1: [320.0, 320.0], 2: [600.0, 600.0], 3: [640.0, 640.0], 4: [650.0, 650.0]}
        verdict = judge(prediction, builders.measurement(prediction, curve, baseline=200.0))
        assert (verdict.outcome, verdict.m_star, verdict.best_flights) == ("held", 3, 4)
        loss = pytest.approx(1 - 640 / 650, rel=1e-5)
        assert (verdict.regret.mean, verdict.regret.low, verdict.regret.high) == (loss, loss, loss)
        assert (verdict.m_95, verdict.confidence_set, verdict.sessions) == (3, None, 2)
        assert verdict.baseline_per_s == 200.0
        heights = [score for score in verdict.heights if score.predictor == "closed-form"]
        assert [score.flights for score in heights] == [1, 2, 3, 4]
        assert [score.predicted_per_s for score in heights] == pytest.approx([320, 640, 800, 800])
        assert [score.error for score in heights] == pytest.approx([0, 640 / 600 - 1, 0.25, 800 / 650 - 1], rel=1e-5)
        assert verdict.sentence == (
            "The predicted M* = 3 held: the measured peak, 650 request/s, is at M = 4, and M* gives 1.5% less. "
            "The height: closed-form promised 800 and 640 were measured at M*, 25.0% too high; no claim was made of it."
        )

    def test_each_curve_is_scored_and_bounds_are_not_a_curve(self, prediction: Prediction) -> None:
        curve = {1: [320.0] * 2, 2: [600.0] * 2, 3: [640.0] * 2, 4: [650.0] * 2}
        heights = judge(prediction, builders.measurement(prediction, curve)).heights
        assert list(dict.fromkeys(score.predictor for score in heights)) == [
            "closed-form", "mva", "twice-instances", USL,
        ]  # fmt: skip
        # A law of three coefficients through four points has seen them all, and lies close.
        assert [score.error for score in heights if score.predictor == USL] == pytest.approx([0] * 4, abs=0.1)

    def test_three_points_are_no_test_of_a_law_of_three_coefficients(self, prediction: Prediction) -> None:
        curve = {1: [320.0] * 2, 2: [600.0] * 2, 3: [640.0] * 2}
        verdict = judge(prediction, builders.measurement(prediction, curve))
        assert USL not in {score.predictor for score in verdict.heights}

    def test_what_the_runs_show_is_part_of_the_verdict(self, prediction: Prediction) -> None:
        verdict = judge(prediction, builders.measurement(prediction, {1: [300.0] * 2, 3: [900.0] * 2}))
        assert [each.name for each in verdict.diagnostics] == ["gain-above-limit"]

    def test_it_names_both_records(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {1: [1.0, 1.0], 3: [2.0, 2.0]})
        verdict = judge(prediction, measured)
        assert (verdict.prediction_digest, verdict.measurement_digest) == (digest_of(prediction), digest_of(measured))

    def test_at_the_peak_the_regret_is_zero(self, prediction: Prediction) -> None:
        verdict = place(prediction, [110.0, 110.0], [100.0, 100.0])
        assert (verdict.regret, verdict.best_flights) == (Estimate(mean=0.0, low=0.0, high=0.0, level=0.9), 3)

    def test_sessions_are_compared_pair_by_pair(self, prediction: Prediction) -> None:
        """Sessions that differ threefold, but keep their ratio, leave no doubt."""
        verdict = place(prediction, [98.0, 294.0, 196.0], [100.0, 300.0, 200.0])
        assert verdict.outcome == "held"
        assert verdict.regret.high == pytest.approx(0.02, rel=1e-5)

    def test_a_session_that_lacks_a_run_is_not_paired_with_another(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {1: [100.0, 300.0], 3: [98.0, 294.0]})
        first, second = measured.sessions
        third = first.model_copy(update={"session_id": "third", "begin_boottime_ns": "2000", "runs": first.runs[:1]})
        measured = measured.model_copy(update={"sessions": (second, third, first)})
        one, three = measured_curve(measured)
        assert (one.sessions, three.sessions) == ((0, 1, 2), (0, 2))
        assert one.log_ratios(three) == pytest.approx([np.log(300 / 294), np.log(100 / 98)])

    def test_one_session_has_no_interval(self, prediction: Prediction) -> None:
        verdict = place(prediction, [110.0], [100.0])
        assert verdict.outcome == "inconclusive"
        assert verdict.regret == Estimate(mean=0.0)
        assert verdict.checks[0].more_sessions == 1
        assert verdict.checks[0].observed.endswith("one session has no interval: needs at least 1 more")

    @pytest.mark.parametrize(("at_m_star", "outcome"), [(95.1, "held"), (94.9, "refuted")])
    def test_published_figures_count_as_they_are(self, prediction: Prediction, at_m_star: float, outcome: str) -> None:
        verdict = place(prediction, [at_m_star], [100.0], preregistered=False, prediction_digest=None)
        assert (verdict.outcome, verdict.preregistered) == (outcome, False)

    def test_without_c1_there_is_no_baseline(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {1: [1.0], 3: [2.0]})
        assert measured_baseline(measured) is None

    def test_the_curve_is_of_c3_and_c4(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {3: [2.0, 4.0], 1: [1.0]}, baseline=9.0)
        assert [(point.flights, point.by_session) for point in measured_curve(measured)] == [
            (1, (1.0,)),
            (3, (2.0, 4.0)),
        ]
        assert measured_curve(measured)[0].interval is None


class TestRefused:
    """What does not belong together gets no verdict, each for its own reason; test_evidence.py has the rest."""

    def refused(self, prediction: Prediction, measured: Any) -> str:
        with pytest.raises(EvidenceError) as seen:
            judge(prediction, measured)
        assert seen.value.where == measured.name
        return seen.value.problem

    def test_of_another_prediction(self, prediction: Prediction) -> None:
        other = builders.prediction(builders.calibration(name="other"))
        measured = builders.measurement(other, {1: [1.0, 1.0], 3: [2.0, 2.0]})
        assert self.refused(prediction, measured) == "the measurement was made for another prediction"

    def test_preregistered_without_a_prediction(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {1: [1.0], 3: [2.0]}, prediction_digest=None)
        assert self.refused(prediction, measured) == "a pre-registered measurement must name its prediction"

    @pytest.mark.parametrize(
        ("aspect", "value"),
        [
            ("model", builders.model_info(instances=2)),
            ("transport", "grpc"),
            ("k", 4),
            ("payload_bytes", 47),
        ],
    )
    def test_of_something_else(self, prediction: Prediction, aspect: str, value: Any) -> None:
        measured = builders.measurement(prediction, {1: [1.0], 3: [2.0]}, **{aspect: value})
        assert self.refused(prediction, measured) == f"the measurement is of something else: its {aspect} differs"

    def test_without_m_star(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {1: [1.0], 4: [2.0]})
        assert self.refused(prediction, measured) == "the measurement has no run at the predicted M*"

    def test_with_m_star_alone(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {3: [1.0]}, baseline=1.0)
        assert self.refused(prediction, measured) == "the measurement holds one M alone: there is nothing to compare"


class TestHeight:
    """The second claim: X(M*) of the best estimate within 10 % of what was measured there."""

    @pytest.fixture
    def with_height(self) -> Prediction:
        law = builders.transport_law([50, 80, 100, 100], held_s=1e-12)
        made = builders.prediction(builders.calibration(builders.point().model_copy(update={"transport_law": law})))
        assert [claim.quantity for claim in made.claims] == ["regret_at_m_star", "height_error_at_m_star"]
        assert made.claims[1].predictor == "mva"
        return made

    def verdict(self, of: Prediction, ratios: list[float]) -> Verdict:
        promised = of.predictor("mva").at(3)
        assert promised is not None
        at_m_star = [promised.throughput_per_s * ratio for ratio in ratios]
        return judge(of, builders.measurement(of, {1: [x / 2 for x in at_m_star], 3: at_m_star}))

    @pytest.mark.parametrize(
        ("ratios", "outcome"),
        [
            ([1.0, 1.01, 0.99], "held"),
            ([0.91, 0.91, 0.91], "held"),
            ([0.90, 0.90, 0.90], "refuted"),  # log(1 / 0.9) = 0.105
            ([1.10, 1.10, 1.10], "held"),
            ([1.11, 1.11, 1.11], "refuted"),
            ([0.9, 1.0, 1.1], "inconclusive"),
        ],
    )
    def test_each_side_of_its_bound(self, with_height: Prediction, ratios: list[float], outcome: str) -> None:
        verdict = self.verdict(with_height, ratios)
        place, height = verdict.checks
        assert (place.outcome, height.outcome, verdict.outcome) == ("held", outcome, outcome)

    def test_the_verdict_is_that_of_its_worst_claim(self, with_height: Prediction) -> None:
        promised = with_height.predictor("mva").at(3)
        assert promised is not None
        x = promised.throughput_per_s
        verdict = judge(with_height, builders.measurement(with_height, {1: [2 * x] * 3, 3: [0.8 * x, x, 1.2 * x]}))
        assert [check.outcome for check in verdict.checks] == ["refuted", "inconclusive"]
        assert verdict.outcome == "refuted"

    def test_the_sessions_that_are_needed_would_do(self, with_height: Prediction) -> None:
        ratios = [0.9, 1.0, 1.1]
        (_, height) = self.verdict(with_height, ratios).checks
        # In logarithms: mean 0.0033, deviation 0.1003; with t(4) / sqrt(5) at most 0.099, with t(3) / sqrt(4) 0.121.
        assert height.more_sessions == 2
        assert height.observed.endswith("needs about 2 more sessions")

    def test_a_mean_at_the_bound_is_never_decided(self, with_height: Prediction) -> None:
        step = 0.02
        ratios = [float(np.exp(-0.1 - step)), float(np.exp(-0.1)), float(np.exp(-0.1 + step))]
        (_, height) = self.verdict(with_height, ratios).checks
        assert (height.outcome, height.more_sessions) == ("inconclusive", None)
        assert height.observed.endswith("too close to the bound for 1000 more sessions")

    def test_place_and_height_in_words(self, with_height: Prediction) -> None:
        promised = with_height.predictor("mva").at(3)
        assert promised is not None
        x = promised.throughput_per_s
        verdict = self.verdict(with_height, [0.8] * 2)
        assert verdict.sentence == (
            f"The predicted M* = 3 held: the measured peak, {0.8 * x:.4g} request/s, is at M = 3. The height: mva "
            f"promised {x:.4g} and {0.8 * x:.4g} were measured at M*, 25.0% too high: refuted."
        )


def test_the_same_records_give_the_same_verdict(prediction: Prediction) -> None:
    measured = builders.measurement(prediction, {1: [1.0, 1.1], 3: [2.0, 2.1]})
    assert digest_of(judge(prediction, measured)) == digest_of(judge(prediction, measured))


def test_a_verdict_keeps_six_digits_and_stays_small(prediction: Prediction) -> None:
    curve = {m: [x * (1 + 0.001 * s) for s in range(6)] for m, x in RIGHT.items()}
    verdict = judge(prediction, builders.measurement(prediction, curve))
    assert all(len(f"{score.error:.12g}") <= len("-0.000123456") for score in verdict.heights)
    assert verdict.confidence_set == (3,)
    assert len(canonical_bytes(verdict)) < 16_384
