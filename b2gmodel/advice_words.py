"""A recommendation in words: the answer, then why, then what has to be known before it is believed.

Rules here: words are made of what was found and decide nothing; an upper bound is called "at most", a bound on latency
"at least".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from b2gmodel.advice_settings import Confidence, Placed, counted
from b2gmodel.advice_surface import LEAST_HEADROOM, TIE, Certainty, Choice, Outcome, System
from b2gmodel.laws import Floats
from b2gmodel.placement import Placements
from b2gmodel.predictors import LEVEL
from b2gmodel.records import Binding, Estimate
from b2gmodel.units import format_duration

_HIGH: Final = 0.9
_MEDIUM: Final = 0.6
_AGREE: Final = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What the search found; fields as in ``advice.Advice``, and where they come from.

    Attributes:
        values: X of the setting, shape ``[1 + draws]``.
        others: X of other placements with as many clients; None where the calibration does not tell.
        disagreement: how far mva's X lies from the simulation's, as a share of it; None where only one was taken.
    """

    choice: Choice
    systems: tuple[System, ...]
    sure: Certainty
    outcome: Outcome
    placed: Placed
    k: int
    flights: int
    clients: int
    values: Floats
    is_bound: bool
    mean_s: float | None
    p99_s: float | None
    least_mean_s: float
    wait_s: float | None
    budget_s: float | None
    rate_per_s: float | None
    missed_s: float | None
    missed_per_s: float | None
    others: Placements | None
    binding: Binding
    disagreement: float | None

    @property
    def system(self) -> System:
        return self.choice.cell.system

    @property
    def confidence(self) -> Confidence:
        share = self.sure.share
        if share is None:
            return "not known"
        if share >= _HIGH and not self.is_disputed:
            return "high"
        return "medium" if share >= _MEDIUM else "low"

    @property
    def is_disputed(self) -> bool:
        """Whether X hangs on how much S and D vary: the draws say nothing of that."""
        return self.disagreement is not None and self.disagreement > _AGREE


def estimate(values: Floats) -> Estimate:
    """Row 0 with the interval of the others, which holds it."""
    mean = float(values[0])
    if len(values) < 2:
        return Estimate(mean=mean)
    low, high = np.quantile(values[1:], [0.5 - LEVEL / 2, 0.5 + LEVEL / 2]).tolist()
    return Estimate(mean=mean, low=min(low, mean), high=max(high, mean), level=LEVEL)


def headline(found: Found, x: Estimate, p99: Estimate | None) -> str:
    """The answer in one line."""
    emulated = " (emulated compute)" if found.system.calibration.model.compute == "emulated" else ""
    return _answer(found, x, p99) + emulated


def _answer(found: Found, x: Estimate, p99: Estimate | None) -> str:
    setting, carried = _setting(found), f"{'at most ' if found.is_bound else ''}{_rate(x)} request/s"
    if found.missed_per_s is not None:
        return (
            f"the rate cannot be carried with {LEAST_HEADROOM:.0%} to spare: {found.rate_per_s:.4g} request/s asked "
            f"for, {carried} at best, {found.missed_per_s:.3g} too few: {setting}"
        )
    latency = _latency(found, p99)
    if found.missed_s is not None and found.budget_s is not None:
        too_much = f"{format_duration(found.missed_s)} ({found.missed_s / found.budget_s:.0%}) too much"
        return (
            f"the budget cannot be met: p99 {format_duration(found.budget_s)} asked for, {latency} at best, {too_much}"
            f": {setting}"
        )
    if found.outcome == "unknown":
        return f"whether the budget is met is not known without the simulation: {setting}: {latency}, {carried}"
    if found.rate_per_s is None:
        return f"{setting}: expect {carried}, {latency}"
    return f"{setting}: at {found.rate_per_s:.4g} request/s expect {latency}; it can carry {carried}"


def _setting(found: Found) -> str:
    over = f"over {found.system.transport}"
    if found.placed == "C2":
        return f"batch in the server: up to {found.k} at once, {counted(found.flights, 'request')} in flight {over}"
    if found.placed == "C1":
        return f"do not batch: k = 1, M = {found.flights} {over}"
    waiting = ""
    if found.rate_per_s is not None and found.missed_per_s is None and found.wait_s is not None:
        waiting = f", waiting {_wait(found.wait_s)}"
    return f"batch in the proxy: k = {found.k}, M = {found.flights}{waiting} {over}"


def _wait(wait_s: float) -> str:
    return f"at most {format_duration(wait_s)}" if wait_s else "for nobody"


def _rate(x: Estimate) -> str:
    return f"{x.mean:.4g}" if x.low is None or x.high is None else f"{x.mean:.4g} [{x.low:.4g}, {x.high:.4g}]"


def _latency(found: Found, p99: Estimate | None) -> str:
    if p99 is None:
        exact = found.rate_per_s is None
        return f"mean latency {'' if exact else 'at least '}{format_duration(found.least_mean_s)}, p99 not known"
    text = f"p99 {format_duration(p99.mean)}"
    if p99.low is None or p99.high is None:
        return text
    return f"{text} [{format_duration(p99.low)}, {format_duration(p99.high)}]"


def reasons(found: Found, p99: Estimate | None) -> tuple[str, ...]:
    """Why this setting: k and M, the budget, the placement, the transport, and how sure that is."""
    lines = [_size_reason(found)]
    if found.budget_s is not None and p99 is not None and found.outcome == "met":
        lines.append(
            f"budget: p99 {format_duration(p99.mean)} of {format_duration(found.budget_s)}; "
            f"{format_duration(found.budget_s - p99.mean)} to spare"
        )
    if found.missed_s is not None:
        lines.append(_change(found))
    if found.rate_per_s is not None and found.missed_per_s is None:
        lines.append(f"headroom: it can carry {found.values[0] / found.rate_per_s - 1:.0%} more than the rate")
    lines += [_placement_reason(found), _transport_reason(found), _confidence_reason(found)]
    return tuple(lines)


def _size_reason(found: Found) -> str:
    best, cell = found.choice.best, found.choice.cell
    aim = "latency" if found.choice.by_latency else "throughput"
    if found.placed == "C2":
        return f"size: the server forms batches of what waits, up to the largest that was calibrated, {found.k}"
    is_within = found.outcome == "met" and found.budget_s is not None
    if best is cell:
        which = "that fit the budget" if is_within else "looked at"
        return f"size: k = {found.k}, M = {found.flights} has the best {aim} of all settings {which}"
    figure = format_duration(best.p99_or_least_s) if aim == "latency" else f"{best.throughput_per_s:.4g} request/s"
    at_best = f"{figure} at k = {best.system.k}, M = {best.flights} over {best.system.transport}"
    return (
        f"size: the smallest M, then the smallest k, within {TIE:.0%} of the best {aim}"
        f"{' within the budget' if is_within else ''} ({at_best}): more in flight would only wait longer"
    )


def _change(found: Found) -> str:
    """What the budget would need."""
    laws, budget_s = found.system.laws, found.budget_s or 0.0
    # Where a smaller k was looked at it was no better.
    is_smaller_open = 1 < found.k == min(system.k for system in found.systems)
    parts = {
        "transport": (float(laws.transport_s[0]), "shared memory, smaller payloads or a faster link"),
        "compute": (float(laws.service_s[0]), "a faster model" + (" or a smaller k" if is_smaller_open else "")),
    }
    if found.rate_per_s is not None:
        gathered_s = (found.k - 1) / 2 / found.rate_per_s
        waited_s = gathered_s if found.wait_s is None else min(gathered_s, found.wait_s / 2)
        remedy = "a smaller k" if is_smaller_open else "a faster model, so that a smaller k carries the rate,"
        parts["forming a batch"] = (waited_s, remedy)
    largest = max(parts, key=lambda name: parts[name][0])
    shares = ", ".join(f"{name} {format_duration(time_s)}" for name, (time_s, _) in parts.items())
    needed = 1 - budget_s / (budget_s + (found.missed_s or 0.0))
    return (
        f"to meet it: all of it would have to be {needed:.0%} shorter; of a lone batch's time ({shares}) most is "
        f"{largest}: {parts[largest][1]} would help first"
    )


def _placement_reason(found: Found) -> str:
    of, others = found.system.calibration, found.others
    if of.model.dynamic_batching:
        return "placement: the server merges batches as well, and that is part of the prediction"
    if others is None:
        return (
            "placement: no batching and the server's own batching cannot be compared: that needs S at several batch "
            "sizes, 1 among them: calibrate -k 1,2,4,8"
        )
    figures = (
        f"with {counted(found.clients, 'client')} no batching carries {_rate(estimate(others.c1))}, the server's own "
        f"batching {_rate(estimate(others.c2))} request/s"
    )
    if found.placed == "C2":
        carried = float(found.system.throughput_per_s(found.choice.cell.flights)[0])
        return f"placement: {figures}, batches of {found.system.k} in the proxy {carried:.4g}"
    beaten = others.c2[0] > found.values[0] * (1 + TIE)
    more = (
        "; the server's own batching carries more, but its latency is not predicted here: measure it" if beaten else ""
    )
    return f"placement: {figures}{more}"


def _transport_reason(found: Found) -> str:
    known = sorted({system.transport for system in found.systems})
    if len(known) == 1:
        return f"transport: {known[0]} is the only one that was calibrated; others are not compared"
    return f"transport: {found.system.transport} is the best of {', '.join(known)}"


def _confidence_reason(found: Found) -> str:
    if found.sure.share is None:
        return "confidence: not known, as the calibration states no uncertainty"
    if found.placed == "C2":
        what = "the server's own batching carries at least 95 % of what the proxy's does"
    elif found.p99_s is None and found.rate_per_s is not None:
        what = "it carries the rate"
    elif found.choice.by_latency:
        what = "its p99 is within 5 % of the best"
    else:
        what = "this setting carries within 5 % of the best"
    disputed = ""
    if found.is_disputed:
        disputed = (
            f"; never high here, as mva and simulation differ by {found.disagreement:.0%} in throughput: it hangs on "
            "how much S and D vary, so measure it"
        )
    budget = " and the budget is met" if found.outcome == "met" and found.budget_s is not None else ""
    return (
        f"confidence: {found.confidence}: in {found.sure.share:.0%} of {found.sure.draws} draws of the calibration's "
        f"uncertainty {what}{budget}{disputed}"
    )


def deadline_reason(found: Found) -> str:
    """Why a partial batch goes when it does."""
    if found.wait_s is None:
        return ""
    if found.rate_per_s is None or found.missed_per_s is not None:
        return "a partial batch goes after one mean cycle: callers who fill all flights never wait for it"
    if not found.wait_s:
        return "whatever waits goes as soon as a flight is free"
    return f"a partial batch goes after {format_duration(found.wait_s)}, the best of those tried at this rate"


def notes(found: Found) -> tuple[str, ...]:
    """What has to be known before any figure is believed."""
    laws = found.system.laws
    lines = [
        "scope: from a request's arrival in the proxy to its answer; what the clients' own way to it adds is extra"
    ]
    if found.rate_per_s is None:
        lines.append(
            f"load: {counted(found.clients, 'caller')}, as many as fill all flights, each asking again as soon as it "
            "is answered; --rate states another"
        )
    else:
        full = ", and a partial batch to last as long as a full one" if found.k > 1 else ""
        lines.append(f"load: requests are taken to arrive by chance (Poisson){full}")
    largest, takes = max(system.k for system in found.systems), found.system.calibration.model.max_batch_size
    if found.k == largest and takes is not None and takes > largest:
        lines.append(
            f"k = {largest} is the largest that was calibrated, and the model takes {takes}: larger ones may be better"
        )
    if laws.transport_rates_per_s is None:
        lines.append(
            "no transport law was measured: transport is taken for a pure delay, and throughput is an upper bound: "
            "calibrate with --null-model"
        )
    if not laws.is_compute_law_measured:
        lines.append(f"S with {laws.instances} instances busy was not measured: throughput is an upper bound")
    if found.missed_per_s is not None:
        lines.append("where more comes than can be carried the queue grows without end: no latency is stated")
    elif found.p99_s is None:
        lines.append("the p99 was not simulated for this setting; the latency stated is no p99")
    if found.system.calibration.model.compute == "emulated":
        lines.append("the compute was emulated")
    return tuple(lines)
