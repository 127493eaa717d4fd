"""One run with the clients in a process of their own: the listening proxy here, the load generator there.

Proxy and load are made afresh for each run. Proxy and load must agree on what became of every request, and the server
on every batch.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from b2gmodel.errors import EvidenceError, ServerError
from b2gmodel.flights import Flight
from b2gmodel.live.bench import booked_requests, check_counts
from b2gmodel.live.kserve import ControlPlane, ModelSpec
from b2gmodel.live.load import ClosedLoop, LoadResult, LoadSpec, counts_agree, run_load
from b2gmodel.live.load_tally import LoadOutcome
from b2gmodel.live.meter import Meter, Usage
from b2gmodel.live.observer import Outcome
from b2gmodel.live.proxy import Proxy, ProxyLimits
from b2gmodel.live.stall import refuse_still_flights
from b2gmodel.live.study_take import LEAST_WARMUP_S, PATIENCE_S, WARMUP_SHARE, Figures, check_balance, setting_of
from b2gmodel.live.transport import Transport
from b2gmodel.study_records import Cell
from b2gmodel.units import ns_from_s, s_from_ns

_DRAIN_S: Final = 10.0
_MOST_IDLE: Final = 1024
_AFTER_END_S: Final = 0.005


@dataclass(slots=True)
class _Flights:
    """Keeps the flights, in order of delivery."""

    seen: list[Flight] = field(default_factory=list)

    def request_done(self, outcome: Outcome, bytes_in: int, bytes_out: int) -> None:
        """Counted by the proxy."""

    def flight_done(self, flight: Flight) -> None:
        self.seen.append(flight)


@dataclass(slots=True)
class _Watch:
    """Reads the meter when the load begins, and tells of it. Called in the thread that waits for the load."""

    meter: Meter
    on_begin: Callable[[], None]
    begun: Usage | None = None
    begin_ns: int = 0

    def progress(self, _stage: str, _share: float) -> None:
        if self.begun is None:
            self.begin_ns, self.begun = time.monotonic_ns(), self.meter.read()
            self.on_begin()


async def take_in_process(
    transport: Transport,
    control: ControlPlane,
    model: ModelSpec,
    cell: Cell,
    label: str,
    seconds: float,
    meter: Meter,
) -> Figures:
    """One run through a listening proxy.

    Args:
        transport: made for this run alone.

    Raises:
        ServerError: the server failed.
        EvidenceError: the load's counts, the proxy's and the server's do not agree, or all stood still.
    """
    begin_ns, setting, flights = time.monotonic_ns(), setting_of(cell), _Flights()
    limits = ProxyLimits(connections=max(_MOST_IDLE, cell.concurrency))
    proxy = Proxy(model, setting.policy, transport, run_id=label, limits=limits)
    proxy.add_observer(flights)
    await transport.warm(setting.flights)
    before = await control.counters(model.name)
    host, port = await proxy.start("127.0.0.1", 0)
    try:
        load, usage, load_s = await _loaded(proxy, _spec(host, port, model, cell, seconds), meter)
        await proxy.drain(_DRAIN_S)
    finally:
        await proxy.aclose()
    _check_load(load, label)
    after = await booked_requests(control, model.name, before.inferences + sum(each.size for each in flights.seen))
    found = counts_agree(load, proxy.snapshot())
    if found:
        raise EvidenceError("load and proxy disagree", observed="; ".join(found), where=label)
    check_counts(setting, [each.size for each in flights.seen], before, after, label)
    answered = load.outcomes[LoadOutcome.ANSWERED]
    check_balance(label, {"sent": load.sent, "answered": answered, "in batches": sum(f.size for f in flights.seen)})
    assert load.latency is not None
    settled, stopped = _window(flights.seen, load.spec.warmup_s, load.spec.duration_s)
    refuse_still_flights(flights.seen[settled:stopped], where=label)
    return Figures(
        flights=tuple(flights.seen),
        settled=settled,
        stopped=stopped,
        elapsed_s=s_from_ns(time.monotonic_ns() - begin_ns),
        duration_s=load.window_s,
        requests=load.window_answers,
        sent=load.sent,
        answered=answered,
        latency=load.latency,
        latency_hdr=load.latency_hdr,
        before=before,
        after=after,
        usage=usage,
        load_s=load_s,
    )


def _spec(host: str, port: int, model: ModelSpec, cell: Cell, seconds: float) -> LoadSpec:
    warmup_s = max(LEAST_WARMUP_S, WARMUP_SHARE * seconds)
    return LoadSpec(
        host=host,
        port=port,
        model=model.name,
        inputs=model.inputs,
        loop=ClosedLoop(cell.concurrency),
        duration_s=warmup_s + seconds,
        warmup_s=warmup_s,
        patience_s=PATIENCE_S,
    )


async def _loaded(proxy: Proxy, spec: LoadSpec, meter: Meter) -> tuple[LoadResult, Usage, float]:
    """The load's result, what was used meanwhile, and the load's own processor seconds.

    Processor time counts from when the load has begun, so that its start is none of the run's; bytes from before it.
    """
    loop = asyncio.get_running_loop()
    rest: list[asyncio.Task[None]] = []

    def send_rest() -> None:
        rest.append(loop.create_task(proxy.gateway.drain()))

    def on_begin() -> None:
        # Clients stop one by one: who still waits for partners when the load is over will not get them.
        loop.call_soon_threadsafe(loop.call_later, spec.duration_s + _AFTER_END_S, send_rest)

    before, watch = meter.read(), _Watch(meter, on_begin)
    load = await asyncio.to_thread(run_load, spec, watch.progress)
    assert watch.begun is not None, "a load with a result has told of its begin"
    now, end_ns = meter.read(), time.monotonic_ns()
    await asyncio.gather(*rest)
    bytes_of, usage = now.since(before), now.since(watch.begun)
    usage = replace(usage, sent_bytes=bytes_of.sent_bytes, received_bytes=bytes_of.received_bytes)
    return load, usage, load.cpu_share * s_from_ns(end_ns - watch.begin_ns)


def _check_load(load: LoadResult, label: str) -> None:
    """Raises ``ServerError`` where a request failed: a run with failures is no run."""
    failed = {outcome: count for outcome, count in load.outcomes.items() if count and outcome != LoadOutcome.ANSWERED}
    if failed or not load.window_answers or load.latency is None:
        raise ServerError(
            "requests were not answered",
            observed=", ".join(f"{count} {outcome}" for outcome, count in failed.items()) or "none in the window",
            allowed="all answered",
            where=label,
            hint="see the server's log; b2g study run tries this run again",
        )


def _window(flights: list[Flight], warmup_s: float, duration_s: float) -> tuple[int, int]:
    """The flights delivered after the load's warm-up and before its end; the load begins with the first request."""
    begin_ns = min(flight.oldest_arrival_ns for flight in flights)
    opened_ns, closed_ns = begin_ns + ns_from_s(warmup_s), begin_ns + ns_from_s(duration_s)
    within = [number for number, flight in enumerate(flights) if opened_ns <= flight.delivered_ns < closed_ns]
    if not within:
        raise EvidenceError("no batch came back within the window", allowed=">= 1", hint="plan more seconds_per_run")
    return within[0], within[-1] + 1
