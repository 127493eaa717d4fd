"""Closed networks against printed oracles, exact fractions, theory, and 1,000 random networks.

The fractions are an oracle of their own: they add up every state of the network, without any recursion.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2gmodel.closed_form import Station, asymptotic_bounds, balanced_job_bounds
from b2gmodel.errors import UsageError
from b2gmodel.network import (
    ClosedNetwork,
    Floats,
    FlowEquivalent,
    exact_mva,
    schweitzer,
    throughput_curve,
)

ORACLES: dict[str, Any] = json.loads(
    (Path(__file__).parent / "data" / "oracles.json").read_text(encoding="utf-8"), parse_float=Decimal
)
INF = math.inf
AnyStation = Station | FlowEquivalent
FALLING = FlowEquivalent((2.0, 3.0, 2.5, 1.25))


def assert_printed(value: float, printed: Decimal) -> None:
    """The value agrees with a printed one to half a unit of its last digit."""
    assert abs(Decimal(value) - printed) <= Decimal("0.5").scaleb(int(printed.as_tuple().exponent))


def rate(station: AnyStation, jobs: int) -> Fraction:
    if isinstance(station, FlowEquivalent):
        return Fraction(station.rates_per_s[min(jobs, len(station.rates_per_s)) - 1])
    return Fraction(int(min(jobs, station.servers))) / Fraction(station.demand_s)


def weight(state: Sequence[int], stations: Sequence[AnyStation]) -> Fraction:
    product = Fraction(1)
    for station, jobs in zip(stations, state, strict=True):
        for n in range(1, jobs + 1):
            product /= rate(station, n)
    return product


def by_enumeration(stations: Sequence[AnyStation], population: int) -> tuple[list[float], list[list[float]]]:
    """X(1..N), and the distribution at each station with N, from the weight of every state."""
    sums = [Fraction(0)] * (population + 1)
    at = [[Fraction(0)] * (population + 1) for _ in stations]
    for state in itertools.product(range(population + 1), repeat=len(stations)):
        if sum(state) <= population:
            sums[sum(state)] += weight(state, stations)
        if sum(state) == population:
            for k, jobs in enumerate(state):
                at[k][jobs] += weight(state, stations)
    curve = [float(sums[n - 1] / sums[n]) for n in range(1, population + 1)]
    return curve, [[float(p / sums[population]) for p in row] for row in at]


def erlang_b(servers: int, load: float) -> float:
    """Probability of loss with `load` erlangs offered, by its recursion."""
    blocked = 1.0
    for n in range(1, servers + 1):
        blocked = load * blocked / (n + load * blocked)
    return blocked


# --- printed oracles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("oracle", ORACLES["closed_networks"], ids=lambda oracle: str(oracle["id"]))
def test_the_printed_networks(oracle: dict[str, Any]) -> None:
    stations = [Station(float(s["D"]), INF if s["servers"] == "inf" else s["servers"]) for s in oracle["stations"]]
    solution = ClosedNetwork(stations).solve(oracle["N"])
    assert_printed(solution.throughput_per_s[-1], oracle["X"])
    if "R" in oracle:
        assert_printed(solution.response_s, oracle["R"])
    for queue, printed in zip(solution.queue_lengths, oracle.get("Q", []), strict="Q" in oracle):
        assert_printed(queue, printed)


def test_the_exponential_row_of_the_variability_bracket() -> None:
    cycle = [Station(0.3), Station(0.8), Station(1.2, 2), Station(1.0), Station(1.5, INF)]
    curve = ClosedNetwork(cycle).throughput(5)
    oracle = ORACLES["variability_bracket"]
    for flights, printed in zip(oracle["M"], oracle["exponential"], strict=True):
        assert_printed(curve[flights - 1], printed)


def test_a_finite_queue_is_a_closed_network_with_its_source() -> None:
    # Arrivals stop while all places are taken: the source is a server that holds the free places.
    oracle = {o["id"]: o for o in ORACLES["open_queues"]}["mm2-5"]
    stations = [Station(1 / oracle["lambda"]), Station(1 / oracle["mu"], oracle["servers"])]
    solution = ClosedNetwork(stations).solve(oracle["capacity"])
    accepted_per_s, length = solution.throughput_per_s[-1], solution.queue_lengths[1]
    assert_printed(solution.marginals[1][0], oracle["p0"])
    assert_printed(solution.marginals[1][-1], oracle["p_block"])
    assert_printed(length, oracle["L"])
    assert_printed(length / accepted_per_s - 1 / oracle["mu"], oracle["Wq"])


def test_an_open_queue_is_the_limit_of_many_places() -> None:
    oracle = {o["id"]: o for o in ORACLES["open_queues"]}["mm2"]
    stations = [Station(1 / oracle["lambda"]), Station(1 / oracle["mu"], oracle["servers"])]
    solution = ClosedNetwork(stations).solve(2000)
    assert_printed(solution.residence_s[1], oracle["R"])
    assert_printed(solution.queue_lengths[1] - solution.throughput_per_s[-1] / oracle["mu"], oracle["Lq"])


# --- by hand, by theory, by enumeration ---------------------------------------------------------------------


def test_a_transport_and_a_server_by_hand() -> None:
    # f = 1, 1, 2/3 and D = 1/2: G = 1, 3/2, 2/3 + 3/4 = 17/12, so X = 2/3 and 18/17.
    network = ClosedNetwork([FlowEquivalent((1.0, 1.5)), Station(0.5)])
    assert network.throughput(2) == pytest.approx([2 / 3, 18 / 17], rel=1e-14)
    solution = network.solve(2)
    assert solution.marginals[0] == pytest.approx([3 / 17, 6 / 17, 8 / 17], rel=1e-14)
    assert solution.utilisations == pytest.approx((14 / 17, 9 / 17), rel=1e-14)


def test_the_last_rate_goes_on() -> None:
    short, long = FlowEquivalent((1.0, 1.5)), FlowEquivalent((1.0, 1.5, 1.5, 1.5, 1.5, 1.5))
    for other in (Station(0.5), Station(0.7, INF), FALLING):
        assert ClosedNetwork([short, other]).throughput(6) == pytest.approx(
            ClosedNetwork([long, other]).throughput(6), rel=1e-14
        )


def test_a_pure_delay_never_waits() -> None:
    solution = ClosedNetwork([Station(2.0, INF)]).solve(6)
    assert solution.throughput_per_s == pytest.approx(np.arange(1, 7) / 2.0)
    assert solution.utilisations == (None,)
    assert solution.response_s == 0.0


@pytest.mark.parametrize("population", [1, 7, 200, 10_000])
def test_the_single_server_repairman_is_erlangs_loss(population: int) -> None:
    # The server idles when all N jobs are in the delay: Erlang's B with N lines, Z / D erlangs.
    solution = ClosedNetwork([Station(0.01), Station(1.7, INF)]).solve(population)
    busy = 1 - erlang_b(population, 170.0)
    assert solution.throughput_per_s[-1] * 0.01 == pytest.approx(busy, rel=1e-11)
    assert solution.utilisations[0] == pytest.approx(busy, rel=1e-11)


@pytest.mark.parametrize(
    "stations",
    [
        [Station(0.5), Station(0.25, 2), Station(2.0, INF)],
        [Station(0.5, 3), Station(0.25, 2), Station(1.0, 4)],
        [FALLING, Station(0.5)],
        [FALLING, FlowEquivalent((1.0, 0.5)), Station(0.75, 2)],
        [FALLING, Station(1.0, INF), FlowEquivalent((0.5, 4.0, 1.0))],
        [FlowEquivalent((1.0, 1.0, 3.0)), Station(1.5, 2)],
        [Station(1.0, INF), Station(3.0, INF)],
    ],
    ids=lambda stations: "-".join(f"{getattr(s, 'servers', 'fes')}" for s in stations),
)
def test_every_state_added_up(stations: list[AnyStation]) -> None:
    curve, distributions = by_enumeration(stations, 7)
    solution = ClosedNetwork(stations).solve(7)
    assert solution.throughput_per_s == pytest.approx(curve, rel=1e-12)
    for marginal, exact in zip(solution.marginals, distributions, strict=True):
        assert marginal == pytest.approx(exact, rel=1e-11)


def test_the_order_of_stations_is_kept() -> None:
    stations: list[AnyStation] = [Station(0.5), FALLING, Station(2.0, INF), Station(0.9, 2)]
    solution = ClosedNetwork(stations).solve(5)
    for order in itertools.permutations(range(4)):
        permuted = ClosedNetwork([stations[k] for k in order]).solve(5)
        assert permuted.throughput_per_s == pytest.approx(solution.throughput_per_s, rel=1e-13)
        assert permuted.queue_lengths == pytest.approx(solution.queue_lengths[list(order)], rel=1e-12)


# --- 1,000 random networks ----------------------------------------------------------------------------------

demands_s = st.floats(-3.0, 3.0).map(lambda exponent: 10.0**exponent)
simple = st.builds(Station, demands_s, st.sampled_from([1, 1, 1, INF]))
fixed = st.builds(Station, demands_s, st.sampled_from([1, 1, 2, 3, 8, INF]))
ladders = st.lists(demands_s, min_size=1, max_size=6).map(lambda rates: FlowEquivalent(tuple(rates)))
thousand = settings(max_examples=1000, deadline=None)


@thousand
@given(st.lists(fixed, min_size=1, max_size=6), st.integers(1, 60), st.sampled_from([1e-9, 0.125, 3.0, 1e9]))
def test_random_networks_keep_their_bounds_and_laws(stations: list[Station], population: int, factor: float) -> None:
    solution = ClosedNetwork(stations).solve(population)
    curve = solution.throughput_per_s
    outer, inner = asymptotic_bounds(stations, population), balanced_job_bounds(stations, population)
    above, below = 1 + 1e-10, 1 - 1e-10
    assert outer.throughput_low_per_s <= inner.throughput_low_per_s * above
    assert inner.throughput_low_per_s <= curve[-1] * above
    assert curve[-1] <= inner.throughput_high_per_s * above
    assert inner.throughput_high_per_s <= outer.throughput_high_per_s * above
    think_s = sum(s.demand_s for s in stations if s.is_delay)
    slack_s = 1e-10 * (think_s + solution.response_s)
    assert inner.response_low_s - slack_s <= solution.response_s <= inner.response_high_s + slack_s
    assert np.all(curve[1:] >= curve[:-1] * below)
    assert_laws(stations, population)
    slower = [Station(s.demand_s * factor, s.servers) for s in stations]
    assert ClosedNetwork(slower).throughput(population) == pytest.approx(curve / factor, rel=1e-10)


def assert_laws(stations: Sequence[AnyStation], population: int) -> None:
    """At every station: flow in is flow out, Little's law on what is in service, and the sums."""
    solution = ClosedNetwork(stations).solve(population)
    rate_per_s = solution.throughput_per_s[-1]
    assert solution.queue_lengths.sum() == pytest.approx(population, rel=1e-10)
    assert solution.residence_s.sum() == pytest.approx(population / rate_per_s, rel=1e-10)
    for k, station in enumerate(stations):
        marginal = solution.marginals[k]
        assert marginal.sum() == pytest.approx(1.0, rel=1e-10)
        rates = np.array([float(rate(station, n)) for n in range(1, population + 1)])
        assert marginal[1:] @ rates == pytest.approx(rate_per_s, rel=1e-9)
        assert solution.queue_lengths[k] == pytest.approx(rate_per_s * solution.residence_s[k], rel=1e-12)
        if isinstance(station, Station):
            in_service = np.minimum(np.arange(population + 1), station.servers) @ marginal
            assert in_service == pytest.approx(rate_per_s * station.demand_s, rel=1e-9)
            busy = solution.utilisations[k]
            assert busy is None if station.is_delay else busy == pytest.approx(in_service / station.servers)


@thousand
@given(st.lists(simple, min_size=1, max_size=6), st.integers(1, 60))
def test_convolution_is_mean_value_analysis(stations: list[Station], population: int) -> None:
    solution, means = ClosedNetwork(stations).solve(population), exact_mva(stations, population)
    assert solution.throughput_per_s[-1] == pytest.approx(means.throughput_per_s, rel=1e-9)
    assert solution.queue_lengths == pytest.approx(means.queue_lengths, rel=1e-9)
    assert solution.residence_s == pytest.approx(means.residence_s, rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(fixed, ladders), min_size=1, max_size=3),
    st.lists(st.one_of(fixed, ladders), min_size=1, max_size=3),
    st.integers(1, 30),
)
def test_a_flow_equivalent_station_replaces_its_sub_network(
    inside: list[AnyStation], outside: list[AnyStation], population: int
) -> None:
    whole = ClosedNetwork([*inside, *outside]).solve(population)
    station = ClosedNetwork(inside).flow_equivalent(population)
    replaced = ClosedNetwork([station, *outside]).solve(population)
    assert replaced.throughput_per_s == pytest.approx(whole.throughput_per_s, rel=1e-9)
    assert replaced.queue_lengths[1:] == pytest.approx(whole.queue_lengths[len(inside) :], rel=1e-9)
    assert replaced.queue_lengths[0] == pytest.approx(whole.queue_lengths[: len(inside)].sum(), rel=1e-9)
    assert_laws([station, *outside], population)


@settings(max_examples=200, deadline=None)
@given(st.lists(simple, min_size=1, max_size=6), st.integers(1, 60))
def test_schweitzer_is_low_and_close(stations: list[Station], population: int) -> None:
    approximate, exact = schweitzer(stations, population), exact_mva(stations, population)
    ratio = approximate.throughput_per_s / exact.throughput_per_s
    assert 0.92 <= ratio <= 1 + 1e-10
    assert approximate.queue_lengths.sum() == pytest.approx(population, rel=1e-9)


# --- large and unequal --------------------------------------------------------------------------------------


def test_ten_thousand_jobs_over_twelve_orders_of_magnitude() -> None:
    singles = [Station(10.0**exponent) for exponent in range(-9, 4)]
    stations = [*singles, Station(50.0, INF)]
    bounds = asymptotic_bounds(stations, 10_000)
    solution = ClosedNetwork(stations).solve(10_000)
    assert all(np.isfinite(marginal).all() for marginal in solution.marginals)
    assert np.isfinite(solution.throughput_per_s).all()
    assert (solution.throughput_per_s > 0).all()
    assert solution.throughput_per_s[-1] == pytest.approx(bounds.throughput_high_per_s, rel=1e-9)
    assert solution.response_s == pytest.approx(bounds.response_low_s, rel=1e-9)
    assert solution.queue_lengths == pytest.approx(exact_mva(stations, 10_000).queue_lengths, rel=1e-9)
    assert schweitzer(stations, 10_000).throughput_per_s == pytest.approx(1e-3, rel=1e-6)


def test_ten_thousand_jobs_in_all_kinds_of_station() -> None:
    stations: list[AnyStation] = [
        Station(1e-9),
        Station(1e3, 16),
        Station(1e3, INF),
        FALLING,
        Station(1.0, 64),
    ]
    solution = ClosedNetwork(stations).solve(10_000)
    assert solution.throughput_per_s[-1] == pytest.approx(16e-3, rel=1e-9)
    assert solution.queue_lengths.sum() == pytest.approx(10_000, rel=1e-9)
    assert [float(m.sum()) for m in solution.marginals] == pytest.approx([1.0] * 5, rel=1e-9)


def test_ten_thousand_jobs_far_below_the_knee() -> None:
    stations = [Station(1e-9), Station(1e-3), Station(1e3, INF)]
    assert ClosedNetwork(stations).throughput(10_000)[-1] == pytest.approx(10.0, rel=1e-4)
    bounds = balanced_job_bounds(stations, 10_000)
    exact = exact_mva(stations, 10_000).throughput_per_s
    assert bounds.throughput_low_per_s <= exact <= bounds.throughput_high_per_s
    assert ClosedNetwork(stations).throughput(10_000)[-1] == pytest.approx(exact, rel=1e-9)


# --- many draws at once -------------------------------------------------------------------------------------


@pytest.mark.parametrize("falling", [False, True])
def test_each_draw_is_its_own_network(falling: bool) -> None:
    rng = np.random.default_rng(20260)
    transport = np.sort(rng.uniform(5, 20, (7, 4)), axis=1)
    transport = transport[:, ::-1] if falling else transport
    service_s = rng.uniform(0.05, 0.5, (7, 3))
    compute = np.arange(1, 4) / service_s
    think_s = rng.uniform(0.1, 2, 7)
    curves = throughput_curve([transport, compute, [[4.0]]], 24, delay_s=think_s)
    assert curves.shape == (7, 24)
    for draw, curve in enumerate(curves):
        stations: list[AnyStation] = [
            FlowEquivalent(tuple(transport[draw].tolist())),
            FlowEquivalent(tuple(compute[draw].tolist())),
            Station(0.25),
            Station(float(think_s[draw]), INF),
        ]
        assert curve == pytest.approx(ClosedNetwork(stations).throughput(24), rel=1e-12)


def test_a_ladder_without_draws_is_one_draw() -> None:
    curve = throughput_curve([[1.0, 1.5], [2.0]], 2)
    assert curve.shape == (1, 2)
    assert curve[0] == pytest.approx([2 / 3, 18 / 17])
    assert throughput_curve([], 3, delay_s=2.0)[0] == pytest.approx([0.5, 1.0, 1.5])


def test_inputs_are_left_as_they_are() -> None:
    transport: Floats = np.array([[1.0, 1.5]])
    transport.flags.writeable = False
    first = throughput_curve([transport, [2.0]], 8)
    assert np.array_equal(first, throughput_curve([transport, [2.0]], 8))


# --- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, INF, 1e-200])
def test_rates_and_delays_are_positive_and_finite(bad: float) -> None:
    refused: list[Callable[[], object]] = [
        lambda: FlowEquivalent((1.0, bad)),
        lambda: throughput_curve([[1.0], [bad]], 3),
        lambda: throughput_curve([[1.0]], 3, delay_s=bad),
    ]
    for call in refused:
        with pytest.raises(UsageError, match="not a rate or a time"):
            call()


@pytest.mark.parametrize("population", [0, -1, 1.5, True])
def test_populations_are_counts(population: Any) -> None:
    network = ClosedNetwork([Station(1.0)])
    refused: list[Callable[[], object]] = [
        lambda: network.throughput(population),
        lambda: network.solve(population),
        lambda: network.flow_equivalent(population),
        lambda: throughput_curve([[1.0]], population),
        lambda: exact_mva([Station(1.0)], population),
        lambda: schweitzer([Station(1.0)], population),
    ]
    for call in refused:
        with pytest.raises(UsageError, match="population"):
            call()


def test_empty_and_unsuited_networks_are_refused() -> None:
    for empty in (
        ClosedNetwork,
        lambda s: exact_mva(s, 1),
        lambda s: schweitzer(s, 1),
        lambda s: throughput_curve(s, 1),
    ):
        with pytest.raises(UsageError, match="without stations"):
            empty([])
    for unsuited in (Station(1.0, 2), FALLING):
        with pytest.raises(UsageError, match="use ClosedNetwork"):
            exact_mva([unsuited], 3)  # type: ignore[list-item]
    with pytest.raises(UsageError, match="use ClosedNetwork"):
        schweitzer([FALLING], 3)  # type: ignore[list-item]
    with pytest.raises(UsageError, match="differ in draws"):
        throughput_curve([np.ones((2, 1)), np.ones((3, 1))], 4)
    with pytest.raises(UsageError, match="not a ladder"):
        FlowEquivalent(())


def test_a_solution_reads_well() -> None:
    solution = ClosedNetwork([FlowEquivalent((1.0, 1.5)), Station(0.5), Station(1.0, 2), Station(2.0, INF)]).solve(3)
    assert repr(solution).splitlines()[0].startswith("N = 3: X = 0.")
    assert [line.split(":")[0].strip() for line in repr(solution).splitlines()[1:]] == [
        "flow-equivalent, 2 rates",
        "1 server, D = 500 ms",
        "2 servers, D = 1 s",
        "delay, D = 2 s",
    ]
