"""What --compute asks for, what a real engine's entries say of themselves, and that neither is taken for the other."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import builders
import pytest
from cli_bench import Out, complained
from proxy_rig import Held, rig, run
from test_load import answer_all, load

from b2gmodel.errors import SetupError, UsageError
from b2gmodel.live import engines
from b2gmodel.live.calibrate import model_info
from b2gmodel.live.engines import Device, Emulated, Engine, Wish, find_engine, parse_compute
from b2gmodel.live.kserve import ModelSpec, Tensor
from b2gmodel.live.measure import _check_same_model
from b2gmodel.live.model_cache import ModelFile
from b2gmodel.live.repository import embedded_repository, model_links
from b2gmodel.live.server import _environment
from b2gmodel.live.target import Endpoint
from b2gmodel.live.tensors import TensorSpec
from b2gmodel.live.workloads import load_workloads
from b2gmodel.records import ModelInfo, RealEngine, canonical_bytes

ENGINE = Engine("onnx", "1.30.0", "CPUExecutionProvider", None, 2)
FILE = ModelFile(Path("/somewhere/model.onnx"), "a" * 64)


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("emulated", Emulated()),
        ("emulated:my.toml", Emulated(Path("my.toml"))),
        ("onnx", Wish("onnx")),
        ("onnx:cuda", Wish("onnx", Device.CUDA)),
        ("torch:cpu,threads=4", Wish("torch", Device.CPU, 4)),
        ("onnx:threads=2", Wish("onnx", Device.AUTO, 2)),
    ],
)
def test_compute_is_read(text: str, asked: Emulated | Wish) -> None:
    assert parse_compute(text) == asked


@pytest.mark.parametrize(
    "text",
    ["", "emulated:", "onnx:", "onnx:tpu", "torch:threads=0", "onnx:threads=", "onnx:threads=9999", "jax", "real"],
)
def test_other_compute_is_refused(text: str) -> None:
    with pytest.raises(
        UsageError, match="--compute: not a kind of compute: saw .*; allowed: emulated, emulated:FILE, onnx"
    ):
        parse_compute(text)


class TestFinding:
    def test_onnxruntime_says_what_it_runs_on(self) -> None:
        found = find_engine(Wish("onnx", Device.CPU, 3))
        assert (found.name, found.provider, found.device_name, found.threads) == (
            "onnx",
            "CPUExecutionProvider",
            None,
            3,
        )
        assert not found.on_gpu
        assert found.sentence == f"onnxruntime {found.version} on CPUExecutionProvider, 3 threads an instance"

    @pytest.mark.parametrize(
        ("answer", "says"),
        [
            (
                {"problem": "no package torch", "missing": "torch"},
                "saw 'no package torch'; install PyTorch: pip install torch",
            ),
            ({"problem": "PyTorch 2 sees no GPU"}, "saw 'PyTorch 2 sees no GPU'; --compute onnx:cpu needs no GPU"),
        ],
    )
    def test_one_that_cannot_is_one_clear_line(
        self, monkeypatch: pytest.MonkeyPatch, answer: dict[str, str], says: str
    ) -> None:
        done = subprocess.CompletedProcess([], 0, stdout=json.dumps(answer) + "\n", stderr="")
        monkeypatch.setattr(engines.subprocess, "run", lambda *_, **__: done)
        with pytest.raises(SetupError) as caught:
            find_engine(Wish("torch", Device.CUDA))
        assert caught.value.line().startswith(f"--compute torch:cuda: the engine cannot compute here: {says}")

    def test_one_that_does_not_answer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engines, "_PROBE", Path("/nonexistent.py"))
        with pytest.raises(SetupError, match="it did not answer"):
            find_engine(Wish("onnx"))

    def test_a_gpu_is_named(self) -> None:
        found = replace(ENGINE, name="torch", version="2.9", provider="cuda", device_name="NVIDIA H200", threads=1)
        assert found.on_gpu
        assert found.sentence == "PyTorch 2.9 on cuda (NVIDIA H200), 1 thread an instance"

    def test_the_command_says_so(self, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engines, "_PROBE", Path("/nonexistent.py"))
        for command in (
            ["calibrate", "--compute", "torch"],
            ["demo", "--compute", "onnx"],
            ["server", "--compute", "onnx"],
        ):
            code, seen = complained(capsys, *command)
            assert code == 2
            assert "the engine cannot compute here" in seen


class TestRepository:
    def test_nothing_real_says_that_it_is_emulated(self) -> None:
        table = load_workloads()
        files = embedded_repository(table, ["yolov8n"], Path("/numpy"), ENGINE, {"yolov8n": FILE}, (Path("/more"),))
        assert not any("emulated" in text for path, text in files.items() if path.endswith(".pbtxt"))
        assert 'output { name: "real_output" data_type: TYPE_FP32 dims: [300, 6] }' in files["yolov8n/config.pbtxt"]
        for key, value in (
            ("b2g_compute", "real"),
            ("b2g_engine", "onnx"),
            ("b2g_provider", "CPUExecutionProvider"),
            ("b2g_threads", "2"),
            ("b2g_model_digest", FILE.digest),
        ):
            for entry in ("yolov8n", "yolov8n_dynamic"):
                assert f'key: "{key}" value {{ string_value: "{value}" }}' in files[f"{entry}/config.pbtxt"]
        assert 'key: "b2g_compute" value { string_value: "none" }' in files["yolov8n_null/config.pbtxt"]
        assert "b2g_engine" not in files["yolov8n_null/config.pbtxt"]
        assert "sys.path[:0] = ['/numpy', '/more']" in files["yolov8n/1/model.py"]
        assert "onnxruntime" in files["yolov8n/1/model.py"]
        assert set(model_links({"yolov8n": FILE}, table)) == {
            "yolov8n/1/model.onnx", "yolov8n_dynamic/1/model.onnx",
        }  # fmt: skip
        for path, text in files.items():
            if path.endswith(".py"):
                compile(text, path, "exec")

    def test_torch_brings_its_graph(self) -> None:
        engine = replace(ENGINE, name="torch", provider="cpu")
        files = embedded_repository(load_workloads(), ["resnet50"], Path("/numpy"), engine, {"resnet50": FILE})
        assert {path for path in files if path.endswith("torch_graph.py")} == {
            "resnet50/1/torch_graph.py", "resnet50_dynamic/1/torch_graph.py",
        }  # fmt: skip

    def test_emulated_entries_say_nothing_of_engines(self) -> None:
        files = embedded_repository(load_workloads(), ["yolov8n"], Path("/numpy"))
        assert not any("b2g_engine" in text or "real_output" in text for text in files.values())

    def test_a_gpu_is_shown_to_a_model_on_one_alone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert _environment()["CUDA_VISIBLE_DEVICES"] == ""
        assert _environment(on_gpu=True)["CUDA_VISIBLE_DEVICES"] == "1"


def spec(parameters: dict[str, str], compute: str = "real") -> ModelSpec:
    return ModelSpec(
        name="resnet50",
        version="1",
        platform="python",
        max_batch_size=32,
        instances=1,
        dynamic_batching=False,
        inputs=(TensorSpec("input", "FP32", (3, 224, 224)),),
        outputs=(TensorSpec("real_output", "FP32", (1000,)),),
        compute=compute,
        parameters=parameters,
    )


SAID = {
    "b2g_engine": "onnx",
    "b2g_engine_version": "1.30.0",
    "b2g_provider": "CPUExecutionProvider",
    "b2g_device_name": "",
    "b2g_threads": "2",
    "b2g_model_digest": "a" * 64,
}
ENDPOINT = Endpoint("127.0.0.1", 8000, True, "b" * 64)


class TestRecords:
    def test_a_record_names_engine_provider_and_model(self) -> None:
        info = model_info(spec(SAID), ENDPOINT)
        assert info.compute == "real"
        assert info.engine == RealEngine(
            name="onnx",
            version="1.30.0",
            provider="CPUExecutionProvider",
            device_name=None,
            threads=2,
            model_digest="a" * 64,
        )

    @pytest.mark.parametrize(
        "said", [{}, SAID | {"b2g_model_digest": "x"}, SAID | {"b2g_engine": "jax"}, SAID | {"b2g_threads": "two"}]
    )
    def test_a_users_own_model_has_no_engine_of_ours(self, said: dict[str, str]) -> None:
        assert model_info(spec(said), ENDPOINT).engine is None

    def test_an_emulated_model_has_none(self) -> None:
        assert model_info(spec(SAID, "emulated"), ENDPOINT).engine is None

    def test_records_without_an_engine_keep_their_bytes(self) -> None:
        info = model_info(spec({}), ENDPOINT)
        assert b"engine" not in canonical_bytes(info)
        with_one = model_info(spec(SAID), ENDPOINT)
        assert b'"model_digest"' in canonical_bytes(with_one)
        assert ModelInfo.model_validate_json(canonical_bytes(with_one)) == with_one

    @pytest.mark.parametrize(
        "change", [{"b2g_provider": "CUDAExecutionProvider"}, {"b2g_model_digest": "c" * 64}, {"b2g_threads": "1"}]
    )
    def test_another_engine_is_not_what_was_calibrated(self, change: dict[str, str]) -> None:
        calibrated, served = (model_info(spec(said), ENDPOINT) for said in (SAID, SAID | change))
        _check_same_model(calibrated, calibrated)
        with pytest.raises(UsageError, match="its engine differs"):
            _check_same_model(calibrated, served)

    def test_an_emulated_one_is_not_a_real_one(self) -> None:
        emulated: Any = builders.calibration().model
        with pytest.raises(UsageError, match="its compute differs"):
            _check_same_model(model_info(spec(SAID), ENDPOINT), emulated.model_copy(update={"compute": "emulated"}))


def test_answers_of_a_real_model_are_not_taken_for_wrong_ones() -> None:
    """They carry no fingerprint: to compare them is refused, and says why."""

    async def test() -> None:
        async with rig(k=2, flights=1, formation_deadline_ns=0) as it:

            def answer(_: int, held: Held) -> None:
                held.answer.set_result(
                    tuple((Tensor("real_output", "FP32", (5,), memoryview(bytes(20))),) for _ in held.rows)
                )

            answering = asyncio.create_task(answer_all(it, answer))
            with pytest.raises(UsageError, match="--verify: answers of a real model carry no fingerprint to compare"):
                await load(it, inputs=(TensorSpec("x", "INT32", (2,)),), verify=True)
            answering.cancel()

    run(test())
