"""What a run simulates: who asks, how the proxy gathers, what a batch's cycle is made of."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from b2gmodel.batcher import Policy
from b2gmodel.errors import UsageError
from b2gmodel.sim.distributions import Constant, Distribution
from b2gmodel.sim.server_batcher import DynamicBatching
from b2gmodel.sim.stations import Line


@dataclass(frozen=True, slots=True)
class Closed:
    """``clients`` that each wait for their result, think, and ask again; None thinks for no time at all.

    Raises:
        UsageError: no client.
    """

    clients: int
    think: Distribution | None = None

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise UsageError("nobody asks", observed=self.clients, allowed=">= 1", where="clients")


@dataclass(frozen=True, slots=True)
class Poisson:
    """Requests that come independently of each other and of the results. Raises ``UsageError`` unless rate > 0."""

    rate_per_s: float

    def __post_init__(self) -> None:
        if not (np.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise UsageError("not a rate", observed=self.rate_per_s, allowed="> 0", where="arrival rate")


@dataclass(frozen=True, slots=True)
class Recorded:
    """Requests at given times, seconds from the start, not decreasing. Raises ``UsageError`` where they are not."""

    arrivals_s: tuple[float, ...]

    def __post_init__(self) -> None:
        times = np.asarray(self.arrivals_s)
        if not times.size or not np.all(np.isfinite(times)) or times[0] < 0 or np.any(np.diff(times) < 0):
            raise UsageError("not arrivals", allowed="finite times >= 0 in order, at least one", where="arrivals")


Clients: TypeAlias = Closed | Poisson | Recorded


@dataclass(frozen=True, slots=True)
class BatchedService:
    """The server's own batching at the line's service station.

    Attributes:
        batching: how it merges.
        instances: g.
        ladder_s: (rows, S) with increasing rows; between two of them S is on the straight line, beyond the ends on
            the line through the last two. One entry is the same S for every size.
        shape: the spread of S about its mean; its own mean is 1.

    Raises:
        UsageError: no ladder, rows that do not increase, or a shape whose mean is not 1.
    """

    batching: DynamicBatching
    instances: int
    ladder_s: tuple[tuple[int, float], ...]
    shape: Distribution = field(default_factory=lambda: Constant(1.0))

    def __post_init__(self) -> None:
        rows = [size for size, _ in self.ladder_s]
        if not rows or rows != sorted(set(rows)):
            raise UsageError("not a ladder of S(k)", observed=rows, allowed="increasing sizes", where="S(k)")
        if abs(self.shape.moment(1) - 1.0) > 1e-6:
            raise UsageError("a shape has mean 1", observed=self.shape.moment(1), allowed="1", where="S(k)")
        for size in range(1, self.batching.max_batch + 1):
            if not self.mean_s(size) > 0:
                raise UsageError("S(k) is not positive", observed=self.mean_s(size), allowed="> 0", where=f"S({size})")

    def mean_s(self, rows: int) -> float:
        """S for an execution of that many rows."""
        if len(self.ladder_s) == 1:
            return self.ladder_s[0][1]
        right = bisect.bisect_left(self.ladder_s, (rows, 0.0))
        right = min(max(right, 1), len(self.ladder_s) - 1)
        (low, at_low_s), (high, at_high_s) = self.ladder_s[right - 1 : right + 1]
        return at_low_s + (rows - low) * (at_high_s - at_low_s) / (high - low)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole run but for its length and seed.

    Attributes:
        policy: the proxy's.
        line: a batch's cycle.
        clients: who asks.
        patience_s: a request that has waited this long in the proxy is not sent; None for no deadline.
        server: the server's own batching, in place of the line's service station.

    Raises:
        UsageError: clients who never think and can be refused (they would ask without end), server batching on a
            line without a service station, or a policy whose batches the server refuses.
    """

    policy: Policy
    line: Line
    clients: Clients
    patience_s: float | None = None
    server: BatchedService | None = None

    def __post_init__(self) -> None:
        clients, policy = self.clients, self.policy
        if isinstance(clients, Closed):
            if clients.think is None and clients.clients > policy.queue_limit:
                raise UsageError(
                    "clients who never think must all fit into the queue",
                    observed=f"{clients.clients} clients, a queue of {policy.queue_limit}",
                    allowed="clients <= queue limit, or a think time",
                    where="clients",
                )
            if policy.formation_deadline_ns is None and clients.clients < policy.batch_size:
                raise UsageError(
                    "the batch can never fill",
                    observed=f"{clients.clients} clients for batches of {policy.batch_size}",
                    allowed="clients >= k, or a formation deadline",
                    where="clients",
                )
        if self.patience_s is not None and not self.patience_s > 0:
            raise UsageError("a deadline lies ahead", observed=self.patience_s, allowed="> 0", where="deadline")
        if self.patience_s is not None and isinstance(clients, Closed) and clients.think is None:
            raise UsageError(
                "clients who never think would ask without end once a request expires",
                where="deadline",
                hint="give them a think time",
            )
        if self.server is not None:
            if self.line.service is None:
                raise UsageError("server batching needs a service station", where="service")
            if policy.batch_size > self.server.batching.max_batch:
                raise UsageError(
                    "the server refuses the proxy's batches",
                    observed=policy.batch_size,
                    allowed=f"<= {self.server.batching.max_batch}",
                    where="batch size",
                )
