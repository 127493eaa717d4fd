"""The instrument's test of itself: it passes on the instrument as it is, and fails where a leg is booked wrongly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from b2gmodel.errors import EvidenceError
from b2gmodel.flights import Cycle
from b2gmodel.legs import Legs, ServerMarks, split
from b2gmodel.live import self_test as module
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.self_test import self_test, within_bound
from b2gmodel.records import SelfTestLeg


def test_each_delay_comes_back_in_its_leg(monkeypatch: pytest.MonkeyPatch) -> None:
    # The bound itself is for a quiet machine (benchmarks/instrument.py); here, that the delay is in the right leg.
    monkeypatch.setattr(module, "_BOUND_S", 0.01)
    found = run_loop(self_test((0.02,), 5))
    assert [leg.leg.split()[0] for leg in found] == [
        "send", "server_receive", "queue", "compute_input", "compute_infer", "compute_output", "return", "return",
    ]  # fmt: skip


def test_an_instrument_that_books_wrongly_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(cycle: Cycle, marks: ServerMarks | None = None) -> Legs:
        legs = split(cycle, marks)
        return replace(legs, queue_ns=0)

    monkeypatch.setattr(module, "_BOUND_S", 0.01)
    monkeypatch.setattr(module, "split", wrong)
    with pytest.raises(EvidenceError, match="the self-test failed: a delay in queue"):
        run_loop(self_test((0.02,), 3))


@pytest.mark.parametrize(
    ("injected_s", "recovered_s", "good"),
    [
        (0.002, 0.0023, True),
        (0.002, 0.00231, False),
        (0.05, 0.051, True),
        (0.05, 0.0511, False),
        (0.05, 0.0489, False),
    ],
)
def test_the_bound(injected_s: float, recovered_s: float, good: bool) -> None:
    assert within_bound(SelfTestLeg(leg="send", injected_s=injected_s, recovered_s=recovered_s)) is good
