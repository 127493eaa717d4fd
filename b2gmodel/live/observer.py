"""What the proxy tells whoever watches it: each request's end, each flight, and its gauges at any moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from b2gmodel.flights import Flight


class Outcome(StrEnum):
    """How a request ended at the proxy. Every request ends once."""

    ANSWERED = "answered"
    BUSY = "busy"
    DEADLINE = "deadline"
    MALFORMED = "malformed"  # its connection broke the protocol and was ended
    UPSTREAM = "upstream"
    DRAINING = "draining"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    INTERNAL = "internal"
    DISCONNECTED = "disconnected"  # its client was gone before the answer


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The proxy's counters since its start and its gauges now.

    Always ``received = open + the sum of outcomes``. A request counts as received when its head is there.

    Attributes:
        outcomes: ended requests; every ``Outcome`` is a key.
        open: requests without an answer yet: being received, waiting or in flight.
        bytes_in: payload bytes of the requests that ended, those of refused ones included.
        bytes_out: payload bytes of their results.
        protocol_errors: connections ended because their bytes were not the protocol, or came too slowly.
        shed_connections: connections cut off because they did not read their answers.
        connections: clients connected now.
        queue_depth: requests waiting now.
        in_flight: requests in flight now, those that nobody waits for any more included.
        flights_in_use, flights_limit: batches in flight now, and at most.
        slots_in_use, slots: payload slots held now, and all.
        unsent_bytes: answers handed over and not yet taken by their clients.
        flights, flights_failed: batches that have ended, and those of them without results.
        batch_sizes: batches that have ended, by their number of requests.
    """

    received: int
    open: int
    outcomes: Mapping[Outcome, int]
    bytes_in: int
    bytes_out: int
    protocol_errors: int
    shed_connections: int
    connections: int
    queue_depth: int
    in_flight: int
    flights_in_use: int
    flights_limit: int
    slots_in_use: int
    slots: int
    unsent_bytes: int
    flights: int
    flights_failed: int
    batch_sizes: Mapping[int, int]

    @property
    def rejected(self) -> int:
        """Requests that the proxy did not take: busy, draining or unfit."""
        return self.outcomes[Outcome.BUSY] + self.outcomes[Outcome.DRAINING] + self.outcomes[Outcome.REFUSED]

    @property
    def balances(self) -> bool:
        """Whether every request received is accounted for."""
        return self.received == self.open + sum(self.outcomes.values())


class ProxyObserver(Protocol):
    """Called in the proxy's loop, so it must be quick, and must not raise. Gauges: ``Proxy.snapshot``."""

    def request_done(self, outcome: Outcome, bytes_in: int, bytes_out: int) -> None:
        """A request has ended; payload bytes of the request and of its result (0 without one)."""
        ...

    def flight_done(self, flight: Flight) -> None:
        """A flight has ended, after its callers have their results."""
        ...
