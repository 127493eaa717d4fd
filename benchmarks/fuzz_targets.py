"""What coverage_fuzz.py feeds: each target takes bytes, and lets nothing out but our own errors' absence."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Final

from b2gmodel.errors import B2GError
from b2gmodel.flights import ExchangeTimes
from b2gmodel.live.http import HttpResponse
from b2gmodel.live.infer import INFERENCE_HEADER_LENGTH, InferMessage
from b2gmodel.live.kserve import ModelSpec, TensorSpec
from b2gmodel.live.wire import FROM_CLIENT, FROM_PROXY, FrameReader, Kind, Limits, Request, Result, WireError, encode
from b2gmodel.records import Calibration, Measurement, Prediction, Verdict
from b2gmodel.store import parse_record

LIMITS: Final = Limits()
_ARENA: Final = memoryview(bytearray(1 << 20))
_MODEL: Final = ModelSpec(
    name="m",
    version="1",
    platform="test",
    max_batch_size=8,
    instances=1,
    dynamic_batching=False,
    inputs=(TensorSpec("x", "INT32", (2,)),),
    outputs=(TensorSpec("y", "INT32", (2,)),),
    compute="fake",
    parameters={},
)
_MESSAGE: Final = InferMessage(_MODEL, 2)


def read_frames(accepts: frozenset[Kind], pieces: list[bytes]) -> None:
    """Every frame that is accepted encodes to the bytes that it was read from; no memory beyond the limit is asked."""
    data, consumed = b"".join(pieces), 0

    def allocate(head: Request | Result) -> memoryview | None:
        assert head.payload_bytes <= LIMITS.payload_bytes, "allocation beyond the limit"
        return _ARENA[: head.payload_bytes] if head.payload_bytes <= len(_ARENA) else None

    reader = FrameReader(allocate, accepts=accepts, limits=LIMITS)
    try:
        for piece in pieces:
            for frame in reader.feed(piece):
                if isinstance(frame.message, Request | Result) and frame.payload is None:
                    return
                again = b"".join(encode(frame.message, [part for _, part in frame.tensors()]))
                assert data[consumed : consumed + len(again)] == again, "accepted frame is not its bytes"
                consumed += len(again)
        reader.finish()
    except WireError:
        pass


def read_answer(data: bytes) -> None:
    """A server's answer to a batch: the JSON's length, then JSON and binary."""
    length = data[:2]
    body = memoryview(data[2:])
    headers = {INFERENCE_HEADER_LENGTH.lower(): str(struct.unpack("<h", length)[0])} if len(length) == 2 else {}
    with contextlib.suppress(B2GError):
        _MESSAGE.decode("1", HttpResponse(200, headers, body, ExchangeTimes()))


def read_record(data: bytes) -> None:
    """A record of any kind."""
    with contextlib.suppress(B2GError):
        parse_record(data, Calibration, Prediction, Measurement, Verdict, where="fuzz")


def _split(data: bytes) -> list[bytes]:
    at = data[0] if data else 0
    return [data[1 : 1 + at], data[1 + at :]]


TARGETS: Final[tuple[Callable[[bytes], None], ...]] = (
    lambda data: read_frames(FROM_CLIENT, [data]),
    lambda data: read_frames(FROM_CLIENT, _split(data)),
    lambda data: read_frames(FROM_PROXY, [data]),
    lambda data: read_frames(FROM_PROXY, _split(data)),
    read_answer,
    read_record,
)


def one_input(data: bytes) -> None:
    """Raises what a defect raises."""
    if data:
        TARGETS[data[0] % len(TARGETS)](data[1:])


def seeds() -> list[bytes]:
    """A sound input for each target."""
    from wire_fuzz import sound_frames

    frames = []
    for accepts, frame in sound_frames():
        first = 0 if accepts is FROM_CLIENT else 2
        frames += [bytes([first]) + frame, bytes([first + 1, 30]) + frame]
    head = b'{"id":"1","outputs":[{"name":"y","datatype":"INT32","shape":[2,2],"parameters":{"binary_data_size":16}}]}'
    record = b'{"record":"b2g.calibration","version":1,"name":"a","points":[{"k":8,"payload_bytes":1}]}'
    return [*frames, bytes([4]) + struct.pack("<h", len(head)) + head + bytes(16), bytes([5]) + record]
