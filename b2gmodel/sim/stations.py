"""What a batch's cycle is made of: stations, the route over them, and the times it takes.

Rules here: a station serves at most ``limit`` batches at once, the others wait in order of arrival. Those in
service progress at their own speed, or share the station's total speed evenly. A leg's time is the work it
brings: seconds when it is served alone at speed 1, or batches (mean 1) at a flow-equivalent station.

Sources: Chandy, Herzog and Woo (1975) for the flow-equivalent station; Kleinrock (1976), Queueing Systems
vol. 2, ch. 4, for processor sharing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from b2gmodel.errors import UsageError
from b2gmodel.sim.distributions import CycleTimes, Floats

DRAW_BLOCK = 1 << 13
"""Cycles drawn at a time: enough to make a call's cost small, few enough to stay in the processor's cache."""


@dataclass(frozen=True, slots=True)
class Station:
    """One place that batches pass through; made by the constructors below.

    Attributes:
        name: unique within a cycle.
        limit: most batches in service at once; None for no limit.
        rates: total speed with 1, 2, ... batches in service, constant beyond the last, shared evenly; None
            where each is served at speed 1 of its own.

    Raises:
        UsageError: a limit below 1, or a rate that is not positive and finite.
    """

    name: str
    limit: int | None
    rates: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UsageError("a station serves somebody", observed=self.limit, allowed=">= 1", where=self.name)
        if self.rates is not None and (
            not self.rates or not all(math.isfinite(rate) and rate > 0 for rate in self.rates)
        ):
            raise UsageError("not a ladder of rates", observed=self.rates, allowed="each > 0", where=self.name)

    @classmethod
    def delay(cls, name: str) -> Station:
        """Nobody waits and nobody slows another down."""
        return cls(name, None)

    @classmethod
    def queue(cls, name: str, servers: int = 1) -> Station:
        """``servers`` equal servers, first come, first served: a link, a core, model instances."""
        return cls(name, servers)

    @classmethod
    def shared(cls, name: str, cores: int = 1) -> Station:
        """Processor sharing: all are served at once; beyond ``cores`` of them each one slows down."""
        if cores < 1:
            raise UsageError("a processor has cores", observed=cores, allowed=">= 1", where=name)
        return cls(name, None, tuple(float(n) for n in range(1, cores + 1)))

    @classmethod
    def flow_equivalent(cls, name: str, rates_per_s: Sequence[float]) -> Station:
        """A measured sub-system: batches a second with 1, 2, ... inside. Its legs bring work of mean 1."""
        return cls(name, None, tuple(rates_per_s))

    @classmethod
    def instances(cls, name: str, service_s: Sequence[float]) -> Station:
        """Model instances that slow each other down: S(j) with j = 1..g of them busy. Its legs bring S(1)."""
        if not service_s:
            raise UsageError("a compute law needs S(1)", observed=0, allowed="at least one time", where=name)
        return cls(name, len(service_s), tuple(j * service_s[0] / s for j, s in enumerate(service_s, 1)))

    @property
    def is_delay(self) -> bool:
        return self.limit is None and self.rates is None

    @property
    def capacity(self) -> float:
        """The greatest speed, work a second, that utilisation is a share of; infinite for a delay."""
        if self.rates is not None:
            return max(self.rates)
        return math.inf if self.limit is None else self.limit


@dataclass(frozen=True, slots=True)
class Line:
    """A batch's whole cycle: from sealing to delivery over the legs of ``route``.

    Attributes:
        stations: with unique names; one may be visited by several legs.
        route: a station's name for each leg, in order.
        times: the work of each leg.
        service: name of the station that computes, for S and the server's queue; None without one.

    Raises:
        UsageError: names that repeat or are not known, or as many times as there are not legs.
    """

    stations: tuple[Station, ...]
    route: tuple[str, ...]
    times: CycleTimes
    service: str | None = None

    def __post_init__(self) -> None:
        names = [station.name for station in self.stations]
        if len(set(names)) != len(names):
            raise UsageError("two stations have one name", observed=", ".join(names), where="stations")
        unknown = [name for name in (*self.route, *filter(None, [self.service])) if name not in names]
        if unknown:
            raise UsageError("no such station", observed=unknown[0], allowed=", ".join(names), where="route")
        if len(self.route) != self.times.legs:
            raise UsageError(
                "legs and times differ in number",
                observed=f"{len(self.route)} legs, {self.times.legs} times",
                allowed="one time a leg",
                where="route",
            )
        if self.service is not None and self.route.count(self.service) != 1:
            raise UsageError("a batch is computed once", observed=self.route, where="route")

    @property
    def visits(self) -> tuple[int, ...]:
        """The index of each leg's station."""
        index = {station.name: number for number, station in enumerate(self.stations)}
        return tuple(index[name] for name in self.route)

    @property
    def service_leg(self) -> int | None:
        return None if self.service is None else self.route.index(self.service)


class Draws:
    """The work of one cycle after another, the same for every engine that starts from the same seed."""

    def __init__(self, times: CycleTimes, seed: np.random.SeedSequence) -> None:
        self._times = times
        # The children are made from the key and not by spawn(), which would change the seed that others use.
        children = [
            np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, 0, stream))
            for stream in range(times.streams)
        ]
        self._streams = [np.random.Generator(np.random.SFC64(child)) for child in children]

    def block(self, cycles: int = DRAW_BLOCK) -> Floats:
        """The next cycles, an even number of them (two share a raw number), shape ``[cycles, legs]``.

        Blocks of any sizes join to the same series: samplers take their numbers one after the other.
        """
        return self._times.draw(self._streams, cycles + cycles % 2)
