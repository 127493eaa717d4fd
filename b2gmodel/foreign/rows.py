"""A sweep over concurrency as another tool wrote it: one form for all readers.

Rules here: what a file does not state is None, never 0; times are float seconds; ``throughput_per_s`` counts
inferences, which are requests in our terms, once the batch size is known; a row is one concurrency.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from b2gmodel.errors import EvidenceError, UsageError

MOST_ROWS: Final = 256
LARGEST_COUNT: Final = 1_000_000_000


class Kind(Enum):
    """What wrote a file, for a person."""

    CSV = "perf_analyzer CSV"
    LOG = "perf_analyzer log"
    PROFILE = "perf_analyzer profile export"
    TABLE = "Model Analyzer table"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one concurrency measured.

    Attributes:
        concurrency: requests of the client in flight, M.
        throughput_per_s: inferences a second; of a profile export batches a second, until the batch size is known.
        latency_s: mean over the client's requests, C; ``latency_cv`` and ``quantiles`` (``p50`` ...) of the same.
        queue_s, input_s, infer_s, output_s: the server's means a request.
        network_s: perf_analyzer's own difference, which it cuts off at 0.
        client_s: sending and receiving in the client.
        batches: requests that the client counted; ``failed`` of them got no answer.
        counted, executions: requests and executions of the model that the server counted.
        duration_s: length of the window.
        is_overloaded: the client says that it could not keep so many in flight.
    """

    concurrency: int
    throughput_per_s: float
    latency_s: float | None = None
    latency_cv: float | None = None
    quantiles: Mapping[str, float] | None = None
    queue_s: float | None = None
    input_s: float | None = None
    infer_s: float | None = None
    output_s: float | None = None
    network_s: float | None = None
    client_s: float | None = None
    batches: int | None = None
    failed: int | None = None
    counted: int | None = None
    executions: int | None = None
    duration_s: float | None = None
    is_overloaded: bool = False

    @property
    def service_s(self) -> float | None:
        """S: compute input, infer and output; None where one is not stated."""
        parts = (self.input_s, self.infer_s, self.output_s)
        return None if None in parts else sum(part for part in parts if part is not None)

    @property
    def is_clamped(self) -> bool:
        """Whether the network column is the 0 that stands for a difference below it."""
        return self.network_s == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A file, or several of one run, with its rows in order of concurrency.

    Attributes:
        kinds, files: of what was read; names without their folders.
        batch_size: inferences in a request; None where not stated.
        counts_batches: whether throughput still counts batches.
        protocol: ``http`` or ``grpc``.
        shared_memory: whether the settings say so.
        unstable: concurrencies that the client says did not stabilise.
        knows_stability: whether the file would say.
        limit_ms: latency at which the client broke off.
    """

    kinds: tuple[Kind, ...]
    files: tuple[str, ...]
    rows: tuple[Row, ...]
    batch_size: int | None = None
    counts_batches: bool = False
    protocol: str | None = None
    model: str | None = None
    instances: int | None = None
    max_batch_size: int | None = None
    shared_memory: bool | None = None
    in_process: bool = False
    unstable: tuple[int, ...] = ()
    knows_stability: bool = False
    limit_ms: float | None = None

    @property
    def where(self) -> str:
        return " with ".join(self.files)

    @property
    def alone(self) -> Row | None:
        """The row at concurrency 1, or None."""
        return self.at(1)

    @property
    def peak(self) -> Row:
        """The row of the highest throughput."""
        return max(self.rows, key=lambda row: row.throughput_per_s)

    def at(self, concurrency: int) -> Row | None:
        return next((row for row in self.rows if row.concurrency == concurrency), None)


def ordered(rows: Iterable[Row], where: str) -> tuple[Row, ...]:
    """Rows by concurrency; the same row twice is one.

    Raises:
        EvidenceError: no rows, or two that say different things of one concurrency.
        UsageError: more than ``MOST_ROWS``.
    """
    found: dict[int, Row] = {}
    for row in rows:
        known = found.setdefault(row.concurrency, row)
        if known != row:
            raise EvidenceError(
                f"two rows contradict each other at concurrency {row.concurrency}",
                observed=f"{known.throughput_per_s:.6g} and {row.throughput_per_s:.6g} inferences/s",
                allowed="one row a concurrency",
                where=where,
                hint="import one run at a time",
            )
        if len(found) > MOST_ROWS:
            raise UsageError("too many rows", observed=f"over {MOST_ROWS}", allowed=f"<= {MOST_ROWS}", where=where)
    if not found:
        raise EvidenceError(
            "no row was measured", allowed="at least the row at concurrency 1", where=where, hint="was the run cut off?"
        )
    return tuple(found[concurrency] for concurrency in sorted(found))


def number(text: str | float, *, where: str, least: float = 0.0) -> float:
    """A finite number of at least ``least``. Raises ``UsageError`` that names the field."""
    try:
        # Python reads 1_000 as a number; no tool writes one so.
        value = math.nan if isinstance(text, str) and "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < least:
        raise UsageError(
            "not a measured value",
            observed=str(text)[:60],
            allowed=f"a finite number, at least {least:g}",
            where=where,
            hint="the file was edited or cut off: export it anew",
        )
    return value


def positive(text: str | float, *, where: str) -> float:
    """As :func:`number`, and not 0: a throughput."""
    value = number(text, where=where)
    if value == 0.0:
        raise EvidenceError(
            "nothing was measured", observed=0, allowed="> 0", where=where, hint="every request failed, or none ended"
        )
    return value


def count(text: str | float, *, where: str, least: int = 0) -> int:
    """A whole number. Raises ``UsageError`` that names the field."""
    value = number(text, where=where, least=least)
    if value != int(value) or value > LARGEST_COUNT:
        raise UsageError("not a count", observed=str(text)[:60], allowed="a whole number", where=where)
    return int(value)


def in_inferences(sweep: Sweep, batch_size: int | None, where: str = "--batch-size") -> Sweep:
    """The sweep with its batch size, stated by the file, by the caller, or by its own row at concurrency 1.

    With one request in flight X C / k is the share of time in which there is one: a little below 1. Where one k alone
    fits that, it is the batch size.

    Raises:
        UsageError: none is stated and none follows, or file and caller differ.
    """
    if batch_size is not None and sweep.batch_size not in (None, batch_size):
        raise UsageError(
            "the file states another batch size",
            observed=batch_size,
            allowed=str(sweep.batch_size),
            where=where,
            hint="leave it out",
        )
    known = sweep.batch_size or batch_size or _inferred(sweep)
    if known is None:
        raise UsageError(
            "the batch size is not stated, and does not follow from the rows",
            allowed="the client's -b",
            where=sweep.where,
            hint=f"give {where} K, or the log of the same run as a second file",
        )
    if not sweep.counts_batches:
        return replace(sweep, batch_size=known)
    rows = tuple(replace(row, throughput_per_s=row.throughput_per_s * known) for row in sweep.rows)
    return replace(sweep, batch_size=known, counts_batches=False, rows=rows)


_LEAST_IN_FLIGHT: Final = 0.90
_MOST_IN_FLIGHT: Final = 1.02


def _inferred(sweep: Sweep) -> int | None:
    row = sweep.alone
    if row is None or row.latency_s is None or sweep.counts_batches:
        return None
    in_flight = row.throughput_per_s * row.latency_s
    fitting = range(math.ceil(in_flight / _MOST_IN_FLIGHT), math.floor(in_flight / _LEAST_IN_FLIGHT) + 1)
    return fitting[0] if len(fitting) == 1 and fitting[0] >= 1 else None
