"""Request payloads for calibration and measurement: made once, each request in flight with memory of its own."""

from __future__ import annotations

import math

import numpy as np

from b2gmodel.live.kserve import ModelSpec
from b2gmodel.live.tensors import TensorSpec
from b2gmodel.live.transport import Payload, Transport

_SEED = 20260101


def make_payloads(model: ModelSpec, count: int, transport: Transport) -> list[Payload]:
    """``count`` distinct payloads, in the memory from which ``transport`` carries them best.

    Values are in [0, 1) for floating types, 0 or 1 for whole numbers and truth values.
    """
    rng = np.random.default_rng(_SEED)
    areas = [transport.payload_memory(count * tensor.row_bytes) for tensor in model.inputs]
    payloads: list[Payload] = []
    for row in range(count):
        parts = []
        for area, tensor in zip(areas, model.inputs, strict=True):
            part = area[row * tensor.row_bytes : (row + 1) * tensor.row_bytes]
            part[:] = fill_row(rng, tensor)
            parts.append(part)
        payloads.append(tuple(parts))
    return payloads


def fill_row(rng: np.random.Generator, tensor: TensorSpec) -> memoryview:
    """One request's values for one input."""
    elements, row_bytes = math.prod(tensor.shape), tensor.row_bytes
    values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
    match tensor.datatype:
        case "FP64":
            values = rng.random(elements)
        case "FP32":
            values = rng.random(elements, dtype=np.float32)
        case "FP16":
            values = rng.random(elements, dtype=np.float32).astype(np.float16)
        case "BF16":
            # The upper half of a float32 is the bfloat16 of the same value, cut.
            values = (rng.random(elements, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
        case _:
            values = rng.integers(0, 2, elements).astype(f"u{row_bytes // max(1, elements)}")
    return np.ascontiguousarray(values).view(np.uint8).data.cast("B")
