"""The wire format: messages whole, byte by byte, with trailing bytes; what is refused; where bytes land."""

from __future__ import annotations

import importlib.util
import itertools
import re
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2gmodel.errors import B2GError, UsageError
from b2gmodel.live import wire
from b2gmodel.live.wire import (
    FROM_CLIENT,
    FROM_PROXY,
    LOOKAHEAD_BYTES,
    Cancel,
    Datatype,
    ErrorCode,
    Failure,
    Frame,
    FrameReader,
    Kind,
    Limits,
    Message,
    Request,
    Result,
    TensorSpec,
    WireError,
    encode,
    pack_bytes,
    split_bytes,
)

ROOT = Path(__file__).resolve().parent.parent
ANY = FROM_CLIENT | FROM_PROXY
PIXELS = bytes(range(48))
WORDS = pack_bytes([b"one", b"", b"three"])
IMAGE = TensorSpec("image", Datatype.FP32, (1, 3, 4), 48)
TEXT = TensorSpec("text", Datatype.BYTES, (3,), len(WORDS))
EMPTY = TensorSpec("empty", Datatype.INT64, (0, 7), 0)

MESSAGES: list[tuple[Message, list[bytes]]] = [
    (Request(1, "resnet50", None, (IMAGE,)), [PIXELS]),
    (Request(2, "größe", 5_000_000, (IMAGE, TEXT, EMPTY)), [PIXELS, WORDS, b""]),
    (Request(2**64 - 1, "only-empty", 2**63 - 1, (EMPTY,)), [b""]),
    (Request(3, "m" * 3000, None, (IMAGE,)), [PIXELS]),
    (Result(4, (TEXT, IMAGE)), [WORDS, PIXELS]),
    (Result(5, (TensorSpec("scalar", Datatype.BOOL, (), 1),)), [b"\x01"]),
    (Failure(6, ErrorCode.BUSY, "queue full: saw 256; allowed: 256"), []),
    (Failure(None, ErrorCode.DRAINING, ""), []),
    (Cancel(7), []),
]
IDS = [f"{type(message).__name__}-{i}" for i, (message, _) in enumerate(MESSAGES)]


def to_bytes(message: Message, payloads: list[bytes]) -> bytes:
    return b"".join(encode(message, payloads))


def own(head: Request | Result) -> memoryview:
    return memoryview(bytearray(head.payload_bytes))


def new_reader(limits: Limits | None = None, accepts: frozenset[Kind] = ANY) -> FrameReader:
    return FrameReader(own, accepts=accepts, limits=limits or Limits())


def plain(frames: list[Frame]) -> list[tuple[Message, list[bytes]]]:
    return [(frame.message, [bytes(part) for _, part in frame.tensors()]) for frame in frames]


def read(data: bytes, limits: Limits | None = None, accepts: frozenset[Kind] = ANY) -> list[Frame]:
    reader = new_reader(limits, accepts)
    frames = list(reader.feed(data))
    reader.finish()
    return frames


@pytest.mark.parametrize("case", MESSAGES, ids=IDS)
class TestEveryMessage:
    def test_whole(self, case: tuple[Message, list[bytes]]) -> None:
        assert plain(read(to_bytes(*case))) == [case]

    def test_byte_by_byte(self, case: tuple[Message, list[bytes]]) -> None:
        reader = new_reader()
        data = to_bytes(*case)
        frames: list[Frame] = []
        for i in range(len(data)):
            assert not frames, f"complete {len(data) - i} bytes early"
            frames += reader.feed(data[i : i + 1])
        reader.finish()
        assert plain(frames) == [case]

    def test_trailing_bytes_are_the_next_message(self, case: tuple[Message, list[bytes]]) -> None:
        first = to_bytes(*case)
        for other in MESSAGES:
            second = to_bytes(*other)
            for kept in (1, 39, len(second) - 1):
                reader = new_reader()
                assert plain(list(reader.feed(first + second[:kept]))) == [case]
                assert plain(list(reader.feed(second[kept:]))) == [other]
                reader.finish()

    def test_an_end_within_it_is_an_error(self, case: tuple[Message, list[bytes]]) -> None:
        data = to_bytes(*case)
        for kept in range(1, len(data)):
            reader = new_reader()
            assert list(reader.feed(data[:kept])) == []
            with pytest.raises(WireError, match="closed within a frame"):
                reader.finish()

    def test_trailing_rubbish_costs_no_frame_before_it(self, case: tuple[Message, list[bytes]]) -> None:
        reader = new_reader()
        frames = reader.feed(to_bytes(*case) + b"GET / HTTP/1.1")
        assert plain([next(frames)]) == [case]
        with pytest.raises(WireError, match="not this protocol"):
            next(frames)


def test_all_messages_in_one_stream_in_pieces_of_any_size() -> None:
    stream = b"".join(to_bytes(*case) for case in MESSAGES)
    for size in (2, 3, 7, 39, 41, 511, 512, 513, len(stream)):
        reader = new_reader()
        frames = [f for at in range(0, len(stream), size) for f in reader.feed(stream[at : at + size])]
        reader.finish()
        assert plain(frames) == MESSAGES


names = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=20)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[tuple[TensorSpec, ...], list[bytes]]:
    specs, payloads = [], []
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        datatype = draw(st.sampled_from(Datatype))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        count = 1
        for size in shape:
            count *= size
        if datatype.item_bytes is None:
            payload = pack_bytes(draw(st.lists(st.binary(max_size=5), min_size=count, max_size=count)))
        else:
            payload = draw(st.binary(min_size=count * datatype.item_bytes, max_size=count * datatype.item_bytes))
        specs.append(TensorSpec(name, datatype, shape, len(payload)))
        payloads.append(payload)
    return tuple(specs), payloads


@given(st.lists(tensors(), min_size=1, max_size=4), st.integers(1, 2**64 - 1), st.data())
@settings(max_examples=60, deadline=None)
def test_what_was_sent_is_what_arrives(
    parts: list[tuple[tuple[TensorSpec, ...], list[bytes]]], request_id: int, data: st.DataObject
) -> None:
    sent: list[tuple[Message, list[bytes]]] = []
    for specs, payloads in parts:
        deadline_ns = data.draw(st.none() | st.integers(1, 2**63 - 1))
        head = Request(request_id, "model", deadline_ns, specs) if data.draw(st.booleans()) else None
        sent.append((head or Result(request_id, specs), payloads))
    stream = b"".join(to_bytes(*case) for case in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = new_reader()
    frames = [frame for a, b in itertools.pairwise([0, *cuts, len(stream)]) for frame in reader.feed(stream[a:b])]
    reader.finish()
    assert plain(frames) == sent


class TestWhereBytesLand:
    def test_the_encoder_hands_on_the_callers_own_memory(self) -> None:
        payload = bytearray(PIXELS)
        _, part = encode(Request(1, "m", None, (IMAGE,)), [payload])
        payload[0] = 99
        assert part[0] == 99

    def test_a_payload_is_received_into_the_allocated_memory_and_no_further(self) -> None:
        arena = bytearray(b"\xee" * 60)
        reader = FrameReader(lambda head: memoryview(arena)[4:52], accepts=FROM_CLIENT)
        head, _ = encode(Request(1, "m", None, (IMAGE,)), [PIXELS])
        assert list(reader.feed(head)) == []
        room = reader.get_buffer()
        assert len(room) == 48  # exactly the payload: the next frame's bytes cannot land here
        room[:40] = PIXELS[:40]
        assert list(reader.received(40)) == []
        assert len(reader.get_buffer()) == 8
        reader.get_buffer()[:] = PIXELS[40:]
        (frame,) = reader.received(8)
        assert frame.payload is not None
        assert frame.payload.obj is arena
        assert arena == b"\xee" * 4 + PIXELS + b"\xee" * 8

    def test_the_buffer_for_heads_is_small(self) -> None:
        assert len(new_reader().get_buffer()) == LOOKAHEAD_BYTES

    def test_the_buffer_is_never_empty_while_a_long_head_arrives(self) -> None:
        reader = new_reader()
        data = to_bytes(Request(1, "m" * 60_000, None, (IMAGE,)), [PIXELS])
        frames: list[Frame] = []
        while data:
            room = reader.get_buffer()
            assert 0 < len(room) <= 40 + Limits().head_bytes
            count = min(len(room), len(data))
            room[:count] = data[:count]
            data = data[count:]
            frames += reader.received(count)
        assert len(frames) == 1
        assert len(reader.get_buffer()) == LOOKAHEAD_BYTES

    def test_a_refused_allocation_discards_the_payload_and_goes_on(self) -> None:
        heads: list[Request | Result] = []
        reader = FrameReader(heads.append, accepts=FROM_CLIENT)
        big = TensorSpec("x", Datatype.UINT8, (300_000,), 300_000)
        stream = to_bytes(Request(1, "m", None, (big,)), [bytes(300_000)]) + to_bytes(Cancel(1), [])
        assert list(reader.feed(stream)) == [Frame(heads[0], None), Frame(Cancel(1), None)]

    @pytest.mark.parametrize("view", [memoryview(bytearray(47)), memoryview(bytes(48)), memoryview(bytearray(96))[::2]])
    def test_an_unfit_allocation_is_the_callers_fault(self, view: memoryview) -> None:
        reader = FrameReader(lambda head: view, accepts=FROM_CLIENT)
        with pytest.raises(ValueError, match="writable contiguous view of 48 bytes"):
            list(reader.feed(to_bytes(Request(1, "m", None, (IMAGE,)), [PIXELS])))

    def test_more_bytes_than_there_was_room_for_is_the_callers_fault(self) -> None:
        with pytest.raises(ValueError, match="513 bytes received"):
            list(new_reader().received(LOOKAHEAD_BYTES + 1))


SOUND = to_bytes(Request(9, "m", 5, (IMAGE,)), [PIXELS])
# In SOUND: prefix 0..40, model 40..43, tensor 43..55, dimensions 55..79, name 79..84.


def patched(at: int, layout: str, *values: int) -> bytes:
    data = bytearray(SOUND)
    struct.pack_into(layout, data, at, *values)
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"G", "magic: not this protocol"),
        (patched(4, "<B", 2), "version: unknown protocol version: saw 2; allowed: 1"),
        (patched(5, "<B", 0), "kind: kind of frame not taken here: saw 0"),
        (patched(5, "<B", 2), "kind: kind of frame not taken here: saw 2; allowed: 1 (request), 4 (cancel)"),
        (patched(6, "<H", 1), "code: unused field is not zero"),
        (patched(8, "<Q", 0), "request_id: request id out of range: saw 0"),
        (patched(16, "<Q", 2**63), "deadline_ns: deadline out of range"),
        (patched(24, "<Q", 2**64 - 1), "payload_bytes: payload too large: saw 18446744073709551615"),
        (
            patched(24, "<Q", 47),
            "payload_bytes: payload length does not fit the tensors: saw 47; allowed: 48",
        ),
        (patched(32, "<I", 2**32 - 1), "head_bytes: head too large"),
        (patched(32, "<I", 43), "head_bytes: head ends early"),
        (patched(32, "<I", 45), "head_bytes: bytes left over in the head"),
        (patched(36, "<H", 65_535), "tensors: too many tensors: saw 65535; allowed: at most 64"),
        (patched(36, "<H", 0), "tensors: no tensors"),
        (patched(36, "<H", 2), "head_bytes: head ends early"),
        (patched(38, "<H", 1), "reserved: unused field is not zero"),
        (patched(42, "<B", 0xFF), "model name: not UTF-8"),
        (patched(42, "<B", 10), "model name: not a name"),
        (patched(43, "<B", 0), "datatype: unknown datatype: saw 0"),
        (patched(43, "<B", 15), "datatype: unknown datatype: saw 15"),
        (patched(43, "<B", 12), "image: length does not fit FP64 (1, 3, 4): saw 48; allowed: 96 bytes"),
        (patched(44, "<B", 255), "head_bytes: head ends early"),
        (patched(45, "<H", 65_535), "head_bytes: head ends early"),
        (patched(47, "<Q", 2**64 - 1), "image: length does not fit FP32"),
        (patched(55, "<q", -1), "image: dimension out of range: saw (-1, 3, 4)"),
        (patched(55, "<qqq", 2**63 - 1, 2**63 - 1, 2**63 - 1), "allowed: a shape of at most 2^63-1 bytes"),
        (patched(55, "<qq", 2**62, 4), "image: length does not fit FP32"),  # 2^64 elements: 0 in u64
        (patched(79, "<B", 0xC3), "tensor name: not UTF-8"),
    ],
)
def test_refused(data: bytes, problem: str) -> None:
    reader = new_reader(accepts=FROM_CLIENT)
    with pytest.raises(WireError) as caught:
        list(reader.feed(data))
    assert problem in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.code is ErrorCode.MALFORMED
    assert caught.value.request_id == (9 if len(data) > 40 and data[8] else None)
    for again in (reader.get_buffer, reader.finish, lambda: list(reader.received(0))):
        with pytest.raises(WireError):
            again()


@pytest.mark.parametrize("name", ["", "a\n", "a\x00", "\ud800", "a\u202e"])
def test_names_are_printable_text(name: str) -> None:
    with pytest.raises(WireError, match="model name: not a name"):
        Request(1, name, None, (IMAGE,))
    with pytest.raises(WireError, match="tensor name: not a name"):
        TensorSpec(name, Datatype.UINT8, (1,), 1)


def test_dimensions_are_bounded() -> None:
    with pytest.raises(WireError, match="too many dimensions: saw 33; allowed: at most 32"):
        TensorSpec("x", Datatype.UINT8, (1,) * 33, 1)


def test_a_name_given_twice_is_refused_on_the_wire() -> None:
    a, b = (TensorSpec(name, Datatype.UINT8, (1,), 1) for name in "ab")
    data = to_bytes(Request(1, "m", None, (a, b)), [b"x", b"y"])
    with pytest.raises(WireError, match="tensor name given twice: saw 'a'"):
        read(data.replace(b"b", b"a"))


def test_an_unknown_error_code_is_refused() -> None:
    data = bytearray(to_bytes(Failure(1, ErrorCode.BUSY, "x"), []))
    data[6] = 99
    with pytest.raises(WireError, match="unknown error code: saw 99"):
        read(bytes(data))


@pytest.mark.parametrize(
    "payload",
    [
        struct.pack("<I", 2**32 - 1) + b"abcdefgh",  # runs over the end, into the next request of a batch
        struct.pack("<I", 1) + b"a" + bytes(7),  # bytes left over after the last element
        struct.pack("<I", 10) + b"ab" + bytes(6),  # no room for the second element's length
    ],
)
def test_bytes_elements_must_fill_their_tensor(payload: bytes) -> None:
    spec = TensorSpec("text", Datatype.BYTES, (2,), 12)
    with pytest.raises(WireError, match="text: BYTES") as caught:
        read(to_bytes(Request(3, "m", None, (spec,)), [payload]))
    assert caught.value.request_id == 3


def test_bytes_shapes_are_bounded_before_anything_is_read() -> None:
    with pytest.raises(WireError, match="too many BYTES elements"):
        TensorSpec("text", Datatype.BYTES, (2**40,), 4)
    with pytest.raises(WireError, match="at least 12 bytes"):
        TensorSpec("text", Datatype.BYTES, (3,), 11)
    with pytest.raises(WireError, match="allowed: 0 bytes"):
        TensorSpec("text", Datatype.BYTES, (0,), 4)
    assert [bytes(part) for part in split_bytes(memoryview(WORDS), 3)] == [b"one", b"", b"three"]


def test_limits_bind_the_writer_and_the_reader_alike() -> None:
    frame = to_bytes(Request(1, "m", None, (IMAGE,)), [PIXELS])
    for limits in (Limits(payload_bytes=47), Limits(head_bytes=43)):
        with pytest.raises(WireError, match="too large"):
            encode(Request(1, "m", None, (IMAGE,)), [PIXELS], limits=limits)
        with pytest.raises(WireError, match="too large"):
            read(frame, limits)
    assert len(read(frame, Limits(payload_bytes=48, head_bytes=44, tensors=1))) == 1
    with pytest.raises(UsageError, match="payload_bytes: limit out of range: saw 0"):
        Limits(payload_bytes=0)


def test_the_writer_takes_only_buffers_that_fit() -> None:
    head = Request(1, "m", None, (IMAGE,))
    with pytest.raises(WireError, match="one buffer for each tensor: saw 0; allowed: 1 buffers"):
        encode(head)
    with pytest.raises(WireError, match="image: buffer does not fit its tensor: saw 47"):
        encode(head, [PIXELS[:47]])
    with pytest.raises(WireError, match="not contiguous"):
        encode(head, [memoryview(PIXELS * 2)[::2]])


def test_a_failure_can_always_be_sent() -> None:
    limits = Limits(head_bytes=9)
    (data,) = encode(Failure(1, ErrorCode.UPSTREAM, "aé" * 10), limits=limits)
    (frame,) = read(bytes(data), limits)
    assert frame.message == Failure(1, ErrorCode.UPSTREAM, "aé" * 3)
    (data,) = encode(Failure(1, ErrorCode.UPSTREAM, "lone \ud800"))
    assert plain(read(bytes(data))) == [(Failure(1, ErrorCode.UPSTREAM, "lone ?"), [])]


def test_the_error_is_of_the_projects_tree() -> None:
    assert issubclass(WireError, B2GError)


def fuzzer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("wire_fuzz", ROOT / "benchmarks" / "wire_fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_mutated_frames_raise_the_protocol_error_only() -> None:
    tally = fuzzer().fuzz(3_000, seed=2)
    assert tally.defects == []
    assert {"accepted", "rejected", "cut short", "discarded"} <= set(tally.outcomes)


@pytest.mark.parametrize("check", ["_check_prefix", "_check_bytes_tensors"])
def test_the_fuzzer_finds_a_planted_defect(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(wire, check, broken)
    tally = fuzzer().fuzz(200, seed=3)
    assert tally.defects
    assert "IndexError: planted" in tally.defects[0]


def test_the_documented_bytes_are_the_bytes() -> None:
    text = (ROOT / "docs" / "wire.md").read_text()
    dumps = {
        name: bytes.fromhex("".join(re.findall(r"^([0-9a-f ]+?)(?:  .*)?$", block, re.MULTILINE)))
        for name, block in re.findall(r"```hex-(\w+)\n(.*?)```", text, re.DOTALL)
    }
    x = TensorSpec("x", Datatype.INT16, (1, 2), 4)
    assert dumps == {
        "request": to_bytes(Request(1, "net", 5_000_000, (x,)), [struct.pack("<hh", 1, -2)]),
        "result": to_bytes(Result(1, (TensorSpec("y", Datatype.BYTES, (1,), 6),)), [pack_bytes([b"ok"])]),
        "failure": to_bytes(Failure(1, ErrorCode.BUSY, "queue full"), []),
        "cancel": to_bytes(Cancel(1), []),
    }
