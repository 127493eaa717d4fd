"""The records of a study of placements: what is predicted of it, what was measured, and the judge's word.

They follow the rules of ``records.py``: frozen, versioned, validated; missing is None; each names the digest of the
record before it. A study's prediction is frozen in the same ledger as any other.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from b2gmodel.records import (
    Check,
    Clock,
    Count,
    Digest,
    Estimate,
    EvidenceCheck,
    Finite,
    Host,
    Limits,
    Name,
    Positive,
    Record,
    Software,
    Text,
)

AtLeastOne = Annotated[int, Field(ge=1)]


class PlacementCell(Record):
    """Predicted X at one payload, batch size and number of clients, requests a second, with R where it has a meaning.

    ``gain`` is X_C3 / X_C1 - 1, ``proxy_gain_per_s`` X_C3 - X_C1 and ``server_gain_per_s`` X_C2 - X_C1; ``ratio`` is
    None where ``undefined`` says why.
    """

    workload: Name
    payload_bytes: Count
    transport: Text
    k: AtLeastOne
    concurrency: AtLeastOne
    calibration_name: Name
    calibration_digest: Digest
    c1_per_s: Estimate
    c2_per_s: Estimate
    c3_per_s: Estimate
    proxy_gain_per_s: Estimate
    server_gain_per_s: Estimate
    gain: Estimate
    ratio: Estimate | None
    undefined: Text | None


class Crossover(Record):
    """The payload above which X_C3 lies below X_C1, by a fit that never rises; the same for predicted and measured.

    ``payload_bytes`` is None where no sign change lies within the ladder; ``beyond`` says on which side it is. Its
    ``low`` or ``high`` is None where that limit lies outside the ladder. ``rootless_share`` is that of the draws.
    """

    transport: Text
    k: AtLeastOne
    concurrency: AtLeastOne
    payload_bytes: Estimate | None
    beyond: Literal["below", "above"] | None
    rootless_share: Finite | None
    least_payload_bytes: Count
    greatest_payload_bytes: Count


class StudyClaim(Record):
    """What a study can refute.

    ``sign_of_gain``: of X_C3 - X_C1 in one cell, +1 or -1; wherever R is defined it is R's sign, too.
    ``crossover_error``: abs(log(predicted / measured)) of the crossover payload.
    """

    quantity: Literal["sign_of_gain", "crossover_error"]
    workload: Name | None
    transport: Text
    k: AtLeastOne
    concurrency: AtLeastOne
    comparator: Literal["==", "<="]
    bound: Finite


class StudyPrediction(Record):
    """Placements of a whole study, predicted from single-flight calibrations and frozen before its first run."""

    record: Literal["b2g.study-prediction"] = "b2g.study-prediction"
    version: Literal[1] = 1
    name: Name
    study_digest: Digest
    calibration_session_ids: tuple[Text, ...]
    software: Software | None
    seed: Count
    draws: Count
    cells: Annotated[tuple[PlacementCell, ...], Field(min_length=1)]
    crossovers: tuple[Crossover, ...]
    claims: Annotated[tuple[StudyClaim, ...], Field(min_length=1)]
    limits: Limits = Limits()
    notes: tuple[str, ...] = ()


class StudySessionInfo(Record):
    """A session as the judge needs it."""

    session: Count
    session_id: Text
    boot_id: Text
    begin_boottime_ns: Annotated[str, Field(pattern=r"^[0-9]+$")]


class PlacementRun(Record):
    """One run of a study: X in requests a second, and whether its counts balance."""

    workload: Name
    payload_bytes: Count
    transport: Text
    placement: Literal["D0", "C1", "C2", "C3", "C4"]
    k: AtLeastOne
    flights: AtLeastOne
    concurrency: AtLeastOne
    session: Count
    repetition: Count
    session_id: Text
    throughput_per_s: Positive
    p99_s: Positive | None
    requests: Count
    failed: Count
    full_batches_share: Annotated[float, Field(ge=0, le=1)] | None
    count_difference: Count


class StudyMeasurement(Record):
    """What a study measured for its frozen prediction."""

    record: Literal["b2g.study-measurement"] = "b2g.study-measurement"
    version: Literal[1] = 1
    name: Name
    study_digest: Digest
    prediction_digest: Digest
    compute: Literal["real", "emulated", "none"]
    host: Host | None
    software: Software | None
    clock: Clock | None
    sessions: Annotated[tuple[StudySessionInfo, ...], Field(min_length=1)]
    runs: Annotated[tuple[PlacementRun, ...], Field(min_length=1)]
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _runs_have_sessions(self) -> StudyMeasurement:
        known = {each.session_id for each in self.sessions}
        if any(run.session_id not in known for run in self.runs):
            raise ValueError("each run belongs to a session that is stated")
        return self


class MeasuredCell(Record):
    """What was measured of one cell over its sessions, beside what was predicted; requests a second.

    ``p99_spread_ratio`` (exploratory): the standard deviation of the runs' P99 under C1 over that under C3.
    """

    workload: Name
    payload_bytes: Count
    transport: Text
    k: AtLeastOne
    concurrency: AtLeastOne
    sessions: Count
    c1_per_s: Estimate
    c2_per_s: Estimate | None
    c3_per_s: Estimate
    proxy_gain_per_s: Estimate
    gain: Estimate
    ratio: Estimate | None
    undefined: Text | None
    p99_spread_ratio: Estimate | None
    predicted: PlacementCell | None


class CrossoverScore(Record):
    """A crossover as predicted and as measured; ``inside`` says whether the former lies in the latter's interval."""

    predicted: Crossover
    measured: Crossover
    error: Finite | None
    inside: bool | None


class StudyVerdict(Record):
    """The judge's word on a study's prediction: that of its worst claim."""

    record: Literal["b2g.study-verdict"] = "b2g.study-verdict"
    version: Literal[1] = 1
    prediction_digest: Digest
    measurement_digest: Digest
    preregistered: Literal[True] = True
    outcome: Literal["held", "refuted", "inconclusive", "invalid"]
    checks: tuple[Check, ...]
    evidence: tuple[EvidenceCheck, ...]
    cells: tuple[MeasuredCell, ...]
    crossovers: tuple[CrossoverScore, ...]
    sentence: Text
