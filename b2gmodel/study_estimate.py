"""How long a study will take: from its plan alone before the first run, from the runs that are done afterwards.

No clock and no file here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from b2gmodel.study_records import PlannedRun, Study

SETTLING_ROUNDS: Final = 2
LEAST_ROUNDS: Final = 3
WARMUP_SHARE: Final = 0.25
"""With clients in a process of their own: how much longer a run is than its window, for settling."""

# Seconds that a run and a block take beyond what is planned, about, on the machine of the benchmarks' figures.
_RUN_S: Final = {"inside": 0.1, "process": 2.5}
_BLOCK_S: Final = {"embedded": 8.0, "fake": 1.5, "url": 1.5}


def planned_s(study: Study, runs: Iterable[PlannedRun] | None = None) -> float:
    """About how long these runs take, all where None, in seconds; a lower bound where nothing is known of S."""
    chosen = study.runs if runs is None else tuple(runs)
    blocks = {run.block for run in chosen}
    return sum(run_s(study, run) for run in chosen) + len(blocks) * block_s(study)


def block_s(study: Study) -> float:
    """About how long a block takes beside its runs."""
    return _BLOCK_S[study.server.kind]


def run_s(study: Study, run: PlannedRun) -> float:
    """About how long one run takes: its seconds, or a few rounds of its clients where those take longer."""
    window_s = study.seconds_per_run
    if study.clients == "process":
        return window_s * (1 + WARMUP_SHARE) + _RUN_S["process"]
    return max(window_s, (SETTLING_ROUNDS + LEAST_ROUNDS) * _round_s(study, run)) + _RUN_S["inside"]


def _round_s(study: Study, run: PlannedRun) -> float:
    """How long the instances need, at least, for one request of each client."""
    compute, cell = study.workload(run.workload).emulated, run.cell
    if compute is None:
        return 0.0
    rows = min(cell.concurrency, compute.max_batch) if cell.placement == "C2" else cell.k
    return cell.concurrency / rows * (compute.s0_s + compute.s1_s * rows) / compute.instances


def remaining_s(study: Study, missing: Iterable[PlannedRun], elapsed_s: Mapping[str, float], beside_s: float) -> float:
    """About how long the missing runs still take.

    Args:
        missing: those that are not complete.
        elapsed_s: how long each complete run took, by its id.
        beside_s: how long a block took beside its runs.
    """
    chosen = tuple(missing)
    like: dict[tuple[object, ...], list[float]] = {}
    ratio: list[float] = []
    for run in study.runs:
        if run.run_id in elapsed_s:
            like.setdefault(_kind(run), []).append(elapsed_s[run.run_id])
            ratio.append(elapsed_s[run.run_id] / run_s(study, run))
    # Where none of a kind is done yet, the plan's own figure, corrected by how it fared so far.
    correction = sum(ratio) / len(ratio) if ratio else 1.0
    total_s = 0.0
    for run in chosen:
        seen = like.get(_kind(run))
        total_s += sum(seen) / len(seen) if seen else run_s(study, run) * correction
    return total_s + len({run.block for run in chosen}) * beside_s


def _kind(run: PlannedRun) -> tuple[object, ...]:
    return run.workload, run.transport, run.cell
