"""A question in a user's numbers, and its answer as one row of a table: what ``b2g simulate`` and sweeps run.

The engine is chosen by the question: the kernel where it is exact, else the reference. The row says which.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np

from b2gmodel.batcher import Policy
from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.sim.distributions import (
    Constant,
    CycleTimes,
    Distribution,
    Exponential,
    Floats,
    Gamma,
    Independent,
    Resampled,
)
from b2gmodel.sim.experiments import Precision, Progress, RunResult, run_closed, run_open, run_scenario
from b2gmodel.sim.scenario import BatchedService, Clients, Closed, Poisson, Scenario
from b2gmodel.sim.server_batcher import DynamicBatching
from b2gmodel.sim.stations import Line, Station
from b2gmodel.sim.sweep import Row
from b2gmodel.stats import Interval
from b2gmodel.units import ns_from_s

TRANSPORT: Final = "transport"
GPU: Final = "gpu"
_MEASURED: Final = ("cycles_s", "transport_rates_per_s", "busy_service_s")


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One point of a simulation. Every number may be swept.

    Attributes:
        service_s: S of a batch.
        transport_s: D of a batch; 0 for none.
        service_cv, transport_cv: coefficients of variation; 0 is constant, else gamma.
        cycles_s: measured cycles, columns D and S; their spread, and the correlation within a cycle, take the place
            of the two cv, scaled to the two means. None for independent times.
        transport_rates_per_s: batches a second with 1, 2, ... in transport, measured; None takes D for a pure delay.
        instances: g.
        busy_service_s: S(j) with j = 1..g instances busy, measured; taken where it has g entries. None for instances
            that do not slow each other down.
        k, flights: the proxy's batch size and M.
        clients: concurrent clients in a closed cycle; None for as many as fill all flights.
        think_s: of each client, exponential; 0 for none.
        rate_per_s: Poisson arrivals instead of clients; None for clients.
        queue_limit: of the proxy; None for no limit that matters.
        patience_s, formation_s: a request's deadline, and the proxy's formation deadline; None for none.
        server_max_batch: of the server's dynamic batching; None where that is off.
        server_delay_s: its queue delay.
        service_per_row_s: how much S grows with each row beyond k, for what the server merges.
    """

    service_s: float
    transport_s: float
    service_cv: float = 0.0
    transport_cv: float = 0.0
    cycles_s: Floats | None = None
    transport_rates_per_s: tuple[float, ...] | None = None
    instances: int = 1
    busy_service_s: tuple[float, ...] | None = None
    k: int = 1
    flights: int = 1
    clients: int | None = None
    think_s: float = 0.0
    rate_per_s: float | None = None
    queue_limit: int | None = None
    patience_s: float | None = None
    formation_s: float | None = None
    server_max_batch: int | None = None
    server_delay_s: float = 0.0
    service_per_row_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("service_cv", "transport_cv", "think_s", "transport_s", "server_delay_s", "service_per_row_s"):
            if not (np.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise UsageError("not a number of its kind", observed=getattr(self, name), allowed=">= 0", where=name)
        if self.rate_per_s is not None and self.clients is not None:
            raise UsageError("either clients or a rate of arrivals", where="--rate", hint="leave one of them out")

    def line(self) -> Line:
        """Transport, then the model instances."""
        station = Station.delay(TRANSPORT)
        transport_s = self.transport_s
        if self.transport_rates_per_s is not None:
            station, transport_s = Station.flow_equivalent(TRANSPORT, self.transport_rates_per_s), 1.0
        gpu = Station.queue(GPU, self.instances)
        if self.busy_service_s is not None and self.instances == len(self.busy_service_s) > 1:
            gpu = Station.instances(GPU, self.busy_service_s)
        if not transport_s:
            return Line((gpu,), (GPU,), Independent([_spread(self.service_s, self.service_cv)]), GPU)
        times: CycleTimes
        if self.cycles_s is not None:
            times = Resampled(self.cycles_s / self.cycles_s.mean(axis=0) * [transport_s, self.service_s])
        else:
            times = Independent([_spread(transport_s, self.transport_cv), _spread(self.service_s, self.service_cv)])
        return Line((station, gpu), (TRANSPORT, GPU), times, GPU)

    @property
    def needs_reference(self) -> bool:
        """Whether something is asked for that the kernel does not model."""
        saturated = self.clients is None or (self.clients == self.k * self.flights and not self.think_s)
        plain = self.patience_s is None and self.formation_s is None and self.server_max_batch is None
        if self.rate_per_s is not None:
            return not (plain and self.k == 1 and self.queue_limit is None)
        return not (plain and saturated and not self.think_s)

    def scenario(self) -> Scenario:
        """The same for the reference engine."""
        wanted: Clients
        if self.rate_per_s is not None:
            wanted = Poisson(self.rate_per_s)
        else:
            think = Exponential(self.think_s) if self.think_s else None
            wanted = Closed(self.clients or self.k * self.flights, think)
        most = 1_000_000 if isinstance(wanted, Poisson) else max(wanted.clients, self.k)
        formation_ns = None if self.formation_s is None else ns_from_s(self.formation_s)
        policy = Policy(self.k, self.flights, self.queue_limit or most, formation_ns)
        server = None
        if self.server_max_batch is not None:
            batching = DynamicBatching(self.server_max_batch, queue_delay_ns=ns_from_s(self.server_delay_s))
            ladder = ((self.k, self.service_s), (self.k + 1, self.service_s + self.service_per_row_s))
            server = BatchedService(batching, self.instances, ladder, _spread(1.0, self.service_cv))
        return Scenario(policy, self.line(), wanted, self.patience_s, server)

    def with_values(self, values: Row) -> Question:
        """The same question at another point. Raises ``UsageError`` for a name that is no parameter."""
        known = [field.name for field in fields(self) if field.name not in _MEASURED]
        for name in values:
            if name not in known:
                raise UsageError("not a parameter", observed=name, allowed=", ".join(known), where="--sweep")
        whole = {"instances", "k", "flights", "clients", "queue_limit", "server_max_batch"}
        changes: dict[str, Any] = {name: int(value) if name in whole else value for name, value in values.items()}
        return replace(self, **changes)


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A question with its seed and its precision: all that a worker needs."""

    question: Question
    values: Row
    seed: int
    precision: Precision


def answer(point: Point, progress: Progress | None = None) -> Row:
    """The point's row. A point without an answer says why in ``refused`` and has None for its numbers."""
    question, precision = point.question, point.precision
    seed = np.random.SeedSequence(point.seed)
    row: Row = dict(point.values)
    row["engine"] = "reference" if question.needs_reference else "kernel"
    try:
        if question.needs_reference:
            result = run_scenario(question.scenario(), seed, precision=precision, progress=progress)
            if question.queue_limit is None and question.patience_s is None:
                result = replace(result, rejected_share=None)
        elif question.rate_per_s is not None:
            result = run_open(
                question.line(), question.flights, question.rate_per_s, seed, precision=precision, progress=progress
            )
        else:
            result = run_closed(
                question.line(), question.flights, seed, k=question.k, precision=precision, progress=progress
            )
    except EvidenceError as error:
        return row | _columns(None) | {"refused": error.line()}
    return row | _columns(result) | {"refused": None}


def _columns(result: RunResult | None) -> Row:
    columns: Row = {}

    def put(name: str, interval: Interval | None) -> None:
        columns[name] = None if interval is None else interval.mean
        columns[f"{name}_low"] = None if interval is None else interval.low
        columns[f"{name}_high"] = None if interval is None else interval.high

    put("throughput_per_s", None if result is None else result.throughput_per_s)
    put("response_s", None if result is None else result.response_s)
    for share, name in ((0.5, "p50_s"), (0.95, "p95_s"), (0.99, "p99_s")):
        put(name, None if result is None else result.quantiles_s[share])
    put("rejected_share", None if result is None else result.rejected_share)
    put("gpu_utilisation", None if result is None else result.utilisation[GPU])
    put("transport_utilisation", None if result is None else result.utilisation.get(TRANSPORT))
    put("gpu_queue", None if result is None else result.queue[GPU])
    put("transport_queue", None if result is None else result.queue.get(TRANSPORT))
    columns["samples"] = None if result is None else result.samples
    columns["warmup"] = None if result is None else result.warmup
    return columns


def _spread(mean_s: float, cv: float) -> Distribution:
    return Gamma(mean_s, cv) if cv > 0 else Constant(mean_s)
