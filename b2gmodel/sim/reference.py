"""The reference engine: SimPy around the very batching policy that serves live.

It models everything that the scenario can say and is written for plainness; ``kernel.py`` is fast and held to it.
Simulated time is float seconds; the policy and the records see it rounded to whole nanoseconds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import simpy

from b2gmodel.batcher import Action, Answer, Batcher, Counts, Drop, Expire, Fail, Launch, Refuse
from b2gmodel.closed_form import whole_number
from b2gmodel.flights import Cycle, ExchangeTimes, Flight
from b2gmodel.sim.distributions import Floats
from b2gmodel.sim.resources import BatchedServer, Resource, Steps, resource_for
from b2gmodel.sim.scenario import Clients, Closed, Poisson, Scenario
from b2gmodel.sim.stations import Draws
from b2gmodel.units import ns_from_s, s_from_ns

_FEW: Final = 256
"""Numbers drawn at a time; the series do not depend on it."""


@dataclass(frozen=True, slots=True)
class Stay:
    """One flight at one station, seconds from the start; what lies before ``begun_s`` was waiting."""

    flight_id: int
    station: str
    arrived_s: float
    begun_s: float
    ended_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a stretch of a run did, and how the run stands at its end.

    Attributes:
        flights: a record for each flight of the stretch, in order of delivery.
        cycles: the same with what the server booked; empty where the line has no service station.
        departures_s: shape ``[flights, 3]``: flight number, launch and delivery, unrounded, in order of delivery.
        requests_s: shape ``[answered, 2]``: arrival and answer of each answered request, in order of answers.
        stays: who was where, in order of departure; empty unless asked for.
        counts: what became of the requests, since the run began.
        elapsed_s: since the run began.
        busy_work: the work begun at each station of the line since the run began, shape ``[stations]``.
        residence_s: the time spent there by all batches together, waiting or in service, shape ``[stations]``.
        executions: how often the server formed a batch of each size; None without server batching.
    """

    flights: tuple[Flight, ...]
    cycles: tuple[Cycle, ...]
    departures_s: Floats
    requests_s: Floats
    stays: tuple[Stay, ...]
    counts: Counts
    elapsed_s: float
    busy_work: Floats
    residence_s: Floats
    executions: dict[int, int] | None

    @property
    def throughput_per_s(self) -> float:
        """Answered requests a second since the run began."""
        return self.counts.answered / self.elapsed_s

    @property
    def response_s(self) -> Floats:
        """Arrival to answer, for each answered request in order of answers."""
        return np.asarray(self.requests_s[:, 1] - self.requests_s[:, 0])


def simulate(scenario: Scenario, seed: np.random.SeedSequence, *, flights: int, trace: bool = False) -> Outcome:
    """Run until that many flights are delivered, or recorded arrivals are over and nothing is left to do.

    Args:
        scenario: what to run.
        seed: equal seeds give equal arrivals, and equal work to equal flight numbers.
        flights: at least 1.
        trace: whether to keep each stay.
    """
    return Run(scenario, seed, trace=trace).advance(flights)


def _stream(seed: np.random.SeedSequence, number: int) -> np.random.Generator:
    """A stream beside those of the work (which hold 0)."""
    return np.random.default_rng(np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, number)))


@dataclass(slots=True)
class _Log:
    flights: list[Flight] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    departures_s: list[tuple[float, float, float]] = field(default_factory=list)
    requests_s: list[tuple[float, float]] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)


class Run:
    """A run that goes on stretch by stretch, the same whatever the stretches are. Arguments as of ``simulate``."""

    def __init__(self, scenario: Scenario, seed: np.random.SeedSequence, *, trace: bool = False) -> None:
        self._scenario, self._trace = scenario, trace
        self._wanted = 0
        self._env = simpy.Environment()
        self._over = self._env.event()
        self._batcher: Batcher[int] = Batcher(scenario.policy)
        self._arrived_s: dict[int, float] = {}
        self._ends: dict[int, simpy.Event] = {}
        self._numbers = itertools.count()
        self._now_ns = 0
        self._drained = False
        self._log = _Log()
        self._work = self._rows(Draws(scenario.line.times, seed))
        self._stations: dict[str, Resource] = {
            station.name: resource_for(self._env, station) for station in scenario.line.stations
        }
        self._residence_s = dict.fromkeys(self._stations, 0.0)
        self._server: BatchedServer | None = None
        if scenario.server is not None and scenario.line.service is not None:
            self._server = BatchedServer(self._env, scenario.server, _stream(seed, 2))
            self._stations[scenario.line.service] = self._server
        self._invite(scenario.clients, _stream(seed, 1))

    @property
    def is_over(self) -> bool:
        """Whether recorded arrivals are over and nothing is left to do."""
        return self._drained and self._batcher.is_idle

    @property
    def arrived(self) -> int:
        """Requests so far."""
        return self._batcher.counts.arrived

    @property
    def capacity(self) -> dict[str, float]:
        """The greatest speed of each station of the line, work a second; infinite for a delay."""
        line, server = self._scenario.line, self._scenario.server
        capacity = {station.name: station.capacity for station in line.stations}
        return capacity if server is None or line.service is None else capacity | {line.service: server.instances}

    def advance(self, flights: int) -> Outcome:
        """Go on until so many more flights are delivered, or the run is over."""
        self._log, self._wanted = _Log(), whole_number(flights, "flights to simulate")
        self._over = self._env.event()
        self._finish()
        self._env.run(until=self._over)
        log = self._log
        return Outcome(
            flights=tuple(log.flights),
            cycles=tuple(log.cycles),
            departures_s=np.array(log.departures_s, dtype=np.float64).reshape(-1, 3),
            requests_s=np.array(log.requests_s, dtype=np.float64).reshape(-1, 2),
            stays=tuple(log.stays),
            counts=self._batcher.counts,
            elapsed_s=float(self._env.now),
            busy_work=np.array([self._stations[name].busy for name in self._residence_s]),
            residence_s=np.array(list(self._residence_s.values())),
            executions=None if self._server is None else dict(sorted(self._server.sizes.items())),
        )

    @staticmethod
    def _rows(draws: Draws) -> Iterator[list[float]]:
        while True:
            yield from draws.block(_FEW).tolist()

    def _invite(self, clients: Clients, rng: np.random.Generator) -> None:
        env = self._env
        if isinstance(clients, Closed):
            for _ in range(clients.clients):
                env.process(self._client(clients, rng))
        elif isinstance(clients, Poisson):
            env.process(self._crowd(_poisson(clients.rate_per_s, rng), ends=False))
        else:
            env.process(self._crowd(iter(clients.arrivals_s), ends=True))

    def _client(self, clients: Closed, rng: np.random.Generator) -> Steps:
        while True:
            if clients.think is not None:
                yield self._env.timeout(float(clients.think.sample(rng, 1)[0]))
            yield self._ask()

    def _crowd(self, arrivals_s: Iterator[float], *, ends: bool) -> Steps:
        for arrival_s in arrivals_s:
            if arrival_s > self._env.now:
                yield self._env.timeout(arrival_s - self._env.now)
            self._ask()
        if ends:
            self._drained = True
            self._act(self._batcher.drain(self._tell_ns()))
            self._finish()

    def _ask(self) -> simpy.Event:
        """One more request reaches the proxy; the event of its end, whatever that is."""
        number, end, now_ns = next(self._numbers), self._env.event(), self._tell_ns()
        self._arrived_s[number], self._ends[number] = self._env.now, end
        patience_s = self._scenario.patience_s
        deadline_ns = None if patience_s is None else now_ns + ns_from_s(patience_s)
        self._act(self._batcher.arrive(number, now_ns, deadline_ns))
        return end

    def _act(self, actions: tuple[Action[int], ...]) -> None:
        for action in actions:
            match action:
                case Launch():
                    self._env.process(self._fly(action, next(self._work)))
                case Answer(number):
                    self._log.requests_s.append((self._arrived_s[number], self._env.now))
                    self._end(number)
                case Refuse(number) | Expire(number) | Drop(number) | Fail(number):
                    self._end(number)
        wake_ns = self._batcher.next_wake_ns
        if wake_ns is not None:
            delay_s = max(0.0, s_from_ns(wake_ns) - self._env.now)
            self._env.timeout(delay_s, wake_ns).callbacks.append(self._ring)

    def _ring(self, event: simpy.Event) -> None:
        wake_ns = self._batcher.next_wake_ns
        if wake_ns is not None and event.value == wake_ns:
            self._now_ns = max(self._now_ns, wake_ns)
            self._act(self._batcher.tick(self._tell_ns()))

    def _end(self, number: int) -> None:
        del self._arrived_s[number]
        self._ends.pop(number).succeed()

    def _fly(self, launch: Launch[int], work: list[float]) -> Steps:
        line, rows, launched_s = self._scenario.line, len(launch.request_ids), self._env.now
        reached_ns = begun_ns = ended_ns = None
        for name, amount in zip(line.route, work, strict=True):
            arrived_s = self._env.now
            begun_s = yield from self._stations[name].visit(amount, rows)
            self._residence_s[name] += self._env.now - arrived_s
            if self._trace:
                self._log.stays.append(Stay(launch.flight_id, name, arrived_s, begun_s, self._env.now))
            if name == line.service:
                reached_ns, begun_ns, ended_ns = ns_from_s(arrived_s), ns_from_s(begun_s), ns_from_s(self._env.now)
        delivered_ns = self._tell_ns()
        times = ExchangeTimes(launch.sealed_ns, reached_ns, ended_ns, delivered_ns)
        flight = Flight(
            launch.flight_id, rows, launch.oldest_arrival_ns, launch.sealed_ns, times, delivered_ns, failed=False
        )
        self._log.flights.append(flight)
        if reached_ns is not None and begun_ns is not None and ended_ns is not None:
            # Simulated compute is one piece: all of it is inference.
            self._log.cycles.append(Cycle(flight, begun_ns - reached_ns, 0, ended_ns - begun_ns, 0))
        self._log.departures_s.append((launch.flight_id, launched_s, self._env.now))
        self._act(self._batcher.flight_done(launch.flight_id, delivered_ns))
        self._finish()

    def _finish(self) -> None:
        enough = len(self._log.flights) >= self._wanted
        if not self._over.triggered and (enough or self.is_over):
            self._over.succeed()

    def _tell_ns(self) -> int:
        """Now, for the policy. A timer's own nanosecond may lie a rounding ahead of simulated time."""
        self._now_ns = max(self._now_ns, ns_from_s(self._env.now))
        return self._now_ns


def _poisson(rate_per_s: float, rng: np.random.Generator) -> Iterator[float]:
    now_s = 0.0
    while True:
        for gap_s in rng.exponential(1 / rate_per_s, _FEW).tolist():
            now_s += gap_s
            yield now_s
