"""Triton Python-backend model that computes for real: the ONNX model beside it, on onnxruntime or on PyTorch.

Runs inside the server's own stub process, never in ours: it may import nothing of this package. Its configuration
says which engine, on which provider and with how many threads; where the engine gives another provider, the model
does not load, so that a record never names one that did not run.

An execution's time is all that the answer needs: joining requests, copying to the device and back, computing.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

M_TRIM_THRESHOLD: Final = -1
M_MMAP_MAX: Final = -4

Floats = npt.NDArray[np.float32]


def onnx_model(file: str, provider: str, threads: int) -> Callable[[Floats], Floats]:
    """The model on onnxruntime; ``RuntimeError`` where it would run on another provider than the one named."""
    import onnxruntime

    if provider == "CUDAExecutionProvider" and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(file, options, providers=[provider])
    if session.get_providers()[0] != provider:
        raise RuntimeError(f"onnxruntime runs on {session.get_providers()[0]}, not on {provider}")
    name = session.get_inputs()[0].name
    return lambda batch: session.run(None, {name: batch})[0]


def torch_model(file: str, provider: str, threads: int) -> Callable[[Floats], Floats]:
    """The model on PyTorch, whose providers are its devices."""
    from torch_graph import TorchGraph

    model: Callable[[Floats], Floats] = TorchGraph(file, provider, threads)
    return model


class TritonPythonModel:
    """The interface that the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._input: str = config["input"][0]["name"]
        self._output: str = config["output"][0]["name"]
        file = Path(args["model_repository"]) / args["model_version"] / "model.onnx"
        load = {"onnx": onnx_model, "torch": torch_model}[parameters["b2g_engine"]]
        # The stub copies each input into memory of its own, which it keeps, as the emulated model's does.
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        self._model = load(str(file), parameters["b2g_provider"], int(parameters["b2g_threads"]))

    def execute(self, requests: list[Any]) -> list[Any]:
        batches = [pb_utils.get_input_tensor_by_name(request, self._input).as_numpy() for request in requests]
        results = self._model(batches[0] if len(batches) == 1 else np.concatenate(batches))
        responses, begin = [], 0
        for batch in batches:
            own = pb_utils.Tensor(self._output, results[begin : begin + len(batch)])
            responses.append(pb_utils.InferenceResponse(output_tensors=[own]))
            begin += len(batch)
        return responses
