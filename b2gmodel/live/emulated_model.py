"""Triton Python-backend model whose compute is emulated: it reads its input, then holds an instance for S(k).

Runs inside the server's own stub process, never in ours: it may import nothing of this package. All that it
knows comes from its model's configuration: the parameters ``b2g_s0_ns`` and ``b2g_s1_ns``.

An execution of requests that carry k rows in total takes the time to read them once, at memory speed, plus
``s0 + s1 k``, which passes asleep: as on a GPU, the processors are free meanwhile. Each row's result starts
with the fingerprint of the row received (see ``b2gmodel.live.workloads.fingerprint``); the rest is zero.
"""

from __future__ import annotations

import ctypes
import json
import math
import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

PR_SET_TIMERSLACK: Final = 29
M_TRIM_THRESHOLD: Final = -1
M_MMAP_MAX: Final = -4
NS_PER_S: Final = 1_000_000_000


def fingerprints(batch: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Fingerprints of the rows of a batch, shape [k, 4]. Reads every byte of the batch once.

    Rows of a multiple of eight bytes are read in place; others are first copied into padded ones.
    """
    rows = np.ascontiguousarray(batch).reshape(len(batch), -1).view(np.uint8)
    heads = np.zeros((len(rows), 4), np.uint8)
    heads[:, : rows.shape[1]] = rows[:, :4]
    if rows.shape[1] % 8:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8)))
    mixed = np.bitwise_xor.reduce(rows.view("<u8"), axis=1)
    words = (mixed ^ (mixed >> np.uint64(32))).astype("<u4")
    return np.hstack([heads.view("<u2"), words[:, None].view("<u2")]).astype(np.float32)


class TritonPythonModel:
    """The interface that the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._s0_ns = int(parameters["b2g_s0_ns"])
        self._s1_ns = int(parameters["b2g_s1_ns"])
        self._input: str = config["input"][0]["name"]
        self._output: str = config["output"][0]["name"]
        self._shape = tuple(int(size) for size in config["output"][0]["dims"])
        libc = ctypes.CDLL(None)
        # The kernel may end a sleep up to 50 us late by default, which would be an error of S(k).
        libc.prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
        # The stub copies each input into memory of its own. Kept instead of returned to the kernel, that memory
        # is not mapped anew for every execution: a device's buffers are allocated once, too.
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

    def execute(self, requests: list[Any]) -> list[Any]:
        batches = [pb_utils.get_input_tensor_by_name(request, self._input).as_numpy() for request in requests]
        marks = [fingerprints(batch) for batch in batches]
        end_ns = time.monotonic_ns() + self._s0_ns + self._s1_ns * sum(map(len, batches))
        responses = [self._response(mark) for mark in marks]
        while (left_ns := end_ns - time.monotonic_ns()) > 0:
            time.sleep(left_ns / NS_PER_S)
        return responses

    def _response(self, mark: npt.NDArray[np.float32]) -> Any:
        results = np.zeros((len(mark), math.prod(self._shape)), np.float32)
        results[:, : mark.shape[1]] = mark
        tensor = pb_utils.Tensor(self._output, results.reshape(len(mark), *self._shape))
        return pb_utils.InferenceResponse(output_tensors=[tensor])
