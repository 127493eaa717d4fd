"""Studies on the fake server and on the real one: every run once, whatever comes between."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from study_rig import PLAN, RUNS, copy_of_finished, done, finished_study, forget, planned

from b2gmodel.errors import EvidenceError
from b2gmodel.live.study_store import StudyStore, load_runs
from b2gmodel.records import canonical_bytes
from b2gmodel.study_records import Study, StudyRun


@pytest.fixture
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_study(tmp_path_factory)


@pytest.fixture
def copied(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    return copy_of_finished(tmp_path_factory, tmp_path)


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
        assert run.payload_bytes == 16 * 1024
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
