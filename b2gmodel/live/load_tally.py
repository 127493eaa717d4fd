"""What became of a load's requests: outcomes, and latency in a histogram.

Rules of this module: no clock and no I/O. Every request that was sent ends once. Latency counts from the
intended time in an open loop, from sending in a closed one. The steady window lies after the warm-up and
before the end: throughput counts the answers that came within it, latency the requests that were due within
it, however late their answers came, for to leave those out would leave out the slowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from hdrh.histogram import HdrHistogram

LATE_NS: Final = 1_000_000
"""A request sent later than this after its intended time counts as late."""

_LOWEST_NS: Final = 1_000
_HIGHEST_NS: Final = 24 * 3600 * 1_000_000_000
_DIGITS: Final = 3
_MOST_REASONS: Final = 8


class LoadOutcome(StrEnum):
    """How a request ended for the load. Those that an answer tells have the proxy's own names."""

    ANSWERED = "answered"
    BUSY = "busy"
    DEADLINE = "deadline"
    MALFORMED = "malformed"
    UPSTREAM = "upstream"
    DRAINING = "draining"
    CANCELLED = "cancelled"
    INTERNAL = "internal"
    LOST = "lost"
    """Its connection ended before its answer; the reasons say why."""
    UNANSWERED = "unanswered"
    """Still open when the load's patience after its end was over."""


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution of times in ns, to three significant digits."""

    count: int
    min_ns: int
    mean_ns: float
    p50_ns: int
    p90_ns: int
    p95_ns: int
    p99_ns: int
    p999_ns: int
    max_ns: int


class Times:
    """An HdrHistogram of times from 1 us to a day; shorter ones fall into its lowest bucket."""

    def __init__(self) -> None:
        self._histogram: Any = HdrHistogram(_LOWEST_NS, _HIGHEST_NS, _DIGITS)

    def record(self, time_ns: int) -> None:
        self._histogram.record_value(min(max(0, time_ns), _HIGHEST_NS))

    @property
    def quantiles(self) -> Quantiles | None:
        """None of no times."""
        it = self._histogram
        if not it.get_total_count():
            return None
        top_ns = int(it.get_max_value())

        def at(percent: float) -> int:
            return min(top_ns, int(it.get_value_at_percentile(percent)))

        return Quantiles(
            count=int(it.get_total_count()),
            min_ns=int(it.get_min_value()),
            mean_ns=float(it.get_mean_value()),
            p50_ns=at(50),
            p90_ns=at(90),
            p95_ns=at(95),
            p99_ns=at(99),
            p999_ns=at(99.9),
            max_ns=top_ns,
        )

    def encoded(self) -> str:
        """The histogram in the compressed form (V2, base64) that HdrHistogram's own tools read and merge."""
        return str(self._histogram.encode().decode())


class Tally:
    """Counts a load's requests.

    Args:
        window_ns: begin and end of the steady window on the generator's clock.
    """

    def __init__(self, window_ns: tuple[int, int]) -> None:
        self._begin_ns, self._end_ns = window_ns
        self.outcomes = dict.fromkeys(LoadOutcome, 0)
        self.latency, self.lateness = Times(), Times()
        self.sent = self.late = self.starved = self.window_answers = 0
        self.wrong_answers = self.reconnects = self.result_bytes = 0
        self.lost_reasons: dict[str, int] = {}

    def send(self, intended_ns: int, sent_ns: int, starved: bool) -> None:
        """A request is being sent."""
        self.sent += 1
        self.starved += starved
        self.late += sent_ns - intended_ns > LATE_NS
        self.lateness.record(sent_ns - intended_ns)

    def end(self, outcome: LoadOutcome, intended_ns: int, now_ns: int) -> None:
        """A request that was sent has ended."""
        self.outcomes[outcome] += 1
        if outcome is LoadOutcome.ANSWERED:
            if self._begin_ns <= now_ns < self._end_ns:
                self.window_answers += 1
            if self._begin_ns <= intended_ns < self._end_ns:
                self.latency.record(now_ns - intended_ns)

    def lose(self, reason: str) -> None:
        """A connection has ended, with a request open on it or not."""
        known = reason in self.lost_reasons or len(self.lost_reasons) < _MOST_REASONS
        key = reason if known else "other reasons"
        self.lost_reasons[key] = self.lost_reasons.get(key, 0) + 1
