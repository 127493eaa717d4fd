"""The closed form: how many batches to keep in flight, and what no arrangement of a cycle can exceed.

Rules here: standard library only, because ``b2g mstar`` must answer at once; times are float seconds; what
is not physical raises and nothing is clamped. Transport overhead is a signed difference: it may be negative.

Sources: Denning and Buzen (1978), The operational analysis of queueing network models, Computing Surveys
10(3); Lazowska, Zahorjan, Graham and Sevcik (1984), Quantitative System Performance, ch. 3 (the laws) and 5
(the bounds); Zahorjan, Sevcik, Eager and Galler (1982), Balanced job bound analysis of queueing networks,
CACM 25(2); Seidmann, Schweitzer and Shalev-Oren (1987), Computerized closed queueing network models of
flexible manufacturing systems, Large Scale Systems 12 (several servers as one fast server and a delay).
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from b2gmodel.errors import UsageError
from b2gmodel.units import format_duration

CEILING_TOLERANCE: Final = 1e-9
"""Relative. A ratio this close to a whole number is that number: (0.1 + 0.2) / 0.1 is 3 and not 4."""


@dataclass(frozen=True, slots=True)
class ClosedForm:
    """The closed form's answer for one service time and one transport overhead.

    Attributes:
        service_s: time for which a batch holds its instance, S.
        transport_s: the rest of the cycle, D; signed.
        instances: model instances, g.
        m_star: batches in flight at the knee, M*.
        cycle_s: single-flight cycle time, C = S + D.
        transport_share: D / C.
        single_flight_rate_per_s: batches per second with one in flight, 1 / C.
        saturation_rate_per_s: batches per second with all instances busy, g / S.
        gain: promised throughput at M* over single-flight, min(M*, g C / S). Below 1 where D < 0 with one
            instance: the two times contradict each other by that much.
        why: the reason for M* in one sentence.
    """

    service_s: float
    transport_s: float
    instances: int
    m_star: int
    cycle_s: float
    transport_share: float
    single_flight_rate_per_s: float
    saturation_rate_per_s: float
    gain: float
    why: str


def mstar(service_s: float, transport_s: float, instances: int = 1) -> ClosedForm:
    """M* = ceil(g C / S) with C = S + D, and what it promises.

    It takes transport for a pure delay: where transports share a processor or a link, the peak stays close
    to M* but is lower than promised.

    Args:
        service_s: S in seconds, positive.
        transport_s: D in seconds, signed; the cycle S + D must be positive. With D <= 0 M* is g.
        instances: g, at least 1.

    Raises:
        UsageError: a value outside its domain, or a ratio too large for a float.
    """
    service_s = _positive(service_s, "service time")
    transport_s = _finite(transport_s, "transport overhead")
    instances = whole_number(instances, "instances")
    cycle_s = _positive(service_s + transport_s, "cycle time (service plus transport)")
    single_flight_rate_per_s = _positive(1.0 / cycle_s, "single-flight rate")
    saturation_rate_per_s = _positive(instances / service_s, "saturation rate")
    m_star = optimal_flights(cycle_s / service_s, instances)
    return ClosedForm(
        service_s=service_s,
        transport_s=transport_s,
        instances=instances,
        m_star=m_star,
        cycle_s=cycle_s,
        transport_share=transport_s / cycle_s,
        single_flight_rate_per_s=single_flight_rate_per_s,
        saturation_rate_per_s=saturation_rate_per_s,
        gain=min(float(m_star), instances * (cycle_s / service_s)),
        why=_why(service_s, transport_s, instances, m_star),
    )


def optimal_flights(cycle_to_service: float, instances: int = 1) -> int:
    """M* = ceil(g C / S), from the ratio alone.

    A product within a relative ``CEILING_TOLERANCE`` of a whole number counts as that number, so that float
    rounding never adds a batch. A ratio of 1 or less (no transport, or less than none) gives g: an instance
    without a batch of its own idles, however short the cycle.

    Args:
        cycle_to_service: C / S, positive.
        instances: g, at least 1.

    Raises:
        UsageError: a value outside its domain.
    """
    cycle_to_service = _positive(cycle_to_service, "cycle over service time")
    instances = whole_number(instances, "instances")
    if cycle_to_service <= 1.0:
        return instances
    knee = _positive(instances * cycle_to_service, "instances times cycle over service time")
    nearest = round(knee)
    return nearest if abs(knee - nearest) <= CEILING_TOLERANCE * knee else math.ceil(knee)


def flights_distribution(cycle_to_service_draws: Iterable[float], instances: int = 1) -> dict[int, float]:
    """P(M* = m), by pushing each draw of C / S through the ceiling; keys ascending, values sum to 1.

    Args:
        cycle_to_service_draws: draws of C / S (a bootstrap's, say), each positive; at least one.
        instances: g, at least 1.

    Raises:
        UsageError: no draw, or a draw outside its domain.
    """
    counts = Counter(optimal_flights(ratio, instances) for ratio in cycle_to_service_draws)
    if not counts:
        raise UsageError("no draws of cycle over service time", observed=0, allowed="at least one")
    return {flights: counts[flights] / counts.total() for flights in sorted(counts)}


def cycle_to_service_from_share(transport_share: float) -> float:
    """C / S = 1 / (1 - share), for studies that publish only the transport share D / C.

    Args:
        transport_share: D / (D + S), below 1; zero or negative where D is.

    Raises:
        UsageError: the share is not finite or not below 1.
    """
    share = _finite(transport_share, "transport share")
    if share >= 1.0:
        raise UsageError("a transport share leaves time for service", observed=share, allowed="below 1")
    return 1.0 / (1.0 - share)


def throughput(flights: int, *, single_flight_rate_per_s: float, cycle_to_service: float, instances: int = 1) -> float:
    """The closed form's X(M) = min(M X(1), g X(1) C / S), in the unit of the single-flight rate.

    Args:
        flights: M, at least 1.
        single_flight_rate_per_s: X(1), positive, in requests or batches per second.
        cycle_to_service: C / S, positive.
        instances: g, at least 1.

    Raises:
        UsageError: a value outside its domain.
    """
    flights = whole_number(flights, "flights")
    rate_per_s = _positive(single_flight_rate_per_s, "single-flight rate")
    ratio = _positive(cycle_to_service, "cycle over service time")
    return _positive(min(flights, whole_number(instances, "instances") * ratio) * rate_per_s, "promised throughput")


@dataclass(frozen=True, slots=True)
class Station:
    """One stage of the cycle.

    Attributes:
        demand_s: visits times service time per cycle, seconds, positive.
        servers: 1, 2, ..., or ``math.inf`` for a pure delay, where nobody waits.

    Raises:
        UsageError: a value outside its domain.
    """

    demand_s: float
    servers: float = 1

    def __post_init__(self) -> None:
        _positive(self.demand_s, "service demand")
        if self.servers != math.inf and not (self.servers >= 1 and self.servers == int(self.servers)):
            raise UsageError(
                "not a number of servers", observed=self.servers, allowed="1, 2, ... or inf", where="servers"
            )

    @property
    def is_delay(self) -> bool:
        """Whether nobody ever waits here."""
        return self.servers == math.inf


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the throughput and the response time of a closed network lie between.

    The response time is that of the stations at which one can wait: delays (think time) are not part of it.
    """

    throughput_low_per_s: float
    throughput_high_per_s: float
    response_low_s: float
    response_high_s: float


def knee(stations: Sequence[Station]) -> float:
    """N* = C / max(D_i / c_i): the population at which the asymptotes meet; C sums all demands, delays too.

    Infinite where all stations are delays. For ``[Station(S, g), Station(D, inf)]`` it is g C / S, of which
    M* is the ceiling.

    Raises:
        UsageError: no station.
    """
    bottleneck_s = _bottleneck_s(stations)
    return math.inf if bottleneck_s == 0.0 else sum(s.demand_s for s in stations) / bottleneck_s


def asymptotic_bounds(stations: Sequence[Station], population: int) -> Bounds:
    """Asymptotic bounds: X <= min(N / C, min(c_i / D_i)); the low end has all others ahead at each station.

    The upper bound on throughput holds for any service times; the lower for product-form networks. For the
    lower, a station of c servers is taken for one fast server of demand D / c and a delay D (c - 1) / c,
    which is never faster: by the upper bound, with n inside it passes at most min(n, c) / D.

    Args:
        stations: at least one.
        population: N, at least 1.

    Raises:
        UsageError: no station, or a population below 1.
    """
    population = whole_number(population, "population")
    think_s, queueing = _think_s(stations), _queueing(stations)
    low_s = max(sum(s.demand_s for s in queueing), population * _bottleneck_s(stations) - think_s)
    spread_s, fast_s = _seidmann(queueing)
    return _bounds(population, think_s, low_s, spread_s + population * sum(fast_s))


def balanced_job_bounds(stations: Sequence[Station], population: int) -> Bounds:
    """Balanced-job bounds: those of two networks with equal demands, one never slower and one never faster.

    They hold for product-form networks and lie within the asymptotic bounds. For the upper bound on
    throughput, stations of several servers are relaxed once to a single server that is c times as fast and
    once to a delay (the tighter result is kept); for the lower, they are replaced as in
    :func:`asymptotic_bounds`.

    Args:
        stations: at least one.
        population: N, at least 1.

    Raises:
        UsageError: no station, or a population below 1.
    """
    outer = asymptotic_bounds(stations, population)
    think_s, queueing = _think_s(stations), _queueing(stations)
    single_s = [s.demand_s for s in queueing if s.servers == 1]
    multi_s = sum(s.demand_s for s in queueing if s.servers > 1)
    low_s = max(
        outer.response_low_s,
        _balanced_low_s([s.demand_s / s.servers for s in queueing], think_s, population),
        multi_s + _balanced_low_s(single_s, think_s + multi_s, population),
    )
    spread_s, fast_s = _seidmann(queueing)
    high_s = spread_s + _balanced_high_s(fast_s, think_s + spread_s, population)
    return _bounds(population, think_s, low_s, high_s)


def utilisation(throughput_per_s: float, station: Station) -> float:
    """The utilisation law: X D / c, the mean share of the station's servers that are busy.

    Above 1 the throughput or the demand is wrong; the number is returned as it is, for the caller to report.

    Args:
        throughput_per_s: X, positive.
        station: one with a finite number of servers.

    Raises:
        UsageError: a throughput that is not positive and finite, or a delay, which has no utilisation.
    """
    if station.is_delay:
        raise UsageError("a delay has no utilisation", observed=station.servers, allowed="a finite number of servers")
    return _positive(throughput_per_s, "throughput") * station.demand_s / station.servers


def response_time(population: int, throughput_per_s: float, think_s: float = 0.0) -> float:
    """Little's law for the whole cycle: R = N / X - Z, in seconds.

    Args:
        population: N, at least 1.
        throughput_per_s: X, positive.
        think_s: Z, the time spent in delays, at least 0.

    Raises:
        UsageError: a value outside its domain, or a think time longer than the whole cycle N / X.
    """
    cycle_s = whole_number(population, "population") / _positive(throughput_per_s, "throughput")
    if not 0.0 <= think_s <= cycle_s:
        raise UsageError(
            "think time does not fit the cycle",
            observed=think_s,
            allowed=f"0 to {cycle_s!r} s",
            where="think time",
        )
    return cycle_s - think_s


def _why(service_s: float, transport_s: float, instances: int, m_star: int) -> str:
    noun = "instance" if instances == 1 else "instances"
    if transport_s <= 0.0:
        return (
            f"transport adds nothing to the service time (D = {format_duration(transport_s)}), "
            f"so one batch for each of {instances} {noun} already keeps the server busy."
        )
    cycle_s = service_s + transport_s
    return (
        f"a batch holds its instance for {format_duration(service_s)} of a {format_duration(cycle_s)} cycle, "
        f"so it takes {instances * (cycle_s / service_s):.4g} batches in flight, in whole batches {m_star}, "
        f"to keep {instances} {noun} busy."
    )


def _think_s(stations: Sequence[Station]) -> float:
    return sum(s.demand_s for s in stations if s.is_delay)


def _queueing(stations: Sequence[Station]) -> list[Station]:
    if not stations:
        raise UsageError("a network without stations", observed=0, allowed="at least one", where="stations")
    return [s for s in stations if not s.is_delay]


def _bottleneck_s(stations: Sequence[Station]) -> float:
    """The largest demand per server; 0 where all are delays."""
    return max((s.demand_s / s.servers for s in _queueing(stations)), default=0.0)


def _seidmann(queueing: Sequence[Station]) -> tuple[float, list[float]]:
    """Each station as a server D / c and a delay D (c - 1) / c: the delays' sum, and the servers' demands."""
    fast_s = [s.demand_s / s.servers for s in queueing]
    return sum(s.demand_s * (s.servers - 1) / s.servers for s in queueing), fast_s


def _balanced_low_s(demands_s: Sequence[float], think_s: float, population: int) -> float:
    """No network of these single servers answers sooner than one whose demands all equal their mean."""
    if not demands_s:
        return 0.0
    total_s = sum(demands_s)
    return total_s + (population - 1) * total_s / len(demands_s) * total_s / (total_s + think_s)


def _balanced_high_s(demands_s: Sequence[float], think_s: float, population: int) -> float:
    """Nor later than one whose demands all equal the largest."""
    if not demands_s:
        return 0.0
    total_s = sum(demands_s)
    crowded_s = population * total_s
    return total_s + (population - 1) * max(demands_s) * crowded_s / (crowded_s + think_s)


def _bounds(population: int, think_s: float, low_s: float, high_s: float) -> Bounds:
    return Bounds(
        throughput_low_per_s=population / (high_s + think_s),
        throughput_high_per_s=population / (low_s + think_s),
        response_low_s=low_s,
        response_high_s=high_s,
    )


def _finite(value: float, where: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise UsageError("not a finite number", observed=value, allowed="a finite number", where=where)
    return number


def _positive(value: float, where: str) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0.0):
        raise UsageError("must be positive", observed=value, allowed="positive and finite", where=where)
    return number


def whole_number(value: int, where: str) -> int:
    """The value as a count of at least 1, or ``UsageError``, in which ``where`` names the value."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise UsageError("not a count", observed=value, allowed="a whole number, at least 1", where=where)
    return number
