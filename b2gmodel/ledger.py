"""The ledger of predictions: what was frozen, and when, each line holding the digest of the line before.

Append-only; a lock on the file orders writers. Boot id and CLOCK_BOOTTIME stand beside the wall clock, so that the
order of events within one boot does not rest on a clock that can be set.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import rfc8785

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.records import Prediction, Verdict, digest_of
from b2gmodel.store import parse_record, read_bytes, write_record

GENESIS: Final = "0" * 64
LEDGER_NAME: Final = "ledger.jsonl"
_MIN_PREFIX: Final = 8

EventKind = Literal["freeze", "measure", "outcome"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger."""

    event: str
    digest: str
    file: str
    previous: str
    line_digest: str
    facts: dict[str, Any]


class Ledger:
    """The ledger of one folder of predictions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LEDGER_NAME

    def freeze(self, prediction: Prediction) -> Path:
        """Write the prediction under its digest and enter it; the same content again is the same file and entry."""
        digest = digest_of(prediction)
        path = self.folder / f"{prediction.name}-{digest}.json"
        write_record(path, prediction)
        with self._locked() as entries:
            if not any(entry.event == "freeze" and entry.digest == digest for entry in entries):
                self._append("freeze", digest, path.name, entries)
        return path

    def note(self, event: EventKind, digest: str, file: str, **facts: Any) -> None:
        """Enter an event about the frozen prediction ``digest``."""
        with self._locked() as entries:
            self._append(event, digest, file, entries, **facts)

    def enter_verdict(self, measurement_name: str, verdict: Verdict) -> Path:
        """Write a verdict and enter the outcome; the same verdict again changes nothing."""
        path = self.folder / f"{measurement_name}-verdict-{digest_of(verdict)[:12]}.json"
        write_record(path, verdict)
        with self._locked() as entries:
            if not any(entry.event == "outcome" and entry.file == path.name for entry in entries):
                self._append(
                    "outcome",
                    verdict.prediction_digest,
                    path.name,
                    entries,
                    outcome=verdict.outcome,
                    measurement=verdict.measurement_digest,
                )
        return path

    def check_measurement(self, digest: str, file: str, measurement_digest: str) -> None:
        """Raises ``EvidenceError`` where the ledger knows this measurement of a prediction with another content."""
        for entry in self.entries():
            known = entry.facts.get("measurement")
            same_file = (entry.event, entry.digest, entry.file) == ("measure", digest, file)
            if same_file and known is not None and known != measurement_digest:
                raise EvidenceError(
                    "the measurement was changed after it was entered in the ledger",
                    observed=measurement_digest,
                    allowed=str(known),
                    where=file,
                    hint="restore the file as it was measured",
                )

    def find(self, text: str) -> Path:
        """The file meant by a path, or by at least eight digits of a digest."""
        path = Path(text)
        if _exists(path):
            return path
        if len(text) >= _MIN_PREFIX and all(char in "0123456789abcdef" for char in text):
            files = {
                entry.file for entry in self.entries() if entry.event == "freeze" and entry.digest.startswith(text)
            }
            if len(files) == 1:
                return self.folder / files.pop()
        raise UsageError(
            "no such prediction",
            observed=text,
            allowed="a file, or at least 8 digits of one digest in the ledger",
            where="PREDICTION",
            hint=f"the ledger is {self.path}; b2g predict freezes one",
        )

    def load_frozen(self, path: Path) -> tuple[Prediction, str]:
        """A prediction and its digest, provided that it is in the ledger byte for byte.

        Raises:
            EvidenceError: its bytes changed since it was frozen, or it was never frozen here.
        """
        content = read_bytes(path)
        digest = hashlib.sha256(content).hexdigest()
        frozen = [entry for entry in self.entries() if entry.event == "freeze"]
        if not any(entry.digest == digest for entry in frozen):
            named = next((entry for entry in frozen if entry.file == path.name), None)
            if named is not None:
                raise EvidenceError(
                    "the prediction was changed after it was frozen",
                    observed=digest,
                    allowed=named.digest,
                    where=str(path),
                    hint="restore the file as it was frozen",
                )
            # Not a record at all is the more telling error.
            parse_record(content, Prediction, where=str(path))
            raise EvidenceError(
                "the prediction is not in the ledger",
                observed=digest,
                where=str(self.path),
                hint="freeze it with b2g predict before measuring",
            )
        return parse_record(content, Prediction, where=str(path)), digest

    def entries(self) -> list[Entry]:
        """All lines, their chain verified. An absent ledger has none."""
        if not self.path.exists():
            return []
        return _parse(read_bytes(self.path), self.path)

    @contextmanager
    def _locked(self) -> Iterator[list[Entry]]:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            self._cut_torn_line()
            yield self.entries()

    def _cut_torn_line(self) -> None:
        """A crash in the middle of an append leaves a line without its end: it was never entered."""
        content = read_bytes(self.path)
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.truncate(self.path, whole)

    def _append(self, event: str, digest: str, file: str, entries: list[Entry], **facts: Any) -> None:
        line = rfc8785.dumps(
            {
                "event": event,
                "digest": digest,
                "file": file,
                "previous": entries[-1].line_digest if entries else GENESIS,
                "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "boot_id": boot_id(),
                "boottime_ns": str(time.clock_gettime_ns(time.CLOCK_BOOTTIME)),
                **facts,
            }
        )
        with self.path.open("ab") as stream:
            stream.write(line + b"\n")
            stream.flush()
            os.fsync(stream.fileno())


def _parse(content: bytes, path: Path) -> list[Entry]:
    entries: list[Entry] = []
    previous = GENESIS
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        where = f"{path}, line {number}"
        try:
            facts = json.loads(line)
            entry = Entry(
                facts.pop("event"),
                facts.pop("digest"),
                facts.pop("file"),
                facts.pop("previous"),
                hashlib.sha256(line).hexdigest(),
                facts,
            )
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise EvidenceError(
                "the ledger is damaged", observed=f"{type(error).__name__}: {error}", where=where
            ) from error
        if entry.previous != previous:
            raise EvidenceError(
                "the ledger's chain is broken: a line was changed, removed or moved",
                observed=entry.previous,
                allowed=previous,
                where=where,
                hint="restore the ledger from its history",
            )
        entries.append(entry)
        previous = entry.line_digest
    return entries


def _exists(path: Path) -> bool:
    """Whether there is such a file; a text that no path can be is none."""
    try:
        return path.exists()
    except OSError:
        return False


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
