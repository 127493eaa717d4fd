"""The records, in the order in which they come to be: Calibration, Prediction, Measurement, Verdict.

Each is frozen, versioned and validated on entry, and names the digest of the record before it. Missing is None,
never 0. Raw times are integer nanoseconds in the Parquet files beside the records; what is derived from them is
float seconds here. A record's digest is the SHA-256 of its RFC 8785 canonical JSON.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any, Literal

import rfc8785
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from b2gmodel.units import format_duration

if TYPE_CHECKING:
    import pandas as pd

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Level = Annotated[float, Field(gt=0, lt=1)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Text = Annotated[str, Field(max_length=4096)]
# Names become file names: letters, digits, dot, dash and underscore, and no leading dot.
NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]


def _must_increase(flights: tuple[int, ...]) -> tuple[int, ...]:
    if list(flights) != sorted(set(flights)) or not flights or flights[0] < 1:
        raise ValueError("flights must be distinct, in increasing order, each at least 1")
    return flights


Flights = Annotated[tuple[int, ...], Field(max_length=256), AfterValidator(_must_increase)]


class Record(BaseModel):
    """What all parts of records share: frozen, no unknown fields, no silent conversion."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __str__(self) -> str:
        return repr(self)


def canonical_bytes(record: Record) -> bytes:
    """The record as RFC 8785 canonical JSON."""
    return rfc8785.dumps(record.model_dump(mode="json"))


def digest_of(record: Record) -> str:
    """SHA-256 of the canonical bytes, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_bytes(record)).hexdigest()


class Estimate(Record):
    """A mean with its interval and spread. ``low``, ``high``, ``level`` are None where the source states none."""

    mean: Finite
    low: Finite | None = None
    high: Finite | None = None
    level: Level | None = None
    cv: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    quantiles: dict[str, Finite] | None = None


class Host(Record):
    """Where a record was made."""

    machine: Text
    processor: Text
    cores: Count
    memory_bytes: Count | None
    kernel: Text
    governor: Text | None
    gpu: Text | None


class Software(Record):
    """What made a record. ``packages`` are those that can change a number; ``lock_digest`` is of all installed."""

    b2gmodel: Text
    commit: Text | None
    python: Text
    packages: dict[str, str]
    lock_digest: Digest | None = None

    @model_serializer(mode="wrap")
    def _leave_out_no_lock(self, fields_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Records that were frozen before there was a lock keep their bytes, and with them their digests."""
        fields: dict[str, Any] = fields_of(self)
        return fields if self.lock_digest is not None else {k: v for k, v in fields.items() if k != "lock_digest"}


class Clock(Record):
    """The clock of all times in a record; times of different domains or boots must not be compared."""

    domain: Literal["CLOCK_MONOTONIC"]
    boot_id: Text


class ServerInfo(Record):
    """The inference server as it described itself."""

    name: Text
    version: Text
    address: Text | None
    embedded: bool


class TensorInfo(Record):
    """An input of the model, without the batch dimension."""

    name: Text | None
    datatype: Text | None
    shape: tuple[int, ...]


class RealEngine(Record):
    """What one of our real models computed with: ``provider`` in the engine's own words, the model by its bytes."""

    name: Literal["onnx", "torch"]
    version: Text
    provider: Text
    device_name: Text | None
    threads: Annotated[int, Field(ge=1)]
    model_digest: Digest

    @property
    def sentence(self) -> str:
        """For a person: ``onnxruntime 1.32.0 on CPUExecutionProvider, 1 thread an instance``."""
        return engine_sentence(self.name, self.version, self.provider, self.device_name, self.threads)


def engine_sentence(name: str, version: str, provider: str, device_name: str | None, threads: int) -> str:
    """What computes, for a person."""
    program = {"onnx": "onnxruntime", "torch": "PyTorch"}[name]
    detail = "" if device_name is None else f" ({device_name})"
    return f"{program} {version} on {provider}{detail}, {threads} thread{'s' * (threads > 1)} an instance"


class ModelInfo(Record):
    """The model as its server described it. ``compute`` says whether the work is real or emulated.

    ``engine`` is None but for the real models of our own server.
    """

    name: Text
    compute: Literal["real", "emulated", "none"]
    compute_table_digest: Digest | None
    platform: Text | None
    max_batch_size: Count | None
    instances: Annotated[int, Field(ge=1)] | None
    dynamic_batching: bool | None
    inputs: tuple[TensorInfo, ...]
    preferred_batch_sizes: tuple[int, ...] | None = None
    queue_delay_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    engine: RealEngine | None = None

    @model_serializer(mode="wrap")
    def _without_an_absent_engine(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Records from before engines were named keep their bytes, and so their digests."""
        return {key: value for key, value in handler(self).items() if key != "engine" or value is not None}


class Block(Record):
    """Means over consecutive cycles: the unit that the bootstrap resamples."""

    session: Count
    cycle_s: Positive
    service_s: Positive


class CountersCheck(Record):
    """S as the sum of each cycle's counter differences, against the server's own totals over the same cycles."""

    executions: Count
    service_s: Positive
    relative_difference: Finite


class LegTimes(Record):
    """Where a cycle's time goes: the median of each leg; None where nothing tells it from its neighbour.

    ``residual_share``: median distance between the legs' sum and the cycle, as a share of the cycle.
    ``trace_difference``: S by the server's trace against S by its counters, relative; None without a trace.
    """

    cycles: Count
    formation_wait_s: Finite | None
    pack_s: Finite | None
    send_s: Finite | None
    server_receive_s: Finite | None
    queue_s: Finite | None
    compute_input_s: Finite | None
    compute_infer_s: Finite | None
    compute_output_s: Finite | None
    return_s: Finite | None
    unsplit_s: Finite | None
    deliver_s: Finite | None
    residual_s: Finite | None
    residual_share: Finite
    trace_difference: Finite | None


class SelfTestLeg(Record):
    """A delay injected into one leg by the fake server, and how much of it the instrument booked there."""

    leg: Text
    injected_s: Positive
    recovered_s: Finite


class TransportPoint(Record):
    """The null model with ``flights`` batches in flight: the transport, and the null's own instance time.

    ``transport_s`` is the mean cycle less the null's queue and service time.
    """

    flights: Annotated[int, Field(ge=1)]
    batches_per_s: Estimate
    cycle_s: Positive
    service_s: Positive
    queue_s: Finite
    transport_s: Positive


class LoadedPoint(Record):
    """The model's own S in single-flight while the null model has ``null_flights`` batches in flight beside it."""

    null_flights: Count
    cycles: Count
    service_s: Positive


class TransportLaw(Record):
    """The transport alone, measured against a model that computes nothing: rate against batches in flight.

    ``loaded``: what a busy transport does to the model's own service time, from no null batch on.
    """

    null_model: Text
    k: Annotated[int, Field(ge=1)]
    batch_bytes: Count
    points: tuple[TransportPoint, ...]
    loaded: tuple[LoadedPoint, ...] = ()


class ComputePoint(Record):
    """Service time with ``flights`` batches on as many instances: at most g in flight, so never a scored point."""

    flights: Annotated[int, Field(ge=1)]
    service_s: Positive


class ComputeLaw(Record):
    """S(j), j = 1..g instances busy, at one batch size."""

    k: Annotated[int, Field(ge=1)]
    points: tuple[ComputePoint, ...]


class CalibrationPoint(Record):
    """Single-flight at one batch size. ``k`` and the times are None where a publication does not state them."""

    k: Annotated[int, Field(ge=1)] | None
    payload_bytes: Count
    cycles: Count | None = None
    warmup_cycles: Count | None = None
    stopped_by: Literal["precision", "budget"] | None = None
    elapsed_s: Positive | None = None
    cycle_s: Estimate | None = None
    service_s: Estimate | None = None
    transport_s: Estimate | None = None
    queue_s: Estimate | None = None
    transport_share: Estimate | None = None
    throughput_per_s: Positive | None = None
    blocks: tuple[Block, ...] | None = None
    counters: CountersCheck | None = None
    disturbance: Estimate | None = None
    legs: LegTimes | None = None
    transport_law: TransportLaw | None = None
    compute_law: ComputeLaw | None = None


class RawFile(Record):
    """The cycles behind a record, in a Parquet file beside it."""

    file: Text
    sha256: Digest
    rows: Count


class Calibration(Record):
    """What single-flight shows of one model on one server through one transport."""

    record: Literal["b2g.calibration"] = "b2g.calibration"
    version: Literal[1] = 1
    name: Name
    source: Text
    host: Host | None
    software: Software | None
    clock: Clock | None
    server: ServerInfo | None
    model: ModelInfo
    transport: Text | None
    session_ids: tuple[str, ...]
    points: Annotated[tuple[CalibrationPoint, ...], Field(min_length=1)]
    raw: RawFile | None
    self_test: tuple[SelfTestLeg, ...] | None = None
    notes: tuple[str, ...] = ()

    def point(self, k: int | None) -> CalibrationPoint | None:
        """The point for batches of ``k``, or None."""
        return next((point for point in self.points if point.k == k), None)

    def to_frame(self) -> pd.DataFrame:
        """A row a batch size: C, S, D in seconds, transport share, X(1) in requests a second; NaN where not stated."""
        rows = []
        for point in self.points:
            row: dict[str, Any] = {"k": point.k, "payload_bytes": point.payload_bytes, "cycles": point.cycles}
            for name in ("cycle_s", "service_s", "transport_s", "transport_share"):
                value = getattr(point, name)
                row |= {name: None if value is None else value.mean}
                row |= {f"{name}_cv": None if value is None else value.cv}
            rows.append(row | {"throughput_per_s": point.throughput_per_s})
        return _frame(rows)

    def __repr__(self) -> str:
        lines = [f"Calibration {self.name}: {_of_model(self.model)}, transport {self.transport or 'not stated'}"]
        for point in self.points:
            share = "" if point.transport_share is None else f", transport share {point.transport_share.mean:.1%}"
            lines.append(f"  k = {point.k or 'not stated'}: {_times(point)}{share}{_known_laws(point)}")
        return "\n".join(lines)


class CurvePoint(Record):
    """Predicted throughput, requests a second, and mean cycle of a batch with ``flights`` batches in flight."""

    flights: Annotated[int, Field(ge=1)]
    throughput_per_s: Positive
    low: Positive | None
    high: Positive | None
    cycle_s: Positive | None = None
    cycle_low_s: Positive | None = None
    cycle_high_s: Positive | None = None
    quantiles: tuple[Positive, ...] | None = None


class PredictorResult(Record):
    """What one predictor says.

    ``kind``: an estimate of X(M); an upper bound on it; bounds, where ``low`` and ``high`` hold any arrangement; or a
    rival, a rule that users would apply instead. ``m_star`` is the knee, and ``m_star_probabilities`` maps it to its
    share of the draws; ``m_95`` the smallest M of the curve with 95 % of its peak; ``m_recommended`` the smallest whose
    expected loss against the peak is below 2 %. Each point's ``quantiles`` are those of X(M) at ``quantile_levels``.
    """

    name: Text
    kind: Literal["estimate", "upper bound", "bounds", "rival"]
    m_star: Annotated[int, Field(ge=1)]
    m_star_probabilities: dict[str, Finite] | None
    m_95: Annotated[int, Field(ge=1)]
    m_recommended: Annotated[int, Field(ge=1)]
    peak_per_s: Positive
    level: Level | None
    quantile_levels: tuple[Level, ...] | None = None
    curve: tuple[CurvePoint, ...]

    def at(self, flights: int) -> CurvePoint | None:
        return next((point for point in self.curve if point.flights == flights), None)


class Binding(Record):
    """What limits throughput: the instances' limit against the transport's, requests a second.

    ``margin`` is the larger limit over the smaller, with its interval; None where the transport law is not known.
    """

    what: Literal["compute", "transport", "neither", "unknown"]
    compute_limit_per_s: Positive
    transport_limit_per_s: Positive | None
    margin: Estimate | None
    sentence: Text


class Diagnostic(Record):
    """Something that users should know before they believe a figure: what was seen, its bound, what to do."""

    name: Name
    observed: Finite
    bound: Finite
    sentence: Text


class Plan(Record):
    """What the measurement will run, fixed before it."""

    flights: Flights
    sessions: Annotated[int, Field(ge=1, le=1000)]
    seconds_per_run: Positive
    baseline_concurrency: Annotated[int, Field(ge=1)]
    order_seed: Count


class Claim(Record):
    """A statement that a measurement can refute: ``quantity comparator bound``, of one predictor.

    ``regret_at_m_star``: 1 - X(M*) / max X. ``height_error_at_m_star``: abs(log(predicted / measured)) at M*.
    """

    quantity: Literal["regret_at_m_star", "height_error_at_m_star"]
    predictor: Text
    comparator: Literal["<="]
    bound: Finite


class Limits(Record):
    """What a measurement may lack before it is no evidence, fixed before it; shares of the run's own counts."""

    failed_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    full_batches_share: Annotated[float, Field(ge=0, le=1)] = 0.95
    count_difference_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    drift_share: Annotated[float, Field(gt=0, le=1)] = 0.10


class Prediction(Record):
    """Made from a calibration alone, and frozen: nothing in it depends on when or where it was written."""

    record: Literal["b2g.prediction"] = "b2g.prediction"
    version: Literal[1] = 1
    name: Name
    calibration_name: Name
    calibration_digest: Digest
    calibration_session_ids: tuple[Text, ...] = ()
    software: Software | None
    server: ServerInfo | None
    model: ModelInfo
    transport: Text | None
    k: Annotated[int, Field(ge=1)] | None
    payload_bytes: Count
    seed: Count
    draws: Count
    cycle_s: Positive | None = None
    service_s: Positive | None = None
    predictors: Annotated[tuple[PredictorResult, ...], Field(min_length=1)]
    binding: Binding
    diagnostics: tuple[Diagnostic, ...] = ()
    claims: Annotated[tuple[Claim, ...], Field(min_length=1)]
    limits: Limits = Limits()
    plan: Plan
    notes: tuple[str, ...] = ()

    def predictor(self, name: str) -> PredictorResult:
        """The result of that name. Raises ``KeyError``."""
        found = next((result for result in self.predictors if result.name == name), None)
        if found is None:
            raise KeyError(f"{name}: this prediction has {', '.join(each.name for each in self.predictors)}")
        return found

    def to_frame(self) -> pd.DataFrame:
        """A row a predictor and M: throughput in requests a second and mean cycle in seconds, with intervals."""
        return _frame(
            [
                {"predictor": result.name, "kind": result.kind} | point.model_dump()
                for result in self.predictors
                for point in result.curve
            ]
        )

    def __repr__(self) -> str:
        lines = [f"Prediction {self.name}: {_of_model(self.model)}, k = {self.k or 'not stated'}"]
        for result in self.predictors:
            at = result.at(result.m_star) or result.curve[-1]
            interval = "" if at.low is None or at.high is None else f" [{at.low:.4g}, {at.high:.4g}]"
            lines.append(
                f"  {result.name} ({result.kind}): M* = {result.m_star}, X({at.flights}) = "
                f"{at.throughput_per_s:.4g}{interval} request/s, 95 % of its peak at M = {result.m_95}"
            )
        return "\n".join([*lines, f"  {self.binding.sentence}"])

    @property
    def best(self) -> PredictorResult:
        """The predictor that carries the most of what is known: the last estimate, else the one whose M* is claimed."""
        estimates = [result for result in self.predictors if result.kind == "estimate"]
        return estimates[-1] if estimates else self.predictors[0]


class Run(Record):
    """One placement with one number of flights in one session. A publication states little more than X.

    ``batches`` counts those of the measured window; ``delivered_batches`` and ``server_executions`` all of the run.
    """

    placement: Literal["C1", "C2", "C3", "C4"]
    flights: Annotated[int, Field(ge=1)]
    throughput_per_s: Positive
    concurrency: Annotated[int, Field(ge=1)] | None = None
    order: Count | None = None
    duration_s: Positive | None = None
    batches: Count | None = None
    delivered_batches: Count | None = None
    requests: Count | None = None
    failed: Count | None = None
    cycle_s: Estimate | None = None
    service_s: Finite | None = None
    queue_s: Finite | None = None
    server_executions: Count | None = None
    full_batches: Count | None = None
    blocks_per_s: tuple[Finite, ...] | None = None


class Session(Record):
    """Server, proxy and load started afresh (``server_restarted`` says whether the server was), warmed up, measured."""

    session_id: Text
    boot_id: Text | None
    begin_boottime_ns: Annotated[str, Field(pattern=r"^[0-9]+$")] | None
    server_restarted: bool
    warmup_batches: Count | None
    runs: tuple[Run, ...]


class Measurement(Record):
    """What was measured for a frozen prediction. ``preregistered`` is False where the figures came first."""

    record: Literal["b2g.measurement"] = "b2g.measurement"
    version: Literal[1] = 1
    name: Name
    prediction_digest: Digest | None
    preregistered: bool
    source: Text
    host: Host | None
    software: Software | None
    clock: Clock | None
    server: ServerInfo | None
    model: ModelInfo
    transport: Text | None
    k: Annotated[int, Field(ge=1)] | None
    payload_bytes: Count
    sessions: tuple[Session, ...]
    raw: RawFile | None
    notes: tuple[str, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """A row a run: session, placement, flights, throughput in requests a second, and what else it states."""
        shown = ("placement", "flights", "throughput_per_s", "concurrency", "order", "duration_s", "batches",
                 "requests", "failed", "service_s", "queue_s")  # fmt: skip
        return _frame(
            [
                {"session": session.session_id} | {name: getattr(run, name) for name in shown}
                for session in self.sessions
                for run in session.runs
            ]
        )

    def __repr__(self) -> str:
        runs = sum(len(session.runs) for session in self.sessions)
        word = "pre-registered" if self.preregistered else "not pre-registered"
        return f"Measurement {self.name}: {_of_model(self.model)}, {len(self.sessions)} session(s), {runs} runs, {word}"

    @model_validator(mode="after")
    def _has_runs(self) -> Measurement:
        if not any(session.runs for session in self.sessions):
            raise ValueError("a measurement holds at least one run")
        return self


class Check(Record):
    """One claim's line of a verdict: what was claimed of which predictor, and what was seen.

    ``more_sessions``: how many would decide what is inconclusive, were their spread the same; None where none would.
    """

    name: Text
    predictor: Text
    outcome: Literal["held", "refuted", "inconclusive"]
    observed: Text
    bound: Text
    more_sessions: Count | None = None


class EvidenceCheck(Record):
    """Whether the measurement can carry a verdict, in one respect; what a publication does not state is not checked."""

    name: Text
    outcome: Literal["passed", "failed", "not checked"]
    observed: Text
    bound: Text


class HeightScore(Record):
    """Predicted against measured throughput with ``flights`` in flight; the error is signed, predicted/measured - 1.

    ``crps_per_s`` is in requests a second: that of the predicted quantiles, or the distance where there are none.
    """

    predictor: Text
    flights: Annotated[int, Field(ge=1)]
    predicted_per_s: Positive
    measured_per_s: Positive
    measured_low: Finite | None
    measured_high: Finite | None
    error: Finite
    crps_per_s: Finite | None = None


class PredictorScore(Record):
    """One predictor over the ``points`` measured M above 1, which calibration did not see.

    Interval score, CRPS and energy score are relative to the measured X(M), so that each M weighs alike. A skill is
    1 - CRPS / the rival's CRPS; ``regret`` is that of the predictor's own M*. None where it has no such figure.
    """

    predictor: Text
    kind: Literal["estimate", "upper bound", "bounds", "rival", "fitted"]
    points: Count
    regret: Finite | None = None
    mape: Finite | None = None
    covered: Count | None = None
    coverage: Estimate | None = None
    interval_score: Finite | None = None
    crps: Finite | None = None
    energy_score: Finite | None = None
    skill_twice_instances: Finite | None = None
    skill_constant: Finite | None = None


class PlacementScore(Record):
    """Batching in a single-flight proxy against the server's own, with as many concurrent clients each.

    ``ratio`` is R = (X_C3 - X_C1) / (X_C2 - X_C1), None where ``undefined`` says why; ``gain`` is X_C3 / X_C1 - 1.
    """

    concurrency: Annotated[int, Field(ge=1)]
    ratio: Estimate | None
    undefined: Text | None
    gain: Estimate


class Verdict(Record):
    """The judge's word on one prediction and one measurement: that of its worst claim.

    ``best_flights`` and ``m_95`` are where the measured means have their peak and reach 95 % of it first;
    ``confidence_set`` holds the M that cannot be told from the best, None where the sessions are too few for it.
    """

    record: Literal["b2g.verdict"] = "b2g.verdict"
    version: Literal[1] = 1
    prediction_digest: Digest
    measurement_digest: Digest
    preregistered: bool
    outcome: Literal["held", "refuted", "inconclusive", "invalid"]
    sessions: Count
    m_star: Annotated[int, Field(ge=1)]
    best_flights: Annotated[int, Field(ge=1)]
    m_95: Annotated[int, Field(ge=1)]
    confidence_set: Flights | None
    regret: Estimate
    checks: tuple[Check, ...]
    evidence: tuple[EvidenceCheck, ...]
    heights: tuple[HeightScore, ...]
    scores: tuple[PredictorScore, ...]
    placement: PlacementScore | None
    diagnostics: tuple[Diagnostic, ...] = ()
    baseline_per_s: Finite | None
    sentence: Text

    def to_frame(self) -> pd.DataFrame:
        """A row a predictor and M: predicted and measured throughput in requests a second, and the signed error."""
        return _frame([score.model_dump() for score in self.heights])

    def __repr__(self) -> str:
        return f"Verdict {self.outcome}: {self.sentence}"


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(rows)


def _of_model(model: ModelInfo) -> str:
    emulated = " (emulated compute)" if model.compute == "emulated" else ""
    return f"{model.name}{emulated}, g = {model.instances or 'not stated'}"


def _times(point: CalibrationPoint) -> str:
    if point.service_s is None or point.transport_s is None:
        return "S and D not stated"
    return f"S = {format_duration(point.service_s.mean)}, D = {format_duration(point.transport_s.mean)}"


def _known_laws(point: CalibrationPoint) -> str:
    known = [("transport law", point.transport_law), ("compute law", point.compute_law)]
    return "".join(f", {name}" for name, law in known if law is not None)


AnyRecord = Calibration | Prediction | Measurement | Verdict
RECORD_TYPES: dict[str, type[Calibration] | type[Prediction] | type[Measurement] | type[Verdict]] = {
    "b2g.calibration": Calibration,
    "b2g.prediction": Prediction,
    "b2g.measurement": Measurement,
    "b2g.verdict": Verdict,
}


def json_schema(record_type: type[Record]) -> dict[str, Any]:
    """The record's JSON schema, for the reference pages."""
    return record_type.model_json_schema()
