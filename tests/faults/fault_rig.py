"""How a fault test goes: callers keep a proxy busy, something is done to it or to its server, and the book is read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final

from fault_parts import NS, Book, Load, disagreements
from fault_targets import Served

from b2gmodel.live.run_loop import run_loop

LIMIT_S: Final = 120.0
SLACK_NS: Final = 2 * NS
"""How late an answer may be on a machine that does other things, too; the promise is the deadline."""
STEP_S: Final = 0.4
POLICY: Final = ("-k", "8", "-M", "4", "--queue", "256", "--formation-deadline", "1ms")


def run(test: Coroutine[Any, Any, None]) -> None:
    """The test, with a bound on its time."""

    async def bounded() -> None:
        async with asyncio.timeout(LIMIT_S):
            await test

    run_loop(bounded())


async def during(load: Load, act: Callable[[], Awaitable[object]]) -> Book:
    """The load's book, ``act`` done while it ran."""
    running = asyncio.create_task(load.run())
    try:
        await act()
    finally:
        load.stop()
        await asyncio.wait([running])
    return await running


async def results(load: Load) -> int:
    """Results in the next moment."""
    before = load.book.results
    await asyncio.sleep(STEP_S)
    return load.book.results - before


async def recovered(load: Load, before: int, within_s: float) -> None:
    """Wait until results come as they did before: a half is enough here, the benchmark states the rest."""
    ends_s = time.monotonic() + within_s
    while await results(load) < before / 2:
        assert time.monotonic() < ends_s, f"not back within {within_s:g} s: {load.book.told()}"


def check(book: Book, served: Served, *, errors: Iterable[str], slack_ns: int = SLACK_NS) -> dict[str, Any]:
    """Every request had its one end, no other error than these, the proxy counts the same; its last words."""
    assert book.faults(slack_ns) == []
    assert set(book.errors) <= set(errors), book.told()
    ended = served.end()
    assert served.complaints() == ""
    assert disagreements(book, [ended]) == []
    assert (ended["exit"], ended["finished"]) == (0, True)
    return ended
