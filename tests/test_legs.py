"""Legs of a cycle: hand-made integer stamps, with and without the server's marks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from b2gmodel.errors import EvidenceError
from b2gmodel.flights import Cycle, ExchangeTimes, Flight
from b2gmodel.legs import ServerMarks, split

TIMES = ExchangeTimes(send_begin_ns=110, send_end_ns=200, first_byte_ns=480, response_end_ns=500)
FLIGHT = Flight(0, 8, oldest_arrival_ns=90, sealed_ns=100, times=TIMES, delivered_ns=507, failed=False)
CYCLE = Cycle(FLIGHT, queue_ns=10, compute_input_ns=20, compute_infer_ns=150, compute_output_ns=5)
MARKS = ServerMarks(queue_start_ns=230, compute_start_ns=240, input_end_ns=260, output_start_ns=410, compute_end_ns=415)


def test_with_marks_each_leg_has_its_own_time() -> None:
    legs = split(CYCLE, MARKS)
    assert (legs.formation_wait_ns, legs.pack_ns, legs.send_ns, legs.server_receive_ns) == (10, 10, 90, 30)
    assert (legs.queue_ns, legs.compute_input_ns, legs.compute_infer_ns, legs.compute_output_ns) == (10, 20, 150, 5)
    assert (legs.return_ns, legs.unsplit_ns, legs.deliver_ns, legs.residual_ns) == (85, None, 7, 0)
    assert legs.cycle_ns == CYCLE.cycle_ns == 407


def test_without_marks_what_cannot_be_told_apart_is_absent() -> None:
    legs = split(CYCLE)
    assert (legs.server_receive_ns, legs.return_ns) == (None, None)
    assert legs.unsplit_ns == 30 + 85
    assert legs.cycle_ns == 407


def test_what_counters_and_marks_say_differently_is_the_signed_residual() -> None:
    legs = split(replace(CYCLE, compute_infer_ns=160), MARKS)
    assert legs.residual_ns == -10
    assert legs.cycle_ns == 407


def test_a_transport_that_does_not_know_when_it_had_sent() -> None:
    legs = split(replace(CYCLE, flight=replace(FLIGHT, times=replace(TIMES, send_end_ns=None))), MARKS)
    assert (legs.send_ns, legs.server_receive_ns) == (None, 120)
    assert legs.cycle_ns == 407


def test_the_answer_may_come_before_the_server_has_booked_its_end() -> None:
    assert split(CYCLE, replace(MARKS, compute_end_ns=505)).return_ns == -5


@pytest.mark.parametrize(
    ("cycle", "marks", "where"),
    [
        (replace(CYCLE, flight=replace(FLIGHT, times=ExchangeTimes())), None, "legs"),
        (replace(CYCLE, flight=replace(FLIGHT, sealed_ns=120)), None, "the proxy's stamps"),
        (CYCLE, replace(MARKS, compute_start_ns=229), "the server's marks after the proxy's send"),
        (CYCLE, replace(MARKS, queue_start_ns=109), "the server's marks after the proxy's send"),
        (CYCLE, replace(MARKS, output_start_ns=501, compute_end_ns=502), "the server's answer before"),
    ],
)
def test_moments_of_another_batch_or_clock_are_refused(cycle: Cycle, marks: ServerMarks | None, where: str) -> None:
    with pytest.raises(EvidenceError) as seen:
        split(cycle, marks)
    assert seen.value.where is not None
    assert seen.value.where.startswith(where)
