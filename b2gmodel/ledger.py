"""The ledger of predictions: what was frozen, and when, each line holding the digest of the line before.

Append-only; a lock on the file orders writers, and readers wait for it. Boot id and CLOCK_BOOTTIME stand beside the
wall clock, so that the order of events within one boot does not rest on a clock that can be set.

The head, a file beside the ledger, says how many lines there are and which is the last, for a chain alone does not
show that its end was cut off. It is replaced after each append. So after a crash the ledger may be one line ahead of
its head, which the next writer mends; a head ahead of its ledger is tampering.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final, Literal, get_args

import rfc8785

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.records import Prediction, Verdict, digest_of
from b2gmodel.store import parse_record, read_bytes, sync_folder, write_record

GENESIS: Final = "0" * 64
LEDGER_NAME: Final = "ledger.jsonl"
HEAD_NAME: Final = "ledger.head"
SIGNATURE_SUFFIX: Final = ".sig"
_MIN_PREFIX: Final = 8
_LONGEST_REASON: Final = 1000

EventKind = Literal["freeze", "sign", "measure", "outcome", "abandon"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the ledger.

    Attributes:
        digest: of the prediction that it is about.
        file: that the event made, in the ledger's folder; of an abandonment, the prediction's.
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


@dataclass(frozen=True, slots=True)
class State:
    """What has become of a frozen prediction.

    Attributes:
        frozen_at: by the wall clock.
        signer: fingerprint of the key that signed it, as the ledger states it.
        measurements: digests of those entered, in order.
        judged: digests of the measurements that have an outcome.
        outcomes: in order; more than one where it was measured or judged more than once.
        reason: why it was abandoned, or None.
    """

    digest: str
    file: str
    frozen_at: str
    signer: str | None
    measurements: tuple[str, ...]
    judged: tuple[str, ...]
    outcomes: tuple[str, ...]
    reason: str | None

    @property
    def unjudged(self) -> tuple[str, ...]:
        """Measurements of it that were entered, and never judged."""
        return tuple(each for each in self.measurements if each not in self.judged)

    @property
    def stage(self) -> Literal["frozen", "measured", "judged", "abandoned"]:
        """How far it has come. An outcome counts, even of a prediction that was abandoned."""
        if self.outcomes:
            return "judged"
        if self.reason is not None:
            return "abandoned"
        return "measured" if self.measurements else "frozen"

    @property
    def is_open(self) -> bool:
        """Whether it lies in the file drawer: no outcome, and nobody said why."""
        return self.stage in {"frozen", "measured"}


class Ledger:
    """The ledger of one folder of predictions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LEDGER_NAME
        self.head_path = folder / HEAD_NAME

    def freeze(self, prediction: Prediction) -> Path:
        """Write the prediction under its digest and enter it; the same content again is the same file and entry."""
        digest = digest_of(prediction)
        path = self.folder / f"{prediction.name}-{digest}.json"
        write_record(path, prediction)
        with self._locked() as writer:
            if writer.find("freeze", digest) is None:
                writer.append("freeze", digest, path.name)
        return path

    def sign(self, prediction: Path, key: Path) -> Path:
        """Sign a frozen prediction, and enter it; the same key again changes nothing.

        Returns:
            The signature's file, beside the prediction's.

        Raises:
            EvidenceError: the prediction is not in the ledger byte for byte.
            UsageError: the key cannot be used, or another has signed.
            SetupError: there is no ssh-keygen.
        """
        from b2gmodel import signing

        _, digest = self.load_frozen(prediction)
        signature = signing.sign(read_bytes(prediction), key)
        with self._locked() as writer:
            path = self.folder / f"{writer.frozen(digest).file}{SIGNATURE_SUFFIX}"
            known = writer.find("sign", digest)
            if known is None:
                # A file that no line names was left by a crash.
                _replace(path, signature.content)
                writer.append(
                    "sign",
                    digest,
                    path.name,
                    signature=hashlib.sha256(signature.content).hexdigest(),
                    signer=signature.signer,
                )
            elif known.facts.get("signer") != signature.signer:
                raise UsageError(
                    "another key has signed this prediction",
                    observed=signature.signer,
                    allowed=str(known.facts.get("signer")),
                    where=str(key),
                    hint="a prediction has one signature",
                )
        return path

    def note(self, event: EventKind, digest: str, file: str, **facts: Any) -> None:
        """Enter an event about the frozen prediction ``digest``. Raises ``EvidenceError`` where it was not frozen."""
        with self._locked() as writer:
            writer.frozen(digest)
            writer.append(event, digest, file, **facts)

    def enter_verdict(self, measurement_name: str, verdict: Verdict) -> Path:
        """Write a verdict and enter the outcome; the same verdict again changes nothing."""
        digest = digest_of(verdict)
        path = self.folder / f"{measurement_name}-verdict-{digest[:12]}.json"
        write_record(path, verdict)
        with self._locked() as writer:
            writer.frozen(verdict.prediction_digest)
            if not any(entry.event == "outcome" and entry.file == path.name for entry in writer.entries):
                writer.append(
                    "outcome",
                    verdict.prediction_digest,
                    path.name,
                    outcome=verdict.outcome,
                    measurement=verdict.measurement_digest,
                    verdict=digest,
                )
        return path

    def abandon(self, digest: str, reason: str) -> None:
        """Enter that this prediction will not be judged, and why; the same reason again changes nothing.

        Raises:
            EvidenceError: the prediction is not in the ledger.
            UsageError: no reason is given, it has an outcome, or was abandoned for another reason.
        """
        if not reason.strip() or not reason.isprintable() or len(reason) > _LONGEST_REASON:
            raise UsageError(
                "this cannot be a reason",
                observed=reason,
                allowed=f"1 to {_LONGEST_REASON} characters on one line",
                where="--reason",
            )
        with self._locked() as writer:
            frozen = writer.frozen(digest)
            state = next(state for state in states(writer.entries) if state.digest == digest)
            if state.outcomes:
                raise UsageError(
                    "a prediction with an outcome cannot be abandoned", observed=state.outcomes[-1], where=frozen.file
                )
            if state.reason is None:
                writer.append("abandon", digest, frozen.file, reason=reason)
            elif state.reason != reason:
                raise UsageError("it was abandoned before", observed=state.reason, where=frozen.file)

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
            raise _not_frozen(digest, self.path)
        return parse_record(content, Prediction, where=str(path)), digest

    def entries(self) -> list[Entry]:
        """All lines, their chain and head verified. An absent ledger has none.

        Raises:
            EvidenceError: lines were changed, removed or moved.
        """
        content, head = self.snapshot()
        entries = parse_lines(content, str(self.path))
        check_head(content, entries, head, str(self.head_path))
        return entries

    def states(self) -> list[State]:
        """What has become of each frozen prediction, in the order of freezing."""
        return states(self.entries())

    def snapshot(self) -> tuple[bytes, bytes | None]:
        """The bytes of the ledger and of its head (None: no such file), as no writer is between the two."""
        # A writer makes the ledger before its head, so one that is seen here had a ledger.
        head = self._read_head()
        try:
            with self.path.open("rb") as stream:
                fcntl.flock(stream, fcntl.LOCK_SH)
                return read_bytes(self.path), self._read_head()
        except FileNotFoundError:
            return b"", head
        except OSError as error:
            raise UsageError("cannot read the ledger", observed=error.strerror, where=str(self.path)) from error

    def _read_head(self) -> bytes | None:
        return read_bytes(self.head_path) if self.head_path.exists() else None

    @contextmanager
    def _locked(self) -> Iterator[_Writer]:
        """The only writer of the ledger, which it leaves in order: no torn line, the head at the last one."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as stream:
                fcntl.flock(stream, fcntl.LOCK_EX)
                content = read_bytes(self.path)
                entries = parse_lines(content, str(self.path))
                check_head(content, entries, self._read_head(), str(self.head_path))
                # A crash in the middle of an append leaves a line without its end: it was never entered.
                whole = content.rfind(b"\n") + 1
                if whole != len(content):
                    os.truncate(stream.fileno(), whole)
                if self._read_head() != head_of(entries):
                    _replace(self.head_path, head_of(entries))
                yield _Writer(self, stream, entries)
        except OSError as error:
            raise UsageError(
                "cannot write the ledger",
                observed=error.strerror or str(error),
                where=str(error.filename or self.path),
                hint="make room or choose another folder; a line that was not written whole does not count",
            ) from error


@dataclass(slots=True)
class _Writer:
    """The holder of the ledger's lock."""

    ledger: Ledger
    stream: FileIO
    entries: list[Entry]

    def find(self, event: EventKind, digest: str) -> Entry | None:
        """The first such event of this prediction."""
        return next((entry for entry in self.entries if (entry.event, entry.digest) == (event, digest)), None)

    def frozen(self, digest: str) -> Entry:
        """Raises ``EvidenceError`` where the prediction was not frozen."""
        entry = self.find("freeze", digest)
        if entry is None:
            raise _not_frozen(digest, self.ledger.path)
        return entry

    def append(self, event: EventKind, digest: str, file: str, **facts: Any) -> None:
        """The line first, then the head: each is on the disk before the next begins."""
        line = rfc8785.dumps(
            {
                "event": event,
                "digest": digest,
                "file": file,
                "previous": self.entries[-1].line_digest if self.entries else GENESIS,
                "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "boot_id": boot_id(),
                "boottime_ns": str(time.clock_gettime_ns(time.CLOCK_BOOTTIME)),
                **facts,
            }
        )
        entry = _parse_line(line, str(self.ledger.path))
        _write_all(self.stream.fileno(), line + b"\n")
        os.fsync(self.stream.fileno())
        self.entries.append(entry)
        _replace(self.ledger.head_path, head_of(self.entries))


def parse_lines(content: bytes, where: str) -> list[Entry]:
    """The whole lines of a ledger, their chain verified; an unfinished last line does not count.

    Raises:
        EvidenceError: something is no line of a ledger, or does not follow the line before.
    """
    entries: list[Entry] = []
    previous = GENESIS
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        entry = _parse_line(line, f"{where}, line {number}")
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


def _parse_line(line: bytes, where: str) -> Entry:
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


def states(entries: Sequence[Entry]) -> list[State]:
    """What has become of each frozen prediction, in the order of freezing."""

    def of(frozen: Entry) -> State:
        own = [entry for entry in entries if entry.digest == frozen.digest]
        by_event = {event: [entry for entry in own if entry.event == event] for event in get_args(EventKind)}
        return State(
            digest=frozen.digest,
            file=frozen.file,
            frozen_at=frozen.facts["at"],
            signer=next((str(entry.facts.get("signer")) for entry in by_event["sign"]), None),
            measurements=tuple(str(entry.facts.get("measurement", entry.file)) for entry in by_event["measure"]),
            judged=tuple(str(entry.facts.get("measurement")) for entry in by_event["outcome"]),
            outcomes=tuple(str(entry.facts.get("outcome")) for entry in by_event["outcome"]),
            reason=next((str(entry.facts.get("reason")) for entry in by_event["abandon"]), None),
        )

    return [of(entry) for entry in entries if entry.event == "freeze"]


def count_states(of: Sequence[State]) -> dict[str, int]:
    """How many predictions have come how far; ``open`` are those without an outcome of which nobody said why."""
    stages = [state.stage for state in of]
    return {
        "frozen": len(of),
        "open": sum(state.is_open for state in of),
        "unmeasured": stages.count("frozen"),
        "measured": stages.count("measured"),
        "judged": stages.count("judged"),
        "abandoned": stages.count("abandoned"),
        "unjudged_measurements": sum(len(state.unjudged) for state in of),
    }


def _not_frozen(digest: str, ledger: Path) -> EvidenceError:
    return EvidenceError(
        "the prediction is not in the ledger",
        observed=digest,
        where=str(ledger),
        hint="freeze it with b2g predict before measuring",
    )


def _replace(path: Path, content: bytes) -> None:
    """Put ``content`` in the place of ``path``, whole or not at all. For the holder of the lock: one part file."""
    part = path.with_name(f".{path.name}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        _write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(part, path)
    sync_folder(path.parent)


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]


def _exists(path: Path) -> bool:
    """Whether there is such a file; a text that no path can be is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
