"""What can happen to the proxy itself, as a process on a machine that is short of something."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fault_parts import NS, Load, disagreements
from fault_rig import POLICY, SLACK_NS, check, during, recovered, results, run
from fault_targets import Fake, Served, fake_model, free_port

from b2gmodel.live.fake import FakeScript


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    with Fake(FakeScript((fake_model(),))) as server:
        yield server


def test_killed_and_started_again(fake: Fake) -> None:
    port = free_port()

    async def test() -> None:
        with Served(fake.address, *POLICY, port=port) as first:
            load = Load(first.place)

            async def act() -> None:
                before = await results(load)
                first.kill()
                with await asyncio.to_thread(Served, fake.address, *POLICY, port=port) as second:
                    await recovered(load, before, within_s=5)
                    load.stop()
                    await asyncio.sleep(0.1)
                    assert second.end()["exit"] == 0

            book = await during(load, act)
            assert book.faults(SLACK_NS) == []
            assert set(book.errors) <= {"connection_lost", "connection_draining", "draining"}
            assert 0 < book.errors["connection_lost"] <= 16 * load.depth

    run(test())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drained_under_load(fake: Fake, number: signal.Signals) -> None:
    """What waits and flies is answered; what comes meanwhile is told so; the counts of both sides agree."""

    async def test() -> None:
        with Served(fake.address, *POLICY) as it:
            load = Load(it.place)

            async def act() -> None:
                await results(load)
                it.process.send_signal(number)
                ended.update(await asyncio.to_thread(it.wait))

            ended: dict[str, object] = {}
            book = await during(load, act)
            assert book.faults(SLACK_NS) == []
            assert set(book.errors) <= {"draining", "connection_draining", "connection_lost"}, book.told()
            assert (ended["exit"], ended["finished"], ended["open"]) == (0, True, 0)
            assert disagreements(book, [ended]) == []

    run(test())


def test_two_on_one_port(fake: Fake) -> None:
    async def test() -> None:
        with Served(fake.address, *POLICY) as it:
            load = Load(it.place)

            async def act() -> None:
                await results(load)
                with await asyncio.to_thread(Served, fake.address, *POLICY, port=it.place[1]) as second:
                    assert second.first == {}
                    assert second.wait()["exit"] == 2
                    assert "cannot listen" in second.complaints()
                    assert second.complaints().count("\n") == 1

            check(await during(load, act), it, errors=())

    run(test())


def test_more_clients_than_it_serves(fake: Fake) -> None:
    """Those that are too many are told BUSY; those that were there first do not notice."""

    async def test() -> None:
        with Served(fake.address, *POLICY, "--connections", "8") as it:
            load = Load(it.place, callers=8)

            async def act() -> None:
                await results(load)
                crowd = await Load(it.place, callers=40, depth=1, first_client=100, pause_s=0.05).run(
                    requests=200, patience_s=5
                )
                assert crowd.results == 0
                assert crowd.faults(SLACK_NS) == []
                assert set(crowd.errors) <= {"connection_busy", "connection_lost"}
                assert crowd.errors["connection_busy"] > 0

            book = await during(load, act)
            assert book.faults(SLACK_NS) == []
            assert (book.errors.total(), it.end()["exit"]) == (0, 0)

    run(test())


def test_no_descriptor_left(fake: Fake) -> None:
    """New clients wait or are cut off, those that are served do not notice, and with descriptors there are clients."""

    async def test() -> None:
        with Served(fake.address, *POLICY) as it:
            load = Load(it.place)

            async def act() -> None:
                before = await results(load)
                limits = resource.prlimit(it.pid, resource.RLIMIT_NOFILE)
                used = len(os.listdir(f"/proc/{it.pid}/fd"))
                resource.prlimit(it.pid, resource.RLIMIT_NOFILE, (used + 2, limits[1]))
                # No more than it takes: each knocks in vain fifty times a second, which costs the others time.
                crowd = Load(it.place, callers=8, depth=1, first_client=100)

                async def starve() -> None:
                    assert await results(load) > before / 2
                    assert crowd.book.results < load.book.results
                    resource.prlimit(it.pid, resource.RLIMIT_NOFILE, limits)
                    served = crowd.book.results
                    await asyncio.sleep(1.5)
                    assert crowd.book.results > served
                    assert len(crowd._callers) == 8

                book = await during(crowd, starve)
                assert book.faults(SLACK_NS) == []
                assert set(book.errors) <= {"connection_lost"}

            book = await during(load, act)
            assert book.faults(SLACK_NS) == []
            assert book.errors.total() == 0
            assert it.end()["exit"] == 0

    run(test())


def test_fewer_descriptors_than_it_may_need(fake: Fake) -> None:
    with Served(fake.address, "--connections", "1000000", within=("prlimit", "--nofile=500:500")) as it:
        assert (it.first, it.wait()["exit"]) == ({}, 2)
        assert "more connections than this process may have files open" in it.complaints()


def test_descriptors_enough_for_those_that_are_turned_away(fake: Fake) -> None:
    """As many clients as it serves, and those that it still has to tell that they are too many."""
    own = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))"
    with Served(fake.address, *POLICY, "--connections", "256", prelude=own) as it:
        soft, _ = resource.prlimit(it.pid, resource.RLIMIT_NOFILE)
        used = len(os.listdir(f"/proc/{it.pid}/fd"))
        assert soft - used >= 256 + 32 + 32  # those, an eighth more that are being told, and some to spare
        socks = [socket.create_connection(it.place) for _ in range(288)]
        assert len(os.listdir(f"/proc/{it.pid}/fd")) < soft
        for sock in socks:
            sock.close()
        assert it.end()["exit"] == 0


def test_shared_memory_that_is_full(fake: Fake, tmp_path: Path) -> None:
    """In a mount namespace of its own, with a /dev/shm of 64 KiB: it says so and does not start."""
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    own = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--mount", "--map-root-user")
    options = ("--transport", "shm", "-k", "64", "-M", "4", "--queue", "65536")
    with Served(fake.address, *options, within=(*own, "sh", "-c", mount, "sh")) as it:
        end = it.wait()
        if "unshare" in it.complaints():
            pytest.skip("mount namespaces are not allowed here")
        assert (it.first, end["exit"]) == ({}, 2)
        assert "cannot take shared memory" in it.complaints()
        assert it.complaints().count("\n") == 1


STEPPED = """
import itertools, time
steps = itertools.cycle((0, 86_400, -86_400, 3_600))
wall, wall_ns, gettime, gettime_ns = time.time, time.time_ns, time.clock_gettime, time.clock_gettime_ns
time.time = lambda: wall() + next(steps)
time.time_ns = lambda: wall_ns() + next(steps) * 10**9
time.clock_gettime = lambda clock: gettime(clock) + next(steps) * (clock == time.CLOCK_REALTIME)
time.clock_gettime_ns = lambda clock: gettime_ns(clock) + next(steps) * 10**9 * (clock == time.CLOCK_REALTIME)
"""


def test_a_clock_that_is_stepped(fake: Fake) -> None:
    """The wall clock jumps by a day at each look: no deadline, timeout or formation time reads it."""

    async def test() -> None:
        options = (*POLICY, "--server-timeout", "2s", "--frame-timeout", "2s", "--idle-timeout", "5s")
        with Served(fake.address, *options, prelude=STEPPED) as it:
            book = await Load(it.place, deadline_s=2.0).run(requests=2_000)
            assert book.results == 2_000
            fake.pause()
            try:
                late = await Load(it.place, callers=2, deadline_s=0.3).run(requests=10)
            finally:
                fake.resume()
            assert late.errors["deadline"] > 0
            assert late.faults(SLACK_NS) == []
            assert late.slowest_ns >= 0.3 * NS
            with suppress(ProcessLookupError):
                assert it.end()["exit"] == 0
            assert it.complaints() == ""

    run(test())


def test_a_step_would_be_seen() -> None:
    """The control of the test above: what read the wall clock would see it run backwards."""
    names: dict[str, object] = {}
    source = STEPPED.replace("import itertools, time", "import itertools, types, time as real")
    exec(source.replace("steps =", "time = types.SimpleNamespace(**vars(real))\nsteps =", 1), names)
    seen = [names["time"].time() for _ in range(4)]  # type: ignore[attr-defined]
    assert max(seen) - min(seen) > 86_400
    assert seen != sorted(seen)
