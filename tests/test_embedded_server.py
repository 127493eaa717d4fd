"""The embedded server on the real Triton: what it answers, how long it holds, and that nothing is left."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from b2gmodel.errors import SetupError, UsageError
from b2gmodel.live import server as server_module
from b2gmodel.live import server_guard
from b2gmodel.live.doctor import State, run_checks
from b2gmodel.live.repository import OUTPUT_NAME, TensorSpec, embedded_repository, export_null_model
from b2gmodel.live.server import EmbeddedServer
from b2gmodel.live.workloads import Role, WorkloadTable, fingerprint, load_workloads
from b2gmodel.units import NS_PER_S

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("pytriton") is None, reason="the wheel nvidia-pytriton is not installed"),
]

# Small payloads: these tests are about the server's duties, not about bytes. The odd one has padded rows.
TABLE = """
[tiny]
input_shape = [3, 16, 16]
datatype = "FP32"
output_shape = [8]
s0_ms = 4.0
s1_ms = 1.5
max_batch = 16
instances = 1

[odd]
input_shape = [13]
datatype = "UINT8"
output_shape = [2, 2]
s0_ms = 0.0
s1_ms = 0.5
max_batch = 4
instances = 1
"""
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> WorkloadTable:
    path = tmp_path_factory.mktemp("table") / "table.toml"
    path.write_text(TABLE)
    return load_workloads(path)


@pytest.fixture(scope="module")
def server(table: WorkloadTable) -> Iterator[EmbeddedServer]:
    with EmbeddedServer.start(table) as running:
        yield running


def get(address: tuple[str, int], path: str) -> Any:
    with contextlib.closing(HTTPConnection(*address, timeout=PATIENCE_S)) as connection:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read())


def infer(address: tuple[str, int], table: WorkloadTable, name: str, role: Role, payloads: list[bytes]) -> bytes:
    """The results of a batch, one after another."""
    workload = table[name]
    shape = [len(payloads), *workload.input_shape]
    body = b"".join(payloads)
    tensor: dict[str, object] = {"name": "input", "datatype": workload.datatype, "shape": shape}
    tensor["parameters"] = {"binary_data_size": len(body)}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    with contextlib.closing(HTTPConnection(*address, timeout=PATIENCE_S)) as connection:
        path = f"/v2/models/{workload.model_name(role)}/infer"
        connection.request("POST", path, head + body, {"Inference-Header-Content-Length": str(len(head))})
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200, content
        output = json.loads(content[: int(answer.headers["Inference-Header-Content-Length"])])["outputs"][0]
        assert output["name"] == OUTPUT_NAME
        assert output["shape"] == [len(payloads), *workload.output_shape]
        return content[int(answer.headers["Inference-Header-Content-Length"]) :]


def payloads_of(table: WorkloadTable, name: str, k: int, seed: int) -> list[bytes]:
    return [random.Random(f"{seed} {row}").randbytes(table[name].payload_bytes) for row in range(k)]


def rows(results: bytes, k: int) -> list[bytes]:
    size = len(results) // k
    return [results[row * size : (row + 1) * size] for row in range(k)]


@pytest.mark.parametrize("role", [Role.UNBATCHED, Role.DYNAMIC])
@pytest.mark.parametrize(("name", "k"), [("tiny", 1), ("tiny", 16), ("odd", 3)])
def test_each_result_carries_its_own_payloads_fingerprint(
    server: EmbeddedServer, table: WorkloadTable, name: str, k: int, role: Role
) -> None:
    payloads = payloads_of(table, name, k, seed=k)
    results = infer(server.http_address, table, name, role, payloads)
    expected = [fingerprint(payload).ljust(table[name].result_bytes, b"\0") for payload in payloads]
    assert rows(results, k) == expected
    assert len(set(expected)) == k


def test_null_answers_zeros_of_the_right_shape(server: EmbeddedServer, table: WorkloadTable) -> None:
    results = infer(server.http_address, table, "tiny", Role.NULL, payloads_of(table, "tiny", 5, seed=0))
    assert results == bytes(5 * table["tiny"].result_bytes)


def executions(server: EmbeddedServer, model: str) -> dict[int, tuple[int, int]]:
    """Count and compute_infer ns of the executions so far, by batch size."""
    stats = get(server.http_address, f"/v2/models/{model}/stats")["model_stats"][0]
    return {
        entry["batch_size"]: (entry["compute_infer"]["count"], entry["compute_infer"]["ns"])
        for entry in stats["batch_stats"]
    }


@pytest.mark.parametrize("k", [2, 7])
def test_an_execution_holds_the_instance_for_the_service_time(
    server: EmbeddedServer, table: WorkloadTable, k: int
) -> None:
    for seed in range(3):
        infer(server.http_address, table, "tiny", Role.UNBATCHED, payloads_of(table, "tiny", k, seed))
    count, infer_ns = executions(server, "tiny")[k]
    assert count == 3
    assert infer_ns / count >= table["tiny"].service_time_s(k) * NS_PER_S


def test_the_dynamic_entry_merges_and_the_other_does_not(server: EmbeddedServer, table: WorkloadTable) -> None:
    clients = 12

    def one(seed: int, role: Role) -> bool:
        payloads = payloads_of(table, "tiny", 1, seed)
        return infer(server.http_address, table, "tiny", role, payloads)[:16] == fingerprint(payloads[0])

    with ThreadPoolExecutor(clients) as pool:
        for role in (Role.UNBATCHED, Role.DYNAMIC):
            assert all(pool.map(one, range(3 * clients), [role] * 3 * clients))
    merged = executions(server, "tiny_dynamic")
    assert max(merged) > 1
    for size, (count, infer_ns) in merged.items():
        assert infer_ns / count >= table["tiny"].service_time_s(size) * NS_PER_S
    assert set(executions(server, "tiny")) <= {1, 2, 7, 16}  # the sizes that tests sent


def test_the_server_says_that_its_compute_is_emulated(server: EmbeddedServer, table: WorkloadTable) -> None:
    assert server.compute == "emulated"
    assert get(server.http_address, "/v2") | {"extensions": []} == {
        "name": server.instance_id,
        "version": server.version,
        "extensions": [],
    }
    for role in Role:
        model = table["tiny"].model_name(role)
        assert get(server.http_address, f"/v2/models/{model}")["outputs"][0]["name"] == "emulated_output"
        config = get(server.http_address, f"/v2/models/{model}/config")
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        assert parameters == {
            "b2g_compute": "emulated",
            "b2g_role": role.value,
            "b2g_workload": "tiny",
            "b2g_s0_ns": "0" if role is Role.NULL else "4000000",
            "b2g_s1_ns": "0" if role is Role.NULL else "1500000",
            "b2g_table_digest": server.table_digest,
        }
        assert ("dynamic_batching" in config) is (role is Role.DYNAMIC)


def test_the_trace_extension_writes_monotonic_nanoseconds(server: EmbeddedServer, table: WorkloadTable) -> None:
    def set_trace(setting: Mapping[str, object]) -> None:
        with contextlib.closing(HTTPConnection(*server.http_address, timeout=PATIENCE_S)) as connection:
            connection.request("POST", "/v2/trace/setting", json.dumps(setting))
            assert connection.getresponse().status == 200

    set_trace({"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "log_frequency": "1"})
    before_ns = time.monotonic_ns()
    infer(server.http_address, table, "tiny", Role.NULL, payloads_of(table, "tiny", 1, seed=0))
    after_ns = time.monotonic_ns()
    set_trace({"trace_level": ["OFF"]})
    events = json.loads(server.trace_file.with_name(server.trace_file.name + ".0").read_text())
    stamps = {stamp["name"]: stamp["ns"] for event in events for stamp in event.get("timestamps", ())}
    assert before_ns < stamps["HTTP_RECV_START"] < stamps["COMPUTE_START"] < stamps["COMPUTE_END"] < after_ns


def test_a_start_that_fails_shows_the_servers_own_words(
    table: WorkloadTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def broken(*arguments: Any) -> dict[str, str]:
        return {**embedded_repository(*arguments), "odd/1/model.py": "raise RuntimeError('a planted defect')\n"}

    monkeypatch.setattr(server_module, "embedded_repository", broken)
    with pytest.raises(SetupError, match="a planted defect") as caught:
        EmbeddedServer.start(table, ["odd"])
    assert "exit code 1 before it was ready" in caught.value.line()
    assert "failed to load all models" in caught.value.line()
    assert list(tmp_path.iterdir()) == []


def test_a_start_that_takes_too_long_is_given_up(table: WorkloadTable) -> None:
    with pytest.raises(SetupError, match=r"not ready after 0\.01 s"):
        EmbeddedServer.start(table, ["odd"], timeout_s=0.01)


def test_a_port_that_is_taken_costs_a_second_try(
    table: WorkloadTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard is given a taken port first: the server must come up on others."""
    guard = tmp_path / "guard.py"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        guard.write_text(
            textwrap.dedent(
                f"""
                import sys
                from importlib.util import module_from_spec, spec_from_file_location
                spec = spec_from_file_location("server_guard", {server_guard.__file__!r})
                server_guard = module_from_spec(spec)
                spec.loader.exec_module(server_guard)
                free, tries = server_guard.free_ports, []
                def choose():
                    tries.append(1)
                    return free() | ({{"http_port": {taken.getsockname()[1]}}} if len(tries) == 1 else {{}})
                server_guard.free_ports = choose
                sys.exit(server_guard.main())
                """
            )
        )
        monkeypatch.setattr(server_module, "_GUARD_PROGRAM", guard)
        with EmbeddedServer.start(table, ["odd"]) as server:
            assert server.http_address[1] != taken.getsockname()[1]


def test_what_is_missing_is_said(table: WorkloadTable, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no such workload"):
        EmbeddedServer.start(table, ["vgg"])
    with monkeypatch.context() as patch:
        patch.setattr(server_module, "python_version", lambda: "3.99")
        with pytest.raises(SetupError, match=r"no part for this Python: saw '3\.99'; allowed: 3\.8, 3\.9, 3\.10"):
            EmbeddedServer.start(table)
    with monkeypatch.context() as patch:
        patch.setattr(server_module, "find_spec", lambda name: None)
        with pytest.raises(SetupError, match=r"not installed: .*pip install 'b2gmodel\[triton\]'"):
            EmbeddedServer.start(table)


def test_an_exported_null_model_serves_any_outputs(
    table: WorkloadTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export's code, with a numeric and a BYTES output, in the place of one of the embedded server."""
    inputs = [TensorSpec("input", "UINT8", (13,))]
    outputs = [TensorSpec("boxes", "FP16", (-1, 4)), TensorSpec("label", "BYTES", (2,))]
    folder = export_null_model(tmp_path, "odd", inputs, outputs, 4)

    def with_export(table: WorkloadTable, names: Any, import_path: Path, *_: Any) -> dict[str, str]:
        code = (folder / "1" / "model.py").read_text()
        code = code.replace("import json\n", f"import json\nimport sys\nsys.path.insert(0, {str(import_path)!r})\n")
        config = (folder / "config.pbtxt").read_text()
        return {
            **embedded_repository(table, names, import_path),
            "odd_null/1/model.py": code,
            "odd_null/config.pbtxt": config,
        }

    monkeypatch.setattr(server_module, "embedded_repository", with_export)
    with EmbeddedServer.start(table, ["odd"]) as server:
        tensor = {"name": "input", "datatype": "UINT8", "shape": [3, 13], "data": [0] * 39}
        with contextlib.closing(HTTPConnection(*server.http_address, timeout=PATIENCE_S)) as connection:
            connection.request("POST", "/v2/models/odd_null/infer", json.dumps({
                "inputs": [tensor], "outputs": [{"name": "label"}],
            }))  # fmt: skip
            label = json.loads(connection.getresponse().read())["outputs"][0]
            connection.request("GET", "/v2/models/odd_null")
            shapes = {out["name"]: out["shape"] for out in json.loads(connection.getresponse().read())["outputs"]}
    assert label == {"name": "label", "datatype": "BYTES", "shape": [3, 2], "data": [""] * 6}
    assert shapes == {"boxes": [-1, -1, 4], "label": [-1, 2]}


def test_doctor_finds_what_the_server_needs() -> None:
    checks = {check.name: check for check in run_checks(start_server=True)}
    for name in ("Python", "server wheel", "shared libpython", "loopback ports", "server start"):
        assert checks[name].state is State.OK, checks[name]
        assert checks[name].todo is None
    assert checks["server start"].observed.startswith("Triton 2.")
    assert checks["GPU"].ok
    assert all(check.todo for check in checks.values() if not check.ok)
