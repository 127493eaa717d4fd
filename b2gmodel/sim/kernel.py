"""The fast engine: M flights over a line of stations, compiled, in memory that does not grow with the run.

Flights are kept in the order of their next arrival anywhere. The first of them may always be served to the end
of its leg at once, as nothing can arrive before it: exact where those who came first are served first, or do
not meet at all. At a station with shared speed a later arrival slows the earlier; there the next completion
competes with the next arrival.

Exact: queues of any number of servers, delays, processor sharing and flow-equivalent stations, instances with
a compute law; M flights in a closed cycle, or full batches that become ready at given times and wait for a
free flight without limit. Not modelled, and so not offered here: the server's dynamic batching, partial
batches, bounded queues, deadlines, thinking clients; ``reference.py`` has them.

Flights that arrive at the same instant keep the order in which that arrival became known; this is the only
freedom that the model leaves open, and it touches no distribution where times are continuous.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from b2gmodel.closed_form import whole_number
from b2gmodel.sim.compiled import compiled
from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.stations import Draws, Line

Ints: TypeAlias = NDArray[np.int64]

_DELAY: Final = 0
_QUEUE: Final = 1
_SHARED: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Departures:
    """Flights in the order of their delivery, all of shape ``[n]``, times in seconds from the start.

    Attributes:
        number: the flight's place in the order of launches, from 0.
        ready_s: when its batch was full; equal to ``launched_s`` in a closed cycle.
        launched_s: when it got its flight.
        delivered_s: when its results were there.
    """

    number: Ints
    ready_s: Floats
    launched_s: Floats
    delivered_s: Floats

    @property
    def cycle_s(self) -> Floats:
        return self.delivered_s - self.launched_s

    @property
    def response_s(self) -> Floats:
        """From the batch being full to its results: waiting for a flight included."""
        return self.delivered_s - self.ready_s


class _Plant(NamedTuple):
    """What does not change: for each leg its station; for each station its kind, limit and rates."""

    visits: Ints
    kind: Ints
    limit: Ints
    rates: Floats
    shared: Ints


class _State(NamedTuple):
    """All that the run remembers between blocks. Shapes: f flights, l legs, s stations.

    At a shared station every flight in service has got the same share of its speed since it came in, so that one
    clock of shares is enough: a flight is done when the clock shows what it showed then, plus the flight's work.
    """

    due_s: Floats  # [1, f] next arrivals, latest first
    due_flight: Ints  # [1, f]
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


class Kernel:
    """A run that goes on block by block.

    Args:
        line: the cycle of a batch.
        flights: M.
        seed: of the work; runs of equal seed get equal work for the same flight number, whatever M is.

    Raises:
        UsageError: flights that are not a whole number of at least 1.
    """

    def __init__(self, line: Line, flights: int, seed: np.random.SeedSequence) -> None:
        self.line = line
        self.flights = whole_number(flights, "flights")
        self._draws = Draws(line.times, seed)
        self._plant = _plant(line, self.flights)
        self._state = _state(len(line.stations), line.times.legs, self.flights)

    def advance(self, work: Floats | None = None, ready_s: Floats | None = None, *, drain: bool = False) -> Departures:
        """Launch as many flights as there are rows of work; what was delivered meanwhile.

        Args:
            work: shape ``[n, legs]``; None draws the next block.
            ready_s: when each batch is full, shape ``[n]``, not decreasing; None in a closed cycle.
            drain: whether to deliver what is in flight after the last launch.
        """
        rows = self._draws.block() if work is None else np.ascontiguousarray(work)
        ready = np.empty(0) if ready_s is None else ready_s
        room = len(rows) + self.flights
        out = (np.empty(room, np.int64), np.empty(room), np.empty(room), np.empty(room))
        count = _advance(self._plant, self._state, rows, ready, drain, *out)
        return Departures(*(column[:count] for column in out))

    def blocks(self, cycles: int) -> Iterator[Departures]:
        """``cycles`` launches in a closed cycle, a block at a time; those still in flight are left there."""
        done = 0
        while done < cycles:
            block = self._draws.block()[: cycles - done]
            done += len(block)
            yield self.advance(block)

    @property
    def busy_work(self) -> Floats:
        """The work begun at each station since the start, shape ``[stations]``."""
        return self._state.busy.copy()

    @property
    def residence_s(self) -> Floats:
        """The time spent at each station since the start, by all flights together, shape ``[stations]``."""
        return self._state.residence_s.copy()


def fly(line: Line, flights: int, cycles: int, seed: np.random.SeedSequence) -> Departures:
    """``cycles`` flights of a closed cycle, every one to its end, in order of delivery."""
    kernel = Kernel(line, flights, seed)
    blocks = [*kernel.blocks(cycles), kernel.advance(np.empty((0, line.times.legs)), drain=True)]
    return Departures(
        *(
            np.concatenate([getattr(block, name) for block in blocks])
            for name in ("number", "ready_s", "launched_s", "delivered_s")
        )
    )


def _plant(line: Line, flights: int) -> _Plant:
    stations = line.stations
    rungs = max(1, *(len(station.rates or ()) for station in stations))
    rates = np.ones((len(stations), max(rungs, flights)))
    for row, station in zip(rates, stations, strict=True):
        if station.rates is not None:
            row[: len(station.rates)] = station.rates
            row[len(station.rates) :] = station.rates[-1]
    kinds = [
        _SHARED if station.rates is not None else _DELAY if station.limit is None else _QUEUE for station in stations
    ]
    limits = [flights if station.limit is None else min(station.limit, flights) for station in stations]
    return _Plant(
        np.array(line.visits, np.int64),
        np.array(kinds, np.int64),
        np.array(limits, np.int64),
        rates,
        np.flatnonzero(np.array(kinds) == _SHARED).astype(np.int64),
    )


def _state(stations: int, legs: int, flights: int) -> _State:
    def whole(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    return _State(
        due_s=np.zeros((1, flights)),
        due_flight=whole(1, flights),
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


@compiled
def _advance(
    plant: _Plant,
    state: _State,
    rows: Floats,
    ready: Floats,
    drain: bool,
    out_number: Ints,
    out_ready: Floats,
    out_launched: Floats,
    out_delivered: Floats,
) -> int:
    """Runs until a flight is free and no row is left for it (with ``drain``, until nothing flies).

    One function, and its state in local names: a call that passes all of it costs more than an event.
    """
    visits, kind, limit, rates, shared = plant
    (
        due_s, due_flight, counts, idle, leg, number, ready_s, launched_s, at_s, work, free_s,
        goal, inside, inside_count, share, clock_s, done_s, waiting, head, queued, busy, residence_s,
    ) = state
    legs, flights, used, delivered = len(visits), len(leg), 0, 0
    due, idlers, launches = counts[0], counts[1], counts[2]
    first_idle = 0
    while True:
        # Who is next: a flight that boards (while any is idle and has a row), one done at a shared station, or one
        # that arrives somewhere.
        if first_idle < idlers and used < len(rows):
            flight = idle[first_idle]
            first_idle += 1
            if first_idle == idlers:
                first_idle = idlers = 0
            now_s = at_s[flight]
            boards = was_idle = True
        elif first_idle < idlers and not drain:
            break
        else:
            was_idle = False
            station = -1
            for other in shared:
                if station < 0 or done_s[other] < done_s[station]:
                    station = other
            if station >= 0 and done_s[station] < np.inf and (due == 0 or done_s[station] <= due_s[0, due - 1]):
                now_s = done_s[station]
                share[station] = goal[station, inside_count[station] - 1]
                clock_s[station] = now_s
                inside_count[station] -= 1
                flight = inside[station, inside_count[station]]
                if queued[station] > 0:
                    heir = waiting[station, head[station]]
                    head[station] = (head[station] + 1) % flights
                    queued[station] -= 1
                    _insert(goal, inside, station, inside_count[station], share[station] + work[heir, leg[heir]], heir)
                    inside_count[station] += 1
                done_s[station] = _completion(goal, inside_count, share, clock_s, rates, station)
                residence_s[station] += now_s - at_s[flight]
                leg[flight] += 1
            elif due > 0:
                due -= 1
                now_s, flight = due_s[0, due], due_flight[0, due]
            else:
                break
            boards = leg[flight] == legs
            if boards:
                out_number[delivered] = number[flight]
                out_ready[delivered] = ready_s[flight]
                out_launched[delivered] = launched_s[flight]
                out_delivered[delivered] = now_s
                delivered += 1
                if used == len(rows):
                    at_s[flight] = now_s
                    idle[idlers] = flight
                    idlers += 1
                    continue
        if boards:
            ready_s[flight] = ready[used] if len(ready) > 0 else now_s
            launched_s[flight] = max(now_s, ready_s[flight])
            number[flight] = launches
            launches += 1
            leg[flight] = 0
            for column in range(legs):
                work[flight, column] = rows[used, column]
            used += 1
            if was_idle or launched_s[flight] > now_s:
                _insert(due_s, due_flight, 0, due, launched_s[flight], flight)
                due += 1
                continue
        # The flight is at its next station.
        station = visits[leg[flight]]
        amount = work[flight, leg[flight]]
        busy[station] += amount
        if kind[station] == _SHARED:
            at_s[flight] = now_s
            count = inside_count[station]
            if count == limit[station]:
                waiting[station, (head[station] + queued[station]) % flights] = flight
                queued[station] += 1
                continue
            if count == 0:
                share[station] = 0.0
            else:
                share[station] += (now_s - clock_s[station]) * rates[station, count - 1] / count
            clock_s[station] = now_s
            _insert(goal, inside, station, count, share[station] + amount, flight)
            inside_count[station] = count + 1
            done_s[station] = _completion(goal, inside_count, share, clock_s, rates, station)
            continue
        end_s = now_s + amount
        if kind[station] == _QUEUE:
            server = 0
            for other in range(1, limit[station]):
                if free_s[station, other] < free_s[station, server]:
                    server = other
            end_s = max(now_s, free_s[station, server]) + amount
            free_s[station, server] = end_s
        residence_s[station] += end_s - now_s
        leg[flight] += 1
        _insert(due_s, due_flight, 0, due, end_s, flight)
        due += 1
    # What is still idle moves to the front.
    for place in range(first_idle, idlers):
        idle[place - first_idle] = idle[place]
    counts[0], counts[1], counts[2] = due, idlers - first_idle, launches
    return delivered


@compiled
def _insert(keys: Floats, flights: Ints, row: int, count: int, key: float, flight: int) -> None:
    """Into a row sorted with the greatest first; of equal keys the one that came earlier is served earlier."""
    place = count
    while place > 0 and keys[row, place - 1] <= key:
        keys[row, place] = keys[row, place - 1]
        flights[row, place] = flights[row, place - 1]
        place -= 1
    keys[row, place] = key
    flights[row, place] = flight


@compiled
def _completion(
    goal: Floats, inside_count: Ints, share: Floats, clock_s: Floats, rates: Floats, station: int
) -> float:
    """When the first flight in service at a shared station is done, if nobody else comes."""
    count = inside_count[station]
    if count == 0:
        return np.inf
    left = max(0.0, goal[station, count - 1] - share[station])
    return float(clock_s[station] + left * count / rates[station, count - 1])
