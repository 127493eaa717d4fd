"""Runs with error bars: seeds, warm-up, when to stop, and when not to answer.

Rules here: every number comes with an interval or not at all. A run goes on, twice as long each time, until its
mean is known to the half-width asked for; where its length is limited and that was not reached, or where no steady
state was, it raises and says how much more it needs. Equal seeds mean equal work for equal flight numbers, so that
runs which differ in M or in one leg are compared on common random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.kernel import Kernel
from b2gmodel.sim.lanes import delivery_instants
from b2gmodel.sim.reference import Run
from b2gmodel.sim.scenario import Closed, Recorded, Scenario
from b2gmodel.sim.stations import DRAW_BLOCK, Draws, Line
from b2gmodel.sim.tally import BATCHES, Tally, Totals, ratio_interval, share_interval
from b2gmodel.stats import Interval

QUANTILES: Final = (0.5, 0.95, 0.99)
FIRST_CYCLES: Final = 1 << 15
MOST_CYCLES: Final = 1 << 27
FIRST_FLIGHTS: Final = 1 << 14
MOST_FLIGHTS: Final = 1 << 20
# Totals are noted this often in the first stretch, and then each time the run has grown by this part.
_NOTES: Final = 4 * BATCHES

Progress = Callable[[str, float], None]
"""Told how far the run goes for now, and the share that is done of what it may take."""


@dataclass(frozen=True, slots=True)
class Precision:
    """When a run may stop.

    Attributes:
        half_width: of the mean response, relative to it.
        level: of all intervals.
        first_cycles: run before the first look at the precision; None for the engine's own, ``FIRST_CYCLES`` of the
            kernel or ``FIRST_FLIGHTS`` of the reference, which is some hundred times slower.
        most_cycles: the run's limit; None for ``MOST_CYCLES`` or ``MOST_FLIGHTS``.

    Raises:
        UsageError: a value outside its domain.
    """

    half_width: float = 0.01
    level: float = 0.95
    first_cycles: int | None = None
    most_cycles: int | None = None

    def __post_init__(self) -> None:
        cycles = [each for each in (self.first_cycles, self.most_cycles) if each is not None]
        if not 0 < self.half_width < 1 or not 0 < self.level < 1 or min(cycles, default=1) < 1:
            raise UsageError("not a precision", observed=self, allowed="half-width and level in (0, 1), cycles >= 1")


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run shows after its warm-up: batch means, all over the same batches.

    Attributes:
        samples: cycles, or answered requests, that were looked at; those of the warm-up included.
        warmup: how many of them were left out.
        throughput_per_s: requests a second; for open arrivals without its own spread, see ``run_open``.
        response_s: mean time from a request's place in a batch (closed cycle) or its arrival to its answer.
        quantiles_s: of the same time.
        utilisation: of each station, the share of its greatest speed in use; None for a delay.
        queue: the mean number at each station, waiting or in service.
        rejected_share: of the requests, refused or expired; None where none can be.
    """

    samples: int
    warmup: int
    throughput_per_s: Interval
    response_s: Interval
    quantiles_s: dict[float, Interval]
    utilisation: dict[str, Interval | None]
    queue: dict[str, Interval]
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
    kernel, tally, totals = Kernel(line, flights, seed), Tally(), Totals()

    def more(cycles: int) -> None:
        for block in kernel.blocks(cycles):
            tally.add(block.cycle_s)
        totals.note(tally.samples, kernel.now_s, kernel.busy_work, kernel.residence_s)

    _run_until(precision, (FIRST_CYCLES, MOST_CYCLES), tally, quantiles, more, progress)
    cycle_s = tally.mean(precision.level)
    rate = flights * k
    throughput = Interval(rate / cycle_s.mean, rate / cycle_s.high, rate / cycle_s.low, precision.level)
    return _result(tally, totals, _capacity(line), precision.level, quantiles, throughput)


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
    kernel, tally, totals, work = Kernel(line, flights, seed), Tally(), Totals(), Draws(line.times, seed)
    rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, 1))))
    last_s = 0.0

    def more(cycles: int) -> None:
        nonlocal last_s
        for begin in range(0, cycles, DRAW_BLOCK):
            count = min(DRAW_BLOCK, cycles - begin)
            arrivals_s = last_s + np.cumsum(rng.exponential(1.0 / rate_per_s, count))
            last_s = float(arrivals_s[-1])
            tally.add(kernel.advance(work.block(count)[:count], arrivals_s).response_s)
        totals.note(tally.samples, kernel.now_s, kernel.busy_work, kernel.residence_s)

    _run_until(precision, (FIRST_CYCLES, MOST_CYCLES), tally, quantiles, more, progress)
    throughput = Interval(rate_per_s, rate_per_s, rate_per_s, precision.level)
    return _result(tally, totals, _capacity(line), precision.level, quantiles, throughput)


def run_scenario(
    scenario: Scenario,
    seed: np.random.SeedSequence,
    *,
    precision: Precision | None = None,
    quantiles: Sequence[float] = QUANTILES,
    progress: Progress | None = None,
) -> RunResult:
    """A run on the reference engine, for what the kernel does not model.

    Recorded arrivals are run to their end, whatever the precision then is.

    Raises:
        EvidenceError: the precision was not reached within its flights, or recorded arrivals show no steady state.
    """
    precision = precision or Precision()
    run, tally, totals = Run(scenario, seed), Tally(), Totals()

    def more(flights: int) -> None:
        outcome = run.advance(flights)
        counts = outcome.counts
        tally.add(outcome.response_s)
        requests = np.array([counts.answered, counts.arrived, counts.refused + counts.expired])
        totals.note(tally.samples, outcome.elapsed_s, outcome.busy_work, outcome.residence_s, requests)

    clients, policy = scenario.clients, scenario.policy
    if isinstance(clients, Recorded):
        every = -(-len(clients.arrivals_s) // (policy.batch_size * _NOTES))
        while not run.is_over:
            more(every)
            if progress is not None:
                progress("recorded arrivals", run.arrived / len(clients.arrivals_s))
    else:
        _run_until(precision, (FIRST_FLIGHTS, MOST_FLIGHTS), tally, quantiles, more, progress)
    grown = totals.growth(tally.warmup_samples())
    elapsed_s, (answered, arrived, lost) = grown[:, 0], grown[:, -3:].T
    can_lose = scenario.patience_s is not None or not (
        isinstance(clients, Closed) and clients.clients <= policy.queue_limit
    )
    return _result(
        tally,
        totals,
        run.capacity,
        precision.level,
        quantiles,
        ratio_interval(answered, elapsed_s, precision.level),
        share_interval(lost, arrived, precision.level) if can_lose else None,
    )


def throughput_curve(
    line: Line, flights: Sequence[int], seed: np.random.SeedSequence, *, cycles: int, warmup: int = 0
) -> Floats:
    """X(M) in batches a second for each M on the same random numbers, shape ``[len(flights)]``.

    A plain estimate of fixed length, made to sit inside a bootstrap: no interval, no test of the steady state.

    Args:
        cycles: counted for each M, beyond the ``warmup``; at least one.
    """
    begin_s, end_s = delivery_instants(line, flights, seed, (warmup, warmup + cycles))
    rates_per_s: Floats = cycles / (end_s - begin_s)
    return rates_per_s


def _run_until(
    precision: Precision,
    own: tuple[int, int],
    tally: Tally,
    quantiles: Sequence[float],
    more: Callable[[int], None],
    progress: Progress | None,
) -> None:
    """Goes on until the mean is known well enough and the quantiles at all, twice as long each time.

    Args:
        own: the engine's own first look and limit.
        more: runs so many cycles more and notes the totals.
    """
    first, most = precision.first_cycles or own[0], precision.most_cycles or own[1]
    done, target = 0, min(first, most)
    expected = min(2 * first, most)
    while True:
        while done < target:
            # Even, as two cycles may share a random number.
            cycles = min(max(2, max(first, done) // (2 * _NOTES) * 2), target - done)
            more(cycles)
            done += cycles
            if progress is not None:
                progress(f"to {target} cycles", done / expected)
        try:
            mean = tally.mean(precision.level)
            reached = mean.half_width / mean.mean / precision.half_width
            if reached <= 1.0:
                for share in quantiles:
                    tally.quantile(share, precision.level)
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
        if done >= most:
            raise refusal
        target = min(2 * done, most)
        # It looks again only where it is twice as long.
        expected = min(most, done << math.ceil(math.log2(max(2.0, (done + missing) / done))))


def _capacity(line: Line) -> dict[str, float]:
    return {station.name: station.capacity for station in line.stations}


def _result(
    tally: Tally,
    totals: Totals,
    capacity: Mapping[str, float],
    level: float,
    quantiles: Sequence[float],
    throughput: Interval,
    rejected: Interval | None = None,
) -> RunResult:
    """Utilisation is work over time; the mean number at a station, by Little's law, the time spent there over time."""
    warmup, stations = tally.warmup_samples(), len(capacity)
    elapsed_s, *grown = totals.growth(warmup).T
    busy, residence_s = grown[:stations], grown[stations : 2 * stations]
    return RunResult(
        samples=tally.samples,
        warmup=warmup,
        throughput_per_s=throughput,
        response_s=tally.mean(level),
        quantiles_s={share: tally.quantile(share, level) for share in quantiles},
        utilisation={
            name: None if math.isinf(speed) else ratio_interval(work / speed, elapsed_s, level, 1.0)
            for (name, speed), work in zip(capacity.items(), busy, strict=True)
        },
        queue={
            name: ratio_interval(spent_s, elapsed_s, level) for name, spent_s in zip(capacity, residence_s, strict=True)
        },
        rejected_share=rejected,
    )
