"""`b2g ledger verify`: everything that a ledger says, checked from the files beside it, without a server or network.

Each check can fail, and says where; one that could not be made is no success. What it reports names files and never
folders, so that a copy elsewhere gives the same report.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from b2gmodel import signing
from b2gmodel.errors import B2GError, EvidenceError, UsageError
from b2gmodel.ledger import HEAD_NAME, LEDGER_NAME, Ledger
from b2gmodel.ledger_environment import lock_file
from b2gmodel.ledger_lines import Entry, check_head, check_plain, parse_lines
from b2gmodel.placement_records import StudyMeasurement, StudyPrediction, StudySessionInfo, StudyVerdict
from b2gmodel.records import Measurement, Prediction, Session, Verdict
from b2gmodel.store import parse_record, read_bytes, sha256_of_file

_SHOWN = 3
_PREDICTIONS: tuple[type[Prediction | StudyPrediction], ...] = (Prediction, StudyPrediction)
_MEASUREMENTS: tuple[type[Measurement | StudyMeasurement], ...] = (Measurement, StudyMeasurement)
_VERDICTS: tuple[type[Verdict | StudyVerdict], ...] = (Verdict, StudyVerdict)


@dataclass(frozen=True, slots=True)
class LedgerCheck:
    """One check, and what was seen."""

    name: str
    outcome: Literal["passed", "failed", "not checked"]
    observed: str


@dataclass(frozen=True, slots=True)
class Verification:
    """The checks in the order in which they were made; ``strays`` are records beside the ledger of which it is silent.

    A crash between writing a record and entering it leaves a stray, and so does a measurement that was kept out.
    """

    checks: tuple[LedgerCheck, ...]
    lines: int
    strays: tuple[str, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the checks that failed."""
        return tuple(check.name for check in self.checks if check.outcome == "failed")

    @property
    def holds(self) -> bool:
        return not self.failed

    def require(self) -> None:
        """Raises ``EvidenceError``, naming the first check that failed."""
        for check in self.checks:
            if check.outcome == "failed":
                raise EvidenceError(
                    f"the ledger fails its check {check.name}",
                    observed=check.observed,
                    where=LEDGER_NAME,
                    hint="b2g ledger verify shows all checks; restore the files from their history",
                )


def verify(ledger: Ledger, allowed_signers: Path | None = None) -> Verification:
    """Check a ledger from its files alone.

    Args:
        allowed_signers: who may sign; then every frozen prediction must have the signature of one of them.

    Raises:
        UsageError: there is no ledger, or the allowed signers cannot be read.
        SetupError: signatures were asked for, and there is no ssh-keygen.
    """
    if allowed_signers is not None:
        signing.check_readable(allowed_signers, "--allowed-signers")
        signing.check_program()
    content, head = ledger.snapshot()
    if not content and head is None:
        raise UsageError("there is no ledger here", where=str(ledger.path), hint="b2g predict begins one")
    files = _Files(ledger.folder)
    rest: dict[str, Callable[[Sequence[Entry]], _Findings]] = {
        "order": lambda entries: _order(entries, files),
        "predictions": lambda entries: _predictions(entries, files),
        "environments": lambda entries: _environments(entries, files),
        "measurements": lambda entries: _measurements(entries, files),
        "raw-files": lambda entries: _raw_files(entries, files),
        "verdicts": lambda entries: _verdicts(entries, files),
        "signatures": lambda entries: _signatures(entries, files, allowed_signers),
    }
    try:
        entries = parse_lines(content, LEDGER_NAME)
    except EvidenceError as error:
        names = ("head", *rest)
        undone = [LedgerCheck(name, "not checked", "the chain is broken") for name in names]
        return Verification((LedgerCheck("chain", "failed", _told(error)), *undone), content.count(b"\n"), ())
    checks = [
        LedgerCheck("chain", "passed", f"{_count(len(entries), 'line')}, each with the digest of the line before"),
        _check_head(content, entries, head),
    ]
    for name, check in rest.items():
        found = check(entries)
        if found.faults:
            checks.append(LedgerCheck(name, "failed", _list(found.faults)))
        else:
            checks.append(LedgerCheck(name, "passed" if found.checked else "not checked", found.observed))
    return Verification(tuple(checks), len(entries), _strays(entries, ledger.folder))


def signer_of(ledger: Ledger, digest: str, allowed_signers: Path) -> str:
    """The principal who signed the frozen prediction ``digest``.

    Raises:
        EvidenceError: it is not signed, or not by an allowed signer, or prediction or signature were changed.
        UsageError: the allowed signers cannot be read.
        SetupError: there is no ssh-keygen.
    """
    entries = ledger.entries()
    frozen = next((entry for entry in entries if (entry.event, entry.digest) == ("freeze", digest)), None)
    if frozen is None:
        raise EvidenceError("the prediction is not in the ledger", observed=digest, where=LEDGER_NAME)
    return _signer(frozen, _signed(entries), _Files(ledger.folder), allowed_signers)


@dataclass(slots=True)
class _Findings:
    """What one check saw; ``checked`` is False where its subject was not examined, in whole or in part."""

    observed: str
    faults: list[str]
    checked: bool = True


class _Files:
    """The folder's files, each against the digest that the ledger gives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, file: str, digest: object) -> bytes:
        """Raises ``EvidenceError`` where the file is absent or has another digest."""
        try:
            content = read_bytes(self.folder / file)
        except UsageError as error:
            raise EvidenceError("the file is not there", observed=error.observed, where=file) from error
        seen = hashlib.sha256(content).hexdigest()
        if seen != digest:
            raise EvidenceError("the file was changed", observed=seen, allowed=str(digest), where=file)
        return content

    def prediction(self, entry: Entry) -> Prediction | StudyPrediction:
        content = self.read(entry.file, entry.digest)
        return parse_record(content, *_PREDICTIONS, where=entry.file)

    def measurement(self, entry: Entry) -> Measurement | StudyMeasurement:
        content = self.read(entry.file, entry.facts.get("measurement"))
        return parse_record(content, *_MEASUREMENTS, where=entry.file)

    def verdict(self, entry: Entry) -> Verdict | StudyVerdict:
        content = self.read(entry.file, entry.facts.get("verdict"))
        return parse_record(content, *_VERDICTS, where=entry.file)


def _check_head(content: bytes, entries: Sequence[Entry], head: bytes | None) -> LedgerCheck:
    try:
        check_head(content, entries, head, HEAD_NAME)
    except EvidenceError as error:
        return LedgerCheck("head", "failed", _told(error))
    return LedgerCheck("head", "passed", f"ends at line {len(entries)}")


def _order(entries: Sequence[Entry], files: _Files) -> _Findings:
    """By line, and within each boot by its clock; sessions lie between the freezing and the entry."""
    faults: list[str] = []
    frozen: dict[str, Entry] = {}
    latest: dict[str, int] = {}
    sessions = 0
    for number, entry in enumerate(entries, start=1):
        line = f"line {number}"
        if entry.event == "freeze":
            if entry.digest in frozen:
                faults.append(f"{line}: frozen a second time")
            frozen.setdefault(entry.digest, entry)
        elif entry.digest not in frozen:
            faults.append(f"{line}: {entry.event} before its prediction was frozen")
        if entry.boottime_ns < latest.get(entry.boot_id, 0):
            faults.append(f"{line}: earlier than the line before, by the clock of the same boot")
        latest[entry.boot_id] = max(entry.boottime_ns, latest.get(entry.boot_id, 0))
        if entry.event == "measure" and entry.digest in frozen:
            begun = _begun(entry, files)
            sessions += len(begun)
            faults += [
                f"{line}: session {session} of {entry.file} began {problem}"
                for session, boot, begin_ns in begun
                for problem in _misplaced(boot, begin_ns, frozen[entry.digest], entry)
            ]
    return _Findings(
        f"each event after its freezing, by line and by the clock of each boot; {_count(sessions, 'session')} timed",
        faults,
    )


def _begun(entry: Entry, files: _Files) -> list[tuple[int, str, int]]:
    """Number, boot and begin of each session that states them. A file that fails is another check's finding."""
    try:
        measured = files.measurement(entry)
    except B2GError:
        return []
    sessions: Sequence[Session | StudySessionInfo] = measured.sessions
    return [
        (number, session.boot_id, int(session.begin_boottime_ns))
        for number, session in enumerate(sessions, start=1)
        if session.boot_id is not None and session.begin_boottime_ns is not None
    ]


def _misplaced(boot: str, begin_ns: int, frozen: Entry, measured: Entry) -> list[str]:
    faults = []
    if boot == frozen.boot_id and begin_ns < frozen.boottime_ns:
        faults.append("before the prediction was frozen")
    if boot == measured.boot_id and begin_ns > measured.boottime_ns:
        faults.append("after the measurement was entered")
    return faults


def _predictions(entries: Sequence[Entry], files: _Files) -> _Findings:
    frozen = [entry for entry in entries if entry.event == "freeze"]
    return _Findings(f"{_count(len(frozen), 'prediction')} as frozen", _faults(frozen, files.prediction))


def _environments(entries: Sequence[Entry], files: _Files) -> _Findings:
    """What was installed where each prediction was made: no more than a digest where the list was not handed on."""
    absent: dict[str, None] = {}
    present: dict[str, None] = {}
    silent: list[str] = []

    def check(entry: Entry) -> None:
        try:
            software = files.prediction(entry).software
        except B2GError:
            return  # the check of predictions says so
        if software is None or software.lock_digest is None:
            silent.append(entry.file)
            return
        file = lock_file(software.lock_digest)
        if not (files.folder / file).exists():
            absent[file] = None
            return
        present[file] = None
        files.read(file, software.lock_digest)

    faults = _faults([entry for entry in entries if entry.event == "freeze"], check)
    gone = f"; not here: {_list(list(absent))}" if absent else ""
    none = f"; {_count(len(silent), 'prediction')} without one" if silent else ""
    return _Findings(
        f"{_count(len(present), 'lock')} as frozen{gone}{none}",
        list(dict.fromkeys(faults)),
        checked=not absent and not silent,
    )


def _measurements(entries: Sequence[Entry], files: _Files) -> _Findings:
    measured = [entry for entry in entries if entry.event == "measure"]

    def check(entry: Entry) -> None:
        of = files.measurement(entry).prediction_digest
        if of != entry.digest:
            raise EvidenceError("made for another prediction", observed=of, allowed=entry.digest, where=entry.file)

    return _Findings(f"{_count(len(measured), 'measurement')} as entered", _faults(measured, check))


def _raw_files(entries: Sequence[Entry], files: _Files) -> _Findings:
    """Raw files may be too large to hand on, so an absent one is stated and is no fault."""
    absent: list[str] = []
    present: list[str] = []

    def check(entry: Entry) -> None:
        try:
            measured = files.measurement(entry)
        except B2GError:
            return  # the check of measurements says so
        raw = measured.raw if isinstance(measured, Measurement) else None
        if raw is None:
            return
        path = files.folder / check_plain(raw.file)
        if not path.exists():
            absent.append(raw.file)
            return
        present.append(raw.file)
        seen = sha256_of_file(path)
        if seen != raw.sha256:
            raise EvidenceError("the file was changed", observed=seen, allowed=raw.sha256, where=raw.file)

    faults = _faults([entry for entry in entries if entry.event == "measure"], check)
    gone = f"; not here: {_list(absent)}" if absent else ""
    return _Findings(f"{_count(len(present), 'file')} as measured{gone}", faults, checked=not absent)


def _verdicts(entries: Sequence[Entry], files: _Files) -> _Findings:
    outcomes = [entry for entry in entries if entry.event == "outcome"]
    measured = {(entry.digest, entry.facts.get("measurement")) for entry in entries if entry.event == "measure"}
    unentered = sum((entry.digest, entry.facts.get("measurement")) not in measured for entry in outcomes)

    def check(entry: Entry) -> None:
        verdict = files.verdict(entry)
        said = (verdict.prediction_digest, verdict.measurement_digest, verdict.outcome)
        entered = (entry.digest, entry.facts.get("measurement"), entry.facts.get("outcome"))
        if said != entered:
            raise EvidenceError("not what was entered", observed=said, allowed=str(entered), where=entry.file)

    others = f"; {unentered} of measurements that the ledger does not hold" if unentered else ""
    return _Findings(f"{_count(len(outcomes), 'verdict')} as entered{others}", _faults(outcomes, check))


def _signatures(entries: Sequence[Entry], files: _Files, allowed_signers: Path | None) -> _Findings:
    frozen = [entry for entry in entries if entry.event == "freeze"]
    signed = _signed(entries)
    if allowed_signers is None:
        lines = [entry for entry in entries if entry.event == "sign"]
        faults = _faults(lines, lambda entry: files.read(entry.file, entry.facts.get("signature")))
        told = f"{len(signed)} of {_count(len(frozen), 'prediction')} signed; by whom: --allowed-signers FILE"
        return _Findings(told, faults, checked=False)
    principals: set[str] = set()
    faults = _faults(frozen, lambda entry: principals.add(_signer(entry, signed, files, allowed_signers)))
    return _Findings(f"{_count(len(frozen), 'prediction')} signed by {', '.join(sorted(principals))}", faults)


def _signed(entries: Sequence[Entry]) -> dict[str, Entry]:
    """Digest of a prediction -> its signature's line."""
    return {entry.digest: entry for entry in entries if entry.event == "sign"}


def _signer(frozen: Entry, signed: dict[str, Entry], files: _Files, allowed_signers: Path) -> str:
    line = signed.get(frozen.digest)
    if line is None:
        raise EvidenceError("the prediction is not signed", where=frozen.file, hint="b2g predict --sign KEY signs")
    content = files.read(frozen.file, frozen.digest)
    signature = files.read(line.file, line.facts.get("signature"))
    principal, signer = signing.verify(content, signature, allowed_signers)
    if signer != line.facts.get("signer"):
        raise EvidenceError(
            "another key signed than the ledger says",
            observed=signer,
            allowed=str(line.facts.get("signer")),
            where=line.file,
        )
    return principal


def _strays(entries: Sequence[Entry], folder: Path) -> tuple[str, ...]:
    # What was begun is not entered by that.
    known = {entry.file for entry in entries if entry.event != "begin"}
    return tuple(sorted(path.name for path in folder.glob("*.json") if path.name not in known))


def _faults(entries: Sequence[Entry], check: Callable[[Entry], object]) -> list[str]:
    """What ``check`` raises of each entry."""
    faults = []
    for entry in entries:
        try:
            check(entry)
        except (EvidenceError, UsageError) as error:
            faults.append(_told(error, entry.file))
        except ValueError as error:
            faults.append(f"{entry.file}: {error}")
    return faults


def _told(error: B2GError, file: str | None = None) -> str:
    """The error without what to do, and without the folder."""
    where = file if error.where is None else error.where
    seen = "" if error.observed is None else f": saw {error.observed}"
    bound = f"; allowed: {error.allowed}" if error.allowed else ""
    return f"{where}: {error.problem}{seen}{bound}"


def _list(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
