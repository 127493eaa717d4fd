"""A fake server for tests of calibration and measurement: quick models, and how to reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from b2gmodel.live.fake import Delays, FakeModel, FakeScript, FakeServer, FakeTensor
from b2gmodel.live.target import Endpoint, RemoteTarget, parse_url

T = TypeVar("T")
TIMEOUT_S = 120
MS = 1_000_000

DELAYS = Delays(compute_input_ns=100_000, compute_infer_base_ns=500_000, compute_output_ns=50_000, receive_delay_ns=MS)
MODEL = FakeModel("m", inputs=(FakeTensor("x", "FP32", (4, 3)),), delays=DELAYS)
UNBATCHED = replace(MODEL, name="unbatched", max_batch=0)
OPEN = replace(MODEL, name="open", inputs=(FakeTensor("x", "FP32", (4, -1)), FakeTensor("mask", "BOOL", (-1,))))
ODD = replace(MODEL, name="an odd/../name")
SCRIPT = FakeScript((MODEL, UNBATCHED, OPEN, ODD))


def run(main: Coroutine[Any, Any, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(main, TIMEOUT_S)

    return asyncio.run(limited())


def renew(server: FakeServer, script: FakeScript = SCRIPT) -> FakeServer:
    """Script and counters as new: a script without the models drops their counters."""
    server.install(FakeScript(()))
    server.install(script)
    return server


def target_of(server: FakeServer) -> RemoteTarget:
    return parse_url(server.address)


def endpoint_of(server: FakeServer) -> Endpoint:
    target = target_of(server)
    return Endpoint(target.host, target.port, False, None)
