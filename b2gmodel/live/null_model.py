"""Triton Python-backend model that computes nothing: it takes any input and answers zeros at once.

What a cycle against it costs is transport. It runs inside a server's stub process, ours or a user's: it may
import nothing of this package, and learns its outputs from its own configuration. It never looks at its
input's bytes, only at its batch size. A variable dimension of an output is answered with size 1, a BYTES
output with empty strings.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils

M_TRIM_THRESHOLD: Final = -1
M_MMAP_MAX: Final = -4


class TritonPythonModel:
    """The interface that the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._batched = int(config["max_batch_size"]) > 0
        self._outputs = [
            (
                output["name"],
                tuple(max(1, int(size)) for size in output["dims"]),
                pb_utils.triton_string_to_numpy(output["data_type"]),
            )
            for output in config["output"]
        ]
        # The stub copies each input before we are called; in memory that it keeps, that costs a third as much.
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._response(request) for request in requests]

    def _response(self, request: Any) -> Any:
        batch = (int(request.inputs()[0].shape()[0]),) if self._batched else ()
        tensors = [
            pb_utils.Tensor(name, np.full(batch + shape, b"" if dtype is np.object_ else 0, dtype))
            for name, shape, dtype in self._outputs
        ]
        return pb_utils.InferenceResponse(output_tensors=tensors)
