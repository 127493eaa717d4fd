"""A closed network whose server merges requests: X(N) under the server's own dynamic batching, without simulation.

N requests go round between a transport station, a ladder of rates as in ``network.py``, and a server of g equal
instances that merges them (``bulk_server.py``); an execution of b rows takes S(b).

The model is a Markov chain (``bulk_chain.py``). Transport is exponential. Service and queue delay are sums of r equal
exponential stages, whose squared cv is 1 / r. Means are nearly linear in it: they are taken at two numbers of stages
and the line is followed to the cv asked for, 0 for the queue delay. So a mean may pass a bound by a trace. One thing
else is not exact: the timer starts anew for those that a batch leaves behind, though they have waited for a while.

How far X is from simulation, with S(1) = 2 ms to S(8) = 6 ms, batches up to 8, transport of 5 and 20 ms, 4 to 32
requests (in brackets: two instances, with their fewer stages):

    exponential service, no delay                    nothing seen beyond the runs' 0.1 to 0.2 % (the same)
    constant service, no delay                       0.3 % (0.6 %)
    exponential service, constant delay of 2, 6 ms   0.3, 0.6 % (0.8, 1.3 %)
    both constant                                    1.4, 2.2 % (2.4, 4.3 %)
    the third with an exponential timer instead      5, 12 % (8, 11 %)

Transport that is nearly constant falls into step with constant service: with a cv of 0.3 X was up to 3 % off (2 to 16
requests, one instance), with none at all -7 to +16 %. There, use the simulation.

All N and all draws share a pass: on one core X(1..64) takes some 20 ms for exponential service and 0.3 s for other, and
2,000 draws of X(1..8) take 0.1 s and 3 s.

Sources: Bailey (1954), On queueing processes with bulk service, J. R. Stat. Soc. B 16(1); Neuts (1967), A general
class of bulk queues with Poisson input, Ann. Math. Stat. 38(3); Chaudhry and Templeton (1983), A First Course in
Bulk Queues; Inoue (2021), Queueing analysis of GPU-based inference servers with dynamic batching, Performance
Evaluation 147 (open arrivals, no limit to a batch).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from b2gmodel.bulk_chain import Chain, solved
from b2gmodel.bulk_server import BulkServer, Floats, ladder_times, positive
from b2gmodel.closed_form import whole_number
from b2gmodel.errors import UsageError


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
            ``bulk_chain.MOST_STATES`` states to a level.
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
    rates = positive(_draws(transport_per_s, "transport rates"), "transport rates")
    sizes = [size for size, _ in server.ladder_s]
    ladders = _draws([time_s for _, time_s in server.ladder_s] if times_s is None else times_s, "S(k)")
    served_s = positive(ladder_times(sizes, ladders, rows * np.arange(1, server.max_batch // rows + 1)), "S(k)")
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
        chain = Chain(server, rows, each, timer, int(jobs.max()))
        one, waiting, busy, executions, requests = np.moveaxis(solved(chain, speeds, rates, jobs), -1, 0)
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


def _draws(values: ArrayLike, where: str) -> Floats:
    """Floats of shape ``[draws, n]``; without a draws axis there is one draw."""
    array = np.atleast_2d(np.asarray(values, dtype=np.float64))
    if array.ndim != 2 or not array.size:
        raise UsageError("not a ladder", observed=array.shape, allowed="n or draws x n, at least one", where=where)
    return array
