"""The judge on truths that we know: a right M* held, a wrong one refuted, noise told from knowledge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import builders
import numpy as np
import pytest

from b2gmodel.errors import EvidenceError
from b2gmodel.judge import judge, measured_baseline, measured_curve
from b2gmodel.records import Estimate, Prediction, Verdict, digest_of

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
    prediction: Prediction, truth: Mapping[int, float], *, noise: float, sessions: int = 4, times: int = 200
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
        assert outcomes(prediction, RIGHT, noise=0.01) == {"held": 200}

    def test_a_wrong_m_star_is_refuted(self, prediction: Prediction) -> None:
        assert outcomes(prediction, WRONG, noise=0.01) == {"refuted": 200}

    def test_noise_is_inconclusive(self, prediction: Prediction) -> None:
        """With 40 % noise and two sessions nothing can be told."""
        counts = outcomes(prediction, FLAT, noise=0.4, sessions=2)
        assert counts["inconclusive"] >= 160
        assert counts["held"] <= 5

    def test_a_flat_top_is_seldom_refuted(self, prediction: Prediction) -> None:
        """The best of four others is picked after the fact, which favours it; the bound takes that up."""
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
        assert verdict.regret == pytest.approx(1 - 640 / 650)
        assert verdict.regret_against_best_other.mean == pytest.approx(1 - 640 / 650)
        assert verdict.regret_against_best_other.low == pytest.approx(1 - 640 / 650)
        assert verdict.baseline_per_s == 200.0
        assert [score.flights for score in verdict.heights] == [1, 2, 3, 4]
        assert [score.predicted_per_s for score in verdict.heights] == pytest.approx([320, 640, 800, 800])
        assert [score.error for score in verdict.heights] == pytest.approx([0, 640 / 600 - 1, 0.25, 800 / 650 - 1])
        assert verdict.sentence == (
            "The predicted M* = 3 held: the measured peak, 650 request/s, is at M = 4, and M* gives 1.5% less. "
            "The closed-form predictor promised 800 request/s at M*, 1.25 times what was measured there (640)."
        )

    def test_it_names_both_records(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {1: [1.0, 1.0], 3: [2.0, 2.0]})
        verdict = judge(prediction, measured)
        assert (verdict.prediction_digest, verdict.measurement_digest) == (digest_of(prediction), digest_of(measured))

    def test_at_the_peak_the_regret_is_zero_and_signed_against_the_next(self, prediction: Prediction) -> None:
        verdict = place(prediction, [110.0, 110.0], [100.0, 100.0])
        assert (verdict.regret, verdict.best_flights) == (0.0, 3)
        assert verdict.regret_against_best_other.mean == pytest.approx(-0.1)

    def test_sessions_are_compared_pair_by_pair(self, prediction: Prediction) -> None:
        """Sessions that differ threefold, but keep their ratio, leave no doubt."""
        verdict = place(prediction, [100.0, 300.0, 200.0], [98.0, 294.0, 196.0])
        assert verdict.outcome == "held"
        assert verdict.regret_against_best_other.high == pytest.approx(1 - 100 / 98)

    def test_one_session_has_no_interval(self, prediction: Prediction) -> None:
        verdict = place(prediction, [110.0], [100.0])
        assert verdict.outcome == "inconclusive"
        assert verdict.regret_against_best_other == Estimate(mean=1 - 110 / 100)

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


class TestEvidence:
    """What cannot be judged is refused, each for its own reason."""

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

    def test_failed_flights(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {1: [1.0], 3: [2.0]})
        (session,) = measured.sessions
        session = session.model_copy(update={"runs": (*session.runs, builders.run("C4", 4, 3.0, failed=2))})
        measured = measured.model_copy(update={"sessions": (session,)})
        assert self.refused(prediction, measured) == "flights failed during the measurement"

    def test_without_m_star(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {1: [1.0], 4: [2.0]})
        assert self.refused(prediction, measured) == "the measurement has no run at the predicted M*"

    def test_with_m_star_alone(self, prediction: Prediction) -> None:
        measured = builders.measurement(prediction, {3: [1.0]}, baseline=1.0)
        assert self.refused(prediction, measured) == "the measurement holds one M alone: there is nothing to compare"


def test_the_same_records_give_the_same_verdict(prediction: Prediction) -> None:
    measured = builders.measurement(prediction, {1: [1.0, 1.1], 3: [2.0, 2.1]})
    assert digest_of(judge(prediction, measured)) == digest_of(judge(prediction, measured))
