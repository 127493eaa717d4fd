"""The reference engine by hand: placements, server batching, bounded queues, deadlines, records and conservation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2gmodel.batcher import Placement, Policy
from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.flights import series_s
from b2gmodel.sim.distributions import Constant, Exponential, Independent, Resampled
from b2gmodel.sim.experiments import Precision, run_scenario
from b2gmodel.sim.reference import Run, simulate
from b2gmodel.sim.scenario import BatchedService, Closed, Poisson, Recorded, Scenario
from b2gmodel.sim.server_batcher import DynamicBatching, Execution, ServerBatcher
from b2gmodel.sim.stations import Line, Station

SEED = np.random.SeedSequence(11)
MS = 1_000_000


def constant_line(transport_s: float = 0.002, service_s: float = 0.001) -> Line:
    stations = (Station.delay("transport"), Station.queue("gpu"))
    return Line(stations, ("transport", "gpu"), Independent([Constant(transport_s), Constant(service_s)]), "gpu")


@pytest.mark.parametrize(
    ("placement", "flights", "clients", "expected"),
    [
        # one request a batch, four in flight: the GPU binds
        (Placement.C1, 1, 4, 1000.0),
        # four to a batch, one flight: a cycle of 3 ms
        (Placement.C3, 1, 4, 4 / 0.003),
        # two flights overlap: 8 requests each 3 ms
        (Placement.C4, 2, 8, 8 / 0.003),
        # four flights: the GPU binds, 4 requests a ms
        (Placement.C4, 4, 16, 4 / 0.001),
    ],
)
def test_placements_by_hand(placement: Placement, flights: int, clients: int, expected: float) -> None:
    policy = Policy.for_placement(placement, batch_size=4, flights=flights, concurrency=clients, queue_limit=clients)
    outcome = simulate(Scenario(policy, constant_line(), Closed(clients)), SEED, flights=2000)
    assert outcome.throughput_per_s == pytest.approx(expected, rel=0.005)


def test_server_batching_gains_over_none() -> None:
    """C2: what waits in the server is merged. S(k) = 1 ms for every size, eight clients."""
    policy = Policy.for_placement(Placement.C2, batch_size=1, flights=1, concurrency=8, queue_limit=8)
    server = BatchedService(DynamicBatching(8), 1, ((1, 0.001),))
    plain = simulate(Scenario(policy, constant_line(), Closed(8)), SEED, flights=2000)
    merged = simulate(Scenario(policy, constant_line(), Closed(8), server=server), SEED, flights=2000)
    assert plain.throughput_per_s == pytest.approx(1000.0, rel=0.01)
    assert merged.executions is not None
    assert sum(size * count for size, count in merged.executions.items()) >= 2000
    assert merged.throughput_per_s > 2 * plain.throughput_per_s


def test_records_have_the_shape_of_live_ones() -> None:
    outcome = simulate(Scenario(Policy(4, 1, 4), constant_line(), Closed(4)), SEED, flights=3)
    assert series_s(outcome.cycles) == pytest.approx(np.array([[0.003, 0.001]] * 3))
    second = outcome.cycles[1]
    assert (second.flight.flight_id, second.flight.size) == (1, 4)
    assert (second.flight.sealed_ns, second.flight.delivered_ns) == (3 * MS, 6 * MS)
    assert (second.flight.times.send_end_ns, second.flight.times.first_byte_ns) == (5 * MS, 6 * MS)
    assert (second.queue_ns, second.service_ns, second.transport_ns) == (0, 1 * MS, 2 * MS)


def test_a_bounded_queue_refuses_and_nothing_is_lost() -> None:
    """One flight of 3 ms, room for one to wait, four at once: two are refused."""
    scenario = Scenario(Policy(1, 1, 1), constant_line(), Recorded((0.0, 0.0, 0.0, 0.0)))
    counts = simulate(scenario, SEED, flights=10).counts
    assert (counts.arrived, counts.answered, counts.refused, counts.expired) == (4, 2, 2, 0)


def test_a_deadline_expires_what_waits_too_long() -> None:
    """The second is sent at 3 ms, in time; the third would be sent at 6 ms, past its deadline of 5 ms."""
    scenario = Scenario(Policy(1, 1, 10), constant_line(), Recorded((0.0, 0.0, 0.0)), patience_s=0.005)
    outcome = simulate(scenario, SEED, flights=10)
    assert (outcome.counts.answered, outcome.counts.expired) == (2, 1)
    assert outcome.requests_s.tolist() == pytest.approx(np.array([[0.0, 0.003], [0.0, 0.006]]))


def test_a_formation_deadline_sends_a_partial_batch() -> None:
    policy = Policy(4, 1, 8, formation_deadline_ns=2 * MS)
    outcome = simulate(Scenario(policy, constant_line(), Closed(2)), SEED, flights=1)
    (flight,) = outcome.flights
    assert (flight.size, flight.sealed_ns, flight.delivered_ns) == (2, 2 * MS, 5 * MS)


def test_a_trace_says_who_waited_where() -> None:
    outcome = simulate(Scenario(Policy(1, 2, 2), constant_line(), Closed(2)), SEED, flights=2, trace=True)
    second = [stay for stay in outcome.stays if stay.flight_id == 1]
    assert [(stay.station, stay.arrived_s, stay.begun_s, stay.ended_s) for stay in second] == [
        ("transport", 0.0, 0.0, 0.002),
        ("gpu", 0.002, 0.003, 0.004),
    ]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(0, 5),
    st.floats(50.0, 3000.0),
    st.one_of(st.none(), st.floats(0.001, 0.01)),
    st.integers(0, 10_000),
)
def test_every_request_is_counted_once(
    k: int, flights: int, room: int, rate: float, patience_s: float | None, seed: int
) -> None:
    stations = (Station.delay("transport"), Station.queue("gpu"))
    line = Line(stations, ("transport", "gpu"), Independent([Exponential(0.002), Exponential(0.001)]))
    scenario = Scenario(Policy(k, flights, k + room, 5 * MS), line, Poisson(rate), patience_s)
    outcome = simulate(scenario, np.random.SeedSequence(seed), flights=30)
    counts = outcome.counts
    assert counts.arrived == counts.answered + counts.refused + counts.expired + counts.waiting + counts.in_flight
    assert counts.answered == sum(flight.size for flight in outcome.flights) == len(outcome.requests_s)
    assert np.all(outcome.response_s > 0)


def a_bounded_queue() -> Scenario:
    stations = (Station.delay("transport"), Station.queue("gpu"))
    line = Line(stations, ("transport", "gpu"), Independent([Exponential(0.002), Exponential(0.001)]), "gpu")
    return Scenario(Policy(2, 2, 4, 5 * MS), line, Poisson(1500.0), 0.005)


def test_a_run_in_stretches_is_the_run_in_one() -> None:
    whole = simulate(a_bounded_queue(), SEED, flights=100)
    run = Run(a_bounded_queue(), SEED)
    stretches = [run.advance(flights) for flights in (1, 30, 69)]
    assert sum((each.cycles for each in stretches), ()) == whole.cycles
    assert np.array_equal(np.concatenate([each.requests_s for each in stretches]), whole.requests_s)
    last = stretches[-1]
    assert (last.counts, last.elapsed_s) == (whole.counts, whole.elapsed_s)
    assert np.array_equal(last.busy_work, whole.busy_work)
    assert np.array_equal(last.residence_s, whole.residence_s)


def test_work_and_residence_by_hand() -> None:
    """Two flights of 2 ms and 1 ms: at 4 ms both were computed, and the second has waited for 1 ms."""
    run = Run(Scenario(Policy(1, 2, 2), constant_line(), Recorded((0.0, 0.0))), SEED)
    outcome = run.advance(10)
    assert run.is_over
    assert outcome.elapsed_s == pytest.approx(0.004)
    assert outcome.busy_work == pytest.approx([0.004, 0.002])
    assert outcome.residence_s == pytest.approx([0.004, 0.003])
    again = run.advance(10)
    assert (again.flights, again.counts) == ((), outcome.counts)


def test_a_run_goes_on_until_it_is_precise() -> None:
    """Each run is the beginning of a longer one, twice as long or four times; none stops before it must."""
    told: list[tuple[str, float]] = []
    samples = []
    for half_width in (0.05, 0.02):
        result = run_scenario(
            a_bounded_queue(),
            SEED,
            precision=Precision(half_width, first_cycles=1000),
            progress=lambda stage, share: told.append((stage, share)),
        )
        assert result.response_s.half_width <= half_width * result.response_s.mean
        samples.append(result.samples)
    assert samples[0] < samples[1]
    stages = [stage for stage, _ in told]
    assert stages.count("to 1000 cycles") > 100
    assert all(0 < share <= 1 for _, share in told)
    assert told[-1][1] == 1.0


def test_the_limit_says_how_much_is_missing() -> None:
    with pytest.raises(EvidenceError, match=r"after 4000 cycles.*needs about \d+ cycles more"):
        run_scenario(a_bounded_queue(), SEED, precision=Precision(0.001, first_cycles=1000, most_cycles=4000))


def test_recorded_arrivals_run_to_their_end_and_want_a_steady_state() -> None:
    steady = tuple(np.cumsum(np.random.default_rng(3).exponential(0.002, 4000)).tolist())
    line = constant_line()
    # The precision cannot be reached and is not asked for: there is no more to simulate.
    scenario = Scenario(Policy(1, 2, 100), line, Recorded(steady))
    result = run_scenario(scenario, SEED, precision=Precision(1e-6), quantiles=[0.5])
    assert result.samples == 4000
    assert result.rejected_share is not None
    assert (result.rejected_share.mean, result.rejected_share.low) == (0.0, 0.0)
    assert 0 < result.rejected_share.high < 0.002
    # Twice what one instance can do: the queue grows from the first to the last.
    crowd = tuple(np.arange(0.0, 2.0, 0.0005).tolist())
    with pytest.raises(EvidenceError, match="no steady state"):
        run_scenario(Scenario(Policy(1, 2, 10_000), line, Recorded(crowd)), SEED)


def test_correlation_within_a_cycle_is_kept() -> None:
    rows = np.array([[0.001, 0.003], [0.003, 0.001]])
    stations = (Station.delay("transport"), Station.queue("gpu"))
    line = Line(stations, ("transport", "gpu"), Resampled(rows), "gpu")
    outcome = simulate(Scenario(Policy(1, 1, 1), line, Closed(1)), SEED, flights=200)
    assert {(cycle.cycle_ns, cycle.service_ns) for cycle in outcome.cycles} <= {
        (4 * MS + off, service + shift) for off in (-1, 0, 1) for service in (MS, 3 * MS) for shift in (-1, 0, 1)
    }
    assert len({round(cycle.service_ns / MS) for cycle in outcome.cycles}) == 2


def test_the_server_batcher_by_hand() -> None:
    """One instance, preferred size 4, at most 8, a delay of 100 ns."""
    batcher: ServerBatcher[str] = ServerBatcher(DynamicBatching(8, (4,), 100), 1)
    assert batcher.arrive("a", 2, 0) == []
    assert batcher.next_wake_ns == 100
    assert batcher.arrive("b", 2, 10) == [Execution(("a", "b"), 4)]
    assert batcher.arrive("c", 1, 20) == []
    assert batcher.next_wake_ns is None  # no instance is free
    assert batcher.instance_free(60) == []
    assert batcher.next_wake_ns == 120
    assert batcher.tick(120) == [Execution(("c",), 1)]
    assert batcher.arrive("d", 5, 130) == []
    assert batcher.arrive("e", 5, 131) == []
    assert batcher.instance_free(140) == [Execution(("d",), 5)]  # both do not fit, and the batch cannot grow


def test_without_delay_the_server_takes_what_waits() -> None:
    batcher: ServerBatcher[int] = ServerBatcher(DynamicBatching(4), 2)
    assert batcher.arrive(0, 1, 0) == [Execution((0,), 1)]
    assert batcher.arrive(1, 1, 0) == [Execution((1,), 1)]
    for number in range(2, 8):
        assert batcher.arrive(number, 1, 1) == []
    assert batcher.instance_free(5) == [Execution((2, 3, 4, 5), 4)]
    assert batcher.instance_free(6) == [Execution((6, 7), 2)]


def test_s_of_k_lies_on_the_ladder() -> None:
    service = BatchedService(DynamicBatching(16), 1, ((1, 0.010), (8, 0.017), (16, 0.033)))
    assert [service.mean_s(rows) for rows in (1, 4, 8, 12, 16)] == pytest.approx([0.010, 0.013, 0.017, 0.025, 0.033])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Scenario(Policy(1, 1, 1), constant_line(), Closed(2)), "queue"),
        (lambda: Scenario(Policy(4, 1, 4), constant_line(), Closed(2)), "never fill"),
        (lambda: Scenario(Policy(1, 1, 2), constant_line(), Closed(2), patience_s=1.0), "think"),
        (lambda: Line((Station.delay("a"),), ("b",), Independent([Constant(1.0)])), "no such station"),
        (lambda: Line((Station.delay("a"),), ("a", "a"), Independent([Constant(1.0)])), "differ in number"),
        (lambda: Station.instances("gpu", ()), "compute law"),
        (lambda: Recorded((2.0, 1.0)), "arrivals"),
        (lambda: Resampled([[1.0, -0.1]]), "positive"),
        (lambda: DynamicBatching(4, (5,)), "preferred"),
        (lambda: Poisson(0.0), "rate"),
    ],
)
def test_what_cannot_be_is_one_clear_line(make: object, text: str) -> None:
    assert callable(make)
    with pytest.raises(UsageError, match=text):
        make()
