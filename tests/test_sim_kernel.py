"""The kernel against the reference on the same draws: the same flights depart at the same instants."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from b2gmodel.batcher import Policy
from b2gmodel.errors import UsageError
from b2gmodel.sim.distributions import (
    Constant,
    CycleTimes,
    Distribution,
    Empirical,
    Exponential,
    Gamma,
    Independent,
    LogNormal,
    Resampled,
)
from b2gmodel.sim.kernel import Departures, Kernel, fly
from b2gmodel.sim.reference import Outcome, simulate
from b2gmodel.sim.scenario import Closed, Recorded, Scenario
from b2gmodel.sim.stations import Line, Station

CONFIGURATIONS = 1000
FLIGHTS = 40


def a_distribution(rng: np.random.Generator) -> Distribution:
    mean_s = float(10 ** rng.uniform(-4, 0))
    cv = float(rng.uniform(0.05, 1.5))
    return [
        Constant(mean_s),
        Exponential(mean_s),
        Gamma(mean_s, cv),
        LogNormal(mean_s, cv),
        Empirical(rng.gamma(2.0, mean_s / 2, 50)),
    ][rng.integers(5)]


def a_station(name: str, rng: np.random.Generator) -> Station:
    n = int(rng.integers(1, 5))
    ladder = tuple(np.cumsum(rng.uniform(0.1, 1.0, n)).tolist())
    slower = tuple(np.cumsum(rng.uniform(0.1, 1.0, n)).tolist())
    return [
        Station.delay(name),
        Station.queue(name),
        Station.queue(name, n),
        Station.shared(name, n),
        Station.flow_equivalent(name, ladder),
        Station.instances(name, slower),
    ][rng.integers(6)]


def a_line(rng: np.random.Generator) -> Line:
    """One to four stations, up to six legs: some stations are visited twice, as a proxy's processor is."""
    stations = tuple(a_station(f"s{number}", rng) for number in range(rng.integers(1, 5)))
    route = tuple(stations[i].name for i in rng.integers(len(stations), size=rng.integers(1, 7)))
    times: CycleTimes = Independent([a_distribution(rng) for _ in route])
    if rng.random() < 0.3:
        times = Resampled(rng.gamma(3.0, 0.1, (200, len(route))))
    return Line(stations, route, times)


def by_number(departures: Departures) -> dict[int, tuple[float, float]]:
    return {
        int(number): (launched, delivered)
        for number, launched, delivered in zip(
            departures.number, departures.launched_s, departures.delivered_s, strict=True
        )
    }


def assert_same(outcome: Outcome, departures: Departures) -> None:
    fast = by_number(departures)
    for number, launched_s, delivered_s in outcome.departures_s.tolist():
        assert fast[int(number)] == pytest.approx((launched_s, delivered_s), rel=1e-9)


@pytest.mark.parametrize("part", range(4))
def test_closed_cycles_depart_as_in_the_reference(part: int) -> None:
    for case in range(part, CONFIGURATIONS, 4):
        rng = np.random.default_rng(case)
        line, flights, k = a_line(rng), int(rng.integers(1, 9)), int(rng.integers(1, 4))
        clients = flights * k
        scenario = Scenario(Policy(k, flights, clients), line, Closed(clients))
        seed = np.random.SeedSequence(case)
        outcome = simulate(scenario, seed, flights=FLIGHTS)
        assert_same(outcome, fly(line, flights, FLIGHTS + flights, seed))


def test_recorded_arrivals_depart_as_in_the_reference() -> None:
    for case in range(100):
        rng = np.random.default_rng([7, case])
        line, flights, k = a_line(rng), int(rng.integers(1, 6)), int(rng.integers(1, 4))
        arrivals_s = np.cumsum(rng.exponential(rng.uniform(0.01, 1.0), FLIGHTS * k))
        scenario = Scenario(Policy(k, flights, len(arrivals_s)), line, Recorded(tuple(arrivals_s.tolist())))
        seed = np.random.SeedSequence(case)
        kernel = Kernel(line, flights, seed)
        fast = kernel.advance(line_work(line, seed, FLIGHTS), arrivals_s[k - 1 :: k], drain=True)
        assert_same(simulate(scenario, seed, flights=FLIGHTS), fast)


def line_work(line: Line, seed: np.random.SeedSequence, rows: int) -> np.ndarray:
    from b2gmodel.sim.stations import Draws

    return Draws(line.times, seed).block()[:rows]


def test_delays_before_one_server_take_the_short_way_and_depart_the_same() -> None:
    """Random lines are seldom of this make, and the kernel has a loop of its own for it."""
    for case in range(100):
        rng = np.random.default_rng([8, case])
        delays = [Station.delay(f"d{number}") for number in range(rng.integers(0, 4))]
        route = tuple(station.name for station in delays)
        times = Independent([a_distribution(rng) for _ in range(len(route) + 1)])
        line = Line((*delays, Station.queue("gpu")), (*route, "gpu"), times)
        flights, seed = int(rng.integers(1, 9)), np.random.SeedSequence(case)
        outcome = simulate(Scenario(Policy(1, flights, flights), line, Closed(flights)), seed, flights=FLIGHTS)
        kernel = Kernel(line, flights, seed)
        fast = kernel.advance(line_work(line, seed, FLIGHTS + flights))
        assert_same(outcome, fast)


def a_pair(rng: np.random.Generator) -> Line:
    """One shared station before one single server; whole seconds in a third of them, for many at one instant."""
    n = int(rng.integers(1, 5))
    ladder = tuple(np.cumsum(rng.uniform(0.1, 1.0, n)).tolist())
    transport = [Station.shared("t", n), Station.flow_equivalent("t", ladder)][rng.integers(2)]
    times = [a_distribution(rng), a_distribution(rng)]
    if rng.random() < 0.3:
        times = [Constant(float(rng.integers(1, 4))), Constant(float(rng.integers(1, 4)))]
    return Line((transport, Station.queue("gpu")), ("t", "gpu"), Independent(times))


def test_a_shared_station_before_one_server_takes_the_short_way_and_departs_the_same() -> None:
    for case in range(100):
        rng = np.random.default_rng([9, case])
        line, flights, seed = a_pair(rng), int(rng.integers(1, 9)), np.random.SeedSequence(case)
        outcome = simulate(Scenario(Policy(1, flights, flights), line, Closed(flights)), seed, flights=FLIGHTS)
        assert_same(outcome, Kernel(line, flights, seed).advance(line_work(line, seed, FLIGHTS + flights)))


def delays_first(rng: np.random.Generator) -> Line:
    times = Independent([a_distribution(rng), Constant(2.0), a_distribution(rng)])
    return Line((Station.delay("a"), Station.delay("b"), Station.queue("gpu")), ("a", "b", "gpu"), times)


@pytest.mark.parametrize("make", [a_pair, delays_first])
def test_the_short_ways_give_what_the_general_loop_gives_to_the_last_bit(make: Callable[..., Line]) -> None:
    for case in range(100):
        rng = np.random.default_rng([10, case])
        line, flights, seed = make(rng), int(rng.integers(1, 80)), np.random.SeedSequence(case)
        quick, general = Kernel(line, flights, seed), Kernel(line, flights, seed)
        # Once it was told to drain a kernel stays in the general loop.
        general.advance(np.empty((0, line.times.legs)), drain=True)
        for size in rng.integers(0, 300, 5):
            work = line_work(line, np.random.SeedSequence([case, size]), size)
            assert_identical(quick.advance(work), general.advance(work))
        rest = np.empty((0, line.times.legs))
        assert_identical(quick.advance(rest, drain=True), general.advance(rest, drain=True))
        assert quick.busy_work == pytest.approx(general.busy_work)
        assert quick.residence_s == pytest.approx(general.residence_s)


def assert_identical(one: Departures, other: Departures) -> None:
    for field in ("number", "ready_s", "launched_s", "delivered_s"):
        assert np.array_equal(getattr(one, field), getattr(other, field)), field


def test_a_planted_error_of_a_billionth_is_seen() -> None:
    line = Line((Station.delay("a"), Station.queue("b")), ("a", "b"), Independent([Exponential(1.0), Exponential(1.0)]))
    seed = np.random.SeedSequence(1)
    outcome = simulate(Scenario(Policy(1, 2, 2), line, Closed(2)), seed, flights=20)
    wrong = Kernel(line, 2, seed).advance(line_work(line, seed, 22) * (1 + 4e-9), drain=True)
    with pytest.raises(AssertionError):
        assert_same(outcome, wrong)


def test_blocks_continue_where_the_last_one_ended() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        line, flights = a_line(rng), int(rng.integers(1, 6))
        work = rng.exponential(0.1, (60, len(line.route)))
        whole = Kernel(line, flights, np.random.SeedSequence(0)).advance(work, drain=True)
        kernel = Kernel(line, flights, np.random.SeedSequence(0))
        pieces = [kernel.advance(piece) for piece in np.split(work, [7, 8, 30])]
        pieces.append(kernel.advance(np.empty((0, len(line.route))), drain=True))
        assert np.concatenate([piece.number for piece in pieces]).tolist() == whole.number.tolist()
        assert np.concatenate([piece.delivered_s for piece in pieces]).tolist() == whole.delivered_s.tolist()


def test_a_schedule_by_hand() -> None:
    """Two flights, a delay of 2 and one server of 3 (work in whole seconds)."""
    line = Line((Station.delay("d"), Station.queue("q")), ("d", "q"), Independent([Constant(2.0), Constant(3.0)]))
    done = fly(line, 2, 5, np.random.SeedSequence(0))
    assert done.number.tolist() == [0, 1, 2, 3, 4]
    assert done.launched_s.tolist() == [0, 0, 5, 8, 11]
    assert done.delivered_s.tolist() == [5, 8, 11, 14, 17]


def test_processor_sharing_by_hand() -> None:
    """Works 1 and 3 from time 0 on one core: both at half speed until 2, then the longer alone until 4."""
    line = Line((Station.shared("cpu"),), ("cpu",), Independent([Constant(1.0)]))
    done = Kernel(line, 2, np.random.SeedSequence(0)).advance(np.array([[1.0], [3.0]]), drain=True)
    assert done.delivered_s.tolist() == [2.0, 4.0]


def test_busy_instances_slow_each_other_down_by_hand() -> None:
    """S(1) = 1, S(2) = 1.5: two together take 1.5 each; a third waits for the first to be free."""
    line = Line((Station.instances("gpu", (1.0, 1.5)),), ("gpu",), Independent([Constant(1.0)]))
    done = Kernel(line, 3, np.random.SeedSequence(0)).advance(np.ones((3, 1)), drain=True)
    assert done.delivered_s == pytest.approx([1.5, 1.5, 2.5])


def test_work_and_residence_add_up() -> None:
    rng = np.random.default_rng(5)
    line = a_line(rng)
    kernel = Kernel(line, 3, np.random.SeedSequence(0))
    work = rng.exponential(0.1, (50, len(line.route)))
    done = kernel.advance(work, drain=True)
    assert kernel.busy_work.sum() == pytest.approx(work.sum())
    assert kernel.residence_s.sum() == pytest.approx(done.cycle_s.sum())


@pytest.mark.parametrize("flights", [0, -1])
def test_flights_must_be_positive(flights: int) -> None:
    line = Line((Station.delay("d"),), ("d",), Independent([Constant(2.0)]))
    with pytest.raises(UsageError, match="flights"):
        Kernel(line, flights, np.random.SeedSequence(0))
