"""A measurement as X(M) over its sessions. No file, no clock; no module that a prediction is made with imports this."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np

from b2gmodel.records import Measurement
from b2gmodel.stats import Interval, student_interval

LEVEL: Final = 0.90


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """X(M), requests a second.

    Attributes:
        by_session: a value a session, the mean where a session ran this M more than once.
        sessions: the number of each of these sessions within the measurement.
    """

    flights: int
    by_session: tuple[float, ...]
    sessions: tuple[int, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.by_session))

    @property
    def interval(self) -> Interval | None:
        """Of the mean over sessions; None with one session."""
        return student_interval(np.array(self.by_session), LEVEL) if len(self.by_session) > 1 else None

    def log_ratios(self, other: MeasuredPoint) -> tuple[float, ...]:
        """log X(this M) - log X(other's M) in each session that ran both: what its runs have in common cancels."""
        others = dict(zip(other.sessions, other.by_session, strict=True))
        return tuple(
            float(np.log(value / others[session]))
            for session, value in zip(self.sessions, self.by_session, strict=True)
            if session in others
        )


def measured_curve(measurement: Measurement) -> tuple[MeasuredPoint, ...]:
    """X(M) of C3 and C4, in order of M."""
    found: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, session in enumerate(measurement.sessions):
        for run in session.runs:
            if run.placement in ("C3", "C4"):
                found[run.flights][number].append(run.throughput_per_s)
    return tuple(
        MeasuredPoint(flights, tuple(float(np.mean(values)) for values in by_session.values()), tuple(by_session))
        for flights, by_session in sorted(found.items())
    )


def measured_baseline(measurement: Measurement) -> float | None:
    """Mean throughput without batching (C1); None where it was not measured."""
    found = [run.throughput_per_s for session in measurement.sessions for run in session.runs if run.placement == "C1"]
    return float(np.mean(found)) if found else None
