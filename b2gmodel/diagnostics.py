"""What users should know before they believe a figure: each case has a name, a number, a bound, and what to do.

Rules here: a diagnostic is made only where its number lies beyond its bound; what a record does not state is not
diagnosed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from b2gmodel.laws import service_growth_s
from b2gmodel.records import Calibration, CalibrationPoint, Diagnostic

SERVER_OVERHEAD: Final = "server-overhead"
SERVICE_OVER_WALL: Final = "service-over-wall"
SERVICE_UNDER_LOAD: Final = "service-under-load"

_OVERHEAD: Final = 1.0
ROUNDING: Final = 1.02
LOAD_CHANGE: Final = 0.10


def of_calibration(calibration: Calibration, point: CalibrationPoint) -> tuple[Diagnostic, ...]:
    """What single-flight and the laws already show."""
    if point.service_s is None or point.cycle_s is None:
        return ()
    service_s, instances = point.service_s.mean, calibration.model.instances or 1
    found = []
    overhead = server_overhead(point)
    if overhead is not None and overhead > _OVERHEAD:
        found.append(
            Diagnostic(
                name=SERVER_OVERHEAD,
                observed=overhead,
                bound=_OVERHEAD,
                sentence=f"the server spends {overhead:.1f} times as long on receiving and queueing a lone batch as on "
                "computing it: S is not what limits it, and M* from S means little; larger batches or shared memory "
                "come first",
            )
        )
    if service_s / point.cycle_s.mean > ROUNDING:
        found.append(over_wall(service_s / point.cycle_s.mean, 1))
    growth = None
    if instances > 1 and point.compute_law is not None:
        times = {each.flights: each.service_s for each in point.compute_law.points}
        growth = times[max(times)] / times[min(times)] - 1
    elif point.transport_law is not None:
        growth = float(service_growth_s(point.transport_law, np.array([np.inf]))[0]) / service_s
    if growth is not None and abs(growth) > LOAD_CHANGE:
        found.append(under_load(growth))
    return tuple(found)


def server_overhead(point: CalibrationPoint) -> float | None:
    """Time of a lone batch in the server outside its instance (receiving, queue) over S; None where not seen."""
    if point.service_s is None:
        return None
    known = [point.queue_s.mean] if point.queue_s is not None else []
    if point.legs is not None and point.legs.server_receive_s is not None:
        known.append(point.legs.server_receive_s)
    return sum(known) / point.service_s.mean if known else None


def over_wall(share: float, instances: int) -> Diagnostic:
    """The server booked ``share`` seconds of service a second on that many instances."""
    return Diagnostic(
        name=SERVICE_OVER_WALL,
        observed=share,
        bound=float(instances),
        sentence=f"the server booked {share:.2f} seconds of service a second on {instances} instance(s): its counters "
        "are wrong, or more instances run than it says; check instance_group and that the server was not restarted",
    )


def under_load(change: float) -> Diagnostic:
    """S under load differs by ``change`` of S alone."""
    word = "longer" if change > 0 else "shorter"
    return Diagnostic(
        name=SERVICE_UNDER_LOAD,
        observed=change,
        bound=LOAD_CHANGE if change > 0 else -LOAD_CHANGE,
        sentence=f"S is {abs(change):.0%} {word} under load than alone: trust heights that use S under load (mva, "
        "simulation) over the closed form, and on a GPU fix the clocks and calibrate anew",
    )
