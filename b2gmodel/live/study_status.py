"""`b2g study status`: what of a study is done, failed or missing, and how long the rest will take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from b2gmodel.errors import EvidenceError
from b2gmodel.live.study_store import RECORD, StudyStore
from b2gmodel.study_estimate import block_s, remaining_s
from b2gmodel.study_records import Study, StudyFailure
from b2gmodel.units import s_from_ns


@dataclass(frozen=True, slots=True)
class Counts:
    """Runs of one workload, transport and placement; ``failed`` are missing ones that were tried."""

    workload: str
    transport: str
    placement: str
    planned: int
    done: int
    failed: int

    @property
    def missing(self) -> int:
        return self.planned - self.done


@dataclass(frozen=True, slots=True)
class Status:
    """Where a study stands. ``failures`` holds the last one of each run that has failed and is not complete."""

    study: Study
    rows: tuple[Counts, ...]
    failures: tuple[StudyFailure, ...]
    remaining_s: float

    @property
    def done(self) -> int:
        return sum(row.done for row in self.rows)


def status_of(folder: Path) -> Status:
    """Raises ``UsageError`` where there is no study, ``EvidenceError`` where it is damaged."""
    store = StudyStore.open(folder)
    marks = store.marks()
    failures = {failure.run_id: failure for failure in store.failures() if failure.run_id not in marks}
    counts: dict[tuple[str, str, str], list[int]] = {}
    for run in store.study.runs:
        row = counts.setdefault((run.workload, run.transport, run.cell.placement), [0, 0, 0])
        row[0] += 1
        row[1] += run.run_id in marks
        row[2] += run.run_id in failures
    return Status(
        study=store.study,
        rows=tuple(Counts(*key, *row) for key, row in sorted(counts.items())),
        failures=tuple(failures.values()),
        remaining_s=remaining_s(
            store.study,
            [run for run in store.study.runs if run.run_id not in marks],
            {run_id: _elapsed_s(folder / "runs" / run_id / RECORD) for run_id in marks},
            _beside_s(store),
        ),
    )


def _beside_s(store: StudyStore) -> float:
    """How long sessions took beside their runs: of those that were completed, else as planned."""
    seen = [
        s_from_ns(int(each.end_boottime_ns) - int(each.begin_boottime_ns)) - each.runs_s
        for each in store.sessions()
        if each.end_boottime_ns is not None and each.runs_s is not None
    ]
    return sum(seen) / len(seen) if seen else block_s(store.study)


def _elapsed_s(path: Path) -> float:
    """How long a run took: a figure for a forecast, so its digest is not asked for."""
    try:
        return float(json.loads(path.read_bytes())["elapsed_s"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvidenceError(
            "a run that is marked complete cannot be read",
            observed=str(error),
            where=str(path),
            hint="restore the file; to run it again, remove the run's folder and its mark in complete/",
        ) from error
