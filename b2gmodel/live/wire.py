"""The wire format between client and proxy, without I/O; ``docs/wire.md`` has it byte by byte.

Rules of this module:

* No socket, clock or numpy: bytes come in through a buffer that the reader hands out and go out as buffers.
* A payload is never joined, and never copied but for the few bytes that arrived together with its head
  (fewer than ``LOOKAHEAD_BYTES``).
* Whatever a peer sends, ``WireError`` is all that leaves the reader, and it is final for the connection.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

from b2gmodel.live.messages import (
    Cancel,
    Datatype,
    ErrorCode,
    Failure,
    Frame,
    Kind,
    Limits,
    Message,
    Request,
    Result,
    TensorSpec,
    WireError,
    pack_bytes,
    refuse,
    split_bytes,
)

__all__ = [
    "DEFAULT_LIMITS",
    "FROM_CLIENT",
    "FROM_PROXY",
    "Allocate",
    "Buffer",
    "Cancel",
    "Datatype",
    "ErrorCode",
    "Failure",
    "Frame",
    "FrameReader",
    "Kind",
    "Limits",
    "Message",
    "Request",
    "Result",
    "TensorSpec",
    "WireError",
    "encode",
    "pack_bytes",
    "split_bytes",
]

MAGIC: Final = b"B2GW"
VERSION: Final = 1
LOOKAHEAD_BYTES: Final = 512
FROM_CLIENT: Final = frozenset({Kind.REQUEST, Kind.CANCEL})
FROM_PROXY: Final = frozenset({Kind.RESULT, Kind.FAILURE})
DEFAULT_LIMITS: Final = Limits()

# magic, version, kind, code, request id, deadline_ns, payload bytes, head bytes, tensors, reserved
_PREFIX: Final = struct.Struct("<4sBBHQQQIHH")
# datatype, rank, name bytes, payload bytes; then the dimensions as i64, then the name
_TENSOR: Final = struct.Struct("<BBHQ")
_NAME_BYTES: Final = struct.Struct("<H")
_WITHOUT_TENSORS: Final = frozenset({Kind.FAILURE, Kind.CANCEL})
_CODES: Final = frozenset(int(code) for code in ErrorCode)
_DATATYPES: Final = frozenset(int(datatype) for datatype in Datatype)
_KIND: Final[dict[type, Kind]] = {
    Request: Kind.REQUEST,
    Result: Kind.RESULT,
    Failure: Kind.FAILURE,
    Cancel: Kind.CANCEL,
}
# Where discarded payloads go. All readers write to it, none reads it.
_DISCARD: Final = memoryview(bytearray(64 * 1024))

Buffer: TypeAlias = bytes | bytearray | memoryview
Allocate: TypeAlias = Callable[[Request | Result], memoryview | None]


def encode(message: Message, payloads: Sequence[Buffer] = (), *, limits: Limits = DEFAULT_LIMITS) -> list[Buffer]:
    """The frame as buffers to gather onto the wire: its head, then ``payloads`` as they are, uncopied.

    Args:
        message: what to send.
        payloads: one C-contiguous buffer for each tensor, in order, as long as its ``byte_length``.
        limits: the receiver's bounds. A failure's message is cut to them.

    Raises:
        WireError: the frame is beyond a limit, or the buffers do not fit the tensors.
    """
    head, tensors = _head(message, limits)
    if len(payloads) != len(tensors):
        refuse("one buffer for each tensor", len(payloads), f"{len(tensors)} buffers", "payloads")
    views = [memoryview(payload) for payload in payloads]
    for spec, view in zip(tensors, views, strict=True):
        if not view.c_contiguous or view.nbytes != spec.byte_length:
            seen = view.nbytes if view.c_contiguous else "not contiguous"
            refuse("buffer does not fit its tensor", seen, f"{spec.byte_length} contiguous bytes", spec.name)
    payload_bytes = sum(spec.byte_length for spec in tensors)
    limits.check(payload_bytes=payload_bytes, head_bytes=len(head), tensors=len(tensors))
    code = int(message.code) if isinstance(message, Failure) else 0
    deadline_ns = (message.deadline_ns or 0) if isinstance(message, Request) else 0
    fields = (message.request_id or 0, deadline_ns, payload_bytes, len(head), len(tensors), 0)
    prefix = _PREFIX.pack(MAGIC, VERSION, _KIND[type(message)], code, *fields)
    return [prefix + head, *(view.cast("B") for view in views if view.nbytes)]


class FrameReader:
    """Turns received bytes into frames; each payload is received where ``allocate`` says.

    Use: receive into ``get_buffer()``, then iterate ``received(n)`` to its end; made for
    ``asyncio.BufferedProtocol`` and ``socket.recv_into``. While a head is awaited the buffer is a small one
    of the reader's own; within a payload it is what that still lacks, so the next frame stays in the socket.

    Args:
        allocate: called with each request's or result's head as soon as it is there. Returns a writable
            contiguous view of exactly ``payload_bytes`` bytes, or None to have the payload discarded.
        accepts: the kinds of frame that this end takes, ``FROM_CLIENT`` or ``FROM_PROXY``.
        limits: bounds on a frame; memory held for a head stays within ``head_bytes``.
    """

    __slots__ = ("_accepts", "_allocate", "_begin", "_buffer", "_end", "_error", "_filling", "_limits")

    def __init__(self, allocate: Allocate, *, accepts: frozenset[Kind], limits: Limits = DEFAULT_LIMITS) -> None:
        self._allocate = allocate
        self._accepts = accepts
        self._limits = limits
        self._buffer = bytearray(LOOKAHEAD_BYTES)
        self._begin = self._end = 0
        self._filling: _Filling | None = None
        self._error: WireError | None = None

    def get_buffer(self) -> memoryview:
        """Where the next bytes belong; never empty. After a ``WireError``: raises it again."""
        if self._error is not None:
            raise self._error
        if self._filling is not None:
            return self._filling.room()
        return memoryview(self._buffer)[self._end :]

    def received(self, count: int) -> Iterator[Frame]:
        """The frames that ``count`` more bytes in the buffer complete, in order.

        Raises:
            WireError: after the frames before it, for bytes that are not this protocol.
            ValueError: ``count`` or what ``allocate`` returned does not fit: the caller's fault.
        """
        if not 0 <= count <= len(self.get_buffer()):
            raise ValueError(f"{count} bytes received into a buffer of {len(self.get_buffer())}")
        if self._filling is not None:
            self._filling.filled += count
        else:
            self._end += count
        try:
            while (frame := self._next()) is not None:
                yield frame
        except WireError as error:
            self._error = error
            raise

    def feed(self, data: Buffer) -> Iterator[Frame]:
        """The frames that ``data`` completes, for bytes at hand (copied). Raises as ``received`` does."""
        rest = memoryview(data)
        while rest:
            room = self.get_buffer()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            yield from self.received(count)

    def finish(self) -> None:
        """To be called when the peer has closed. Raises ``WireError`` if that was within a frame."""
        if self._error is not None:
            raise self._error
        if self._filling is not None or self._begin != self._end:
            concerned = self._filling.message.request_id if self._filling is not None else None
            raise WireError("connection closed within a frame", request_id=concerned)

    def _next(self) -> Frame | None:
        """The next whole frame, or None when more bytes are needed."""
        if self._filling is None:
            message = self._next_message()
            if not isinstance(message, Request | Result):
                return None if message is None else Frame(message, None)
            self._filling = _Filling(message, self._allocate(message))
            early = min(self._end - self._begin, message.payload_bytes)
            self._filling.take(memoryview(self._buffer)[self._begin : self._begin + early])
            self._begin += early
        if self._filling.missing:
            return None
        filling, self._filling = self._filling, None
        frame = Frame(filling.message, filling.view)
        try:
            _check_bytes_tensors(frame)
        except WireError as error:
            error.request_id = filling.message.request_id
            raise
        return frame

    def _next_message(self) -> Message | None:
        """The next whole head, or None, with room made for the rest of it."""
        held = memoryview(self._buffer)[self._begin : self._end]
        if not MAGIC.startswith(bytes(held[: len(MAGIC)])):
            allowed = f"frames that start with {MAGIC!r}"
            refuse("not this protocol", bytes(held[: len(MAGIC)]), allowed, "magic")
        wanted = _PREFIX.size
        if len(held) >= wanted:
            prefix = _Prefix._make(_PREFIX.unpack_from(held))
            try:
                _check_prefix(prefix, self._accepts, self._limits)
                wanted += prefix.head_bytes
                if len(held) >= wanted:
                    self._begin += wanted
                    return _message(prefix, bytes(held[_PREFIX.size : wanted]))
            except WireError as error:
                error.request_id = prefix.request_id or None
                raise
        self._make_room(wanted)
        return None

    def _make_room(self, wanted: int) -> None:
        """Moves the bytes held to the front of a buffer that the whole head fits into."""
        held = bytes(self._buffer[self._begin : self._end])
        size = max(LOOKAHEAD_BYTES, wanted)
        if len(self._buffer) != size:
            self._buffer = bytearray(size)
        self._buffer[: len(held)] = held
        self._begin, self._end = 0, len(held)


class _Filling:
    """A payload on its way into its destination."""

    __slots__ = ("filled", "message", "total", "view")

    def __init__(self, message: Request | Result, view: memoryview | None) -> None:
        self.message = message
        self.total = message.payload_bytes
        self.filled = 0
        if view is not None and (view.readonly or not view.c_contiguous or view.nbytes != self.total):
            raise ValueError(f"allocate must give a writable contiguous view of {self.total} bytes: {view!r}")
        self.view = view.cast("B") if view is not None and view.nbytes and view.format != "B" else view

    @property
    def missing(self) -> int:
        return self.total - self.filled

    def room(self) -> memoryview:
        return _DISCARD[: self.missing] if self.view is None else self.view[self.filled :]

    def take(self, early: memoryview) -> None:
        if self.view is not None and early:
            self.view[: len(early)] = early
        self.filled += len(early)


class _Prefix(NamedTuple):
    magic: bytes
    version: int
    kind: int
    code: int
    request_id: int
    deadline_ns: int
    payload_bytes: int
    head_bytes: int
    tensors: int
    reserved: int


class _Cursor:
    """Reads a head from front to back and refuses to run over its end."""

    __slots__ = ("at", "head")

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.at = 0

    def numbers(self, layout: struct.Struct) -> tuple[int, ...]:
        self._advance(layout.size)
        return layout.unpack_from(self.head, self.at - layout.size)

    def text(self, count: int, where: str) -> str:
        self._advance(count)
        raw = self.head[self.at - count : self.at]
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            refuse("not UTF-8", raw[:64], "UTF-8 text", where)

    def _advance(self, count: int) -> None:
        self.at += count
        if self.at > len(self.head):
            refuse("head ends early", len(self.head), f"at least {self.at} bytes", "head_bytes")


def _head(message: Message, limits: Limits) -> tuple[bytes, tuple[TensorSpec, ...]]:
    """The variable part of a frame in front of its payload, and the tensors that make up the payload."""
    if isinstance(message, Failure):
        text = message.message.encode("utf-8", "replace")[: limits.head_bytes]
        return text.decode("utf-8", "ignore").encode(), ()
    if isinstance(message, Cancel):
        return b"", ()
    tensors = b"".join(_tensor_head(spec) for spec in message.tensors)
    if isinstance(message, Result):
        return tensors, message.outputs
    model = message.model.encode()
    return _NAME_BYTES.pack(len(model)) + model + tensors, message.inputs


def _tensor_head(spec: TensorSpec) -> bytes:
    name = spec.name.encode()
    fixed = _TENSOR.pack(spec.datatype, len(spec.shape), len(name), spec.byte_length)
    return fixed + struct.pack(f"<{len(spec.shape)}q", *spec.shape) + name


def _check_prefix(prefix: _Prefix, accepts: frozenset[Kind], limits: Limits) -> None:
    """What can be known of a frame before its head is read. Raises ``WireError``."""
    if prefix.version != VERSION:
        refuse("unknown protocol version", prefix.version, f"{VERSION}", "version")
    if prefix.kind not in accepts:
        names = ", ".join(f"{kind.value} ({kind.name.lower()})" for kind in sorted(accepts))
        refuse("kind of frame not taken here", prefix.kind, names, "kind")
    limits.check(payload_bytes=prefix.payload_bytes, head_bytes=prefix.head_bytes, tensors=prefix.tensors)
    unused = {
        "reserved": prefix.reserved,
        "code": prefix.code if prefix.kind != Kind.FAILURE else 0,
        "deadline_ns": prefix.deadline_ns if prefix.kind != Kind.REQUEST else 0,
        "payload_bytes": prefix.payload_bytes if prefix.kind in _WITHOUT_TENSORS else 0,
        "tensors": prefix.tensors if prefix.kind in _WITHOUT_TENSORS else 0,
        "head_bytes": prefix.head_bytes if prefix.kind == Kind.CANCEL else 0,
    }
    for field, value in unused.items():
        if value:
            refuse("unused field is not zero", value, "0", field)


def _message(prefix: _Prefix, head: bytes) -> Message:
    """The message of a frame whose prefix has been checked. Raises ``WireError``."""
    cursor = _Cursor(head)
    if prefix.kind == Kind.CANCEL:
        return Cancel(prefix.request_id)
    if prefix.kind == Kind.FAILURE:
        if prefix.code not in _CODES:
            refuse("unknown error code", prefix.code, f"1..{max(_CODES)}", "code")
        text = cursor.text(len(head), "error message")
        return Failure(prefix.request_id or None, ErrorCode(prefix.code), text)
    message: Request | Result
    if prefix.kind == Kind.REQUEST:
        model = cursor.text(cursor.numbers(_NAME_BYTES)[0], "model name")
        inputs = tuple(_tensor(cursor) for _ in range(prefix.tensors))
        message = Request(prefix.request_id, model, prefix.deadline_ns or None, inputs)
    else:
        message = Result(prefix.request_id, tuple(_tensor(cursor) for _ in range(prefix.tensors)))
    if cursor.at != len(head):
        refuse("bytes left over in the head", len(head), f"{cursor.at} bytes", "head_bytes")
    if message.payload_bytes != prefix.payload_bytes:
        allowed = f"{message.payload_bytes}, the sum of the tensors"
        refuse("payload length does not fit the tensors", prefix.payload_bytes, allowed, "payload_bytes")
    return message


def _tensor(cursor: _Cursor) -> TensorSpec:
    datatype, rank, name_bytes, byte_length = cursor.numbers(_TENSOR)
    if datatype not in _DATATYPES:
        refuse("unknown datatype", datatype, f"1..{max(_DATATYPES)}", "datatype")
    shape = cursor.numbers(struct.Struct(f"<{rank}q"))
    return TensorSpec(cursor.text(name_bytes, "tensor name"), Datatype(datatype), shape, byte_length)


def _check_bytes_tensors(frame: Frame) -> None:
    # A length that runs over the end of one request would shift the elements of all others in its batch.
    for spec, part in frame.tensors():
        if spec.datatype is Datatype.BYTES:
            split_bytes(part, spec.elements, where=spec.name)
