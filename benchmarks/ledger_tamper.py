"""Tampering with a ledger and its predictions: every single change at every position must be seen.

    python benchmarks/ledger_tamper.py [--predictions 6]

Bytes of a frozen prediction, of each ledger line and of the head: each bit of each byte is flipped, each byte removed,
each doubled. Lines of the ledger: each deleted, repeated at each place, moved to each place, each two swapped. Held
where all are seen, and the untouched files are accepted before, between and after.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import builders

from b2gmodel.errors import EvidenceError
from b2gmodel.ledger import Ledger


def other_bytes(content: bytes) -> Iterator[bytes]:
    """Each bit flipped, each byte removed, each byte doubled."""
    for position in range(len(content)):
        before, byte, after = content[:position], content[position], content[position + 1 :]
        for bit in range(8):
            yield before + bytes([byte ^ 1 << bit]) + after
        yield before + after
        yield before + bytes([byte, byte]) + after


def other_orders(content: bytes) -> Iterator[bytes]:
    """Each line deleted, repeated, moved; each two swapped."""
    lines = content.splitlines(keepends=True)
    for here, line in enumerate(lines):
        rest = [*lines[:here], *lines[here + 1 :]]
        yield b"".join(rest)
        for there in range(len(lines) + 1):
            yield b"".join([*lines[:there], line, *lines[there:]])
        for there in range(len(rest) + 1):
            if there != here:
                yield b"".join([*rest[:there], line, *rest[there:]])
        for there in range(here):
            swapped = list(lines)
            swapped[here], swapped[there] = lines[there], line
            yield b"".join(swapped)


def tamper(path: Path, changes: Callable[[bytes], Iterator[bytes]], read: Callable[[], object]) -> tuple[int, int]:
    """How many changes were made to a file, and how many were seen."""
    content, made, seen = path.read_bytes(), 0, 0
    read()
    for changed in changes(content):
        if changed == content:
            continue  # as by removing one of two equal lines
        path.write_bytes(changed)
        made += 1
        try:
            read()
        except EvidenceError:
            seen += 1
    path.write_bytes(content)
    read()
    return made, seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predictions", type=int, default=6)
    options = parser.parse_args()
    total = total_seen = 0
    with tempfile.TemporaryDirectory(prefix="b2g-tamper-", dir="/dev/shm") as folder:
        ledger = Ledger(Path(folder))
        names = [f"cal{number}" for number in range(options.predictions)]
        paths = [ledger.freeze(builders.prediction(builders.calibration(name=name))) for name in names]
        for label, path, changes, read in (
            ("bytes of a prediction", paths[0], other_bytes, lambda: ledger.load_frozen(paths[0])),
            ("bytes of the ledger", ledger.path, other_bytes, ledger.entries),
            ("bytes of its head", ledger.head_path, other_bytes, ledger.entries),
            ("lines of the ledger", ledger.path, other_orders, ledger.entries),
        ):
            made, seen = tamper(path, changes, read)
            print(f"{label:<22}  {path.stat().st_size:>6} bytes  {made:>7} changes, {seen} seen")
            total, total_seen = total + made, total_seen + seen
    held = total_seen == total > 0
    share = total_seen / total
    print(json.dumps({"name": "ledger_tamper", "value": share, "bar": 1.0, "held": held, "spread": None}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
