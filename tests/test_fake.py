"""The fake server as its clients see it: a real process on real sockets. No time is bounded from above."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_client import (
    MODEL,
    SCRIPT,
    TIMEOUT_S,
    connect,
    get,
    infer,
    message,
    payload,
    raw_request,
    read_all,
    renew,
    stats,
)

from b2gmodel.errors import ServerError, SetupError, UsageError
from b2gmodel.live.fake import (
    FakeScript,
    FakeServer,
    FakeTensor,
)


@pytest.fixture(scope="module")
def process() -> Iterator[FakeServer]:
    with FakeServer.start(SCRIPT) as server:
        yield server


@pytest.fixture
def server(process: FakeServer) -> FakeServer:
    return renew(process)


class TestProtocol:
    def test_server_and_health(self, server: FakeServer) -> None:
        status, document = get(server, "/v2")
        assert status == 200
        assert set(document) == {"name", "version", "extensions"}
        assert get(server, "/v2/health/live") == (200, None)
        assert get(server, "/v2/health/ready") == (200, None)
        assert get(server, "/nothing") == (404, {"error": "Not Found"})

    def test_metadata(self, server: FakeServer) -> None:
        expected = {
            "name": "m",
            "versions": ["1"],
            "platform": "fake",
            "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4, 3]}],
            "outputs": [{"name": "fake_output", "datatype": "UINT64", "shape": [-1, 1]}],
        }
        assert get(server, "/v2/models/m") == (200, expected)
        assert get(server, "/v2/models/m/versions/1") == (200, expected)
        assert get(server, "/v2/models/m/ready") == (200, None)

    def test_configuration_carries_size_instances_and_labels(self, server: FakeServer) -> None:
        labelled = replace(MODEL, instances=3, dynamic_batching=True, compute="emulated")
        server.install(FakeScript((MODEL, replace(labelled, name="d"))))
        plain, dynamic = (get(server, f"/v2/models/{name}/config")[1] for name in ("m", "d"))
        assert plain["max_batch_size"] == 8
        assert "dynamic_batching" not in plain
        assert dynamic["dynamic_batching"]["preferred_batch_size"] == [8]
        assert [group["count"] for group in dynamic["instance_group"]] == [3]
        assert dynamic["parameters"] == {"b2g_compute": {"string_value": "emulated"}}
        assert plain["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [4, 3]}]

    def test_unknown_model(self, server: FakeServer) -> None:
        unknown = {"error": "Request for unknown model: 'zz' is not found"}
        assert get(server, "/v2/models/zz") == (404, unknown)
        assert get(server, "/v2/models/zz/config") == (404, unknown)
        assert get(server, "/v2/models/zz/stats") == (400, {"error": "requested model 'zz' is not available"})
        assert get(server, "/v2/models/zz/ready") == (400, {"error": "Model version not ready"})
        assert infer(server, model="zz")[:2] == (404, unknown)

    def test_names_are_unquoted_and_listed(self, server: FakeServer) -> None:
        server.install(FakeScript((MODEL, replace(MODEL, name="a b"))))
        assert get(server, "/v2/models/a%20b")[1]["name"] == "a b"
        connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT_S)
        connection.request("POST", "/v2/repository/index", b"{}")
        assert [model["name"] for model in json.loads(connection.getresponse().read())] == ["m", "a b"]
        connection.close()
        everything = get(server, "/v2/models/stats")[1]["model_stats"]
        assert [model["name"] for model in everything] == ["m", "a b"]

    def test_statistics_before_any_request(self, server: FakeServer) -> None:
        zero = {"count": 0, "ns": 0}
        names = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output")
        assert stats(server) == {
            "name": "m",
            "version": "1",
            "last_inference": 0,
            "inference_count": 0,
            "execution_count": 0,
            "inference_stats": dict.fromkeys((*names, "cache_hit", "cache_miss"), zero),
            "response_stats": {},
            "batch_stats": [],
            "memory_usage": [],
        }

    def test_answer_carries_the_rows_fingerprints(self, server: FakeServer) -> None:
        status, document, binary = infer(server, rows=3)
        parameters = {"binary_data_size": 24}
        output = {"name": "fake_output", "datatype": "UINT64", "shape": [3, 1], "parameters": parameters}
        assert (status, document) == (
            200,
            {"id": "id-7", "model_name": "m", "model_version": "1", "outputs": [output]},
        )
        assert struct.unpack("<3Q", binary) == (1000, 1001, 1002)

    def test_outputs_of_other_types(self, server: FakeServer) -> None:
        wide, text = FakeTensor("wide", "FP32", (2, 2)), FakeTensor("text", "BYTES", (1,))
        server.install(FakeScript((replace(MODEL, outputs=(wide, text)),)))
        _, document, binary = infer(server, rows=1)
        assert [output["shape"] for output in document["outputs"]] == [[1, 2, 2], [1, 1]]
        mark = struct.pack("<Q", 1000)
        assert binary == mark + bytes(8) + struct.pack("<I", 8) + mark

    def test_json_output_where_binary_is_not_asked_for(self, server: FakeServer) -> None:
        body, _ = message(rows=2)
        start = body.index(b', "parameters": {"binary_data_output"')
        head = body[:start] + b"}"
        connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT_S)
        headers = {"Inference-Header-Content-Length": str(len(head))}
        connection.request("POST", "/v2/models/m/infer", head + payload(2), headers)
        response = connection.getresponse()
        document = json.loads(response.read())
        connection.close()
        assert response.getheader("Inference-Header-Content-Length") is None
        assert document["outputs"][0]["data"] == [1000, 1001]

    def test_model_without_batch_dimension(self, server: FakeServer) -> None:
        server.install(FakeScript((replace(MODEL, max_batch=0),)))
        assert get(server, "/v2/models/m")[1]["inputs"][0]["shape"] == [4, 3]
        assert infer(server, rows=1, shape=[4, 3])[1]["outputs"][0]["shape"] == [1]
        assert infer(server, rows=1)[0] == 400

    @pytest.mark.parametrize(
        ("rows", "changes", "text"),
        [
            (9, {}, "inference request batch-size must be <= 8 for 'm'"),
            (2, {"shape": [2, 4, 5]}, "unexpected shape for input 'x' for model 'm'. Expected [-1, 4, 3]"),
            (2, {"datatype": "INT32"}, "data-type is 'INT32', but model 'm' expects 'FP32'"),
            (2, {"name": "w"}, "unexpected inference input 'w' for model 'm'"),
            (
                2,
                {"shape": [1, 4, 3]},
                "input byte size mismatch for input 'x' for model 'm'. Expected 48, got 96",
            ),
            (2, {"parameters": {"binary_data_size": 40}}, "unexpected additional input data for model 'm'"),
            (2, {"shape": [3, 4, 3], "parameters": {"binary_data_size": 144}}, "Expected 144, got 96"),
            (2, {"parameters": {}}, "needs a binary_data_size"),
        ],
    )
    def test_bad_request(self, server: FakeServer, rows: int, changes: dict[str, Any], text: str) -> None:
        status, document, _ = infer(server, rows, **changes)
        assert status == 400
        assert text in document["error"]
        assert stats(server)["execution_count"] == 0

    @pytest.mark.parametrize("length", ["0", "99999", "abc", None])
    def test_bad_header_length(self, server: FakeServer, length: str | None) -> None:
        connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT_S)
        headers = {} if length is None else {"Inference-Header-Content-Length": length}
        connection.request("POST", "/v2/models/m/infer", message()[0], headers)
        response = connection.getresponse()
        assert response.status == 400
        assert "error" in json.loads(response.read())
        connection.close()

    @pytest.mark.parametrize("document", [b"{", b"[]", b'{"inputs": 3}', b'{"inputs": [7]}', b'"text"'])
    def test_bad_json(self, server: FakeServer, document: bytes) -> None:
        connection = http.client.HTTPConnection(server.address, timeout=TIMEOUT_S)
        headers = {"Inference-Header-Content-Length": str(len(document))}
        connection.request("POST", "/v2/models/m/infer", document, headers)
        response = connection.getresponse()
        assert response.status == 500
        assert json.loads(response.read())["error"].startswith("failed to parse the request JSON buffer")
        connection.close()

    def test_one_connection_carries_many_requests_also_pipelined(self, server: FakeServer) -> None:
        with connect(server) as sock:
            sock.sendall(raw_request(1) + raw_request(2) + b"GET /v2 HTTP/1.1\r\nHost: f\r\nConnection: close\r\n\r\n")
            answers = read_all(sock)
        assert answers.count(b"HTTP/1.1 200") == 3

    def test_no_http_is_refused(self, server: FakeServer) -> None:
        with connect(server) as sock:
            sock.sendall(b"\x00\x01 nonsense\r\n\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 400")


class TestProcess:
    def test_refuses_a_bad_script_and_keeps_the_old_one(self, server: FakeServer) -> None:
        connection = http.client.HTTPConnection(server.control, timeout=TIMEOUT_S)
        connection.request("POST", "/fake/script", b'{"models": 3}')
        response = connection.getresponse()
        assert (response.status, "models" in json.loads(response.read())["error"]) == (400, True)
        connection.close()
        assert infer(server)[0] == 200

    def test_counters_of_a_kept_model_go_on(self, server: FakeServer) -> None:
        infer(server)
        server.install(SCRIPT)
        infer(server)
        assert stats(server)["execution_count"] == 2

    def test_stops_and_can_be_stopped_twice(self) -> None:
        server = FakeServer.start(SCRIPT)
        server.stop()
        server.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(server.pid, 0)
        with pytest.raises(ServerError):
            server.log()

    def test_dies_with_its_parent(self) -> None:
        program = (
            "import sys, time; from b2gmodel.live.fake import FakeScript, FakeServer;"
            "print(FakeServer.start(FakeScript(())).address, flush=True); time.sleep(600)"
        )
        parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        host, port = parent.stdout.readline().strip().split(":")
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as sock:
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            assert sock.recv(1) == b""  # the kernel closed it: the process is gone
        parent.stdout.close()

    def test_by_hand_from_a_file_until_a_signal(self, tmp_path: Any) -> None:
        path = tmp_path / "script.json"
        path.write_text(SCRIPT.to_json())
        command = [sys.executable, "-m", "b2gmodel.live.fake", "--json-config"]
        running = subprocess.Popen([*command, str(path)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        assert running.stdout is not None
        address = json.loads(running.stdout.readline())["address"]
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_S)
        connection.request("GET", "/v2/health/ready")
        assert connection.getresponse().status == 200
        connection.close()
        running.send_signal(signal.SIGTERM)
        assert running.wait(TIMEOUT_S) == 0
        running.stdout.close()
        missing = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, check=False)
        assert missing.returncode == UsageError.exit_code
        assert missing.stderr.startswith(f"{tmp_path / 'none'}: cannot read the script")

    def test_failed_start_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeScript, "to_json", lambda self: '{"models": 3}')
        with pytest.raises(SetupError, match="the fake server did not start: saw 'models: not a script"):
            FakeServer.start(SCRIPT)
