"""One run of a study as it was taken, and what it comes to: the same figures whoever sent the requests."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from b2gmodel.errors import EvidenceError, ServerError
from b2gmodel.flights import Flight
from b2gmodel.live.bench import Bench, Setting
from b2gmodel.live.kserve import NO_EXECUTIONS, BatchCounters, ModelCounters
from b2gmodel.live.load_tally import Quantiles, Times
from b2gmodel.live.meter import Meter, Usage
from b2gmodel.live.point import Table
from b2gmodel.study_records import Cell
from b2gmodel.units import NS_PER_S, s_from_ns

WARMUP_SHARE: Final = 0.25
LEAST_WARMUP_S: Final = 0.25
PATIENCE_S: Final = 30.0
SETTINGS: Final[dict[str, dict[str, float]]] = {
    "inside": {"settling_rounds": 2, "least_rounds": 3},
    "process": {"warmup_share": WARMUP_SHARE, "least_warmup_s": LEAST_WARMUP_S, "patience_s": PATIENCE_S},
}
"""What the placements' versions hold beside the code, by where the clients are."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a run came to.

    Attributes:
        flights: all batches, in order of delivery.
        settled, stopped: the numbers of the first that counts, and of the first that no longer does.
        elapsed_s, duration_s: of the whole run, and of its window.
        requests: answered in the window.
        sent, answered: of the whole run.
        latency, latency_hdr: of the requests answered in the window.
        before, after: the server's counters.
        usage, load_s: what it used; processor seconds of a load in a process of its own.
    """

    flights: tuple[Flight, ...]
    settled: int
    stopped: int
    elapsed_s: float
    duration_s: float
    requests: int
    sent: int
    answered: int
    latency: Quantiles
    latency_hdr: str
    before: ModelCounters
    after: ModelCounters
    usage: Usage
    load_s: float | None


def setting_of(cell: Cell) -> Setting:
    """The cell as a bench runs it."""
    return Setting(cell.placement, cell.k, cell.flights, cell.concurrency)


async def take_inside(bench: Bench, cell: Cell, label: str, seconds: float, meter: Meter) -> Figures:
    """One run with its callers in this process.

    Raises:
        ServerError: the server failed.
        EvidenceError: counts do not balance.
    """
    begin_ns = time.monotonic_ns()
    taken = await bench.take(setting_of(cell), label, seconds, meter)
    elapsed_s = s_from_ns(time.monotonic_ns() - begin_ns)
    assert taken.usage is not None
    driven = taken.driven
    rows = sum(flight.size for flight in driven.flights)
    check_balance(label, {"answers": len(driven.waits_ns), "requests in batches": rows})
    opened_ns, closed_ns = driven.window_ns
    waits_ns = [got - sent for sent, got in driven.waits_ns if opened_ns < got <= closed_ns]
    if not waits_ns or closed_ns <= opened_ns:
        raise EvidenceError("the run was too short for a figure", where=label, hint="plan more seconds_per_run")
    return Figures(
        flights=driven.flights,
        settled=driven.settled,
        stopped=driven.stopped,
        elapsed_s=elapsed_s,
        duration_s=s_from_ns(closed_ns - opened_ns),
        requests=sum(flight.size for flight in driven.counted),
        sent=len(driven.waits_ns),
        answered=len(driven.waits_ns),
        latency=quantiles_of(waits_ns),
        latency_hdr=_histogram_of(waits_ns),
        before=taken.before,
        after=taken.after,
        usage=taken.usage,
        load_s=None,
    )


def quantiles_of(times_ns: Sequence[int]) -> Quantiles:
    """Each quantile is one of the times, the least that as large a share lies at or below; exact, as the mean is."""
    values = np.array(times_ns, dtype=np.int64)
    p50, p90, p95, p99, p999 = (
        int(value) for value in np.quantile(values, (0.5, 0.9, 0.95, 0.99, 0.999), method="inverted_cdf")
    )
    return Quantiles(
        len(values), int(values.min()), float(values.mean()), p50, p90, p95, p99, p999, max_ns=int(values.max())
    )


def _histogram_of(times_ns: Sequence[int]) -> str:
    times = Times()
    for time_ns in times_ns:
        times.record(time_ns)
    return times.encoded()


def check_balance(label: str, counts: dict[str, int]) -> None:
    """Raises ``EvidenceError`` where counts of the same thing differ."""
    if len(set(counts.values())) != 1:
        seen = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise EvidenceError("the run's counts do not balance", observed=seen, allowed="all equal", where=label)


def values_of(figures: Figures, cell: Cell) -> dict[str, Any]:
    """The run's record, what was measured of it: the fields of ``StudyRun`` from ``elapsed_s`` on, less ``raw``."""
    counted = figures.flights[figures.settled : figures.stopped]
    sizes = Counter(flight.size for flight in counted)
    booked = _booked(figures)
    executions = sum(each.executions for each in booked.values())
    if not executions:
        raise ServerError("the server's counters hold no batch sizes", hint="does this server keep batch statistics?")
    service_s = s_from_ns(sum(each.service_ns for each in booked.values())) / executions
    cycle_s = sum(flight.cycle_ns for flight in counted) / len(counted) / NS_PER_S
    rows = sum(flight.size for flight in figures.flights)
    single = cell.flights == 1
    return {
        "elapsed_s": figures.elapsed_s,
        "duration_s": figures.duration_s,
        "throughput_per_s": figures.requests / figures.duration_s,
        "requests": figures.requests,
        "sent": figures.sent,
        "answered": figures.answered,
        "failed": figures.sent - figures.answered,
        **_latency_s(figures.latency),
        "latency_hdr": figures.latency_hdr,
        "cycle_s": cycle_s,
        "service_s": service_s,
        # Charged once for each batch that was sent, however the server then merged them.
        "queue_s": s_from_ns(figures.after.queue_ns - figures.before.queue_ns) / len(figures.flights),
        "transport_s": cycle_s - service_s if single else None,
        "batches": len(counted),
        "delivered_batches": len(figures.flights),
        "server_executions": figures.after.executions - figures.before.executions,
        "server_requests": figures.after.inferences - figures.before.inferences,
        "batch_sizes": {str(size): sizes[size] for size in sorted(sizes)},
        "server_batch_sizes": {str(size): each.executions for size, each in booked.items()},
        "sent_bytes_per_request": _per_request(figures.usage.sent_bytes, rows),
        "received_bytes_per_request": _per_request(figures.usage.received_bytes, rows),
        "cpu_proxy_s": figures.usage.ours_s,
        "cpu_load_s": figures.load_s,
        "cpu_server_s": figures.usage.server_s,
    }


def _booked(figures: Figures) -> dict[int, BatchCounters]:
    """What the server booked for each size of batch that it executed."""
    after, before = figures.after.by_batch_size, figures.before.by_batch_size
    added = {size: after[size].since(before.get(size, NO_EXECUTIONS)) for size in sorted(after)}
    return {size: each for size, each in added.items() if each.executions}


def _latency_s(latency: Quantiles) -> dict[str, float]:
    return {
        "mean_s": latency.mean_ns / NS_PER_S,
        **{f"{name}_s": s_from_ns(getattr(latency, f"{name}_ns")) for name in ("p50", "p90", "p95", "p99", "p999")},
        "max_s": s_from_ns(latency.max_ns),
    }


def _per_request(total_bytes: int | None, requests: int) -> float | None:
    return None if total_bytes is None else total_bytes / requests


def table_of(figures: Figures) -> Table:
    """The run's flights as columns: integer nanoseconds on CLOCK_MONOTONIC."""
    flights = figures.flights
    times = [flight.times for flight in flights]
    return {
        "flight_id": [flight.flight_id for flight in flights],
        "size": [flight.size for flight in flights],
        "counted": [figures.settled <= number < figures.stopped for number in range(len(flights))],
        "failed": [flight.failed for flight in flights],
        "oldest_arrival_ns": [flight.oldest_arrival_ns for flight in flights],
        "sealed_ns": [flight.sealed_ns for flight in flights],
        "send_begin_ns": [time.send_begin_ns for time in times],
        "send_end_ns": [time.send_end_ns for time in times],
        "first_byte_ns": [time.first_byte_ns for time in times],
        "response_end_ns": [time.response_end_ns for time in times],
        "delivered_ns": [flight.delivered_ns for flight in flights],
    }
