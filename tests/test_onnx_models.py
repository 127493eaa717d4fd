"""The reference models as ONNX graphs: counts as published, shapes and results as onnxruntime has them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from b2gmodel.errors import SetupError, UsageError
from b2gmodel.live import model_cache
from b2gmodel.live.model_cache import MODULES, builder_of, model_file
from b2gmodel.live.onnx_counts import Counts, count
from b2gmodel.live.onnx_graphs import Net
from b2gmodel.live.workloads import load_workloads

# Trained parameters and those left when normalisations are folded; multiply-adds at the published input size.
# torchvision documents 25,557,032 and 4.09 G, and 3,504,872 and 0.30 G; YOLOv5 (v6, v7) prints 7,235,389 and, fused,
# 7,225,885 with 16.4 to 16.6 GFLOPs of two each; YOLOv8 3,157,200 and, fused, 3,151,904 with 8.7.
PUBLISHED = {
    "resnet50": ((3, 224, 224), 25_557_032, None, 4.09e9),
    "mobilenetv2": ((3, 224, 224), 3_504_872, None, 0.30e9),
    "yolov5s": ((3, 640, 640), 7_235_389, 7_225_885, 8.25e9),
    "yolov8n": ((3, 640, 640), 3_157_200, 3_151_904, 4.35e9),
}


@pytest.mark.parametrize("name", MODULES)
def test_counts_are_the_published_ones(name: str) -> None:
    shape, parameters, folded, multiply_adds = PUBLISHED[name]
    counted = count(builder_of(name)(shape, 1))
    assert counted.parameters == parameters
    assert folded in (None, counted.folded_parameters)
    assert counted.multiply_adds == pytest.approx(multiply_adds, rel=0.01)


@pytest.mark.parametrize("name", MODULES)
def test_onnxruntime_runs_it_as_the_table_has_it(name: str) -> None:
    workload = load_workloads()[name]
    model = builder_of(name)(workload.input_shape, 1)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (given,), (result,) = session.get_inputs(), session.get_outputs()
    assert (given.name, given.shape) == ("input", ["batch", *workload.input_shape])
    assert (result.name, result.shape) == ("real_output", ["batch", *workload.output_shape])
    images = np.random.default_rng(2).random((3, *workload.input_shape), dtype=np.float32)
    (three,) = session.run(None, {"input": images})
    assert three.shape == (3, *workload.output_shape)
    assert np.isfinite(three).all()
    assert three.std() > 0.1
    (last,) = session.run(None, {"input": images[2:]})
    if workload.output_shape == (1000,):
        np.testing.assert_allclose(last[0], three[2], rtol=1e-3, atol=1e-3)  # a row does not depend on its batch
        assert not np.allclose(three[0], three[1], rtol=1e-3)


def test_detections_are_the_best_boxes() -> None:
    workload = load_workloads()["yolov8n"]
    model = builder_of("yolov8n")((3, 128, 128), 1)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input": np.random.default_rng(3).random((2, 3, 128, 128), dtype=np.float32)})
    assert found.shape == (2, *workload.output_shape)
    scores, labels = found[:, :, 4], found[:, :, 5]
    assert (np.diff(scores, axis=1) <= 0).all()
    assert ((scores > 0) & (scores < 1)).all()
    assert set(np.unique(labels)) <= set(range(80))
    assert ((found[:, :, :2] > -128) & (found[:, :, :2] < 256)).all()


def test_counting_by_hand() -> None:
    net = Net("hand", (3, 8, 8), seed=1)
    x = net.norm(net.conv("input", 4, 3, 2))  # 4 * 27 weights, 4 * 2 of the normalisation; 4 * 4 * 4 * 27
    x = net.conv(x, 4, 3, groups=4, bias=True)  # 4 * 9 and 4; 4 * 4 * 4 * 9
    pooled = net.add("Flatten", [net.add("GlobalAveragePool", [x], 4)], 4)
    counted = count(net.model(net.linear(pooled, 5), [5]))  # 5 * 4 and 5; 5 * 4
    assert counted == Counts(
        108 + 8 + 40 + 25,
        108 + 4 + 40 + 25,
        64 * 27 + 64 * 9 + 20,
    )


def test_a_layer_of_unknown_shape_is_not_counted_as_nothing() -> None:
    weight = numpy_helper.from_array(np.zeros((2, 3, 1, 1), np.float32), "w")
    ends = [
        helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["batch", c, "h", "h"])
        for n, c in (("x", 3), ("y", 2))
    ]
    nodes = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("Relu", ["c"], ["y"])]
    model = helper.make_model(helper.make_graph(nodes, "open", ends[:1], ends[1:], [weight]))
    with pytest.raises(ValueError, match="the shapes of c cannot be inferred"):
        count(model)


def test_a_seed_is_one_model() -> None:
    build = builder_of("mobilenetv2")
    first, again, other = (build((3, 64, 64), seed).SerializeToString(deterministic=True) for seed in (1, 1, 2))
    assert first == again
    assert first != other


class TestCache:
    def test_it_is_built_once_and_named_by_its_bytes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        workload = load_workloads()["mobilenetv2"]
        made = model_file(workload, tmp_path)
        assert made.path.stem.endswith(made.digest)
        assert [path.name for path in tmp_path.iterdir()] == [made.path.name]
        monkeypatch.setattr(model_cache, "builder_of", lambda name: None)  # another build would fail
        assert model_file(workload, tmp_path) == made

    def test_a_damaged_file_is_built_again(self, tmp_path: Path) -> None:
        workload = load_workloads()["mobilenetv2"]
        made = model_file(workload, tmp_path)
        content = made.path.read_bytes()
        made.path.write_bytes(content[:-1] + b"x")
        assert model_file(workload, tmp_path) == made
        assert made.path.read_bytes() == content

    def test_a_workload_without_a_model_is_refused(self) -> None:
        with pytest.raises(UsageError, match="the workload has no real model: saw 'vgg'; allowed: resnet50"):
            builder_of("vgg")

    def test_a_folder_that_cannot_be_written_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(SetupError, match="cannot keep the model's file"):
            model_file(load_workloads()["mobilenetv2"], tmp_path / "file" / "under")
