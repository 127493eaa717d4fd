"""Closed cycles side by side: ``WIDTH`` of them in one compiled loop, each with its own M and its own work.

One cycle after the other is a chain in which each step waits for the last; lanes fill that time with each other.
A lane keeps its flights in the order of their arrival at the server and makes the same additions and comparisons
as ``loops.advance_lone``, so that every departure is the same to the last bit, ties included.

Exact, and offered, for what that loop knows: any number of delays, then one single server; other lines are refused,
and ``delivery_instants`` takes a kernel for them. No drain, no arrivals from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np

from b2gmodel.closed_form import whole_number
from b2gmodel.errors import UsageError
from b2gmodel.sim.compiled import WIDTH, choose, compiled, gather, load, plus, store
from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.kernel import Kernel, is_lone
from b2gmodel.sim.stations import Draws, Line

SLOTS_A_LANE: Final = 4
"""Lanes pay while the greatest M is at most this many times the number of lanes beyond the first: a step looks at all
flights of a lane, and costs the same however many lanes are in use."""

BLOCK: Final = 1 << 12
"""Launches at a time: what all lanes read and write for them stays in the processor's cache."""


class Lanes:
    """Runs that go on together, block by block, in memory that does not grow.

    Args:
        line: delays, then one single server.
        flights: M of each lane, one to ``WIDTH`` of them.

    Raises:
        UsageError: another line, too many lanes, or flights that are not whole numbers of at least 1.
    """

    def __init__(self, line: Line, flights: Sequence[int]) -> None:
        if not 0 < len(flights) <= WIDTH:
            raise UsageError("not as many lanes", observed=len(flights), allowed=f"1 to {WIDTH}", where="flights")
        self.flights = tuple(whole_number(m, "flights") for m in flights)
        if not is_lone(line, max(self.flights)):
            raise UsageError(
                "lanes know delays before one single server",
                observed=" -> ".join(line.route),
                where="line",
                hint="a Kernel runs any line",
            )
        slots, legs = max(self.flights), line.times.legs
        self._legs = legs
        # Flights in the order of their arrival at the server, and infinity behind the last. A flight that was never
        # launched has always been there and takes no time, so that the first launches are like all others.
        self._due_s = np.full((slots + 1, WIDTH), np.inf)
        for lane, m in enumerate(self.flights):
            self._due_s[:m, lane] = -np.inf
        self._service_s, self._launched_s = np.zeros((slots + 1, WIDTH)), np.zeros((slots + 1, WIDTH))
        self._free_s = np.zeros(WIDTH)

    def advance(self, work: Floats) -> tuple[Floats, Floats]:
        """Launch a flight in every lane for each row of work.

        Args:
            work: shape ``[lanes, n, legs]``, or ``[n, legs]`` for the same in all.

        Returns:
            For each launch the flight that was delivered to make room for it: when that one had been launched and
            when it was delivered, shape ``[n, lanes]`` each. A lane's first M launches find room at time 0.
        """
        lanes, (launches, legs) = len(self.flights), work.shape[-2:]
        if legs != self._legs or work.shape[:-2] not in {(), (lanes,)}:
            allowed = f"[{lanes}, n, {self._legs}] or [n, {self._legs}]"
            raise UsageError("work for other lanes", observed=work.shape, allowed=allowed, where="work")
        if work.ndim == 3 and lanes < WIDTH:
            work = np.concatenate([work, np.zeros((WIDTH - lanes, launches, legs))])
        apart = launches * legs if work.ndim == 3 else 0
        launched_s, delivered_s = np.empty((launches, WIDTH)), np.empty((launches, WIDTH))
        _advance(
            self._due_s.ravel(),
            self._service_s.ravel(),
            self._launched_s.ravel(),
            self._free_s,
            legs,
            np.ascontiguousarray(work, np.float64).ravel(),
            apart,
            launched_s.ravel(),
            delivered_s.ravel(),
        )
        return launched_s[:, :lanes], delivered_s[:, :lanes]


def delivery_instants(
    line: Line, flights: Sequence[int], seed: np.random.SeedSequence, places: Sequence[int]
) -> Floats:
    """When closed cycles, one for each M and all on the same work, have made their deliveries number ``places``.

    A ``Kernel`` for each M and the same seed has them at the same instants, to the last bit.

    Args:
        places: counted from 0.

    Returns:
        Seconds, shape ``[len(places), len(flights)]``.
    """
    instants_s = np.empty((len(places), len(flights)))
    runs = [(group, _runner(line, [flights[run] for run in group], seed)) for group in _groups(line, flights)]
    # A lane's first M launches deliver nobody.
    done = {run: -flights[run] if len(group) > 1 else 0 for group, _ in runs for run in group}
    launches = max(places) + max(flights, default=0) + 1
    draws = Draws(line.times, seed)
    for begin in range(0, launches, BLOCK):
        work = draws.block(min(BLOCK, launches - begin))
        for group, advance in runs:
            for run, delivered_s in zip(group, advance(work), strict=True):
                for row, place in enumerate(places):
                    if done[run] <= place < done[run] + len(delivered_s):
                        instants_s[row, run] = delivered_s[place - done[run]]
                done[run] += len(delivered_s)
    return instants_s


def _groups(line: Line, flights: Sequence[int]) -> list[list[int]]:
    """Which runs go together: neighbours in M, as the greatest among them says what a step costs."""
    order = sorted(range(len(flights)), key=lambda run: flights[run])
    groups: list[list[int]] = []
    for first in range(0, len(order), WIDTH):
        group = order[first : first + WIDTH]
        most = flights[group[-1]]
        together = most <= SLOTS_A_LANE * (len(group) - 1) and is_lone(line, most)
        groups += [group] if together else [[run] for run in group]
    return groups


def _runner(line: Line, flights: Sequence[int], seed: np.random.SeedSequence) -> Callable[[Floats], Iterable[Floats]]:
    """From work to what each run delivered."""
    if len(flights) > 1:
        lanes = Lanes(line, flights)
        return lambda work: lanes.advance(work)[1].T
    kernel = Kernel(line, flights[0], seed)
    return lambda work: [kernel.advance(work).delivered_s]


@compiled
def _advance(
    due_s: Floats,
    service_s: Floats,
    launched_s: Floats,
    free_s: Floats,
    legs: int,
    work: Floats,
    apart: int,
    out_launched: Floats,
    out_delivered: Floats,
) -> None:
    """All arrays are flat, the lanes of one slot next to each other; those of ``work`` are ``apart``."""
    behind, begin = len(due_s) - WIDTH, 0
    free = load(free_s, 0)
    for out in range(0, len(out_delivered), WIDTH):
        first, service, launched = load(due_s, 0), load(service_s, 0), load(launched_s, 0)
        free = plus(choose(first, free, free, first), service)
        store(out_launched, out, launched)
        store(out_delivered, out, free)
        arrival, server = free, begin + legs - 1
        for leg in range(begin, server):
            arrival = plus(arrival, gather(work, leg, apart))
        own, begin = gather(work, server, apart), server + 1
        # All move up one slot, up to the first that comes later: the new flight goes before it.
        for slot in range(0, behind, WIDTH):
            second, its_service, its_launched = (
                load(due_s, slot + WIDTH), load(service_s, slot + WIDTH), load(launched_s, slot + WIDTH),
            )  # fmt: skip
            store(due_s, slot, choose(second, arrival, second, choose(first, arrival, arrival, first)))
            store(service_s, slot, choose(second, arrival, its_service, choose(first, arrival, own, service)))
            store(launched_s, slot, choose(second, arrival, its_launched, choose(first, arrival, free, launched)))
            first, service, launched = second, its_service, its_launched
    store(free_s, 0, free)
