"""S and D of a proxy that serves: what the server booked in a window, and the cycles of the same executions.

The server's counters are read now and then beside the traffic. A window ends with a reading at which, for every
batch size, the flights delivered are as many as the executions booked. The server books a batch before or just
after it answers, so those that are booked and not yet delivered are waited for: then both sets are the same
flights, and D of the window is its mean C less its mean S. A window that does not come out is carried on, and
given up after some readings: somebody else uses the model, the server forms batches of its own, or a flight was
given up here and carried out there. A window that starts afresh under load may have other flights at its edges
than its counters, at most as many as are in flight.

No clock, no I/O: readings and flights arrive as events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from b2gmodel.live.kserve import BatchCounters, ModelCounters

PATIENCE: Final = 3
_UNDERFLOW: Final = 1 << 63  # a 64-bit counter that gained more than this has lost something instead


class Skip(StrEnum):
    """Why a reading of the server's counters gave no S and D."""

    IDLE = "idle"  # nothing ran
    UNMATCHED = "unmatched"  # the executions are not the proxy's flights one by one
    BACKWARDS = "backwards"  # a counter lost something: the server was restarted, or its counters are damaged
    UNREADABLE = "unreadable"  # the server did not answer, or not with statistics


@dataclass(frozen=True, slots=True)
class Window:
    """The executions of one batch size in one window: how many, and what they took altogether."""

    size: int
    executions: int
    service_ns: int
    cycle_ns: int

    @property
    def mean_service_ns(self) -> float:
        return self.service_ns / self.executions

    @property
    def mean_transport_ns(self) -> float:
        """Mean D, signed."""
        return (self.cycle_ns - self.service_ns) / self.executions


class WindowMatcher:
    """Pairs flights with the server's counters.

    Args:
        closed: told of each batch size of a window that came out; may be called within ``flight``.
        patience: readings without a match after which a window is given up.
    """

    def __init__(self, closed: Callable[[Window], None], *, patience: int = PATIENCE) -> None:
        self._closed, self._patience = closed, patience
        self._skipped: Counter[Skip] = Counter()
        self._baseline: ModelCounters | None = None
        self._flights: dict[int, int] = {}
        self._cycle_ns: dict[int, int] = {}
        self._reading = False
        self._meanwhile: list[tuple[int, int]] = []
        self._booked: tuple[ModelCounters, Mapping[int, BatchCounters]] | None = None
        self._misses = 0

    @property
    def skipped(self) -> Mapping[Skip, int]:
        """Readings that gave nothing, by reason; those of a window carried on and matched later not among them."""
        return dict(self._skipped)

    def flight(self, size: int, cycle_ns: int) -> None:
        """A flight has been delivered."""
        if self._reading:
            self._meanwhile.append((size, cycle_ns))
            return
        self._flights[size] = self._flights.get(size, 0) + 1
        self._cycle_ns[size] = self._cycle_ns.get(size, 0) + cycle_ns
        self._match()

    def begin_reading(self) -> None:
        """The counters are about to be asked for. A former reading that found no match has missed."""
        if self._booked is not None:
            self._booked = None
            self._misses += 1
            if self._misses >= self._patience:
                self._skipped[Skip.UNMATCHED] += self._misses
                self._baseline = None
        self._reading = True

    def end_reading(self, counters: ModelCounters | None) -> None:
        """The counters came; None where they did not."""
        self._reading = False
        if counters is None:
            self._skipped[Skip.UNREADABLE] += 1
        elif self._baseline is None:
            self._start_at(counters)
        else:
            self._book(self._baseline, counters)
        meanwhile, self._meanwhile = self._meanwhile, []
        for size, cycle_ns in meanwhile:
            self.flight(size, cycle_ns)

    def _start_at(self, counters: ModelCounters) -> None:
        self._baseline, self._booked, self._misses = counters, None, 0
        self._flights.clear()
        self._cycle_ns.clear()

    def _book(self, baseline: ModelCounters, counters: ModelCounters) -> None:
        sizes = {*baseline.by_batch_size, *counters.by_batch_size}
        added = {size: _added(baseline.of(size), counters.of(size)) for size in sizes}
        if any(gain is None for gain in added.values()):
            self._skipped[Skip.BACKWARDS] += 1
            self._start_at(counters)
            return
        booked = {size: gain for size, gain in added.items() if gain is not None and gain.executions}
        if not booked and not self._flights and not self._meanwhile:
            self._skipped[Skip.IDLE] += 1
            return
        self._booked = counters, booked
        self._match()

    def _match(self) -> None:
        """End the window where delivered and booked agree."""
        if self._booked is None:
            return
        counters, booked = self._booked
        if self._flights != {size: gain.executions for size, gain in booked.items()}:
            return
        windows = [
            Window(size, gain.executions, gain.service_ns, self._cycle_ns[size]) for size, gain in booked.items()
        ]
        self._start_at(counters)
        for window in windows:
            self._closed(window)


def _added(before: BatchCounters, after: BatchCounters) -> BatchCounters | None:
    """What was added, or None where a counter lost something."""
    gains = (
        after.executions - before.executions,
        after.compute_input_ns - before.compute_input_ns,
        after.compute_infer_ns - before.compute_infer_ns,
        after.compute_output_ns - before.compute_output_ns,
    )
    return BatchCounters(*gains) if all(0 <= gain < _UNDERFLOW for gain in gains) else None
