"""The server's own batching as a Markov chain: against plain networks, by hand, and against the simulation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2gmodel import bulk_chain
from b2gmodel.batcher import Policy
from b2gmodel.bulk import bulk_throughput
from b2gmodel.bulk_server import BulkServer, ladder_times
from b2gmodel.closed_form import Station as Demand
from b2gmodel.errors import UsageError
from b2gmodel.network import ClosedNetwork, FlowEquivalent
from b2gmodel.sim.distributions import Constant, Distribution, Exponential, Gamma, Independent
from b2gmodel.sim.experiments import Precision, run_scenario
from b2gmodel.sim.scenario import BatchedService, Closed, Scenario
from b2gmodel.sim.server_batcher import DynamicBatching, ServerBatcher
from b2gmodel.sim.stations import Line, Station
from b2gmodel.stats import Interval
from b2gmodel.units import ns_from_s

SEED = np.random.SeedSequence(19540116)
LADDER = ((1, 0.002), (8, 0.006))
FAULT = 1.03


def delay(delay_s: float, most: int) -> tuple[float, ...]:
    """A pure delay as a ladder of rates."""
    return tuple(n / delay_s for n in range(1, most + 1))


# Without merging it is the plain network.


@pytest.mark.parametrize(("instances", "rows"), [(1, 1), (1, 4), (2, 1), (3, 5)])
@pytest.mark.parametrize("rates", [(1.0, 1.5, 1.7), delay(3.0, 40), (1e-3,), (1e5,)])
def test_without_merging_it_is_the_plain_network(instances: int, rows: int, rates: tuple[float, ...]) -> None:
    server = BulkServer(((1, 0.5),), rows, instances=instances)
    curve = bulk_throughput(server, rates, range(1, 41), rows=rows)
    plain = ClosedNetwork([FlowEquivalent(rates), Demand(0.5, instances)])
    assert curve.throughput_per_s[0] == pytest.approx(plain.throughput(40), rel=1e-9)
    assert curve.utilisation[0] == pytest.approx(plain.throughput(40) * 0.5 / instances, rel=1e-9)
    assert curve.mean_rows[0] == pytest.approx(np.full(40, rows), rel=1e-9)
    waiting = plain.solve(40).queue_lengths[1] - plain.throughput(40)[-1] * 0.5
    assert curve.waiting[0, -1] == pytest.approx(waiting, rel=1e-9, abs=1e-12)


def test_with_an_instance_for_each_request_nothing_is_merged() -> None:
    curve = bulk_throughput(BulkServer(LADDER, 8, instances=4), delay(0.01, 4), range(1, 5))
    assert curve.throughput_per_s[0] == pytest.approx(np.arange(1, 5) / 0.012, rel=1e-9)
    assert curve.waiting[0] == pytest.approx(np.zeros(4), abs=1e-12)


# By hand: transport is a delay of 1 s, batches of up to two, S(1) = 1 s and S(2) = 2 s.

PAIRS = BulkServer(((1, 1.0), (2, 2.0)), 2)


def test_three_requests_by_hand() -> None:
    """Waiting and running are 0+0, 0+1, 1+1, 2+1, 0+2, 1+2, with probabilities as 4/9, 1, 1, 1, 2/3, 4/3."""
    curve = bulk_throughput(PAIRS, delay(1.0, 3), [3])
    assert curve.throughput_per_s == pytest.approx(45 / 49, rel=1e-12)
    assert curve.mean_rows == pytest.approx(5 / 4, rel=1e-12)
    assert curve.waiting == pytest.approx(39 / 49, rel=1e-12)
    assert curve.utilisation == pytest.approx(45 / 49, rel=1e-12)


def test_two_requests_and_a_timer_by_hand() -> None:
    """An exponential queue delay of 1 s. As 5/4: empty, 3/2: one waits, 3: both run, 1: one runs, and 1/2 each: one
    runs and the other waits, its delay still to come or over."""
    curve = bulk_throughput(replace(PAIRS, queue_delay_s=1.0), delay(1.0, 2), [2], timer_stages=1)
    assert curve.throughput_per_s == pytest.approx(20 / 31, rel=1e-12)
    assert curve.mean_rows == pytest.approx(5 / 3.5, rel=1e-12)
    assert curve.waiting == pytest.approx(10 / 31, rel=1e-12)


def test_a_single_request_waits_for_the_whole_delay_whatever_the_stages() -> None:
    server = BulkServer(LADDER, 8, queue_delay_s=0.004)
    for stages, cv in itertools.product((1, 3, 8), (0.0, 0.4, 1.0)):
        curve = bulk_throughput(server, (100.0,), [1], service_cv=cv, stages=stages, timer_stages=stages)
        assert curve.throughput_per_s == pytest.approx(1 / 0.016, rel=1e-9)


# The rule is that of the simulation.


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("preferred", [(), (2,), (1, 4), (3, 6), (7,)])
def test_batches_form_as_in_the_server_batcher(rows: int, preferred: tuple[int, ...]) -> None:
    server = BulkServer(LADDER, 7, preferred)
    for waiting, over in itertools.product(range(12), (False, True)):
        batcher: ServerBatcher[int] = ServerBatcher(DynamicBatching(7, preferred, 10), 1)
        # The greatest batch goes at once and holds the instance.
        assert len(batcher.arrive(-1, 7, 0)) == 1
        for number in range(waiting):
            assert batcher.arrive(number, rows, 0) == []
        started = batcher.instance_free(10 if over else 0)
        assert sum(len(each.requests) for each in started) == server.formed(waiting, rows, delay_over=over)


@pytest.mark.parametrize("ladder", [((1, 0.5),), ((2, 0.010), (8, 0.017), (16, 0.033))])
def test_the_ladder_is_that_of_the_simulation(ladder: tuple[tuple[int, float], ...]) -> None:
    service = BatchedService(DynamicBatching(20), 1, ladder)
    sizes, times_s = zip(*ladder, strict=True)
    expected = [service.mean_s(rows) for rows in range(1, 21)]
    assert ladder_times(sizes, times_s, range(1, 21)) == pytest.approx(expected, rel=1e-12)


# Against the simulation: inside its 99 % interval, and with S(b) 3 % longer outside.


def simulated(
    server: BulkServer, rates: tuple[float, ...], requests: int, shape: Distribution, rows: int, half_width: float
) -> Interval:
    """X(N) in requests a second, each of ``rows`` of the proxy's."""
    line = Line(
        (Station.flow_equivalent("transport", rates), Station.queue("gpu")),
        ("transport", "gpu"),
        Independent([Exponential(1.0), Constant(1.0)]),
        "gpu",
    )
    batching = DynamicBatching(server.max_batch, server.preferred, ns_from_s(server.queue_delay_s))
    service = BatchedService(batching, server.instances, server.ladder_s, shape)
    clients = requests * rows
    scenario = Scenario(Policy(rows, requests, clients), line, Closed(clients), server=service)
    precision = Precision(half_width, 0.99, first_cycles=4000 * rows)
    found = run_scenario(scenario, SEED, precision=precision, quantiles=()).throughput_per_s
    return Interval(found.mean / rows, found.low / rows, found.high / rows, 0.99)


EXACT: dict[str, tuple[BulkServer, int, int, float]] = {
    "Erlang service": (BulkServer(LADDER, 8), 12, 1, 0.5),
    "preferred sizes": (BulkServer(LADDER, 8, (3, 5)), 9, 1, 0.5),
    "two instances": (BulkServer(LADDER, 8, (2,), instances=2), 10, 1, 1.0),
    "a proxy's batches": (BulkServer(LADDER, 8, (6,)), 5, 3, 0.5),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_chain_lies_in_the_simulations_interval_and_a_planted_fault_outside(name: str) -> None:
    server, requests, rows, cv = EXACT[name]
    rates = (900.0, 1500.0, 1800.0)
    shape = Exponential(1.0) if cv == 1.0 else Gamma.erlang(1.0, 4)
    interval = simulated(server, rates, requests, shape, rows, 0.011)

    def chain(fault: float) -> float:
        faulty = replace(server, ladder_s=tuple((size, fault * time_s) for size, time_s in server.ladder_s))
        curve = bulk_throughput(faulty, rates, [requests], rows=rows, service_cv=cv, stages=4)
        return float(curve.throughput_per_s[0, 0])

    assert interval.low <= chain(1.0) <= interval.high
    assert not interval.low <= chain(FAULT) <= interval.high


# What is not exact, with the bound that the module states.

CLOSE: dict[str, tuple[BulkServer, float, int, Distribution, float, float]] = {
    # The bound comes last; beside it, the error in runs of millions of batches.
    "constant service": (BulkServer(LADDER, 8), 0.005, 8, Constant(1.0), 0.0, 0.003),  # -0.17 %
    "two instances": (BulkServer(LADDER, 8, instances=2), 0.002, 8, Constant(1.0), 0.0, 0.006),  # +0.38 %
    "a cv between two stages": (BulkServer(LADDER, 8), 0.005, 16, Gamma(1.0, 0.6), 0.6, 0.003),
    "delay": (BulkServer(LADDER, 8, queue_delay_s=0.006), 0.005, 4, Exponential(1.0), 1.0, 0.006),  # -0.2 %
    "delay, preferred sizes": (BulkServer(LADDER, 8, (4, 8), 0.002), 0.005, 8, Gamma(1.0, 0.5), 0.5, 0.003),  # -0.08 %
    "constant service and delay": (BulkServer(LADDER, 8, (), 0.006), 0.005, 8, Constant(1.0), 0.0, 0.022),  # -2.2 %
}


@pytest.mark.parametrize("name", CLOSE)
def test_approximations_stay_within_their_stated_errors(name: str) -> None:
    server, delay_s, requests, shape, cv, bound = CLOSE[name]
    rates = delay(delay_s, requests)
    interval = simulated(server, rates, requests, shape, 1, 0.01)
    found = bulk_throughput(server, rates, [requests], service_cv=cv).throughput_per_s[0, 0]
    assert interval.low * (1 - bound) <= found <= interval.high * (1 + bound)
    # The control: without stages each of these is further off than bound and interval together allow.
    plain = bulk_throughput(server, rates, [requests], stages=1, timer_stages=1).throughput_per_s[0, 0]
    assert not interval.low * (1 - bound) <= plain <= interval.high * (1 + bound)


# What holds for all servers.

RATES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5)


@st.composite
def servers(draw: st.DrawFn) -> BulkServer:
    most = draw(st.integers(1, 5))
    return BulkServer(
        tuple(enumerate(draw(st.lists(st.floats(0.1, 10.0), min_size=most, max_size=most)), 1)),
        most,
        tuple(draw(st.sets(st.integers(1, most)))),
        draw(st.sampled_from([0.0, 0.5, 3.0])),
        draw(st.integers(1, 2)),
    )


@settings(max_examples=40, deadline=None)
@given(servers(), RATES, st.integers(1, 9), st.floats(1e-3, 1e3))
def test_capacities_bound_and_units_cancel(server: BulkServer, rates: list[float], n: int, unit: float) -> None:
    curve = bulk_throughput(server, rates, [n], timer_stages=1)
    x = curve.throughput_per_s[0, 0]
    assert 0 < x <= max(rates) * (1 + 1e-9)
    assert x <= server.instances * max(size / time_s for size, time_s in server.ladder_s) * (1 + 1e-9)
    assert 1 - 1e-9 <= curve.mean_rows[0, 0] <= server.max_batch + 1e-9
    assert 0 < curve.utilisation[0, 0] <= 1 + 1e-9
    assert -1e-9 <= curve.waiting[0, 0] <= n
    ladder_s = tuple((size, time_s * unit) for size, time_s in server.ladder_s)
    slower = replace(server, ladder_s=ladder_s, queue_delay_s=server.queue_delay_s * unit)
    other = bulk_throughput(slower, np.array(rates) / unit, [n], timer_stages=1)
    assert other.throughput_per_s * unit == pytest.approx(x, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(servers(), RATES)
def test_where_every_size_is_preferred_nobody_waits_for_a_better_batch(server: BulkServer, rates: list[float]) -> None:
    eager = replace(server, preferred=tuple(range(1, server.max_batch + 1)))
    plain = replace(server, preferred=(), queue_delay_s=0.0)
    found, expected = (bulk_throughput(each, rates, range(1, 8)).throughput_per_s for each in (eager, plain))
    assert found == pytest.approx(expected, rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(RATES, st.floats(0.1, 10.0), st.integers(1, 3))
def test_without_merging_more_requests_never_lower_x(rates: list[float], service_s: float, instances: int) -> None:
    """A theorem of the birth-death chain where no rate falls; with merging it is none, see the next test."""
    server = BulkServer(((1, service_s),), 1, instances=instances)
    x = bulk_throughput(server, sorted(rates), range(1, 12)).throughput_per_s[0]
    assert np.all(np.diff(x) >= -1e-9 * x[:-1])


def test_merging_what_costs_more_together_lowers_x() -> None:
    x = bulk_throughput(BulkServer(((1, 1.0), (2, 9.0)), 2), delay(1.0, 8), range(1, 9)).throughput_per_s[0]
    assert x[0] == pytest.approx(0.5)
    assert 2 / 9 < x[-1] < x[0]


# Many at once, and large ones.


def test_draws_and_populations_in_one_pass_are_those_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    server = BulkServer(LADDER, 6, (4,), 0.001)
    rates = np.array([[100.0, 150.0], [300.0, 320.0], [90.0, 400.0]])
    times_s = np.array([[0.002, 0.006], [0.003, 0.005], [0.001, 0.009]])
    jobs = [7, 1, 12, 3]
    whole = bulk_throughput(server, rates, jobs, service_cv=0.6, times_s=times_s)
    assert whole.populations == (7, 1, 12, 3)
    monkeypatch.setattr(bulk_chain, "_CHUNK_FLOATS", 1)
    for (d, rate), (c, n) in itertools.product(enumerate(rates), enumerate(jobs)):
        own = replace(server, ladder_s=((1, times_s[d, 0]), (8, times_s[d, 1])))
        alone = bulk_throughput(own, rate, [n], service_cv=0.6)
        for name in ("throughput_per_s", "mean_rows", "waiting", "utilisation"):
            assert getattr(whole, name)[d, c] == pytest.approx(getattr(alone, name)[0, 0], rel=1e-9)


@pytest.mark.parametrize(("rate_per_s", "expected"), [(1e9, 8 / 0.006), (1e-9, 1e-9)])
def test_chains_whose_probabilities_leave_the_floats(rate_per_s: float, expected: float) -> None:
    curve = bulk_throughput(BulkServer(LADDER, 8), (rate_per_s,), [300])
    assert curve.throughput_per_s == pytest.approx(expected, rel=1e-9)


def test_the_inverse_of_large_blocks() -> None:
    """Beyond what is eliminated row by row, where it halves."""
    rng = np.random.default_rng(1)
    t = 101.0 * np.eye(101) - rng.random((3, 101, 101))
    assert bulk_chain._inverse(t) @ t == pytest.approx(np.broadcast_to(np.eye(101), (3, 101, 101)), abs=1e-12)


SERVER = BulkServer(LADDER, 8)
ONE = (1.0,)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: BulkServer((), 8), "not a ladder"),
        (lambda: BulkServer(((2, 1.0), (1, 2.0)), 8), "increasing sizes"),
        (lambda: BulkServer(((1, 1.0), (2, 0.5)), 8), r"S\(k\).*positive"),
        (lambda: BulkServer(LADDER, 0), "max batch"),
        (lambda: BulkServer(LADDER, 8, (9,)), "preferred"),
        (lambda: BulkServer(LADDER, 8, queue_delay_s=-1.0), "queue delay"),
        (lambda: BulkServer(LADDER, 8, queue_delay_s=math.nan), "queue delay"),
        (lambda: BulkServer(LADDER, 8, instances=0), "instances"),
        (lambda: ladder_times((1, 2), (1.0,), (1,)), "differ in number"),
        (lambda: bulk_throughput(SERVER, (), [1]), "not a ladder"),
        (lambda: bulk_throughput(SERVER, (1.0, 0.0), [1]), "transport rates.*positive"),
        (lambda: bulk_throughput(SERVER, (math.nan,), [1]), "transport rates.*positive"),
        (lambda: bulk_throughput(SERVER, ONE, []), "no population"),
        (lambda: bulk_throughput(SERVER, ONE, [3, 0]), "population"),
        (lambda: bulk_throughput(SERVER, ONE, [1], rows=9), "refuses.*saw 9; allowed: 1 to 8"),
        (lambda: bulk_throughput(SERVER, ONE, [1], service_cv=1.2), "service cv.*simulation"),
        (lambda: bulk_throughput(SERVER, ONE, [1], stages=0), "stages"),
        (lambda: bulk_throughput(SERVER, ONE, [1], times_s=[[0.001, -1.0]]), "positive"),
        (lambda: bulk_throughput(SERVER, np.ones((2, 1)), [1], times_s=np.ones((3, 2))), "draws differ"),
        (
            lambda: bulk_throughput(replace(SERVER, instances=8), ONE, [64]),
            "too many states with 25 requests at the server: saw 601; allowed: <= 600; .*use the simulation",
        ),
    ],
)
def test_what_cannot_be_is_one_clear_line(make: Callable[[], object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        make()
