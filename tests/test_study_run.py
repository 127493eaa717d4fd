"""Studies on the fake server: every run once, whatever comes between, and nothing believed that was changed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from cli_bench import Out, complained, said

from b2gmodel.errors import EvidenceError, ServerError, UsageError
from b2gmodel.live.fake import Delays, FakeModel, FakeScript, FakeServer, FakeTensor, Fault, FaultKind
from b2gmodel.live.study_run import Summary, run_study
from b2gmodel.live.study_server import reference_workloads
from b2gmodel.live.study_store import StudyStore, load_runs, room_in
from b2gmodel.live.study_versions import files_of, version_of
from b2gmodel.records import canonical_bytes
from b2gmodel.study_plan import plan_study
from b2gmodel.study_records import Study, StudyRun

PLAN = """
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
RUNS = 20


def planned(folder: Path, text: str = PLAN) -> StudyStore:
    study = plan_study(text, reference_workloads(), version_of, where="plan.toml")
    return StudyStore.create(folder, study)


def done(folder: Path) -> Summary:
    return run_study(folder, lambda _stage, _share: None)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study, all of it run; tests that change something take a copy."""
    folder = tmp_path_factory.mktemp("study") / "s"
    planned(folder)
    summary = done(folder)
    assert (summary.done, summary.complete, summary.failed, summary.elsewhere) == (RUNS, RUNS, [], [])
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "s")


def forget(folder: Path, *run_ids: str) -> None:
    """As if these runs had never been."""
    for run_id in run_ids:
        shutil.rmtree(folder / "runs" / run_id)
        (mark,) = (folder / "complete").glob(f"{run_id}.*")
        mark.unlink()


class TestRuns:
    def test_all_of_the_plan_in_its_order(self, finished: Path) -> None:
        study = StudyStore.open(finished).study
        runs = load_runs(finished)
        assert [run.run_id for run in runs] == [run.run_id for run in study.runs]
        begun = [int(run.begin_boottime_ns) for run in runs]
        assert begun == sorted(begun)
        assert {run.study_digest for run in runs} == {StudyStore.open(finished).digest}

    def test_counts_balance(self, finished: Path) -> None:
        for run in load_runs(finished):
            assert run.failed == 0
            assert run.sent == run.answered == run.server_requests
            assert sum(int(size) * count for size, count in run.server_batch_sizes.items()) == run.server_requests
            assert sum(run.server_batch_sizes.values()) == run.server_executions == run.delivered_batches
            assert sum(run.batch_sizes.values()) == run.batches
            assert sum(int(size) * count for size, count in run.batch_sizes.items()) == run.requests
            assert run.throughput_per_s == pytest.approx(run.requests / run.duration_s)

    def test_batches_are_those_of_the_placement(self, finished: Path) -> None:
        for run in load_runs(finished):
            k = 4 if run.placement in ("C3", "C4") else 1
            assert set(run.batch_sizes) == {str(k)}
            # Ten clients leave two without partners at the end; the fake never merges, so its C2 is a C1.
            assert set(run.server_batch_sizes) - {str(k)} <= ({"2"} if run.concurrency % k else set())
            assert run.model == ("w_dynamic" if run.placement == "C2" else "w")
            assert (run.k, run.flights) == (k, {"C3": 1, "C4": 2}.get(run.placement, run.concurrency))

    def test_single_flight_alone_states_the_transport(self, finished: Path) -> None:
        for run in load_runs(finished):
            if run.placement == "C3":
                assert run.transport_s == pytest.approx(run.cycle_s - run.service_s)
            else:
                assert run.transport_s is None
            assert run.service_s >= 0.0001

    def test_latencies_are_in_order_and_in_a_histogram(self, finished: Path) -> None:
        from hdrh.histogram import HdrHistogram

        for run in load_runs(finished):
            times = [run.p50_s, run.p90_s, run.p95_s, run.p99_s, run.p999_s, run.max_s]
            assert times == sorted(times)
            histogram = HdrHistogram.decode(run.latency_hdr)
            assert histogram.get_value_at_percentile(50) / 1e9 == pytest.approx(run.p50_s, rel=1e-2)
            # By Little's law, as many requests are out as there are clients; the window's ends cut a few short.
            assert run.mean_s * run.throughput_per_s == pytest.approx(run.concurrency, rel=0.5)

    def test_bytes_and_processor_time(self, finished: Path) -> None:
        for run in load_runs(finished):
            assert run.sent_bytes_per_request is not None
            assert run.received_bytes_per_request is not None
            assert 1024 < run.sent_bytes_per_request < 2048
            assert 0 < run.received_bytes_per_request < 1024
            assert run.cpu_proxy_s > 0
            assert run.cpu_load_s is None
            assert run.cpu_server_s is not None
            assert run.cpu_server_s > 0

    def test_flights_are_kept(self, finished: Path) -> None:
        for run in load_runs(finished):
            columns = pq.read_table(finished / "runs" / run.run_id / "flights.parquet").to_pydict()
            assert len(columns["size"]) == run.delivered_batches == run.raw.rows
            assert sum(columns["counted"]) == run.batches
            assert not any(columns["failed"])

    def test_sessions_say_where_and_on_what(self, finished: Path) -> None:
        store = StudyStore.open(finished)
        first, second = store.sessions()
        assert (first.session_id, first.block, second.session) == ("s0-w-http-1", "s0-w-http", 1)
        assert {run.session_id for run in load_runs(finished)} == {first.session_id, second.session_id}
        assert [model.info.name for model in first.models].count("w_dynamic") == 1
        assert all(hashlib.sha256(m.configuration.encode()).hexdigest() == m.digest for m in first.models)
        assert first.noise_after is not None
        assert first.end_boottime_ns is not None
        assert (first.runs, first.server_restarted, first.server.name) == (10, True, "fake")
        assert int(first.end_boottime_ns) > int(first.begin_boottime_ns)


class TestAgain:
    def test_a_second_call_does_nothing(self, copied: Path) -> None:
        before = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file()}
        summary = done(copied)
        assert (summary.done, summary.complete) == (0, RUNS)
        assert {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file()} == before

    def test_only_what_is_missing_is_done(self, copied: Path) -> None:
        kept = StudyStore.open(copied).marks()
        gone = sorted(kept)[3]
        forget(copied, gone)
        assert done(copied).done == 1
        marks = StudyStore.open(copied).marks()
        assert {run_id: digest for run_id, digest in marks.items() if run_id != gone} == {
            run_id: digest for run_id, digest in kept.items() if run_id != gone
        }
        assert StudyStore.open(copied).sessions()[-1].session_id.endswith("-2")

    def test_a_bundle_that_was_not_marked_is_marked_and_not_done_again(self, copied: Path) -> None:
        marks = StudyStore.open(copied).marks()
        run_id, digest = min(marks.items())
        (copied / "complete" / f"{run_id}.{digest}").unlink()
        assert done(copied).done == 0
        assert StudyStore.open(copied).marks() == marks

    def test_what_the_dead_left_behind_is_removed(self, copied: Path) -> None:
        run_id = min(StudyStore.open(copied).marks())
        forget(copied, run_id)
        part = copied / "runs" / f".{run_id}.part-1"
        part.mkdir()
        (part / "run.json").write_text("{")
        (copied / "sessions" / ".s0-w-http-7.part-1").write_text("{")
        assert done(copied).done == 1
        assert list(copied.rglob(".*")) == []

    def test_a_bundle_that_is_not_whole_is_not_marked(self, copied: Path) -> None:
        run_id, digest = min(StudyStore.open(copied).marks().items())
        (copied / "complete" / f"{run_id}.{digest}").unlink()
        (copied / "runs" / run_id / "flights.parquet").write_bytes(b"torn")
        with pytest.raises(EvidenceError, match="the run's flights are not those that it names"):
            done(copied)

    def test_two_at_once_take_different_runs(self, tmp_path: Path) -> None:
        folder = tmp_path / "s"
        planned(folder, PLAN.replace("sessions = 2", "sessions = 3"))
        command = [sys.executable, "-m", "b2gmodel", "study", "run", str(folder), "--json"]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        answers = [json.loads(each.communicate(timeout=120)[0]) for each in both]
        assert [each.returncode for each in both] == [0, 0]
        assert sum(answer["done"] for answer in answers) == 3 * 10
        assert all(answer["done"] for answer in answers)
        assert len(load_runs(folder)) == 3 * 10
        assert len(StudyStore.open(folder).sessions()) == 3

    def test_a_block_in_other_hands_is_left_alone(self, copied: Path) -> None:
        store = StudyStore.open(copied)
        forget(copied, min(store.marks()))
        with store.claimed("s0-w-http") as ours:
            assert ours
            summary = done(copied)
        assert (summary.done, summary.elsewhere) == (0, ["s0-w-http"])

    def test_killed_and_resumed(self, tmp_path: Path) -> None:
        folder = tmp_path / "s"
        store = planned(folder, PLAN.replace("sessions = 2", "sessions = 3"))
        process = subprocess.Popen([sys.executable, "-m", "b2gmodel", "study", "run", str(folder), "-q"])
        while len(store.marks()) < 5 and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
        before = store.marks()
        assert 5 <= len(before) < 30
        # A bundle that had been renamed into its place and not yet marked is not done again either.
        whole = {name for name in os.listdir(folder / "runs") if not name.startswith(".")}
        assert done(folder).done == 30 - len(whole | set(before))
        marks = store.marks()
        assert {run_id: marks[run_id] for run_id in before} == before
        assert len(load_runs(folder)) == 30


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
        with pytest.raises(ServerError, match="cannot reach the server"):
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
    def test_whatever_was_changed(self, copied: Path, damage: object, problem: str) -> None:
        run_id = min(StudyStore.open(copied).marks())
        damage(copied, run_id)  # type: ignore[operator]
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
            f"next: b2g study run {folder}\n",
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


REAL = """
name = "real"
seconds_per_run = 0.05
sessions = 1
placements = ["D0", "C1", "C2", "C3", "C4"]
k = [4]
flights = [2]
concurrency = [10]
[[workload]]
name = "small"
payload_kib = 16
s0_ms = 1.0
s1_ms = 0.2
max_batch = 8
"""


@pytest.mark.real
@pytest.mark.parametrize("clients", ["inside", "process"])
def test_every_placement_on_the_real_server(tmp_path: Path, clients: str) -> None:
    text = f'clients = "{clients}"\n{REAL}'
    store = planned(tmp_path / "s", text if clients == "inside" else text.replace('"D0", ', ""))
    summary = done(tmp_path / "s")
    assert [each.error for each in summary.failed] == []
    runs = {run.placement: run for run in load_runs(tmp_path / "s")}
    assert len(runs) == len(store.study.runs)
    assert set(runs) == {"D0", "C1", "C2", "C3", "C4"} - ({"D0"} if clients == "process" else set())
    # The server merges what comes one by one, in C2 alone.
    assert set(runs["C2"].batch_sizes) == set(runs["C1"].server_batch_sizes) == {"1"}
    assert runs["C2"].server_executions < runs["C2"].server_requests
    for run in runs.values():
        assert run.sent == run.answered
        assert run.payload_bytes == 13 * 1024
        assert (run.cpu_load_s is None) == (clients == "inside")
        assert run.cpu_server_s is not None
        assert run.service_s >= 0.0012
    (session,) = store.sessions()
    assert session.server.version == "2.51.0"
    assert [json.loads(model.configuration)["config"]["name"] for model in session.models] == [
        model.info.name for model in session.models
    ]


def test_records_are_what_they_say(finished: Path) -> None:
    store = StudyStore.open(finished)
    run = load_runs(finished)[0]
    assert repr(store.study) == "Study small: 20 runs in 2 blocks on fake"
    assert repr(run).startswith(f"StudyRun {run.run_id}: ")
    assert Study.model_validate_json(canonical_bytes(store.study)) == store.study
    assert StudyRun.model_validate_json(canonical_bytes(run)) == run
