"""Calibrations -> Advice: where to batch, k, M and transport, what to expect of them, and what to paste.

Rules here: no clock, no file, no measurement; simulation is lent. A budget that cannot be met is said to be so, and by
how much. Where only a bound on latency is known, whether a budget is met is not known either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Final, Literal

import numpy as np
from pydantic import Field

from b2gmodel.advice_settings import Confidence, Placed, Setting, Wanted, settings
from b2gmodel.advice_surface import (
    LEAST_HEADROOM,
    NEAR_BEST,
    TIE,
    Cell,
    Certainty,
    Choice,
    Outcome,
    Source,
    System,
    certainty,
    choose,
    surface,
    systems_of,
)
from b2gmodel.advice_words import Found, deadline_reason, estimate, headline, notes, reasons
from b2gmodel.errors import UsageError
from b2gmodel.placement import PlacementLaws, placement_laws, placements
from b2gmodel.prediction import binding_of, merging_server
from b2gmodel.predictors import bulk_compute_limit_per_s, mva_curves
from b2gmodel.records import (
    Binding,
    Count,
    Digest,
    Estimate,
    Finite,
    ModelInfo,
    Name,
    Positive,
    Record,
    Text,
    digest_of,
)

_PLACEMENT_DRAWS: Final = 40

Whole = Annotated[int, Field(ge=1)]


class SurfacePoint(Record):
    """One setting that was looked at. ``p99_s`` and ``mean_s`` are simulated; None where no simulation was lent."""

    transport: Text | None
    k: Whole
    flights: Whole
    formation_deadline_s: Annotated[float, Field(ge=0)] | None
    throughput_per_s: Positive
    mean_s: Positive | None
    p99_s: Positive | None


class Advice(Record):
    """A recommendation. Not frozen: to be held to it, predict and measure.

    ``outcome`` is that of the budget and the rate: met, not met, unknown (only a bound on latency is known), or none
    given. ``throughput`` is what the setting can carry, an upper bound where ``is_bound``. ``p99`` is None where no
    simulation was lent; ``least_mean_s`` then bounds the mean from below. ``missed_s`` is what the budget is missed by,
    ``missed_per_s`` what the rate is. ``confidence_share`` is that of the draws in which the setting is within 5 % of
    the best, and within the budget where that is met.
    """

    record: Literal["b2g.advice"] = "b2g.advice"
    version: Literal[1] = 1
    sentence: Text
    outcome: Outcome
    calibration_names: tuple[Name, ...]
    calibration_name: Name
    calibration_digest: Digest
    model: ModelInfo
    transport: Text | None
    budget_p99_s: Positive | None
    rate_per_s: Positive | None
    placement: Placed
    k: Whole
    flights: Whole
    clients: Whole
    formation_deadline_s: Annotated[float, Field(ge=0)] | None
    throughput: Estimate
    is_bound: bool
    mean_s: Positive | None
    p99: Estimate | None
    least_mean_s: Positive
    headroom: Finite | None
    missed_s: Positive | None
    missed_per_s: Positive | None
    confidence: Confidence
    confidence_share: Finite | None
    draws: Count
    binding: Binding
    c1_per_s: Estimate | None
    c2_per_s: Estimate | None
    reasons: tuple[Text, ...]
    settings: tuple[Setting, ...]
    surface: tuple[SurfacePoint, ...]
    notes: tuple[Text, ...] = ()


def advise(
    sources: Sequence[Source],
    *,
    p99_s: float | None = None,
    rate_per_s: float | None = None,
    seed: int = 1,
    draws: int = 400,
) -> Advice:
    """Recommend a setting for one model.

    Args:
        sources: its calibrations, one or several (transports, batch sizes).
        p99_s: a request's budget; None for none.
        rate_per_s: Poisson requests a second; None for k M callers who ask again as soon as they are answered.
        seed, draws: of the calibration's uncertainty.

    Raises:
        UsageError: no calibration, several models, or a budget or a rate that is not positive.
        EvidenceError: a calibration states no batch size with its times, or unphysical ones.
    """
    for value, where in ((p99_s, "--p99"), (rate_per_s, "--rate")):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError("not a budget or a rate", observed=value, allowed="> 0, finite", where=where)
    systems = systems_of(sources, draws, seed)
    cells = surface(systems, rate_per_s, seed)
    if cells:
        choice = choose(cells, p99_s, rate_per_s)
        found = _found(choice, certainty(choice, cells, p99_s, rate_per_s, seed), systems, p99_s, rate_per_s)
    else:
        # Nothing carries the rate: what comes closest is told as if callers filled it.
        cells = surface(systems, None, seed)
        choice = choose(cells, None, None)
        found = _found(choice, certainty(choice, cells, None, None, seed), systems, p99_s, rate_per_s)
        short_per_s = _short_per_s(found, rate_per_s or 0.0)
        found = replace(found, outcome="not met", missed_per_s=short_per_s, mean_s=None, p99_s=None)
    found = _compared(found, seed)
    return _advice(found, cells, sources)


def _found(
    choice: Choice, sure: Certainty, systems: Sequence[System], budget_s: float | None, rate_per_s: float | None
) -> Found:
    cell, system = choice.cell, choice.cell.system
    p99_s = None if cell.latency is None else cell.latency.p99_s
    missed_s = p99_s or cell.least_mean_s
    is_missed = budget_s is not None and choice.outcome == "not met"
    outcome: Outcome = "met" if rate_per_s is not None and budget_s is None else choice.outcome
    placed: Placed = "C1" if system.k == 1 else "C3" if cell.flights == 1 else "C4"
    return Found(
        choice=choice,
        systems=tuple(systems),
        sure=sure,
        outcome=outcome,
        placed=placed,
        k=system.k,
        flights=cell.flights,
        clients=cell.flights * system.k,
        values=system.throughput_per_s(cell.flights),
        is_bound=system.curves.kind == "upper bound",
        mean_s=None if cell.latency is None else cell.latency.mean_s,
        p99_s=p99_s,
        least_mean_s=cell.least_mean_s,
        wait_s=_deadline_s(cell, rate_per_s),
        budget_s=budget_s,
        rate_per_s=rate_per_s,
        missed_s=missed_s - budget_s if is_missed and budget_s is not None else None,
        missed_per_s=None,
        others=None,
        binding=_binding(system),
        disagreement=_disagreement(cell),
    )


def _disagreement(cell: Cell) -> float | None:
    """How far mva's X lies from the simulation's, as a share of it; None where that is not what was taken."""
    if cell.system.simulator is None:
        return None
    simulated, by_mva = cell.throughput_per_s, mva_curves(cell.system.laws, [cell.flights]).values[0, 0]
    return abs(float(by_mva) - simulated) / simulated


def _binding(system: System) -> Binding:
    server = merging_server(system.calibration, system.k)
    return binding_of(system.laws, None if server is None else bulk_compute_limit_per_s(system.laws, server))


def _deadline_s(cell: Cell, rate_per_s: float | None) -> float | None:
    """At a rate the cell's own; else one mean cycle: callers who fill all flights never wait for it."""
    if cell.system.k == 1:
        return None
    return cell.wait_s if cell.wait_s is not None else cell.least_mean_s


def _short_per_s(found: Found, rate_per_s: float) -> float:
    """What the setting would have to carry more: the least headroom, and the rate at the low end of its interval."""
    x = estimate(found.values)
    return max(rate_per_s * (1 + LEAST_HEADROOM) - x.mean, rate_per_s - (x.mean if x.low is None else x.low))


def _placement_laws(system: System, seed: int) -> PlacementLaws | None:
    """Of the same model without batching and with the server's own; None without a ladder of k that starts at 1.

    The server merges up to the largest batch that was calibrated.
    """
    of = system.calibration
    sizes = [point.k for point in of.points if point.k is not None and point.service_s and point.cycle_s]
    if of.model.dynamic_batching or 1 not in sizes or len(sizes) < 2:
        return None
    return placement_laws(of, system.k, draws=_PLACEMENT_DRAWS, seed=seed, max_batch=max(sizes))


def _compared(found: Found, seed: int) -> Found:
    """With the other placements beside it; the server's own takes its place where it carries more and nothing speaks of
    latency, which is not predicted for it.
    """
    laws = _placement_laws(found.system, seed)
    if laws is None:
        return found
    others = placements(laws, found.clients)
    found = replace(found, others=others)
    if found.outcome != "none given" or others.c2[0] <= found.values[0] * (1 + TIE):
        return found
    rows = min(len(others.c2), len(found.values))
    holds = others.c2[1:rows] >= (1 - NEAR_BEST) * found.values[1:rows]
    return replace(
        found,
        placed="C2",
        k=laws.server.max_batch,
        flights=found.clients,
        sure=Certainty(float(holds.mean()) if rows > 1 else None, rows - 1, None),
        values=others.c2,
        mean_s=None,
        p99_s=None,
        least_mean_s=found.clients / float(others.c2[0]),
        wait_s=None,
        binding=binding_of(laws.single, bulk_compute_limit_per_s(laws.single, laws.server)),
        disagreement=None,
    )


def _advice(found: Found, cells: Sequence[Cell], sources: Sequence[Source]) -> Advice:
    of, p99, x = found.system.calibration, None, estimate(found.values)
    if found.p99_s is not None:
        p99 = estimate(np.append(found.p99_s, [] if found.sure.p99_s is None else found.sure.p99_s))
    headroom = None if found.rate_per_s is None else x.mean / found.rate_per_s - 1
    wanted = Wanted(of, found.placed, found.k, found.flights, found.wait_s, deadline_reason(found), found.confidence)
    return Advice(
        sentence=headline(found, x, p99),
        outcome=found.outcome,
        calibration_names=tuple(source.calibration.name for source in sources),
        calibration_name=of.name,
        calibration_digest=digest_of(of),
        model=of.model,
        transport=of.transport,
        budget_p99_s=found.budget_s,
        rate_per_s=found.rate_per_s,
        placement=found.placed,
        k=found.k,
        flights=found.flights,
        clients=found.clients,
        formation_deadline_s=found.wait_s,
        throughput=x,
        is_bound=found.is_bound,
        mean_s=found.mean_s,
        p99=p99,
        least_mean_s=found.least_mean_s,
        headroom=headroom,
        missed_s=found.missed_s,
        missed_per_s=found.missed_per_s,
        confidence=found.confidence,
        confidence_share=found.sure.share,
        draws=found.sure.draws,
        binding=found.binding,
        c1_per_s=None if found.others is None else estimate(found.others.c1),
        c2_per_s=None if found.others is None else estimate(found.others.c2),
        reasons=reasons(found, p99),
        settings=settings(wanted),
        surface=tuple(_surface_point(cell) for cell in cells),
        notes=notes(found),
    )


def _surface_point(cell: Cell) -> SurfacePoint:
    return SurfacePoint(
        transport=cell.system.calibration.transport,
        k=cell.system.k,
        flights=cell.flights,
        formation_deadline_s=cell.wait_s,
        throughput_per_s=cell.throughput_per_s,
        mean_s=None if cell.latency is None else cell.latency.mean_s,
        p99_s=None if cell.latency is None else cell.latency.p99_s,
    )
