"""Latency for advice: callers who fill all flights, or Poisson requests that batches are formed of.

Rules here: the batching policy's own rule, with M flights and a queue without limit. A batch of up to k leaves when a
flight is free and either k requests wait or the oldest has waited the formation deadline; it is as large as it can be
at that instant. So who is in the next batch depends on the instant at which the next flight is free, and on nothing
else: the kernel is run to that instant, one launch after the other, and is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from b2gmodel.advice_surface import Latency
from b2gmodel.laws import Laws
from b2gmodel.sim.compiled import compiled
from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.kernel import Kernel
from b2gmodel.sim.loops import advance_any
from b2gmodel.sim.simulation import Simulation
from b2gmodel.sim.state import Plant, State, empty_state, plant_of
from b2gmodel.sim.stations import Draws, Line

P99 = 0.99


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedLatency(Simulation):
    """What ``advise`` calls: the ``simulation`` predictor, and latency with the same stations and times.

    Attributes:
        batches: simulated in a closed cycle; a tenth more come before them.
        requests: simulated at a rate; a tenth more come before them.
    """

    batches: int = 10_000
    requests: int = 30_000

    def latency(
        self,
        laws: Laws,
        row: int,
        flights: int,
        seed: int,
        *,
        rate_per_s: float | None = None,
        wait_s: float | None = None,
    ) -> Latency:
        """Mean and P99 of a request's time to its answer, seconds; see ``advice_surface.LatencySimulator``."""
        line, start = self._line(laws if flights > 1 else _alone(laws), row), np.random.SeedSequence(seed)
        if rate_per_s is None:
            cycles = self.batches + self.batches // 10
            blocks = [block.cycle_s for block in Kernel(line, flights, start).blocks(cycles)]
            counted = np.concatenate(blocks)[self.batches // 10 :]
        else:
            rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
            arrivals_s = np.cumsum(rng.exponential(1 / rate_per_s, self.requests + self.requests // 10))
            responses_s = formed_responses_s(line, laws.batch, flights, arrivals_s, wait_s, start)
            counted = responses_s[self.requests // 10 :]
        return Latency(float(counted.mean()), float(np.quantile(counted, P99)))


def _alone(laws: Laws) -> Laws:
    """With one batch in flight nothing is under load."""
    return replace(laws, busy_service_s=np.broadcast_to(laws.service_s[:, np.newaxis], laws.busy_service_s.shape))


def formed_responses_s(
    line: Line,
    k: int,
    flights: int,
    arrivals_s: Floats,
    wait_s: float | None,
    seed: np.random.SeedSequence,
) -> Floats:
    """Arrival to answer of each request, in order of arrival; without a deadline the last few fill no batch.

    Args:
        line: a batch's cycle, of whatever size.
        k, flights: most requests to a batch, and M.
        arrivals_s: seconds from the start, not decreasing, shape ``[n]``.
        wait_s: the formation deadline, at least 0; None waits for k.
        seed: of the work; equal flight numbers get equal work.

    Returns:
        shape ``[answered]``.
    """
    most = len(arrivals_s) // k if wait_s is None else len(arrivals_s)
    work = Draws(line.times, seed).block(max(most, 1))
    state = empty_state(len(line.stations), line.times.legs, flights)
    responses_s = np.empty(len(arrivals_s))
    patience_s = np.inf if wait_s is None else wait_s
    answered = _form(plant_of(line, flights), state, work, arrivals_s, k, patience_s, responses_s)
    return responses_s[:answered]


@compiled
def _form(
    plant: Plant, state: State, work: Floats, arrivals_s: Floats, k: int, patience_s: float, responses_s: Floats
) -> int:
    """Fills ``responses_s``; how many are answered."""
    room, requests = len(state.leg) + 1, len(arrivals_s)
    number, ready_s = np.empty(room, np.int64), np.empty(1)
    full_s, launched_s, delivered_s = np.empty(room), np.empty(room), np.empty(room)
    first = np.zeros(len(work) + 1, np.int64)
    begin, batch, drains = 0, 0, False
    while not drains:
        drains = begin == requests or (patience_s == np.inf and begin + k > requests)
        end = begin
        if not drains:
            due_s = arrivals_s[begin] + patience_s
            if begin + k <= requests:
                due_s = min(due_s, arrivals_s[begin + k - 1])
            # The flight that has been idle longest takes the batch; after each call at least one is idle.
            due_s = max(due_s, state.at_s[state.idle[0]])
            while end < requests and end - begin < k and arrivals_s[end] <= due_s:
                end += 1
            ready_s[0] = due_s
            first[batch + 1] = end
        launches = 0 if drains else 1
        count = advance_any(
            plant,
            state,
            work[batch : batch + launches],
            ready_s[:launches],
            drains,
            number,
            full_s,
            launched_s,
            delivered_s,
        )
        for place in range(count):
            its = number[place]
            for request in range(first[its], first[its + 1]):
                responses_s[request] = delivered_s[place] - arrivals_s[request]
        begin = end
        batch += launches
    return begin
