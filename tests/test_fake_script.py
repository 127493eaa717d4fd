"""The fake server's script: exact through JSON, impossible values refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_client import MODEL, SCRIPT

from b2gmodel.errors import UsageError
from b2gmodel.live.fake import (
    Delays,
    FakeModel,
    FakeScript,
    FakeTensor,
    Fault,
    FaultKind,
)


class TestScript:
    def test_survives_json(self) -> None:
        script = FakeScript(
            (replace(MODEL, instances=2, delays=Delays(queue_delay_ns=5)),),
            (Fault(FaultKind.STATUS, at=(1, 3), status=503), Fault(FaultKind.WRONG_ID, probability=0.25)),
            seed=9,
            accept=False,
            receive_buffer_bytes=4096,
        )
        assert FakeScript.from_json(script.to_json()) == script
        assert "\n" not in script.to_json()

    @pytest.mark.parametrize(
        ("text", "where"),
        [
            ("", "script"),
            ("{}", "models"),
            ('{"models": [], "sed": 1}', "sed"),
            (
                '{"models": [{"name": "m", "inputs": [], "delays": {"queue_ns": 1}}]}',
                "models.0.delays.queue_ns",
            ),
        ],
    )
    def test_bad_json_names_the_field(self, text: str, where: str) -> None:
        with pytest.raises(UsageError) as caught:
            FakeScript.from_json(text)
        assert caught.value.where == where

    @pytest.mark.parametrize(
        "make",
        [
            lambda: Delays(queue_delay_ns=-1),
            lambda: FakeTensor("x", "FP31", (1,)),
            lambda: FakeTensor("x", "FP32", (0,)),
            lambda: FakeTensor("x", "FP32", ()),
            lambda: FakeModel("m", ()),
            lambda: replace(MODEL, instances=0),
            lambda: replace(MODEL, max_batch=-1),
            lambda: replace(MODEL, inputs=(FakeTensor("x", "BYTES", (1,)),)),
            lambda: replace(MODEL, outputs=(FakeTensor("y", "FP32", (-1,)),)),
            lambda: FakeScript((MODEL, MODEL)),
            lambda: replace(SCRIPT, receive_buffer_bytes=0),
            lambda: Fault(FaultKind.STATUS),
            lambda: Fault(FaultKind.STATUS, at=(1,), probability=0.5),
            lambda: Fault(FaultKind.STATUS, at=(0,)),
            lambda: Fault(FaultKind.STATUS, probability=1.5),
            lambda: Fault(FaultKind.STATUS, at=(1,), status=200),
            lambda: Fault(FaultKind.COUNTERS_LATE, at=(1,), lag_ns=-1),
        ],
    )
    def test_impossible_values(self, make: Any) -> None:
        with pytest.raises(UsageError):
            make()
