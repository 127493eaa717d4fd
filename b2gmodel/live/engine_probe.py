"""Says which device an engine would compute on: ``python engine_probe.py onnx|torch auto|cpu|cuda``.

A process of its own, because asking a GPU leaves its driver's state and memory in whoever asks. It imports nothing of
this package. It prints one JSON object: ``version``, ``provider`` and ``device_name``, or ``problem`` and ``missing``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

CUDA = "CUDAExecutionProvider"
CPU = "CPUExecutionProvider"


def probe_onnx(device: str) -> dict[str, Any]:
    """onnxruntime's provider: the first that a trivial model really runs on."""
    import onnxruntime
    from onnx import TensorProto, helper

    found = {"version": onnxruntime.__version__, "device_name": None}
    if device == "cpu" or (device == "auto" and CUDA not in onnxruntime.get_available_providers()):
        return {**found, "provider": CPU}
    if hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    wanted = [CUDA] if CUDA in onnxruntime.get_available_providers() else []
    ran = onnxruntime.InferenceSession(model.SerializeToString(), providers=[*wanted, CPU]).get_providers()[0]
    if device == "cuda" and ran != CUDA:
        return {"problem": f"onnxruntime {onnxruntime.__version__} runs on {ran}, not on {CUDA}"}
    return {**found, "provider": ran}


def probe_torch(device: str) -> dict[str, Any]:
    """PyTorch's device."""
    import onnx  # noqa: F401  (the graph is read with it)
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        return {"problem": f"PyTorch {torch.__version__} sees no GPU"}
    provider = "cuda" if has_gpu and device != "cpu" else "cpu"
    name = torch.cuda.get_device_name(0) if provider == "cuda" else None
    return {"version": str(torch.__version__), "device_name": name, "provider": provider}


if __name__ == "__main__":
    try:
        answer = {"onnx": probe_onnx, "torch": probe_torch}[sys.argv[1]](sys.argv[2])
    except ModuleNotFoundError as error:
        answer = {"problem": f"no package {error.name}", "missing": error.name}
    except Exception as error:
        answer = {"problem": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer))
