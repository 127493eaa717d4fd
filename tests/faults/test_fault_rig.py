"""The instrument of the fault tests, tried on a proxy that lies: each lie shows, by name, and honesty shows nothing."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fault_parts import NS, Book, Load, disagreements, of_fake
from fault_rig import run

from b2gmodel.live.wire import (
    FROM_CLIENT,
    Datatype,
    ErrorCode,
    Failure,
    FrameReader,
    Request,
    Result,
    TensorSpec,
    encode,
)

OUTPUT = TensorSpec("fake_output", Datatype.UINT64, (1,), 8)
REQUESTS = 60


@asynccontextmanager
async def liar(lie: str) -> AsyncIterator[tuple[str, int]]:
    """A proxy that answers two requests at a time, every tenth pair as ``lie`` has it."""

    async def serve(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader = FrameReader(lambda head: memoryview(bytearray(head.payload_bytes)), accepts=FROM_CLIENT)
        pair: list[tuple[int, bytes]] = []
        pairs = 0
        while data := await stream.read(65536):
            for frame in reader.feed(data):
                assert isinstance(frame.message, Request)
                pair.append((frame.message.request_id, of_fake(bytes(frame.payload or b""))))
                if len(pair) < 2:
                    continue
                (first, one), (second, two) = pair
                pair, pairs = [], pairs + 1
                answers = [(first, one), (second, two)]
                if pairs % 10 == 0:
                    if lie == "swap":
                        answers = [(first, two), (second, one)]
                    elif lie == "lose":
                        answers.pop()
                    elif lie == "double":
                        answers.append((first, one))
                    elif lie == "delay":
                        await asyncio.sleep(0.3)
                    elif lie == "cut":
                        writer.close()
                        return
                    elif lie == "fail":
                        writer.writelines(encode(Failure(first, ErrorCode.UPSTREAM, "no")))
                        answers.pop(0)
                for request_id, body in answers:
                    writer.writelines(encode(Result(request_id, (OUTPUT,)), [body]))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[:2]
        server.close()


async def book_of(lie: str, *, patience_s: float = 0.3, **options: Any) -> Book:
    async with liar(lie) as place:
        return await Load(place, callers=1, depth=4, **options).run(requests=REQUESTS, patience_s=patience_s)


@pytest.mark.parametrize(
    ("lie", "found"),
    [
        ("", []),
        ("fail", []),
        ("cut", []),
        ("swap", ["6 results went to another's request"]),
        ("double", ["3 answers to no open request"]),
        ("lose", ["3 lost"]),
    ],
)
def test_each_lie_is_found_by_name(lie: str, found: list[str]) -> None:
    async def test() -> None:
        book = await book_of(lie)
        assert book.faults(NS) == found
        assert book.sent == REQUESTS == book.results + book.errors.total() + book.lost
        assert set(book.errors) == {"fail": {"upstream"}, "cut": {"connection_lost"}}.get(lie, set())

    run(test())


def test_what_comes_after_its_deadline_is_found() -> None:
    async def test() -> None:
        book = await book_of("delay", patience_s=10, deadline_s=0.05)
        (words,) = book.faults(NS // 10)
        assert re.fullmatch(
            r"an answer \(result\) came \d+ ms after its deadline; the callers stood still for .*", words
        )
        assert book.faults(10 * NS) == []

    run(test())


def test_callers_that_stood_still_say_so() -> None:
    async def test() -> None:
        load = Load(("127.0.0.1", 1), callers=1)
        running = asyncio.ensure_future(load.run())
        await asyncio.sleep(0.05)
        time.sleep(0.3)  # the loop stands still
        await asyncio.sleep(0.05)
        load.stop()
        book = await running
        assert 0.25 * NS < book.lag_ns < 0.6 * NS

    run(test())


@pytest.mark.parametrize(
    ("change", "agree"),
    [
        ({}, True),
        ({"received": 9}, False),
        ({"open": 1}, False),
        ({"outcomes": {"answered": 9, "upstream": 1}}, False),
        ({"outcomes": {"answered": 7, "upstream": 2, "busy": 1}}, False),
    ],
)
def test_counts_that_differ_by_one_do_not_agree(change: dict[str, Any], agree: bool) -> None:
    book = Book(sent=10, results=8)
    book.errors["upstream"] = 2
    told = {"received": 10, "open": 0, "outcomes": {"answered": 8, "upstream": 2}} | change
    assert (disagreements(book, [told]) == []) is agree


def test_what_ended_with_its_connection_is_all_that_may_differ() -> None:
    book = Book(sent=10, results=7, left=1)
    book.errors.update({"connection_lost": 1, "connection_draining": 1})
    for answered in (7, 8, 9, 10):
        assert disagreements(book, [{"received": answered, "open": 0, "outcomes": {"answered": answered}}]) == []
    assert disagreements(book, [{"received": 11, "open": 0, "outcomes": {"answered": 11}}]) != []
    assert disagreements(book, [{"received": 6, "open": 0, "outcomes": {"answered": 6}}]) != []
