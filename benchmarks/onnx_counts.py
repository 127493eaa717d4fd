"""The reference models' parameters and results, ours against PyTorch's: ``python benchmarks/onnx_counts.py``.

Counts are compared with torchvision's own modules where those are installed (ResNet-50, MobileNetV2), and every
graph's results on PyTorch with those on onnxruntime. Needs torch, onnx and onnxruntime; none is a dependency of the
tests. Exits 1 where a count differs or results are more than 1e-3 apart, 2 where torch is missing.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from b2gmodel.live.model_cache import MODULES, model_file
from b2gmodel.live.onnx_counts import count
from b2gmodel.live.workloads import load_workloads

BAR = 1e-3
TORCHVISION = {"resnet50": "resnet50", "mobilenetv2": "mobilenet_v2"}
# Boxes with the same score may come in either order: only their scores are compared.
SCORES = {"yolov5s": 4, "yolov8n": 4}


def main() -> int:
    if find_spec("torch") is None:
        print("PyTorch is not installed: pip install torch torchvision", file=sys.stderr)
        return 2
    import onnx
    import onnxruntime

    from b2gmodel.live.torch_graph import TorchGraph

    worst, all_equal = 0.0, True
    print("model        parameters  torch's own   G multiply-adds  largest difference of results")
    with tempfile.TemporaryDirectory() as folder:
        for name in MODULES:
            workload = load_workloads()[name]
            file = str(model_file(workload, Path(folder)).path)
            counted, theirs = count(onnx.load(file)), _torchvision(name)
            images = np.random.default_rng(1).random((2, *workload.input_shape), dtype=np.float32)
            (expected,) = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]).run(
                None, {"input": images}
            )
            found = TorchGraph(file, "cpu", 1)(images)
            if name in SCORES:
                expected, found = (each[:, :, SCORES[name]] for each in (expected, found))
            apart = float(np.abs(found - expected).max() / np.abs(expected).max())
            worst = max(worst, apart)
            all_equal &= theirs in (None, counted.parameters)
            own = "not installed" if theirs is None else f"{theirs:,}"
            print(
                f"{name:<11}  {counted.parameters:>10,}  {own:>13}  {counted.multiply_adds / 1e9:>14.3f}  {apart:.1e}"
            )
    held = all_equal and worst <= BAR
    print(json.dumps({"name": "onnx_counts", "value": worst, "bar": BAR, "held": held, "counts_equal": all_equal}))
    return 0 if held else 1


def _torchvision(name: str) -> int | None:
    """Parameters of torchvision's module; None where it has none, or is not installed."""
    if name not in TORCHVISION or find_spec("torchvision") is None:
        return None
    import torchvision

    module = getattr(torchvision.models, TORCHVISION[name])(weights=None)
    return sum(parameter.numel() for parameter in module.parameters())


if __name__ == "__main__":
    sys.exit(main())
