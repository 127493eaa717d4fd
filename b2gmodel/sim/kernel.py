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

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from b2gmodel.closed_form import whole_number
from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.loops import advance_any, advance_lone, advance_pair
from b2gmodel.sim.state import Ints, Plant, State, empty_state, plant_of
from b2gmodel.sim.stations import DRAW_BLOCK, Draws, Line, Station

Advance: TypeAlias = Callable[[Plant, State, Floats, Floats, bool, Ints, Floats, Floats, Floats], int]


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


class Kernel:
    """A run that goes on block by block; ``now_s`` is the time of the last delivery.

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
        self.now_s = 0.0
        self._draws = Draws(line.times, seed)
        self._plant = plant_of(line, self.flights)
        self._state = empty_state(len(line.stations), line.times.legs, self.flights)
        self._closed = _closed_loop(line, self.flights)

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
        number, full_s, launched_s, delivered_s = np.empty(room, np.int64), *(np.empty(room) for _ in range(3))
        if len(ready) > 0 or drain:
            # Of two flights that are done at one instant this loop may leave the second where the others do not look.
            self._closed = advance_any
        run = self._closed
        count = run(self._plant, self._state, rows, ready, drain, number, full_s, launched_s, delivered_s)
        if count:
            self.now_s = float(delivered_s[count - 1])
        return Departures(number[:count], full_s[:count], launched_s[:count], delivered_s[:count])

    def blocks(self, cycles: int) -> Iterator[Departures]:
        """``cycles`` launches in a closed cycle, a block at a time; those still in flight are left there."""
        done = 0
        while done < cycles:
            block = self._draws.block(min(DRAW_BLOCK, cycles - done))[: cycles - done]
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


def is_lone(line: Line, flights: int) -> bool:
    """Whether flights meet at one single server at the end, and nowhere before."""
    *before, last = _stations(line)
    return _is_single(last, flights) and all(station.is_delay for station in before)


def is_pair(line: Line, flights: int) -> bool:
    """Whether the line is one shared station that takes everybody at once, then one single server."""
    first, *after = _stations(line)
    shared = first.rates is not None and (first.limit is None or first.limit >= flights)
    return shared and len(after) == 1 and _is_single(after[0], flights)


def _stations(line: Line) -> list[Station]:
    return [line.stations[station] for station in line.visits]


def _is_single(station: Station, flights: int) -> bool:
    return station.rates is None and station.limit is not None and min(station.limit, flights) == 1


def _closed_loop(line: Line, flights: int) -> Advance:
    """The quickest loop that knows this cycle."""
    return advance_lone if is_lone(line, flights) else advance_pair if is_pair(line, flights) else advance_any


def fly(line: Line, flights: int, cycles: int, seed: np.random.SeedSequence) -> Departures:
    """``cycles`` flights of a closed cycle, every one to its end, in order of delivery."""
    kernel = Kernel(line, flights, seed)
    blocks = [*kernel.blocks(cycles), kernel.advance(np.empty((0, line.times.legs)), drain=True)]
    return Departures(
        np.concatenate([block.number for block in blocks]),
        np.concatenate([block.ready_s for block in blocks]),
        np.concatenate([block.launched_s for block in blocks]),
        np.concatenate([block.delivered_s for block in blocks]),
    )
