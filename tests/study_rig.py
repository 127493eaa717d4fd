"""A small study on the fake server, for tests of what is made of it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

import pytest

from b2gmodel.live.study_run import Summary, run_study
from b2gmodel.live.study_server import reference_workloads
from b2gmodel.live.study_store import StudyStore
from b2gmodel.live.study_versions import version_of
from b2gmodel.study_plan import plan_study

PLAN: Final = """
name = "small"
seconds_per_run = 0.005
sessions = 2
placements = ["D0", "C1", "C2", "C3", "C4"]
k = [4]
flights = [2]
concurrency = [8, 10]
[server]
kind = "fake"
[[workload]]
name = "w"
"""
RUNS: Final = 20


def planned(folder: Path, text: str = PLAN) -> StudyStore:
    return StudyStore.create(folder, plan_study(text, reference_workloads(), version_of, where="plan.toml"))


def done(folder: Path) -> Summary:
    return run_study(folder, lambda _stage, _share: None)


def finished_study(factory: pytest.TempPathFactory) -> Path:
    """A study, all of it run, once for all tests; those that change something take a copy."""
    folder = factory.getbasetemp() / "finished-study"
    if not folder.exists():
        planned(folder)
        summary = done(folder)
        assert (summary.done, summary.complete, summary.failed, summary.elsewhere) == (RUNS, RUNS, [], [])
    return folder


def copy_of_finished(factory: pytest.TempPathFactory, folder: Path) -> Path:
    return shutil.copytree(finished_study(factory), folder / "s")


def forget(folder: Path, *run_ids: str) -> None:
    """As if these runs had never been."""
    for run_id in run_ids:
        shutil.rmtree(folder / "runs" / run_id)
        (mark,) = (folder / "complete").glob(f"{run_id}.*")
        mark.unlink()
