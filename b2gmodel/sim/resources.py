"""The stations of a line as SimPy resources: each is written as plainly as its rule, for the kernel to be held to.

A visit is a generator that ends when the batch leaves; it returns when its service began.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any, Protocol, TypeAlias

import numpy as np
import simpy

from b2gmodel.sim.scenario import BatchedService
from b2gmodel.sim.server_batcher import Execution, ServerBatcher
from b2gmodel.sim.stations import Station
from b2gmodel.units import ns_from_s, s_from_ns

Steps: TypeAlias = Generator[simpy.Event, Any, Any]
Visit: TypeAlias = Generator[simpy.Event, Any, float]


class Resource(Protocol):
    """A station in simulated time. ``busy`` is the work begun so far."""

    busy: float

    def visit(self, work: float, rows: int) -> Visit:
        """Bring work for a batch of ``rows``; returns when its service began."""
        ...


def resource_for(env: simpy.Environment, station: Station) -> Resource:
    if station.rates is not None:
        return _Shared(env, station)
    return _Delay(env) if station.limit is None else _Queue(env, station.limit)


class _Delay:
    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self.busy = 0.0

    def visit(self, work: float, rows: int) -> Visit:
        begun_s: float = self._env.now
        self.busy += work
        yield self._env.timeout(work)
        return begun_s


class _Queue:
    def __init__(self, env: simpy.Environment, servers: int) -> None:
        self._env = env
        self._servers = simpy.Resource(env, capacity=servers)
        self.busy = 0.0

    def visit(self, work: float, rows: int) -> Visit:
        self.busy += work
        with self._servers.request() as turn:
            yield turn
            begun_s: float = self._env.now
            yield self._env.timeout(work)
        return begun_s


class _Job:
    """A batch in service: what is left of its work, and the event that it waits for."""

    def __init__(self, env: simpy.Environment, work: float) -> None:
        self.left = work
        self.begun_s = 0.0
        self.done = env.event()


class _Shared:
    """All in service progress at an even share of the speed that belongs to their number."""

    def __init__(self, env: simpy.Environment, station: Station) -> None:
        assert station.rates is not None
        self._env, self._limit, self._rates = env, station.limit, station.rates
        self._jobs: list[_Job] = []
        self._waiting: deque[_Job] = deque()
        self._clock_s = 0.0
        self._alarm = 0
        self.busy = 0.0

    def visit(self, work: float, rows: int) -> Visit:
        self.busy += work
        job = _Job(self._env, work)
        self._pass_time()
        self._waiting.append(job)
        self._admit()
        yield job.done
        return job.begun_s

    def _speed(self) -> float:
        return self._rates[min(len(self._jobs), len(self._rates)) - 1] / len(self._jobs)

    def _pass_time(self) -> None:
        if self._jobs:
            each = (self._env.now - self._clock_s) * self._speed()
            for job in self._jobs:
                job.left -= each
        self._clock_s = self._env.now

    def _admit(self) -> None:
        while self._waiting and (self._limit is None or len(self._jobs) < self._limit):
            job = self._waiting.popleft()
            job.begun_s = self._env.now
            self._jobs.append(job)
        self._alarm += 1
        if self._jobs:
            left = max(0.0, min(job.left for job in self._jobs))
            self._env.timeout(left / self._speed(), self._alarm).callbacks.append(self._ring)

    def _ring(self, event: simpy.Event) -> None:
        if event.value != self._alarm:
            return
        self._pass_time()
        # By rounding, what is left is seldom zero to the last bit: the first one is done by definition.
        job = min(self._jobs, key=lambda each: each.left)
        self._jobs.remove(job)
        job.done.succeed()
        self._admit()


class BatchedServer:
    """The server's dynamic batcher and its instances, driven by simulated time."""

    def __init__(self, env: simpy.Environment, service: BatchedService, rng: np.random.Generator) -> None:
        self._env, self._service, self._rng = env, service, rng
        self._batcher: ServerBatcher[_Job] = ServerBatcher(service.batching, service.instances)
        self._now_ns = 0
        self.busy = 0.0
        self.sizes: dict[int, int] = {}

    def visit(self, work: float, rows: int) -> Visit:
        job = _Job(self._env, work)
        self._act(self._batcher.arrive(job, rows, self._tell_ns()))
        yield job.done
        return job.begun_s

    def _tell_ns(self) -> int:
        self._now_ns = max(self._now_ns, ns_from_s(self._env.now))
        return self._now_ns

    def _act(self, executions: list[Execution[_Job]]) -> None:
        for execution in executions:
            self._env.process(self._execute(execution))
        wake_ns = self._batcher.next_wake_ns
        if wake_ns is not None:
            delay_s = max(0.0, s_from_ns(wake_ns) - self._env.now)
            self._env.timeout(delay_s, wake_ns).callbacks.append(self._ring)

    def _ring(self, event: simpy.Event) -> None:
        wake_ns = self._batcher.next_wake_ns
        if wake_ns is not None and event.value == wake_ns:
            self._now_ns = max(self._now_ns, wake_ns)
            self._act(self._batcher.tick(self._tell_ns()))

    def _execute(self, execution: Execution[_Job]) -> Steps:
        for job in execution.requests:
            job.begun_s = self._env.now
        self.sizes[execution.size] = self.sizes.get(execution.size, 0) + 1
        service_s = self._service.mean_s(execution.size) * float(self._service.shape.sample(self._rng, 1)[0])
        self.busy += service_s
        yield self._env.timeout(service_s)
        for job in execution.requests:
            job.done.succeed()
        self._act(self._batcher.instance_free(self._tell_ns()))
