"""A study's calibrations, frozen prediction and verdict on the fake server, whose C2 never merges anything."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.ledger import Ledger
from b2gmodel.ledger_verify import verify
from b2gmodel.live.study_flow import calibrate_study, freeze_study, judge_runs
from b2gmodel.live.study_run import run_study
from b2gmodel.live.study_server import reference_workloads
from b2gmodel.live.study_store import StudyStore
from b2gmodel.live.study_versions import version_of
from b2gmodel.records import digest_of
from b2gmodel.study_plan import plan_study

PLAN = """
name = "small"
seed = 1
sessions = 2
repetitions = 1
seconds_per_run = 0.1
warmup_rounds = 1
transports = ["http"]
placements = ["C1", "C2", "C3"]
k = [2]
concurrency = [4]

[server]
kind = "fake"

[[workload]]
name = "ladder"
payload_kib = [1, 64, 512]
s0_ms = 2.0
s1_ms = 0.5
max_batch = 4
"""


def tell(stage: str, share: float) -> None:
    """Progress is not shown."""


def planned(folder: Path) -> StudyStore:
    study = plan_study(PLAN, reference_workloads(), version_of, where="PLAN", changes={})
    return StudyStore.create(folder, study)


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "small"
    planned(folder)
    calibrate_study(folder, tell, budget_s=0.3)
    return folder


@pytest.fixture
def study(calibrated: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    return Path(shutil.copytree(calibrated, tmp_path / "small"))


def test_calibrations_are_made_once(study: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (study / "calibration").iterdir()}
    assert len(calibrate_study(study, tell)) == 3
    assert {path: path.stat().st_mtime_ns for path in (study / "calibration").iterdir()} == before


def test_predict_run_judge(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from b2gmodel.cli import run as b2g

    prediction, path = freeze_study(study, seed=1)
    assert freeze_study(study, seed=1) == (prediction, path)
    assert len(prediction.crossovers) == 1
    run_study(study, tell)
    assert {session.prediction_digest for session in StudyStore.open(study).sessions()} == {digest_of(prediction)}
    _, verdict, file = judge_runs(study)
    assert judge_runs(study)[2] == file
    assert verdict.outcome in {"held", "refuted", "inconclusive"}, verdict.sentence
    assert all(check.outcome == "passed" for check in verdict.evidence)
    assert len(verdict.cells) == 3
    # However slow the machine: S(1) = 2.5 ms bounds C1, and S(2) = 3 ms bounds C3.
    assert all(cell.c1_per_s.mean < 1.05 * 400 and cell.c3_per_s.mean < 1.05 * 667 for cell in verdict.cells)
    ledger = Ledger(study / "predictions")
    assert verify(ledger).holds
    capsys.readouterr()
    assert b2g(["validate", path.stem[-64:-50], "--predictions", str(study / "predictions"), "--json"]) in {0, 1, 3}
    here = capsys.readouterr().out
    copy = shutil.copytree(study / "predictions", study.parent / "elsewhere")
    b2g(["validate", path.stem[-64:-50], "--predictions", str(copy), "--json"])
    assert capsys.readouterr().out == here
    assert b2g(["validate", "--all", "--predictions", str(copy)]) == 0
    assert capsys.readouterr().out.startswith("0 of 1 frozen prediction has no outcome")
    figure = study / "figure.svg"
    assert b2g(["study", "judge", str(study), "--figure", str(figure)]) in {0, 1, 3}
    assert "Crossover payload" in capsys.readouterr().out
    assert figure.read_text().startswith("<?xml")


def test_a_study_is_predicted_once(study: Path) -> None:
    freeze_study(study, seed=1)
    with pytest.raises(EvidenceError, match="has a prediction already"):
        freeze_study(study, seed=2)


def test_a_run_without_its_session_is_no_evidence(study: Path) -> None:
    freeze_study(study, seed=1)
    run_study(study, tell)
    next((study / "sessions").iterdir()).unlink()
    with pytest.raises(EvidenceError, match="a session that is not there"):
        judge_runs(study)


def test_what_was_run_before_is_not_predicted(study: Path) -> None:
    run_study(study, tell)
    with pytest.raises(EvidenceError, match="has runs already"):
        freeze_study(study, seed=1)
    with pytest.raises(UsageError, match="no prediction was frozen"):
        judge_runs(study)


def test_refuses_without_calibrations_or_runs(study: Path, tmp_path: Path) -> None:
    planned(tmp_path / "bare")
    with pytest.raises(UsageError, match="no calibration"):
        freeze_study(tmp_path / "bare", seed=1)
    freeze_study(study, seed=1)
    with pytest.raises(UsageError, match="no run is complete"):
        judge_runs(study)
