"""Calibration -> Prediction: by hand, byte for byte again, and nothing from what is not there."""

from __future__ import annotations

import builders
import pytest

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.prediction import predict
from b2gmodel.records import (
    Block,
    Calibration,
    CalibrationPoint,
    Estimate,
    Plan,
    Prediction,
    PredictorResult,
    canonical_bytes,
    digest_of,
)


def predicted(of: Calibration, *, k: int | None = None, plan: Plan | None = None, seed: int = 1) -> Prediction:
    return predict(of, k=k, plan=plan or builders.plan(), software=builders.SOFTWARE, seed=seed, draws=500)


def closed_form(of: Calibration) -> PredictorResult:
    """The first predictor's result, which is the closed form's."""
    return predicted(of).predictors[0]


def published(share: float | None = 0.6, rate: float | None = 80.0) -> Calibration:
    """As a publication gives it: a share and a rate, no times, no k."""
    point = CalibrationPoint(
        k=None,
        payload_bytes=48,
        transport_share=None if share is None else Estimate(mean=share),
        throughput_per_s=rate,
    )
    return builders.calibration(point)


def test_the_curve_by_hand() -> None:
    # S = 10 ms, D = 15 ms, k = 8: C/S = 2.5, X(1) = 8/25 ms = 320, plateau 8/10 ms = 800.
    result = closed_form(builders.calibration())
    assert result.name == "closed-form"
    assert (result.m_star, result.peak_per_s) == pytest.approx((3, 800))
    assert [point.flights for point in result.curve] == list(range(1, 17))
    assert [point.throughput_per_s for point in result.curve] == pytest.approx([320, 640] + [800] * 14)


def test_two_instances_by_hand() -> None:
    of = builders.calibration(model=builders.model_info(instances=2))
    result = closed_form(of)
    assert (result.m_star, result.peak_per_s) == pytest.approx((5, 1600))


def test_the_same_calibration_gives_the_same_bytes_and_another_seed_others() -> None:
    once, again, other = (predicted(builders.calibration(), seed=seed) for seed in (1, 1, 2))
    assert canonical_bytes(once) == canonical_bytes(again)
    assert digest_of(once) != digest_of(other)
    assert once.predictors[0].curve[0].throughput_per_s == other.predictors[0].curve[0].throughput_per_s


def test_the_prediction_names_its_calibration() -> None:
    of = builders.calibration()
    made = predicted(of)
    assert (made.calibration_name, made.calibration_digest) == (of.name, digest_of(of))
    assert (made.model, made.k, made.payload_bytes) == (of.model, 8, builders.PAYLOAD_BYTES)


def test_the_interval_is_the_calibrations_own() -> None:
    """C varies with s/sqrt(n) = 1.026 %/sqrt(20); S varies with it, so that C/S and M* are certain here."""
    result = closed_form(builders.calibration(builders.point(spread=0.01)))
    single = result.at(1)
    assert single is not None
    assert single.low is not None
    assert single.high is not None
    width = (single.high - single.low) / single.throughput_per_s
    assert width == pytest.approx(2 * 1.645 * 0.01026 / 20**0.5, rel=0.25)
    assert result.m_star_probabilities == {"3": 1.0}
    assert result.level == 0.90


def test_an_uncertain_ratio_spreads_over_m_star() -> None:
    point = builders.point(service_s=0.010, transport_s=0.0201)
    blocks = tuple(
        Block(session=0, cycle_s=0.0301, service_s=0.010 * (1 + 0.02 * (-1) ** number)) for number in range(20)
    )
    result = closed_form(builders.calibration(point.model_copy(update={"blocks": blocks})))
    assert result.m_star_probabilities is not None
    assert set(result.m_star_probabilities) == {"3", "4"}
    assert sum(result.m_star_probabilities.values()) == pytest.approx(1.0)


def test_without_blocks_there_are_no_intervals() -> None:
    point = builders.point().model_copy(update={"blocks": None})
    made = predicted(builders.calibration(point))
    result = made.predictors[0]
    assert (result.level, result.m_star_probabilities) == (None, None)
    assert {(point.low, point.high) for point in result.curve} == {(None, None)}
    assert "no intervals: the calibration states no uncertainty" in made.notes


def test_published_figures_suffice() -> None:
    result = closed_form(published())
    assert (result.m_star, result.peak_per_s) == pytest.approx((3, 200))


@pytest.mark.parametrize(
    ("share", "rate", "observed"),
    [
        (None, 80.0, "no the transport share, or S and D"),
        (0.5, None, "no the single-flight throughput"),
        (None, None, "no the transport share, or S and D and no the single-flight throughput"),
    ],
)
def test_what_is_not_stated_is_not_guessed(share: float | None, rate: float | None, observed: str) -> None:
    with pytest.raises(EvidenceError, match="does not state what the closed form needs") as seen:
        predicted(published(share, rate))
    assert seen.value.observed == observed


def test_the_point_is_the_largest_or_the_one_asked_for() -> None:
    of = builders.calibration(builders.point(2), builders.point(8), builders.point(4))
    assert [predicted(of).k, predicted(of, k=4).k] == [8, 4]
    with pytest.raises(
        UsageError, match="-k: the calibration has no point for this batch size: saw 3; allowed: 2, 8, 4"
    ):
        predicted(of, k=3)


class TestPlan:
    """What is claimed about M* can be judged: M* is measured, and something beside it."""

    @pytest.mark.parametrize(("transport_s", "m_star"), [(0.045, 6), (0.245, 26)])
    def test_m_star_is_part_of_plan_and_curve(self, transport_s: float, m_star: int) -> None:
        made = predicted(builders.calibration(builders.point(transport_s=transport_s)))
        assert made.predictors[0].m_star == m_star
        assert made.plan.flights == (1, 2, 3, 4, m_star)
        assert made.predictors[0].at(m_star) is not None

    def test_a_plan_that_holds_it_stays_as_it_is(self) -> None:
        assert predicted(builders.calibration()).plan == builders.plan()

    def test_m_star_alone_has_nothing_to_be_compared_with(self) -> None:
        with pytest.raises(UsageError, match="the plan measures M\\* alone"):
            predicted(builders.calibration(), plan=builders.plan((3,)))


class TestUnphysical:
    @pytest.mark.parametrize(("cycle_s", "service_s"), [(0.025, 0.0), (0.025, -0.010), (0.0, 0.010), (-0.025, -0.010)])
    def test_times(self, cycle_s: float, service_s: float) -> None:
        point = builders.point().model_copy(
            update={"cycle_s": Estimate(mean=cycle_s), "service_s": Estimate(mean=service_s)}
        )
        with pytest.raises(EvidenceError, match="the calibration's times are not physical"):
            predicted(builders.calibration(point))

    def test_one_block(self) -> None:
        with pytest.raises(EvidenceError, match="too few blocks"):
            predicted(builders.calibration(builders.point(blocks=1)))

    def test_blocks_too_far_apart(self) -> None:
        with pytest.raises(EvidenceError, match="too uncertain to predict from"):
            predicted(builders.calibration(builders.point(blocks=2, spread=0.99)))

    @pytest.mark.parametrize("share", [1.0, 1.5])
    def test_a_share_that_leaves_no_time_for_service(self, share: float) -> None:
        with pytest.raises(UsageError, match="a transport share leaves time for service"):
            predicted(published(share))


def test_a_negative_overhead_needs_one_flight() -> None:
    result = closed_form(builders.calibration(builders.point(transport_s=-0.001)))
    assert (result.m_star, result.peak_per_s) == pytest.approx((1, 8 / 0.009))


def test_a_name_that_grows_too_long_is_the_users_to_choose() -> None:
    with pytest.raises(UsageError, match="--name: this cannot be the prediction's name"):
        predicted(builders.calibration(name="a" * 127))


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"instances": None}, "the number of instances is not stated; 1 is assumed"),
        ({"dynamic_batching": True}, "the closed form does not apply to a model with the server's dynamic batching on"),
        ({"compute": "emulated"}, "the compute was emulated"),
    ],
)
def test_what_a_reader_must_know_is_noted(changes: dict[str, object], note: str) -> None:
    assert note in predicted(builders.calibration(model=builders.model_info(**changes))).notes
    plain = builders.model_info(compute="real")
    assert note not in predicted(builders.calibration(model=plain)).notes


class TestPredictors:
    """What a prediction holds, in order, and of which kind."""

    LAW = builders.transport_law([50, 80, 100, 100], held_s=1e-12, relative_half_width=0.01)

    def with_law(self) -> Calibration:
        return builders.calibration(builders.point().model_copy(update={"transport_law": self.LAW}))

    def test_without_a_law_all_heights_are_upper_bounds(self) -> None:
        made = predicted(builders.calibration())
        assert [(each.name, each.kind) for each in made.predictors] == [
            ("closed-form", "upper bound"),
            ("bounds", "bounds"),
            ("mva", "upper bound"),
            ("twice-instances", "rival"),
        ]
        assert made.best.name == "closed-form"
        assert made.binding.what == "unknown"
        assert any(note.startswith("no transport law was measured") for note in made.notes)

    def test_with_one_the_mva_is_an_estimate(self) -> None:
        made = predicted(self.with_law())
        assert made.predictor("mva").kind == "estimate"
        assert made.best.name == "mva"
        # Transport carries 8 x 100, as much as compute: which is less cannot be told.
        assert made.binding.what == "neither"

    def test_x_of_one_is_the_measured_one_in_all(self) -> None:
        for each in predicted(self.with_law()).predictors:
            assert each.curve[0].throughput_per_s == pytest.approx(320)
            assert each.curve[0].cycle_s == pytest.approx(0.025)

    def test_a_compute_law_that_is_not_whole_makes_upper_bounds(self) -> None:
        of = builders.calibration(
            builders.point().model_copy(update={"transport_law": self.LAW}), model=builders.model_info(instances=2)
        )
        made = predicted(of)
        assert made.predictor("mva").kind == "upper bound"
        assert any(note.startswith("S with 2 instances busy was not measured") for note in made.notes)

    def test_intervals_hold_their_estimate(self) -> None:
        for each in predicted(self.with_law()).predictors:
            for point in each.curve:
                assert point.low is not None
                assert point.high is not None
                assert point.low <= point.throughput_per_s <= point.high
                assert point.cycle_s == pytest.approx(8 * point.flights / point.throughput_per_s)
