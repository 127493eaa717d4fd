"""A run in which nothing moved for a while is no evidence: a server was paused, a link hung, the machine stood still.

No clock here: times arrive as integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from b2gmodel.errors import EvidenceError
from b2gmodel.flights import Flight
from b2gmodel.units import NS_PER_S, format_duration, s_from_ns

_LEAST_NS: Final = NS_PER_S
_CYCLES: Final = 5


def refuse_still_flights(flights: Sequence[Flight], *, where: str) -> None:
    """``refuse_stall`` for the times between deliveries: with flights always in the air, at most about a cycle each,
    and in single-flight a cycle and what is read after it.

    Args:
        flights: in order of delivery.
    """
    gaps_ns = [later.delivered_ns - earlier.delivered_ns for earlier, later in pairwise(flights)]
    refuse_stall(gaps_ns, [flight.cycle_ns for flight in flights], where=where)


def refuse_stall(waits_ns: Sequence[int], cycles_ns: Sequence[int], *, where: str) -> None:
    """Raises ``EvidenceError`` where nothing was delivered for more than a second and more than five median cycles.

    Args:
        waits_ns: times in which nothing was delivered.
        cycles_ns: of the run.
        where: names the run.
    """
    if not waits_ns:
        return
    longest_ns, allowed_ns = max(waits_ns), max(_LEAST_NS, _CYCLES * median(cycles_ns))
    if longest_ns > allowed_ns:
        raise EvidenceError(
            "the run stood still",
            observed=f"nothing was delivered for {format_duration(s_from_ns(longest_ns))}",
            allowed=f"<= {format_duration(s_from_ns(allowed_ns))}",
            where=where,
            hint="was the server or this machine paused? Run again: a run with a stall in it is no evidence",
        )
