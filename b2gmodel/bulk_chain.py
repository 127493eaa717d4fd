"""The Markov chain of a closed network whose server merges requests, and its stationary sums.

Its states are the requests waiting, the oldest one's timer, and size and stage of each execution. It rises by one
request at a time, so that it is solved exactly from the top level (all N at the server) down, a block a level: the
linear level reduction of finite chains. Time grows with N and with the cube of the states of a level (``MOST_STATES``
at most); many N and many draws share one pass.

Source: Gaver, Jacobs and Latouche (1984), Finite birth-and-death models in randomly changing environments, Adv. Appl.
Probab. 16(4).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from b2gmodel.bulk_server import BulkServer, Floats
from b2gmodel.errors import UsageError

Ints: TypeAlias = NDArray[np.intp]

MOST_STATES: Final = 600
"""With one number of requests at the server: beyond, each N takes longer than its simulation."""
_SMALL: Final = 12
_CHUNK_FLOATS: Final = 1 << 22
"""Numbers held at a time for one level."""

_Execution: TypeAlias = tuple[int, int]
"""Its requests, and the stage that it is in."""


class _State(NamedTuple):
    """``timer`` counts the stages that the oldest has waited; it is at its end where time no longer matters."""

    waiting: int
    timer: int
    running: tuple[_Execution, ...]

    @property
    def level(self) -> int:
        return self.waiting + sum(size for size, _ in self.running)


class _Edges(NamedTuple):
    """Transitions by columns: from, to, kind of speed (0 for the timer, else requests of the execution that goes on),
    and how many executions share it."""

    source: Ints
    target: Ints
    kind: Ints
    weight: Ints

    def rates(self, speeds: Floats) -> Floats:
        """Of each transition, per second, shape ``[draws, transitions]``."""
        return speeds[:, self.kind] * self.weight


class _Level(NamedTuple):
    """All states with so many requests at the server.

    Attributes:
        up: the state of the next level that an arrival leads to; empty at the top.
        moves: within the level.
        ends: of executions, to entries; entries are numbered through all levels, from the top one down.
        entries: the states that ends lead to, from higher levels.
        first: the number of the first of them.
        means: columns of 1, waiting and busy, shape ``[states, 3]``.
    """

    up: Ints
    moves: _Edges
    ends: _Edges
    entries: Ints
    first: int
    means: Floats


class Chain:
    """The states and transitions up to a level; those of fewer requests are the lower levels of those of more."""

    def __init__(self, server: BulkServer, rows: int, stages: int, timed: int, top: int) -> None:
        self._server, self._rows, self._stages, self._timed = server, rows, stages, timed
        empty = _State(0, timed, ())
        found: list[dict[_State, int]] = [{} for _ in range(top + 1)]
        entries: list[dict[int, int]] = [{} for _ in range(top + 1)]
        up: list[list[int]] = [[] for _ in range(top + 1)]
        moves: list[list[tuple[int, ...]]] = [[] for _ in range(top + 1)]
        ends: list[list[tuple[int, ...]]] = [[] for _ in range(top + 1)]
        found[0][empty] = 0
        order = [empty]

        def number(state: _State) -> int:
            known = found[state.level]
            if state not in known:
                if len(known) == MOST_STATES:
                    raise UsageError(
                        f"too many states with {state.level} requests at the server",
                        observed=len(known) + 1,
                        allowed=f"<= {MOST_STATES}",
                        where="instances, max batch and stages",
                        hint="take fewer stages, or use the simulation",
                    )
                known[state] = len(known)
                order.append(state)
            return known[state]

        for state in order:
            level = state.level
            source = found[level][state]
            if level < top:
                up[level].append(number(self._after_arrival(state)))
            for kind, weight, after in self._steps(state):
                target = number(after)
                if after.level == level:
                    moves[level].append((source, target, kind, weight))
                else:
                    entry = entries[after.level].setdefault(target, len(entries[after.level]))
                    ends[level].append((source, entry, kind, weight))
        first = np.cumsum([0, *(len(each) for each in reversed(entries))])[top::-1]
        self.most = max(kind for edges in ends for _, _, kind, _ in edges)
        self.levels = []
        for n in range(top + 1):
            within, out = (np.array(edges[n], dtype=np.intp).reshape(-1, 4).T for edges in (moves, ends))
            out[1] += first[n - out[2]]
            means = [(1, state.waiting, len(state.running)) for state in found[n]]
            self.levels.append(
                _Level(
                    np.array(up[n], dtype=np.intp),
                    _Edges(*within),
                    _Edges(*out),
                    np.array(list(entries[n]), dtype=np.intp),
                    int(first[n]),
                    np.array(means, dtype=np.float64),
                )
            )

    def _after_arrival(self, state: _State) -> _State:
        timer = state.timer if state.waiting else 0
        return self._settled(state.waiting + 1, timer, state.running)

    def _steps(self, state: _State) -> Iterator[tuple[int, int, _State]]:
        """Kind of speed, weight and next state of each transition but an arrival."""
        waiting, timer, running = state
        if timer < self._timed:
            yield 0, 1, self._settled(waiting, timer + 1, running)
        for each in sorted(set(running)):
            others = list(running)
            others.remove(each)
            size, stage = each
            if stage + 1 < self._stages:
                after = self._settled(waiting, timer, (*others, (size, stage + 1)))
            else:
                after = self._settled(waiting, timer, tuple(others))
            yield size, running.count(each), after

    def _settled(self, waiting: int, timer: int, running: tuple[_Execution, ...]) -> _State:
        """The state once all has started that can."""
        started = list(running)
        while len(started) < self._server.instances and (
            count := self._server.formed(waiting, self._rows, delay_over=timer == self._timed)
        ):
            started.append((count, 0))
            waiting, timer = waiting - count, 0
        if not waiting or self._server.formed(waiting, self._rows, delay_over=False):
            timer = self._timed
        return _State(waiting, timer, tuple(sorted(started)))


def solved(chain: Chain, speeds: Floats, arrivals: Floats, jobs: Ints) -> Floats:
    """Long-run sums of 1, waiting, busy, executions and requests a second, up to a factor that they share.

    Args:
        speeds: of each kind, shape ``[draws, kinds]``.
        arrivals: the transport's ladder, shape ``[draws, c]``.
        jobs: each N, shape ``[populations]``.

    Returns:
        shape ``[draws, populations, 5]``.
    """
    draw, column = (each.ravel() for each in np.indices((len(speeds), len(jobs))))
    order = np.argsort(-jobs[column], kind="stable")
    states = max(len(level.means) for level in chain.levels)
    entries = max(len(level.entries) for level in chain.levels)
    chunks = min(len(order), -(-len(order) * states * (states + entries * chain.most) // _CHUNK_FLOATS))
    sums = np.empty((len(speeds), len(jobs), 5))
    for some in np.array_split(order, chunks):
        sums[draw[some], column[some]] = _descended(chain, speeds[draw[some]], arrivals[draw[some]], jobs[column[some]])
    return sums


def _descended(chain: Chain, speeds: Floats, arrivals: Floats, jobs: Ints) -> Floats:
    """The same for one chain a row, N not increasing; shape ``[chains, 5]``.

    With pi(n) the probabilities of level n, pi(n + 1) = pi(n) R(n). R(n) is the rate of arrivals times the rows
    ``up`` of the inverse of T(n + 1); T(n) holds what leaves each state of level n, less what comes back to it
    within the level or from those above. So a sum over level n and those above is pi(n) times a column that follows
    from that of level n + 1. And so is what comes back: ``landing`` has a column for each entry of the lower levels,
    and those of level n itself go into T(n). As only ratios of sums are used, they may be scaled on the way.
    """
    scale = np.ones((len(jobs), 1))
    sums, landing = np.zeros((0, 0, 5)), np.zeros((0, 0, 0))
    for n in range(jobs[0], -1, -1):
        level, lowest = chain.levels[n], chain.levels[max(0, n - chain.most)]
        reach, states = np.count_nonzero(jobs >= n), len(level.means)
        speed, at_transport, one_hot = speeds[:reach], jobs[:reach] - n, np.eye(states)
        rung = np.minimum(at_transport, arrivals.shape[1]) - 1
        arriving = np.where(at_transport > 0, arrivals[np.arange(reach), rung], 0.0)

        above = len(sums), sums, landing
        sums = np.zeros((reach, states, 5))
        landing = np.zeros((reach, states, lowest.first + len(lowest.entries) - level.first))
        if above[0]:
            rate = arriving[: above[0], None, None]
            sums[: above[0]] = rate * above[1][:, level.up]
            landing[: above[0], :, : above[2].shape[2]] = rate * above[2][:, level.up]

        moving, ending = level.moves.rates(speed), level.ends.rates(speed)
        executions = ending @ one_hot[level.ends.source]
        t = (arriving[:, None] + moving @ one_hot[level.moves.source] + executions)[:, :, None] * one_hot
        t[:, level.moves.source, level.moves.target] -= moving
        t[:, :, level.entries] -= landing[:, :, : len(level.entries)]
        landing[:, level.ends.source, level.ends.target - level.first] += ending

        sums[:, :, :3] += scale[:reach, :, None] * level.means
        sums[:, :, 3] += scale[:reach] * executions
        sums[:, :, 4] += scale[:reach] * ((level.ends.kind * ending) @ one_hot[level.ends.source])
        if n:
            unit = sums[:, :, 0].max(axis=1, keepdims=True)
            scale[:reach] /= unit
            inverse = _inverse(t)
            sums, landing = inverse @ (sums / unit[:, :, None]), inverse @ landing[:, :, len(level.entries) :]
    return sums[:, 0]


def _inverse(t: Floats) -> Floats:
    """The inverse of each matrix, shape ``[chains, n, n]``, with no pivots: in an M-matrix the diagonal will do.

    By halves down to small ones, and those row by row of all chains at once: LAPACK's calls cost more than the work.
    """
    n = t.shape[1]
    if n <= _SMALL:
        t = t.copy()
        for k in range(n):
            column, row = t[:, :, k].copy(), t[:, k] / t[:, k, k, None]
            column[:, k], row[:, k] = 0.0, 1.0 / t[:, k, k]
            t[:, :, k] = 0.0
            t -= column[:, :, None] * row[:, None]
            t[:, k] = row
        return t
    half = n // 2
    first, whole = _inverse(t[:, :half, :half]), np.empty_like(t)
    right, down = first @ t[:, :half, half:], t[:, half:, :half] @ first
    last = _inverse(t[:, half:, half:] - t[:, half:, :half] @ right)
    whole[:, half:, half:], whole[:, half:, :half] = last, -last @ down
    whole[:, :half, half:] = -right @ last
    whole[:, :half, :half] = first - right @ whole[:, half:, :half]
    return whole
