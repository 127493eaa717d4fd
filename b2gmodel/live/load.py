"""The load: what to send, the process that sends it, and what came of it.

The generator runs in a process of its own, so that it shares no interpreter with a proxy under test. That
process ends with its load, with its parent, or when its time is up, whichever comes first.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, ClassVar, Final

from hdrh.histogram import HdrHistogram
from hdrh.log import HistogramLogWriter
from pydantic import ConfigDict, TypeAdapter

from b2gmodel.errors import B2GError, EvidenceError, ServerError, SetupError, UsageError
from b2gmodel.live import messages
from b2gmodel.live.latest import Latest, tell
from b2gmodel.live.load_plan import Arrivals
from b2gmodel.live.load_tally import LoadOutcome, Quantiles
from b2gmodel.live.messages import Datatype, Limits
from b2gmodel.live.observer import Outcome, Snapshot
from b2gmodel.live.tensors import BYTES_PER_ELEMENT, TensorSpec
from b2gmodel.live.tls import ClientTls

MAX_CONNECTIONS: Final = 8192
MAX_RATE_PER_S: Final = 100_000.0
MAX_SCHEDULED: Final = 50_000_000
MAX_DURATION_S: Final = 24 * 3600.0
MAX_SEED: Final = 2**53 - 1

CONNECT_S: Final = 30.0
_START_S: Final = 60.0
_CLOSED: Final = ConfigDict(extra="forbid")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients that each send, wait for the answer, think for ``think_s``, and send again."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    clients: int
    think_s: float = 0.0

    @property
    def connections(self) -> int:
        """One for each client."""
        return self.clients


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests at intended times that do not depend on answers, over a shared pool of ``connections``.

    A connection carries one request at a time. To see a proxy answer BUSY there must be more of them than
    requests that fit into its queue and its flights.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    rate_per_s: float
    arrivals: Arrivals = Arrivals.POISSON
    connections: int = 512


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """A load.

    Attributes:
        host, port: the proxy's.
        model: what is asked for.
        inputs: one request's tensors, shapes without the batch dimension.
        loop: closed or open.
        duration_s: for how long requests are sent.
        warmup_s: how much of that, from its begin, is left out of throughput and latency.
        deadline_s: given to the proxy with each request; None for none.
        patience_s: how long after the end answers are waited for, and what an open loop is behind with is sent.
        seed: of the payloads and of Poisson arrivals.
        verify: compare each answer with the reference workloads' fingerprint of its request.
        tls: whom to trust, and who to be; None for a proxy without TLS.

    Raises:
        UsageError: a value out of its range.
        WireError: a name that the protocol does not allow.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    host: str
    port: int
    model: str
    inputs: tuple[TensorSpec, ...]
    loop: ClosedLoop | OpenLoop
    duration_s: float = 10.0
    warmup_s: float = 1.0
    deadline_s: float | None = None
    patience_s: float = 10.0
    seed: int = 0
    verify: bool = False
    tls: ClientTls | None = None

    def __post_init__(self) -> None:
        self._check_times()
        self._check_loop()
        _within("seed", self.seed, 0, MAX_SEED)
        _within("port", self.port, 1, 65535)
        for tensor in self.inputs:
            if tensor.datatype not in BYTES_PER_ELEMENT:
                raise UsageError(
                    "a datatype that cannot be made up",
                    observed=tensor.datatype,
                    allowed=", ".join(BYTES_PER_ELEMENT),
                    where=f"input {tensor.name}",
                )
        _within("payload_bytes", self.payload_bytes, 0, Limits().payload_bytes)
        messages.Request(1, self.model, None, self.wire_inputs)  # names and shapes that the protocol does not allow
        if self.verify and (len(self.inputs) != 1 or not self.payload_bytes):
            raise UsageError(
                "an answer's fingerprint is that of one input",
                observed=f"{len(self.inputs)} inputs, {self.payload_bytes} bytes",
                allowed="one input that is not empty",
                where="verify",
            )

    def _check_times(self) -> None:
        _within("duration_s", self.duration_s, 1e-3, MAX_DURATION_S)
        _within("patience_s", self.patience_s, 1e-3, MAX_DURATION_S)
        if self.deadline_s is not None:
            _within("deadline_s", self.deadline_s, 1e-9, MAX_DURATION_S)
        if not 0 <= self.warmup_s < self.duration_s:
            allowed = f"0 s to less than the duration, {self.duration_s:g} s"
            raise UsageError("the warm-up leaves nothing", observed=self.warmup_s, allowed=allowed, where="warmup_s")

    def _check_loop(self) -> None:
        if isinstance(self.loop, ClosedLoop):
            _within("clients", self.loop.clients, 1, MAX_CONNECTIONS)
            _within("think_s", self.loop.think_s, 0, MAX_DURATION_S)
            return
        _within("connections", self.loop.connections, 1, MAX_CONNECTIONS)
        _within("rate_per_s", self.loop.rate_per_s, 1e-3, MAX_RATE_PER_S)
        _within("rate_per_s times duration_s", self.loop.rate_per_s * self.duration_s, 0, MAX_SCHEDULED)

    @property
    def wire_inputs(self) -> tuple[messages.TensorSpec, ...]:
        """The inputs as a request's head names them."""
        return tuple(
            messages.TensorSpec(each.name, Datatype[each.datatype], each.shape, each.row_bytes) for each in self.inputs
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of one request's inputs."""
        return sum(tensor.row_bytes for tensor in self.inputs)

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What came of a load.

    Attributes:
        spec: the load.
        begun_unix_s: wall clock at its begin, for logs alone.
        sent: requests sent; always the sum of ``outcomes``.
        outcomes: every ``LoadOutcome`` is a key.
        unsent: of an open loop's schedule, what was never sent: no connection was free in time.
        late: of an open loop, requests sent more than 1 ms after their intended time; None in a closed one.
        starved: of an open loop, requests for which no connection was free at their time; None in a closed one.
        window_s: the steady window: after the warm-up, before the end.
        window_answers: results that came within it.
        latency: of the requests answered that were due within it; None where there are none.
        lateness: sending after the intended time, over the whole open loop; None in a closed one.
        latency_hdr: ``latency`` as an encoded HdrHistogram, in ns.
        wrong_answers: results without the right fingerprint; None where that was not asked for.
        lost_reasons: why connections ended, with how many of them.
        reconnects: connections opened again.
        distinct_payloads: payloads in memory; connections share them where they would not fit.
        request_bytes, result_bytes: payload bytes of the requests sent, and of the results.
        cpu_share: of one core, the generator's: near 1, it is what was measured.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    spec: LoadSpec
    begun_unix_s: float
    sent: int
    outcomes: dict[LoadOutcome, int]
    unsent: int
    late: int | None
    starved: int | None
    window_s: float
    window_answers: int
    latency: Quantiles | None
    lateness: Quantiles | None
    latency_hdr: str
    wrong_answers: int | None
    lost_reasons: dict[str, int]
    reconnects: int
    distinct_payloads: int
    request_bytes: int
    result_bytes: int
    cpu_share: float

    @property
    def throughput_per_s(self) -> float:
        """Results a second, over the steady window."""
        return self.window_answers / self.window_s

    def to_dict(self) -> dict[str, Any]:
        """The result as it goes into JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LoadResult:
        """The result from what ``to_dict`` gave, through JSON."""
        return _RESULT.validate_python(values)

    def write_hdr_log(self, path: Path) -> None:
        """Write the latencies as a log that HdrHistogram's tools read. Raises ``UsageError`` where it cannot be."""
        try:
            with path.open("x", encoding="utf-8") as file:
                log = HistogramLogWriter(file)
                log.output_comment("[latency in ns; maximum in ms; the steady window of one load]")
                log.output_log_format_version()
                log.output_base_time(self.begun_unix_s * 1000)
                log.output_legend()
                begin_s = self.spec.warmup_s or 1e-6  # the writer takes 0 for a time that it has to look up
                log.output_interval_histogram(HdrHistogram.decode(self.latency_hdr), begin_s, begin_s + self.window_s)
        except OSError as error:
            raise UsageError(
                f"cannot write the histogram ({error.strerror or error})",
                observed=str(path),
                where="--hdr",
                hint="name a file that is not there yet",
            ) from error


_SPEC: Final = TypeAdapter(LoadSpec)
_EVENT: Final[TypeAdapter[dict[str, Any]]] = TypeAdapter(dict[str, Any])
_RESULT: Final = TypeAdapter(LoadResult)
_ERRORS: Final = {kind.__name__: kind for kind in (UsageError, ServerError, SetupError, EvidenceError)}


def spec_to_json(spec: LoadSpec) -> bytes:
    """The spec on one line."""
    return _SPEC.dump_json(spec)


def spec_from_json(line: bytes) -> LoadSpec:
    """The spec from what ``spec_to_json`` gave."""
    return _SPEC.validate_json(line)


def event_to_json(event: dict[str, Any]) -> bytes:
    """An event of the generator on one line."""
    return _EVENT.dump_json(event)


def run_load(spec: LoadSpec, progress: Progress = lambda _stage, _share: None) -> LoadResult:
    """Send the load from a process of its own, and wait for its end.

    Args:
        spec: the load.
        progress: called with what is being done and the share of it that is done.

    Raises:
        UsageError: no proxy there, or it refuses these requests: another model, shape or datatype.
        EvidenceError: the generator was ended from outside.
        B2GError: the generator failed.
    """
    limit_s = _START_S + CONNECT_S + spec.duration_s + spec.patience_s
    with tempfile.TemporaryFile() as errors, _generator(errors, limit_s) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(spec_to_json(spec) + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone; how it ended says why
        for line in process.stdout:
            event = _EVENT.validate_json(line)
            if event["event"] == "result":
                return LoadResult.from_dict(event["result"])
            if event["event"] == "failed":
                raise _failure(event)
            tell(Latest(throughput_per_s=event["per_s"]))
            progress(event["stage"], event["share"])
        raise _ended(process.wait(), errors)


def counts_agree(load: LoadResult, after: Snapshot, before: Snapshot | None = None) -> list[str]:
    """Each disagreement between a load's counts and its proxy's, in a line; empty where they agree.

    Where every request has its answer, all counts must be equal. What became of a request whose answer was
    lost, or not waited for, the load cannot know: as many requests may differ, and no more.

    Args:
        load: the only load that the proxy had.
        after: the proxy's counters once the load has ended.
        before: its counters before the load; None for a proxy that had served nothing.
    """
    received = after.received - (before.received if before else 0)
    ended = {each: count - (before.outcomes[each] if before else 0) for each, count in after.outcomes.items()}
    unknown = load.outcomes[LoadOutcome.LOST] + load.outcomes[LoadOutcome.UNANSWERED]
    found = []
    if not load.sent - unknown <= received <= load.sent:
        found.append(f"received: the proxy {received}, the load sent {load.sent}, {unknown} of them without an answer")
    for outcome in Outcome:
        theirs = ended[outcome]
        ours = load.outcomes[LoadOutcome(outcome)] if outcome in _SHARED else 0
        if not ours <= theirs <= ours + unknown:
            found.append(f"{outcome}: the proxy {theirs}, the load {ours} and {unknown} without an answer")
    if unknown == 0:
        bytes_in = after.bytes_in - (before.bytes_in if before else 0)
        bytes_out = after.bytes_out - (before.bytes_out if before else 0)
        for name, theirs, ours in (("in", bytes_in, load.request_bytes), ("out", bytes_out, load.result_bytes)):
            if theirs != ours:
                found.append(f"bytes {name}: the proxy {theirs}, the load {ours}")
    return found


_SHARED: Final = frozenset(Outcome) & frozenset(LoadOutcome)


@contextmanager
def _generator(errors: IO[bytes], limit_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """The generator's process. It does not outlive the block, and is killed when its time is up."""
    process = subprocess.Popen(
        [sys.executable, "-m", "b2gmodel.live.load_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
    )
    bound = threading.Timer(limit_s, process.kill)
    bound.daemon = True
    bound.start()
    try:
        yield process
    finally:
        bound.cancel()
        process.kill()
        process.communicate()


def _failure(event: dict[str, Any]) -> B2GError:
    facts = {key: event[key] for key in ("observed", "allowed", "where", "hint")}
    return _ERRORS.get(event["type"], B2GError)(event["problem"], **facts)


def _ended(code: int, errors: IO[bytes]) -> EvidenceError:
    errors.seek(0)
    words = errors.read().decode(errors="replace").strip().splitlines()
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return EvidenceError(
        "the load generator ended before its result",
        observed=f"{how}: {words[-1][:200]}" if words else how,
        hint="run the load again, and leave its process alone",
    )


def _within(where: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise UsageError("out of range", observed=value, allowed=f"{least:g} to {most:g}", where=where)
