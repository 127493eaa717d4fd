"""Tensors of the wire format as numpy arrays, and back.

Rules of this module: values arrive as they were sent, or an error says why not. A C-contiguous little-endian
array of a fixed-size type is not copied in either direction; what is copied says so below.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from b2gmodel.errors import UsageError
from b2gmodel.live.messages import Datatype, Frame, TensorSpec, pack_bytes, split_bytes

Buffer: TypeAlias = bytes | bytearray | memoryview
Array: TypeAlias = npt.NDArray[Any]

_DTYPES: Final[dict[Datatype, np.dtype[Any]]] = {
    Datatype.BOOL: np.dtype("?"),
    Datatype.UINT8: np.dtype("<u1"),
    Datatype.UINT16: np.dtype("<u2"),
    Datatype.UINT32: np.dtype("<u4"),
    Datatype.UINT64: np.dtype("<u8"),
    Datatype.INT8: np.dtype("<i1"),
    Datatype.INT16: np.dtype("<i2"),
    Datatype.INT32: np.dtype("<i4"),
    Datatype.INT64: np.dtype("<i8"),
    Datatype.FP16: np.dtype("<f2"),
    Datatype.FP32: np.dtype("<f4"),
    Datatype.FP64: np.dtype("<f8"),
}
_DATATYPES: Final = {dtype: datatype for datatype, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as raw bytes, for what numpy has no type for (BF16) or bytes that are already packed.

    Attributes:
        datatype: the element type.
        shape: the dimensions.
        data: the C-contiguous elements, little-endian.
    """

    datatype: Datatype
    shape: tuple[int, ...]
    data: Buffer


Inputs: TypeAlias = Mapping[str, Array | Tensor]


def pack_inputs(inputs: Inputs) -> tuple[tuple[TensorSpec, ...], list[Buffer]]:
    """The inputs as the tensors of a request and their buffers.

    Copied: arrays that are not C-contiguous or not little-endian, and strings (object, ``S`` or ``U`` arrays
    of bytes or text), which become BYTES.

    Raises:
        UsageError: a dtype that the protocol has no datatype for.
        WireError: a name or shape that the protocol does not allow.
    """
    specs: list[TensorSpec] = []
    buffers: list[Buffer] = []
    for name, value in inputs.items():
        tensor = value if isinstance(value, Tensor) else _tensor(name, value)
        specs.append(TensorSpec(name, tensor.datatype, tensor.shape, memoryview(tensor.data).nbytes))
        buffers.append(tensor.data)
    return tuple(specs), buffers


def unpack(frame: Frame) -> dict[str, Array]:
    """The tensors of a frame by name, as views of its payload.

    Copied: BYTES, to an object array of ``bytes``, and BF16, widened to float32, which holds each value.
    """
    return {spec.name: _array(spec, part) for spec, part in frame.tensors()}


def _tensor(name: str, array: Array) -> Tensor:
    if not isinstance(array, np.ndarray):
        seen = type(array).__name__
        raise UsageError("not an input", observed=seen, allowed="a numpy array or a Tensor", where=name)
    if array.dtype.kind in "OSU":
        elements = [_element(name, element) for element in array.reshape(-1).tolist()]
        return Tensor(Datatype.BYTES, array.shape, pack_bytes(elements))
    little = array.dtype.newbyteorder("<")
    datatype = _DATATYPES.get(little)
    if datatype is None:
        allowed = "bool, integers, float16, float32, float64, or arrays of bytes or text"
        raise UsageError("no datatype for this array", observed=str(array.dtype), allowed=allowed, where=name)
    flat = np.ascontiguousarray(array, dtype=little).reshape(-1)
    return Tensor(datatype, array.shape, flat.view(np.uint8).data)


def _element(name: str, element: object) -> bytes:
    if isinstance(element, bytes):
        return element
    if isinstance(element, str):
        with contextlib.suppress(UnicodeEncodeError):
            return element.encode()
    seen = ascii(element)[:64]
    raise UsageError(
        "an object array holds something else", observed=seen, allowed="bytes or encodable text", where=name
    )


def _array(spec: TensorSpec, part: memoryview) -> Array:
    if spec.datatype is Datatype.BYTES:
        strings = np.empty(spec.elements, dtype=object)
        strings[:] = [bytes(element) for element in split_bytes(part, spec.elements, where=spec.name)]
        return strings.reshape(spec.shape)
    if spec.datatype is Datatype.BF16:
        upper = np.frombuffer(part, "<u2").astype("<u4") << 16
        return upper.view("<f4").reshape(spec.shape)
    return np.frombuffer(part, _DTYPES[spec.datatype]).reshape(spec.shape)
