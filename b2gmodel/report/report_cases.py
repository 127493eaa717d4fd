"""The records of a case, gathered: what was predicted, from what, what was measured for it, and the verdict.

Rules here: a record is known by its digest, and a file with another content is not that record. What the ledger entered
and somebody changed is an ``EvidenceError``; a record that is not there is None, for the report to say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.ledger import AnyPrediction, Ledger
from b2gmodel.ledger_lines import Entry
from b2gmodel.placement_records import StudyMeasurement, StudyVerdict
from b2gmodel.records import Calibration, Measurement, Prediction, Verdict, digest_of
from b2gmodel.store import SIZE_LIMIT_BYTES, read_bytes, read_record

AnyMeasurement = Measurement | StudyMeasurement
AnyVerdict = Verdict | StudyVerdict
R = TypeVar("R", Measurement, StudyMeasurement, Verdict, StudyVerdict)
T = TypeVar("T", AnyPrediction, AnyMeasurement, AnyVerdict, Calibration)

_MEASUREMENTS: Final[tuple[type[AnyMeasurement], ...]] = (Measurement, StudyMeasurement)


@dataclass(frozen=True, slots=True)
class Kept(Generic[T]):
    """A record, its digest, and its file as a reader finds it: below the folder that was given, led by its name."""

    record: T
    digest: str
    file: str


@dataclass(frozen=True, slots=True)
class Case:
    """One prediction with one measurement and the verdict on it; each but the prediction may be missing.

    Attributes:
        calibrations: by the digest that the prediction names.
        entries: the ledger's lines about the prediction, with their numbers.
        missing: a sentence for each record that was not found.
    """

    prediction: Kept[AnyPrediction]
    measurement: Kept[AnyMeasurement] | None
    verdict: Kept[AnyVerdict] | None
    calibrations: dict[str, Kept[Calibration]]
    entries: tuple[tuple[int, Entry], ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The cases asked for, and what the ledger holds besides."""

    cases: tuple[Case, ...]
    frozen: int
    without_outcome: int
    abandoned: int


def gather(ledger: Ledger, wanted: Sequence[str], calibrations: Path) -> Gathered:
    """The cases of the predictions ``wanted``; of all that have a verdict where none is named.

    Args:
        wanted: each a frozen prediction's file, or at least eight digits of its digest.
        calibrations: folder that is searched, with all below it, for what the ledger's own folder lacks.

    Raises:
        UsageError: no such prediction, a folder that cannot be read, or nothing to report.
        EvidenceError: a record or the ledger was changed or is damaged.
    """
    entries = ledger.entries()
    if wanted:
        frozen = [ledger.load_frozen_any(ledger.find(name)) for name in dict.fromkeys(wanted)]
        chosen = list({digest: prediction for prediction, digest in frozen}.items())
    else:
        judged = dict.fromkeys(entry.digest for entry in entries if entry.event == "outcome")
        chosen = [(digest, ledger.load_frozen_any(_file_of(ledger, entries, digest))[0]) for digest in judged]
    if not chosen:
        raise UsageError(
            "nothing to report: no prediction here has a verdict",
            where=str(ledger.path),
            hint="b2g validate judges one; a prediction that is named is shown without",
        )
    shelf = _Shelf(ledger, entries, calibrations)
    states = ledger.states()
    return Gathered(
        cases=tuple(case for digest, prediction in chosen for case in shelf.cases(digest, prediction)),
        frozen=len(states),
        without_outcome=sum(state.is_open for state in states),
        abandoned=sum(state.stage == "abandoned" for state in states),
    )


def _file_of(ledger: Ledger, entries: Sequence[Entry], digest: str) -> Path:
    return ledger.folder / next(entry.file for entry in entries if (entry.event, entry.digest) == ("freeze", digest))


class _Shelf:
    """Where records are looked up: the ledger's folder by what its lines name, and other files by their digest."""

    def __init__(self, ledger: Ledger, entries: Sequence[Entry], calibrations: Path) -> None:
        self._ledger = ledger
        self._entries = entries
        self._files = _by_digest(calibrations)

    def cases(self, digest: str, prediction: AnyPrediction) -> list[Case]:
        """A case for each measurement of this prediction; one without any where there is none."""
        own = tuple((number, each) for number, each in enumerate(self._entries, start=1) if each.digest == digest)
        outcomes = {str(e.facts.get("measurement")): e for _, e in own if e.event == "outcome"}
        measured = {str(e.facts.get("measurement")): e for _, e in own if e.event == "measure"}
        freeze = next(entry for _, entry in own if entry.event == "freeze")
        kept = Kept(prediction, digest, self._name(freeze.file))
        calibrations, lacking = self._calibrations(prediction)
        found = []
        for of in dict.fromkeys([*measured, *outcomes]) or [None]:
            missing = list(lacking)
            measurement = None if of is None else self._measurement(of, measured.get(of), digest)
            verdict = self._verdict(outcomes[of]) if of in outcomes else None
            if of is not None and measurement is None:
                missing.append(f"The measurement with digest {of[:12]} is not here: what was measured is not shown.")
            if of is None:
                missing.append("This prediction has not been measured.")
            elif of not in outcomes:
                missing.append("This measurement has not been judged: b2g validate does it.")
            elif verdict is None:
                missing.append("The verdict's file is not here: the ledger's line alone says how it ended.")
            found.append(Case(kept, measurement, verdict, calibrations, own, tuple(missing)))
        return found

    def _measurement(self, of: str, entered: Entry | None, digest: str) -> Kept[AnyMeasurement] | None:
        if entered is not None and (self._ledger.folder / entered.file).exists():
            record = read_record(self._ledger.folder / entered.file, *_MEASUREMENTS)
            self._ledger.check_measurement(digest, entered.file, digest_of(record))
            return Kept(record, of, self._name(entered.file))
        if of not in self._files:
            return None
        path, name = self._files[of]
        return Kept(read_record(path, *_MEASUREMENTS), of, name)

    def _verdict(self, entered: Entry) -> Kept[AnyVerdict] | None:
        if not (self._ledger.folder / entered.file).exists():
            return None
        verdict = self._ledger.entered_verdict(entered)
        return Kept(verdict, digest_of(verdict), self._name(entered.file))

    def _calibrations(self, prediction: AnyPrediction) -> tuple[dict[str, Kept[Calibration]], list[str]]:
        named: dict[str, str] = (
            {prediction.calibration_digest: prediction.calibration_name}
            if isinstance(prediction, Prediction)
            else {cell.calibration_digest: cell.calibration_name for cell in prediction.cells}
        )
        here = {digest: self._files[digest] for digest in named if digest in self._files}
        kept = {digest: Kept(read_record(path, Calibration), digest, name) for digest, (path, name) in here.items()}
        names = {path.stem for path, _ in self._files.values()}
        return kept, [
            f"The calibration {name} with digest {digest[:12]} is not here"
            f"{', and what is here by that name is another' if name in names else ''}: its times are not shown."
            for digest, name in named.items()
            if digest not in here
        ]

    def _name(self, file: str) -> str:
        return f"{self._ledger.folder.resolve().name}/{file}"


def _by_digest(folder: Path) -> dict[str, tuple[Path, str]]:
    """Digest -> file, of all .json files under a folder: a record's digest is that of its file."""
    found: dict[str, tuple[Path, str]] = {}
    for path in sorted(folder.rglob("*.json")):
        if path.is_file() and path.stat().st_size <= SIZE_LIMIT_BYTES:
            name = f"{folder.resolve().name}/{path.relative_to(folder).as_posix()}"
            found.setdefault(hashlib.sha256(read_bytes(path)).hexdigest(), (path, name))
    return found


def record_of(kept: Kept[AnyMeasurement] | Kept[AnyVerdict] | None, kind: type[R]) -> R | None:
    """The record, which has to be of the prediction's kind. Raises ``EvidenceError`` where it is another's."""
    if kept is None:
        return None
    if not isinstance(kept.record, kind):
        raise EvidenceError(
            "the record does not belong to this kind of prediction",
            observed=kept.record.record,
            allowed=str(kind.model_fields["record"].default),
            where=kept.file,
        )
    return kept.record
