"""Records -> laws: ladders by hand, lines against statsmodels, and what is missing said to be missing."""

from __future__ import annotations

import builders
import numpy as np
import pytest
import statsmodels.api as sm
from scipy.stats import kstest
from statsmodels.stats.anova import anova_lm

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.laws import (
    LEAST_TRANSPORT_SHARE,
    Floats,
    Laws,
    busy_service_s,
    choose_point,
    fit_line,
    laws_of,
    occupancy,
    service_growth_s,
    service_line,
    transport_line,
    transport_rates_per_s,
)
from b2gmodel.records import (
    Block,
    Calibration,
    CalibrationPoint,
    ComputeLaw,
    Estimate,
    LoadedPoint,
    ModelInfo,
    TransportLaw,
)

ONE_ROW = np.array([0.020])


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def ladder(law: TransportLaw, transport_s: Floats = ONE_ROW) -> Floats:
    return transport_rates_per_s(law, transport_s, rng())


class TestTransportLadder:
    def test_by_hand(self) -> None:
        """X = 50, 80, 100 a second, held for 5 ms: 2 - 0.4 = 1.6 and 3 - 0.5 = 2.5 of them are in transport.

        mu(1) = 1 / 20 ms = 50; mu(2) lies at (2 - 1.6) / 0.9 of the way from 80 to 100; from 2.5 on it stays 100.
        """
        rates = ladder(builders.transport_law([50, 80, 100], held_s=0.005))
        assert rates == pytest.approx(np.array([[50, 80 + 20 * 0.4 / 0.9, 100]]))

    def test_between_one_and_the_first_point_it_starts_from_the_models_own(self) -> None:
        """4 in flight at X = 100, held for 10 ms: 3 in transport. On the line from (1, 40) to (3, 100): 70 at 2."""
        law = builders.transport_law([100.0], held_s=0.010, flights=[4])
        assert ladder(law, np.array([0.025])) == pytest.approx(np.array([[40, 70, 100]]))

    def test_the_nulls_queue_is_taken_out_as_its_instance_time_is(self) -> None:
        waiting = builders.transport_law([50, 80, 100], held_s=0.003, queue_s=0.002)
        assert ladder(waiting) == pytest.approx(ladder(builders.transport_law([50, 80, 100], held_s=0.005)))

    def test_the_nulls_single_flight_rate_is_not_used(self) -> None:
        with_it, without = ([999, 80, 100], [1, 80, 100])
        assert ladder(builders.transport_law(with_it, held_s=1e-5)) == pytest.approx(
            ladder(builders.transport_law(without, held_s=1e-5))
        )

    def test_a_dip_is_pooled(self) -> None:
        """100, 90 become 95, 95; then 94 pools all three to 94 2/3. Held for no time, so that n is n in transport."""
        rates = ladder(builders.transport_law([50, 80, 100, 90, 94, 120], held_s=1e-12))
        pooled = (100 + 90 + 94) / 3
        assert rates == pytest.approx(np.array([[50, 80, pooled, pooled, pooled, 120]]))

    def test_a_law_that_falls_throughout_is_level(self) -> None:
        rates = ladder(builders.transport_law([50, 120, 100, 80], held_s=1e-12))
        assert rates == pytest.approx(np.array([[50, 100, 100, 100]]))

    def test_the_order_of_the_points_does_not_matter(self) -> None:
        law = builders.transport_law([50, 80, 100], held_s=0.005)
        turned = law.model_copy(update={"points": law.points[::-1]})
        assert ladder(turned).tolist() == ladder(law).tolist()

    def test_a_null_that_holds_its_instance_all_the_time_leaves_one_in_transport(self) -> None:
        """X (S + Q) >= m - 1: fewer than one in transport is taken for one, and mu(1) is still the model's own."""
        assert ladder(builders.transport_law([50, 80], held_s=0.015)) == pytest.approx(np.array([[50]]))

    def test_single_flight_alone_is_no_law(self) -> None:
        with pytest.raises(EvidenceError, match="holds no point beyond single-flight: saw \\[1\\]"):
            ladder(builders.transport_law([50.0]))

    def test_draws_spread_as_the_interval_says_and_the_estimate_does_not(self) -> None:
        law = builders.transport_law([50, 80, 120], held_s=1e-12, relative_half_width=0.0196)
        rates = ladder(law, np.full(20_001, 0.020))
        assert rates[0] == pytest.approx([50, 80, 120])
        assert rates[1:, 0] == pytest.approx(50)
        assert rates[1:].mean(axis=0) == pytest.approx([50, 80, 120], rel=1e-3)
        assert rates[1:].std(axis=0) == pytest.approx([0, 0.8, 1.2], rel=0.03)

    def test_draws_are_pooled_where_the_estimate_is(self) -> None:
        """80 and 78 are pooled to 79 in every draw, which then spreads by 1 / sqrt(2) of one: no draw adds a dip."""
        law = builders.transport_law([50, 80, 78, 200], held_s=1e-12, relative_half_width=0.0196)
        rates = ladder(law, np.full(20_001, 0.020))
        assert rates[:, 1] == pytest.approx(rates[:, 2])
        assert rates[1:, 1].mean() == pytest.approx(79, rel=1e-3)
        assert rates[1:, 1].std() == pytest.approx(0.79 / 2**0.5, rel=0.03)

    def test_what_is_known_better_weighs_more_in_a_pool(self) -> None:
        """100 known to 1 % and 90 known to 3 %: weights 9 to 1, so 99; below half a percent they weigh alike: 95."""

        def known_to(*spreads: float) -> TransportLaw:
            law = builders.transport_law([50, 100, 90], held_s=1e-12)
            points = [law.points[0]]
            for point, spread in zip(law.points[1:], spreads, strict=True):
                mean = point.batches_per_s.mean
                half = 1.959963984540054 * spread * mean
                interval = Estimate(mean=mean, low=mean - half, high=mean + half, level=0.95)
                points.append(point.model_copy(update={"batches_per_s": interval}))
            return law.model_copy(update={"points": tuple(points)})

        assert ladder(known_to(0.01, 0.03)) == pytest.approx(np.array([[50, 99, 99]]))
        assert ladder(known_to(0.004, 0.0001)) == pytest.approx(np.array([[50, 95, 95]]))

    def test_no_interval_no_spread(self) -> None:
        rates = ladder(builders.transport_law([50, 80, 100], held_s=0.005), np.full(5, 0.020))
        assert (rates == rates[0]).all()


def grown(law: TransportLaw, *inside: float) -> list[float]:
    """Growth of S in seconds with that many batches in transport."""
    found: list[float] = service_growth_s(law, np.array(inside)).tolist()
    return found


class TestServiceUnderLoad:
    def test_it_grows_by_what_the_null_grows(self) -> None:
        """1 ms alone, 2 and 4 ms under load: 2 ms longer on average, whatever the model's own S and load."""
        law = builders.transport_law([50, 80, 100], held_s=[0.001, 0.002, 0.004])
        assert grown(law, 0.5, 7.0) == pytest.approx([0.002, 0.002])

    def test_a_null_that_is_faster_under_load_gives_no_growth(self) -> None:
        assert grown(builders.transport_law([50, 80], held_s=[0.004, 0.002]), 1.0) == [0.0]

    @pytest.mark.parametrize("flights", [[1], [2]])
    def test_one_side_alone_gives_no_growth(self, flights: list[int]) -> None:
        assert grown(builders.transport_law([50.0], flights=flights), 1.0) == [0.0]

    def test_the_models_own_s_beside_null_batches_goes_before_it(self) -> None:
        """X(1) = 50, held 4 ms: of 20 ms 16 are transport, 0.8 of a batch; at 2, 2 - 80 x 0.004 = 1.68."""
        law = loaded(0.010, 0.011, 0.013)
        assert grown(law, 0.0, 0.4, 0.8, 1.24, 1.68, 5.0) == pytest.approx([0, 0.0005, 0.001, 0.002, 0.003, 0.003])

    def test_a_dip_of_s_under_load_is_no_gain(self) -> None:
        assert grown(loaded(0.010, 0.009, 0.012), 0.8, 1.68) == pytest.approx([0.0, 0.002])

    def test_the_load_is_that_at_which_the_instances_are_full(self) -> None:
        """Instances pass 40/s, transport 50 with one inside: 0.8 of a batch; at 65/s half way from 50 to 80."""
        rates = np.array([[50.0, 80.0, 100.0]])
        assert [float(occupancy(rates, np.array([limit]))[0]) for limit in (40.0, 65.0, 100.0, 500.0)] == pytest.approx(
            [0.8, 1.5, 3.0, 3.0]
        )

    def test_the_compute_laws_shape_over_the_models_own_s(self) -> None:
        law = builders.compute_law(0.020, 0.024, 0.030)
        busy = busy_service_s(np.array([0.010, 0.020]), 3, law)
        assert busy == pytest.approx(np.array([[0.010, 0.012, 0.015], [0.020, 0.024, 0.030]]))

    @pytest.mark.parametrize("law", [None, builders.compute_law(0.010), builders.compute_law()])
    def test_without_it_s_stands_for_all(self, law: ComputeLaw | None) -> None:
        assert busy_service_s(np.array([0.010]), 2, law) == pytest.approx(np.array([[0.010, 0.010]]))


def loaded(*times_s: float) -> TransportLaw:
    """S with 0, 1, ... null batches beside it."""
    points = tuple(LoadedPoint(null_flights=n, cycles=30, service_s=s) for n, s in enumerate(times_s))
    return builders.transport_law([50, 80], held_s=0.004).model_copy(update={"loaded": points})


def laws(point: CalibrationPoint, *, draws: int = 50, model: ModelInfo | None = None) -> Laws:
    return laws_of(builders.calibration(point, model=model), point, draws, rng())


class TestLaws:
    def test_of_one_instance(self) -> None:
        found = laws(builders.point())
        assert (found.batch, found.instances, found.draws) == (8, 1, 50)
        assert (found.cycle_s[0], found.service_s[0], found.transport_s[0]) == pytest.approx((0.025, 0.010, 0.015))
        assert found.compute_limit_per_s[0] == pytest.approx(800)
        assert found.transport_limit_per_s is None
        assert found.knee[0] == pytest.approx(2.5)
        assert found.is_compute_law_measured
        assert found.is_timed

    def test_with_both_laws_by_hand(self) -> None:
        point = builders.point().model_copy(
            update={
                "transport_law": builders.transport_law([50, 80, 100], held_s=1e-12),
                "compute_law": builders.compute_law(0.010, 0.0125),
            }
        )
        found = laws(point, model=builders.model_info(instances=2))
        assert found.transport_rates_per_s is not None
        assert found.transport_limit_per_s is not None
        # mu(1) is 1 / 15 ms of the model's own; j / S(j) is 100, 160; the transport's 100 binds: N* = 25 ms x 100.
        assert found.transport_rates_per_s[0] == pytest.approx([1 / 0.015, 80, 100])
        assert found.instance_rates_per_s[0] == pytest.approx([100, 160])
        assert (found.compute_limit_per_s[0], found.transport_limit_per_s[0]) == pytest.approx((1280, 800))
        assert found.knee[0] == pytest.approx(2.5)
        assert len(found.transport_rates_per_s) == len(found.cycle_s) == 51

    def test_two_instances_that_are_slower_than_one(self) -> None:
        """j / S(j) falls from 100 to 95: the limit is the larger."""
        point = builders.point().model_copy(update={"compute_law": builders.compute_law(0.010, 0.020 / 0.95)})
        found = laws(point, model=builders.model_info(instances=2))
        assert found.compute_limit_per_s[0] == pytest.approx(800)

    @pytest.mark.parametrize(
        ("law", "instances", "measured"),
        [
            (None, 1, True),
            (None, 2, False),
            (builders.compute_law(0.01), 2, False),
            (builders.compute_law(0.01, 0.01), 2, True),
            (builders.compute_law(0.01, 0.01, 0.01), 2, True),
        ],
    )
    def test_whether_the_compute_law_is_whole(self, law: ComputeLaw | None, instances: int, measured: bool) -> None:
        point = builders.point().model_copy(update={"compute_law": law})
        assert laws(point, model=builders.model_info(instances=instances)).is_compute_law_measured is measured

    def test_an_unstated_number_of_instances_is_one(self) -> None:
        assert laws(builders.point(), model=builders.model_info(instances=None)).instances == 1

    def test_a_negative_transport_counts_as_next_to_none(self) -> None:
        found = laws(builders.point(transport_s=-0.001), draws=0)
        assert found.transport_s[0] == pytest.approx(LEAST_TRANSPORT_SHARE * 0.009)

    def test_published_rates_are_not_times_of_a_batch(self) -> None:
        point = CalibrationPoint(k=None, payload_bytes=48, transport_share=Estimate(mean=0.6), throughput_per_s=80.0)
        found = laws(point)
        assert (found.batch, found.draws, found.is_timed) == (1, 0, False)
        assert (found.cycle_s[0], found.service_s[0]) == pytest.approx((1 / 80, 0.4 / 80))

    def test_the_largest_batch_unless_one_is_asked_for(self) -> None:
        of = builders.calibration(builders.point(2), builders.point(8), builders.point(4))
        assert [choose_point(of, k).k for k in (None, 4)] == [8, 4]
        with pytest.raises(UsageError, match="no point for this batch size: saw 3"):
            choose_point(of, 3)


def samples(means: list[float], spreads: list[float], n: int, seed: int = 3) -> list[Floats]:
    drawn = rng(seed)
    return [drawn.normal(mean, spread, n) for mean, spread in zip(means, spreads, strict=True)]


class TestLine:
    def test_two_points_by_hand(self) -> None:
        line = fit_line([1.0, 3.0], [np.array([2.0, 4.0]), np.array([6.0, 8.0])])
        assert (line.intercept, line.slope) == pytest.approx((1, 2))
        assert line.at(5) == pytest.approx(11)
        assert (line.p_lack_of_fit, line.is_wrong) == (None, False)
        # Both means have variance 1: slope (y2 - y1) / 2, intercept y1 - slope.
        assert line.covariance == pytest.approx(np.array([[2.5, -1.0], [-1.0, 0.5]]))
        assert "not tested (two points)" in repr(line)

    def test_against_statsmodels(self) -> None:
        """Weights 1 / variance of the mean, and covariance by those variances (not by the misses)."""
        x, of = [1.0, 2.0, 4.0, 8.0], samples([3, 4, 7, 11], [0.1, 0.3, 0.2, 0.5], 20)
        line = fit_line(x, of)
        variances = np.array([each.var(ddof=1) / len(each) for each in of])
        theirs = sm.WLS([each.mean() for each in of], sm.add_constant(x), weights=1 / variances).fit(
            cov_type="fixed scale"
        )
        assert (line.intercept, line.slope) == pytest.approx(tuple(theirs.params))
        assert line.covariance == pytest.approx(theirs.cov_params())

    def test_lack_of_fit_against_statsmodels(self) -> None:
        """With equal spreads it is the textbook F: the line against a mean for each x, by analysis of variance."""
        x, noise = [1.0, 2.0, 4.0, 8.0], np.array([-1.0, 1.0, -0.5, 0.5, 0.0])
        of = [mean + noise for mean in (3.0, 5.4, 7.1, 14.0)]
        every_x, every_y = np.repeat(x, 5), np.concatenate(of)
        line = sm.OLS(every_y, sm.add_constant(every_x)).fit()
        means = sm.OLS(every_y, (every_x[:, np.newaxis] == x).astype(float)).fit()
        table = anova_lm(line, means)
        assert fit_line(x, of).p_lack_of_fit == pytest.approx(float(table["Pr(>F)"].iloc[1]))
        assert 0.001 < float(table["Pr(>F)"].iloc[1]) < 0.9

    def test_p_is_uniform_where_the_line_is_right(self) -> None:
        x = [1.0, 2.0, 4.0, 8.0]
        drawn = rng(5)
        ps = [
            fit_line(x, [drawn.normal(3 + 2 * each, 0.1 * each, 20) for each in x]).p_lack_of_fit for _ in range(1000)
        ]
        assert kstest([p for p in ps if p is not None], "uniform").pvalue > 0.01
        # The negative control: a spread that is stated a third too small is seen.
        assert kstest([min(1.0, (p or 0.0) * 0.7) for p in ps], "uniform").pvalue < 0.01

    def test_a_bent_ladder_is_wrong(self) -> None:
        """S grows only from k = 4 on: the line misses a point by far more than its spread, and by more than 2 %."""
        line = fit_line([1, 2, 4, 8], samples([10, 10, 10, 20], [0.1] * 4, 20))
        assert line.p_lack_of_fit is not None
        assert line.p_lack_of_fit < 1e-6
        assert line.worst_deviation > 0.1
        assert line.is_wrong
        assert "a line is wrong here" in repr(line)

    def test_a_bend_below_two_percent_does_not_matter(self) -> None:
        line = fit_line([1, 2, 4, 8], samples([10, 10.1, 10.2, 10.8], [0.01] * 4, 20))
        assert line.p_lack_of_fit is not None
        assert line.p_lack_of_fit < 0.01
        assert line.worst_deviation < 0.02
        assert not line.is_wrong

    def test_a_bend_within_the_noise_is_not_surprising(self) -> None:
        assert not fit_line([1, 2, 4, 8], samples([10, 11, 10, 14], [8.0] * 4, 20)).is_wrong

    def test_samples_without_spread_make_a_line(self) -> None:
        line = fit_line([1, 2], [np.array([3.0, 3.0]), np.array([5.0, 5.0])])
        assert (line.intercept, line.slope) == pytest.approx((1, 2))

    def test_draws_spread_by_the_covariance(self) -> None:
        line = fit_line([1.0, 3.0], [np.array([2.0, 4.0]), np.array([6.0, 8.0])])
        drawn = line.draws_at(5.0, 20_000, rng())
        # Var = 2.5 + 2 x 5 x (-1) + 25 x 0.5 = 5.
        assert (drawn.mean(), drawn.var()) == pytest.approx((11, 5), rel=0.03)

    @pytest.mark.parametrize("x", [[1.0], [2.0, 2.0], []])
    def test_one_place_is_no_line(self, x: list[float]) -> None:
        with pytest.raises(EvidenceError, match="a line needs two points"):
            fit_line(x, [np.array([1.0, 2.0])] * len(x))

    def test_one_block_has_no_spread(self) -> None:
        with pytest.raises(EvidenceError, match="too few blocks"):
            fit_line([1.0, 2.0], [np.array([1.0, 2.0]), np.array([1.0])])


def of_ladder() -> Calibration:
    """S(k) = 2 ms + 1 ms k and D = 3 ms + 10 us a byte, exactly; listed out of order."""
    points = []
    for k in (8, 2, 4):
        service_s, transport_s = 0.002 + 0.001 * k, 0.003 + 1e-5 * k * builders.PAYLOAD_BYTES
        signs = [1.0 + 0.01 * (-1) ** number for number in range(20)]
        blocks = tuple(
            Block(session=0, cycle_s=(service_s + transport_s) * sign, service_s=service_s * sign) for sign in signs
        )
        point = builders.point(k, service_s=service_s, transport_s=transport_s)
        points.append(point.model_copy(update={"blocks": blocks}))
    return builders.calibration(*points)


def test_the_lines_of_a_calibration() -> None:
    service, transport = service_line(of_ladder()), transport_line(of_ladder())
    assert service.x == (2.0, 4.0, 8.0)
    assert (service.intercept, service.slope) == pytest.approx((0.002, 0.001))
    assert transport.x == (96.0, 192.0, 384.0)
    assert (transport.intercept, transport.slope) == pytest.approx((0.003, 1e-5))
    assert not service.is_wrong


def test_one_batch_size_has_no_line() -> None:
    with pytest.raises(EvidenceError, match="a line needs two points"):
        service_line(builders.calibration())
