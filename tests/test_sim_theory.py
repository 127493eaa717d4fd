"""Simulated against theory: inside the run's own 99 % interval; the same run with a service 3 % longer lies outside."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from b2gmodel import closed_form
from b2gmodel.batcher import Policy
from b2gmodel.errors import EvidenceError
from b2gmodel.network import ClosedNetwork, FlowEquivalent
from b2gmodel.sim.distributions import Constant, Distribution, Exponential, Gamma, Independent, LogNormal, variation
from b2gmodel.sim.experiments import Precision, RunResult, run_closed, run_open, run_scenario, throughput_curve
from b2gmodel.sim.scenario import Poisson, Scenario
from b2gmodel.sim.stations import Line, Station
from b2gmodel.stats import Interval

SEED = np.random.SeedSequence(20240229)
LONG = Precision(half_width=0.008, level=0.99)
FAULT = 1.03


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
    sound, faulty = run(1.0), run(FAULT)
    assert sound.low <= truth <= sound.high
    assert not faulty.low <= truth <= faulty.high


def lossy(fault: float) -> RunResult:
    """M/M/2/5 under overload: two flights, a queue of three, arrivals at 3 for a service of 2 a second."""
    line = Line((Station.delay("server"),), ("server",), Independent([Exponential(fault)]))
    scenario = Scenario(Policy(1, 2, 3), line, Poisson(3.0))
    return run_scenario(scenario, SEED, flights=60_000, level=0.99, quantiles=())


def test_blocking_as_in_m_m_2_5() -> None:
    weights = [3.0**n / (math.factorial(min(n, 2)) * 2.0 ** max(0, n - 2)) for n in range(6)]
    blocked = weights[5] / sum(weights)
    sound, faulty = lossy(1.0), lossy(FAULT)
    carried = 3.0 * (1 - blocked)
    assert sound.throughput_per_s.low <= carried <= sound.throughput_per_s.high
    assert not faulty.throughput_per_s.low <= carried <= faulty.throughput_per_s.high
    assert sound.rejected_share is not None
    assert sound.rejected_share.low <= blocked <= sound.rejected_share.high
    assert faulty.rejected_share is not None
    assert not faulty.rejected_share.low <= blocked <= faulty.rejected_share.high


ORACLES = json.loads((Path(__file__).parent / "data" / "oracles.json").read_text(encoding="utf-8"))


def the_cycle(cv: float | None) -> Line:
    """Pack 0.3, link 0.8, two processors 1.2, GPU 1.0, delay 1.5; constant where no cv is given."""

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
    return Line(stations, route, Independent([time(mean_s) for mean_s in (0.3, 0.8, 1.2, 1.0, 1.5)]))


def test_the_deterministic_cycle() -> None:
    # 840 is a multiple of every M, so that whole rounds are counted.
    curve = throughput_curve(the_cycle(None), range(1, 9), SEED, cycles=840, warmup=200)
    assert curve == pytest.approx([min(m / 4.8, 1.0) for m in range(1, 9)], rel=1e-9)


@pytest.mark.parametrize(("key", "cv"), [("exponential", 1.0), ("cv_0.6", 0.6), ("cv_0.3", 0.3), ("cv_0.1", 0.1)])
def test_the_variability_bracket(key: str, cv: float) -> None:
    bracket = ORACLES["variability_bracket"]
    curve = throughput_curve(the_cycle(cv), bracket["M"], SEED, cycles=200_000, warmup=1000)
    assert curve == pytest.approx(bracket[key], abs=0.01)


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
    values = distribution.sample(np.random.default_rng(1), 400_000)
    for order in (1, 2, 3):
        spread = math.sqrt(max(0.0, distribution.moment(2 * order) - distribution.moment(order) ** 2))
        tolerance = 4 * spread / math.sqrt(len(values)) + 1e-12
        assert abs(np.mean(values**order) - distribution.moment(order)) <= tolerance
    assert variation(distribution) == pytest.approx(values.std() / values.mean(), rel=0.02, abs=1e-6)


def test_quantiles_of_m_m_1() -> None:
    """The response of M/M/1 is exponential with mean 1 / (1 - load)."""
    line = Line((Station.delay("server"),), ("server",), Independent([Exponential(1.0)]))
    result = run_open(line, 1, 0.5, SEED, precision=LONG)
    for share, interval in result.quantiles_s.items():
        truth = -2.0 * math.log(1 - share)
        assert interval.low <= truth <= interval.high
        assert interval.half_width < 0.04 * truth
