"""Whole calibrations and measurements on a target, written to their folders."""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from b2gmodel.errors import UsageError
from b2gmodel.ledger import Ledger
from b2gmodel.live.calibrate import Progress, Wanted, calibrate, check_wanted
from b2gmodel.live.measure import measure
from b2gmodel.live.point import Table
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.self_test import self_test
from b2gmodel.live.target import Target
from b2gmodel.merge import merged
from b2gmodel.records import Calibration, Measurement, Prediction, digest_of
from b2gmodel.store import check_name, write_record, write_table

RecordT = TypeVar("RecordT", Calibration, Measurement)


def calibrate_models(
    target: Target,
    wanted: Sequence[Wanted],
    *,
    folder: Path,
    name: str | None,
    progress: Progress,
    tested: bool = False,
    starts: int = 1,
) -> list[tuple[Path, Calibration]]:
    """Calibrate several models in each of ``starts`` sessions; each is written as soon as its last one is known.

    Args:
        folder: gets ``NAME.json`` and ``NAME.parquet`` for each model.
        tested: whether the instrument tests itself first, and stops where it fails.
        name: of the calibration; with several models, the model's name is appended. Default: model and time.
        starts: sessions; with several their calibrations are merged, and a column ``session`` tells their cycles
            apart. A target that does not restart its server is asked again as it runs.

    Raises:
        UsageError: a name is taken, no start at all, or what ``calibrate`` raises.
    """
    if starts < 1:
        raise UsageError("not a number of starts", observed=starts, allowed=">= 1", where="--starts")
    names = [_calibration_name(each.model, name, len(wanted) > 1) for each in wanted]
    for its_name in names:
        check_name(its_name, where="--name")
        if names.count(its_name) > 1:
            raise UsageError("a model is named twice", observed=its_name, where="--model", hint="name each once")
        if (folder / f"{its_name}.json").exists():
            raise UsageError(
                "there is such a calibration already",
                where=str(folder / f"{its_name}.json"),
                hint="records are never overwritten: choose another --name",
            )
    written, found = [], None
    sessions: list[list[tuple[Calibration, Table]]] = [[] for _ in wanted]
    for start in range(starts):
        with target.session([each.model for each in wanted]) as endpoint:
            run_loop(check_wanted(endpoint, wanted))
            if tested and start == 0:
                progress("self-test", 0.0)
                found = run_loop(self_test())
            for number, (each, its_name) in enumerate(zip(wanted, names, strict=True)):

                def told(stage: str, share: float, start: int = start, number: int = number) -> None:
                    which = f", start {start + 1} of {starts}" if starts > 1 else ""
                    progress(f"calibrate {stage}{which}", (start + (number + share) / len(wanted)) / starts)

                session_id = uuid.uuid4().hex
                calibration, table = run_loop(
                    calibrate(endpoint, each, name=its_name, session_id=session_id, progress=told, self_test=found)
                )
                sessions[number].append((calibration, table))
                if start == starts - 1:
                    written.append(_write(folder, its_name, *_as_one(sessions[number])))
    return written


def _as_one(sessions: Sequence[tuple[Calibration, Table]]) -> tuple[Calibration, Table]:
    """One session as it is; several merged, and their tables one below the other."""
    if len(sessions) == 1:
        return sessions[0]
    tables = [{"session": [number] * len(table["k"]), **table} for number, (_, table) in enumerate(sessions)]
    whole = {column: [value for table in tables for value in table[column]] for column in tables[0]}
    return merged([calibration for calibration, _ in sessions]), whole


def measure_frozen(
    ledger: Ledger,
    prediction: Prediction,
    digest: str,
    target: Target,
    *,
    flights: tuple[int, ...] | None,
    name: str | None,
    progress: Progress,
) -> tuple[Path, Measurement]:
    """Measure a frozen prediction's plan, write the measurement beside it and enter it in the ledger.

    That it is begun is entered before the first run, so that one which fails or is dropped leaves a trace.

    Args:
        flights: M in place of the plan's; a deviation that the measurement states.

    Raises:
        UsageError: an M that the prediction says nothing about, or what ``measure`` raises.
    """
    planned = prediction.plan.flights
    asked = flights if flights is not None else planned
    unknown = [m for m in asked if prediction.predictors[0].at(m) is None]
    if unknown:
        raise UsageError(
            "the prediction says nothing about these flights",
            observed=", ".join(map(str, unknown)),
            allowed=", ".join(str(point.flights) for point in prediction.predictors[0].curve),
            where="--flights",
        )
    m_star = prediction.predictors[0].m_star
    if m_star not in asked or len(asked) == 1:
        raise UsageError(
            "what was claimed could not be judged from these flights",
            observed=", ".join(map(str, asked)),
            allowed=f"M* = {m_star} and at least one other M",
            where="--flights",
        )
    its_name = check_name(name or f"{prediction.name}-measured-{_stamp()}", where="--name")
    if (ledger.folder / f"{its_name}.json").exists():
        raise UsageError(
            "there is such a measurement already",
            where=str(ledger.folder / f"{its_name}.json"),
            hint="records are never overwritten: choose another --name",
        )
    begun = False

    def told(stage: str, share: float) -> None:
        # ``measure`` tells of a run just before it, and of none before all that it refuses has been refused.
        nonlocal begun
        if not begun:
            ledger.note("begin", digest, f"{its_name}.json")
            begun = True
        progress(stage, share)

    measurement, table = measure(
        prediction.model_copy(update={"plan": prediction.plan.model_copy(update={"flights": asked})}),
        digest,
        target,
        name=its_name,
        progress=told,
    )
    if asked != planned:
        note = f"flights {list(asked)} were run in place of the frozen plan's {list(planned)}"
        measurement = measurement.model_copy(update={"notes": (*measurement.notes, note)})
    path, measurement = _write(ledger.folder, its_name, measurement, table)
    ledger.note("measure", digest, path.name, measurement=digest_of(measurement))
    return path, measurement


def _calibration_name(model: str, name: str | None, several: bool) -> str:
    # Servers allow model names that no file can have.
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", model).lstrip(".-")[:64]
    if name is None:
        return f"{plain}-{_stamp()}"
    return f"{name}-{plain}" if several else name


def _stamp() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S")


def _write(folder: Path, name: str, record: RecordT, table: Table) -> tuple[Path, RecordT]:
    """The raw table first, so that no record names a file that is not there."""
    raw = write_table(folder / f"{name}.parquet", table)
    whole = record.model_copy(update={"raw": raw})
    return write_record(folder / f"{name}.json", whole), whole
