"""The same promises before a real Triton, over each transport."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from importlib.util import find_spec

import pytest
from fault_parts import Load, of_triton
from fault_rig import POLICY, check, recovered, results, run
from fault_targets import Served, Triton

pytestmark = pytest.mark.real
TRANSPORTS = ("http", "grpc", "shm")


@pytest.fixture(autouse=True)
def _there() -> None:
    if find_spec("pytriton") is None:
        pytest.skip("the embedded server's wheel is not installed: pip install 'b2gmodel[triton]'")


def test_paused_killed_and_started_again() -> None:
    """One server, a proxy for each transport; each has the same callers, and each comes back by itself."""

    async def test() -> None:
        with Triton() as server, ExitStack() as stack:
            proxies = {
                name: stack.enter_context(
                    Served(server.address, *POLICY, *server.options, "--transport", name, "--server-timeout", "300ms")
                )
                for name in TRANSPORTS
            }
            loads = {
                name: Load(it.place, callers=4, depth=4, expected=of_triton, pause_s=0.02)
                for name, it in proxies.items()
            }
            running = {name: asyncio.ensure_future(load.run()) for name, load in loads.items()}

            async def all_recovered() -> None:
                for name, load in loads.items():
                    await recovered(load, before[name], within_s=10)

            async def all_failing() -> None:
                seen = {name: load.book.errors["upstream"] for name, load in loads.items()}
                await asyncio.sleep(0.8)
                assert all(load.book.errors["upstream"] > seen[name] for name, load in loads.items())

            counted = await asyncio.gather(*(results(load) for load in loads.values()))
            before = dict(zip(loads, counted, strict=True))
            assert all(before.values())
            server.pause()
            await all_failing()
            server.resume()
            await all_recovered()
            await asyncio.to_thread(server.kill)
            await all_failing()
            await asyncio.to_thread(server.start)
            await all_recovered()
            for name, load in loads.items():
                load.stop()
                check(await running[name], proxies[name], errors={"upstream"})

    run(test())
