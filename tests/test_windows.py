"""S and D from the server's counters: hand-traced windows, each reason for none, and any order of events."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from b2gmodel.live.kserve import BatchCounters, ModelCounters
from b2gmodel.live.windows import Skip, Window, WindowMatcher


def counters(**by_size: tuple[int, int]) -> ModelCounters:
    """``k4=(executions, service_ns)`` for batches of 4."""
    batches = {int(name[1:]): BatchCounters(n, 0, ns, 0) for name, (n, ns) in by_size.items()}
    return ModelCounters(sum(each.executions for each in batches.values()), 0, 0, batches)


class Rig:
    def __init__(self, **start: tuple[int, int]) -> None:
        self.closed: list[Window] = []
        self.matcher = WindowMatcher(self.closed.append, patience=2)
        self.read(**start)

    def read(self, *meanwhile: tuple[int, int], **by_size: tuple[int, int]) -> None:
        self.matcher.begin_reading()
        self.fly(*meanwhile)
        self.matcher.end_reading(counters(**by_size))

    def fly(self, *flights: tuple[int, int]) -> None:
        for size, cycle_ns in flights:
            self.matcher.flight(size, cycle_ns)


def test_a_window_is_what_was_added_since_the_one_before() -> None:
    rig = Rig(k4=(100, 900))
    rig.fly((4, 30), (4, 50))
    rig.read(k4=(102, 960))
    rig.fly((4, 100), (2, 7))
    rig.read(k4=(103, 970), k2=(1, 9))
    assert rig.closed == [Window(4, 2, 60, 80), Window(2, 1, 9, 7), Window(4, 1, 10, 100)]
    assert [each.mean_transport_ns for each in rig.closed] == [10, -2, 90]
    assert [each.mean_service_ns for each in rig.closed] == [30, 9, 10]
    assert rig.matcher.skipped == {}


def test_flights_that_were_booked_and_not_delivered_are_waited_for() -> None:
    rig = Rig()
    rig.fly((4, 30))
    rig.read((4, 31), k4=(3, 60))
    assert rig.closed == []
    rig.fly((4, 32))
    assert rig.closed == [Window(4, 3, 60, 93)]


def test_flights_delivered_while_the_counters_came_may_be_the_next_windows() -> None:
    rig = Rig()
    rig.fly((4, 30))
    rig.read((4, 31), (4, 32), k4=(2, 40))
    assert rig.closed == [Window(4, 2, 40, 61)]
    rig.read(k4=(3, 50))
    assert rig.closed[1:] == [Window(4, 1, 10, 32)]


def test_a_flight_booked_after_its_delivery_carries_the_window_on() -> None:
    rig = Rig()
    rig.fly((4, 30), (4, 30))
    rig.read(k4=(1, 20))
    rig.read(k4=(2, 40))
    assert rig.closed == [Window(4, 2, 40, 60)]
    assert rig.matcher.skipped == {}


def test_executions_of_somebody_else_end_the_window_and_counting_starts_afresh() -> None:
    rig = Rig()
    rig.fly((4, 30))
    rig.read(k4=(2, 40))
    rig.read(k4=(2, 40))
    rig.read(k4=(2, 40))
    assert (rig.closed, rig.matcher.skipped) == ([], {Skip.UNMATCHED: 2})
    rig.fly((4, 33))
    rig.read(k4=(3, 60))
    assert rig.closed == [Window(4, 1, 20, 33)]


def test_batches_that_the_server_forms_itself_never_match() -> None:
    rig = Rig()
    rig.fly((1, 30), (1, 30))
    for _ in range(3):
        rig.read(k2=(1, 20))
    assert (rig.closed, rig.matcher.skipped) == ([], {Skip.UNMATCHED: 2})


@pytest.mark.parametrize("after", [(4, 900), (6, 890), (6, (1 << 64) - 5), (0, 0)])
def test_counters_that_lost_something_are_no_evidence(after: tuple[int, int]) -> None:
    rig = Rig(k4=(5, 900))
    rig.fly((4, 30))
    rig.read(k4=after)
    assert (rig.closed, rig.matcher.skipped) == ([], {Skip.BACKWARDS: 1})
    rig.fly((4, 30))
    rig.read(k4=(after[0] + 1, after[1] + 20))
    assert rig.closed == [Window(4, 1, 20, 30)]


def test_counters_of_a_batch_size_that_vanish_have_run_backwards() -> None:
    rig = Rig(k4=(5, 900))
    rig.read(k2=(1, 10))
    assert rig.matcher.skipped == {Skip.BACKWARDS: 1}


def test_nothing_ran() -> None:
    rig = Rig(k4=(5, 900))
    rig.read(k4=(5, 900))
    assert (rig.closed, rig.matcher.skipped) == ([], {Skip.IDLE: 1})


def test_a_reading_that_failed_loses_no_flight() -> None:
    rig = Rig()
    rig.fly((4, 30))
    rig.matcher.begin_reading()
    rig.fly((4, 31))
    rig.matcher.end_reading(None)
    rig.read(k4=(2, 40))
    assert rig.closed == [Window(4, 2, 40, 61)]
    assert rig.matcher.skipped == {Skip.UNREADABLE: 1}


@settings(max_examples=300, deadline=None)
@given(
    flights=st.integers(1, 4),
    events=st.lists(st.sampled_from(["launch", "book", "deliver", "begin", "look", "end"]), max_size=200),
    sizes=st.randoms(use_true_random=False),
)
def test_any_order_of_events_pairs_each_execution_with_its_own_cycle(flights, events, sizes) -> None:  # type: ignore[no-untyped-def]
    """Launch, book and deliver in turn, readings at any moment: a window's D is that of its own flights."""
    closed: list[Window] = []
    matcher = WindowMatcher(closed.append, patience=1000)
    matcher.begin_reading()
    matcher.end_reading(counters())
    launched: deque[int] = deque()
    booked: deque[int] = deque()
    order: dict[int, list[int]] = {1: [], 2: []}  # each size's flights by number, as they were booked
    server, seen, phase, number = dict.fromkeys((1, 2), 0), None, "begin", 0
    service, cycle = (lambda n: 2 ** (n % 60)), (lambda n: 3 * 2 ** (n % 60))
    size_of: dict[int, int] = {}
    for event in events:
        if event == "launch" and len(launched) + len(booked) < flights:
            size_of[number] = sizes.choice((1, 2))
            launched.append(number)
            number += 1
        elif event == "book" and launched:
            booked.append(launched.popleft())
            order[size_of[booked[-1]]].append(booked[-1])
            server[size_of[booked[-1]]] += service(booked[-1])
        elif event == "deliver" and booked:
            done = booked.popleft()
            matcher.flight(size_of[done], cycle(done))
        elif event == phase == "begin":
            matcher.begin_reading()
            phase = "look"
        elif event == phase == "look":
            seen, phase = counters(**{f"k{size}": (len(order[size]), server[size]) for size in (1, 2)}), "end"
        elif event == phase == "end":
            matcher.end_reading(seen)
            phase = "begin"
    for size in (1, 2):
        mine = iter(order[size])
        for window in (each for each in closed if each.size == size):
            members = [next(mine) for _ in range(window.executions)]
            assert window.service_ns == sum(map(service, members))
            assert window.cycle_ns == sum(map(cycle, members))
