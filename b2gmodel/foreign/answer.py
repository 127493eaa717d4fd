"""A sweep's answer: M*, what it gives over one in flight, and where the sweep's own rows stand to it.

Rules here: where the closed form does not apply, no M* is given; a throughput is measured or promised, and says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from b2gmodel.closed_form import ClosedForm, mstar
from b2gmodel.foreign.findings import Finding
from b2gmodel.foreign.rows import Row, Sweep
from b2gmodel.units import format_duration

NEAR_PEAK: Final = 0.05
"""M* holds where it loses at most this share of the measured peak."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a sweep says.

    Attributes:
        m_star: None where the closed form does not apply.
        sentence: the answer.
        facts: a line each, with what was observed and its bound.
        alone_per_s, peak_per_s, peak_flights: measured, requests a second.
        promised_per_s: the closed form at M*, an upper bound; None without M*.
        at_m_star_per_s: measured there; None where it was not.
        gain: throughput at M* over that of one in flight, - 1: measured, or promised where it was not measured; of the
            measured peak where there is no M*.
        is_gain_measured: which of the two.
        regret: share of the measured peak that M* loses; None where it was not measured.
    """

    m_star: int | None
    sentence: str
    facts: tuple[str, ...]
    alone_per_s: float
    peak_per_s: float
    peak_flights: int
    promised_per_s: float | None
    at_m_star_per_s: float | None
    gain: float
    is_gain_measured: bool
    regret: float | None


def answer_of(sweep: Sweep, findings: Sequence[Finding]) -> Answer:
    """The answer of a sweep that carries C and S at concurrency 1, with its batch size."""
    alone = sweep.alone
    assert alone is not None
    assert alone.latency_s is not None
    assert alone.service_s is not None
    assert sweep.batch_size is not None
    closed = mstar(alone.service_s, alone.latency_s - alone.service_s, sweep.instances or 1)
    blocked = next((each for each in findings if each.blocks), None)
    m_star = None if blocked else closed.m_star
    row = None if m_star is None else sweep.at(m_star)
    peak, alone_per_s = sweep.peak, alone.throughput_per_s
    promised_per_s = closed.gain * sweep.batch_size / closed.cycle_s
    reached = peak if m_star is None else row
    gain = (reached.throughput_per_s / alone_per_s if reached is not None else closed.gain) - 1
    regret = None if row is None else 1 - row.throughput_per_s / peak.throughput_per_s
    return Answer(
        m_star=m_star,
        sentence=_without(blocked, peak, gain) if blocked else _with(sweep, closed, row, gain),
        facts=(*_cycle(closed, sweep), *_curve(sweep, None if blocked else closed, row, promised_per_s)),
        alone_per_s=alone_per_s,
        peak_per_s=peak.throughput_per_s,
        peak_flights=peak.concurrency,
        promised_per_s=None if blocked else promised_per_s,
        at_m_star_per_s=None if row is None else row.throughput_per_s,
        gain=gain,
        is_gain_measured=reached is not None,
        regret=regret,
    )


def _without(blocked: Finding, peak: Row, gain: float) -> str:
    return (
        f"no M*: {blocked.sentence}; measured, {peak.concurrency} in flight are best with "
        f"{peak.throughput_per_s:.1f} request/s, {gain:+.1%} over one"
    )


def _with(sweep: Sweep, closed: ClosedForm, row: Row | None, gain: float) -> str:
    assert sweep.alone is not None
    batches = f"{'batch' if closed.m_star == 1 else 'batches'} of {sweep.batch_size}"
    if closed.gain - 1 < NEAR_PEAK:
        limit_per_s = closed.saturation_rate_per_s * (sweep.batch_size or 1)
        alone_per_s = sweep.alone.throughput_per_s
        return (
            f"M* = {closed.m_star}, and next to nothing is on the table: one batch of {sweep.batch_size} in flight has "
            f"{alone_per_s / limit_per_s:.1%} of what compute allows, {alone_per_s:.1f} of {limit_per_s:.1f} request/s"
        )
    keep = f"M* = {closed.m_star}: keep {closed.m_star} {batches} in flight"
    if row is None:
        return f"{keep}, which promises {gain:+.1%} at most over one; it was not measured"
    return f"{keep}, {row.throughput_per_s:.1f} request/s measured, {gain:+.1%} over one"


def _cycle(closed: ClosedForm, sweep: Sweep) -> tuple[str, ...]:
    stated = f"g = {sweep.instances}" if sweep.instances else "g = 1 assumed"
    return (
        f"one in flight: C = {format_duration(closed.cycle_s)}, S = {format_duration(closed.service_s)}, "
        f"D = {format_duration(closed.transport_s)} ({closed.transport_share:.1%} of C), k = {sweep.batch_size}, "
        f"{stated}",
    )


def _curve(sweep: Sweep, closed: ClosedForm | None, row: Row | None, promised_per_s: float) -> tuple[str, ...]:
    """Where the rows stand: the bound, the peak, the smallest M near it, and the most that were kept in flight."""
    peak, last = sweep.peak, sweep.rows[-1]
    lines = []
    if closed is not None:
        lines.append(
            f"promised at M*: at most {promised_per_s:.1f} request/s; what compute allows: "
            f"{closed.saturation_rate_per_s * (sweep.batch_size or 1):.1f}"
        )
    if len(sweep.rows) == 1:
        return (*lines, "no other concurrency was measured: nothing shows whether the promise is kept")
    least = next(each for each in sweep.rows if each.throughput_per_s >= (1 - NEAR_PEAK) * peak.throughput_per_s)
    lines.append(
        f"measured peak: {peak.throughput_per_s:.1f} request/s at M = {peak.concurrency}; "
        f"the first M near it: {least.concurrency}; bound {NEAR_PEAK:.0%}"
    )
    if row is not None:
        lost = 1 - row.throughput_per_s / peak.throughput_per_s
        lines.append(
            f"M* against the peak: {lost:.1%} less; bound {NEAR_PEAK:.0%}{'' if lost <= NEAR_PEAK else ': missed'}"
        )
        if last.concurrency > row.concurrency and last.latency_s and row.latency_s:
            more = last.throughput_per_s / row.throughput_per_s - 1
            lines.append(
                f"beyond M*: {last.concurrency} in flight give {more:+.1%}, "
                f"and each takes {format_duration(last.latency_s)}, {last.latency_s / row.latency_s:.1f} times as long"
            )
    return tuple(lines)
