"""The predictors: laws in, whole curves X(M) out, in requests a second, one row for each draw of the laws.

Rules here: shape ``[1 + draws, M]`` everywhere, row 0 the estimate; no clock, no file, no measurement. With one batch
in flight X is k / C, whatever the model: that is what single-flight measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np

from b2gmodel.bulk import bulk_throughput
from b2gmodel.bulk_server import BulkServer, ladder_times
from b2gmodel.closed_form import flights_distribution, optimal_flights
from b2gmodel.errors import UsageError
from b2gmodel.laws import Floats, Laws
from b2gmodel.network import throughput_curve
from b2gmodel.records import CurvePoint, PredictorResult

CLOSED_FORM: Final = "closed-form"
BOUNDS: Final = "bounds"
MVA: Final = "mva"
SIMULATION: Final = "simulation"
BULK: Final = "bulk-service"
TWICE_INSTANCES: Final = "twice-instances"
LEVEL: Final = 0.90
QUANTILE_LEVELS: Final = tuple(number / 20 for number in range(1, 20))
"""0.05, 0.10, ..., 0.95: what scores of a whole distribution are computed from."""

_NEAR_PEAK: Final = 0.95
_LOSS: Final = 0.02
_BULK_DRAWS: Final = 200

Kind = Literal["estimate", "upper bound", "bounds", "rival"]


class Simulator(Protocol):
    """What the simulation lends to a prediction, so that nothing here imports it."""

    def __call__(self, laws: Laws, flights: Sequence[int], seed: int) -> Floats:
        """X(M) in requests a second, shape ``[1 + d, M]`` with d at most the laws' draws; row 0 is the estimate."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """One predictor's X(M) over the draws.

    Attributes:
        name, kind: as in the record.
        values: X(M) in requests a second, shape ``[1 + draws, M]``.
        knee: N* of the predictor, shape ``[1 + draws]``; M* is its ceiling, at least the number of instances.
        plateau_per_s: the peak beyond all M, where the predictor knows it; None takes the curve's own.
        lowest: the lower bound where ``values`` is an upper one, shape as ``values``.
    """

    name: str
    kind: Kind
    values: Floats
    knee: Floats
    plateau_per_s: float | None = None
    lowest: Floats | None = None


def closed_form_curves(laws: Laws, flights: Sequence[int]) -> Curves:
    """X(M) = min(M k / C, g k / S): an upper bound, with transport as a pure delay."""
    single = (laws.batch / laws.cycle_s)[:, np.newaxis]
    knee = closed_form_knee(laws)
    values = single * np.minimum(np.asarray(flights, dtype=float), np.maximum(knee, laws.instances)[:, np.newaxis])
    plateau = float(single[0, 0]) * max(float(knee[0]), laws.instances)
    return Curves(CLOSED_FORM, "upper bound", values, knee, plateau_per_s=plateau)


def closed_form_knee(laws: Laws) -> Floats:
    """N* = g C / S, shape ``[1 + draws]``."""
    return np.asarray(laws.instances * laws.cycle_s / laws.service_s)


def twice_instances_curves(laws: Laws, flights: Sequence[int]) -> Curves:
    """The vendors' rule M = 2 g, read as the closed form with its knee there: nothing is gained beyond 2 g."""
    closed = closed_form_curves(laws, [min(m, 2 * laws.instances) for m in flights])
    return Curves(TWICE_INSTANCES, "rival", closed.values, np.full(len(laws.cycle_s), 2.0 * laws.instances))


def bounds_curves(laws: Laws, flights: Sequence[int]) -> Curves:
    """What no arrangement exceeds, and what the worst product-form one reaches.

    Above: by Little's law M k over the shortest D and S that any rate of the laws allows (M k / C, unless several
    batches pass transport or instances faster than as many lone ones), and the limits of instances and transport.
    Below: the balanced-job bound of the network in which transport is one server at its slowest measured rate and S
    is that under load; several instances are taken for one fast one and a delay (Zahorjan et al. 1982; Seidmann et
    al. 1987). No rate of the laws is lower, and none of that network falls with n, so that it is never ahead.
    """
    m = np.asarray(flights, dtype=float)
    least_s = np.minimum(laws.service_s, laws.busy_service_s.min(axis=1))
    shortest_s, limit = laws.transport_s, laws.batch * laws.instances / least_s
    if laws.transport_rates_per_s is not None and laws.transport_limit_per_s is not None:
        rates = laws.transport_rates_per_s
        shortest_s = np.minimum(shortest_s, (np.arange(1, rates.shape[1] + 1) / rates).min(axis=1))
        limit = np.minimum(limit, laws.transport_limit_per_s)
    highest = np.minimum(m * (laws.batch / (shortest_s + least_s))[:, np.newaxis], limit[:, np.newaxis])
    highest = as_measured_alone(highest, laws, flights)
    serial_s = laws.transport_s
    if laws.transport_rates_per_s is not None:
        serial_s = np.maximum(serial_s, 1.0 / laws.transport_rates_per_s.min(axis=1))
    busy_s = laws.busy_service_s.max(axis=1)
    fast_s, spread_s = busy_s / laws.instances, busy_s * (laws.instances - 1) / laws.instances
    total_s, largest_s = serial_s + fast_s, np.maximum(serial_s, fast_s)
    crowded_s = m * total_s[:, np.newaxis]
    wait_s = (m - 1) * largest_s[:, np.newaxis] * crowded_s / (crowded_s + spread_s[:, np.newaxis])
    lowest = laws.batch * m / ((total_s + spread_s)[:, np.newaxis] + wait_s)
    return Curves(BOUNDS, "bounds", highest, laws.knee, lowest=np.minimum(lowest, highest))


def mva_curves(laws: Laws, flights: Sequence[int]) -> Curves:
    """The closed network of transport and instances, exact by convolution: exponential service, shared transport.

    Without a transport law, or with several instances whose S(j) was not measured, it is an upper bound.
    """
    most = max(flights)
    if laws.transport_rates_per_s is None:
        batches = throughput_curve([laws.instance_rates_per_s], most, delay_s=laws.transport_s)
    else:
        batches = throughput_curve([laws.transport_rates_per_s, laws.instance_rates_per_s], most)
    is_whole = laws.transport_rates_per_s is not None and laws.is_compute_law_measured
    values = as_measured_alone(laws.batch * batches[:, np.asarray(flights) - 1], laws, flights)
    return Curves(MVA, "estimate" if is_whole else "upper bound", values, laws.knee)


def simulation_curves(laws: Laws, flights: Sequence[int], simulator: Simulator, seed: int) -> Curves:
    """The same network with the measured spread of S and D, by simulation."""
    values = simulator(laws, flights, seed)
    is_whole = laws.transport_rates_per_s is not None and laws.is_compute_law_measured
    values = as_measured_alone(values, laws, flights)
    return Curves(SIMULATION, "estimate" if is_whole else "upper bound", values, laws.knee[: len(values)])


def bulk_curves(laws: Laws, server: BulkServer, flights: Sequence[int]) -> Curves:
    """The closed network whose server merges flights of k requests into executions of up to its greatest batch.

    The draws scale the whole ladder S(b) as they scale S(k). Where the chain of the measured spread is too large,
    service is taken for exponential.

    Raises:
        UsageError: even that chain is too large; the simulation's reference engine has no such limit.
    """
    rows = 1 + min(_BULK_DRAWS, laws.draws)
    rates = laws.transport_rates_per_s
    transport = rates[:rows] if rates is not None else np.arange(1, max(flights) + 1) / laws.transport_s[:rows, None]
    ladders = _scaled_ladders(laws, server)[:rows]
    spread = min(1.0 if laws.service_cv is None else laws.service_cv, 1.0)
    for stages in (None, 1):
        try:
            curve = bulk_throughput(
                server, transport, flights, rows=laws.batch, service_cv=spread, stages=stages, times_s=ladders
            )
            break
        except UsageError:
            if stages == 1:
                raise
            spread = 1.0
    values = as_measured_alone(laws.batch * curve.throughput_per_s, laws, flights)
    kind: Kind = "estimate" if rates is not None else "upper bound"
    return Curves(BULK, kind, values, bulk_knee(laws, server)[:rows])


def bulk_knee(laws: Laws, server: BulkServer) -> Floats:
    """N* where the greatest executions, or the transport, are the limit, shape ``[1 + draws]``."""
    limit = bulk_compute_limit_per_s(laws, server)
    if laws.transport_limit_per_s is not None:
        limit = np.minimum(limit, laws.transport_limit_per_s)
    return np.asarray(laws.cycle_s * limit / laws.batch)


def bulk_compute_limit_per_s(laws: Laws, server: BulkServer) -> Floats:
    """Requests a second that the instances compute in executions of the greatest batch, shape ``[1 + draws]``."""
    sizes = [size for size, _ in server.ladder_s]
    largest_s = ladder_times(sizes, _scaled_ladders(laws, server), [server.max_batch])[:, 0]
    return np.asarray(server.instances * server.max_batch / largest_s)


def _scaled_ladders(laws: Laws, server: BulkServer) -> Floats:
    """The ladder's times so that S(k) is that of each draw, under load, shape ``[1 + draws, sizes]``."""
    sizes, times_s = zip(*server.ladder_s, strict=True)
    return np.asarray(np.asarray(times_s) * (laws.busy_service_s[:, :1] / ladder_times(sizes, times_s, [laws.batch])))


def as_measured_alone(values: Floats, laws: Laws, flights: Sequence[int]) -> Floats:
    """X(1) is k / C in each row: with one batch in flight nothing is under load."""
    return np.where(np.asarray(flights) == 1, (laws.batch / laws.cycle_s)[: len(values), np.newaxis], values)


def summary(curves: Curves, flights: Sequence[int], laws: Laws) -> PredictorResult:
    """The record of one predictor: its curve with intervals, and its M in three readings."""
    estimate, drawn = curves.values[0], curves.values[1:]
    level = LEVEL if len(drawn) else None
    lows: Sequence[float | None] = [None] * len(flights)
    highs = lows
    quantiles: Sequence[tuple[float, ...] | None] = [None] * len(flights)
    if level is not None:
        lowest = drawn if curves.lowest is None else curves.lowest[1:]
        lows = np.quantile(lowest, 0.5 - LEVEL / 2, axis=0).tolist()
        highs = np.quantile(drawn, 0.5 + LEVEL / 2, axis=0).tolist()
        quantiles = [tuple(column) for column in np.quantile(drawn, QUANTILE_LEVELS, axis=0).T.tolist()]
    elif curves.lowest is not None:
        lows, highs = curves.lowest[0].tolist(), estimate.tolist()
    probabilities = None
    if level is not None:
        shares = flights_distribution((curves.knee[1:] / laws.instances).tolist(), laws.instances)
        probabilities = {str(m): share for m, share in shares.items()}
    whole = drawn if len(drawn) else curves.values
    losses = np.mean(1.0 - whole / whole.max(axis=1, keepdims=True), axis=0)
    return PredictorResult(
        name=curves.name,
        kind=curves.kind,
        m_star=optimal_flights(float(curves.knee[0]) / laws.instances, laws.instances),
        m_star_probabilities=probabilities,
        m_95=flights[int(np.argmax(estimate >= _NEAR_PEAK * estimate.max()))],
        m_recommended=flights[int(np.argmax(losses < _LOSS))],
        peak_per_s=curves.plateau_per_s or float(estimate.max()),
        level=level,
        quantile_levels=None if level is None else QUANTILE_LEVELS,
        curve=tuple(
            CurvePoint(
                flights=m,
                throughput_per_s=x,
                low=low,
                high=high,
                quantiles=of_x,
                **_cycle(m * laws.batch, x, low, high, is_known=laws.is_timed),
            )
            for m, x, low, high, of_x in zip(flights, estimate.tolist(), lows, highs, quantiles, strict=True)
        ),
    )


def _cycle(
    requests: int, x: float, low: float | None, high: float | None, *, is_known: bool
) -> dict[str, float | None]:
    """The mean cycle of a batch by Little's law; None where the batch size is not known."""
    if not is_known:
        return {}
    return {
        "cycle_s": requests / x,
        "cycle_low_s": None if high is None else requests / high,
        "cycle_high_s": None if low is None else requests / low,
    }
