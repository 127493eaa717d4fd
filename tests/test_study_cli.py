"""b2g study plan, run and status: whole outputs, exit codes, one line for whatever is mistyped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_bench import Out, complained, said
from study_rig import PLAN, copy_of_finished, forget

from b2gmodel.live.study_store import StudyStore


@pytest.fixture
def copied(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    return copy_of_finished(tmp_path_factory, tmp_path)


class TestCommands:
    def test_plan_whole(self, tmp_path: Path, capsys: Out) -> None:
        (tmp_path / "small.toml").write_text(PLAN)
        folder = tmp_path / "s"
        assert said(capsys, "study", "plan", str(tmp_path / "small.toml"), "--out", str(folder)) == (
            0,
            "planned: 20 runs of study small in 2 blocks, about 5 s\n"
            "  2 session(s) of 1 repetition(s), 0.005 s a run, clients inside, server fake, seed 1\n"
            "  workload  KiB/request  transports      placements  cells  runs\n"
            "  w                   1        http  D0 C1 C2 C3 C4     10    20\n"
            "note: the fake server stands in for w: requests of 1 KiB where no payload is given, S(k) = 0.1 ms + 0.02 "
            "ms k; nothing that is measured on it says anything of a real server\n"
            f"written: {folder}/study.json\n"
            f"next: b2g study calibrate {folder}, to predict it before it is run; or b2g study run {folder}\n",
        )
        assert said(capsys, "study", "plan", str(tmp_path / "small.toml"), "--out", str(folder))[0] == 0
        code, line = complained(capsys, "study", "plan", "quick", "--out", str(folder))
        assert (code, line.split(": ", 1)[1].split(";")[0]) == (2, "the folder holds another study")

    def test_plan_with_changes(self, tmp_path: Path, capsys: Out) -> None:
        changes = ("--server", "fake", "--seconds", "20ms", "--sessions", "1", "--repetitions", "2", "--seed", "9")
        code, out = said(capsys, "study", "plan", "quick", "--out", str(tmp_path / "s"), *changes, "--json")
        answer = json.loads(out)
        assert (code, sorted(answer), answer["runs"]) == (0, ["digest", "folder", "planned_s", "runs"], 36)
        study = StudyStore.open(tmp_path / "s").study
        assert (study.server.kind, study.seconds_per_run, study.sessions, study.seed) == ("fake", 0.02, 1, 9)

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (("plan", "nothing.toml"), "FILE: cannot read the plan"),
            (("plan", "quick", "--seconds", "2"), "--seconds: not a time: saw '2'"),
            (("plan", "quick", "--clients", "process"), "quick: D0 has no proxy"),
            (("plan", "quick", "--sessions", "0"), "Invalid value for '--sessions'"),
            (("plan", "quick", "--clients", "outside"), "quick: clients: not usable"),
            (("run", "nowhere"), "nowhere/study.json: no study there"),
            (("status", "nowhere"), "nowhere/study.json: no study there"),
        ],
    )
    def test_mistyped(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out, arguments: tuple[str, ...], line: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        code, seen = complained(capsys, "study", *arguments)
        assert code == 2
        assert seen.startswith(line)
        assert list(tmp_path.iterdir()) == []

    def test_show_prints_the_file(self, capsys: Out) -> None:
        code, out = said(capsys, "study", "plan", "quick", "--show")
        assert code == 0
        assert 'name = "quick"' in out

    def test_status_whole(self, copied: Path, capsys: Out) -> None:
        assert said(capsys, "study", "status", str(copied)) == (
            0,
            "study small: 20 of 20 runs are complete, nothing is left\n"
            "  workload  transport  placement  planned  done  failed  missing\n"
            "  w              http         C1        4     4       0        0\n"
            "  w              http         C2        4     4       0        0\n"
            "  w              http         C3        4     4       0        0\n"
            "  w              http         C4        4     4       0        0\n"
            "  w              http         D0        4     4       0        0\n",
        )
        for run_id in [run_id for run_id in StudyStore.open(copied).marks() if "C4" in run_id]:
            forget(copied, run_id)
        code, out = said(capsys, "study", "status", str(copied), "--json")
        answer = json.loads(out)
        assert (code, answer["planned"], answer["done"], answer["failures"]) == (0, 20, 16, [])
        assert answer["rows"][3] == {
            "workload": "w", "transport": "http", "placement": "C4", "planned": 4, "done": 0, "failed": 0, "missing": 4,
        }  # fmt: skip
        assert answer["remaining_s"] > 0

    def test_run_whole(self, copied: Path, capsys: Out) -> None:
        assert said(capsys, "study", "run", str(copied), "-q") == (
            0,
            f"complete: 20 of 20 runs, 0 of them by this call\nnext: b2g study status {copied}\n",
        )
