"""The fake server's delays and faults, each where the script says and nowhere else. No upper time bounds."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from fake_client import (
    MODEL,
    MS,
    SCRIPT,
    TIMEOUT_S,
    connect,
    infer,
    promised,
    raw_request,
    read_all,
    read_answer,
    renew,
    stamps_of,
    stats,
)

from b2gmodel.live.fake import (
    Delays,
    FakeModel,
    FakeScript,
    FakeServer,
    FakeTensor,
    Fault,
    FaultKind,
    LogEntry,
)


@pytest.fixture(scope="module")
def process() -> Iterator[FakeServer]:
    with FakeServer.start(SCRIPT) as server:
        yield server


@pytest.fixture
def server(process: FakeServer) -> FakeServer:
    return renew(process)


class TestDelays:
    """Each injected delay is in its own counter or stamp, and at least as long as asked for."""

    def one(self, server: FakeServer, **delays: int) -> tuple[dict[str, Any], LogEntry]:
        server.install(FakeScript((replace(MODEL, delays=Delays(**delays)),)))
        seen = server.log()
        assert infer(server, rows=4)[0] == 200
        (entry,) = server.log(since=seen[-1].number if seen else 0)
        return stats(server), entry

    def test_compute_stages_are_counted_as_performed(self, server: FakeServer) -> None:
        asked = {"queue_delay_ns": 2 * MS, "compute_input_ns": 3 * MS, "compute_output_ns": 5 * MS}
        counters, entry = self.one(server, compute_infer_base_ns=1 * MS, compute_infer_per_row_ns=2 * MS, **asked)
        stamps = stamps_of(entry)
        spent = [end - start for start, end in pairwise(stamps[2:7])]
        of_all = counters["inference_stats"]
        names = ("queue", "compute_input", "compute_infer", "compute_output")
        assert [of_all[name] for name in names] == [{"count": 1, "ns": ns} for ns in spent]
        assert all(ns >= least * MS for ns, least in zip(spent, (2, 3, 9, 5), strict=True))
        assert of_all["success"] == {"count": 1, "ns": sum(spent)}
        assert counters["batch_stats"] == [{"batch_size": 4, **{name: of_all[name] for name in names[1:]}}]
        assert (counters["inference_count"], counters["execution_count"]) == (4, 1)

    @pytest.mark.parametrize(
        ("delay", "start", "end"),
        [
            ("read_delay_ns", "header_ns", "body_ns"),
            ("receive_delay_ns", "body_ns", "queue_start_ns"),
            ("queue_delay_ns", "queue_start_ns", "compute_start_ns"),
            ("compute_input_ns", "compute_start_ns", "input_end_ns"),
            ("compute_infer_base_ns", "input_end_ns", "infer_end_ns"),
            ("compute_output_ns", "infer_end_ns", "compute_end_ns"),
            ("answer_delay_ns", "compute_end_ns", "first_byte_ns"),
            ("return_delay_ns", "first_byte_ns", "last_byte_ns"),
        ],
    )
    def test_each_delay_lies_between_its_stamps(self, server: FakeServer, delay: str, start: str, end: str) -> None:
        _, entry = self.one(server, **{delay: 20 * MS})
        assert getattr(entry, end) - getattr(entry, start) >= 20 * MS
        assert (entry.request_id, entry.rows, entry.status) == ("id-7", 4, 200)

    def test_unread_body_blocks_its_sender(self, process: FakeServer) -> None:
        row = FakeTensor("x", "UINT8", (2_000_000,))
        model = FakeModel("m", (row,), delays=Delays(read_delay_ns=30 * MS))
        process.install(FakeScript((model,), receive_buffer_bytes=65536))
        item = {"name": "x", "datatype": "UINT8", "shape": [1, 2_000_000]}
        head = json.dumps({"inputs": [{**item, "parameters": {"binary_data_size": 2_000_000}}]}).encode()
        lines = f"Content-Length: {len(head) + 2_000_000}\r\nInference-Header-Content-Length: {len(head)}"
        host, port = process.address.split(":")
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            sock.connect((host, int(port)))
            sock.sendall(f"POST /v2/models/m/infer HTTP/1.1\r\nHost: f\r\n{lines}\r\n\r\n".encode())
            sock.sendall(head + bytes(2_000_000))
            sent_ns = time.monotonic_ns()
            read_answer(sock)
        entry = process.log()[-1]
        assert sent_ns >= entry.header_ns + 30 * MS

    def test_waiting_for_an_instance_is_queueing(self, server: FakeServer) -> None:
        server.install(FakeScript((replace(MODEL, delays=Delays(compute_infer_base_ns=20 * MS)),)))
        before = len(server.log())
        with connect(server) as first, connect(server) as second:
            first.sendall(raw_request())
            second.sendall(raw_request())
            read_answer(first)
            read_answer(second)
        early, late = sorted(server.log()[before:], key=lambda entry: entry.compute_start_ns or 0)
        assert (late.compute_start_ns or 0) >= (early.compute_end_ns or 0)
        assert stats(server)["inference_stats"]["queue"]["ns"] >= (late.compute_start_ns or 0) - (
            late.queue_start_ns or 0
        )

    def test_two_instances_work_side_by_side(self, server: FakeServer) -> None:
        slow = Delays(compute_infer_base_ns=300 * MS)
        server.install(FakeScript((replace(MODEL, instances=2, delays=slow),)))
        before = len(server.log())
        with connect(server) as first, connect(server) as second:
            first.sendall(raw_request())
            second.sendall(raw_request())
            read_answer(first)
            read_answer(second)
        one, other = server.log()[before:]
        assert (other.queue_start_ns or 0) < (one.compute_end_ns or 0)
        assert (other.compute_start_ns or 0) < (one.compute_end_ns or 0)


class TestFaults:
    def script(self, server: FakeServer, kind: FaultKind, **more: int) -> None:
        """The fault hits the second request only."""
        server.install(replace(SCRIPT, faults=(Fault(kind, at=(2,), **more),)))
        assert infer(server)[0] == 200

    @pytest.mark.parametrize("status", [400, 500, 503])
    def test_status(self, server: FakeServer, status: int) -> None:
        self.script(server, FaultKind.STATUS, status=status)
        answer = infer(server)
        assert answer[:2] == (status, {"error": f"the script fails this request with status {status}"})
        counters = stats(server)
        assert (counters["execution_count"], counters["inference_stats"]["fail"]["count"]) == (1, 1)
        assert infer(server)[0] == 200
        assert server.log()[-2].faults == ("status",)

    def test_close_before_answer(self, server: FakeServer) -> None:
        self.script(server, FaultKind.CLOSE_BEFORE_ANSWER)
        with connect(server) as sock:
            sock.sendall(raw_request())
            assert read_all(sock) == b""
        assert stats(server)["execution_count"] == 2
        assert server.log()[-1].first_byte_ns is None

    def test_close_mid_body(self, server: FakeServer) -> None:
        self.script(server, FaultKind.CLOSE_MID_BODY)
        with connect(server) as sock:
            sock.sendall(raw_request())
            head, _, body = read_all(sock).partition(b"\r\n\r\n")
        assert len(body) == promised(head) // 2 > 0

    def test_short_body_then_silence(self, server: FakeServer) -> None:
        self.script(server, FaultKind.SHORT_BODY)
        with connect(server) as sock:
            sock.sendall(raw_request())
            head, body = read_answer(sock, extra=-64)
            assert len(body) == promised(head) - 64
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock) == b""

    def test_long_body(self, server: FakeServer) -> None:
        self.script(server, FaultKind.LONG_BODY)
        with connect(server) as sock:
            sock.sendall(raw_request())
            head, body = read_answer(sock, extra=64)
            assert len(body) == promised(head) + 64

    @pytest.mark.parametrize(
        ("kind", "path", "value"),
        [
            (FaultKind.WRONG_SHAPE, ("outputs", 0, "shape"), [3, 1]),
            (FaultKind.WRONG_DATATYPE, ("outputs", 0, "datatype"), "INT64"),
            (FaultKind.WRONG_ID, ("id",), "not-id-7"),
        ],
    )
    def test_lying_answer(self, server: FakeServer, kind: FaultKind, path: tuple[Any, ...], value: Any) -> None:
        self.script(server, kind)
        status, lie, binary = infer(server)
        _, truth, truth_binary = infer(server)
        assert status == 200
        assert binary == truth_binary
        assert lie != truth
        holder_lie, holder_truth = lie, truth
        for key in path[:-1]:
            holder_lie, holder_truth = holder_lie[key], holder_truth[key]
        assert holder_lie[path[-1]] == value
        holder_lie[path[-1]] = holder_truth[path[-1]]
        assert lie == truth

    def test_never_answer(self, server: FakeServer) -> None:
        self.script(server, FaultKind.NEVER_ANSWER)
        with connect(server) as sock:
            sock.sendall(raw_request())
            assert infer(server)[0] == 200  # others are served meanwhile
            sock.shutdown(socket.SHUT_WR)
            assert read_all(sock) == b""
        assert [entry.status for entry in server.log()[-2:]] == [None, 200]

    def test_counters_reset(self, server: FakeServer) -> None:
        self.script(server, FaultKind.COUNTERS_RESET)
        infer(server, rows=3)
        counters = stats(server)
        assert (counters["execution_count"], counters["inference_count"]) == (1, 3)
        assert [batch["batch_size"] for batch in counters["batch_stats"]] == [3]

    def test_counters_run_backwards(self, server: FakeServer) -> None:
        self.script(server, FaultKind.COUNTERS_BACKWARD)
        before = stats(server)
        infer(server)
        after = stats(server)
        assert after["execution_count"] == before["execution_count"] - 1 == 0
        infer(server)
        server.install(replace(SCRIPT, faults=(Fault(FaultKind.COUNTERS_BACKWARD, probability=1.0),)))
        infer(server)
        infer(server)
        assert stats(server)["execution_count"] == 2**64 - 1

    def test_counters_come_late(self, server: FakeServer) -> None:
        self.script(server, FaultKind.COUNTERS_LATE, lag_ns=300 * MS)
        infer(server)
        answered = server.log()[-1]
        while stats(server)["execution_count"] < 2:
            pass
        assert time.monotonic_ns() >= (answered.last_byte_ns or 0) + 300 * MS

    def test_listens_but_never_accepts(self, server: FakeServer) -> None:
        kept = connect(server)
        kept.sendall(raw_request())
        read_answer(kept)
        server.install(replace(SCRIPT, accept=False))
        with kept, connect(server) as waiting:  # the kernel completes the handshake
            waiting.sendall(raw_request())
            kept.sendall(raw_request())
            read_answer(kept)
            waiting.settimeout(0.05)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
            server.install(SCRIPT)
            waiting.settimeout(TIMEOUT_S)
            assert read_answer(waiting)[0].startswith(b"HTTP/1.1 200")

    def test_probability_repeats_with_its_seed(self) -> None:
        def hits(seed: int) -> list[int]:
            script = FakeScript((MODEL,), (Fault(FaultKind.STATUS, probability=0.3),), seed=seed)
            return [n for n in range(1, 1001) if script.faults_of(n)]

        assert hits(1) == hits(1)
        assert hits(1) != hits(2)
        assert 200 < len(hits(1)) < 400
