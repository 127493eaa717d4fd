"""The batching policy under any order of events, against a slow and obvious book of what may happen.

The book does not choose batches. It follows the actions one by one and holds each against the rules: who may
be sent, expired, dropped, answered or refused, and after each event what must have been sent by then. Each
arrival has a token of its own; a launch makes results from the tokens, so that an answer with another
request's result shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from b2gmodel.batcher import (
    Action,
    Answer,
    Batcher,
    Counts,
    Drop,
    Expire,
    Fail,
    Launch,
    Policy,
    RefusalReason,
    Refuse,
)

NAMES = st.sampled_from("abcdefghijkl")  # few, so that ids come again
STEPS_NS = st.integers(0, 12)


@dataclass(eq=False)
class Held:
    """One admitted arrival that has not ended."""

    name: str
    token: int
    arrival_ns: int
    deadline_ns: int | None
    cancelled: bool = False


@dataclass
class Book:
    """What the rules say is waiting and in flight, and how many ended how."""

    policy: Policy
    now_ns: int = 0
    draining: bool = False
    waiting: list[Held] = field(default_factory=list)
    flights: dict[int, list[Held]] = field(default_factory=dict)
    launched: set[int] = field(default_factory=set)
    ended: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("refused", "expired", "cancelled", "answered", "failed"), 0)
    )
    last_sent_token: int = -1

    def find(self, name: str) -> Held | None:
        held = [*self.waiting, *(one for flight in self.flights.values() for one in flight)]
        same = [one for one in held if one.name == name]
        assert len(same) <= 1
        return same[0] if same else None

    def has_free_flight(self) -> bool:
        return len(self.flights) < self.policy.flights

    def formation_due_ns(self) -> int | None:
        patience_ns = self.policy.formation_deadline_ns
        return None if patience_ns is None or not self.waiting else self.waiting[0].arrival_ns + patience_ns

    def must_launch(self) -> bool:
        due_ns = self.formation_due_ns()
        due = self.draining or (due_ns is not None and due_ns <= self.now_ns)
        return self.has_free_flight() and (len(self.waiting) >= self.policy.batch_size or (due and bool(self.waiting)))

    def launch(self, action: Launch[str]) -> None:
        assert self.must_launch()
        assert action.flight_id not in self.launched
        size = min(self.policy.batch_size, len(self.waiting))
        batch, self.waiting = self.waiting[:size], self.waiting[size:]
        assert action.request_ids == tuple(one.name for one in batch)
        assert (action.oldest_arrival_ns, action.sealed_ns) == (batch[0].arrival_ns, self.now_ns)
        for one in batch:
            assert one.token > self.last_sent_token, "not first come, first served"
            assert one.deadline_ns is None or one.deadline_ns > self.now_ns
            self.last_sent_token = one.token
        self.launched.add(action.flight_id)
        self.flights[action.flight_id] = batch

    def expire(self, action: Expire[str]) -> None:
        one = self.find(action.request_id)
        assert one in self.waiting
        assert one is not None
        assert one.deadline_ns is not None
        assert one.deadline_ns <= self.now_ns
        self.waiting.remove(one)
        self.ended["expired"] += 1

    def end_in_flight(self, flight_id: int, action: Answer[str] | Fail[str] | Drop[str]) -> None:
        one = self.flights[flight_id].pop(0)  # ends come in row order, so that none is missed or repeated
        assert one.name == action.request_id
        assert one.cancelled == isinstance(action, Drop)
        match action:
            case Drop():
                self.ended["cancelled"] += 1
            case Answer():
                self.ended["answered"] += 1
            case Fail():
                self.ended["failed"] += 1

    def counts(self) -> Counts:
        waiting, in_flight = len(self.waiting), sum(map(len, self.flights.values()))
        arrived = sum(self.ended.values()) + waiting + in_flight
        return Counts(arrived=arrived, waiting=waiting, in_flight=in_flight, **self.ended)

    def next_wake_ns(self) -> int | None:
        wakes = [one.deadline_ns for one in self.waiting if one.deadline_ns is not None]
        due_ns = self.formation_due_ns()
        if due_ns is not None and self.has_free_flight():
            wakes.append(due_ns)
        return min(wakes, default=None)


class BatcherMachine(RuleBasedStateMachine):
    """Random events; the driver keeps its own table of results, as the real ones do."""

    @initialize(k=st.integers(1, 4), m=st.integers(1, 3), spare=st.integers(0, 4), patience_ns=st.none() | STEPS_NS)
    def start(self, k: int, m: int, spare: int, patience_ns: int | None) -> None:
        policy = Policy(k, m, k + spare, patience_ns)
        self.batcher: Batcher[str] = Batcher(policy)
        self.book = Book(policy)
        self.arrivals = 0
        self.results: dict[int, list[int]] = {}  # flight -> the result of each row: the token that was sent

    @rule(name=NAMES, step_ns=STEPS_NS, patience_ns=st.none() | st.integers(-2, 30))
    def arrive(self, name: str, step_ns: int, patience_ns: int | None) -> None:
        now_ns = self.pass_time(step_ns)
        deadline_ns = None if patience_ns is None else now_ns + patience_ns
        actions = self.expire_first(self.batcher.arrive(name, now_ns, deadline_ns))
        self.arrivals += 1
        refused = self.expected_refusal(name, deadline_ns)
        if refused is None:
            self.book.waiting.append(Held(name, self.arrivals, now_ns, deadline_ns))
        else:
            assert actions.pop(0) == Refuse(name, refused)
            self.book.ended["refused"] += 1
        self.only_launches(actions)

    @rule(name=NAMES, step_ns=STEPS_NS)
    def cancel(self, name: str, step_ns: int) -> None:
        actions = self.expire_first(self.batcher.cancel(name, self.pass_time(step_ns)))
        one = self.book.find(name)
        if one in self.book.waiting:
            assert actions.pop(0) == Drop(name)
            self.book.waiting = [other for other in self.book.waiting if other is not one]
            self.book.ended["cancelled"] += 1
        elif one is not None:
            one.cancelled = True
        self.only_launches(actions)

    @precondition(lambda self: self.book.flights)
    @rule(data=st.data(), step_ns=STEPS_NS, succeeded=st.booleans())
    def end_flight(self, data: st.DataObject, step_ns: int, succeeded: bool) -> None:
        self.land(data.draw(st.sampled_from(sorted(self.book.flights))), self.pass_time(step_ns), succeeded)

    @rule(step_ns=STEPS_NS)
    def tick(self, step_ns: int) -> None:
        self.only_launches(self.expire_first(self.batcher.tick(self.pass_time(step_ns))))

    @precondition(lambda self: self.batcher.next_wake_ns is not None)
    @rule()
    def ring_the_timer(self) -> None:
        wake_ns = self.batcher.next_wake_ns
        assert wake_ns is not None
        actions = self.batcher.tick(self.pass_time(wake_ns - self.book.now_ns))
        assert actions, "woken up for nothing"
        self.only_launches(self.expire_first(actions))

    @precondition(lambda self: self.arrivals >= 10)
    @rule(step_ns=STEPS_NS)
    def drain(self, step_ns: int) -> None:
        actions = self.expire_first(self.batcher.drain(self.pass_time(step_ns)))
        self.book.draining = True
        self.only_launches(actions)

    @rule(flight_id=st.integers(-1, 60), succeeded=st.booleans(), step_ns=STEPS_NS)
    def end_no_flight(self, flight_id: int, succeeded: bool, step_ns: int) -> None:
        if flight_id not in self.book.flights:
            end = self.batcher.flight_done if succeeded else self.batcher.flight_failed
            with pytest.raises(ValueError, match="not in the air"):
                end(flight_id, self.book.now_ns + step_ns)

    @invariant()
    def holds(self) -> None:
        book, batcher = self.book, self.batcher
        counts = batcher.counts
        assert counts == book.counts()
        assert counts.arrived == self.arrivals
        assert counts.waiting <= book.policy.queue_limit
        assert batcher.flights_used == len(book.flights) <= book.policy.flights
        assert batcher.is_idle == (counts.waiting + counts.in_flight == 0)
        assert not book.must_launch()
        assert all(one.deadline_ns is None or one.deadline_ns > book.now_ns for one in book.waiting)
        assert batcher.next_wake_ns == book.next_wake_ns()
        assert batcher.next_wake_ns is None or batcher.next_wake_ns > book.now_ns

    def teardown(self) -> None:
        """Drained to the end, every arrival has had exactly one end."""
        if not hasattr(self, "batcher"):
            return
        self.drain(0)
        while self.book.flights:
            self.land(min(self.book.flights), self.pass_time(1), True)
            self.holds()
        assert self.batcher.is_idle
        assert sum(self.book.ended.values()) == self.arrivals

    def pass_time(self, step_ns: int) -> int:
        self.book.now_ns += step_ns
        return self.book.now_ns

    def expected_refusal(self, name: str, deadline_ns: int | None) -> RefusalReason | None:
        if self.book.find(name) is not None:
            return RefusalReason.DUPLICATE
        if self.book.draining:
            return RefusalReason.DRAINING
        if deadline_ns is not None and deadline_ns <= self.book.now_ns:
            return RefusalReason.DEADLINE
        return RefusalReason.QUEUE_FULL if len(self.book.waiting) == self.book.policy.queue_limit else None

    def expire_first(self, actions: tuple[Action[str], ...]) -> list[Action[str]]:
        """Books the expiries, which come before all else, and hands back the rest."""
        rest = list(actions)
        while rest and isinstance(first := rest[0], Expire):
            self.book.expire(first)
            rest.pop(0)
        return rest

    def only_launches(self, actions: list[Action[str]]) -> None:
        for action in actions:
            assert isinstance(action, Launch)
            self.book.launch(action)
            self.results[action.flight_id] = [one.token for one in self.book.flights[action.flight_id]]

    def land(self, flight_id: int, now_ns: int, succeeded: bool) -> None:
        end = self.batcher.flight_done if succeeded else self.batcher.flight_failed
        actions = self.expire_first(end(flight_id, now_ns))
        results = self.results.pop(flight_id)
        while self.book.flights[flight_id]:
            one, action = self.book.flights[flight_id][0], actions.pop(0)
            assert isinstance(action, Drop | Answer | Fail)
            if isinstance(action, Answer | Fail):
                assert isinstance(action, Answer) == succeeded
                assert action.flight_id == flight_id
            if isinstance(action, Answer):
                assert results[action.row] == one.token, "another request's result"
            self.book.end_in_flight(flight_id, action)
        del self.book.flights[flight_id]
        self.only_launches(actions)


BatcherMachine.TestCase.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
TestBatcher = BatcherMachine.TestCase
