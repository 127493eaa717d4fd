"""The ledger of predictions: what was frozen, and when, each line holding the digest of the line before.

Append-only; a lock on the file orders writers, and readers wait for it. Boot id and CLOCK_BOOTTIME stand beside the
wall clock, so that the order of events within one boot does not rest on a clock that can be set.

Its form is said in ``ledger_lines.py``. After a crash the ledger may be one line ahead of its head, which the next
writer mends.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final, TypeVar

import rfc8785

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.ledger_environment import environment_digest, environment_lock, lock_file
from b2gmodel.ledger_lines import GENESIS, Entry, EventKind, check_head, head_of, parse_line, parse_lines
from b2gmodel.ledger_states import State, states
from b2gmodel.placement_records import StudyPrediction, StudyVerdict
from b2gmodel.records import Prediction, Software, Verdict, digest_of
from b2gmodel.store import parse_record, read_bytes, read_record, sync_folder, write_atomically, write_record

AnyPrediction = Prediction | StudyPrediction
PredictionT = TypeVar("PredictionT", Prediction, StudyPrediction, AnyPrediction)

LEDGER_NAME: Final = "ledger.jsonl"
HEAD_NAME: Final = "ledger.head"
SIGNATURE_SUFFIX: Final = ".sig"
_MIN_PREFIX: Final = 8
_LONGEST_REASON: Final = 1000


class Ledger:
    """The ledger of one folder of predictions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / LEDGER_NAME
        self.head_path = folder / HEAD_NAME

    def freeze(self, prediction: AnyPrediction) -> Path:
        """Write the prediction under its digest and enter it; the same content again is the same file and entry.

        The lock of the environment that it states is written beside it, where that is the environment here.
        """
        digest = digest_of(prediction)
        path = self.folder / f"{prediction.name}-{digest}.json"
        write_record(path, prediction)
        self._keep_lock(prediction.software)
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

        _, digest = self.load_frozen_any(prediction)
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

    def enter_verdict(self, measurement_name: str, verdict: Verdict | StudyVerdict) -> Path:
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

    def entered_verdict(self, entry: Entry) -> Verdict | StudyVerdict:
        """The verdict of an outcome's line.

        Raises:
            UsageError: its file is not there.
            EvidenceError: it is not the one that was entered, or is damaged.
        """
        kinds: tuple[type[Verdict | StudyVerdict], ...] = (Verdict, StudyVerdict)
        verdict = read_record(self.folder / entry.file, *kinds)
        known = entry.facts.get("verdict")
        if digest_of(verdict) != known:
            raise EvidenceError(
                "the verdict is not the one that was entered",
                observed=digest_of(verdict),
                allowed=str(known),
                where=entry.file,
                hint="restore the file, or validate the prediction anew",
            )
        return verdict

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
        """A prediction of X(M) and its digest. Raises as ``load_frozen_any``; ``UsageError`` where it is a study's."""
        return self._load(path, Prediction)

    def load_frozen_any(self, path: Path) -> tuple[AnyPrediction, str]:
        """A prediction of either kind and its digest, provided that it is in the ledger byte for byte.

        Raises:
            EvidenceError: its bytes changed since it was frozen, or it was never frozen here.
        """
        return self._load(path, Prediction, StudyPrediction)

    def _load(self, path: Path, *kinds: type[PredictionT]) -> tuple[PredictionT, str]:
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
            parse_record(content, *kinds, where=str(path))
            raise _not_frozen(digest, self.path)
        return parse_record(content, *kinds, where=str(path)), digest

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

    def _keep_lock(self, software: Software | None) -> None:
        """Write what is installed, unless it is there, or is not what ``software`` states."""
        lock = None if software is None else software.lock_digest
        if lock is not None and lock == environment_digest():
            with suppress(FileExistsError):
                write_atomically(
                    self.folder / lock_file(lock), lambda stream: stream.write(environment_lock().encode())
                )

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
        entry = parse_line(line, str(self.ledger.path))
        _write_all(self.stream.fileno(), line + b"\n")
        os.fsync(self.stream.fileno())
        self.entries.append(entry)
        _replace(self.ledger.head_path, head_of(self.entries))


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
