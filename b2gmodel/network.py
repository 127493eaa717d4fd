"""Closed queueing networks with one class of jobs: exact by convolution, approximate where N is very large.

Rules here: a station is a ladder of rates, mu(n) completions per second with n jobs at it, given for n = 1..c
and constant beyond c (for a measured ladder that is an assumption, and the only one made about it). A single
server is a ladder of one rung, c servers one of c, a delay one of N, as nobody ever waits there.

The sums of the convolution have positive terms only and are kept as logarithms, in units of about the
network's own throughput: neither 10,000 jobs nor demands twelve orders of magnitude apart overflow or cancel.
The textbook recursion for mean values under load-dependent rates subtracts probabilities from 1, is unstable,
and is not used.

Sources: Buzen (1973), Computational algorithms for closed queueing networks with exponential servers, CACM
16(9); Chandy, Herzog and Woo (1975), Parametric analysis of queuing networks, IBM J. Res. Dev. 19(1); Reiser
and Lavenberg (1980), Mean-value analysis of closed multichain queuing networks, JACM 27(2); Schweitzer
(1979), Approximate analysis of multiclass closed networks of queues; Lazowska et al. (1984), Quantitative
System Performance, ch. 6 to 8; Seidmann, Schweitzer and Shalev-Oren (1987), Large Scale Systems 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from b2gmodel.closed_form import Station, asymptotic_bounds, utilisation, whole_number
from b2gmodel.errors import UsageError
from b2gmodel.units import format_duration

Floats: TypeAlias = NDArray[np.float64]

_PHYSICAL: Final = (1e-100, 1e100)
"""Rates per second and times in seconds: what lies outside is a mistake, and products inside stay floats."""


@dataclass(frozen=True, slots=True)
class FlowEquivalent:
    """A station that stands for a whole sub-network: its throughput with 1, 2, ... jobs inside.

    Attributes:
        rates_per_s: mu(1), ..., mu(c), each positive; with more than c jobs the rate stays mu(c).

    Raises:
        UsageError: no rate, or one that is not positive and finite (1e-100 to 1e100).
    """

    rates_per_s: tuple[float, ...]

    def __post_init__(self) -> None:
        _checked_ladder(self.rates_per_s)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Solution:
    """What a closed network does with N jobs; the K stations are in the order given.

    Attributes:
        stations: the network's stations.
        population: N.
        throughput_per_s: X(1), ..., X(N), shape ``[N]``.
        queue_lengths: mean number at each station, waiting or in service, shape ``[K]``; they sum to N.
        residence_s: mean time at each station per cycle, shape ``[K]``; they sum to N / X(N).
        utilisations: mean share of busy servers; for a flow-equivalent station the probability that it is not
            empty; None for a delay.
        marginals: for each station P(n jobs there), n = 0..N, shape ``[N + 1]``.
    """

    stations: tuple[Station | FlowEquivalent, ...]
    population: int
    throughput_per_s: Floats
    queue_lengths: Floats
    residence_s: Floats
    utilisations: tuple[float | None, ...]
    marginals: tuple[Floats, ...]

    @property
    def response_s(self) -> float:
        """Mean time per cycle at all stations but the delays."""
        return float(self.residence_s[[not _is_delay(station) for station in self.stations]].sum())

    def __repr__(self) -> str:
        rate_per_s, response = self.throughput_per_s[-1], format_duration(self.response_s)
        lines = [f"N = {self.population}: X = {rate_per_s:.6g} /s, R = {response}"]
        for station, queue, residence_s, busy in zip(
            self.stations, self.queue_lengths, self.residence_s, self.utilisations, strict=True
        ):
            share = "" if busy is None else f", busy {busy:.1%}"
            lines.append(f"  {_label(station)}: Q = {queue:.4g}, R = {format_duration(residence_s)}{share}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class ClosedNetwork:
    """A product-form closed network: exponential servers, or delays of any distribution.

    Attributes:
        stations: at least one.

    Raises:
        UsageError: no station.
    """

    stations: tuple[Station | FlowEquivalent, ...]

    def __init__(self, stations: Sequence[Station | FlowEquivalent]) -> None:
        if not stations:
            raise UsageError("a network without stations", observed=0, allowed="at least one", where="stations")
        object.__setattr__(self, "stations", tuple(stations))

    def throughput(self, population: int) -> Floats:
        """X(1), ..., X(N), exact, shape ``[N]``. Raises ``UsageError`` for N below 1."""
        population = whole_number(population, "population")
        return _throughput(self._ladders(population), population).reshape(population)

    def flow_equivalent(self, population: int) -> FlowEquivalent:
        """This network, shorted, as one station: exact in any network of up to N jobs (Norton's theorem)."""
        return FlowEquivalent(tuple(self.throughput(population).tolist()))

    def solve(self, population: int) -> Solution:
        """Throughput for 1..N jobs, and all means and distributions with N.

        The distribution at a station needs the network without it, so the work grows with K squared.

        Args:
            population: N, at least 1.

        Raises:
            UsageError: N below 1.
        """
        population = whole_number(population, "population")
        ladders = self._ladders(population)
        throughput_per_s = _throughput(ladders, population)[0]
        marginals = tuple(_marginals(ladders, population))
        queue_lengths = np.array([np.arange(population + 1) @ marginal for marginal in marginals])
        return Solution(
            stations=self.stations,
            population=population,
            throughput_per_s=throughput_per_s,
            queue_lengths=queue_lengths,
            residence_s=queue_lengths / throughput_per_s[-1],
            utilisations=tuple(
                _busy(station, float(throughput_per_s[-1]), marginal)
                for station, marginal in zip(self.stations, marginals, strict=True)
            ),
            marginals=marginals,
        )

    def _ladders(self, population: int) -> list[Floats]:
        return [_ladder(station, population) for station in self.stations]


def throughput_curve(ladders: Sequence[ArrayLike], population: int, *, delay_s: ArrayLike | None = None) -> Floats:
    """X(1), ..., X(N) of many networks of the same make at once, one a draw; exact.

    Args:
        ladders: for each station its rates in jobs per second, shape ``[draws, c]``, or ``[c]`` where all
            draws share them; constant beyond c. A single server is ``1 / S`` with c = 1, and g instances
            whose service time with j of them busy is S(j) are ``j / S(j)``, j = 1..g.
        population: N, at least 1.
        delay_s: the sum of all delays, positive, shape ``[draws]`` or a number; None where there is none.

    Returns:
        shape ``[draws, N]``; one draw where no argument has a draws axis.

    Raises:
        UsageError: no station, a rate or delay that is not positive and finite, or N below 1.
    """
    population = whole_number(population, "population")
    checked = [_checked_ladder(ladder) for ladder in ladders]
    if delay_s is not None:
        checked.append(np.arange(1, population + 1) / _checked_ladder(np.asarray(delay_s)[..., np.newaxis]))
    if not checked:
        raise UsageError("a network without stations", observed=0, allowed="at least one", where="ladders")
    draws = max(len(ladder) for ladder in checked)
    if any(len(ladder) not in (1, draws) for ladder in checked):
        raise UsageError(
            "stations differ in draws", observed=[len(ladder) for ladder in checked], allowed=f"1 or {draws}"
        )
    return _throughput([ladder[:, :population] for ladder in checked], population)


@dataclass(frozen=True, slots=True, eq=False)
class MeanValues:
    """Means of a closed network with N jobs, without distributions.

    Attributes:
        population: N.
        throughput_per_s: X(N).
        queue_lengths: mean number at each station, shape ``[K]``.
        residence_s: mean time at each station per cycle, shape ``[K]``.
    """

    population: int
    throughput_per_s: float
    queue_lengths: Floats
    residence_s: Floats


def exact_mva(stations: Sequence[Station], population: int) -> MeanValues:
    """Mean value analysis for single servers and delays: exact, and independent of the convolution.

    A job that arrives meets the queue of a network with one job fewer (Reiser and Lavenberg 1980).

    Args:
        stations: at least one, each with one server or a delay.
        population: N, at least 1; time grows with N K.

    Raises:
        UsageError: a station of several servers or a flow-equivalent one, no station, or N below 1.
    """
    population = whole_number(population, "population")
    for station in stations:
        if not isinstance(station, Station) or not (station.is_delay or station.servers == 1):
            raise UsageError(
                "not a station for mean value analysis",
                observed=station,
                allowed="single servers and delays",
                hint="use ClosedNetwork",
            )
    if not stations:
        raise UsageError("a network without stations", observed=0, allowed="at least one", where="stations")
    demands_s = np.array([station.demand_s for station in stations])
    waits = np.array([not station.is_delay for station in stations])
    residence_s, queue_lengths, throughput_per_s = demands_s, np.zeros(len(stations)), 0.0
    for jobs in range(1, population + 1):
        residence_s = demands_s * (1.0 + waits * queue_lengths)
        throughput_per_s = jobs / float(residence_s.sum())
        queue_lengths = throughput_per_s * residence_s
    return MeanValues(population, throughput_per_s, queue_lengths, residence_s)


def schweitzer(stations: Sequence[Station], population: int) -> MeanValues:
    """Schweitzer's approximation: an arriving job meets (N - 1) / N of the queue. N does not add to its work.

    With one class of jobs the fixed point is the root of one increasing function of X, which bisection finds
    between 0 and the asymptotic bound. A station of c servers is taken for one server of demand D / c and a
    delay D (c - 1) / c (Seidmann et al. 1987). Throughput comes out low: on 3,000 random networks by up to
    7 % with single servers and by up to 25 % with two to eight, most at few jobs; for large N it is exact.

    Args:
        stations: at least one; no flow-equivalent station.
        population: N, at least 1.

    Raises:
        UsageError: a flow-equivalent station, no station, or N below 1.
    """
    population = whole_number(population, "population")
    if any(not isinstance(station, Station) for station in stations):
        raise UsageError("a flow-equivalent station has no single demand", hint="use ClosedNetwork")
    demands_s = np.array([station.demand_s for station in stations])
    fast_s = np.array([0.0 if s.is_delay else s.demand_s / s.servers for s in stations])
    seen = (population - 1) / population

    def residence_at(throughput_per_s: float) -> Floats:
        return np.asarray(demands_s - fast_s + fast_s / (1.0 - throughput_per_s * fast_s * seen))

    low, high = 0.0, asymptotic_bounds(stations, population).throughput_high_per_s
    while low < (middle := (low + high) / 2) < high:
        if middle * float(residence_at(middle).sum()) < population:
            low = middle
        else:
            high = middle
    residence_s = residence_at(high)
    return MeanValues(population, high, high * residence_s, residence_s)


def _throughput(ladders: Sequence[Floats], population: int) -> Floats:
    """X(n) = G(n - 1) / G(n), shape ``[draws, N]``."""
    unit_per_s = _unit_per_s(ladders, population)
    log_g = _log_normalisers([np.log(ladder / unit_per_s) for ladder in ladders], population)
    rates_per_s: Floats = unit_per_s * np.exp(log_g[:, :-1] - log_g[:, 1:])
    return rates_per_s


def _marginals(ladders: Sequence[Floats], population: int) -> list[Floats]:
    """At each station P(n jobs) = f(n) G_without_it(N - n) / G(N), for the first draw, shape ``[N + 1]``."""
    unit_per_s = _unit_per_s(ladders, population)
    log_rates = [np.log(ladder / unit_per_s) for ladder in ladders]
    log_whole = _log_normalisers(log_rates, population)[0, -1]
    marginals = []
    for k, station in enumerate(log_rates):
        log_rest = _log_normalisers(log_rates[:k] + log_rates[k + 1 :], population)
        marginals.append(np.exp(_log_factor(station, population)[0] + log_rest[0, ::-1] - log_whole))
    return marginals


def _unit_per_s(ladders: Sequence[Floats], population: int) -> Floats:
    """About X(N), so that G(n) in this unit stays near 1; shape ``[draws, 1]``."""
    unit_per_s: Floats = population / sum((1.0 / ladder[:, :1] for ladder in ladders), np.zeros((1, 1)))
    for ladder in ladders:
        unit_per_s = np.minimum(unit_per_s, ladder.max(axis=1, keepdims=True))
    return unit_per_s


def _log_normalisers(log_rates: Sequence[Floats], population: int) -> Floats:
    """log G(n), n = 0..N, shape ``[draws, N + 1]``. Without any station G is 1, 0, 0, ..."""
    if not log_rates:
        return np.where(np.arange(population + 1) == 0, 0.0, -np.inf)[np.newaxis]
    # The longest ladder, often a delay, starts: its factor is then needed only as it is.
    first, *others = sorted(log_rates, key=lambda ladder: ladder.shape[1], reverse=True)
    log_g = _log_factor(first, population)
    for station in others:
        log_g = _joined(log_g, station, population)
    return log_g


def _log_factor(log_rates: Floats, population: int) -> Floats:
    """log f(n) = -(log mu(1) + ... + log mu(n)), n = 0..N, shape ``[draws, N + 1]``."""
    rungs = np.minimum(np.arange(population), log_rates.shape[1] - 1)
    log_f = np.zeros((len(log_rates), population + 1))
    np.cumsum(-log_rates[:, rungs], axis=1, out=log_f[:, 1:])
    return log_f


def _joined(log_g: Floats, log_rates: Floats, population: int) -> Floats:
    """The logarithm of the convolution of G with one more station's factor f, shape ``[draws, N + 1]``.

    From k = c - 1 on f is geometric, f(c - 1) rho^(k - c + 1) with rho = 1 / mu(c), and a geometric factor
    needs only Buzen's recursion, h(n) = G(n) + rho h(n - 1); the c - 1 terms before it are added one by one.
    """
    rungs = log_rates.shape[1]
    log_f = _log_factor(log_rates, rungs - 1)
    growth = np.arange(population + 1) * log_rates[:, -1:]
    geometric = np.logaddexp.accumulate(log_g + growth, axis=1) - growth
    total = np.full_like(geometric, -np.inf)
    total[:, rungs - 1 :] = geometric[:, : population + 2 - rungs] + log_f[:, -1:]
    for k in range(rungs - 1):
        total[:, k:] = np.logaddexp(total[:, k:], log_g[:, : population + 1 - k] + log_f[:, k : k + 1])
    return total


def _is_delay(station: Station | FlowEquivalent) -> bool:
    return isinstance(station, Station) and station.is_delay


def _ladder(station: Station | FlowEquivalent, population: int) -> Floats:
    """The station's rates up to N jobs, shape ``[1, c]``, c at most N."""
    if isinstance(station, FlowEquivalent):
        return _checked_ladder(station.rates_per_s[:population])
    rungs = int(min(station.servers, population))
    return np.arange(1, rungs + 1) / _checked_ladder(station.demand_s)


def _busy(station: Station | FlowEquivalent, throughput_per_s: float, marginal: Floats) -> float | None:
    if isinstance(station, FlowEquivalent):
        return float(marginal[1:].sum())
    return None if station.is_delay else utilisation(throughput_per_s, station)


def _label(station: Station | FlowEquivalent) -> str:
    if isinstance(station, FlowEquivalent):
        return f"flow-equivalent, {len(station.rates_per_s)} rates"
    kind = "delay" if station.is_delay else "1 server" if station.servers == 1 else f"{station.servers:g} servers"
    return f"{kind}, D = {format_duration(station.demand_s)}"


def _checked_ladder(values: ArrayLike) -> Floats:
    """Rates (or demands) as floats of shape ``[draws, c]``; without a draws axis there is one draw."""
    ladder = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if ladder.ndim != 2 or ladder.size == 0:
        raise UsageError("not a ladder of rates", observed=ladder.shape, allowed="draws x c, c at least 1")
    smallest, largest = _PHYSICAL
    bad = ladder[~((ladder >= smallest) & (ladder <= largest))]
    if bad.size:
        raise UsageError("not a rate or a time", observed=float(bad[0]), allowed=f"{smallest:g} to {largest:g}")
    return ladder
