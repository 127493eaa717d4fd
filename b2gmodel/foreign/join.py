"""Files of one run as one sweep: what one does not state comes from another, and what two state must agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import reduce
from typing import Any, Final

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.foreign.rows import Row, Sweep, in_inferences, ordered

AGREE: Final = 0.01
"""Two files of one run state the same figure where they differ by at most this share of it: rounding, and no more."""

_COMPARED: Final = {"throughput_per_s": "inferences/s", "latency_s": "s of mean latency", "infer_s": "s of inference",
                    "batches": "requests"}  # fmt: skip
_ROUNDING_S: Final = 2e-6


def join(sweeps: Sequence[Sweep], batch_size: int | None = None) -> Sweep:
    """One sweep, in inferences, from one file or several of one run.

    Args:
        sweeps: at least one; earlier ones are preferred where two state the same.
        batch_size: the caller's, where no file states it.

    Raises:
        UsageError: the batch size is not known, or the files are of different ones.
        EvidenceError: two files contradict each other, or have no concurrency in common.
    """
    stated = {each.batch_size: each.where for each in sweeps if each.batch_size is not None}
    if len(stated) > 1:
        raise UsageError(
            "the files state different batch sizes",
            observed=", ".join(f"{size} in {where}" for size, where in stated.items()),
            allowed="files of one run",
            where=" with ".join(each.where for each in sweeps),
        )
    # What a file states of the batch size holds for the others; else the first from whose rows it follows.
    known = next(iter(stated), batch_size)
    if known is None:
        known = next((in_inferences(each, None).batch_size for each in sweeps if not each.counts_batches), None)
    elif batch_size not in (None, known):
        known = batch_size
    return reduce(_pair, (in_inferences(each, known) for each in sweeps))


def _pair(first: Sweep, second: Sweep) -> Sweep:
    where = f"{first.where} with {second.where}"
    common = {row.concurrency for row in first.rows} & {row.concurrency for row in second.rows}
    if not common:
        raise EvidenceError(
            "the files have no concurrency in common",
            observed=f"{_listed(first)} and {_listed(second)}",
            allowed="files of one run",
            where=where,
            hint="import them one by one, each with its own --name",
        )
    rows = []
    for concurrency in {row.concurrency for row in (*first.rows, *second.rows)}:
        one, other = first.at(concurrency), second.at(concurrency)
        if one is not None and other is not None:
            _must_agree(one, other, where)
            rows.append(replace(one, **_filled(one, other), is_overloaded=one.is_overloaded or other.is_overloaded))
        else:
            rows.extend(row for row in (one, other) if row is not None)
    joined: dict[str, Any] = _filled(first, second)
    return replace(
        first,
        **joined,
        kinds=(*first.kinds, *second.kinds),
        files=(*first.files, *second.files),
        rows=ordered(rows, where),
        in_process=first.in_process or second.in_process,
        unstable=tuple(sorted({*first.unstable, *second.unstable})),
        knows_stability=first.knows_stability or second.knows_stability,
    )


def _must_agree(one: Row, other: Row, where: str) -> None:
    for name, unit in _COMPARED.items():
        a, b = getattr(one, name), getattr(other, name)
        if a is None or b is None:
            continue
        slack = AGREE * max(a, b) + (_ROUNDING_S if name.endswith("_s") and "per" not in name else 0.0)
        if abs(a - b) > slack:
            raise EvidenceError(
                f"the files contradict each other at concurrency {one.concurrency}",
                observed=f"{a:.6g} and {b:.6g} {unit}",
                allowed=f"the same within {AGREE:.0%}",
                where=where,
                hint="give files of one run",
            )


def _filled(one: Row | Sweep, other: Row | Sweep) -> dict[str, Any]:
    """What the first does not state and the second does."""
    return {
        field.name: getattr(other, field.name)
        for field in fields(one)
        if getattr(one, field.name) is None and getattr(other, field.name) is not None
    }


def _listed(sweep: Sweep) -> str:
    return ", ".join(str(row.concurrency) for row in sweep.rows[:8])
