"""The script of the fake server: which models it shows, how long each stage takes, and what goes wrong.

Plain frozen data, exact through JSON and back. No clock, no socket. Times are integer nanoseconds.

Where each delay lands, seen by a client that stamps its own send and receive:

======================== ============================================ ========================= ===========
field of ``Delays``      the server waits                             leg at the client         counters
======================== ============================================ ========================= ===========
``read_delay_ns``        after the request's head, body still unread  send, for a body larger   none
                                                                      than both socket buffers;
                                                                      else server receive
``receive_delay_ns``     body read, before it joins the queue         server receive            none
``queue_delay_ns``       in the queue, then for a free instance       queue                     queue
``compute_input_ns``     holding an instance                          compute input             input
``compute_infer_*_ns``   holding an instance: base + per_row * rows   compute infer             infer
``compute_output_ns``    holding an instance                          compute output            output
``answer_delay_ns``      instance free, before the first answer byte  before the first byte     none
``return_delay_ns``      HTTP head sent, body withheld                return                    none
======================== ============================================ ========================= ===========

``receive_delay_ns`` and ``answer_delay_ns`` both lie between the client's last byte out and its first byte
in, and no counter holds either: only the server's own log (or a real server's trace) tells one from the
other.
"""

from __future__ import annotations

import random
import struct
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import ClassVar, Final, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from b2gmodel.errors import UsageError

STRUCT_CODES: Final = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip
"""KServe datatypes of fixed size and their little-endian ``struct`` codes."""

_CLOSED: Final = ConfigDict(extra="forbid")


class FaultKind(StrEnum):
    """What goes wrong with one inference request. All but the counter faults shape the answer."""

    STATUS = "status"  # an error status with an error body, once the request is read; nothing computed
    CLOSE_BEFORE_ANSWER = "close_before_answer"  # computed and booked, then closed without a byte
    CLOSE_MID_BODY = "close_mid_body"  # head and half of the body, then closed
    SHORT_BODY = "short_body"  # Content-Length promises 64 bytes that never come; the connection stays open
    LONG_BODY = "long_body"  # 64 bytes more than Content-Length says
    WRONG_SHAPE = "wrong_shape"  # one row more in the shape than there are bytes for
    WRONG_DATATYPE = "wrong_datatype"  # another datatype of the same width
    WRONG_ID = "wrong_id"  # the id of no request
    NEVER_ANSWER = "never_answer"  # read, then silence until the client leaves
    COUNTERS_RESET = "counters_reset"  # the model's counters restart at zero before this request is booked
    COUNTERS_BACKWARD = "counters_backward"  # this request is subtracted, modulo 2**64, instead of added
    COUNTERS_LATE = "counters_late"  # booked only ``lag_ns`` after the answer's last byte


@dataclass(frozen=True, slots=True)
class FakeTensor:
    """An input or output: name, KServe datatype, and the shape of one row (-1: any size, inputs only)."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    name: str
    datatype: str
    dims: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.datatype not in STRUCT_CODES and self.datatype != "BYTES":
            raise UsageError(
                "not a datatype",
                observed=self.datatype,
                allowed=", ".join((*STRUCT_CODES, "BYTES")),
                where=self.name,
            )
        if not self.dims or any(dim < 1 and dim != -1 for dim in self.dims):
            raise UsageError("not a shape", observed=list(self.dims), allowed="sizes >= 1, or -1", where=self.name)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a datatype of fixed size."""
        return struct.calcsize("<" + STRUCT_CODES[self.datatype])


@dataclass(frozen=True, slots=True)
class Delays:
    """How long each stage of a request takes, ns; the module's table says where a client sees each."""

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    read_delay_ns: int = 0
    receive_delay_ns: int = 0
    queue_delay_ns: int = 0
    compute_input_ns: int = 0
    compute_infer_base_ns: int = 0
    compute_infer_per_row_ns: int = 0
    compute_output_ns: int = 0
    answer_delay_ns: int = 0
    return_delay_ns: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) < 0:
                raise UsageError(
                    "a delay cannot be negative",
                    observed=getattr(self, field.name),
                    allowed=">= 0 ns",
                    where=field.name,
                )

    def compute_infer_ns(self, rows: int) -> int:
        """Inference time of a batch of ``rows`` rows, ns."""
        return self.compute_infer_base_ns + self.compute_infer_per_row_ns * rows


FINGERPRINT: Final = FakeTensor("fake_output", "UINT64", (1,))
"""The usual output: row i holds the first 8 bytes of row i of the first input, as a little-endian integer."""


@dataclass(frozen=True, slots=True)
class FakeModel:
    """A model as the fake shows it.

    Every output row begins with the row's fingerprint: the first 8 bytes of that row of the first input, with
    zeros where the row is shorter. It is cut or padded with zeros to the output's row; in a BYTES output each
    element is the fingerprint. ``max_batch`` 0 is a model without a batch dimension. ``dynamic_batching`` and
    ``compute`` are labels in the configuration: the fake never merges requests.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    name: str
    inputs: tuple[FakeTensor, ...]
    outputs: tuple[FakeTensor, ...] = (FINGERPRINT,)
    max_batch: int = 8
    instances: int = 1
    dynamic_batching: bool = False
    compute: str = "fake"
    delays: Delays = Delays()

    def __post_init__(self) -> None:
        where = f"model {self.name!r}"
        if not self.inputs or not self.outputs:
            raise UsageError("a model needs at least one input and one output", where=where)
        if self.max_batch < 0 or self.instances < 1:
            raise UsageError(
                "impossible size",
                observed=f"max_batch {self.max_batch}, instances {self.instances}",
                allowed="max_batch >= 0, instances >= 1",
                where=where,
            )
        if any(tensor.datatype == "BYTES" for tensor in self.inputs):
            raise UsageError("the fake takes no BYTES inputs", allowed=", ".join(STRUCT_CODES), where=where)
        if any(dim == -1 for tensor in self.outputs for dim in tensor.dims):
            raise UsageError("an output's shape must be fixed", observed=-1, allowed="sizes >= 1", where=where)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault and the inference requests that it hits.

    ``at``: ordinals of requests, counted from 1 over all models since the script was installed, in the order
    in which their heads arrived. ``probability``: of hitting any request. Give one of the two. ``status``
    belongs to ``STATUS``, ``lag_ns`` to ``COUNTERS_LATE``.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    kind: FaultKind
    at: tuple[int, ...] = ()
    probability: float = 0.0
    status: int = 500
    lag_ns: int = 0

    def __post_init__(self) -> None:
        where = f"fault {self.kind}"
        if bool(self.at) == bool(self.probability):
            raise UsageError("a fault needs its requests or a probability, not both", where=where)
        if any(ordinal < 1 for ordinal in self.at):
            raise UsageError("requests are counted from 1", observed=list(self.at), allowed=">= 1", where=where)
        if not 0 <= self.probability <= 1:
            raise UsageError("not a probability", observed=self.probability, allowed="0 to 1", where=where)
        if not 400 <= self.status <= 599 or self.lag_ns < 0:
            raise UsageError(
                "impossible value",
                observed=f"status {self.status}, lag_ns {self.lag_ns}",
                allowed="status 400 to 599, lag_ns >= 0",
                where=where,
            )


@dataclass(frozen=True, slots=True)
class FakeScript:
    """All that the fake server does.

    ``accept`` False: it listens, so the kernel completes handshakes, and never accepts.
    ``receive_buffer_bytes``: fixes each new connection's receive buffer (the kernel doubles it), so that
    an unread body blocks its sender early; None leaves the kernel's own tuning, under which several MiB may
    pass before a sender blocks.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _CLOSED

    models: tuple[FakeModel, ...]
    faults: tuple[Fault, ...] = ()
    seed: int = 0
    accept: bool = True
    receive_buffer_bytes: int | None = None

    def __post_init__(self) -> None:
        names = [model.name for model in self.models]
        if len(set(names)) != len(names):
            raise UsageError("two models share a name", observed=", ".join(names), where="script")
        if self.receive_buffer_bytes is not None and self.receive_buffer_bytes < 1:
            raise UsageError(
                "not a buffer size",
                observed=self.receive_buffer_bytes,
                allowed=">= 1",
                where="receive_buffer_bytes",
            )

    def faults_of(self, ordinal: int) -> dict[FaultKind, Fault]:
        """The faults that hit request ``ordinal``. The draw depends on seed, fault and ordinal only."""
        return {
            fault.kind: fault
            for index, fault in enumerate(self.faults)
            if ordinal in fault.at or self._draw(index, ordinal) < fault.probability
        }

    def _draw(self, index: int, ordinal: int) -> float:
        return random.Random(f"{self.seed}/{index}/{ordinal}").random()  # noqa: S311 - repeatable, no secret

    def to_json(self) -> str:
        """The script on one line of JSON."""
        return _SCRIPT.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> FakeScript:
        """The script from JSON. Raises ``UsageError`` for a field that is unknown, missing or impossible."""
        try:
            return _SCRIPT.validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            raise UsageError(
                f"not a script of the fake server: {first['msg']}",
                where=".".join(map(str, first["loc"])) or "script",
            ) from None


_SCRIPT: Final = TypeAdapter(FakeScript)


@dataclass(slots=True)
class LogEntry:
    """What the server saw of one inference request; filled in as it proceeds, None where it did not get to.

    Stamps are CLOCK_MONOTONIC ns, so comparable with those of a client on the same host. ``accept_ns`` is
    that of the connection. ``first_byte_ns`` is read before the answer's first send, ``last_byte_ns`` after
    its last.
    """

    number: int
    model: str
    faults: tuple[str, ...]
    accept_ns: int
    header_ns: int
    request_id: str | None = None
    rows: int | None = None
    body_bytes: int | None = None
    status: int | None = None
    body_ns: int | None = None
    queue_start_ns: int | None = None
    compute_start_ns: int | None = None
    input_end_ns: int | None = None
    infer_end_ns: int | None = None
    compute_end_ns: int | None = None
    first_byte_ns: int | None = None
    last_byte_ns: int | None = None

    def to_dict(self) -> dict[str, object]:
        """The entry as it goes into JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, object]) -> Self:
        """The entry from what ``to_dict`` gave, through JSON."""
        return cls(**{**values, "faults": tuple(values["faults"])})  # type: ignore[arg-type]
