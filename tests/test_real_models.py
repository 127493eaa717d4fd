"""A real model on the embedded Triton: its answers are onnxruntime's, its records say what computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from b2gmodel.cli import run
from b2gmodel.live.engines import Device, Wish, find_engine
from b2gmodel.live.idle import service_regimes
from b2gmodel.live.model_cache import model_file
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.server import EmbeddedServer
from b2gmodel.live.target import parse_url
from b2gmodel.live.workloads import load_workloads

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(find_spec("pytriton") is None, reason="the wheel nvidia-pytriton is not installed"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with EmbeddedServer.start(
            load_workloads(), ["mobilenetv2"], engine=find_engine(Wish("onnx", Device.CPU))
        ) as up:
            up.file = model_file(load_workloads()["mobilenetv2"])  # type: ignore[attr-defined]
            yield up


def infer(server: EmbeddedServer, model: str, images: np.ndarray) -> np.ndarray:
    tensor = {"name": "input", "datatype": "FP32", "shape": list(images.shape)}
    tensor["parameters"] = {"binary_data_size": images.nbytes}  # type: ignore[assignment]
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    connection = HTTPConnection(*server.http_address, timeout=60)
    headers = {"Inference-Header-Content-Length": str(len(head))}
    connection.request("POST", f"/v2/models/{model}/infer", head + images.tobytes(), headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert answer.status == 200, content
    length = int(answer.headers["Inference-Header-Content-Length"])
    (output,) = json.loads(content[:length])["outputs"]
    assert output["name"] == "real_output"
    return np.frombuffer(content[length:], np.float32).reshape(output["shape"])


@pytest.mark.parametrize("model", ["mobilenetv2", "mobilenetv2_dynamic"])
def test_its_answers_are_onnxruntimes(server: EmbeddedServer, model: str) -> None:
    images = np.random.default_rng(1).random((3, 3, 224, 224), dtype=np.float32)
    session = onnxruntime.InferenceSession(server.file.path, providers=["CPUExecutionProvider"])  # type: ignore[attr-defined]
    (expected,) = session.run(None, {"input": images})
    np.testing.assert_allclose(infer(server, model, images), expected, rtol=1e-4, atol=1e-4)


def test_its_calibration_says_what_computed(
    server: EmbeddedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def passed() -> tuple[()]:
        return ()

    monkeypatch.setattr("b2gmodel.live.sessions.self_test", passed)
    url = "http://{}:{}".format(*server.http_address)
    command = ["calibrate", "--url", url, "--model", "mobilenetv2", "-k", "1", "--budget", "2s", "--name", "real", "-q"]
    assert run([*command, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("calibrated mobilenetv2 (real compute: onnxruntime ")
    assert "emulated" not in said
    model = json.loads((tmp_path / "real.json").read_text())["model"]
    assert model["compute"] == "real"
    assert model["engine"]["provider"] == "CPUExecutionProvider"
    assert model["engine"]["model_digest"] == server.file.digest  # type: ignore[attr-defined]


def test_s_at_idle_and_under_load(server: EmbeddedServer) -> None:
    endpoint = parse_url("http://{}:{}".format(*server.http_address))
    with endpoint.session(()) as address:
        pausing, steady, loaded = run_loop(
            service_regimes(address, "mobilenetv2", 1, flights=2, seconds=0.2, pauses_s=(0.02, 0.0))
        )
    assert (pausing.pause_s, steady.pause_s, loaded.pause_s) == (0.02, 0.0, None)
    assert all(each.service_s > 0 and each.executions >= 5 for each in (pausing, steady, loaded))
    assert set(pausing.gpu.values()) == {None}  # without a GPU nothing is 0
