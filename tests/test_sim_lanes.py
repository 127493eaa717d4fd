"""Lanes against the kernel: each of them departs as a run of its own would, to the last bit."""

from __future__ import annotations

import numpy as np
import pytest

from b2gmodel.errors import UsageError
from b2gmodel.sim.compiled import WIDTH
from b2gmodel.sim.distributions import Constant, Distribution, Exponential, Floats, Independent, LogNormal, Resampled
from b2gmodel.sim.experiments import throughput_curve
from b2gmodel.sim.kernel import Kernel
from b2gmodel.sim.lanes import Lanes
from b2gmodel.sim.stations import Draws, Line, Station

SEED = np.random.SeedSequence(11)


def a_distribution(rng: np.random.Generator) -> Distribution:
    """Whole seconds now and then, so that many flights meet at one instant."""
    mean_s = float(10 ** rng.uniform(-2, 1))
    return [Constant(float(rng.integers(1, 4))), Exponential(mean_s), LogNormal(mean_s, 1.5)][rng.integers(3)]


def a_line(rng: np.random.Generator) -> Line:
    """Up to three delays, one of them passed twice perhaps, then the server."""
    delays = tuple(Station.delay(f"d{number}") for number in range(3))
    route = (*(delays[i].name for i in rng.integers(3, size=rng.integers(0, 4))), "gpu")
    times = Independent([a_distribution(rng) for _ in route])
    return Line((*delays, Station.queue("gpu")), route, times)


def the_line(times: Independent | Resampled) -> Line:
    return Line((Station.delay("transport"), Station.queue("gpu")), ("transport", "gpu"), times)


MEASURED = the_line(Resampled(np.random.default_rng(7).gamma(10.0, 0.1, (500, 2)) * [0.3, 0.1]))


def assert_lane_is_the_kernel(line: Line, flights: int, work: Floats, launched_s: Floats, delivered_s: Floats) -> None:
    alone = Kernel(line, flights, SEED).advance(work)
    assert not launched_s[:flights].any()
    assert not delivered_s[:flights].any()
    # The kernel delivers one more when the last launch is made.
    count = max(0, len(work) - flights)
    assert np.array_equal(launched_s[flights:], alone.launched_s[:count])
    assert np.array_equal(delivered_s[flights:], alone.delivered_s[:count])


def test_every_lane_departs_as_the_kernel_does() -> None:
    for case in range(200):
        rng = np.random.default_rng(case)
        line, lanes = a_line(rng), int(rng.integers(1, WIDTH + 1))
        flights = rng.integers(1, rng.choice([2, 5, 17, 70]), lanes).tolist()
        work = np.stack([Draws(line.times, np.random.SeedSequence([case, lane])).block(400) for lane in range(lanes)])
        together = Lanes(line, flights)
        parts = [together.advance(part) for part in np.split(work, np.sort(rng.integers(0, 400, 3)), axis=1)]
        launched_s, delivered_s = (np.concatenate(part) for part in zip(*parts, strict=True))
        assert launched_s.shape == delivered_s.shape == (400, lanes)
        for lane, m in enumerate(flights):
            assert_lane_is_the_kernel(line, m, work[lane], launched_s[:, lane], delivered_s[:, lane])


def test_the_same_work_for_all_is_work_for_each() -> None:
    work = Draws(MEASURED.times, SEED).block(300)
    common = Lanes(MEASURED, [1, 4, 9]).advance(work)
    own = Lanes(MEASURED, [1, 4, 9]).advance(np.stack([work] * 3))
    assert np.array_equal(common, own)


def test_a_planted_error_of_a_few_bits_is_seen() -> None:
    work = Draws(MEASURED.times, SEED).block(300)
    launched_s, delivered_s = Lanes(MEASURED, [4]).advance(work)
    assert_lane_is_the_kernel(MEASURED, 4, work, launched_s[:, 0], delivered_s[:, 0])
    wrong = work.copy()
    wrong[0, 1] += 2.0**-50
    with pytest.raises(AssertionError):
        assert_lane_is_the_kernel(MEASURED, 4, wrong, launched_s[:, 0], delivered_s[:, 0])


def test_a_schedule_by_hand() -> None:
    """A delay of 2 and one server of 3 (whole seconds), with one, two and three flights."""
    line = the_line(Independent([Constant(2.0), Constant(3.0)]))
    launched_s, delivered_s = Lanes(line, [1, 2, 3]).advance(np.tile([2.0, 3.0], (6, 1)))
    assert launched_s.T.tolist() == [[0, 0, 5, 10, 15, 20], [0, 0, 0, 0, 5, 8], [0, 0, 0, 0, 0, 0]]
    assert delivered_s.T.tolist() == [[0, 5, 10, 15, 20, 25], [0, 0, 5, 8, 11, 14], [0, 0, 0, 5, 8, 11]]


def test_of_two_that_arrive_at_one_instant_the_first_launched_is_served_first() -> None:
    """Three at time 1 with 4, 2 and 1 to be served; the first again at 5 + 2, with the third done at 7 before it."""
    line = the_line(Independent([Constant(1.0), Constant(1.0)]))
    work = np.array([[1.0, 4.0], [1.0, 2.0], [1.0, 1.0], [2.0, 8.0], [0.5, 1.0], [1.0, 1.0], [1.0, 1.0]])
    _, delivered_s = Lanes(line, [3]).advance(work)
    # Launched at 5, 7 and 8: due at 7, 7.5 and 9.
    assert delivered_s[3:, 0].tolist() == [5.0, 7.0, 8.0, 16.0]


def one_by_one(line: Line, flights: list[int], cycles: int, warmup: int) -> Floats:
    rates = []
    for m in flights:
        delivered_s = Kernel(line, m, SEED).advance(Draws(line.times, SEED).block(warmup + cycles + 2 + m)).delivered_s
        rates.append(cycles / (delivered_s[warmup + cycles] - delivered_s[warmup]))
    return np.array(rates)


@pytest.mark.parametrize(
    "flights",
    [[*range(1, 17)], [3], [5, 1, 200], [16, 2, 2, 9, 1], [1], [*range(40, 0, -1)], []],
    ids=lambda flights: f"{len(flights)}",
)
@pytest.mark.parametrize(
    "line",
    [
        MEASURED,
        the_line(Independent([Constant(3.0), Constant(1.0)])),
        Line((Station.delay("d"), Station.queue("gpu", 2)), ("d", "gpu"), MEASURED.times),
        Line((Station.flow_equivalent("t", (1.0, 1.5)), Station.queue("gpu")), ("t", "gpu"), MEASURED.times),
        Line((Station.shared("cpu"), Station.delay("d")), ("cpu", "d"), MEASURED.times),
    ],
    ids=["measured", "constant", "two servers", "flow-equivalent", "shared first"],
)
def test_curves_are_those_of_one_kernel_after_the_other(line: Line, flights: list[int]) -> None:
    curve = throughput_curve(line, flights, SEED, cycles=2500, warmup=100)
    assert np.array_equal(curve, one_by_one(line, flights, 2500, 100))


@pytest.mark.parametrize(
    "stations",
    [
        (Station.delay("transport"), Station.queue("gpu", 2)),
        (Station.queue("transport"), Station.queue("gpu")),
        (Station.shared("transport"), Station.queue("gpu")),
        (Station.queue("transport"), Station.delay("gpu")),
    ],
)
def test_other_lines_are_refused(stations: tuple[Station, ...]) -> None:
    line = Line(stations, ("transport", "gpu"), MEASURED.times)
    with pytest.raises(UsageError, match="one single server"):
        Lanes(line, [1, 4])


@pytest.mark.parametrize("flights", [[], [1] * (WIDTH + 1), [0], [2, -1]])
def test_lanes_and_flights_are_counted(flights: list[int]) -> None:
    with pytest.raises(UsageError):
        Lanes(MEASURED, flights)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5, 2), (2, 5, 3), (8, 5, 2)])
def test_work_must_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="work for other lanes"):
        Lanes(MEASURED, [1, 4]).advance(np.ones(shape))
