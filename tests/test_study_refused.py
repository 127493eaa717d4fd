"""What a study does not believe, does not mix and does not lose: failures, changed files, full disks."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_bench import Out, said
from study_rig import PLAN, copy_of_finished, done, forget, planned

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.live.fake import Delays, FakeModel, FakeScript, FakeServer, FakeTensor, Fault, FaultKind
from b2gmodel.live.study_store import StudyStore, load_runs, room_in
from b2gmodel.live.study_versions import files_of, version_of
from b2gmodel.records import canonical_bytes


@pytest.fixture
def copied(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    return copy_of_finished(tmp_path_factory, tmp_path)


class TestFailures:
    MODEL = FakeModel("w", (FakeTensor("x", "FP32", (8,)),), max_batch=8, delays=Delays(compute_infer_base_ns=200_000))
    # The warm-up takes about 73 requests, the first run 12 at least: whatever its placement, it meets the fault.
    FAULTY = FakeScript((MODEL,), faults=(Fault(FaultKind.STATUS, at=(80,)),))

    def plan_for(self, server: FakeServer, folder: Path) -> StudyStore:
        text = PLAN.replace('kind = "fake"', f'kind = "url"\nurl = "http://{server.address}"')
        text = text.replace("sessions = 2", "sessions = 1").replace("[8, 10]", "[8]")
        return planned(folder, text.replace('"C2", ', ""))

    @pytest.fixture
    def server(self) -> Iterator[FakeServer]:
        with FakeServer.start(FakeScript((self.MODEL,))) as server:
            yield server

    def test_a_failed_run_is_kept_listed_and_tried_again(self, server: FakeServer, tmp_path: Path, capsys: Out) -> None:
        folder = tmp_path / "s"
        store = self.plan_for(server, folder)
        server.install(self.FAULTY)
        code, out = said(capsys, "study", "run", str(folder), "-q")
        assert (code, out.splitlines()[0]) == (3, "complete: 3 of 4 runs, 3 of them by this call")
        (failure,) = store.failures()
        assert failure.run_id == store.study.runs[0].run_id
        assert (failure.kind, failure.session_id) == ("ServerError", "s0-w-http-1")
        assert "status 500" in failure.error
        bundle = folder / "failed" / f"{failure.run_id}-1" / "run.json"
        assert json.loads(bundle.read_bytes())["error"] == failure.error
        code, out = said(capsys, "study", "status", str(folder))
        assert code == 0
        assert out.splitlines()[0].startswith("study small: 3 of 4 runs are complete, about ")
        assert f"  failed: {failure.run_id}: " in out
        assert out.splitlines()[-1] == f"next: b2g study run {folder}"
        assert done(folder).done == 1
        assert len(load_runs(folder)) == 4
        assert bundle.exists()
        assert "failed:" not in said(capsys, "study", "status", str(folder))[1]

    def test_a_server_that_is_gone_stops_the_study(self, server: FakeServer, tmp_path: Path) -> None:
        folder = tmp_path / "s"
        self.plan_for(server, folder)
        server.stop()
        with pytest.raises(UsageError, match="cannot reach the server"):
            done(folder)
        assert StudyStore.open(folder).marks() == {}

    def test_another_configuration_of_the_server_is_not_mixed_in(self, server: FakeServer, tmp_path: Path) -> None:
        folder = tmp_path / "s"
        self.plan_for(server, folder)
        done(folder)
        forget(folder, min(StudyStore.open(folder).marks()))
        server.install(FakeScript((FakeModel("w", (FakeTensor("x", "FP32", (8,)),), max_batch=16),)))
        with pytest.raises(EvidenceError, match="configuration on the server is not that of earlier sessions"):
            done(folder)


class TestRefused:
    def test_another_study_in_the_folder(self, copied: Path) -> None:
        planned(copied)
        with pytest.raises(UsageError, match="the folder holds another study"):
            planned(copied, PLAN + "\n# nothing else\n" + '[[workload]]\nname = "v"')

    def test_two_versions_of_a_placement(self, copied: Path) -> None:
        study = StudyStore.open(copied).study
        other = study.placements[1].model_copy(update={"digest": "0" * 64})
        changed = study.model_copy(update={"placements": (study.placements[0], other, *study.placements[2:])})
        (copied / "study.json").write_bytes(canonical_bytes(changed))
        with pytest.raises(EvidenceError, match="the code or the packages of placement C1 are not those"):
            done(copied)

    def test_a_version_holds_the_code(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert len({version_of(each, "inside") for each in ("D0", "C1", "C2", "C3", "C4")}) == 5
        assert version_of("C1", "inside") != version_of("C1", "process")
        before = version_of("C3", "inside")
        monkeypatch.setattr("b2gmodel.live.study_versions._sha256", lambda name: "changed" if "batcher" in name else "")
        version_of.cache_clear()
        changed = version_of("C3", "inside")
        monkeypatch.undo()
        version_of.cache_clear()
        assert before == version_of("C3", "inside") != changed

    def test_a_version_names_files_that_are_there(self) -> None:
        package = Path(sys.modules["b2gmodel"].__file__ or "").parent
        for placement in ("D0", "C1"):
            names = files_of(placement, "process")
            assert len(set(names)) == len(names)
            assert all((package / name).is_file() for name in names)

    @pytest.mark.parametrize(
        ("damage", "problem"),
        [
            (lambda f, r: (f / "study.json").write_bytes((f / "study.json").read_bytes()[:-1]), "damaged or truncated"),
            (lambda f, r: edited(f / "study.json", b'"seed":1', b'"seed": 1'), "not in canonical form"),
            (lambda f, r: edited(f / "study.json", b'"seed":1', b'"seed":2'), "not the one that was marked"),
            (lambda f, r: edited(f / "runs" / r / "run.json", b'"failed":0', b'"failed":1'), "not the one that was"),
            (lambda f, r: (f / "runs" / r / "flights.parquet").write_bytes(b""), "flights are not those"),
            (lambda f, r: (f / "complete" / f"{r}.{'0' * 64}").touch(), "a mark of no run of this study, or a second"),
            (lambda f, r: (f / "complete" / f"other.{'0' * 64}").touch(), "a mark of no run of this study"),
            (lambda f, r: swapped(f / "runs", r), "not the one that was marked"),
        ],
    )  # fmt: skip
    def test_whatever_was_changed(self, copied: Path, damage: Callable[[Path, str], object], problem: str) -> None:
        run_id = min(StudyStore.open(copied).marks())
        damage(copied, run_id)
        with pytest.raises(EvidenceError, match=problem):
            load_runs(copied)

    def test_a_run_that_is_gone(self, copied: Path) -> None:
        shutil.rmtree(copied / "runs" / min(StudyStore.open(copied).marks()))
        with pytest.raises(UsageError, match="cannot read the file"):
            load_runs(copied)

    def test_a_full_disk_is_one_line(self, tmp_path: Path) -> None:
        problem = "no room for the study's files: saw '[0-9]+ bytes free'; make room"
        with (
            pytest.raises(UsageError, match=problem),
            room_in(tmp_path),
            open("/dev/full", "wb", buffering=0) as full,
        ):
            full.write(b"x")

    def test_a_run_without_room_leaves_nothing(self, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        run_id = min(StudyStore.open(copied).marks())
        forget(copied, run_id)

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("b2gmodel.live.study_store.os.fsync", full)
            with pytest.raises(UsageError, match="no room for the study's files"):
                done(copied)
        assert list(copied.rglob(".*")) == []
        assert run_id not in os.listdir(copied / "runs")
        assert done(copied).done == 1


def swapped(runs: Path, run_id: str) -> None:
    """Another run in the place of this one."""
    other = max(path.name for path in runs.iterdir())
    shutil.rmtree(runs / run_id)
    shutil.copytree(runs / other, runs / run_id)


def edited(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new, 1))
