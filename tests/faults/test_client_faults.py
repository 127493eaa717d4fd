"""What clients can do: they harm themselves alone. Each manner alone: ``tests/test_proxy.py``, byte by byte."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import fields

import pytest
from fault_parts import Habits, Load, disagreements
from fault_rig import POLICY, SLACK_NS, check, during, recovered, results, run
from fault_targets import Fake, Served, fake_model

from b2gmodel.live.fake import FakeScript


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    with Fake(FakeScript((fake_model(),))) as server:
        yield server


@pytest.mark.parametrize("manner", [field.name for field in fields(Habits)])
def test_an_odd_client_costs_an_honest_one_nothing(fake: Fake, manner: str) -> None:
    async def test() -> None:
        with Served(fake.address, *POLICY, "--queue", "512") as it:
            odd = Load(it.place, callers=4, habits=Habits(**{manner: 0.1}), seed=3)
            honest = Load(it.place, callers=4, first_client=100)

            async def act() -> None:
                book = await odd.run(requests=800)
                assert book.faults(SLACK_NS) == []
                assert set(book.errors) <= ({"cancelled"} if manner == "withdraw" else set())
                assert bool(book.left) is (manner in {"leave", "half"})

            book = await during(honest, act)
            assert book.faults(SLACK_NS) == []
            assert book.results == book.sent > 0
            book.add(odd.book)
            ended = it.end()
            assert disagreements(book, [ended]) == []
            assert (ended["exit"], ended["open"], it.complaints()) == (0, 0, "")

    run(test())


def test_frames_that_never_get_whole_end_by_their_time(fake: Fake) -> None:
    async def test() -> None:
        with Served(fake.address, *POLICY, "--frame-timeout", "400ms") as it:
            load = Load(it.place)

            async def act() -> None:
                before = await results(load)
                stuck = [socket.create_connection(it.place) for _ in range(20)]
                for sock in stuck:
                    sock.sendall(b"B2GW\x01\x01")
                    sock.settimeout(5)
                ends = [await asyncio.to_thread(sock.recv, 4096) for sock in stuck]
                assert all(b"the frame was not whole after 0.4 s" in end for end in ends)
                for sock in stuck:
                    sock.close()
                await recovered(load, before, within_s=5)

            ended = check(await during(load, act), it, errors=())
            assert ended["protocol_errors"] == 20

    run(test())
