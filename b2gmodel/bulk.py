"""A closed network whose server merges requests: X(N) under the server's own dynamic batching, without simulation.

N requests go round between a transport station, a ladder of rates as in ``network.py``, and a server of g equal
instances. A batch is formed only when an instance is free: the largest preferred size that the queue can form, at
once; else all that fit, once they fill the greatest batch or the oldest has waited the queue delay. This is the
rule of ``sim/server_batcher.py``, and an execution of b rows takes S(b).

The model is a Markov chain over the requests waiting, the oldest one's timer, and size and stage of each execution.
Transport is exponential. Service and queue delay are sums of r equal exponential stages, whose squared cv is 1 / r.
Means are nearly linear in it: they are taken at two numbers of stages and the line is followed to the cv asked for,
0 for the queue delay. So a mean may pass a bound by a trace. One thing else is not exact: the timer starts anew for
those that a batch leaves behind, though they have waited for a while.

How far X is from simulation, with S(1) = 2 ms to S(8) = 6 ms, batches up to 8, transport of 5 and 20 ms, 4 to 32
requests (in brackets: two instances, with their fewer stages):

    exponential service, no delay                    nothing seen beyond the runs' 0.1 to 0.2 % (the same)
    constant service, no delay                       0.3 % (0.6 %)
    exponential service, constant delay of 2, 6 ms   0.3, 0.6 % (0.8, 1.3 %)
    both constant                                    1.4, 2.2 % (2.4, 4.3 %)
    the third with an exponential timer instead      5, 12 % (8, 11 %)

Transport that is nearly constant falls into step with constant service: with a cv of 0.3 X was up to 3 % off (2 to 16
requests, one instance), with none at all -7 to +16 %. There, use the simulation.

An arrival raises the requests at the server by one, so that the chain is solved exactly, level by level, from all N
at the server down (linear level reduction). All N and all draws share a pass: on one core X(1..64) takes some 20 ms
for exponential service and 0.3 s for other, and 2,000 draws of X(1..8) take 0.1 s and 3 s. Time grows with N and
with the cube of the states of a level.

Sources: Bailey (1954), On queueing processes with bulk service, J. R. Stat. Soc. B 16(1); Neuts (1967), A general
class of bulk queues with Poisson input, Ann. Math. Stat. 38(3); Chaudhry and Templeton (1983), A First Course in
Bulk Queues; Inoue (2021), Queueing analysis of GPU-based inference servers with dynamic batching, Performance
Evaluation 147 (open arrivals, no limit to a batch); Gaver, Jacobs and Latouche (1984), Finite birth-and-death models
in randomly changing environments, Adv. Appl. Probab. 16(4), for the reduction; Triton Inference Server, model
configuration, "Dynamic Batcher".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from b2gmodel.closed_form import whole_number
from b2gmodel.errors import UsageError

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.intp]

MOST_STATES: Final = 600
"""With one number of requests at the server: beyond, each N takes longer than its simulation."""
_SMALL: Final = 12
_CHUNK_FLOATS: Final = 1 << 22
"""Numbers held at a time for one level."""


def ladder_times(rows: Sequence[int], times_s: ArrayLike, wanted: ArrayLike) -> Floats:
    """S(b) from a ladder: on the straight line between two entries, beyond the ends on that through the last two.

    Args:
        rows: the ladder's sizes, increasing, shape ``[m]``. With one entry S is the same for every size.
        times_s: S of each, seconds, shape ``[..., m]``.
        wanted: sizes b, shape ``[w]``.

    Returns:
        seconds, shape ``[..., w]``; not checked for being positive.

    Raises:
        UsageError: no ladder, sizes that do not increase, or as many times as there are not sizes.
    """
    sizes, times, at = np.asarray(rows), np.asarray(times_s, dtype=np.float64), np.asarray(wanted)
    if sizes.ndim != 1 or not sizes.size or np.any(np.diff(sizes) <= 0):
        raise UsageError("not a ladder of S(k)", observed=list(rows), allowed="increasing sizes", where="S(k)")
    if times.ndim < 1 or times.shape[-1] != len(sizes):
        raise UsageError("sizes and times differ in number", observed=times.shape, allowed=f"... x {len(sizes)}")
    if len(sizes) == 1:
        return np.repeat(times, len(at), axis=-1)
    right = np.clip(np.searchsorted(sizes, at), 1, len(sizes) - 1)
    share = (at - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return np.asarray(times[..., right - 1] + share * (times[..., right] - times[..., right - 1]))


@dataclass(frozen=True, slots=True)
class BulkServer:
    """A server that merges requests, and how long it takes for what it merges.

    Attributes:
        ladder_s: (rows, S) with increasing rows, see ``ladder_times``; seconds.
        max_batch: most rows to an execution.
        preferred: sizes, in rows, that go at once.
        queue_delay_s: how long the oldest may wait for a better batch.
        instances: g.

    Raises:
        UsageError: a value outside its domain, or an S(b) that is not positive for some b up to ``max_batch``.
    """

    ladder_s: tuple[tuple[int, float], ...]
    max_batch: int
    preferred: tuple[int, ...] = ()
    queue_delay_s: float = 0.0
    instances: int = 1

    def __post_init__(self) -> None:
        whole_number(self.max_batch, "max batch")
        whole_number(self.instances, "instances")
        if any(not 1 <= size <= self.max_batch for size in self.preferred):
            raise UsageError(
                "not a preferred size", observed=self.preferred, allowed=f"1 to {self.max_batch}", where="preferred"
            )
        if not 0 <= self.queue_delay_s < np.inf:
            raise UsageError("not a delay", observed=self.queue_delay_s, allowed=">= 0, finite", where="queue delay")
        rows, times_s = [size for size, _ in self.ladder_s], [time_s for _, time_s in self.ladder_s]
        _positive(ladder_times(rows, times_s, range(1, self.max_batch + 1)), "S(k)")

    def formed(self, waiting: int, rows: int, *, delay_over: bool) -> int:
        """How many of ``waiting`` requests of ``rows`` rows a free instance takes now; 0 for none.

        Args:
            delay_over: whether the oldest has waited the queue delay.
        """
        count = min(waiting, self.max_batch // rows)
        preferred = max(
            (size // rows for size in self.preferred if size % rows == 0 and size <= count * rows), default=0
        )
        full = waiting > count or count * rows == self.max_batch
        return preferred or (count if full or delay_over else 0)


@dataclass(frozen=True, slots=True, eq=False)
class BulkCurve:
    """Long-run means of the network; all arrays have the shape ``[draws, populations]``.

    Attributes:
        populations: the N of each column.
        throughput_per_s: X(N), requests per second.
        mean_rows: of an execution.
        waiting: mean number of requests at the server and not in service.
        utilisation: mean share of busy instances.
    """

    populations: tuple[int, ...]
    throughput_per_s: Floats
    mean_rows: Floats
    waiting: Floats
    utilisation: Floats


def bulk_throughput(
    server: BulkServer,
    transport_per_s: ArrayLike,
    populations: Sequence[int],
    *,
    rows: int = 1,
    service_cv: float = 1.0,
    stages: int | None = None,
    timer_stages: int | None = None,
    times_s: ArrayLike | None = None,
) -> BulkCurve:
    """X(N) and what goes with it, for each N and each draw.

    Args:
        server: how it merges, and S(b).
        transport_per_s: mu(1), ..., mu(c), requests per second, constant beyond c; shape ``[c]`` or ``[draws, c]``.
            A delay of D is ``n / D`` up to the greatest N.
        populations: each N, at least 1, in any order.
        rows: of each request, 1 or the k of a proxy in front.
        service_cv: standard deviation of an execution's time over its mean S(b), 0 to 1.
        stages: most stages of a service; None for 8 with one instance and 2 with more. With 1 every service is
            exponential.
        timer_stages: most stages of the queue delay; None for 8 with one instance and 4 with more. With 1 it is
            exponential.
        times_s: S of the server's ladder in its place, shape ``[draws, sizes]``, where draws differ in it.

    Raises:
        UsageError: a value outside its domain, draws that differ in number, or a chain of more than
            ``MOST_STATES`` states to a level.
    """
    jobs = np.array([whole_number(population, "population") for population in populations], dtype=np.intp)
    if not jobs.size:
        raise UsageError("no population", observed=0, allowed="at least one", where="populations")
    if whole_number(rows, "rows") > server.max_batch:
        raise UsageError(
            "the server refuses a batch beyond its limit",
            observed=rows,
            allowed=f"1 to {server.max_batch}",
            where="rows",
        )
    if not 0 <= service_cv <= 1:
        raise UsageError(
            "not a spread of Erlang stages",
            observed=service_cv,
            allowed="0 to 1",
            where="service cv",
            hint="for more spread than exponential use the simulation",
        )
    rates = _positive(_draws(transport_per_s, "transport rates"), "transport rates")
    sizes = [size for size, _ in server.ladder_s]
    ladders = _draws([time_s for _, time_s in server.ladder_s] if times_s is None else times_s, "S(k)")
    served_s = _positive(ladder_times(sizes, ladders, rows * np.arange(1, server.max_batch // rows + 1)), "S(k)")
    draws = max(len(rates), len(served_s))
    if {len(rates), len(served_s)} - {1, draws}:
        raise UsageError("draws differ in number", observed=(len(rates), len(served_s)), allowed=f"1 or {draws}")
    rates = np.broadcast_to(rates, (draws, rates.shape[1]))
    own = (8, 8) if server.instances == 1 else (2, 4)
    services = _mixture(service_cv**2, whole_number(own[0] if stages is None else stages, "stages"))
    timers = _mixture(0.0, whole_number(own[1] if timer_stages is None else timer_stages, "timer stages"))
    if not server.queue_delay_s:
        timers = {0: 1.0}
    means = np.zeros((4, draws, len(jobs)))
    for (each, timer), weight in _joined(services, timers).items():
        speeds = np.zeros((draws, served_s.shape[1] + 1))
        speeds[:, 0] = timer / server.queue_delay_s if timer else 0.0
        speeds[:, 1:] = each / served_s
        chain = _Chain(server, rows, each, timer, int(jobs.max()))
        one, waiting, busy, executions, requests = np.moveaxis(_solved(chain, speeds, rates, jobs), -1, 0)
        utilisation = busy / one / server.instances
        means += weight * np.array([requests / one, rows * requests / executions, waiting / one, utilisation])
    return BulkCurve(tuple(jobs.tolist()), *means)


def _mixture(variance: float, most: int) -> dict[int, float]:
    """Numbers of stages and their weights, whose 1 / r average to the squared cv; the largest is at most ``most``."""
    high = most if variance * most <= 1 else math.ceil(1 / variance)
    low = high // 2 if variance * high < 1 else high - 1
    if not low:
        return {high: 1.0}
    weight = (1 / low - variance) / (1 / low - 1 / high)
    return {high: weight} | ({low: 1.0 - weight} if weight != 1 else {})


def _joined(services: dict[int, float], timers: dict[int, float]) -> dict[tuple[int, int], float]:
    """Weights of both together, where each moves the means by itself: none has the most stages of both."""
    few, short = min(services), min(timers)
    weights = {(each, short): weight for each, weight in services.items()}
    weights[few, short] -= 1.0
    for each, weight in timers.items():
        weights[few, each] = weights.get((few, each), 0.0) + weight
    return {stages: weight for stages, weight in weights.items() if weight}


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


class _Chain:
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


def _solved(chain: _Chain, speeds: Floats, arrivals: Floats, jobs: Ints) -> Floats:
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


def _descended(chain: _Chain, speeds: Floats, arrivals: Floats, jobs: Ints) -> Floats:
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


def _draws(values: ArrayLike, where: str) -> Floats:
    """Floats of shape ``[draws, n]``; without a draws axis there is one draw."""
    array = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if array.ndim != 2 or not array.size:
        raise UsageError("not a ladder", observed=array.shape, allowed="n or draws x n, at least one", where=where)
    return array


def _positive(values: Floats, where: str) -> Floats:
    bad = values[~((values > 0) & (values < np.inf))]
    if bad.size:
        raise UsageError("must be positive", observed=float(bad[0]), allowed="positive and finite", where=where)
    return values
