"""What client and proxy say to each other, as types; ``wire.py`` turns them into bytes and back.

Rules of this module:

* No socket, clock or numpy here; framing and byte order are ``wire.py``'s, but for KServe's BYTES elements.
* A message that exists is sound: its checks run when it is made, whether by a caller or from the wire.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final, NoReturn, TypeAlias

from b2gmodel.errors import B2GError, UsageError

MAX_RANK: Final = 32
MAX_BYTES_ELEMENTS: Final = 16_384

_LENGTH_U32: Final = struct.Struct("<I")
_U16_MAX: Final = 2**16 - 1
_I64_MAX: Final = 2**63 - 1
_U64_MAX: Final = 2**64 - 1


class Kind(IntEnum):
    """What a frame is."""

    REQUEST = 1
    RESULT = 2
    FAILURE = 3
    CANCEL = 4


class ErrorCode(IntEnum):
    """Why a request has no result."""

    BUSY = 1  # the proxy's queue is full
    DEADLINE = 2  # the request's deadline passed before its result was there
    MALFORMED = 3  # the bytes are not this protocol; the connection ends
    UPSTREAM = 4  # the inference server failed
    DRAINING = 5  # the proxy is shutting down and takes nothing new
    REFUSED = 6  # a sound frame that cannot be served: unknown model, unfit shape or datatype
    CANCELLED = 7  # the client withdrew it
    INTERNAL = 8  # the proxy's own fault


class Datatype(IntEnum):
    """The KServe v2 datatypes; ``name`` is KServe's own spelling."""

    BOOL = 1
    UINT8 = 2
    UINT16 = 3
    UINT32 = 4
    UINT64 = 5
    INT8 = 6
    INT16 = 7
    INT32 = 8
    INT64 = 9
    FP16 = 10
    FP32 = 11
    FP64 = 12
    BF16 = 13
    BYTES = 14

    @property
    def item_bytes(self) -> int | None:
        """Size of one element in bytes; None for BYTES, whose elements carry their own length."""
        return _ITEM_BYTES[self]


_ITEM_BYTES: Final[dict[Datatype, int | None]] = dict(
    zip(Datatype, (1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8, 2, None), strict=True)
)


class WireError(B2GError):
    """Bytes or a message that the protocol does not allow.

    Attributes:
        code: what to answer the peer with.
        request_id: the request that it concerns, where that much could be read.
    """

    exit_code: ClassVar[int] = 3

    def __init__(
        self,
        problem: str,
        *,
        observed: object = None,
        allowed: str | None = None,
        where: str | None = None,
        hint: str | None = None,
        code: ErrorCode = ErrorCode.MALFORMED,
        request_id: int | None = None,
    ) -> None:
        super().__init__(problem, observed=observed, allowed=allowed, where=where, hint=hint)
        self.code = code
        self.request_id = request_id

    @property
    def message(self) -> str:
        """The error as one line, fit for a failure frame."""
        return self.line()


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one frame, kept by the writer and enforced by the reader.

    Attributes:
        payload_bytes: all tensors of a frame together.
        head_bytes: names and shapes, or the error's message.
        tensors: tensors in a frame.
    """

    payload_bytes: int = 64 * 1024 * 1024
    head_bytes: int = 64 * 1024
    tensors: int = 64

    def __post_init__(self) -> None:
        for name, top in (("payload_bytes", _I64_MAX), ("head_bytes", 2**32 - 1), ("tensors", _U16_MAX)):
            value = getattr(self, name)
            if not 1 <= value <= top:
                raise UsageError("limit out of range", observed=value, allowed=f"1..{top}", where=name)

    def check(self, *, payload_bytes: int, head_bytes: int, tensors: int) -> None:
        """Raises ``WireError`` for a frame beyond a bound."""
        if payload_bytes > self.payload_bytes:
            refuse("payload too large", payload_bytes, f"at most {self.payload_bytes} bytes", "payload_bytes")
        if head_bytes > self.head_bytes:
            refuse("head too large", head_bytes, f"at most {self.head_bytes} bytes", "head_bytes")
        if tensors > self.tensors:
            refuse("too many tensors", tensors, f"at most {self.tensors}", "tensors")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a message, without its bytes.

    Attributes:
        name: non-empty printable text, unique within the message.
        datatype: the element type.
        shape: up to ``MAX_RANK`` dimensions, each 0 or more; ``()`` is a scalar.
        byte_length: its bytes in the payload. For BYTES: each element after its own u32 length.

    Raises:
        WireError: a name, shape or length that does not hold to this.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    byte_length: int

    def __post_init__(self) -> None:
        _check_name(self.name, "tensor name")
        if len(self.shape) > MAX_RANK:
            refuse("too many dimensions", len(self.shape), f"at most {MAX_RANK}", self.name)
        if any(not 0 <= size <= _I64_MAX for size in self.shape):
            refuse("dimension out of range", self.shape, "0..2^63-1", self.name)
        item_bytes = self.datatype.item_bytes
        if item_bytes is None:
            self._check_bytes_length()
        elif self.byte_length != self.elements * item_bytes:
            wanted = self.elements * item_bytes
            allowed = f"{wanted} bytes" if wanted <= _I64_MAX else "a shape of at most 2^63-1 bytes"
            refuse(f"length does not fit {self.datatype.name} {self.shape}", self.byte_length, allowed, self.name)

    def _check_bytes_length(self) -> None:
        if self.elements > MAX_BYTES_ELEMENTS:
            refuse("too many BYTES elements", self.shape, f"at most {MAX_BYTES_ELEMENTS}", self.name)
        least = self.elements * _LENGTH_U32.size
        if self.byte_length < least or (self.elements == 0 and self.byte_length):
            allowed = f"at least {least} bytes" if self.elements else "0 bytes"
            refuse(f"length does not fit BYTES {self.shape}", self.byte_length, allowed, self.name)

    @property
    def elements(self) -> int:
        """Number of elements: the product of the shape, 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Request:
    """A request's head: who asks which model for what.

    Attributes:
        request_id: 1..2^64-1, chosen by the client, unique on its connection.
        model: non-empty printable text.
        deadline_ns: time that the proxy has from the arrival of the head, 1..2^63-1 ns; None for no deadline.
        inputs: at least one tensor, names unique; the payload is their bytes in this order.

    Raises:
        WireError: a value that does not hold to this.
    """

    request_id: int
    model: str
    deadline_ns: int | None
    inputs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        _check_id(self.request_id)
        _check_name(self.model, "model name")
        if self.deadline_ns is not None and not 1 <= self.deadline_ns <= _I64_MAX:
            refuse("deadline out of range", self.deadline_ns, "1..2^63-1 ns", "deadline_ns")
        _check_tensors(self.inputs)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The inputs."""
        return self.inputs

    @property
    def payload_bytes(self) -> int:
        """Bytes of all inputs together."""
        return sum(spec.byte_length for spec in self.inputs)


@dataclass(frozen=True, slots=True)
class Result:
    """A result's head: at least one output, names unique; the payload is their bytes in this order."""

    request_id: int
    outputs: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        _check_id(self.request_id)
        _check_tensors(self.outputs)

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The outputs."""
        return self.outputs

    @property
    def payload_bytes(self) -> int:
        """Bytes of all outputs together."""
        return sum(spec.byte_length for spec in self.outputs)


@dataclass(frozen=True, slots=True)
class Failure:
    """A typed error for one request or, with ``request_id`` None, for all that are open on the connection."""

    request_id: int | None
    code: ErrorCode
    message: str

    def __post_init__(self) -> None:
        if self.request_id is not None:
            _check_id(self.request_id)


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client gives up a request. It is still answered once: by its result, or as CANCELLED."""

    request_id: int

    def __post_init__(self) -> None:
        _check_id(self.request_id)


Message: TypeAlias = Request | Result | Failure | Cancel


@dataclass(frozen=True, slots=True)
class Frame:
    """A message that has arrived whole.

    Attributes:
        message: its head.
        payload: its bytes, where ``allocate`` put them; None where there are none or they were discarded.
    """

    message: Message
    payload: memoryview | None

    def tensors(self) -> Iterator[tuple[TensorSpec, memoryview]]:
        """Each tensor with its slice of the payload; nothing where there is no payload."""
        if self.payload is not None and isinstance(self.message, Request | Result):
            begin = 0
            for spec in self.message.tensors:
                yield spec, self.payload[begin : begin + spec.byte_length]
                begin += spec.byte_length


def pack_bytes(elements: Sequence[bytes]) -> bytes:
    """The payload of a BYTES tensor: each element after its length as u32 (KServe v2 binary tensor data)."""
    return b"".join(part for element in elements for part in (_LENGTH_U32.pack(len(element)), element))


def split_bytes(payload: memoryview, elements: int, *, where: str = "BYTES tensor") -> list[memoryview]:
    """The elements of a BYTES tensor, as slices of ``payload``.

    Raises:
        WireError: the lengths inside do not make ``elements`` elements that fill the payload exactly.
    """
    parts: list[memoryview] = []
    at = 0
    for _ in range(elements):
        begin = at + _LENGTH_U32.size
        if begin > len(payload):
            refuse("BYTES payload ends early", len(payload), f"{elements} elements", where)
        at = begin + _LENGTH_U32.unpack_from(payload, begin - _LENGTH_U32.size)[0]
        parts.append(payload[begin:at])
    if at != len(payload):
        refuse("BYTES lengths do not fill the payload", at, f"{len(payload)} bytes", where)
    return parts


def refuse(problem: str, observed: object, allowed: str | None, where: str) -> NoReturn:
    """Raises ``WireError`` with these facts."""
    raise WireError(problem, observed=observed, allowed=allowed, where=where)


def _check_id(request_id: int) -> None:
    if not 1 <= request_id <= _U64_MAX:
        refuse("request id out of range", request_id, "1..2^64-1", "request_id")


def _check_name(name: str, where: str) -> None:
    # Names travel on into URLs, headers and logs: line breaks, controls and lone surrogates stop here.
    if not name or not name.isprintable():
        refuse("not a name", ascii(name[:64]), "non-empty printable text", where)
    if len(name.encode()) > _U16_MAX:
        refuse("name too long", len(name.encode()), f"at most {_U16_MAX} bytes", where)


def _check_tensors(specs: tuple[TensorSpec, ...]) -> None:
    if not specs:
        refuse("no tensors", 0, "at least one", "tensors")
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        refuse("tensor name given twice", twice, "each name once", "tensors")
