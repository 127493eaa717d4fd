"""What can be set, and what each setting promises: a cell for every calibrated k, every M, and where requests arrive at
a rate every formation deadline worth a look.

Rules here: no clock, no file, no measurement. Throughput is that of the best predictor at hand; latency is simulated by
what is lent, or bounded from below and then called a bound: a mean is never passed off as a P99. A partial batch is
taken to last as long as a full one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from scipy.special import gammaincinv

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.laws import Floats, Laws, laws_of
from b2gmodel.prediction import merging_server
from b2gmodel.predictors import Curves, Simulator, bulk_curves, mva_curves, simulation_curves
from b2gmodel.records import Calibration, CalibrationPoint

MOST_FLIGHTS: Final = 16
LEAST_HEADROOM: Final = 0.05
"""Of the rate: what can carry less than that more has no steady latency worth a promise."""
TIE: Final = 0.02
NEAR_BEST: Final = 0.05

_FLIGHTS: Final = tuple(range(1, MOST_FLIGHTS + 1))
_SATURATED: Final = 0.99
_MOSTLY_FULL: Final = 0.999
_SHORTLIST: Final = 6
_NEAR_BUDGET: Final = 1.25
_SIMULATED_ROWS: Final = 24
_ANALYTIC_ROWS: Final = 400


Outcome: TypeAlias = Literal["met", "not met", "unknown", "none given"]


class Latency(NamedTuple):
    """Of a request: from its arrival, or from its place in a batch in a closed cycle, to its answer; seconds."""

    mean_s: float
    p99_s: float


class LatencySimulator(Simulator, Protocol):
    """What the simulation lends to advice: throughput as to a prediction, and latency."""

    def latency(
        self,
        laws: Laws,
        row: int,
        flights: int,
        seed: int,
        *,
        rate_per_s: float | None = None,
        wait_s: float | None = None,
    ) -> Latency:
        """Latency with M flights of full batches in a closed cycle, or of Poisson requests at a rate.

        Args:
            laws: of one batch size.
            row: 0 for the estimate, else the number of a draw.
            rate_per_s: requests a second; None for as many callers as fill all flights.
            wait_s: the formation deadline; None waits for k.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A calibration, and for each of its k the simulation that knows its cycles; without one latency is bounded."""

    calibration: Calibration
    simulators: Mapping[int, LatencySimulator] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class System:
    """One calibrated batch size over one transport: its laws, and X(M) for M = 1 to ``MOST_FLIGHTS``."""

    calibration: Calibration
    point: CalibrationPoint
    laws: Laws
    curves: Curves
    simulator: LatencySimulator | None

    @property
    def k(self) -> int:
        return self.laws.batch

    @property
    def transport(self) -> str:
        return self.calibration.transport or "a transport that is not stated"

    def throughput_per_s(self, flights: int) -> Floats:
        """X(M) in requests a second, shape ``[1 + draws]``."""
        return np.asarray(self.curves.values[:, flights - 1])


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """One setting.

    Attributes:
        wait_s: the formation deadline; None with callers that fill all flights, or where k = 1.
        latency: simulated; None where no simulation is lent.
        least_mean_s: what the mean latency is in a closed cycle by Little's law, and at a rate at least: half a
            batch's formation and one cycle.
    """

    system: System
    flights: int
    wait_s: float | None
    latency: Latency | None
    least_mean_s: float

    @property
    def throughput_per_s(self) -> float:
        return float(self.system.throughput_per_s(self.flights)[0])

    @property
    def p99_or_least_s(self) -> float:
        """What orders cells by latency."""
        return self.least_mean_s if self.latency is None else self.latency.p99_s

    @property
    def size(self) -> tuple[int, int, float]:
        """What decides between cells that are as good: fewest batches in flight, smallest batches, quickest."""
        return self.flights, self.system.k, self.p99_or_least_s


def systems_of(sources: Sequence[Source], draws: int, seed: int) -> list[System]:
    """Every stated batch size of every calibration.

    Raises:
        UsageError: no calibration, or calibrations of several models.
        EvidenceError: no batch size is stated, or the times are not physical.
    """
    models = sorted({source.calibration.model.name for source in sources})
    if len(models) != 1:
        raise UsageError(
            "advice is for one model", observed=", ".join(models), where="CALIBRATION", hint="ask for each by itself"
        )
    found = []
    for number, source in enumerate(sources):
        of = source.calibration
        stated = [point for point in of.points if point.k is not None and point.service_s and point.cycle_s]
        if not stated:
            raise EvidenceError(
                "the calibration states no batch size with its times: there is nothing to choose from",
                where=of.name,
                hint="calibrate a ladder: -k 1,2,4,8; M* alone follows from what is stated: b2g predict",
            )
        for point in stated:
            rng = np.random.default_rng([seed, number, point.k or 0])
            laws = laws_of(of, point, draws, rng)
            simulator = source.simulators.get(laws.batch)
            found.append(System(of, point, laws, _curves(of, laws, simulator, seed), simulator))
    return found


def _curves(calibration: Calibration, laws: Laws, simulator: LatencySimulator | None, seed: int) -> Curves:
    server = merging_server(calibration, laws.batch)
    if server is not None:
        return bulk_curves(laws, server, _FLIGHTS)
    return mva_curves(laws, _FLIGHTS) if simulator is None else simulation_curves(laws, _FLIGHTS, simulator, seed)


def surface(systems: Sequence[System], rate_per_s: float | None, seed: int) -> list[Cell]:
    """All cells that are worth a look, and at a rate only those that carry it with some headroom.

    M ends one beyond where X has reached its peak: from there on more batches in flight wait elsewhere, and not less.
    """
    cells = []
    for system in systems:
        values = system.curves.values[0]
        last = min(MOST_FLIGHTS, int(np.argmax(values >= _SATURATED * values.max())) + 2)
        for flights in range(1, last + 1):
            if rate_per_s is None:
                cells.append(_cell(system, flights, None, None, seed))
            elif carries(system, flights, rate_per_s):
                waits = formation_waits_s(system.k, rate_per_s)
                cells += [_cell(system, flights, rate_per_s, wait_s, seed) for wait_s in waits]
    return cells


def carries(system: System, flights: int, rate_per_s: float) -> bool:
    """Whether X(M) lies above the rate by the least headroom, and above it at the low end of its interval."""
    values = system.throughput_per_s(flights)
    low = float(np.quantile(values[1:], 0.05)) if len(values) > 1 else float(values[0])
    return values[0] >= rate_per_s * (1 + LEAST_HEADROOM) and low > rate_per_s


def formation_waits_s(k: int, rate_per_s: float) -> list[float | None]:
    """Deadlines from "send what is there" to one by which 99.9 % of the batches are full (Erlang, k - 1 stages)."""
    if k == 1:
        return [None]
    gather_s = (k - 1) / rate_per_s
    return [0.0, gather_s / 4, gather_s / 2, gather_s, float(gammaincinv(k - 1, _MOSTLY_FULL)) / rate_per_s]


def _cell(system: System, flights: int, rate_per_s: float | None, wait_s: float | None, seed: int) -> Cell:
    laws = system.laws
    if rate_per_s is None:
        least_s = flights * system.k / float(system.throughput_per_s(flights)[0])
    else:
        gathered = (system.k - 1) / 2 / rate_per_s
        least_s = float(laws.cycle_s[0]) + (gathered if wait_s is None else min(gathered, wait_s / 2))
    latency = None
    if system.simulator is not None:
        latency = system.simulator.latency(laws, 0, flights, seed, rate_per_s=rate_per_s, wait_s=wait_s)
    return Cell(system, flights, wait_s, latency, least_s)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """The recommended cell.

    Attributes:
        cell: it.
        best: the best cell of all by the same aim; ``cell`` is the smallest that is about as good.
        outcome: of the budget; "unknown" where only a bound on latency is known.
        by_latency: whether the aim was the least P99 (or its bound), else the most throughput.
    """

    cell: Cell
    best: Cell
    outcome: Outcome
    by_latency: bool


def choose(cells: Sequence[Cell], budget_s: float | None, rate_per_s: float | None) -> Choice:
    """The most throughput within the budget; at a rate without a budget, the least P99; beyond the budget, too.

    Args:
        cells: at least one.
    """
    outcome: Outcome = "none given"
    allowed = list(cells)
    by_latency = rate_per_s is not None and budget_s is None
    if budget_s is not None:
        within = [cell for cell in cells if cell.latency is not None and cell.latency.p99_s <= budget_s]
        perhaps = [cell for cell in cells if cell.latency is None and cell.least_mean_s <= budget_s]
        if within:
            outcome, allowed = "met", within
        elif perhaps:
            outcome, allowed = "unknown", perhaps
        else:
            outcome = "not met"
        by_latency = outcome == "not met"
    if by_latency:
        best = min(allowed, key=lambda cell: cell.p99_or_least_s)
        as_good = [cell for cell in allowed if cell.p99_or_least_s <= best.p99_or_least_s * (1 + TIE)]
    else:
        best = max(allowed, key=lambda cell: cell.throughput_per_s)
        as_good = [cell for cell in allowed if cell.throughput_per_s >= best.throughput_per_s * (1 - TIE)]
    return Choice(min(as_good, key=lambda cell: cell.size), best, outcome, by_latency)


@dataclass(frozen=True, slots=True, eq=False)
class Certainty:
    """How the choice fares in draws of the calibration's uncertainty.

    Attributes:
        share: of the draws in which the chosen cell is within 5 % of the best (and within the budget); None without
            draws.
        draws: how many.
        p99_s: of the chosen cell in each, shape ``[draws]``; None where no simulation is lent.
    """

    share: float | None
    draws: int
    p99_s: Floats | None


def certainty(
    choice: Choice, cells: Sequence[Cell], budget_s: float | None, rate_per_s: float | None, seed: int
) -> Certainty:
    """The chosen cell against its nearest rivals, draw by draw."""
    rivals = _shortlist(choice, cells, budget_s)
    simulated = all(cell.latency is not None for cell in rivals)
    rows = min(len(cell.system.curves.values) for cell in rivals) - 1
    rows = min(rows, _SIMULATED_ROWS if simulated else _ANALYTIC_ROWS)
    if rows < 1:
        return Certainty(None, 0, None)
    x = np.array([cell.system.throughput_per_s(cell.flights)[1 : 1 + rows] for cell in rivals])
    if not simulated:
        # Latency has no draws: what is asked is whether throughput holds.
        holds = x[0] >= (1 - NEAR_BEST) * x.max(axis=0) if rate_per_s is None else x[0] >= rate_per_s
        return Certainty(float(holds.mean()), rows, None)
    p99_s = np.array([[_p99_s(cell, row, rate_per_s, seed) for row in range(1, 1 + rows)] for cell in rivals])
    if choice.by_latency:
        holds = p99_s[0] <= (1 + NEAR_BEST) * p99_s.min(axis=0)
    else:
        allowed = np.full_like(x, True, dtype=bool) if budget_s is None else p99_s <= budget_s
        holds = allowed[0] & (x[0] >= (1 - NEAR_BEST) * np.where(allowed, x, 0.0).max(axis=0))
    return Certainty(float(holds.mean()), rows, p99_s[0])


def _shortlist(choice: Choice, cells: Sequence[Cell], budget_s: float | None) -> list[Cell]:
    """The chosen cell, then the best of each system; those far beyond the budget are no rivals within it."""
    if choice.by_latency:
        ranked = sorted(cells, key=lambda cell: cell.p99_or_least_s)
    else:
        near_s = np.inf if budget_s is None else _NEAR_BUDGET * budget_s
        near = [cell for cell in cells if cell.p99_or_least_s <= near_s]
        ranked = sorted(near, key=lambda cell: (-cell.throughput_per_s, cell.p99_or_least_s))
    best: dict[int, Cell] = {}
    for cell in ranked:
        best.setdefault(id(cell.system), cell)
    return [choice.cell, *(cell for cell in best.values() if cell is not choice.cell)][: 1 + _SHORTLIST]


def _p99_s(cell: Cell, row: int, rate_per_s: float | None, seed: int) -> float:
    system = cell.system
    assert system.simulator is not None
    found = system.simulator.latency(system.laws, row, cell.flights, seed, rate_per_s=rate_per_s, wait_s=cell.wait_s)
    return found.p99_s
