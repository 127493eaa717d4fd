"""Calibration against the fake: what it writes is what the fake did, and why it stopped is why it stopped."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from fake_bench import MODEL, OPEN, SCRIPT, endpoint_of, renew, run, target_of

from b2gmodel.errors import B2GError, EvidenceError, ServerError, UsageError
from b2gmodel.live import point as module
from b2gmodel.live import sessions
from b2gmodel.live.calibrate import Wanted, calibrate, check_batch
from b2gmodel.live.fake import Delays, FakeScript, FakeServer
from b2gmodel.live.http import HttpConnection
from b2gmodel.live.infer import InferMessage
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.point import Table
from b2gmodel.live.sessions import calibrate_models
from b2gmodel.live.target import parse_url
from b2gmodel.records import Calibration, CalibrationPoint
from b2gmodel.store import read_cycles_s, read_record, sha256_of_file


@pytest.fixture(scope="module")
def process() -> Iterator[FakeServer]:
    with FakeServer.start(SCRIPT) as server:
        yield server


@pytest.fixture
def server(process: FakeServer) -> FakeServer:
    return renew(process)


LOOSE: dict[str, Any] = {"budget_s": 20.0, "precision": 0.5}


def calibrated(server: FakeServer, **wanted: Any) -> tuple[Calibration, Table]:
    facts: dict[str, Any] = LOOSE | {"model": "m", "ladder": (8,)} | wanted
    return run(calibrate(endpoint_of(server), Wanted(**facts), name="cal", session_id="s", progress=lambda *_: None))


def only(calibration: Calibration) -> CalibrationPoint:
    (point,) = calibration.points
    return point


class TestRecord:
    def test_it_is_what_the_cycles_say(self, server: FakeServer) -> None:
        calibration, table = calibrated(server)
        point = only(calibration)
        kept = ~np.array(table["warmup"])
        cycle_s, service_s = (np.array(table[name])[kept] / 1e9 for name in ("cycle_ns", "service_ns"))
        assert (point.cycles, point.warmup_cycles) == (kept.sum(), (~kept).sum())
        for estimate, series in (
            (point.cycle_s, cycle_s),
            (point.service_s, service_s),
            (point.transport_s, cycle_s - service_s),
        ):
            assert estimate is not None
            assert estimate.mean == pytest.approx(series.mean())
            assert estimate.cv == pytest.approx(series.std(ddof=1) / series.mean())
            assert estimate.low is not None
            assert estimate.high is not None
            assert estimate.low < estimate.mean < estimate.high
        assert point.transport_share is not None
        assert point.transport_share.mean == pytest.approx(1 - service_s.mean() / cycle_s.mean())
        assert point.throughput_per_s == pytest.approx(8 / cycle_s.mean())
        assert point.counters is not None
        assert point.counters.executions == len(kept)
        assert point.counters.service_s == pytest.approx(np.mean(table["service_ns"]) / 1e9)

    def test_every_row_adds_up_to_the_nanosecond(self, server: FakeServer) -> None:
        _, table = calibrated(server)
        columns = {name: np.array(values) for name, values in table.items()}
        parts = sum(columns[f"compute_{stage}_ns"] for stage in ("input", "infer", "output"))
        assert (columns["service_ns"] == parts).all()
        assert (columns["transport_ns"] + columns["service_ns"] == columns["cycle_ns"]).all()
        assert (columns["delivered_ns"] - columns["sealed_ns"] == columns["cycle_ns"]).all()
        assert {values.dtype.kind for name, values in columns.items() if name.endswith("_ns")} == {"i"}

    def test_it_says_whose_server_and_model_it_is(self, server: FakeServer) -> None:
        calibration, _ = calibrated(server)
        assert calibration.server is not None
        assert (calibration.server.name, calibration.server.embedded) == ("fake", False)
        assert calibration.server.address == f"http://{server.address}"
        assert (calibration.model.name, calibration.model.max_batch_size) == ("m", 8)
        assert (calibration.name, calibration.session_ids, calibration.transport) == ("cal", ("s",), "http")
        assert only(calibration).payload_bytes == 48

    def test_a_ladder_has_a_point_for_each_batch_size(self, server: FakeServer) -> None:
        per_row = Delays(compute_infer_base_ns=200_000, compute_infer_per_row_ns=400_000)
        renew(server, FakeScript((replace(MODEL, delays=per_row),)))
        calibration, table = calibrated(server, ladder=(1, 2, 8))
        assert [point.k for point in calibration.points] == [1, 2, 8]
        assert sorted(set(table["k"])) == [1, 2, 8]
        assert all(ns >= 200_000 + 400_000 * k for k, ns in zip(table["k"], table["service_ns"], strict=True))

    def test_emulated_compute_and_dynamic_batching_are_noted(self, server: FakeServer) -> None:
        renew(server, FakeScript((replace(MODEL, compute="emulated", dynamic_batching=True),)))
        calibration, _ = calibrated(server)
        assert calibration.model.compute == "emulated"
        assert {
            "the compute is emulated",
            "the server's dynamic batching is on for this model",
        } <= {note.split(":")[0] for note in calibration.notes}


class TestStopping:
    def test_when_the_precision_is_reached(self, server: FakeServer) -> None:
        point = only(calibrated(server)[0])
        assert point.stopped_by == "precision"
        assert point.cycles is not None
        assert point.cycles >= 20

    def test_when_the_budget_ends(self, server: FakeServer) -> None:
        calibration, _ = calibrated(server, budget_s=0.3, precision=1e-9)
        point = only(calibration)
        assert point.stopped_by == "budget"
        assert point.elapsed_s is not None
        assert point.elapsed_s >= 0.3
        assert "the budget ended before the wanted precision: intervals are wider than asked for" in calibration.notes

    def test_when_so_few_cycles_fit_in_that_half_of_them_is_all_that_is_kept(
        self, server: FakeServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A slow model: twenty cycles, of which ten are left to make intervals from."""
        monkeypatch.setattr(module, "warmup_length", lambda _: None)
        clock = iter([0.0, 0.1])
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock, 9.0)))
        point = only(calibrated(server, budget_s=5.0)[0])
        assert (point.cycles, point.stopped_by) == (10, "budget")
        assert point.transport_share is not None
        assert point.transport_share.low is not None

    def test_too_few_cycles_are_no_evidence(self, server: FakeServer) -> None:
        renew(server, FakeScript((replace(MODEL, delays=Delays(compute_infer_base_ns=10_000_000)),)))
        with pytest.raises(EvidenceError, match="--budget: too few cycles within the budget: saw 10; allowed: >= 20"):
            calibrated(server, budget_s=0.02)

    def test_a_batch_longer_than_the_budget_ends_it(self) -> None:
        # A server of its own: it goes on computing, and books the batch when the test has long ended.
        with (
            FakeServer.start(
                FakeScript((replace(MODEL, delays=Delays(compute_infer_base_ns=2_000_000_000)),))
            ) as server,
            pytest.raises(ServerError, match="did not answer the batch in time; allowed: 0.05 s"),
        ):
            calibrated(server, budget_s=0.05)

    def test_progress_ends_at_one(self, server: FakeServer) -> None:
        told: list[tuple[str, float]] = []
        wanted = Wanted("m", (1, 8), **LOOSE)
        run(calibrate(endpoint_of(server), wanted, name="c", session_id="s", progress=lambda *a: told.append(a)))
        assert {stage[:5] for stage, _ in told} == {"m k=1", "m k=8"}
        assert told[-1][1] == 1.0
        assert all(0 <= share <= 1 for _, share in told)


class TestRefusals:
    """Each negative control of the calibration: a type, and words of its own."""

    def refused(self, server: FakeServer, **wanted: Any) -> B2GError:
        with pytest.raises(B2GError) as seen:
            calibrated(server, **wanted)
        return seen.value

    def test_a_wrong_model_name(self, server: FakeServer) -> None:
        error = self.refused(server, model="resnet")
        assert isinstance(error, UsageError)
        assert (error.where, error.problem) == ("--model", "the server does not serve this model")

    def test_a_wrong_name_of_the_null_model(self, server: FakeServer) -> None:
        error = self.refused(server, null_model="nil")
        assert isinstance(error, UsageError)
        assert (error.where, error.problem) == ("--null-model", "the server does not serve this model")

    def test_a_model_without_batching(self, server: FakeServer) -> None:
        error = self.refused(server, model="unbatched")
        assert isinstance(error, UsageError)
        assert error.problem == "the model does not batch (its max_batch_size is 0)"
        assert only(calibrated(server, model="unbatched", ladder=(1,))[0]).k == 1

    def test_a_batch_larger_than_the_model_takes(self, server: FakeServer) -> None:
        error = self.refused(server, ladder=(1, 9))
        assert isinstance(error, UsageError)
        assert (error.observed, error.allowed, error.where) == (9, "1 to 8", "-k")
        assert all(entry.rows != 9 for entry in server.log())

    def test_an_open_shape(self, server: FakeServer) -> None:
        error = self.refused(server, model="open")
        assert isinstance(error, UsageError)
        assert error.observed == "--shape x:4,?, --shape mask:?"
        calibration, _ = calibrated(server, model="open", shapes={"x": (4, 2), "mask": (3,)})
        assert only(calibration).payload_bytes == 4 * 2 * 4 + 3

    def test_a_shape_that_contradicts_the_model(self, server: FakeServer) -> None:
        error = self.refused(server, shapes={"x": (4, 4)})
        assert isinstance(error, UsageError)
        assert error.problem == "the shape does not fit the model's input"

    def test_a_dead_server(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            address = "{}:{}".format(*reserved.getsockname())
        with FakeServer.start(SCRIPT) as server:
            server.address = address
            error = self.refused(server)
        assert isinstance(error, ServerError)
        assert error.problem == "cannot reach the server"

    def test_not_a_kserve_server(self, process: FakeServer) -> None:
        """A server of web pages; and below, one that does not speak HTTP."""
        assert isinstance(self.web(process, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), UsageError)
        page = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"
        assert self.web(process, page).problem == "the server's answer is not JSON"
        assert self.web(process, b"SSH-2.0-x\r\n\r\n").problem == "the server's answer is not HTTP/1.1"

    def web(self, server: FakeServer, answer: bytes) -> B2GError:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def serve() -> None:
                sock, _ = listener.accept()
                with sock:
                    sock.recv(65536)
                    sock.sendall(answer)
                    sock.recv(65536)

            thread = threading.Thread(target=serve)
            thread.start()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(server, "address", "{}:{}".format(*listener.getsockname()))
                error = self.refused(server)
            thread.join(30)
        return error

    def test_counters_without_time(self, server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
        from b2gmodel.live.kserve import BatchCounters

        monkeypatch.setattr(BatchCounters, "service_ns", property(lambda self: 0))
        monkeypatch.setattr("b2gmodel.live.cycles.Cycle.service_ns", property(lambda self: 0))
        error = self.refused(server)
        assert isinstance(error, ServerError)
        assert error.problem == "the server's counters book no time for an execution"

    @pytest.mark.parametrize("foreign_k", [1, 8])
    def test_foreign_traffic(self, server: FakeServer, foreign_k: int) -> None:
        """Somebody else's batch goes in with the fifteenth of ours."""
        original, ours = InferMessage.encode, 0
        foreign: list[bytes] = []

        async def infer_too(connection: HttpConnection, method: str, target: str, **rest: Any) -> Any:
            nonlocal ours
            if target.endswith("/infer") and rest.get("body"):
                ours += 1
                if ours == 15:
                    message = InferMessage(foreign_spec, foreign_k)
                    headers, body = original(message, "foreign", [(bytes(48),)] * foreign_k)
                    other = HttpConnection(connection.host, connection.port)
                    foreign.append(bytes((await request(other, method, target, headers=headers, body=body)).body))
                    other.close()
            return await request(connection, method, target, **rest)

        async def spec() -> Any:
            control = ControlPlane(endpoint_of(server).host, endpoint_of(server).port)
            try:
                return await control.model("m", {})
            finally:
                control.close()

        foreign_spec, request = run(spec()), HttpConnection.request
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(HttpConnection, "request", infer_too)
            error = self.refused(server)
        assert len(foreign) == 1, error.line()
        assert isinstance(error, EvidenceError)
        assert error.problem == "the model executed something that is not ours"


def test_a_batch_fits_or_does_not(server: FakeServer) -> None:
    async def main() -> Any:
        control = ControlPlane(endpoint_of(server).host, endpoint_of(server).port)
        try:
            return await control.model("m", {})
        finally:
            control.close()

    spec = run(main())
    for k in (1, 8):
        check_batch(spec, k, where="-k")
    with pytest.raises(UsageError, match="PREDICTION: the batch is larger than the model takes"):
        check_batch(spec, 9, where="PREDICTION")


class TestFiles:
    """Whole calibrations, written to their folder."""

    def written(
        self, server: FakeServer, folder: Path, models: Sequence[str] = ("m",), name: str | None = "cal"
    ) -> list[tuple[Path, Calibration]]:
        wanted = [Wanted(model, (2,), **LOOSE) for model in models]
        return calibrate_models(target_of(server), wanted, folder=folder, name=name, progress=lambda *_: None)

    def test_the_cycles_lie_beside_the_record(self, server: FakeServer, tmp_path: Path) -> None:
        ((path, calibration),) = self.written(server, tmp_path / "calibration")
        assert path == tmp_path / "calibration" / "cal.json"
        assert read_record(path, Calibration) == calibration
        assert calibration.raw is not None
        raw = path.parent / calibration.raw.file
        assert (raw.name, sha256_of_file(raw)) == ("cal.parquet", calibration.raw.sha256)
        table = pq.read_table(raw)
        assert table.num_rows == calibration.raw.rows
        assert {str(table.schema.field(name).type) for name in table.column_names if name.endswith("_ns")} == {"int64"}
        assert sorted(entry.name for entry in path.parent.iterdir()) == ["cal.json", "cal.parquet"]

    def test_several_models_in_one_call(self, server: FakeServer, tmp_path: Path) -> None:
        renew(server, FakeScript((MODEL, replace(MODEL, name="n"))))
        written = self.written(server, tmp_path, ("m", "n"))
        assert [(path.name, calibration.name) for path, calibration in written] == [
            ("cal-m.json", "cal-m"),
            ("cal-n.json", "cal-n"),
        ]

    def test_a_model_whose_name_no_file_can_have(self, server: FakeServer, tmp_path: Path) -> None:
        ((path, calibration),) = self.written(server, tmp_path, ("an odd/../name",), None)
        assert path.parent == tmp_path
        assert path.name.startswith("an_odd_.._name-")
        assert calibration.model.name == "an odd/../name"

    def test_several_starts_are_one_calibration(self, server: FakeServer, tmp_path: Path) -> None:
        """The raw table tells their cycles apart; what reads it takes those of all."""
        wanted = [Wanted("m", (2, 4), **LOOSE)]
        told: list[tuple[str, float]] = []
        ((path, calibration),) = calibrate_models(
            target_of(server), wanted, folder=tmp_path, name="cal", progress=lambda *a: told.append(a), starts=2
        )
        assert read_record(path, Calibration) == calibration
        assert len(set(calibration.session_ids)) == 2
        assert calibration.notes == (
            "no transport law was measured, as that takes a null model (--null-model): predicted heights are upper "
            "bounds",
            "calibrated over 2 sessions of a server that was not started for them",
        )
        table = pq.read_table(path.parent / "cal.parquet").to_pandas()
        kept = table[~table["warmup"]]
        for point in calibration.points:
            cycles_s = read_cycles_s(path, calibration, point.k)
            assert cycles_s is not None
            assert point.cycles == len(cycles_s) == (kept["k"] == point.k).sum()
            of_sessions = kept[kept["k"] == point.k].groupby("session")["cycle_ns"].mean()
            assert list(of_sessions.index) == [0, 1]
            assert point.cycle_s is not None
            assert point.cycle_s.mean == pytest.approx(of_sessions.mean() / 1e9)
            assert {block.session for block in point.blocks or ()} == {0, 1}
        shares = [share for _, share in told]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        assert {stage.rpartition(", ")[2] for stage, _ in told} == {"start 1 of 2", "start 2 of 2"}

    def test_one_start_has_no_column_for_it(self, server: FakeServer, tmp_path: Path) -> None:
        ((path, _),) = self.written(server, tmp_path)
        assert pq.read_table(path.with_suffix(".parquet")).column_names[:2] == ["k", "warmup"]

    def test_a_start_that_fails_leaves_nothing(
        self, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole, starts = sessions.calibrate, []

        async def failing(*given: Any, **rest: Any) -> tuple[Calibration, Table]:
            starts.append(rest["session_id"])
            if len(starts) == 3:
                raise ServerError("the server is gone")
            return await whole(*given, **rest)

        monkeypatch.setattr(sessions, "calibrate", failing)
        with pytest.raises(ServerError, match="the server is gone"):
            calibrate_models(
                target_of(server), [Wanted("m", (2,), **LOOSE)], folder=tmp_path, name="cal",
                progress=lambda *_: None, starts=3,
            )  # fmt: skip
        assert (len(starts), list(tmp_path.iterdir())) == (3, [])

    def test_no_start_is_no_calibration(self, server: FakeServer, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="--starts: not a number of starts: saw 0; allowed: >= 1"):
            calibrate_models(target_of(server), [], folder=tmp_path, name="x", progress=lambda *_: None, starts=0)

    def test_an_existing_calibration_is_refused_before_anything_runs(self, server: FakeServer, tmp_path: Path) -> None:
        (tmp_path / "cal.json").write_text("mine")
        before = server.log()
        with pytest.raises(UsageError, match="there is such a calibration already"):
            self.written(server, tmp_path)
        assert (tmp_path / "cal.json").read_text() == "mine"
        assert server.log() == before

    @pytest.mark.parametrize(
        ("models", "name", "problem"),
        [
            (("m", "m"), "cal", "a model is named twice"),
            (("m",), "a/b", "this cannot be a name"),
            (("m", "n"), "a" * 127, "this cannot be a name"),
        ],
    )
    def test_names_are_checked_before_anything_runs(
        self, server: FakeServer, tmp_path: Path, models: tuple[str, ...], name: str, problem: str
    ) -> None:
        before = server.log()
        with pytest.raises(UsageError, match=problem):
            self.written(server, tmp_path, models, name)
        assert (server.log(), list(tmp_path.iterdir())) == (before, [])


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", ("127.0.0.1", 8000)),
        ("localhost:8000/", ("localhost", 8000)),
        ("http://[::1]:9", ("::1", 9)),
    ],
)
def test_addresses(url: str, address: tuple[str, int]) -> None:
    target = parse_url(url)
    assert (target.host, target.port) == address
    with target.session(()) as endpoint:
        assert parse_url(endpoint.address) == target


@pytest.mark.parametrize(
    "url",
    ["", "8000", "localhost", "http://localhost", "http://localhost:0", "http://localhost:65536", "http://:8000"]
    + ["localhost:http", "https://localhost:8000", "http://localhost:8000/v2", "http://localhost:8000?x", "http://[::1"]
    + ["http://localhost:-1", "grpc://localhost:8001", "http://a:1:2"],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError, match="--url: not the address of a server"):
        parse_url(url)


def test_open_model_is_open() -> None:
    assert any(-1 in tensor.dims for tensor in OPEN.inputs)
