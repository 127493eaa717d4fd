"""Where a cycle's time goes: its legs, from the proxy's stamps and from what the server says.

No clock and no I/O. All times are integer nanoseconds of one monotonic clock. The server's counters give durations
(queue, compute input, infer, output); its trace, or any other marks on the same clock, gives the moments between
them. Without marks two legs cannot be told apart, and are absent: ``unsplit`` holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from b2gmodel.errors import EvidenceError
from b2gmodel.flights import Cycle


@dataclass(frozen=True, slots=True)
class ServerMarks:
    """When a batch passed the server's stages, on the proxy's own clock."""

    queue_start_ns: int
    compute_start_ns: int
    input_end_ns: int
    output_start_ns: int
    compute_end_ns: int

    @property
    def service_ns(self) -> int:
        """S by the marks, to set against the counters'."""
        return self.compute_end_ns - self.compute_start_ns


@dataclass(frozen=True, slots=True)
class Legs:
    """One cycle, leg by leg, in the order in which they are passed.

    ``formation_wait_ns`` lies before the cycle, which begins with the seal, and is not part of its sum.
    ``unsplit_ns`` is server receive and return together, where no marks tell them apart; then those two are None.
    ``send_ns`` is None where the transport does not know when it had sent; the time is then in the next leg.
    ``residual_ns`` is the cycle less the sum of the legs, signed: what the counters say of the server's parts against
    what the marks say; zero by construction without marks.
    """

    formation_wait_ns: int
    pack_ns: int
    send_ns: int | None
    server_receive_ns: int | None
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int
    return_ns: int | None
    unsplit_ns: int | None
    deliver_ns: int
    residual_ns: int

    @property
    def cycle_ns(self) -> int:
        """Sum of all legs from the seal on, the residual included."""
        return sum(getattr(self, field.name) or 0 for field in fields(self) if field.name != "formation_wait_ns")


def split(cycle: Cycle, marks: ServerMarks | None = None) -> Legs:
    """The legs of one cycle.

    Args:
        cycle: the proxy's stamps and the server's counters for this batch.
        marks: the server's own moments for it; None where there are none.

    Raises:
        EvidenceError: stamps or marks are missing or out of order, so that they cannot be of one batch on one clock.
    """
    flight, times = cycle.flight, cycle.flight.times
    if times.send_begin_ns is None or times.response_end_ns is None:
        raise EvidenceError("the flight was not stamped from send to response", where="legs")
    begin_ns, end_ns = times.send_begin_ns, times.response_end_ns
    sent_ns = begin_ns if times.send_end_ns is None else times.send_end_ns
    _check_order(
        [flight.oldest_arrival_ns, flight.sealed_ns, begin_ns, sent_ns, end_ns, flight.delivered_ns],
        "the proxy's stamps",
    )
    receive_ns = return_ns = unsplit_ns = None
    if marks is None:
        unsplit_ns = end_ns - sent_ns - cycle.queue_ns - cycle.service_ns
    else:
        moments = [marks.queue_start_ns, marks.compute_start_ns, marks.input_end_ns, marks.output_start_ns]
        _check_order([begin_ns, *moments, marks.compute_end_ns], "the server's marks after the proxy's send")
        _check_order([marks.output_start_ns, end_ns], "the server's answer before the proxy's receipt of it")
        # Both signed: the server may queue a batch before we know that its last byte has gone, and it books some of
        # compute output after it has answered.
        receive_ns = marks.queue_start_ns - sent_ns
        return_ns = end_ns - marks.compute_end_ns
    legs = Legs(
        formation_wait_ns=flight.sealed_ns - flight.oldest_arrival_ns,
        pack_ns=begin_ns - flight.sealed_ns,
        send_ns=None if times.send_end_ns is None else sent_ns - begin_ns,
        server_receive_ns=receive_ns,
        queue_ns=cycle.queue_ns,
        compute_input_ns=cycle.compute_input_ns,
        compute_infer_ns=cycle.compute_infer_ns,
        compute_output_ns=cycle.compute_output_ns,
        return_ns=return_ns,
        unsplit_ns=unsplit_ns,
        deliver_ns=flight.delivered_ns - end_ns,
        residual_ns=0,
    )
    return replace(legs, residual_ns=cycle.cycle_ns - legs.cycle_ns)


def _check_order(moments: list[int], what: str) -> None:
    if moments != sorted(moments):
        raise EvidenceError(
            "moments out of order: they are not of one batch on one clock",
            observed=[later - moments[0] for later in moments],
            allowed="non-decreasing",
            where=what,
        )
