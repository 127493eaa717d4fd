"""One batch's cycle as a record: made by the live proxy and by the simulation, read by one analysis.

No clock here: the stamps are integer nanoseconds of one monotonic clock, or of simulated time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class ExchangeTimes:
    """When an exchange passed its stages, in nanoseconds; None where it did not get there."""

    send_begin_ns: int | None = None
    send_end_ns: int | None = None
    first_byte_ns: int | None = None
    response_end_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Flight:
    """One batch from seal to delivery, in nanoseconds."""

    flight_id: int
    size: int
    oldest_arrival_ns: int
    sealed_ns: int
    times: ExchangeTimes
    delivered_ns: int
    failed: bool

    @property
    def cycle_ns(self) -> int:
        """From sealing the batch to the last of its results being ready for its caller."""
        return self.delivered_ns - self.sealed_ns


@dataclass(frozen=True, slots=True)
class Cycle:
    """One flight, and what the server booked for it."""

    flight: Flight
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int

    @property
    def cycle_ns(self) -> int:
        return self.flight.cycle_ns

    @property
    def service_ns(self) -> int:
        """S: compute input, infer and output."""
        return self.compute_input_ns + self.compute_infer_ns + self.compute_output_ns

    @property
    def transport_ns(self) -> int:
        """D = C - S, signed."""
        return self.cycle_ns - self.service_ns


def series_s(cycles: Sequence[Cycle]) -> NDArray[np.float64]:
    """Columns C and S in seconds, a row a cycle."""
    return np.array([(cycle.cycle_ns, cycle.service_ns) for cycle in cycles], dtype=np.float64).reshape(-1, 2) / 1e9
