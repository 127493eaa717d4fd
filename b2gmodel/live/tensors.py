"""Tensors of a batch: what a model declares, what a server answered, and whose row is whose.

Rules: no I/O; an answer that does not agree with what the model declares is refused, never passed on.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from b2gmodel.errors import UsageError

BYTES_PER_ELEMENT: Final[Mapping[str, int]] = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8,
    "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8,
    "FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of one request: its shape is without the batch dimension. -1 is a dimension left open."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one request's tensor. Raises ``UsageError`` for a type of no fixed size."""
        if self.datatype not in BYTES_PER_ELEMENT:
            raise UsageError(
                "a tensor of this type has no fixed size",
                observed=self.datatype,
                allowed=", ".join(BYTES_PER_ELEMENT),
                where=f"tensor {self.name}",
                hint="calibrate with a model whose inputs have fixed-size elements",
            )
        return math.prod(self.shape) * BYTES_PER_ELEMENT[self.datatype]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of an answer.

    ``data`` and ``shape`` are one request's share, without the batch dimension; before the split, the batch's.
    BYTES are packed as the protocol packs them: each element a little-endian 32-bit length and that many bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview


Result = tuple[Tensor, ...]
"""One request's outputs, in the order in which the model declares them."""


def split_batch(
    outputs: Iterable[Tensor], declared: Sequence[TensorSpec], *, rows: int, batched: bool
) -> tuple[Result, ...]:
    """The outputs of a batch, row by row, as views.

    Args:
        outputs: as the server sent them, in any order.
        declared: the model's outputs.
        rows: requests in the batch.
        batched: whether shapes of ``outputs`` start with the batch dimension.

    Raises:
        ValueError: an output is missing, doubled or unknown, or its datatype, shape or length is not as declared.
    """
    specs = {spec.name: spec for spec in declared}
    parts: dict[str, list[Tensor]] = {}
    for output in outputs:
        spec = specs.get(output.name)
        if spec is None or output.name in parts:
            raise ValueError(f"output {output.name!r} is {'unknown' if spec is None else 'there twice'}")
        parts[output.name] = _split(output, spec, rows, batched)
    missing = specs.keys() - parts.keys()
    if missing:
        raise ValueError(f"output {', '.join(sorted(missing))} is missing")
    return tuple(zip(*(parts[spec.name] for spec in declared), strict=True))


def _split(output: Tensor, spec: TensorSpec, rows: int, batched: bool) -> list[Tensor]:
    if output.datatype != spec.datatype:
        raise ValueError(f"output {output.name} is {output.datatype}, declared {spec.datatype}")
    shape = output.shape[1:] if batched else output.shape
    whole = (not batched or output.shape[:1] == (rows,)) and len(shape) == len(spec.shape)
    if not whole or any(dim < 0 or want not in (-1, dim) for dim, want in zip(shape, spec.shape, strict=True)):
        wanted = [rows, *spec.shape] if batched else list(spec.shape)
        raise ValueError(f"output {output.name} has shape {list(output.shape)}, declared {wanted}")
    elements = math.prod(shape)
    if output.datatype == "BYTES":
        datas = _split_bytes(output.data, rows, elements)
    else:
        row_bytes = elements * BYTES_PER_ELEMENT[output.datatype]
        if row_bytes * rows != output.data.nbytes:
            raise ValueError(f"output {output.name} has {output.data.nbytes} bytes, not {rows} rows of {row_bytes}")
        datas = [output.data[row * row_bytes : (row + 1) * row_bytes] for row in range(rows)]
    return [Tensor(output.name, output.datatype, shape, data) for data in datas]


def _split_bytes(data: memoryview, rows: int, elements: int) -> list[memoryview]:
    parts, at = [], 0
    for _ in range(rows):
        begin = at
        for _ in range(elements):
            if at + 4 > data.nbytes:
                raise ValueError("a BYTES tensor ends before its last element")
            (length,) = struct.unpack_from("<I", data, at)
            at += 4 + length
            if at > data.nbytes:
                raise ValueError("a BYTES element is longer than its tensor")
        parts.append(data[begin:at])
    if at != data.nbytes:
        raise ValueError(f"{data.nbytes - at} bytes after the last BYTES element")
    return parts
