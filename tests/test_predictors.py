"""Laws -> curves: by hand, between their bounds, and against the simulation."""

from __future__ import annotations

from collections.abc import Sequence

import builders
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2gmodel.closed_form import Station
from b2gmodel.laws import Floats, Laws
from b2gmodel.network import ClosedNetwork
from b2gmodel.prediction import binding_of, predict
from b2gmodel.predictors import (
    Curves,
    bounds_curves,
    closed_form_curves,
    mva_curves,
    simulation_curves,
    summary,
    twice_instances_curves,
)
from b2gmodel.sim.simulation import Simulation

FLIGHTS = tuple(range(1, 17))


def laws(
    service_s: float | Sequence[float] = 0.010,
    transport_s: float = 0.015,
    *,
    busy_s: Sequence[float] | None = None,
    rates_per_s: Sequence[float] | None = None,
    cv: float | None = None,
    is_compute_law_measured: bool = True,
) -> Laws:
    """Laws of k = 8, a row for each S; row 0 is the estimate."""
    service = np.atleast_1d(np.asarray(service_s, dtype=float))
    rows = len(service)
    busy = service[:, np.newaxis] if busy_s is None else np.tile(busy_s, (rows, 1))
    return Laws(
        batch=8,
        cycle_s=service + transport_s,
        service_s=service,
        busy_service_s=busy,
        transport_rates_per_s=None if rates_per_s is None else np.tile(rates_per_s, (rows, 1)),
        transport_cv=cv,
        service_cv=cv,
        is_compute_law_measured=is_compute_law_measured,
    )


@st.composite
def any_laws(draw: st.DrawFn) -> Laws:
    """S, D, S(j) and mu(n) that rise and fall at will."""
    service_s = draw(st.floats(1e-4, 1.0))
    transport_s = draw(st.floats(1e-5, 1.0))
    factor = st.floats(0.3, 4.0)
    busy = [service_s * draw(factor) for _ in range(draw(st.integers(1, 4)))]
    rates = None
    if draw(st.booleans()):
        rates = [1 / transport_s, *(draw(factor) * n / transport_s for n in range(2, 2 + draw(st.integers(0, 6))))]
    return laws(service_s, transport_s, busy_s=busy, rates_per_s=rates)


class TestClosedForm:
    def test_by_hand(self) -> None:
        """C = 25 ms, S = 10 ms, k = 8: 320 alone, 800 at the plateau, N* = 2.5."""
        curves = closed_form_curves(laws(), (1, 2, 3, 9))
        assert curves.values == pytest.approx(np.array([[320, 640, 800, 800]]))
        assert (curves.knee[0], curves.plateau_per_s, curves.kind) == (pytest.approx(2.5), 800, "upper bound")

    def test_instances(self) -> None:
        curves = closed_form_curves(laws(busy_s=[0.010, 0.010]), (1, 2, 5, 6))
        assert curves.values == pytest.approx(np.array([[320, 640, 1600, 1600]]))

    def test_twice_instances_is_level_after_2_g(self) -> None:
        curves = twice_instances_curves(laws(transport_s=0.090, busy_s=[0.010] * 2), FLIGHTS)
        assert curves.values[0, :4] == pytest.approx([80, 160, 240, 320])
        assert (curves.values[0, 3:] == curves.values[0, 3]).all()
        assert summary(curves, FLIGHTS, laws(busy_s=[0.010] * 2)).m_star == 4
        assert curves.kind == "rival"


class TestMva:
    def test_without_a_law_transport_is_a_delay(self) -> None:
        network = ClosedNetwork([Station(0.010), Station(0.015, np.inf)])
        curves = mva_curves(laws(), FLIGHTS)
        assert curves.values[0] == pytest.approx(8 * network.throughput(16))
        assert curves.kind == "upper bound"

    def test_a_transport_of_one_at_a_time_is_a_second_server(self) -> None:
        """Two servers of 10 ms: X(M) = M / (M + 1) / 10 ms."""
        curves = mva_curves(laws(transport_s=0.010, rates_per_s=[100.0]), FLIGHTS)
        assert curves.values[0] == pytest.approx([800 * m / (m + 1) for m in FLIGHTS])
        assert curves.kind == "estimate"

    def test_two_instances_with_s_of_two_slower(self) -> None:
        """M = 2 by balance: states (t, s) = (2, 0), (1, 1), (0, 2) with rates mu = 50, 80 and 100, 2 / 12.5 ms = 160.

        f(0, 2) = 1, f(1, 1) = 160 / 50, f(2, 0) = f(1, 1) 100 / 80 = 4; X = (100 x 3.2 + 160 x 1) / 8.2.
        """
        of = laws(transport_s=0.020, busy_s=[0.010, 0.0125], rates_per_s=[50.0, 80.0])
        curves = mva_curves(of, (1, 2))
        assert curves.values[0] == pytest.approx([8 / 0.030, 8 * (100 * 3.2 + 160) / 8.2])
        assert curves.kind == "estimate"
        faster = mva_curves(laws(transport_s=0.020, busy_s=[0.010, 0.010], rates_per_s=[50.0, 80.0]), (1, 2))
        assert faster.values[0, 1] > curves.values[0, 1]

    def test_an_unmeasured_compute_law_makes_an_upper_bound(self) -> None:
        of = laws(busy_s=[0.010] * 2, rates_per_s=[60.0, 90.0], is_compute_law_measured=False)
        assert mva_curves(of, FLIGHTS).kind == "upper bound"

    def test_service_that_is_longer_under_load_does_not_touch_x_1(self) -> None:
        curves = mva_curves(laws(busy_s=[0.020], rates_per_s=[1 / 0.015]), (1, 16))
        assert curves.values[0, 0] == pytest.approx(320)
        assert curves.values[0, 1] == pytest.approx(400, rel=0.02)


class TestBounds:
    @settings(max_examples=300, deadline=None)
    @given(any_laws())
    def test_mva_lies_between_them_at_every_m(self, of: Laws) -> None:
        """For any rates at all, rising or falling: both are theorems (see ``bounds_curves``)."""
        bounds, mva = bounds_curves(of, FLIGHTS), mva_curves(of, FLIGHTS)
        assert bounds.lowest is not None
        assert (mva.values <= bounds.values * (1 + 1e-9)).all()
        assert (mva.values >= bounds.lowest * (1 - 1e-9)).all()

    def test_by_hand(self) -> None:
        """Two servers of 10 ms alike: the balanced-job bound is exact, M / (M + 1) / 10 ms; above, transport's 100."""
        of = laws(transport_s=0.010, rates_per_s=[100.0])
        bounds = bounds_curves(of, (1, 2, 4))
        assert bounds.lowest is not None
        assert bounds.values[0] == pytest.approx([400, 800, 800])
        assert bounds.lowest[0] == pytest.approx([400, 800 * 2 / 3, 800 * 4 / 5])

    def test_transport_that_is_faster_together_lifts_the_slope(self) -> None:
        """mu(2) = 200 > 2 mu(1): two batches pass in 10 ms each, and X(2) may exceed 2 k / C = 533."""
        of = laws(transport_s=0.020, rates_per_s=[50.0, 200.0])
        bounds = bounds_curves(of, (1, 2))
        assert bounds.values[0] == pytest.approx([8 / 0.030, 800])
        assert mva_curves(of, (1, 2)).values[0, 1] <= bounds.values[0, 1]

    def test_without_uncertainty_the_record_holds_them(self) -> None:
        of = laws()
        result = summary(bounds_curves(of, (1, 4)), (1, 4), of)
        four = result.curve[1]
        assert (result.kind, result.level) == ("bounds", None)
        assert four.low is not None
        assert four.low < four.throughput_per_s == four.high == pytest.approx(800)


@settings(max_examples=100, deadline=None)
@given(any_laws())
def test_x_of_one_is_what_single_flight_measured(of: Laws) -> None:
    for each in (closed_form_curves, bounds_curves, mva_curves, twice_instances_curves):
        assert each(of, (1, 2)).values[0, 0] == pytest.approx(8 / of.cycle_s[0])


class TestSummary:
    """A curve by hand: 100, 190, 200 at M = 1, 2, 4; the second draw peaks at M = 2."""

    FLIGHTS = (1, 2, 4)

    def curves(self, *rows: Sequence[float], knee: Sequence[float] = (2.2,)) -> Curves:
        return Curves("mva", "estimate", np.array(rows, dtype=float), np.array(knee))

    def test_the_smallest_m_near_the_peak(self) -> None:
        assert summary(self.curves([100, 190, 200]), self.FLIGHTS, laws()).m_95 == 2
        assert summary(self.curves([100, 189, 200]), self.FLIGHTS, laws()).m_95 == 4

    @pytest.mark.parametrize(("draws", "recommended"), [([[1, 99, 100], [1, 98, 100]], 2), ([[1, 98, 100]] * 2, 4)])
    def test_the_smallest_m_of_little_expected_loss(self, draws: list[list[float]], recommended: int) -> None:
        """1.5 % on average is below 2 %; 2 % is not. The estimate's own row has no part in it."""
        of = laws([0.010] * 3)
        curves = self.curves([100, 150, 200], *draws, knee=[2.2] * 3)
        assert summary(curves, self.FLIGHTS, of).m_recommended == recommended

    def test_the_distribution_of_m_star(self) -> None:
        of = laws([0.010] * 5)
        curves = self.curves(*[[1, 2, 3]] * 5, knee=[2.2, 1.9, 2.0, 2.1, 3.5])
        result = summary(curves, self.FLIGHTS, of)
        assert result.m_star == 3
        assert result.m_star_probabilities == {"2": 0.5, "3": 0.25, "4": 0.25}

    def test_m_star_is_at_least_an_instance_each(self) -> None:
        of = laws(busy_s=[0.010] * 4)
        assert summary(self.curves([1, 2, 3], knee=[2.2]), self.FLIGHTS, of).m_star == 4

    def test_intervals_are_quantiles_of_the_draws_alone(self) -> None:
        of = laws([0.010] * 102)
        drawn = [[1.0 + n, 2, 3] for n in range(101)]
        point = summary(self.curves([50, 2, 3], *drawn, knee=[2.2] * 102), self.FLIGHTS, of).curve[0]
        assert (point.throughput_per_s, point.low, point.high) == pytest.approx((50, 6, 96))
        # Little's law: 8 requests at 50, 96 and 6 a second.
        assert (point.cycle_s, point.cycle_low_s, point.cycle_high_s) == pytest.approx((8 / 50, 8 / 96, 8 / 6))


class TestBinding:
    def bound(self, transport_limit: float | Sequence[float], service_s: Sequence[float] = (0.010,)) -> tuple[str, str]:
        of = laws(list(service_s), rates_per_s=None)
        limits = np.broadcast_to(np.asarray(transport_limit, dtype=float), len(service_s))
        of = Laws(8, of.cycle_s, of.service_s, of.busy_service_s, limits[:, np.newaxis].copy())
        binding = binding_of(of)
        return binding.what, binding.sentence

    def test_compute(self) -> None:
        assert self.bound(150.0) == (
            "compute",
            "compute binds: the instances can compute 800 request/s, the transport can carry 1200 request/s (1.50 "
            "times as much)",
        )

    def test_transport(self) -> None:
        assert self.bound(50.0) == (
            "transport",
            "transport binds: the transport can carry 400 request/s, the instances can compute 800 request/s (2.00 "
            "times as much)",
        )

    def test_neither(self) -> None:
        what, sentence = self.bound(100.0, [0.010, *np.linspace(0.009, 0.011, 50)])
        assert what == "neither"
        assert sentence == (
            "neither binds alone: the instances can compute 800 request/s, the transport can carry 800 request/s, and "
            "the calibration cannot tell which is less"
        )

    def test_unknown(self) -> None:
        binding = binding_of(laws())
        assert (binding.what, binding.transport_limit_per_s, binding.margin) == ("unknown", None, None)
        assert binding.sentence == (
            "the instances can compute 800 request/s; what the transport can carry is not known: no transport law was "
            "measured"
        )

    def test_the_margin_is_the_larger_over_the_smaller(self) -> None:
        services = [0.010, *np.linspace(0.0095, 0.0105, 101)]
        of = laws(services, rates_per_s=[50.0])
        margin = binding_of(of).margin
        assert margin is not None
        assert margin.mean == pytest.approx(2)
        assert (margin.low, margin.high) == pytest.approx((100 / 50 / 1.045, 100 / 50 / 0.955), rel=1e-3)


class TestSimulation:
    RATES = (1 / 0.015, 90.0, 110.0, 115.0)
    FEW = (1, 2, 3, 4, 8)

    def simulated(self, of: Laws, **changes: int) -> Floats:
        simulation = Simulation(**({"draws": 0, "cycles": 20_000} | changes))
        return simulation_curves(of, self.FEW, simulation, 1).values

    def test_exponential_service_over_shared_transport_is_the_mva(self) -> None:
        of = laws(rates_per_s=self.RATES, cv=1.0)
        values = self.simulated(of, cycles=100_000)
        assert values[0] == pytest.approx(mva_curves(of, self.FEW).values[0], rel=0.02)

    @pytest.mark.parametrize("cv", [0.2, 0.5])
    def test_less_spread_lies_between_mva_and_the_asymptotic_bound(self, cv: float) -> None:
        of = laws(rates_per_s=self.RATES, cv=cv)
        values = self.simulated(of)
        assert (values[0] <= bounds_curves(of, self.FEW).values[0] * 1.01).all()
        assert (values[0] >= mva_curves(of, self.FEW).values[0] * 0.99).all()
        assert (values[0, 1:4] > mva_curves(of, self.FEW).values[0, 1:4]).all()

    def test_without_a_law_it_reaches_the_closed_form_where_nothing_varies(self) -> None:
        of = laws()
        assert self.simulated(of)[0] == pytest.approx(closed_form_curves(of, self.FEW).values[0], rel=0.01)

    def test_two_instances_stay_below_their_limit(self) -> None:
        of = laws(busy_s=[0.010, 0.0125], rates_per_s=(1 / 0.015, 130, 190, 250, 300), cv=0.3)
        values = self.simulated(of)
        assert values[0, -1] == pytest.approx(8 * 160, rel=0.02)

    def test_the_number_of_workers_changes_nothing(self) -> None:
        of = laws([0.010, 0.0101, 0.0099, 0.0102], rates_per_s=self.RATES, cv=0.3)
        alone = self.simulated(of, draws=3, cycles=500)
        assert alone.shape == (4, 5)
        assert self.simulated(of, draws=3, cycles=500, workers=2).tolist() == alone.tolist()

    def test_it_is_passed_in(self) -> None:
        """A prediction asks whatever it is given, with its laws, M and seed, and X(1) stays what was measured."""
        asked = []

        def simulator(of: Laws, flights: Sequence[int], seed: int) -> Floats:
            asked.append((of.batch, tuple(flights), seed))
            return np.full((1, len(flights)), 500.0)

        made = predict(builders.calibration(), plan=builders.plan(), flights=(1, 2), seed=7, simulator=simulator)
        result = made.predictor("simulation")
        assert asked == [(8, (1, 2, 3, 4), 7)]
        assert [point.throughput_per_s for point in result.curve] == [320, 500, 500, 500]
        assert (result.kind, result.level) == ("upper bound", None)
