"""Schedules of the batching policy, traced by hand in integer nanoseconds."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from dataclasses import fields

import pytest

from b2gmodel.batcher import (
    Answer,
    Batcher,
    Drop,
    Expire,
    Fail,
    Launch,
    Placement,
    Policy,
    RefusalReason,
    Refuse,
)
from b2gmodel.errors import UsageError


def make(k: int, m: int, *, queue: int = 8, formation_ns: int | None = None) -> Batcher[str]:
    return Batcher(Policy(k, m, queue, formation_ns))


def assert_balanced(batcher: Batcher[str]) -> None:
    parts = {field.name: getattr(batcher.counts, field.name) for field in fields(batcher.counts)}
    assert parts.pop("arrived") == sum(parts.values())


def test_single_flight_sends_full_batches_one_after_another() -> None:
    b = make(2, 1)
    assert b.arrive("a", 10) == ()
    assert b.arrive("b", 25) == (Launch(0, ("a", "b"), 10, 25),)
    assert b.arrive("c", 30) == ()
    assert b.arrive("d", 40) == ()
    assert b.arrive("e", 50) == ()
    assert b.flights_used == 1
    assert b.flight_done(0, 100) == (Answer("a", 0, 0), Answer("b", 0, 1), Launch(1, ("c", "d"), 30, 100))
    assert b.flight_done(1, 180) == (Answer("c", 1, 0), Answer("d", 1, 1))
    assert (b.counts.answered, b.counts.waiting, b.counts.in_flight) == (4, 1, 0)
    assert b.next_wake_ns is None
    assert_balanced(b)


def test_two_flights_overlap_and_may_end_out_of_order() -> None:
    b = make(2, 2)
    for at_ns, name in enumerate("abcdef"):
        b.arrive(name, at_ns)
    assert (b.flights_used, b.counts.waiting) == (2, 2)
    assert b.flight_done(1, 20) == (Answer("c", 1, 0), Answer("d", 1, 1), Launch(2, ("e", "f"), 4, 20))
    assert b.flight_done(0, 30) == (Answer("a", 0, 0), Answer("b", 0, 1))
    assert b.flight_done(2, 30) == (Answer("e", 2, 0), Answer("f", 2, 1))
    assert b.is_idle


def test_unbatched_passes_each_request_on_until_flights_run_out() -> None:
    b: Batcher[str] = Batcher(Policy.for_placement(Placement.C1, batch_size=8, flights=4, concurrency=2, queue_limit=1))
    assert b.arrive("a", 0) == (Launch(0, ("a",), 0, 0),)
    assert b.arrive("b", 1) == (Launch(1, ("b",), 1, 1),)
    assert b.arrive("c", 2) == ()
    assert b.arrive("d", 3) == (Refuse("d", RefusalReason.QUEUE_FULL),)
    assert b.flight_done(0, 9) == (Answer("a", 0, 0), Launch(2, ("c",), 2, 9))
    assert b.arrive("d", 10) == ()


def test_a_partial_batch_goes_when_its_oldest_has_waited_long_enough() -> None:
    b = make(3, 1, formation_ns=100)
    assert b.arrive("a", 10) == ()
    assert b.next_wake_ns == 110
    assert b.arrive("b", 60) == ()
    assert b.next_wake_ns == 110
    assert b.tick(109) == ()
    assert b.tick(110) == (Launch(0, ("a", "b"), 10, 110),)
    assert b.next_wake_ns is None


def test_a_due_partial_batch_waits_for_a_flight_and_goes_when_one_is_free() -> None:
    b = make(2, 1, formation_ns=100)
    b.arrive("a", 0)
    b.arrive("b", 0)
    assert b.arrive("c", 10) == ()
    assert b.next_wake_ns is None  # no flight is free at 110, so that there is nothing to wake up for
    assert b.tick(110) == ()
    assert b.flight_done(0, 150) == (Answer("a", 0, 0), Answer("b", 0, 1), Launch(1, ("c",), 10, 150))


def test_a_free_flight_before_the_formation_deadline_still_waits_for_it() -> None:
    b = make(2, 1, formation_ns=100)
    b.arrive("a", 0)
    b.arrive("b", 0)
    b.arrive("c", 10)
    assert b.flight_done(0, 50) == (Answer("a", 0, 0), Answer("b", 0, 1))
    assert b.next_wake_ns == 110
    assert b.tick(110) == (Launch(1, ("c",), 10, 110),)


def test_zero_formation_deadline_sends_what_waits_whenever_a_flight_is_free() -> None:
    b = make(4, 1, formation_ns=0)
    assert b.arrive("a", 0) == (Launch(0, ("a",), 0, 0),)
    b.arrive("b", 1)
    b.arrive("c", 2)
    assert b.flight_done(0, 9) == (Answer("a", 0, 0), Launch(1, ("b", "c"), 1, 9))


def test_when_the_timer_is_late_an_arrival_joins_the_due_batch() -> None:
    b = make(3, 1, formation_ns=100)
    b.arrive("a", 0)
    assert b.arrive("b", 130) == (Launch(0, ("a", "b"), 0, 130),)


def test_when_the_timer_is_late_a_refused_arrival_still_lets_the_due_batch_go() -> None:
    b = make(3, 1, formation_ns=100)
    b.arrive("a", 0)
    refused = Refuse("b", RefusalReason.DEADLINE)
    assert b.arrive("b", 130, deadline_ns=120) == (refused, Launch(0, ("a",), 0, 130))


def test_cancelling_the_oldest_hands_the_formation_deadline_to_the_next() -> None:
    b = make(3, 1, formation_ns=100)
    b.arrive("a", 0)
    b.arrive("b", 40)
    assert b.cancel("a", 50) == (Drop("a"),)
    assert b.next_wake_ns == 140
    assert b.tick(100) == ()
    assert b.tick(140) == (Launch(0, ("b",), 40, 140),)


def test_a_waiting_request_expires_at_its_deadline_and_makes_room() -> None:
    b = make(2, 1, queue=2)
    for name in "ab":
        b.arrive(name, 0)
    b.arrive("c", 1, deadline_ns=50)
    b.arrive("d", 2, deadline_ns=20)
    assert b.next_wake_ns == 20
    assert b.arrive("e", 19) == (Refuse("e", RefusalReason.QUEUE_FULL),)
    assert b.arrive("e", 20) == (Expire("d"),)
    assert b.next_wake_ns == 50
    assert b.flight_done(0, 50) == (Expire("c"), Answer("a", 0, 0), Answer("b", 0, 1))
    assert (b.counts.expired, b.counts.refused, b.counts.waiting) == (2, 1, 1)
    assert_balanced(b)


def test_expiries_come_in_order_of_deadline_and_ties_in_order_of_arrival() -> None:
    b = make(8, 1)
    b.arrive("a", 0, deadline_ns=30)
    b.arrive("b", 1, deadline_ns=10)
    b.arrive("c", 2, deadline_ns=30)
    assert b.tick(99) == (Expire("b"), Expire("a"), Expire("c"))


def test_a_deadline_ends_with_the_launch() -> None:
    b = make(1, 1)
    assert b.arrive("a", 0, deadline_ns=10) == (Launch(0, ("a",), 0, 0),)
    assert b.next_wake_ns is None
    assert b.tick(10) == ()
    assert b.flight_done(0, 20) == (Answer("a", 0, 0),)


def test_a_reused_id_does_not_inherit_the_deadline_of_its_predecessor() -> None:
    b = make(2, 1)
    b.arrive("a", 0, deadline_ns=10)
    b.cancel("a", 1)
    b.arrive("a", 2, deadline_ns=40)
    assert b.next_wake_ns == 40
    assert b.tick(10) == ()
    assert b.tick(40) == (Expire("a"),)


def test_a_request_cancelled_in_flight_is_dropped_when_the_flight_ends() -> None:
    b = make(2, 1)
    b.arrive("a", 0)
    b.arrive("b", 0)
    assert b.cancel("a", 5) == ()
    assert b.cancel("a", 6) == ()
    assert (b.counts.cancelled, b.counts.in_flight) == (0, 2)
    assert b.arrive("a", 7) == (Refuse("a", RefusalReason.DUPLICATE),)
    assert b.flight_done(0, 9) == (Drop("a"), Answer("b", 0, 1))
    assert b.cancel("b", 10) == ()  # crossed with its own answer
    assert (b.counts.cancelled, b.counts.answered, b.counts.refused) == (1, 1, 1)
    assert_balanced(b)


def test_a_failed_flight_fails_its_requests_and_frees_its_place() -> None:
    b = make(2, 1)
    for name in "abcd":
        b.arrive(name, 0)
    b.cancel("b", 1)
    assert b.flight_failed(0, 5) == (Fail("a", 0), Drop("b"), Launch(1, ("c", "d"), 0, 5))
    assert (b.counts.failed, b.counts.cancelled) == (1, 1)
    assert_balanced(b)


def test_drain_sends_what_waits_in_partial_batches_and_admits_nothing() -> None:
    b = make(3, 2)
    for name in "abcd":
        b.arrive(name, 0)
    assert b.drain(10) == (Launch(1, ("d",), 0, 10),)
    assert b.drain(11) == ()
    assert b.arrive("e", 12) == (Refuse("e", RefusalReason.DRAINING),)
    b.flight_done(0, 20)
    assert not b.is_idle
    b.flight_done(1, 30)
    assert b.is_idle


def test_drain_with_no_free_flight_sends_the_rest_as_flights_come_free() -> None:
    b = make(2, 1)
    for name in "abcde":
        b.arrive(name, 0)
    assert b.drain(1) == ()
    assert b.flight_done(0, 2)[2:] == (Launch(1, ("c", "d"), 0, 2),)
    assert b.flight_failed(1, 3)[2:] == (Launch(2, ("e",), 0, 3),)
    assert b.flight_done(2, 4) == (Answer("e", 2, 0),)
    assert b.is_idle


def test_a_waiting_duplicate_is_refused_and_the_first_goes_on() -> None:
    b = make(2, 1)
    b.arrive("a", 0)
    assert b.arrive("a", 1) == (Refuse("a", RefusalReason.DUPLICATE),)
    assert b.arrive("b", 2) == (Launch(0, ("a", "b"), 0, 2),)


def test_a_deadline_that_has_come_already_refuses_the_arrival() -> None:
    b = make(2, 1)
    assert b.arrive("a", 10, deadline_ns=10) == (Refuse("a", RefusalReason.DEADLINE),)
    assert b.arrive("a", 10, deadline_ns=11) == ()


def test_an_unknown_or_ended_flight_is_an_error_that_changes_nothing() -> None:
    b = make(2, 1)
    b.arrive("a", 0)
    b.arrive("b", 0)
    b.arrive("c", 0, deadline_ns=10)
    b.flight_done(0, 5)
    before = b.counts
    for end in (b.flight_done, b.flight_failed):
        for flight_id in (0, 1):
            with pytest.raises(ValueError, match=f"flight {flight_id} is not in the air"):
                end(flight_id, 10)
    assert b.counts == before
    assert b.tick(10) == (Expire("c"),)


def test_time_that_runs_backwards_is_an_error_that_changes_nothing() -> None:
    b = make(2, 1)
    b.arrive("a", 10)
    with pytest.raises(ValueError, match="9 ns after 10 ns"):
        b.arrive("b", 9)
    assert b.counts.arrived == 1
    assert b.arrive("b", 10) == (Launch(0, ("a", "b"), 10, 10),)


@pytest.mark.parametrize(
    ("placement", "batch_size", "flights", "formation_ns"),
    [
        (Placement.C1, 1, 16, None),
        (Placement.C2, 1, 16, None),
        (Placement.C3, 8, 1, 5),
        (Placement.C4, 8, 3, 5),
    ],
)
def test_placements_are_settings_of_one_policy(
    placement: Placement, batch_size: int, flights: int, formation_ns: int | None
) -> None:
    policy = Policy.for_placement(
        placement, batch_size=8, flights=3, concurrency=16, queue_limit=32, formation_deadline_ns=5
    )
    assert policy == Policy(batch_size, flights, 32, formation_ns)


def test_c4_with_one_flight_is_refused_by_name() -> None:
    with pytest.raises(UsageError) as error:
        Policy.for_placement(Placement.C4, batch_size=8, flights=1, concurrency=1, queue_limit=8)
    expected = "flights of C4: not an integer in its domain: saw 1; allowed: >= 2; one flight is placement C3"
    assert error.value.line() == expected


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ((0, 1, 8, None), "batch size"),
        ((True, 1, 8, None), "batch size"),
        ((2.0, 1, 8, None), "batch size"),
        ((2, 0, 8, None), "flights"),
        ((4, 1, 3, None), "queue limit"),
        ((4, 1, 8, -1), "formation deadline (ns)"),
    ],
)
def test_a_policy_outside_its_domain_is_a_usage_error(values: tuple[int, int, int, int | None], where: str) -> None:
    with pytest.raises(UsageError) as error:
        Policy(*values)
    assert error.value.where == where


def test_memory_stays_bounded_while_requests_come_and_are_cancelled() -> None:
    b: Batcher[int] = Batcher(Policy(8, 1, 8))
    b.arrive(-1, 0, deadline_ns=1_000_000)
    tracemalloc.start()
    for n in range(5_000):
        b.arrive(n, n, deadline_ns=2_000_000)
        b.cancel(n, n)
    grown_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert b.counts.waiting == 1
    assert grown_bytes < 64 * 1024  # every deadline kept would be ten times that


def test_sweeping_stale_deadlines_keeps_the_live_ones_in_order() -> None:
    b: Batcher[int] = Batcher(Policy(256, 1, 256))
    deadline_ns = {n: 1_000 + 17 * n % 101 for n in range(1, 101)}  # each value once, in no order
    for n, at_ns in deadline_ns.items():
        b.arrive(n, 0, deadline_ns=at_ns)
    for n in range(1_000, 1_400):
        b.arrive(n, 1, deadline_ns=1_000 + 29 * n % 103)
        b.cancel(n, 1)
    assert b.next_wake_ns == 1_001
    assert b.tick(2_000) == tuple(Expire(n) for n in sorted(deadline_ns, key=deadline_ns.__getitem__))


def test_a_request_that_is_over_is_not_kept_alive() -> None:
    class Request:
        pass

    b: Batcher[Request] = Batcher(Policy(2, 1, 2))
    dropped, answered, fellow = Request(), Request(), Request()
    b.arrive(dropped, 0, deadline_ns=100)
    b.cancel(dropped, 1)
    b.arrive(answered, 2, deadline_ns=100)
    b.arrive(fellow, 3)
    b.flight_done(0, 4)
    ghosts = [weakref.ref(dropped), weakref.ref(answered)]
    del dropped, answered
    gc.collect()
    assert [ghost() for ghost in ghosts] == [None, None]
