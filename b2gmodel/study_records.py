"""The records of a factorial study: its manifest, its runs, and the sessions in which they were made.

The manifest is written once, before the first run; every run and every session names its digest. Missing is None,
never 0. Raw times are integer nanoseconds in the Parquet file beside a run; what is derived from them is float
seconds here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from b2gmodel.records import (
    Clock,
    Count,
    Digest,
    Finite,
    Host,
    ModelInfo,
    Name,
    Positive,
    RawFile,
    Record,
    ServerInfo,
    Software,
    Text,
)

PlacementName = Literal["D0", "C1", "C2", "C3", "C4"]
Clients = Literal["inside", "process"]
AtLeastOne = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
BoottimeNs = Annotated[str, Field(pattern=r"^[0-9]+$")]


class StudyServer(Record):
    """What the study runs on: the embedded Triton, our fake server, or a server that runs already."""

    kind: Literal["embedded", "fake", "url"]
    url: Text | None = None
    grpc_url: Text | None = None


class EmulatedCompute(Record):
    """What the embedded or the fake server is told to be: a batch of k holds an instance for ``s0_s + s1_s * k``."""

    input_shape: Annotated[tuple[AtLeastOne, ...], Field(min_length=1)]
    datatype: Text
    output_shape: Annotated[tuple[AtLeastOne, ...], Field(min_length=1)]
    s0_s: Share
    s1_s: Share
    max_batch: AtLeastOne
    instances: AtLeastOne


class StudyWorkload(Record):
    """One workload: the server's model entries, and the payload of a request.

    ``dynamic_model`` is the entry with the server's own batching, for C2; ``null_model`` the one that computes
    nothing. ``shapes`` fills in dynamic dimensions. ``payload_bytes`` is None where only the server knows it.
    """

    name: Name
    model: Text
    dynamic_model: Text | None
    null_model: Text | None
    payload_bytes: Count | None
    shapes: dict[str, tuple[AtLeastOne, ...]] = Field(default_factory=dict)
    emulated: EmulatedCompute | None = None


class PlacementVersion(Record):
    """The code and settings that a placement runs through, as one digest; runs of two versions are never mixed."""

    placement: PlacementName
    digest: Digest


class Cell(Record):
    """What is run: batches of ``k``, ``flights`` of them at most, from ``concurrency`` closed-loop clients."""

    placement: PlacementName
    k: AtLeastOne
    flights: AtLeastOne
    concurrency: AtLeastOne


class PlannedRun(Record):
    """One run of the plan; its place in the manifest is its turn."""

    session: Count
    workload: Name
    transport: Name
    cell: Cell
    repetition: Count

    @property
    def block(self) -> str:
        """The runs that share one start of the server: one session of one workload over one transport."""
        return f"s{self.session}-{self.workload}-{self.transport}"

    @property
    def run_id(self) -> str:
        cell = self.cell
        what = f"{cell.placement}-k{cell.k}-M{cell.flights}-c{cell.concurrency}"
        return f"{self.block}-{what}-r{self.repetition}"


class Study(Record):
    """A study's manifest: everything that will be run, in order, fixed before the first run.

    ``seconds_per_run`` is the least length of a run: one goes on until a few rounds of all its clients are over.
    ``warmup_rounds`` batches a flight go before a session's first run, for each placement at its widest.
    """

    record: Literal["b2g.study"] = "b2g.study"
    version: Literal[1] = 1
    name: Name
    seed: Count
    server: StudyServer
    clients: Clients
    sessions: AtLeastOne
    repetitions: AtLeastOne
    seconds_per_run: Positive
    warmup_rounds: AtLeastOne
    workloads: Annotated[tuple[StudyWorkload, ...], Field(min_length=1)]
    placements: Annotated[tuple[PlacementVersion, ...], Field(min_length=1)]
    runs: Annotated[tuple[PlannedRun, ...], Field(min_length=1)]
    notes: tuple[str, ...] = ()

    @property
    def blocks(self) -> dict[str, tuple[PlannedRun, ...]]:
        """The runs of each block, blocks and runs in the manifest's order."""
        found: dict[str, list[PlannedRun]] = {}
        for run in self.runs:
            found.setdefault(run.block, []).append(run)
        return {block: tuple(runs) for block, runs in found.items()}

    def workload(self, name: str) -> StudyWorkload:
        """The workload of that name. Raises ``KeyError``."""
        found = next((each for each in self.workloads if each.name == name), None)
        if found is None:
            raise KeyError(f"{name}: this study has {', '.join(each.name for each in self.workloads)}")
        return found

    def __repr__(self) -> str:
        return f"Study {self.name}: {len(self.runs)} runs in {len(self.blocks)} blocks on {self.server.kind}"


class StudyRun(Record):
    """One complete run.

    X counts the requests answered in the window, from where the run has settled to where its load stops. Latencies
    are those of the same requests, from sending to answer, as a client of this placement sees them; ``latency_hdr``
    is their HdrHistogram in ns, in the compressed form that its tools read and merge. ``service_s`` is the server's
    mean over all executions of the run, ``cycle_s`` and ``queue_s`` likewise means; ``transport_s`` = C - S is stated
    where one batch was in flight at a time. ``batch_sizes`` counts the window's batches by the requests in them, as
    the proxy sent them; ``server_batch_sizes`` all executions of the run, as the server formed them.

    Bytes are those on the sockets between whoever sends batches and the server, both ways, a request; None where the
    kernel does not count them. CPU times are those of the whole run, ``elapsed_s`` long: with clients inside, proxy
    and load are one process, and ``cpu_load_s`` is None; the server's is None where it is not on this host.
    """

    record: Literal["b2g.study-run"] = "b2g.study-run"
    version: Literal[1] = 1
    study_digest: Digest
    run_id: Name
    session_id: Name
    placement_digest: Digest
    workload: Name
    model: Text
    payload_bytes: Count
    transport: Name
    clients: Clients
    placement: PlacementName
    k: AtLeastOne
    flights: AtLeastOne
    concurrency: AtLeastOne
    session: Count
    repetition: Count
    begin_boottime_ns: BoottimeNs
    elapsed_s: Positive
    duration_s: Positive
    throughput_per_s: Positive
    requests: AtLeastOne
    sent: Count
    answered: Count
    failed: Count
    mean_s: Positive
    p50_s: Positive
    p90_s: Positive
    p95_s: Positive
    p99_s: Positive
    p999_s: Positive
    max_s: Positive
    latency_hdr: str
    cycle_s: Positive
    service_s: Positive
    queue_s: Finite
    transport_s: Finite | None
    batches: AtLeastOne
    delivered_batches: Count
    server_executions: Count
    server_requests: Count
    batch_sizes: dict[str, int]
    server_batch_sizes: dict[str, int]
    sent_bytes_per_request: Share | None
    received_bytes_per_request: Share | None
    cpu_proxy_s: Share
    cpu_load_s: Share | None
    cpu_server_s: Share | None
    raw: RawFile

    def __repr__(self) -> str:
        return (
            f"StudyRun {self.run_id}: {self.throughput_per_s:.4g} request/s, p50 {self.p50_s * 1e3:.4g} ms, "
            f"p99 {self.p99_s * 1e3:.4g} ms"
        )


class StudyFailure(Record):
    """A run that came to nothing, and why; it is tried again by the next call."""

    record: Literal["b2g.study-failure"] = "b2g.study-failure"
    version: Literal[1] = 1
    study_digest: Digest
    run_id: Name
    session_id: Name
    begin_boottime_ns: BoottimeNs
    kind: Text
    error: Text


class Noise(Record):
    """What else goes on on this host: how late sleeps of a millisecond end, and the load average."""

    overshoot_p50_s: Finite
    overshoot_p99_s: Finite
    load_1min: Share


class ServedModel(Record):
    """A model entry as its server described it; ``configuration`` is its JSON, ``digest`` that text's SHA-256."""

    info: ModelInfo
    digest: Digest
    configuration: Annotated[str, Field(max_length=1 << 20)]


class StudySession(Record):
    """Server, proxy and load of one block started afresh. Written at its begin, completed at its end.

    ``end_boottime_ns`` and all beside it are None in a session that was broken off. ``prediction_digest`` is that of
    the prediction that was frozen before it; the id of each of its requests begins with it.
    """

    record: Literal["b2g.study-session"] = "b2g.study-session"
    version: Literal[1] = 1
    study_digest: Digest
    session_id: Name
    block: Name
    session: Count
    workload: Name
    transport: Name
    host: Host
    software: Software
    clock: Clock
    server: ServerInfo
    server_restarted: bool
    models: tuple[ServedModel, ...]
    warmup_batches: Count
    begin_boottime_ns: BoottimeNs
    noise_before: Noise
    end_boottime_ns: BoottimeNs | None = None
    noise_after: Noise | None = None
    runs: Count | None = None
    runs_s: Share | None = None
    prediction_digest: Digest | None = None

    @model_serializer(mode="wrap")
    def _leave_out_no_prediction(self, fields_of: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Sessions that were kept before they named it keep their bytes."""
        fields: dict[str, Any] = fields_of(self)
        return fields if self.prediction_digest else {k: v for k, v in fields.items() if k != "prediction_digest"}
