"""When a load sends which request: arrivals, and the two loops as state machines.

Rules of this module: no clock and no I/O, time arrives as an argument; randomness comes from a seed. A lane is
one connection, which carries one request at a time. The schedule of an open loop does not depend on answers: a
request for which no lane is free keeps its intended time and is sent as soon as one is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import numpy as np

from b2gmodel.units import NS_PER_S, ns_from_s

_CHUNK = 4096


class Arrivals(StrEnum):
    """How the intended times of an open loop lie."""

    POISSON = "poisson"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Send:
    """A request to send now.

    Attributes:
        lane: on which connection.
        intended_ns: when it was meant to be sent; None in a closed loop, which means now.
        starved: no lane was free at that time.
    """

    lane: int
    intended_ns: int | None
    starved: bool


class Plan(Protocol):
    """What the generator asks of a loop."""

    def due(self, now_ns: int) -> list[Send]:
        """What has to be sent now. Their lanes are taken until they are freed."""
        ...

    def next_ns(self, now_ns: int) -> int | None:
        """When to ask again even if no lane is freed before; None where nothing comes by time alone."""
        ...

    def free(self, lane: int, now_ns: int, pause_ns: int = 0) -> None:
        """The lane's request has ended, or its connection is back. ``pause_ns``: how long its client rests."""
        ...

    def withdraw(self, lane: int) -> None:
        """The lane's connection is gone while it was free; ``free`` brings it back."""
        ...

    def exhausted(self, now_ns: int) -> bool:
        """Whether nothing will be sent any more."""
        ...

    def unsent(self) -> int:
        """Requests of the schedule that were not sent. Counting uses the schedule up."""
        ...


def intended_offsets(arrivals: Arrivals, rate_per_s: float, duration_s: float, seed: int) -> Iterator[int]:
    """The intended times of an open loop in ns since its start, in order, all before ``duration_s``.

    Constant: ``i / rate_per_s`` for i = 0, 1, ... Poisson: running sums of exponential gaps of mean
    ``1 / rate_per_s``, so the number within any span has a Poisson law. Same arguments, same times.
    """
    end_ns = ns_from_s(duration_s)
    rng = np.random.default_rng(seed)
    begun, last_s = 0, 0.0
    while True:
        if arrivals is Arrivals.POISSON:
            times_s = last_s + np.cumsum(rng.exponential(1 / rate_per_s, _CHUNK))
        else:
            times_s = np.arange(begun, begun + _CHUNK) / rate_per_s
        begun, last_s = begun + _CHUNK, float(times_s[-1])
        for offset_ns in np.rint(times_s * NS_PER_S).astype(np.int64).tolist():
            if offset_ns >= end_ns:
                return
            yield offset_ns


class OpenPlan:
    """A schedule of intended times, served by a shared pool of lanes, the longest free one first."""

    def __init__(self, lanes: int, start_ns: int, offsets_ns: Iterator[int]) -> None:
        self._start_ns = start_ns
        self._offsets_ns = offsets_ns
        self._free = deque((start_ns, lane) for lane in range(lanes))
        self._intended_ns = self._following()

    def due(self, now_ns: int) -> list[Send]:
        sends = []
        while self._free and self._intended_ns is not None and self._intended_ns <= now_ns:
            freed_ns, lane = self._free.popleft()
            # The longest free lane was freed only after the intended time: until then, none was free.
            sends.append(Send(lane, self._intended_ns, starved=freed_ns > self._intended_ns))
            self._intended_ns = self._following()
        return sends

    def next_ns(self, now_ns: int) -> int | None:
        return self._intended_ns if self._free else None

    def free(self, lane: int, now_ns: int, pause_ns: int = 0) -> None:
        self._free.append((now_ns, lane))

    def withdraw(self, lane: int) -> None:
        self._free = deque(entry for entry in self._free if entry[1] != lane)

    def exhausted(self, now_ns: int) -> bool:
        return self._intended_ns is None

    def unsent(self) -> int:
        return 0 if self._intended_ns is None else 1 + sum(1 for _ in self._offsets_ns)

    def _following(self) -> int | None:
        offset_ns = next(self._offsets_ns, None)
        return None if offset_ns is None else self._start_ns + offset_ns


class ClosedPlan:
    """Clients with a lane each: every one sends, waits for its answer, thinks, and sends again until the end."""

    def __init__(self, clients: int, start_ns: int, end_ns: int, think_ns: int) -> None:
        self._end_ns = end_ns
        self._think_ns = think_ns
        self._ready = [(start_ns, client) for client in range(clients)]  # a heap

    def due(self, now_ns: int) -> list[Send]:
        sends = []
        while self._ready and self._ready[0][0] <= now_ns < self._end_ns:
            sends.append(Send(heapq.heappop(self._ready)[1], None, starved=False))
        return sends

    def next_ns(self, now_ns: int) -> int | None:
        if now_ns >= self._end_ns:
            return None
        return min(self._ready[0][0], self._end_ns) if self._ready else self._end_ns

    def free(self, lane: int, now_ns: int, pause_ns: int = 0) -> None:
        heapq.heappush(self._ready, (now_ns + max(self._think_ns, pause_ns), lane))

    def withdraw(self, lane: int) -> None:
        self._ready = [entry for entry in self._ready if entry[1] != lane]
        heapq.heapify(self._ready)

    def exhausted(self, now_ns: int) -> bool:
        return now_ns >= self._end_ns

    def unsent(self) -> int:
        return 0
