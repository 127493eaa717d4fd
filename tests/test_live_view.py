"""What a proxy and long commands show of themselves: in a real terminal, in a pipe, and when they are quiet."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest

from b2gmodel.cli import live_view
from b2gmodel.cli.live_view import _PlainView, facts, figures, progress_view, sparkline
from b2gmodel.flights import ExchangeTimes, Flight
from b2gmodel.live.client import Client
from b2gmodel.live.fake import Delays, FakeModel, FakeScript, FakeServer, FakeTensor
from b2gmodel.live.latest import Latest, tell, told_to
from b2gmodel.live.observer import Outcome, Snapshot
from b2gmodel.live.pulse import Binds, Pulse, Vitals, what_binds
from b2gmodel.live.windows import Window, WindowMatcher

MS = 1_000_000
PATIENCE_S = 60
X = np.zeros((4, 3), np.float32)
NONE_ENDED = dict.fromkeys(Outcome, 0)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDDEN, SHOWN = "\x1b[?25l", "\x1b[?25h"


def snapshot(**changed: object) -> Snapshot:
    zero: dict[str, object] = dict.fromkeys(Snapshot.__slots__, 0)
    zero |= {"outcomes": NONE_ENDED, "batch_sizes": {}, "flights_limit": 2}
    return Snapshot(**(zero | changed))  # type: ignore[arg-type]


def flight(cycle_ns: int, failed: bool = False) -> Flight:
    return Flight(1, 8, 0, 0, ExchangeTimes(), cycle_ns, failed)


def a_pulse(instances: int | None = 1) -> Pulse:
    return Pulse(WindowMatcher(lambda _: None), instances, 64, now_ns=0)


class TestWhatBinds:
    @pytest.mark.parametrize(
        ("queue", "flights", "limit", "busy", "binds"),
        [
            (0.0, 0.0, 2, 0.0, Binds.NOTHING),
            (4.0, 1.0, 2, 0.5, Binds.CALLERS),
            (4.0, 1.0, 2, None, Binds.CALLERS),
            (0.0, 2.0, 2, 0.5, Binds.CALLERS),
            (0.0, 1.0, 2, 0.95, Binds.COMPUTE),
            (4.0, 2.0, 2, 0.95, Binds.COMPUTE),
            (4.0, 1.9, 2, 0.4, Binds.TRANSPORT),
            (4.0, 1.9, 2, None, Binds.FLIGHTS),
        ],
    )
    def test_by_hand(self, queue: float, flights: float, limit: int, busy: float | None, binds: Binds) -> None:
        assert what_binds(queue, flights, limit, busy) is binds


class TestPulse:
    def test_a_second_by_hand(self) -> None:
        """Ten batches of 8 with C = 150 ms and S = 60 ms in one second: 1.5 flights, an instance busy for 0.6."""
        pulse = a_pulse()
        for _ in range(10):
            pulse.flight_done(flight(150 * MS))
        pulse.flight_done(flight(999 * MS, failed=True))
        asyncio.run(pulse.record(Window(8, 10, 600 * MS, 1500 * MS)))
        outcomes = NONE_ENDED | {Outcome.ANSWERED: 80, Outcome.BUSY: 3, Outcome.UPSTREAM: 8}
        seen = pulse.read(1000 * MS, snapshot(outcomes=outcomes, queue_depth=5))
        assert (seen.throughput_per_s, seen.flights, seen.queue) == (80.0, 1.5, 5)
        assert (seen.cycle_s, seen.service_s, seen.transport_s, seen.busy) == (0.15, 0.06, 0.09, 0.6)
        assert (seen.transport_share, seen.outcomes, seen.binds) == (0.6, outcomes, Binds.CALLERS)
        # Three seconds on, that first one is no longer among the last ones.
        assert pulse.read(2000 * MS, snapshot(outcomes=outcomes)).throughput_per_s == 40.0
        later = pulse.read(4000 * MS, snapshot(outcomes=outcomes))
        assert (later.throughput_per_s, later.flights, later.cycle_s, later.service_s) == (0.0, 0.0, None, 0.06)
        assert later.binds is Binds.NOTHING

    def test_sizes_of_a_window_count_by_their_executions(self) -> None:
        pulse = a_pulse()
        for window in (Window(8, 9, 90 * MS, 180 * MS), Window(1, 1, 0, 20 * MS)):
            asyncio.run(pulse.record(window))
        seen = pulse.read(1000 * MS, snapshot())
        assert (seen.service_s, seen.transport_s) == (0.009, 0.011)

    def test_a_flight_longer_than_the_span_is_one_in_use(self) -> None:
        seen = a_pulse().read(9000 * MS, snapshot(flights_in_use=2, queue_depth=3))
        assert (seen.flights, seen.cycle_s, seen.binds) == (2, None, Binds.FLIGHTS)

    def test_cycles_begun_before_the_span_are_no_more_than_all_flights(self) -> None:
        pulse = a_pulse()
        pulse.flight_done(flight(9000 * MS))
        assert pulse.read(1000 * MS, snapshot()).flights == 2

    def test_missing_is_a_dash(self) -> None:
        assert dict(facts(a_pulse(None).read(1, snapshot())))["S"] == "-"


class TestWords:
    def test_a_sparkline(self) -> None:
        assert sparkline(iter([0.0, 50.0, 100.0])) == "▁▅█"
        assert sparkline(iter([0.0, 0.0])) == "▁▁"

    def test_figures_on_a_line(self) -> None:
        known = Latest(120, 1, 71.24, 0.0276, 0.0613)
        assert figures(known) == "120 cycles, M = 1, X 71.2 request/s, S 27.6 ms, D 61.3 ms"
        assert figures(Latest(throughput_per_s=3.0)) == "X 3.0 request/s"
        assert figures(Latest()) == ""

    def test_a_pipe_gets_a_line_while_something_happens(self, capsys: pytest.CaptureFixture[str]) -> None:
        view = _PlainView()
        idle = Vitals(0, 64, 0.0, 2, 0.0, None, None, None, None, NONE_ENDED, Binds.NOTHING)
        some = NONE_ENDED | {Outcome.ANSWERED: 900, Outcome.BUSY: 2}
        busy = Vitals(3, 64, 1.9, 2, 500.0, 0.02, 0.014, 0.006, 0.7, some, Binds.TRANSPORT)
        over = Vitals(0, 64, 0.0, 2, 0.0, None, None, None, None, some, Binds.NOTHING)
        for vitals in (idle, busy, over, over):
            view(vitals)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 2
        assert lines[0] == (
            "  X 500.0 request/s; queue 3 of 64; flights 1.9 of 2; C 20 ms; S 14 ms, instances 70% busy; "
            "D 6 ms, 30% of C; ended 900 answered, 2 busy; binds transport: compute idles, raise M"
        )

    def test_the_time_left_is_said_once_a_tenth_is_done(self, capsys: pytest.CaptureFixture[str]) -> None:
        with progress_view() as view:
            for stage, share in (("a", 0.09), ("b", 0.10)):
                view(stage, share)
        early, later = capsys.readouterr().err.splitlines()
        assert ("left" in early, "left" in later) == (False, True)

    def test_a_pipe_gets_a_line_a_stage_with_the_figures_of_the_last(self, capsys: pytest.CaptureFixture[str]) -> None:
        with progress_view() as view, told_to(view.tell):
            view("one", 0.0)
            tell(Latest(40, 2, 9.0))
            view("one", 0.01)
            view("two", 0.02)
            view("three", 0.02)
        tell(Latest(41, 2, 9.0))  # nobody listens any more
        assert capsys.readouterr().err.splitlines() == [
            "    0%  one",
            "    2%  two; last: 40 cycles, M = 2, X 9.0 request/s",
            "    2%  three",
        ]


def test_a_watcher_that_takes_nothing_holds_up_nobody() -> None:
    """As a terminal stopped with Ctrl-S does."""
    free, begun, seen = threading.Event(), threading.Event(), []

    def stuck(vitals: Vitals) -> None:
        begun.set()
        free.wait(PATIENCE_S)
        seen.append(vitals.queue)

    with live_view._apart(stuck) as hand_over:
        for number in range(5):
            hand_over(Vitals(number, 64, 0.0, 2, 0.0, None, None, None, None, NONE_ENDED, Binds.NOTHING))
            assert begun.wait(PATIENCE_S)
        free.set()
    assert seen == [0, 1]


class Shown:
    """A running command whose standard error is a terminal, and all that it has written there."""

    def __init__(self, process: subprocess.Popen[str], terminal: int) -> None:
        self.process, self.terminal = process, terminal
        self.raw = ""

    def first_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def until(self, pattern: str) -> re.Match[str]:
        """Read on until this was shown."""
        while not (found := re.search(pattern, ANSI.sub("", self.raw), re.DOTALL)):
            ready, _, _ = select.select([self.terminal], [], [], PATIENCE_S)
            assert ready, f"{pattern!r} was not shown: {self.raw[-500:]!r}"
            self.raw += os.read(self.terminal, 65536).decode()
        return found

    def end(self, number: signal.Signals | None = None) -> int:
        """Its exit code, and the rest of what it showed."""
        if number is not None:
            self.process.send_signal(number)
        try:
            while data := os.read(self.terminal, 65536):
                self.raw += data.decode()
        except OSError:
            pass  # the other end is closed
        return self.process.wait(PATIENCE_S)

    def assert_restored(self) -> None:
        """The cursor was hidden, and the last word on it is that it is shown."""
        assert self.raw.rindex(SHOWN) > self.raw.rindex(HIDDEN)


def shown(*arguments: str, **environment: str) -> AbstractContextManager[Shown]:
    return in_terminal("-m", "b2gmodel", *arguments, **environment)


@contextmanager
def in_terminal(*arguments: str, **environment: str) -> Iterator[Shown]:
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=inner,
        text=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80"} | environment,
    )
    os.close(inner)
    try:
        yield Shown(process, outer)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        os.close(outer)


@contextmanager
def served(fake: FakeServer, *options: str, **environment: str) -> Iterator[tuple[Shown, str]]:
    """A proxy in a terminal, and its address."""
    with shown("serve", "--url", f"http://{fake.address}", "--model", "m", "-k", "2", *options, **environment) as it:
        line = it.first_line()
        yield it, line.removeprefix("listening: ").strip()


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    model = FakeModel("m", inputs=(FakeTensor("x", "FP32", (4, 3)),), delays=Delays(compute_infer_base_ns=5 * MS))
    with FakeServer.start(FakeScript((model,))) as it:
        yield it


@contextmanager
def callers(place: str, count: int) -> Iterator[None]:
    host, port = place.rsplit(":", 1)
    stop = threading.Event()

    def call() -> None:
        with Client(host, int(port), timeout_s=PATIENCE_S) as client:
            while not stop.is_set():
                client.infer("m", {"x": X})

    threads = [threading.Thread(target=call) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


FRAME = (
    r"X +\d+\.\d request/s.*queue +\d+ of 256.*flights +\d\.\d of 1.*C +[\d.]+ ms.*S +[\d.]+ ms, instances \d+% busy.*"
    r"D +-?[\d.]+ [mu]s, -?\d+% of C.*ended +\d+ answered.*binds +(compute|transport|callers)"
)


class TestServe:
    def test_it_shows_all_and_leaves_the_terminal_as_it_was(self, fake: FakeServer) -> None:
        with served(fake) as (proxy, place):
            with callers(place, 4):
                proxy.until(FRAME)
            assert proxy.end(signal.SIGTERM) == 0
            assert proxy.process.stdout is not None
            rest = proxy.process.stdout.read()
        proxy.assert_restored()
        assert rest.splitlines()[0].startswith("  model    m,")
        assert "served: " in rest
        assert "listening" not in proxy.raw
        assert "\x1b" not in rest

    def test_forty_columns_hold_it(self, fake: FakeServer) -> None:
        with served(fake, COLUMNS="40", NO_COLOR="1") as (proxy, place), callers(place, 4):
            proxy.until(FRAME)
            assert max(map(len, ANSI.sub("", proxy.raw).replace("\r", "\n").split("\n"))) <= 40
            assert not re.search(r"\x1b\[3\dm", proxy.raw)

    def test_interrupted_it_is_left_as_it_was_too(self, fake: FakeServer) -> None:
        with served(fake) as (proxy, _):
            proxy.until(r"binds +nothing")
            assert proxy.end(signal.SIGINT) == 0
        proxy.assert_restored()

    @pytest.mark.parametrize("option", ["-q", "--json"])
    def test_quiet_is_silent(self, fake: FakeServer, option: str) -> None:
        with served(fake, option) as (proxy, _):
            assert proxy.end(signal.SIGTERM) == 0
        assert proxy.raw == ""

    def test_a_dumb_terminal_gets_lines(self, fake: FakeServer) -> None:
        with served(fake, TERM="dumb") as (proxy, place), callers(place, 2):
            proxy.until(r"  X [\d.]+ request/s; queue .*binds \w+: [^\n]*\n")
            assert "\x1b" not in proxy.raw

    def test_before_an_error_too(self) -> None:
        with shown("serve", "--url", "http://127.0.0.1:1", "--model", "m") as proxy:
            assert proxy.end() == 2
        proxy.assert_restored()
        assert "b2g: " in proxy.raw


class TestLoad:
    def load(self, place: str, *options: str) -> list[str]:
        return ["load", "--to", place, "--model", "m", "--shape", "x:4,3", "--clients", "4", *options]

    def test_stage_share_and_figures(self, fake: FakeServer) -> None:
        with served(fake, "-q") as (_, place), shown(*self.load(place, "--duration", "60s")) as load:
            load.until(r"load\s.*\d+%.*left.*X \d+\.\d request/s")
            assert load.end(signal.SIGINT) == 130
        load.assert_restored()

    def test_terminated_it_shows_the_cursor_again(self, fake: FakeServer) -> None:
        with served(fake, "-q") as (_, place), shown(*self.load(place, "--duration", "60s")) as load:
            load.until(r"X \d+\.\d request/s")
            assert load.end(signal.SIGTERM) == -signal.SIGTERM
        load.assert_restored()

    def test_quiet_is_silent(self, fake: FakeServer) -> None:
        with (
            served(fake, "-q") as (_, place),
            shown(*self.load(place, "--duration", "1s", "--warmup", "0s", "-q")) as load,
        ):
            assert load.end() == 0
        assert load.raw == ""


LONG_COMMAND = """
import asyncio
from b2gmodel.cli.output import progress_lines
from b2gmodel.live.latest import Latest, tell
from b2gmodel.live.run_loop import run_loop

async def work(progress):
    while True:
        tell(Latest(120, 1, 71.24, 0.0276, 0.0613))
        progress("calibrate m k=2 single-flight", 0.4)
        await asyncio.sleep(0.01)

with progress_lines(quiet=False) as progress:
    run_loop(work(progress))
"""


class TestLongCommand:
    def test_terminated_within_a_loop_it_shows_the_cursor_again(self) -> None:
        with in_terminal("-c", LONG_COMMAND) as command:
            command.until(
                r"calibrate m k=2 single-flight.* 40%.*left.*"
                r"120 cycles, M = 1, X 71.2 request/s, S 27.6 ms, D 61.3 ms"
            )
            assert command.end(signal.SIGTERM) == -signal.SIGTERM
        command.assert_restored()

    def test_an_exception_does_so_too(self) -> None:
        with in_terminal("-c", LONG_COMMAND.replace("await asyncio.sleep(0.01)", "1 / 0")) as command:
            assert command.end() == 1
        command.assert_restored()
        assert "ZeroDivisionError" in command.raw
