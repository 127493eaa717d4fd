"""Fuzzing of the wire format: whatever the bytes, the reader raises the protocol error and nothing else.

    python benchmarks/wire_fuzz.py [--frames 1000000] [--seed 1]

Sound frames of every kind are damaged (bits, fields set to extremes, cuts, insertions, splices of two
frames), then read whole or in pieces. Held where nothing but ``WireError`` leaves the reader, no allocation
beyond the limit is asked for, and each frame that is still accepted encodes to the very bytes that were read.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from b2gmodel.live.wire import (
    FROM_CLIENT,
    FROM_PROXY,
    Cancel,
    Datatype,
    ErrorCode,
    Failure,
    FrameReader,
    Kind,
    Limits,
    Request,
    Result,
    TensorSpec,
    WireError,
    encode,
    pack_bytes,
)

LIMITS = Limits()
PREFIX_BYTES = 40
# (offset, struct format) of the prefix's fields, and the values that break careless readers
FIELDS = (
    (0, "<I"),
    (4, "<B"),
    (5, "<B"),
    (6, "<H"),
    (8, "<Q"),
    (16, "<Q"),
    (24, "<Q"),
    (32, "<I"),
    (36, "<H"),
    (38, "<H"),
)
EXTREMES = (
    0,
    1,
    2,
    39,
    40,
    255,
    256,
    511,
    512,
    65_535,
    65_536,
    2**26,
    2**26 + 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)

Mutation = Callable[[random.Random, bytearray, bytes], None]


@dataclass
class Tally:
    """What became of the frames."""

    outcomes: Counter[str] = field(default_factory=Counter)
    defects: list[str] = field(default_factory=list)


def sound_frames() -> list[tuple[frozenset[Kind], bytes]]:
    """One or more sound frames of every kind, each with the end that takes it."""
    image = TensorSpec("image", Datatype.FP32, (1, 3, 4), 48)
    words = pack_bytes([b"one", b"", b"three"])
    text = TensorSpec("text", Datatype.BYTES, (3,), len(words))
    empty = TensorSpec("empty", Datatype.INT64, (0, 7), 0)
    pixels = bytes(range(48))
    return [
        (FROM_CLIENT, join(encode(Request(1, "resnet50", None, (image,)), [pixels]))),
        (
            FROM_CLIENT,
            join(encode(Request(2, "größe", 5_000_000, (image, text, empty)), [pixels, words, b""])),
        ),
        (FROM_CLIENT, join(encode(Request(2**64 - 1, "m" * 600, 1, (empty,)), [b""]))),
        (FROM_CLIENT, join(encode(Cancel(7)))),
        (FROM_PROXY, join(encode(Result(3, (text, image)), [words, pixels]))),
        (FROM_PROXY, join(encode(Failure(4, ErrorCode.BUSY, "queue full: saw 256; allowed: 256")))),
        (FROM_PROXY, join(encode(Failure(None, ErrorCode.DRAINING, "")))),
    ]


def join(buffers: list[bytes | bytearray | memoryview]) -> bytes:
    """The buffers as one."""
    return b"".join(buffers)


def flip(rng: random.Random, frame: bytearray, _other: bytes) -> None:
    """One to four bits, more often in the prefix than elsewhere."""
    for _ in range(rng.randint(1, 4)):
        top = min(len(frame), PREFIX_BYTES) if rng.random() < 0.5 else len(frame)
        frame[rng.randrange(top)] ^= 1 << rng.randrange(8)


def set_field(rng: random.Random, frame: bytearray, _other: bytes) -> None:
    """A field of the prefix to an extreme."""
    at, layout = rng.choice(FIELDS)
    size = struct.calcsize(layout)
    frame[at : at + size] = (rng.choice(EXTREMES) % 2 ** (8 * size)).to_bytes(size, "little")


def set_anywhere(rng: random.Random, frame: bytearray, _other: bytes) -> None:
    """One to eight bytes anywhere to an extreme."""
    size = rng.choice((1, 2, 4, 8))
    at = rng.randrange(max(1, len(frame) - size))
    frame[at : at + size] = (rng.choice(EXTREMES) % 2 ** (8 * size)).to_bytes(size, "little")


def cut(rng: random.Random, frame: bytearray, _other: bytes) -> None:
    """A stretch taken out, or the end."""
    at = rng.randrange(len(frame))
    del frame[at : at + rng.choice((1, 2, 8, len(frame)))]


def insert(rng: random.Random, frame: bytearray, _other: bytes) -> None:
    """A stretch of random bytes put in."""
    at = rng.randrange(len(frame) + 1)
    frame[at:at] = rng.randbytes(rng.choice((1, 2, 8, 40)))


def splice(rng: random.Random, frame: bytearray, other: bytes) -> None:
    """The end of another frame in place of this one's."""
    at = rng.randrange(len(frame))
    frame[at:] = other[min(at, len(other)) :] if rng.random() < 0.5 else other[rng.randrange(len(other)) :]


def set_length_and_field(rng: random.Random, frame: bytearray, other: bytes) -> None:
    """The payload's length in the prefix moved with a field behind it, to get past the first checks."""
    set_anywhere(rng, frame, other)
    flip(rng, frame, other)
    frame[24:32] = rng.choice(EXTREMES[:10]).to_bytes(8, "little")


MUTATIONS: tuple[Mutation, ...] = (flip, set_field, set_anywhere, cut, insert, splice, set_length_and_field)


def fuzz(frames: int, seed: int) -> Tally:
    """Reads ``frames`` mutated frames and tallies what became of them. Deterministic in ``seed``."""
    rng = random.Random(seed)
    corpus = sound_frames()
    arena = memoryview(bytearray(LIMITS.payload_bytes))
    tally = Tally()
    for _ in range(frames):
        accepts, original = rng.choice(corpus)
        frame = bytearray(original)
        mutation = rng.choice(MUTATIONS)
        mutation(rng, frame, rng.choice(corpus)[1])
        try:
            tally.outcomes[_read(rng, bytes(frame), accepts, arena)] += 1
        except Exception as error:  # that is the finding
            tally.outcomes["defect"] += 1
            tally.defects.append(f"{mutation.__name__}: {type(error).__name__}: {error}: {frame.hex()}")
    return tally


def _read(rng: random.Random, data: bytes, accepts: frozenset[Kind], arena: memoryview) -> str:
    """The outcome of one frame. Raises whatever a defect raises."""

    def allocate(head: Request | Result) -> memoryview | None:
        assert head.payload_bytes <= LIMITS.payload_bytes, "allocation beyond the limit"
        return None if rng.random() < 0.1 else arena[: head.payload_bytes]

    reader = FrameReader(allocate, accepts=accepts, limits=LIMITS)
    pieces = [data] if rng.random() < 0.7 else _pieces(rng, data)
    whole = 0
    consumed = 0
    try:
        for piece in pieces:
            for frame in reader.feed(piece):
                whole += 1
                if isinstance(frame.message, Request | Result) and frame.payload is None:
                    return "discarded"
                again = join(encode(frame.message, [part for _, part in frame.tensors()]))
                assert data[consumed : consumed + len(again)] == again, "accepted frame does not encode to its bytes"
                consumed += len(again)
        reader.finish()
    except WireError as error:
        return "cut short" if "closed within" in error.problem else "rejected"
    return "accepted" if whole else "empty"


def _pieces(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(3))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def main() -> int:
    """Prints a row and the verdict as one line of JSON; 1 where the bar is not held."""
    parser = argparse.ArgumentParser(description="Fuzz the wire format.")
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begin_s = time.perf_counter()
    tally = fuzz(options.frames, options.seed)
    spent_s = time.perf_counter() - begin_s
    row = ", ".join(f"{count} {outcome}" for outcome, count in sorted(tally.outcomes.items()))
    print(f"wire_fuzz: {options.frames} mutated frames, seed {options.seed}, {spent_s:.1f} s: {row}")
    for defect in tally.defects[:10]:
        print(f"  {defect}")
    defects = len(tally.defects)
    # Frames that only ever fail, or never do, would prove little: both must have happened.
    exercised = tally.outcomes["rejected"] > 0 and tally.outcomes["accepted"] > 0
    held = defects == 0 and exercised and options.frames >= 1_000_000
    print(json.dumps({"name": "wire_fuzz", "value": defects, "bar": 0, "held": held, "frames": options.frames}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
