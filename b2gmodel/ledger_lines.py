"""The form of the ledger: its lines, each holding the digest of the line before, and the head that says where it ends.

Rules here: bytes in, entries out; no file is opened. A chain alone does not show that its end was cut off, so that the
head holds the number of lines and the digest of the last. It is replaced after each append: a ledger may be one line
ahead of its head, and a head ahead of its ledger is tampering.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from b2gmodel.errors import EvidenceError

GENESIS: Final = "0" * 64

EventKind = Literal["freeze", "sign", "begin", "measure", "outcome", "abandon"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger.

    Attributes:
        digest: of the prediction that it is about.
        file: that the event made, in the ledger's folder; of a beginning, the measurement's that is to come; of an
            abandonment, the prediction's.
        facts: everything else on the line.
    """

    event: str
    digest: str
    file: str
    previous: str
    line_digest: str
    facts: dict[str, Any]

    @property
    def boot_id(self) -> str:
        return str(self.facts["boot_id"])

    @property
    def boottime_ns(self) -> int:
        return int(self.facts["boottime_ns"])


def parse_lines(content: bytes, where: str) -> list[Entry]:
    """The whole lines of a ledger, their chain verified; an unfinished last line does not count.

    Raises:
        EvidenceError: something is no line of a ledger, or does not follow the line before.
    """
    entries: list[Entry] = []
    previous = GENESIS
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        entry = parse_line(line, f"{where}, line {number}")
        if entry.previous != previous:
            raise EvidenceError(
                "the ledger's chain is broken: a line was changed, removed or moved",
                observed=entry.previous,
                allowed=previous,
                where=f"{where}, line {number}",
                hint="restore the ledger from its history",
            )
        entries.append(entry)
        previous = entry.line_digest
    return entries


def parse_line(line: bytes, where: str) -> Entry:
    """One line. Raises ``EvidenceError`` where it is none of a ledger."""
    try:
        facts = json.loads(line)
        event, digest, file, previous = texts = [facts.pop(name) for name in ("event", "digest", "file", "previous")]
        if not all(isinstance(text, str) for text in (*texts, facts["at"], facts["boot_id"])):
            raise ValueError("a field is no text")
        entry = Entry(event, digest, file, previous, hashlib.sha256(line).hexdigest(), facts)
        if entry.boottime_ns < 0:
            raise ValueError("a time is below 0")
        if entry.event not in get_args(EventKind):
            raise ValueError(f"no such event: {entry.event}")
        check_plain(entry.file)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise EvidenceError(
            "the ledger is damaged", observed=f"{type(error).__name__}: {error}", where=where
        ) from error
    return entry


def check_plain(file: str) -> str:
    """``file``, if it names a file in the ledger's own folder. Raises ``ValueError``."""
    if file in {"", ".", ".."} or "/" in file or "\0" in file:
        raise ValueError(f"not the name of a file in this folder: {file!r}")
    return file


def head_of(entries: Sequence[Entry]) -> bytes:
    """What the head holds: the number of lines and the digest of the last."""
    return f"{len(entries)} {entries[-1].line_digest if entries else GENESIS}\n".encode()


def check_head(content: bytes, entries: Sequence[Entry], head: bytes | None, where: str) -> None:
    """Whether the ledger ends where its head says, or one line later.

    Args:
        content, entries: the ledger's bytes, and the lines in them.
        head: the head's bytes, None where there is none.

    Raises:
        EvidenceError: lines at its end were changed, removed or added, or the head was.
    """
    fits = not content if head is None else head in {head_of(entries), head_of(entries[:-1])}
    if not fits:
        raise EvidenceError(
            "the ledger does not end where its head says: lines were changed, removed or added, or the head was",
            observed="no head" if head is None else head[:100].decode(errors="replace").strip(),
            allowed=head_of(entries).decode().strip(),
            where=where,
            hint="restore the ledger and its head from their history",
        )
