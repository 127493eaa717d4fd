"""A study's other half: its calibrations, its frozen prediction, and the judge's word once its runs are there.

Everything lies in the study's folder: ``calibration/`` and ``predictions/`` with the ledger. A run that began before
the prediction was frozen is refused: it was not predicted.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.ledger_lines import Entry
from b2gmodel.live.calibrate import Progress, Wanted
from b2gmodel.live.host import describe_software
from b2gmodel.live.sessions import calibrate_models
from b2gmodel.live.study_commitment import frozen_prediction, ledger_of
from b2gmodel.live.study_server import target_of
from b2gmodel.live.study_store import StudyStore, load_runs
from b2gmodel.placement_records import (
    PlacementRun,
    StudyMeasurement,
    StudyPrediction,
    StudySessionInfo,
    StudyVerdict,
)
from b2gmodel.records import Calibration, digest_of
from b2gmodel.store import read_record, write_record
from b2gmodel.study_judge import judge_study
from b2gmodel.study_prediction import Asked, predict_study
from b2gmodel.study_records import Study, StudyRun, StudySession, StudyWorkload

CALIBRATIONS: Final = "calibration"

_LADDER: Final = (1, 2, 4)
BUDGET_S: Final = 8.0
_PRECISION: Final = 0.01
_LEAST_RUNGS: Final = 3


def calibrate_study(folder: Path, progress: Progress, *, budget_s: float = BUDGET_S) -> list[Path]:
    """Calibrate each workload over each transport in single-flight, with the transport law of lone requests.

    What is there already is not done again.

    Args:
        budget_s: longest time for each batch size.

    Raises:
        UsageError: no study there, or models that cannot take the batches.
        ServerError, EvidenceError: as ``calibrate``.
    """
    study = StudyStore.open(folder).study
    target, pairs = target_of(study), _pairs(study)
    paths = []
    for number, (workload, transport) in enumerate(pairs):
        path = _calibration_path(folder, workload.name, transport)
        paths.append(path)
        if path.exists():
            continue
        sizes = {cell.k for cell in _cells(study, workload.name, transport)}
        clients = max(cell.concurrency for cell in _cells(study, workload.name, transport))
        wanted = Wanted(
            workload.model,
            tuple(sorted({*_LADDER, *sizes})),
            shapes=workload.shapes,
            budget_s=budget_s,
            precision=_PRECISION,
            transport=transport,
            null_model=workload.null_model,
            law_batches=(1,),
            law_flights=tuple(n for n in (1, 2, 4, 8, 16, 32) if n <= max(8, clients)),
        )

        def told(stage: str, share: float, number: int = number) -> None:
            progress(stage, (number + share) / len(pairs))

        calibrate_models(target, [wanted], folder=path.parent, name=path.stem, progress=told)
    return paths


def freeze_study(folder: Path, *, seed: int) -> tuple[StudyPrediction, Path]:
    """Predict the study's placements from its calibrations, and freeze the prediction in its ledger.

    Raises:
        UsageError: a calibration is missing, or nothing can be claimed.
        EvidenceError: the study has runs already, which would not have been predicted, or another prediction.
    """
    store = StudyStore.open(folder)
    study, ledger = store.study, ledger_of(folder)
    if store.sessions() and frozen_prediction(folder) is None:
        raise EvidenceError(
            "the study has runs already, and what is predicted now was not predicted",
            observed=f"{len(store.sessions())} session(s)",
            where=str(folder),
            hint="plan a new study, and predict before its first run",
        )
    calibrations = {}
    for workload, transport in _pairs(study):
        path = _calibration_path(folder, workload.name, transport)
        if path.exists():
            calibrations[workload.name, transport] = read_record(path, Calibration)
    prediction = predict_study(
        study.name,
        store.digest,
        _asked(study),
        calibrations,
        ladder=_ladder(study, calibrations),
        software=describe_software(),
        seed=seed,
    )
    earlier = frozen_prediction(folder)
    if earlier is not None and earlier.digest != digest_of(prediction):
        raise EvidenceError(
            "the study has a prediction already, and this is another one",
            observed=digest_of(prediction),
            allowed=earlier.digest,
            where=earlier.file,
            hint="a study is predicted once: to predict anew, plan a new study",
        )
    return prediction, ledger.freeze(prediction)


def judge_runs(folder: Path) -> tuple[StudyPrediction, StudyVerdict, Path]:
    """Gather the study's complete runs as its measurement, judge it, and enter both in its ledger.

    Raises:
        UsageError: no prediction was frozen, or no run is complete.
        EvidenceError: a session began before the prediction was frozen, or as ``judge_study``.
    """
    store = StudyStore.open(folder)
    ledger, frozen = ledger_of(folder), frozen_prediction(folder)
    if frozen is None:
        raise UsageError("no prediction was frozen", where=str(folder), hint="b2g study predict comes before the runs")
    prediction, digest = ledger.load_frozen_any(ledger.folder / frozen.file)
    if not isinstance(prediction, StudyPrediction):
        raise UsageError("the frozen prediction is no study's", where=frozen.file)
    runs, sessions = load_runs(folder), store.sessions()
    _check_order(frozen, sessions)
    measurement = _measurement(store, prediction, digest, runs, sessions)
    path = write_record(ledger.folder / f"{measurement.name}.json", measurement)
    seen = digest_of(measurement)
    if not any(entry.event == "measure" and entry.facts.get("measurement") == seen for entry in ledger.entries()):
        ledger.note("measure", digest, path.name, measurement=seen)
    verdict = judge_study(prediction, measurement)
    return prediction, verdict, ledger.enter_verdict(measurement.name, verdict)


def _pairs(study: Study) -> list[tuple[StudyWorkload, str]]:
    pairs = dict.fromkeys((run.workload, run.transport) for run in study.runs)
    return [(study.workload(name), transport) for name, transport in sorted(pairs)]


def _cells(study: Study, workload: str, transport: str) -> list[Asked]:
    """What is asked for of each C3: its batch size, at its number of clients."""
    found = dict.fromkeys(
        (run.cell.k, run.cell.concurrency)
        for run in study.runs
        if (run.workload, run.transport, run.cell.placement) == (workload, transport, "C3")
    )
    return [Asked(workload, transport, k, concurrency) for k, concurrency in sorted(found)]


def _asked(study: Study) -> list[Asked]:
    return [each for workload, transport in _pairs(study) for each in _cells(study, workload.name, transport)]


def _ladder(study: Study, calibrations: dict[tuple[str, str], Calibration]) -> tuple[str, ...]:
    """Workloads that differ in their payload alone, at least three; of a server of the user's own, all of them."""
    groups: dict[object, dict[int, str]] = defaultdict(dict)
    for (name, _), calibration in calibrations.items():
        emulated = study.workload(name).emulated
        kind = None if emulated is None else (emulated.s0_s, emulated.s1_s, emulated.max_batch, emulated.instances)
        groups[kind].setdefault(calibration.points[0].payload_bytes, name)
    largest = max(groups.values(), key=len, default={})
    return tuple(largest[size] for size in sorted(largest)) if len(largest) >= _LEAST_RUNGS else ()


def _calibration_path(folder: Path, workload: str, transport: str) -> Path:
    return folder / CALIBRATIONS / f"{workload}-{transport}.json"


def _check_order(frozen: Entry, sessions: Sequence[StudySession]) -> None:
    """Each session names the prediction; and within the boot of the freezing it came later, by a clock nobody sets."""
    for session in sessions:
        if session.prediction_digest not in (None, frozen.digest):
            raise EvidenceError(
                "a session was run for another prediction",
                observed=session.prediction_digest,
                allowed=frozen.digest,
                where=session.session_id,
            )
        if session.clock.boot_id == frozen.boot_id and int(session.begin_boottime_ns) < frozen.boottime_ns:
            raise EvidenceError(
                "a session began before the prediction was frozen",
                observed=session.session_id,
                where=frozen.file,
                hint="plan a new study, and predict before its first run",
            )


def _measurement(
    store: StudyStore,
    prediction: StudyPrediction,
    digest: str,
    runs: Sequence[StudyRun],
    sessions: Sequence[StudySession],
) -> StudyMeasurement:
    if not runs:
        raise UsageError("no run is complete", where=str(store.folder), hint=f"b2g study run {store.folder}")
    used = {run.session_id for run in runs}
    kept = [session for session in sessions if session.session_id in used]
    unknown = sorted(used - {session.session_id for session in kept})
    if unknown:
        raise EvidenceError(
            "runs belong to a session that is not there",
            observed=unknown[0],
            where=str(store.folder / "sessions"),
            hint="restore the file",
        )
    computes = {model.info.compute for session in kept for model in session.models}
    missing = len(store.study.runs) - len(runs)
    # The same runs are the same measurement, however often they are judged.
    of_runs = hashlib.sha256("".join(sorted(store.marks().values())).encode()).hexdigest()[:12]
    return StudyMeasurement(
        name=f"{prediction.name}-measured-{of_runs}",
        study_digest=store.digest,
        prediction_digest=digest,
        compute="emulated" if "emulated" in computes else "real" if "real" in computes else "none",
        host=kept[0].host,
        software=kept[0].software,
        clock=kept[0].clock,
        sessions=tuple(
            StudySessionInfo(
                session=session.session,
                session_id=session.session_id,
                boot_id=session.clock.boot_id,
                begin_boottime_ns=session.begin_boottime_ns,
            )
            for session in kept
        ),
        runs=tuple(_placement_run(run) for run in runs),
        notes=(f"{missing} of {len(store.study.runs)} planned runs are missing",) if missing else (),
    )


def _placement_run(run: StudyRun) -> PlacementRun:
    batches = sum(run.batch_sizes.values())
    return PlacementRun(
        workload=run.workload,
        payload_bytes=run.payload_bytes,
        transport=run.transport,
        placement=run.placement,
        k=run.k,
        flights=run.flights,
        concurrency=run.concurrency,
        session=run.session,
        repetition=run.repetition,
        session_id=run.session_id,
        throughput_per_s=run.throughput_per_s,
        p99_s=run.p99_s,
        requests=run.requests,
        failed=run.failed,
        full_batches_share=run.batch_sizes.get(str(run.k), 0) / batches,
        count_difference=abs(run.server_requests - run.answered - run.failed),
    )
