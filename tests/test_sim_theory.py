"""Simulated against theory: inside the run's own 99 % interval; the same check fails with a service 3 % longer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from b2gmodel import closed_form
from b2gmodel.batcher import Policy
from b2gmodel.errors import EvidenceError
from b2gmodel.network import ClosedNetwork, FlowEquivalent
from b2gmodel.sim.distributions import Constant, Distribution, Exponential, Gamma, Independent, LogNormal, variation
from b2gmodel.sim.experiments import Precision, RunResult, run_closed, run_open, run_scenario, seeds, throughput_curve
from b2gmodel.sim.scenario import Poisson, Scenario
from b2gmodel.sim.stations import Line, Station
from b2gmodel.sim.tally import BATCHES, Totals, ratio_interval, share_interval
from b2gmodel.stats import Interval

SEED = np.random.SeedSequence(20240229)
LONG = Precision(half_width=0.008, level=0.99)
FAULT = 1.03


def covers(interval: Interval | None, truth: float, slack: float = 0.0) -> bool:
    return interval is not None and interval.low - slack <= truth <= interval.high + slack


def open_queue(
    service: Callable[[float], Distribution], rate_per_s: float, servers: int = 1
) -> Callable[[float], Interval]:
    """The mean response of a queue of several servers, by the factor on its service time."""

    def run(fault: float) -> Interval:
        line = Line((Station.delay("server"),), ("server",), Independent([service(fault)]))
        return run_open(line, servers, rate_per_s, SEED, precision=LONG, quantiles=()).response_s

    return run


def erlang_c_response(rate: float, servers: int) -> float:
    """M/M/c with mean service 1."""
    head = sum(rate**n / math.factorial(n) for n in range(servers))
    tail = rate**servers / math.factorial(servers) * servers / (servers - rate)
    return 1.0 + tail / (head + tail) / (servers - rate)


def pollaczek_khinchine(rate: float, cv: float) -> float:
    """M/G/1 with mean service 1."""
    return 1.0 + rate * (1 + cv**2) / (2 * (1 - rate))


def closed(line_of: Callable[[float], Line], flights: int) -> Callable[[float], Interval]:
    def run(fault: float) -> Interval:
        return run_closed(line_of(fault), flights, SEED, precision=LONG, quantiles=()).throughput_per_s

    return run


def repairman(fault: float) -> Line:
    """Two repairmen, five machines; demands of the oracle 'repairman-2'."""
    stations = (Station.delay("up"), Station.queue("repair", 2))
    return Line(stations, ("up", "repair"), Independent([Exponential(6.0), Exponential(fault)]))


def sharing(fault: float) -> Line:
    stations = (Station.delay("think"), Station.shared("cpu", 2))
    return Line(stations, ("think", "cpu"), Independent([Gamma(2.0, 0.4), LogNormal(fault, 2.0)]))


def flow_equivalent(fault: float) -> Line:
    stations = (Station.flow_equivalent("transport", (0.5, 0.8, 0.9)), Station.queue("gpu"))
    return Line(stations, ("transport", "gpu"), Independent([Exponential(fault), Exponential(fault)]))


INF = math.inf
CASES: dict[str, tuple[Callable[[float], Interval], float]] = {
    "M/M/1": (open_queue(Exponential, 0.5), 2.0),
    "M/M/1 at 0.8": (open_queue(Exponential, 0.8), 5.0),
    "M/M/3": (open_queue(Exponential, 2.1, 3), erlang_c_response(2.1, 3)),
    "M/D/1": (open_queue(Constant, 0.7), pollaczek_khinchine(0.7, 0.0)),
    "M/G/1": (open_queue(lambda mean: LogNormal(mean, 1.5), 0.6), pollaczek_khinchine(0.6, 1.5)),
    "M/E4/1": (open_queue(lambda mean: Gamma.erlang(mean, 4), 0.7), pollaczek_khinchine(0.7, 0.5)),
    "machine repairman": (closed(repairman, 5), 0.7080658),
    "processor sharing is insensitive": (
        closed(sharing, 5),
        float(ClosedNetwork([closed_form.Station(2.0, INF), closed_form.Station(1.0, 2)]).throughput(5)[-1]),
    ),
    "flow-equivalent station": (
        closed(flow_equivalent, 4),
        float(ClosedNetwork([FlowEquivalent((0.5, 0.8, 0.9)), closed_form.Station(1.0)]).throughput(4)[-1]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_theory_lies_in_the_interval_and_a_planted_fault_outside(name: str) -> None:
    run, truth = CASES[name]
    assert covers(run(1.0), truth)
    assert not covers(run(FAULT), truth)


def lossy(fault: float) -> RunResult:
    """M/M/2/5 under overload: two flights, a queue of three, arrivals at 3 for a service of 2 a second."""
    line = Line((Station.delay("server"),), ("server",), Independent([Exponential(fault)]))
    scenario = Scenario(Policy(1, 2, 3), line, Poisson(3.0))
    return run_scenario(scenario, SEED, precision=Precision(0.01, 0.99, first_cycles=60_000), quantiles=())


def test_blocking_as_in_m_m_2_5() -> None:
    weights = [3.0**n / (math.factorial(min(n, 2)) * 2.0 ** max(0, n - 2)) for n in range(6)]
    blocked = weights[5] / sum(weights)
    carried = 3.0 * (1 - blocked)
    sound, faulty = lossy(1.0), lossy(FAULT)
    for run, expected in ((sound, True), (faulty, False)):
        assert covers(run.throughput_per_s, carried) is expected
        assert covers(run.rejected_share, blocked) is expected
        # By Little's law each of the two flights is busy for carried / 2 of the time.
        assert covers(run.queue["server"], carried) is expected


ORACLES = json.loads((Path(__file__).parent / "data" / "oracles.json").read_text(encoding="utf-8"))


def the_cycle(cv: float | None, fault: float = 1.0) -> Line:
    """Pack 0.3, link 0.8, two processors 1.2, GPU 1.0, delay 1.5; constant without a cv. The GPU's is faulty."""

    def time(mean_s: float) -> Distribution:
        return Constant(mean_s) if cv is None else Exponential(mean_s) if cv == 1.0 else Gamma(mean_s, cv)

    stations = (
        Station.queue("pack"),
        Station.queue("link"),
        Station.queue("cpu", 2),
        Station.queue("gpu"),
        Station.delay("rest"),
    )
    route = ("pack", "link", "cpu", "gpu", "rest")
    return Line(stations, route, Independent([time(mean_s) for mean_s in (0.3, 0.8, 1.2, fault, 1.5)]))


@pytest.mark.parametrize("flights", range(1, 9))
def test_the_deterministic_cycle(flights: int) -> None:
    def rate(fault: float) -> float:
        # 840 is a multiple of every M, so that whole rounds are counted.
        return float(throughput_curve(the_cycle(None, fault), [flights], SEED, cycles=840, warmup=200)[0])

    expected = pytest.approx(min(flights / 4.8, 1.0), rel=1e-9)
    assert rate(1.0) == expected
    assert rate(FAULT) != expected


@pytest.mark.parametrize(("key", "cv"), [("exponential", 1.0), ("cv_0.6", 0.6), ("cv_0.3", 0.3), ("cv_0.1", 0.1)])
def test_the_variability_bracket(key: str, cv: float) -> None:
    """The oracle's values are rounded, and those that it simulated are known to about 0.003."""
    bracket = ORACLES["variability_bracket"]
    slack = 0.0005 if cv == 1.0 else 0.003

    def agrees(fault: float) -> bool:
        precision = Precision(0.003, 0.99)
        runs = [run_closed(the_cycle(cv, fault), m, SEED, precision=precision, quantiles=()) for m in bracket["M"]]
        return all(covers(run.throughput_per_s, x, slack) for run, x in zip(runs, bracket[key], strict=True))

    assert agrees(1.0)
    assert not agrees(FAULT)


def test_an_overloaded_queue_gets_no_interval() -> None:
    line = Line((Station.delay("server"),), ("server",), Independent([Exponential(1.0)]))
    with pytest.raises(EvidenceError, match="more"):
        run_open(line, 1, 1.2, SEED, precision=Precision(most_cycles=200_000))


def test_a_run_too_short_for_its_precision_says_what_it_needs() -> None:
    line = Line((Station.delay("server"),), ("server",), Independent([Exponential(1.0)]))
    with pytest.raises(EvidenceError, match=r"needs about \d+ .* more"):
        run_open(line, 1, 0.8, SEED, precision=Precision(half_width=1e-4, most_cycles=100_000))


@pytest.mark.parametrize(
    "distribution",
    [Constant(0.3), Exponential(0.3), Gamma(0.3, 0.7), Gamma.erlang(0.3, 3), LogNormal(0.3, 0.5)],
    ids=lambda each: type(each).__name__,
)
def test_moments_agree_with_samples(distribution: Distribution) -> None:
    def agree(values: np.ndarray) -> bool:
        off = []
        for order in (1, 2, 3):
            spread = math.sqrt(max(0.0, distribution.moment(2 * order) - distribution.moment(order) ** 2))
            tolerance = 4 * spread / math.sqrt(len(values)) + 1e-12
            off.append(abs(np.mean(values**order) - distribution.moment(order)) / tolerance)
        return max(off) <= 1.0

    values = distribution.sample(np.random.default_rng(1), 400_000)
    assert agree(values)
    assert not agree(FAULT * values)
    assert variation(distribution) == pytest.approx(values.std() / values.mean(), rel=0.02, abs=1e-6)


def m_m_1(
    rate: float,
    fault: float = 1.0,
    *,
    seed: np.random.SeedSequence = SEED,
    precision: Precision = LONG,
    quantiles: Sequence[float] = (),
) -> RunResult:
    """With more flights than ever meet, so that all that wait do so at the server."""
    line = Line((Station.queue("server"),), ("server",), Independent([Exponential(fault)]))
    return run_open(line, 64, rate, seed, precision=precision, quantiles=quantiles)


@pytest.mark.parametrize("share", [0.5, 0.95, 0.99])
def test_quantiles_of_m_m_1(share: float) -> None:
    """The response of M/M/1 is exponential with mean 1 / (1 - load)."""
    truth = -2.0 * math.log(1 - share)
    sound, faulty = (m_m_1(0.5, fault, quantiles=[share]).quantiles_s[share] for fault in (1.0, FAULT))
    assert covers(sound, truth)
    assert not covers(faulty, truth)
    assert sound.half_width < 0.04 * truth


def test_a_run_goes_on_until_its_quantiles_are_known() -> None:
    line = Line((Station.delay("server"),), ("server",), Independent([Exponential(1.0)]))
    result = run_open(line, 1, 0.5, SEED, precision=Precision(0.9, first_cycles=1000), quantiles=[0.999])
    assert result.quantiles_s[0.999].low < 2.0 * math.log(1000) < result.quantiles_s[0.999].high
    assert result.samples > 3000


@pytest.mark.parametrize("rate", [0.3, 0.7])
def test_utilisation_and_queue_of_m_m_1(rate: float) -> None:
    for fault, expected in ((1.0, True), (FAULT, False)):
        run = m_m_1(rate, fault)
        assert covers(run.utilisation["server"], rate) is expected
        assert covers(run.queue["server"], rate / (1 - rate)) is expected


def test_intervals_of_utilisation_and_queue_cover_as_often_as_they_say() -> None:
    """Ninety-five in a hundred, give or take three standard errors; intervals of half the width do not."""
    short = Precision(0.9, first_cycles=1 << 14)
    runs = [m_m_1(0.5, seed=seed, precision=short) for seed in seeds(7, 100)]
    for name, truth in (("utilisation", 0.5), ("queue", 1.0)):
        intervals = [getattr(run, name)["server"] for run in runs]
        assert sum(covers(each, truth) for each in intervals) >= 88
        assert sum(covers(each, truth, -each.half_width / 2) for each in intervals) < 88


def test_totals_grow_without_the_warm_up() -> None:
    """A note each second and ten samples; 1 a second until sample 80, then 3."""
    totals = Totals()
    for second in range(1, 9 + 2 * BATCHES):
        totals.note(10 * second, float(second), second + 2.0 * max(0, second - 8))
    assert totals.growth(80).tolist() == [[2.0, 6.0]] * BATCHES
    assert totals.growth(0)[0, 1] == totals.growth(0)[0, 0]
    with pytest.raises(EvidenceError, match="too few"):
        totals.growth(10 * (8 + BATCHES) + 5)


def test_a_share_of_which_nothing_was_seen_may_still_be_some() -> None:
    none = share_interval(np.zeros(16), np.full(16, 100.0), 0.95)
    assert (none.mean, none.low) == (0.0, 0.0)
    assert none.high == pytest.approx(3 / 1600, rel=2e-3)


def test_the_ratio_of_totals_by_hand() -> None:
    """Sixteen batches, of 1 in 10 and of 3 in 10: a fifth, give or take Student's t times 1 / sqrt(15) / 10."""
    share = ratio_interval(np.array([1.0, 3.0] * 8), np.full(16, 10.0), 0.95)
    assert share.mean == pytest.approx(0.2)
    assert share.half_width == pytest.approx(2.13145 * 0.1 / math.sqrt(15), rel=1e-5)
