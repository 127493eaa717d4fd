"""How a proxy fares right now: rates and times over the seconds just past, and what binds.

The proxy's own snapshot counts; what is kept here is where it stood some readings ago. No clock: moments arrive as
arguments, in integer nanoseconds of one monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from statistics import fmean
from typing import Final

from b2gmodel.flights import Flight
from b2gmodel.live.observer import Outcome, Snapshot
from b2gmodel.live.windows import Window, WindowMatcher
from b2gmodel.units import s_from_ns

FULL: Final = 0.9
"""The share of its time from which a resource counts as busy throughout."""

_SPAN_NS: Final = 3_000_000_000


class Binds(StrEnum):
    """What keeps throughput from being higher."""

    NOTHING = "nothing: no requests"
    CALLERS = "callers: too few"
    COMPUTE = "compute: busy throughout"
    TRANSPORT = "transport: compute idles, raise M"
    FLIGHTS = "flights: all in use, S not known"


@dataclass(frozen=True, slots=True)
class Vitals:
    """A proxy over the seconds just past.

    Attributes:
        queue, queue_limit: requests waiting now, and at most.
        flights: mean batches in flight, of ``flights_limit``.
        throughput_per_s: answered requests a second.
        cycle_s: mean C of a batch; None where none ended.
        service_s, transport_s: mean S and D of the last window whose executions are the proxy's own; None before.
        busy: share of their time that the model's instances compute; None where S or g is not known.
        outcomes: requests that have ended since the start.
        binds: what binds now.
    """

    queue: int
    queue_limit: int
    flights: float
    flights_limit: int
    throughput_per_s: float
    cycle_s: float | None
    service_s: float | None
    transport_s: float | None
    busy: float | None
    outcomes: Mapping[Outcome, int]
    binds: Binds

    @property
    def transport_share(self) -> float | None:
        """D / C of the last window; None before."""
        if self.service_s is None or self.transport_s is None:
            return None
        return self.transport_s / (self.service_s + self.transport_s)


def what_binds(queue: float, flights: float, flights_limit: int, busy: float | None) -> Binds:
    """What binds.

    Args:
        queue: mean requests waiting; below one there is nothing that another flight could take.
        flights: mean batches in flight.
        flights_limit: M.
        busy: share of their time that the model's instances compute; None where that is not known.
    """
    if flights <= 0:
        return Binds.NOTHING
    if busy is not None and busy >= FULL:
        return Binds.COMPUTE
    if queue < 1 or flights < FULL * flights_limit:
        return Binds.CALLERS
    return Binds.FLIGHTS if busy is None else Binds.TRANSPORT


@dataclass(frozen=True, slots=True)
class _Mark:
    """Where the counts stood at a reading."""

    now_ns: int
    queue: int = 0
    answered: int = 0
    cycles: int = 0
    cycle_ns: int = 0


class Pulse:
    """A proxy's vitals; a ``ProxyObserver``, and the taker of the windows with S and D.

    Args:
        matcher: told of every delivered flight.
        instances: the model's g; None where the server does not say.
        queue_limit: most requests that may wait.
        now_ns: when counting starts, at a proxy that has served nothing.
    """

    def __init__(self, matcher: WindowMatcher, instances: int | None, queue_limit: int, now_ns: int) -> None:
        self._matcher, self._instances, self._queue_limit = matcher, instances, queue_limit
        self._marks = deque([_Mark(now_ns)])
        self._cycles = self._cycle_ns = 0
        self._fresh: list[Window] = []
        self._service_ns: float | None = None
        self._transport_ns: float | None = None

    def request_done(self, outcome: Outcome, bytes_in: int, bytes_out: int) -> None:
        """A request has ended; the snapshot counts it."""

    def flight_done(self, flight: Flight) -> None:
        """A flight has ended."""
        if not flight.failed:
            self._cycles += 1
            self._cycle_ns += flight.cycle_ns
            self._matcher.flight(flight.size, flight.cycle_ns)

    async def record(self, window: Window) -> None:
        """S and D of one batch size in a window."""
        self._fresh.append(window)

    def read(self, now_ns: int, snapshot: Snapshot) -> Vitals:
        """The last seconds before ``now_ns``: from the latest reading that lies them back, or the first."""
        while len(self._marks) > 1 and now_ns - self._marks[1].now_ns >= _SPAN_NS:
            self._marks.popleft()
        answered = snapshot.outcomes[Outcome.ANSWERED]
        since, now = self._marks[0], _Mark(now_ns, snapshot.queue_depth, answered, self._cycles, self._cycle_ns)
        self._marks.append(now)
        queue = fmean(mark.queue for mark in islice(self._marks, 1, None))
        self._take_windows()
        elapsed_ns, cycles = max(1, now_ns - since.now_ns), now.cycles - since.cycles
        # Little's law: batches in flight are their rate times their cycle. A span that begins within cycles sees
        # more of them than it holds, hence the limit. The same holds for instances and S.
        flights: float = snapshot.flights_in_use
        if cycles:
            flights = min(snapshot.flights_limit, (now.cycle_ns - since.cycle_ns) / elapsed_ns)
        busy = None
        if self._service_ns is not None and self._instances:
            busy = min(1.0, cycles * self._service_ns / elapsed_ns / self._instances)
        return Vitals(
            queue=snapshot.queue_depth,
            queue_limit=self._queue_limit,
            flights=flights,
            flights_limit=snapshot.flights_limit,
            throughput_per_s=(now.answered - since.answered) / s_from_ns(elapsed_ns),
            cycle_s=s_from_ns((now.cycle_ns - since.cycle_ns) / cycles) if cycles else None,
            service_s=None if self._service_ns is None else s_from_ns(self._service_ns),
            transport_s=None if self._transport_ns is None else s_from_ns(self._transport_ns),
            busy=busy,
            outcomes=dict(snapshot.outcomes),
            binds=what_binds(queue, flights, snapshot.flights_limit, busy),
        )

    def _take_windows(self) -> None:
        """Means over all batch sizes of the windows since the last reading; without one, those before hold."""
        executions = sum(window.executions for window in self._fresh)
        if executions:
            self._service_ns = sum(window.service_ns for window in self._fresh) / executions
            self._transport_ns = sum(window.cycle_ns for window in self._fresh) / executions - self._service_ns
            self._fresh.clear()
