"""Runs with error bars: seeds, warm-up, when to stop, and when not to answer.

Rules here: every number comes with an interval or not at all. A run goes on, twice as long each time, until its
mean is known to the half-width asked for; where its length is limited and that was not reached, or where no steady
state was, it raises and says how much more it needs. Equal seeds mean equal work for equal flight numbers, so that
runs which differ in M or in one leg are compared on common random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.kernel import Kernel
from b2gmodel.sim.reference import simulate
from b2gmodel.sim.scenario import Scenario
from b2gmodel.sim.stations import DRAW_BLOCK, Line
from b2gmodel.sim.tally import BATCHES, Tally
from b2gmodel.stats import Interval, student_interval

QUANTILES: Final = (0.5, 0.95, 0.99)
FIRST_CYCLES: Final = 1 << 15
MOST_CYCLES: Final = 1 << 27

Progress = Callable[[float], None]
"""Told the share that is done."""


@dataclass(frozen=True, slots=True)
class Precision:
    """When a run may stop.

    Attributes:
        half_width: of the mean response, relative to it.
        level: of all intervals.
        first_cycles: run before the first look at the precision.
        most_cycles: the run's limit.

    Raises:
        UsageError: a value outside its domain.
    """

    half_width: float = 0.01
    level: float = 0.95
    first_cycles: int = FIRST_CYCLES
    most_cycles: int = MOST_CYCLES

    def __post_init__(self) -> None:
        if not 0 < self.half_width < 1 or not 0 < self.level < 1 or min(self.first_cycles, self.most_cycles) < 1:
            raise UsageError("not a precision", observed=self, allowed="half-width and level in (0, 1), cycles >= 1")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run shows after its warm-up.

    Attributes:
        samples: cycles, or answered requests, that were looked at; those of the warm-up included.
        warmup: how many of them were left out.
        throughput_per_s: requests a second; for open arrivals without its own spread, see ``run_open``.
        response_s: mean time from a request's place in a batch (closed cycle) or its arrival to its answer.
        quantiles_s: of the same time.
        utilisation: of each station, over the whole run; None for a delay.
        queue: the mean number at each station, over the whole run.
        rejected_share: of the requests, refused or expired; None where none can be.
    """

    samples: int
    warmup: int
    throughput_per_s: Interval
    response_s: Interval
    quantiles_s: dict[float, Interval]
    utilisation: dict[str, float | None]
    queue: dict[str, float]
    rejected_share: Interval | None


def seeds(seed: int, replications: int) -> list[np.random.SeedSequence]:
    """Independent seeds for replications; the same number gives the same seeds."""
    return np.random.SeedSequence(seed).spawn(replications)


def run_closed(
    line: Line,
    flights: int,
    seed: np.random.SeedSequence,
    *,
    k: int = 1,
    precision: Precision | None = None,
    quantiles: Sequence[float] = QUANTILES,
    progress: Progress | None = None,
) -> RunResult:
    """M full batches of k requests in a closed cycle: throughput and cycle time.

    Raises:
        EvidenceError: the precision was not reached within its cycles; the hint says what is missing.
    """
    precision = precision or Precision()
    kernel, tally = Kernel(line, flights, seed), Tally()

    def more(cycles: int) -> None:
        for block in kernel.blocks(cycles):
            tally.add(block.cycle_s)

    _run_until(precision, tally, more, progress)
    cycle_s = tally.mean(precision.level)
    rate = flights * k
    throughput = Interval(rate / cycle_s.mean, rate / cycle_s.high, rate / cycle_s.low, precision.level)
    return _result(kernel, tally, throughput, precision, quantiles)


def run_open(
    line: Line,
    flights: int,
    rate_per_s: float,
    seed: np.random.SeedSequence,
    *,
    precision: Precision | None = None,
    quantiles: Sequence[float] = QUANTILES,
    progress: Progress | None = None,
) -> RunResult:
    """Poisson requests, one to a batch, with up to M in flight and a queue without limit.

    In a steady state throughput is the rate of arrivals; it is stated without spread.

    Raises:
        EvidenceError: the precision was not reached within its cycles, as when more arrives than can be served.
    """
    precision = precision or Precision()
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise UsageError("not a rate", observed=rate_per_s, allowed="> 0", where="arrival rate")
    kernel, tally = Kernel(line, flights, seed), Tally()
    arrivals = _arrivals(rate_per_s, np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, 1)))

    def more(cycles: int) -> None:
        for _ in range(-(-cycles // DRAW_BLOCK)):
            tally.add(kernel.advance(ready_s=next(arrivals)).response_s)

    _run_until(precision, tally, more, progress)
    return _result(kernel, tally, Interval(rate_per_s, rate_per_s, rate_per_s, precision.level), precision, quantiles)


def run_scenario(
    scenario: Scenario,
    seed: np.random.SeedSequence,
    *,
    flights: int,
    level: float = 0.95,
    quantiles: Sequence[float] = QUANTILES,
) -> RunResult:
    """A run of fixed length on the reference engine, for what the kernel does not model.

    Raises:
        EvidenceError: no steady state within the run.
    """
    outcome = simulate(scenario, seed, flights=flights)
    tally = Tally()
    tally.add(outcome.response_s)
    cut = tally.warmup_groups()
    answered_s = outcome.requests_s[:, 1]
    begin_s = float(answered_s[cut * tally.group_size])
    edges_s = np.linspace(begin_s, outcome.elapsed_s, BATCHES + 1)
    counts = np.histogram(answered_s, edges_s)[0]
    throughput = student_interval(counts * (BATCHES / (outcome.elapsed_s - begin_s)), level)
    lost = outcome.counts.refused + outcome.counts.expired
    can_lose = scenario.patience_s is not None or lost > 0
    # What is lost in a window is what arrives there less what is answered, up to the few that wait.
    offered = outcome.counts.arrived / outcome.elapsed_s
    rejected = Interval(
        lost / outcome.counts.arrived,
        max(0.0, lost / outcome.counts.arrived - throughput.half_width / offered),
        min(1.0, lost / outcome.counts.arrived + throughput.half_width / offered),
        level,
    )
    return RunResult(
        samples=tally.samples,
        warmup=cut * tally.group_size,
        throughput_per_s=throughput,
        response_s=tally.mean(level),
        quantiles_s={share: tally.quantile(share, level) for share in quantiles},
        utilisation=outcome.utilisation,
        queue=outcome.queue,
        rejected_share=rejected if can_lose else None,
    )


def throughput_curve(
    line: Line, flights: Sequence[int], seed: np.random.SeedSequence, *, cycles: int, warmup: int = 0
) -> Floats:
    """X(M) in batches a second for each M on the same random numbers, shape ``[len(flights)]``.

    A plain estimate of fixed length, made to sit inside a bootstrap: no interval, no test of the steady state.

    Args:
        cycles: counted for each M, beyond the ``warmup``; at least one.
    """
    rates = []
    for m in flights:
        kernel = Kernel(line, m, seed)
        delivered_s = np.concatenate([block.delivered_s for block in kernel.blocks(warmup + cycles + 1 + m)])
        rates.append(cycles / (delivered_s[warmup + cycles] - delivered_s[warmup]))
    return np.array(rates)


def _arrivals(rate_per_s: float, seed: np.random.SeedSequence) -> Iterator[Floats]:
    rng, last_s = np.random.Generator(np.random.SFC64(seed)), 0.0
    while True:
        block = last_s + np.cumsum(rng.exponential(1.0 / rate_per_s, DRAW_BLOCK))
        last_s = float(block[-1])
        yield block


def _run_until(precision: Precision, tally: Tally, more: Callable[[int], None], progress: Progress | None) -> None:
    """Goes on until the mean is known well enough, twice as long each time."""
    cycles = min(precision.first_cycles, precision.most_cycles)
    done = 0
    while True:
        more(cycles)
        done += cycles
        try:
            mean = tally.mean(precision.level)
            reached = mean.half_width / mean.mean / precision.half_width
            if reached <= 1.0:
                return
            missing = round(done * (reached**2 - 1.0))
            refusal = EvidenceError(
                "the interval is wider than asked for",
                observed=f"{mean.half_width / mean.mean:.2%} after {done} cycles",
                allowed=f"<= {precision.half_width:.2%}",
                hint=f"needs about {missing} cycles more",
            )
        except EvidenceError as error:
            refusal, missing = error, done
        if done >= precision.most_cycles:
            raise refusal
        if progress is not None:
            progress(done / (done + max(missing, done)))
        cycles = min(done, precision.most_cycles - done)


def _result(
    kernel: Kernel, tally: Tally, throughput: Interval, precision: Precision, quantiles: Sequence[float]
) -> RunResult:
    stations, level = kernel.line.stations, precision.level
    # By Little's law over the whole run: what the stations' times add up to, over the run's length.
    elapsed_s = kernel.now_s
    return RunResult(
        samples=tally.samples,
        warmup=tally.warmup_groups() * tally.group_size,
        throughput_per_s=throughput,
        response_s=tally.mean(level),
        quantiles_s={share: tally.quantile(share, level) for share in quantiles},
        utilisation={
            station.name: None if station.is_delay else float(busy / (station.capacity * elapsed_s))
            for station, busy in zip(stations, kernel.busy_work, strict=True)
        },
        queue={
            station.name: float(spent / elapsed_s) for station, spent in zip(stations, kernel.residence_s, strict=True)
        },
        rejected_share=None,
    )
