"""The batching policy as a state machine: an event and its time go in, the actions to take come out.

Rules that hold here:

* No clock, no I/O, no randomness, no threads: time is the argument ``now_ns``, in integer nanoseconds of
  any one monotonic clock. The live proxy and the simulation drive this same code.
* Every event works in the same order: time first (what has passed its deadline expires), then the event
  itself, then every launch that is due. So a late timer delays an action, but never makes a wrong one.
* Every arrival ends exactly once, in ``Refuse``, ``Expire``, ``Drop``, ``Answer`` or ``Fail``, and always
  ``arrived = refused + expired + cancelled + answered + failed + waiting + in_flight``.
* A call that raises has changed nothing.
* An event costs amortised O(1) for each request that it moves; O(log queue) for one with its own deadline.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from heapq import heapify, heappop, heappush
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from b2gmodel.errors import UsageError

R = TypeVar("R", bound=Hashable)
"""A request's identity: any hashable that the driver likes, the request object itself included."""

_STALE_SLACK: Final = 64


class Placement(StrEnum):
    """Where batching happens, for all placements that have a proxy. (D0, the direct path, has none.)"""

    C1 = "C1"
    C2 = "C2"
    C3 = "C3"
    C4 = "C4"


class RefusalReason(StrEnum):
    """Why an arrival was not admitted."""

    QUEUE_FULL = "queue_full"
    DRAINING = "draining"
    DEADLINE = "deadline"
    DUPLICATE = "duplicate"


@dataclass(frozen=True, slots=True)
class Policy:
    """What a proxy gathers, and how much of it at once.

    Attributes:
        batch_size: requests to a full batch, k >= 1.
        flights: most batches in flight at once, M >= 1; 1 is single-flight.
        queue_limit: most requests waiting at once, those in flight not counted; at least ``batch_size``.
        formation_deadline_ns: a partial batch goes once its oldest request has waited this long and a flight
            is free; 0 sends whatever waits whenever a flight is free; None waits for k.

    Raises:
        UsageError: a value that is not an integer in its domain.
    """

    batch_size: int
    flights: int
    queue_limit: int
    formation_deadline_ns: int | None = None

    def __post_init__(self) -> None:
        _require_integer(self.batch_size, least=1, where="batch size")
        _require_integer(self.flights, least=1, where="flights")
        _require_integer(
            self.queue_limit,
            least=self.batch_size,
            where="queue limit",
            hint="a queue must hold one whole batch",
        )
        if self.formation_deadline_ns is not None:
            _require_integer(self.formation_deadline_ns, least=0, where="formation deadline (ns)")

    @classmethod
    def for_placement(
        cls,
        placement: Placement,
        *,
        batch_size: int,
        flights: int,
        concurrency: int,
        queue_limit: int,
        formation_deadline_ns: int | None = None,
    ) -> Policy:
        """A placement's policy in an experiment with k, M and c; each placement takes what applies to it.

        C1 and C2 pass requests on one by one, up to ``concurrency`` in flight (they differ only in the model
        entry that the driver addresses); C3 gathers ``batch_size`` in one flight, C4 in ``flights`` >= 2.

        Raises:
            UsageError: a value outside its domain, or C4 with one flight.
        """
        if placement in (Placement.C1, Placement.C2):
            return cls(batch_size=1, flights=concurrency, queue_limit=queue_limit)
        if placement is Placement.C3:
            return cls(batch_size, 1, queue_limit, formation_deadline_ns)
        _require_integer(flights, least=2, where="flights of C4", hint="one flight is placement C3")
        return cls(batch_size, flights, queue_limit, formation_deadline_ns)


@dataclass(frozen=True, slots=True)
class Launch(Generic[R]):
    """Send these requests as one batch; row i of the batch is ``request_ids[i]``, oldest first."""

    flight_id: int
    request_ids: tuple[R, ...]
    oldest_arrival_ns: int
    sealed_ns: int


@dataclass(frozen=True, slots=True)
class Refuse(Generic[R]):
    """This arrival is not admitted. (A duplicate's refusal does not touch the first of that id.)"""

    request_id: R
    reason: RefusalReason


@dataclass(frozen=True, slots=True)
class Expire(Generic[R]):
    """The request's own deadline came while it waited; it will not be sent."""

    request_id: R


@dataclass(frozen=True, slots=True)
class Drop(Generic[R]):
    """The cancelled request is over: nobody wants its result, and no flight uses its payload any longer."""

    request_id: R


@dataclass(frozen=True, slots=True)
class Answer(Generic[R]):
    """Give the request its result: row ``row`` of flight ``flight_id``."""

    request_id: R
    flight_id: int
    row: int


@dataclass(frozen=True, slots=True)
class Fail(Generic[R]):
    """Tell the request that its flight failed."""

    request_id: R
    flight_id: int


Action: TypeAlias = Launch[R] | Refuse[R] | Expire[R] | Drop[R] | Answer[R] | Fail[R]


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests by what became of them; ``arrived`` is the sum of all the others."""

    arrived: int
    refused: int
    expired: int
    cancelled: int
    answered: int
    failed: int
    waiting: int
    in_flight: int


class _Wait(NamedTuple):
    """A request's place in the queue; tickets never repeat, ids may."""

    arrival_ns: int
    ticket: int


class Batcher(Generic[R]):
    """Gathers requests into batches by a policy.

    Each event method returns the actions that the driver takes, in order. After each event the driver sets
    its one timer to ``next_wake_ns`` and calls ``tick`` when it rings. Requests are sent in order of arrival.

    A request's deadline governs its waiting only. Once launched it is the driver's affair: it may send the
    late answer, or tell the caller and ``cancel`` the request, which is then dropped when its flight ends.

    All events raise ``ValueError``, and change nothing, when ``now_ns`` lies before the last event.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._waiting: OrderedDict[R, _Wait] = OrderedDict()
        self._wanted: dict[R, bool] = {}  # requests in flight: does anybody still want the result?
        self._flights: dict[int, tuple[R, ...]] = {}
        # In the heap a deadline outlives its wait; it counts only while its ticket has an owner. The heap
        # holds integers alone, so that it keeps no request in memory that is over.
        self._deadlines: list[tuple[int, int]] = []
        self._owners: dict[int, R] = {}
        self._draining = False
        self._now_ns: int | None = None
        self._next_flight_id = 0
        self._arrived = self._refused = self._expired = self._cancelled = self._answered = self._failed = 0

    def arrive(self, request_id: R, now_ns: int, deadline_ns: int | None = None) -> tuple[Action[R], ...]:
        """A request has come in whole.

        Args:
            request_id: must differ from every request now waiting or in flight; free again after its end.
            now_ns: time of the event.
            deadline_ns: first instant at which it is too late to send the request; None for no deadline.
        """
        actions = self._pass_time(now_ns)
        self._arrived += 1
        reason = self._refusal(request_id, now_ns, deadline_ns)
        if reason is None:
            self._waiting[request_id] = _Wait(now_ns, self._arrived)
            if deadline_ns is not None:
                self._watch(deadline_ns, self._arrived, request_id)
        else:
            self._refused += 1
            actions.append(Refuse(request_id, reason))
        self._launch_due(now_ns, actions)
        return tuple(actions)

    def cancel(self, request_id: R, now_ns: int) -> tuple[Action[R], ...]:
        """Nobody wants the result any longer.

        A waiting request is dropped at once; one in flight when its flight ends, its id taken until then.
        A request that is not held is no error: its end and this event have crossed.
        """
        actions = self._pass_time(now_ns)
        if request_id in self._waiting:
            self._unwatch(self._waiting.pop(request_id))
            self._cancelled += 1
            actions.append(Drop(request_id))
        elif request_id in self._wanted:
            self._wanted[request_id] = False
        self._launch_due(now_ns, actions)
        return tuple(actions)

    def flight_done(self, flight_id: int, now_ns: int) -> tuple[Action[R], ...]:
        """A flight's results are there: its requests' ends in row order, then what the free flight launches.

        Raises:
            ValueError: no such flight, or it has already ended.
        """
        return self._land(flight_id, now_ns, succeeded=True)

    def flight_failed(self, flight_id: int, now_ns: int) -> tuple[Action[R], ...]:
        """A flight came to nothing: its requests' ends in row order, then what the free flight launches.

        Raises:
            ValueError: no such flight, or it has already ended.
        """
        return self._land(flight_id, now_ns, succeeded=False)

    def tick(self, now_ns: int) -> tuple[Action[R], ...]:
        """Time has come this far: expiries, and partial batches that have waited long enough."""
        actions = self._pass_time(now_ns)
        self._launch_due(now_ns, actions)
        return tuple(actions)

    def drain(self, now_ns: int) -> tuple[Action[R], ...]:
        """From now on nothing is admitted, and what waits goes as flights come free, partial batches too."""
        actions = self._pass_time(now_ns)
        self._draining = True
        self._launch_due(now_ns, actions)
        return tuple(actions)

    @property
    def next_wake_ns(self) -> int | None:
        """When ``tick`` is next needed, always after the last event; None when time alone does nothing."""
        deadline_ns, formation_ns = self._earliest_deadline_ns(), self._formation_due_ns()
        if deadline_ns is None or formation_ns is None:
            return formation_ns if deadline_ns is None else deadline_ns
        return min(deadline_ns, formation_ns)

    @property
    def counts(self) -> Counts:
        """Requests by what became of them, now."""
        return Counts(
            arrived=self._arrived,
            refused=self._refused,
            expired=self._expired,
            cancelled=self._cancelled,
            answered=self._answered,
            failed=self._failed,
            waiting=len(self._waiting),
            in_flight=len(self._wanted),
        )

    @property
    def flights_used(self) -> int:
        """Batches in flight, at most ``policy.flights``."""
        return len(self._flights)

    @property
    def is_idle(self) -> bool:
        """True while nothing waits and nothing is in flight; after ``drain`` it stays so."""
        return not self._waiting and not self._flights

    def _pass_time(self, now_ns: int) -> list[Action[R]]:
        """Moves time on and expires what its deadline has overtaken, earliest deadline first."""
        if self._now_ns is not None and now_ns < self._now_ns:
            raise ValueError(f"time runs backwards: {now_ns} ns after {self._now_ns} ns")
        self._now_ns = now_ns
        actions: list[Action[R]] = []
        while (deadline_ns := self._earliest_deadline_ns()) is not None and deadline_ns <= now_ns:
            request_id = self._owners[self._deadlines[0][1]]
            self._unwatch(self._waiting.pop(request_id))
            self._expired += 1
            actions.append(Expire(request_id))
        return actions

    def _refusal(self, request_id: R, now_ns: int, deadline_ns: int | None) -> RefusalReason | None:
        if request_id in self._waiting or request_id in self._wanted:
            return RefusalReason.DUPLICATE
        if self._draining:
            return RefusalReason.DRAINING
        if deadline_ns is not None and deadline_ns <= now_ns:
            return RefusalReason.DEADLINE
        if len(self._waiting) >= self.policy.queue_limit:
            return RefusalReason.QUEUE_FULL
        return None

    def _land(self, flight_id: int, now_ns: int, *, succeeded: bool) -> tuple[Action[R], ...]:
        if flight_id not in self._flights:
            raise ValueError(f"flight {flight_id!r} is not in the air: unknown, or it has already ended")
        actions = self._pass_time(now_ns)
        for row, request_id in enumerate(self._flights.pop(flight_id)):
            if not self._wanted.pop(request_id):
                self._cancelled += 1
                actions.append(Drop(request_id))
            elif succeeded:
                self._answered += 1
                actions.append(Answer(request_id, flight_id, row))
            else:
                self._failed += 1
                actions.append(Fail(request_id, flight_id))
        self._launch_due(now_ns, actions)
        return tuple(actions)

    def _launch_due(self, now_ns: int, actions: list[Action[R]]) -> None:
        while len(self._flights) < self.policy.flights and self._is_due(now_ns):
            actions.append(self._launch(now_ns))

    def _is_due(self, now_ns: int) -> bool:
        if len(self._waiting) >= self.policy.batch_size:
            return True
        if self._draining:
            return bool(self._waiting)
        formation_ns = self._formation_due_ns()
        return formation_ns is not None and formation_ns <= now_ns

    def _formation_due_ns(self) -> int | None:
        """When the oldest request will have waited long enough; None where that would not launch anything."""
        patience_ns = self.policy.formation_deadline_ns
        if patience_ns is None or not self._waiting or len(self._flights) >= self.policy.flights:
            return None
        return self._oldest_arrival_ns() + patience_ns

    def _launch(self, now_ns: int) -> Launch[R]:
        oldest_arrival_ns = self._oldest_arrival_ns()
        batch: list[R] = []
        while self._waiting and len(batch) < self.policy.batch_size:
            request_id, wait = self._waiting.popitem(last=False)
            self._unwatch(wait)
            self._wanted[request_id] = True
            batch.append(request_id)
        flight_id = self._next_flight_id
        self._next_flight_id += 1
        self._flights[flight_id] = request_ids = tuple(batch)
        return Launch(flight_id, request_ids, oldest_arrival_ns, now_ns)

    def _oldest_arrival_ns(self) -> int:
        # An OrderedDict finds its first entry in O(1); a dict would search past all that have been removed.
        return next(iter(self._waiting.values())).arrival_ns

    def _earliest_deadline_ns(self) -> int | None:
        """The earliest deadline of a waiting request; sweeps away those of requests that wait no more."""
        while self._deadlines and self._deadlines[0][1] not in self._owners:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _watch(self, deadline_ns: int, ticket: int, request_id: R) -> None:
        self._owners[ticket] = request_id
        heappush(self._deadlines, (deadline_ns, ticket))
        if len(self._deadlines) > 2 * len(self._owners) + _STALE_SLACK:
            # More than half is stale, so that this sweep is paid for by the arrivals that it removes.
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._owners]
            heapify(self._deadlines)

    def _unwatch(self, wait: _Wait) -> None:
        self._owners.pop(wait.ticket, None)


def _require_integer(value: object, *, least: int, where: str, hint: str | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError("not an integer in its domain", observed=value, allowed=f">= {least}", where=where, hint=hint)
