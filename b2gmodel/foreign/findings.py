"""What a sweep shows beside its figures: what makes the closed form lie here, and what to know before believing it.

Rules here: each finding has a number and its bound, and is made only where the number lies beyond it; what the file
states or counts is *shown*, what only follows from times is *suspected*. Where a finding blocks, no M* is given.

Little's law: requests in service at once, on all instances, are X S / k, with S as the server booked it for a request.
The server books the whole of an execution to each request in it, so more than g of them means more instances than g, or
merging; with merging S grows with the number in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from b2gmodel.foreign.rows import Kind, Row, Sweep

# Beyond these something is said. Shares, but for the transport rate.
MERGED: Final = 1.02
IN_SERVICE: Final = 1.05
GROWN: Final = 1.20
CHANGED: Final = 0.05
QUEUED: Final = 0.10
FREE_TRANSPORT: Final = 0.05
SOCKET_BYTES_PER_S: Final = 10e9
LOST: Final = 0.01
IDLE: Final = 0.90
ROUNDED: Final = 0.05
_ROUNDING_S: Final = 0.15e-3
FLAT: Final = 0.05


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to know.

    Attributes:
        name: stable, for programs.
        is_shown: whether the file states or counts it; else it is suspected.
        blocks: whether the closed form does not apply.
        observed, bound: the number and what it passed, in words.
        sentence: what it means, a clause.
    """

    name: str
    is_shown: bool
    blocks: bool
    observed: str
    bound: str
    sentence: str

    @property
    def line(self) -> str:
        """For a person."""
        how = "shown" if self.is_shown else "suspected"
        return f"{self.name} ({how}): {self.sentence}: {self.observed}; bound: {self.bound}"


def findings_of(sweep: Sweep, payload_bytes: int | None = None) -> tuple[Finding, ...]:
    """All findings, in the order in which they matter.

    Args:
        sweep: in inferences, with its batch size and instances where known.
        payload_bytes: of a request; None where not known.
    """
    found = (
        _merging(sweep),
        _several_instances(sweep),
        _negative(sweep),
        _in_process(sweep),
        _shared_memory(sweep, payload_bytes),
        _waits_alone(sweep),
        _grows(sweep),
        _idle_plateau(sweep),
        _unstable(sweep),
        _limit(sweep),
        _failed(sweep),
        _overloaded(sweep),
        _clamped(sweep),
        _rounded(sweep),
        _unsaid(sweep),
    )
    return tuple(each for each in found if each is not None)


def in_service(sweep: Sweep, row: Row) -> float | None:
    """Requests of the client in service at once, X S / k; None where S is not stated."""
    if row.service_s is None or sweep.batch_size is None:
        return None
    return row.throughput_per_s * row.service_s / sweep.batch_size


def _merging(sweep: Sweep) -> Finding | None:
    counted = [row for row in sweep.rows if row.executions and row.counted]
    most = max(counted, key=lambda row: (row.counted or 0) / (row.executions or 1), default=None)
    if most is not None:
        together = (most.counted or 0) / (most.executions or 1)
        if together > MERGED:
            return Finding(
                "dynamic-batching", True, True,
                f"{most.counted} requests in {most.executions} executions at M = {most.concurrency}",
                f"{MERGED:g} requests an execution",
                "the server merges requests in flight, so that S depends on M",
            )  # fmt: skip
        return None
    busiest, grown = _busiest(sweep), _growth(sweep)
    if busiest is None or grown is None or busiest[1] <= (sweep.instances or 1) * IN_SERVICE or grown <= GROWN:
        return None
    return Finding(
        "dynamic-batching", False, True,
        f"{busiest[1]:.1f} requests in service at once at M = {busiest[0].concurrency}, in {grown:.2f} times S alone",
        f"{(sweep.instances or 1) * IN_SERVICE:g} in service, {GROWN:g} times S",
        "the server seems to merge requests in flight; the log of the run would show its executions",
    )  # fmt: skip


def _several_instances(sweep: Sweep) -> Finding | None:
    known, busiest = sweep.instances or 1, _busiest(sweep)
    if _merging(sweep) is not None or busiest is None or busiest[1] <= known * IN_SERVICE:
        return None
    return Finding(
        "several-instances", any(row.executions for row in sweep.rows), True,
        f"{busiest[1]:.2f} requests in service at once at M = {busiest[0].concurrency}", f"{known * IN_SERVICE:g}",
        f"X lies above what {known} instance(s) can compute, so that more run; give --instances",
    )  # fmt: skip


def _busiest(sweep: Sweep) -> tuple[Row, float] | None:
    known = [(row, share) for row in sweep.rows if (share := in_service(sweep, row)) is not None]
    return max(known, key=lambda each: each[1], default=None)


def _growth(sweep: Sweep) -> float | None:
    """S at the row with most in service over S alone."""
    alone, busiest = sweep.alone, _busiest(sweep)
    if alone is None or not alone.service_s or busiest is None or busiest[0].service_s is None:
        return None
    return busiest[0].service_s / alone.service_s


def _negative(sweep: Sweep) -> Finding | None:
    alone = sweep.alone
    if alone is None or alone.latency_s is None or alone.service_s is None or alone.service_s <= alone.latency_s:
        return None
    return Finding(
        "service-over-cycle", True, False,
        f"S / C = {alone.service_s / alone.latency_s:.3f}", "1",
        "the server booked more time than a request took: averages of two clocks, D comes out negative and is kept so",
    )  # fmt: skip


def _in_process(sweep: Sweep) -> Finding | None:
    if not sweep.in_process:
        return None
    return Finding(
        "in-process", True, False, "service kind TRITON_C_API", "TRITON",
        "the server ran within the client: D is no transport, and a gateway's will be longer",
    )  # fmt: skip


def _shared_memory(sweep: Sweep, payload_bytes: int | None) -> Finding | None:
    if sweep.shared_memory:
        return Finding(
            "shared-memory", True, False, "--shared-memory in the command", "none",
            "tensors did not travel: D is that of a client in the server's machine",
        )  # fmt: skip
    alone = sweep.alone
    if sweep.shared_memory is False or alone is None or alone.latency_s is None or alone.service_s is None:
        return None
    transport_s = alone.latency_s - alone.service_s - (alone.queue_s or 0.0)
    if payload_bytes and sweep.batch_size and transport_s > 0:
        rate = payload_bytes * sweep.batch_size / transport_s
        if rate <= SOCKET_BYTES_PER_S:
            return None
        return Finding(
            "shared-memory", False, False, f"{rate / 1e9:.0f} GB/s", f"{SOCKET_BYTES_PER_S / 1e9:g} GB/s",
            "the inputs would have passed faster than through a socket: shared memory, or another payload",
        )  # fmt: skip
    if transport_s > FREE_TRANSPORT * alone.service_s:
        return None
    return Finding(
        "shared-memory", False, False, f"transport {transport_s / alone.service_s:.1%} of S", f"{FREE_TRANSPORT:.0%}",
        "transport costs next to nothing: shared memory, or a small payload; --payload would tell",
    )  # fmt: skip


def _waits_alone(sweep: Sweep) -> Finding | None:
    alone = sweep.alone
    if alone is None or alone.queue_s is None or not alone.service_s or alone.queue_s <= QUEUED * alone.service_s:
        return None
    return Finding(
        "queue-delay", True, False, f"{alone.queue_s * 1e3:.3g} ms, {alone.queue_s / alone.service_s:.0%} of S",
        f"{QUEUED:.0%} of S",
        "a lone request waits in the server's queue, for others to merge with or for another client; D holds that wait",
    )  # fmt: skip


def _grows(sweep: Sweep) -> Finding | None:
    """Not where the server merges, which is why S grows there."""
    change = (_growth(sweep) or 1.0) - 1
    if abs(change) <= CHANGED or _merging(sweep) is not None:
        return None
    return Finding(
        "service-under-load", True, False, f"{change:+.1%} at the busiest row", f"{CHANGED:.0%}",
        "S under load is not S alone: transport and compute share something, or clocks change; X will miss the promise",
    )  # fmt: skip


def _idle_plateau(sweep: Sweep) -> Finding | None:
    """X no longer rises, and yet the instances idle: something in front of them is full."""
    busiest, last, before = _busiest(sweep), sweep.rows[-1], sweep.rows[-2:-1]
    if busiest is None or not before or last.concurrency <= 2 or _merging(sweep) is not None:
        return None
    share = max(busiest[1] / (sweep.instances or 1), 0.0)
    rises = last.throughput_per_s / before[0].throughput_per_s - 1
    if share >= IDLE or rises > FLAT:
        return None
    return Finding(
        "idle-plateau", False, False, f"instances busy {share:.0%} at most, X changes by {rises:+.1%} at the end",
        f"busy {IDLE:.0%}, or X rising by {FLAT:.0%}",
        "the client, its channel, the link or the server's frontend limits X, and not compute",
    )  # fmt: skip


def _unstable(sweep: Sweep) -> Finding | None:
    if not sweep.unstable:
        return None
    return Finding(
        "unstable", True, False, f"M = {', '.join(map(str, sweep.unstable))}", "stable within the client's windows",
        "rows that did not stabilise are left out",
    )  # fmt: skip


def _limit(sweep: Sweep) -> Finding | None:
    if sweep.limit_ms is None:
        return None
    return Finding(
        "latency-limit", True, False, f"over {sweep.limit_ms:g} ms", "the client's --latency-threshold",
        "the client broke off, so that the peak may lie beyond the last row",
    )  # fmt: skip


def _failed(sweep: Sweep) -> Finding | None:
    lost = [(row.failed / (row.batches + row.failed), row) for row in sweep.rows if row.failed and row.batches]
    lost += [
        (abs(row.batches - row.counted) / row.batches, row)
        for row in sweep.rows
        if row.batches and row.counted is not None
    ]
    share, row = max(lost, key=lambda each: each[0], default=(0.0, sweep.rows[0]))
    if share <= LOST:
        return None
    return Finding(
        "requests-lost", True, False, f"{share:.1%} at M = {row.concurrency}", f"{LOST:.0%}",
        "requests got no answer, or client and server counted different ones",
    )  # fmt: skip


def _overloaded(sweep: Sweep) -> Finding | None:
    late = [row.concurrency for row in sweep.rows if row.is_overloaded]
    if not late:
        return None
    return Finding(
        "client-limited", True, False, f"M = {', '.join(map(str, late))}", "the client keeps up",
        "the client warns that it could not keep so many in flight: X there is its own limit",
    )  # fmt: skip


def _clamped(sweep: Sweep) -> Finding | None:
    clamped = [row.concurrency for row in sweep.rows if row.is_clamped]
    if not clamped:
        return None
    return Finding(
        "network-cut-off", True, False, f"0 at M = {', '.join(map(str, clamped))}", "> 0",
        "the network column is a difference of averages that is cut off at 0; nothing here is computed from it there",
    )  # fmt: skip


def _rounded(sweep: Sweep) -> Finding | None:
    """Three figures rounded to 0.1 ms each are off by 0.15 ms together at most."""
    alone = sweep.alone
    if Kind.TABLE not in sweep.kinds or alone is None or not alone.service_s:
        return None
    error = _ROUNDING_S / alone.service_s
    if error <= ROUNDED:
        return None
    return Finding(
        "rounded", True, False, f"S known within {error:.0%}", f"{ROUNDED:.0%}",
        "Model Analyzer rounds times to 0.1 ms, which is much of this S: M* is as uncertain",
    )  # fmt: skip


def _unsaid(sweep: Sweep) -> Finding | None:
    if sweep.knows_stability:
        return None
    return Finding(
        "stability-not-stated", True, False, ", ".join(kind.value for kind in sweep.kinds), Kind.LOG.value,
        "whether rows stabilised stands in the log alone",
    )  # fmt: skip
