"""What a proxy that serves tells a monitoring system: ten OpenTelemetry instruments, for Prometheus or OTLP.

Rules that hold here:

* What happens once a request is an addition to a counter of our own, which the exporter reads when it exports;
  the SDK is called once a flight, or off the timed path.
* Nothing is clamped and nothing is made up: S and D exist where the server's counters and the proxy's flights are
  the same executions (``windows.py``), and are absent elsewhere.
* The exporters are imported when they are asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from opentelemetry.metrics import CallbackOptions, Histogram, Meter, Observation

from b2gmodel.errors import B2GError
from b2gmodel.flights import Flight
from b2gmodel.live.kserve import ControlPlane
from b2gmodel.live.observer import Outcome
from b2gmodel.live.windows import Skip, Window, WindowMatcher
from b2gmodel.units import s_from_ns

MODEL: Final = "b2g.model"
PLACEMENT: Final = "b2g.placement"
TRANSPORT: Final = "b2g.transport"
OUTCOME: Final = "b2g.outcome"
SIGN: Final = "b2g.sign"
DIRECTION: Final = "network.io.direction"

_MANTISSAS: Final = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
DURATION_BOUNDS_S: Final = tuple(
    round(mantissa * decade_s, 6) for decade_s in (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0) for mantissa in _MANTISSAS
)[: 5 * len(_MANTISSAS) + 1]
"""Steps of at most 5/3 from 0.1 ms to 10 s: a quantile is read to within a step. The same for every time, so that
quantiles of C, S and D can be set side by side; their means come from the sums and know no buckets."""

BATCH_SIZE_BOUNDS: Final = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128, 192, 256)
"""Each size its own bucket up to 8, where most batches are; then steps of at most a quarter up to 64."""

REJECTIONS: Final = (Outcome.BUSY, Outcome.DRAINING, Outcome.REFUSED)
_RECORDS_IN_A_ROW: Final = 32


class Kind(StrEnum):
    """Kinds of instruments, in OpenTelemetry's words."""

    COUNTER = "counter"
    UP_DOWN_COUNTER = "up-down counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """One instrument.

    Attributes:
        name: lower case, dotted.
        unit: in UCUM; ``{request}`` counts requests.
        kind: what it is in OpenTelemetry.
        attributes: those beside model, placement and transport, which every instrument has.
        meaning: one clause.
        bounds: a histogram's explicit bucket boundaries, upper ends included.
    """

    name: str
    unit: str
    kind: Kind
    attributes: tuple[str, ...]
    meaning: str
    bounds: tuple[float, ...] = ()


QUEUE_DEPTH: Final = Instrument(
    "b2g.queue.depth", "{request}", Kind.UP_DOWN_COUNTER, (), "requests that wait for a batch now"
)
FLIGHTS_IN_USE: Final = Instrument(
    "b2g.flight.in_use", "{flight}", Kind.UP_DOWN_COUNTER, (), "batches in flight now, at most M"
)
REQUESTS_REJECTED: Final = Instrument(
    "b2g.request.rejected",
    "{request}",
    Kind.COUNTER,
    (OUTCOME,),
    "requests that the proxy did not take: busy, draining or refused",
)
REQUESTS_ENDED: Final = Instrument(
    "b2g.request.ended", "{request}", Kind.COUNTER, (OUTCOME,), "requests that have ended, each once, by how"
)
NETWORK_IO: Final = Instrument(
    "b2g.network.io",
    "By",
    Kind.COUNTER,
    (DIRECTION,),
    "payload bytes of ended requests (receive) and of their results (transmit)",
)
BATCH_SIZE: Final = Instrument(
    "b2g.batch.size", "{request}", Kind.HISTOGRAM, (), "requests in a batch, failed ones included", BATCH_SIZE_BOUNDS
)
FORMATION_WAIT: Final = Instrument(
    "b2g.batch.formation_wait",
    "s",
    Kind.HISTOGRAM,
    (),
    "from the arrival of a batch's oldest request to its sealing",
    DURATION_BOUNDS_S,
)
CYCLE_TIME: Final = Instrument(
    "b2g.batch.cycle_time",
    "s",
    Kind.HISTOGRAM,
    (),
    "C: from sealing a batch to the last of its results being ready; batches with results only",
    DURATION_BOUNDS_S,
)
SERVICE_TIME: Final = Instrument(
    "b2g.batch.service_time",
    "s",
    Kind.HISTOGRAM,
    (),
    "S: compute input, infer and output; the mean of a window, once for each execution in it",
    DURATION_BOUNDS_S,
)
TRANSPORT_OVERHEAD: Final = Instrument(
    "b2g.batch.transport_overhead",
    "s",
    Kind.HISTOGRAM,
    (SIGN,),
    "D = C - S: the mean of a window, once for each execution in it; its magnitude, the sign beside it",
    DURATION_BOUNDS_S,
)
INSTRUMENTS: Final = (
    QUEUE_DEPTH,
    FLIGHTS_IN_USE,
    REQUESTS_REJECTED,
    REQUESTS_ENDED,
    NETWORK_IO,
    BATCH_SIZE,
    FORMATION_WAIT,
    CYCLE_TIME,
    SERVICE_TIME,
    TRANSPORT_OVERHEAD,
)


@dataclass(frozen=True, slots=True)
class Labels:
    """The attributes that every data point carries."""

    model: str
    placement: str
    transport: str

    def attributes(self) -> Mapping[str, str]:
        return {MODEL: self.model, PLACEMENT: self.placement, TRANSPORT: self.transport}


@dataclass(frozen=True, slots=True)
class Gauges:
    """Reads the proxy's gauges; called from the exporter's thread, so neither may iterate over anything."""

    queue_depth: Callable[[], int]
    flights_in_use: Callable[[], int]


class ProxyInstruments:
    """The ten instruments of one proxy; a ``ProxyObserver`` for eight of them, ``record`` takes S and D.

    Args:
        meter: makes the instruments.
        labels: attributes of every data point.
        gauges: of the proxy.
        matcher: told of every delivered flight.
    """

    def __init__(self, meter: Meter, labels: Labels, gauges: Gauges, matcher: WindowMatcher) -> None:
        self._common = common = labels.attributes()
        self._matcher = matcher
        self._ended = dict.fromkeys(Outcome, 0)
        self._bytes_in = self._bytes_out = 0
        self._batch_size = _histogram(meter, BATCH_SIZE)
        self._formation_wait = _histogram(meter, FORMATION_WAIT)
        self._cycle_time = _histogram(meter, CYCLE_TIME)
        self._service_time = _histogram(meter, SERVICE_TIME)
        self._overhead = _histogram(meter, TRANSPORT_OVERHEAD)
        self._signed = {
            negative: {**common, SIGN: "negative" if negative else "positive"} for negative in (False, True)
        }
        by_outcome = {outcome: {**common, OUTCOME: str(outcome)} for outcome in Outcome}
        receive, transmit = {**common, DIRECTION: "receive"}, {**common, DIRECTION: "transmit"}
        _observed(meter, QUEUE_DEPTH, lambda: [(gauges.queue_depth(), common)])
        _observed(meter, FLIGHTS_IN_USE, lambda: [(gauges.flights_in_use(), common)])
        _observed(meter, REQUESTS_ENDED, lambda: [(self._ended[each], by_outcome[each]) for each in Outcome])
        _observed(meter, REQUESTS_REJECTED, lambda: [(self._ended[each], by_outcome[each]) for each in REJECTIONS])
        _observed(meter, NETWORK_IO, lambda: [(self._bytes_in, receive), (self._bytes_out, transmit)])

    def request_done(self, outcome: Outcome, bytes_in: int, bytes_out: int) -> None:
        """A request has ended."""
        self._ended[outcome] += 1
        self._bytes_in += bytes_in
        self._bytes_out += bytes_out

    def flight_done(self, flight: Flight) -> None:
        """A flight has ended; one that failed has no cycle."""
        self._batch_size.record(flight.size, self._common)
        self._formation_wait.record(s_from_ns(flight.sealed_ns - flight.oldest_arrival_ns), self._common)
        if not flight.failed:
            self._cycle_time.record(s_from_ns(flight.cycle_ns), self._common)
            self._matcher.flight(flight.size, flight.cycle_ns)

    async def record(self, window: Window) -> None:
        """S and D of a window, once for each of its executions, with the loop let go on in between."""
        service_s, overhead_s = s_from_ns(window.mean_service_ns), s_from_ns(window.mean_transport_ns)
        signed = self._signed[overhead_s < 0]
        for execution in range(window.executions):
            self._service_time.record(service_s, self._common)
            # A histogram takes no negative values: hence the magnitude, and the sign as an attribute.
            self._overhead.record(abs(overhead_s), signed)
            if execution % _RECORDS_IN_A_ROW == _RECORDS_IN_A_ROW - 1:
                await asyncio.sleep(0)


class WindowTaker(Protocol):
    """Takes what the poller finds."""

    async def record(self, window: Window) -> None:
        """S and D of a window."""
        ...


class ServicePoller:
    """Reads the server's counters now and then, and records S and D of each window that comes out.

    Args:
        control: a connection of its own to the server; the caller closes it.
        model: the entry that the proxy serves.
        interval_s: between two readings, and the longest that one may take.
    """

    def __init__(self, control: ControlPlane, model: str, *, interval_s: float) -> None:
        self._control, self._model, self._interval_s = control, model, interval_s
        self._windows: asyncio.Queue[Window] = asyncio.Queue()
        self.matcher = WindowMatcher(self._windows.put_nowait)

    @property
    def skipped(self) -> Mapping[Skip, int]:
        """Readings that gave neither S nor D, by reason."""
        return self.matcher.skipped

    async def read(self) -> None:
        """One reading. The first one only says where counting starts."""
        self.matcher.begin_reading()
        counters = None
        try:
            async with asyncio.timeout(self._interval_s):
                counters = await self._control.counters(self._model)
        except (B2GError, TimeoutError):
            pass  # an absent reading, which the matcher counts
        finally:
            self.matcher.end_reading(counters)

    async def run(self, taker: WindowTaker) -> None:
        """Read and record until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._read_regularly())
            tasks.create_task(self._record(taker))

    async def _read_regularly(self) -> None:
        while True:
            await self.read()
            await asyncio.sleep(self._interval_s)

    async def _record(self, taker: WindowTaker) -> None:
        while True:
            await taker.record(await self._windows.get())


def _histogram(meter: Meter, it: Instrument) -> Histogram:
    return meter.create_histogram(it.name, it.unit, it.meaning, explicit_bucket_boundaries_advisory=it.bounds)


def _observed(meter: Meter, it: Instrument, read: Callable[[], Iterable[tuple[int, Mapping[str, str]]]]) -> None:
    """A counter of either kind whose value is read when it is exported."""

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        return [Observation(value, attributes) for value, attributes in read()]

    create = meter.create_observable_counter if it.kind is Kind.COUNTER else meter.create_observable_up_down_counter
    create(it.name, [observe], it.unit, it.meaning)
