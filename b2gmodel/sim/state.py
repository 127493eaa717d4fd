"""The kernel's memory as plain arrays, for the compiler: a plant that does not change, and the state of a run.

Shapes: f flights, l legs, s stations; times in seconds from the start.
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.stations import Line

Ints: TypeAlias = NDArray[np.int64]

DELAY: Final = 0
QUEUE: Final = 1
SHARED: Final = 2

ROOM: Final = 64
"""Places more than flights, so that a row which grows at one end and shrinks at the other is seldom moved."""


class Plant(NamedTuple):
    """What does not change: for each leg its station; for each station its kind, limit and rates."""

    visits: Ints
    kind: Ints
    limit: Ints
    rates: Floats
    shared: Ints


class State(NamedTuple):
    """All that the run remembers between blocks.

    At a shared station every flight in service has got the same share of its speed since it came in, so that one
    clock of shares is enough: a flight is done when the clock shows what it showed then, plus the flight's work.
    """

    due_s: Floats  # [1, f + ROOM] next arrivals, latest first; between blocks at the beginning of the row
    due_flight: Ints  # [1, f + ROOM]
    counts: Ints  # [3] how many are due, how many idle, the next launch's number
    idle: Ints  # [2 f] flights without a batch, longest idle first
    leg: Ints  # [f]
    number: Ints  # [f]
    ready_s: Floats  # [f]
    launched_s: Floats  # [f]
    at_s: Floats  # [f] arrival at the present station, or when the flight became idle
    work: Floats  # [f, l]
    free_s: Floats  # [s, f] when each server of a queue is free
    goal: Floats  # [s, f] the share at which each flight in service is done, greatest first
    inside: Ints  # [s, f] which flights these are
    inside_count: Ints  # [s]
    share: Floats  # [s] what each flight in service has got, at ``clock_s``
    clock_s: Floats  # [s]
    done_s: Floats  # [s] next completion; infinite without one
    waiting: Ints  # [s, f] a ring of those that wait at a shared station
    waiting_head: Ints  # [s]
    waiting_count: Ints  # [s]
    busy: Floats  # [s] work begun
    residence_s: Floats  # [s] time spent there, waiting or in service


def plant_of(line: Line, flights: int) -> Plant:
    stations = line.stations
    rungs = max(1, *(len(station.rates or ()) for station in stations))
    rates = np.ones((len(stations), max(rungs, flights)))
    for row, station in zip(rates, stations, strict=True):
        if station.rates is not None:
            row[: len(station.rates)] = station.rates
            row[len(station.rates) :] = station.rates[-1]
    kinds = [SHARED if station.rates is not None else DELAY if station.limit is None else QUEUE for station in stations]
    limits = [flights if station.limit is None else min(station.limit, flights) for station in stations]
    return Plant(
        np.array(line.visits, np.int64),
        np.array(kinds, np.int64),
        np.array(limits, np.int64),
        rates,
        np.flatnonzero(np.array(kinds) == SHARED).astype(np.int64),
    )


def empty_state(stations: int, legs: int, flights: int) -> State:
    def whole(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    return State(
        due_s=np.zeros((1, flights + ROOM)),
        due_flight=whole(1, flights + ROOM),
        counts=np.array([0, flights, 0], np.int64),
        idle=np.concatenate([np.arange(flights), np.zeros(flights)]).astype(np.int64),
        leg=whole(flights),
        number=whole(flights),
        ready_s=np.zeros(flights),
        launched_s=np.zeros(flights),
        at_s=np.zeros(flights),
        work=np.zeros((flights, legs)),
        free_s=np.zeros((stations, flights)),
        goal=np.zeros((stations, flights)),
        inside=whole(stations, flights),
        inside_count=whole(stations),
        share=np.zeros(stations),
        clock_s=np.zeros(stations),
        done_s=np.full(stations, np.inf),
        waiting=whole(stations, flights),
        waiting_head=whole(stations),
        waiting_count=whole(stations),
        busy=np.zeros(stations),
        residence_s=np.zeros(stations),
    )
