"""Whether what was read can carry an answer: what is missing is said before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from b2gmodel.errors import EvidenceError
from b2gmodel.foreign.model_analyzer import fields_for_times
from b2gmodel.foreign.rows import Kind, Sweep

LEAST_IN_FLIGHT: Final = 0.5
MOST_IN_FLIGHT: Final = 1.1
"""X C / k at concurrency 1: the share of time in which the one request is in flight, with room for rounded tables."""


def must_carry(sweeps: Sequence[Sweep]) -> None:
    """Raises ``EvidenceError`` where the files together do not state S and C at concurrency 1, or it was not stable."""
    where = " with ".join(each.where for each in sweeps)
    kinds = [kind for each in sweeps for kind in each.kinds]
    more = (
        f"add inference_output_fields: {fields_for_times()}"
        if Kind.TABLE in kinds
        else "give the log of the same run beside it, of a server with Triton's statistics"
    )
    if any(1 in each.unstable for each in sweeps):
        raise EvidenceError(
            "concurrency 1 did not stabilise: S and C are those of no steady state",
            where=where,
            hint="run perf_analyzer with a longer --measurement-interval",
        )
    alone = [row for each in sweeps if (row := each.alone) is not None]
    if not alone:
        raise EvidenceError(
            "no row at concurrency 1: nothing shows S and D apart",
            observed=", ".join(str(row.concurrency) for each in sweeps for row in each.rows[:8]),
            allowed="1 among them",
            where=where,
            hint="run perf_analyzer with --concurrency-range 1:8",
        )
    services = [row.service_s for row in alone if row.service_s is not None]
    if not services:
        raise EvidenceError(
            "no compute times, so that S is not known",
            observed=", ".join(kind.value for kind in kinds),
            allowed="compute input, infer and output at concurrency 1",
            where=where,
            hint=more,
        )
    if 0.0 in services:
        raise EvidenceError(
            "the server's compute times are 0: it kept no statistics, or they were rounded away",
            observed="S = 0",
            allowed="> 0",
            where=where,
            hint="S needs a server with Triton's statistics",
        )
    if not any(row.latency_s for row in alone):
        raise EvidenceError(
            "no mean latency at concurrency 1, so that C is not known",
            observed="a network column that is cut off at 0" if any(row.is_clamped for row in alone) else None,
            allowed="a mean latency, or parts that add up to it",
            where=where,
            hint=more if Kind.TABLE in kinds else f"{more}, or run with --verbose-csv and without --percentile",
        )


def usable(sweep: Sweep) -> Sweep:
    """The sweep, in inferences, without its unstable rows. Raises ``EvidenceError`` where it contradicts itself."""
    alone = sweep.alone
    assert alone is not None
    assert alone.latency_s is not None
    in_flight = alone.throughput_per_s * alone.latency_s / (sweep.batch_size or 1)
    if not LEAST_IN_FLIGHT <= in_flight <= MOST_IN_FLIGHT:
        raise EvidenceError(
            "the row at concurrency 1 contradicts itself: X C / k requests are in flight",
            observed=f"{in_flight:.3g} with k = {sweep.batch_size}",
            allowed=f"{LEAST_IN_FLIGHT:g} to {MOST_IN_FLIGHT:g}",
            where=sweep.where,
            hint="check the batch size and the unit of the times",
        )
    return replace(sweep, rows=tuple(row for row in sweep.rows if row.concurrency not in sweep.unstable))
