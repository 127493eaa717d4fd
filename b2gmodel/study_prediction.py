"""Calibrations -> StudyPrediction: placements, R and crossovers of a study. Single-flight data and the laws only.

No clock, no file: the same calibrations give the same prediction, byte for byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from b2gmodel.errors import UsageError
from b2gmodel.placement import (
    DRAWS,
    PlacementLaws,
    Placements,
    placement_laws,
    placements,
    predicted_cell,
    predicted_crossover,
)
from b2gmodel.placement_records import Crossover, PlacementCell, StudyClaim, StudyPrediction
from b2gmodel.records import Calibration, Software

CROSSOVER_BOUND: Final = math.log(1.15)


@dataclass(frozen=True, slots=True)
class Asked:
    """One cell that a study will run: placements of one workload at one number of clients.

    Attributes:
        workload: its name in the study.
        transport: how its batches travel.
        k: batch size in the proxy.
        concurrency: closed-loop clients.
        max_batch: the greatest batch that the server's dynamic batching forms; None takes the calibrated model's.
    """

    workload: str
    transport: str
    k: int
    concurrency: int
    max_batch: int | None = None


def predict_study(
    name: str,
    study_digest: str,
    asked: Sequence[Asked],
    calibrations: Mapping[tuple[str, str], Calibration],
    *,
    ladder: Sequence[str] = (),
    software: Software | None = None,
    seed: int = 1,
    draws: int = DRAWS,
) -> StudyPrediction:
    """Predict X_C1, X_C2, X_C3 and R of each cell, and the crossover payload over a ladder of workloads.

    Args:
        name: of the prediction.
        study_digest: of the study's manifest.
        asked: the cells.
        calibrations: by workload and transport, each with points at 1 and k.
        ladder: workloads that differ in their payload alone; empty for no crossover.
        software: what predicts.
        seed, draws: of the calibrations' uncertainty.

    Raises:
        UsageError: a cell without a calibration, or nothing that could be claimed.
        EvidenceError: a calibration lacks what is needed.
    """
    laws: dict[tuple[str, str, int], PlacementLaws] = {}
    cells: list[PlacementCell] = []
    found: dict[tuple[str, str, int, int], tuple[int, Placements]] = {}
    for number, each in enumerate(asked):
        calibration = calibrations.get((each.workload, each.transport))
        if calibration is None:
            raise UsageError(
                "a cell of the study has no calibration",
                observed=f"{each.workload} over {each.transport}",
                hint="b2g study calibrate does what is missing",
            )
        at = (each.workload, each.transport, each.k)
        if at not in laws:
            laws[at] = placement_laws(calibration, each.k, draws=draws, seed=seed + number, max_batch=each.max_batch)
        rates = placements(laws[at], each.concurrency)
        payload_bytes = calibration.points[0].payload_bytes
        found[*at, each.concurrency] = (payload_bytes, rates)
        cells.append(predicted_cell(calibration, rates, workload=each.workload, k=each.k, payload_bytes=payload_bytes))
    crossovers = _crossovers(ladder, found)
    used = {(each.workload, each.transport) for each in asked}
    return StudyPrediction(
        name=name,
        study_digest=study_digest,
        calibration_session_ids=tuple(
            sorted({each for key, one in calibrations.items() if key in used for each in one.session_ids})
        ),
        software=software,
        seed=seed,
        draws=draws,
        cells=tuple(cells),
        crossovers=crossovers,
        claims=_claims(name, cells, crossovers),
        notes=_notes([calibrations[key] for key in sorted(used)]),
    )


def _crossovers(
    ladder: Sequence[str], found: Mapping[tuple[str, str, int, int], tuple[int, Placements]]
) -> tuple[Crossover, ...]:
    """One for each transport, k and number of clients at which the whole ladder is asked for."""
    if not ladder:
        return ()
    settings = dict.fromkeys((transport, k, clients) for _, transport, k, clients in found)
    crossovers = []
    for transport, k, clients in settings:
        rungs = [found[workload, transport, k, clients] for workload in ladder
                 if (workload, transport, k, clients) in found]  # fmt: skip
        if len(rungs) == len(ladder):
            rungs.sort(key=lambda rung: rung[0])
            crossovers.append(
                predicted_crossover([size for size, _ in rungs], [x for _, x in rungs], transport=transport, k=k)
            )
    return tuple(crossovers)


def _claims(name: str, cells: Sequence[PlacementCell], crossovers: Sequence[Crossover]) -> tuple[StudyClaim, ...]:
    """The sign of each gain that the calibration can tell from zero, and each crossover within its ladder."""
    claims = [
        StudyClaim(
            quantity="sign_of_gain",
            workload=cell.workload,
            transport=cell.transport,
            k=cell.k,
            concurrency=cell.concurrency,
            comparator="==",
            bound=math.copysign(1.0, cell.gain.mean),
        )
        for cell in cells
        if cell.gain.low is None or cell.gain.high is None or not cell.gain.low <= 0 <= cell.gain.high
    ]
    claims += [
        StudyClaim(
            quantity="crossover_error",
            workload=None,
            transport=each.transport,
            k=each.k,
            concurrency=each.concurrency,
            comparator="<=",
            bound=CROSSOVER_BOUND,
        )
        for each in crossovers
        if each.payload_bytes is not None
    ]
    if not claims:
        raise UsageError(
            "nothing can be claimed: no gain can be told from zero",
            where=name,
            hint="calibrate for longer, or with other batch sizes",
        )
    return tuple(claims)


def _notes(calibrations: Sequence[Calibration]) -> tuple[str, ...]:
    notes = ["C1 is the closed network of transport and instances, C2 one whose server merges what waits, C3 k / C_k"]
    if any(calibration.model.compute == "emulated" for calibration in calibrations):
        notes.append("the compute was emulated")
    return tuple(notes)
