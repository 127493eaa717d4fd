"""What fault benchmarks and ``tests/faults`` share: a book of every request, and callers that keep it.

Rules: each request carries a payload of its own, and the result that belongs to it is known beforehand, so one that
went astray shows; each has exactly one end in the book, which says by name what is not as promised. Nothing here
knows how the proxy works inside.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast

from b2gmodel.live.wire import (
    FROM_PROXY,
    Buffer,
    Cancel,
    Datatype,
    Failure,
    Frame,
    FrameReader,
    Request,
    Result,
    TensorSpec,
    encode,
)
from b2gmodel.live.workloads import fingerprint

ROW: Final = struct.Struct("<QQ")
SPEC: Final = TensorSpec("input", Datatype.UINT8, (ROW.size,), ROW.size)
NS: Final = 1_000_000_000
_TICK_NS: Final = NS // 10
_MIX: Final = 0x9E3779B97F4A7C15
_RECONNECT_S: Final = 0.02
_LAG_STEP_NS: Final = NS // 50
_PATIENCE_S: Final = 30.0

Expected = Callable[[bytes], bytes]
"""How the result to a payload begins."""


def of_fake(payload: bytes) -> bytes:
    """What the fake answers."""
    return payload[:8]


def of_triton(payload: bytes) -> bytes:
    """What the emulated workloads answer."""
    return fingerprint(payload)


# the book


@dataclass(slots=True)
class Book:
    """Every request of a load, and how it ended.

    Attributes:
        sent: always ``results + errors + left + lost``.
        results: results that came, those in ``wrong`` among them.
        errors: typed errors by name; ``connection_lost`` where the connection ended with the request open, and
            ``connection_busy`` and the like where the proxy ended it and said why.
        left: open when their own caller went away.
        lost: without an end at the end of the load, though their connection stood.
        wrong: results that belong to another payload.
        twice: answers to no open request.
        latest_ns: how far the latest answer came after its deadline; None where all were in time.
        latest_name: what answer that was.
        lag_ns: the longest that the callers' own loop stood still. It excuses nothing, and says where to look.
        slowest_ns: longest time from sending to the end.
        ticks: results by the tenth of a second in which they came.
    """

    expected: Expected = of_fake
    sent: int = 0
    results: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    left: int = 0
    lost: int = 0
    wrong: int = 0
    twice: int = 0
    latest_ns: int | None = None
    latest_name: str = ""
    lag_ns: int = 0
    slowest_ns: int = 0
    ticks: Counter[int] = field(default_factory=Counter)

    def result(self, payload: bytes, answer: bytes, waited_ns: int, deadline_ns: int | None) -> None:
        """A result came to the request with this payload."""
        self.results += 1
        wanted = self.expected(payload)
        self.wrong += answer[: len(wanted)] != wanted
        self.ticks[time.monotonic_ns() // _TICK_NS] += 1
        self._waited("result", waited_ns, deadline_ns)

    def error(self, name: str, waited_ns: int, deadline_ns: int | None) -> None:
        """A typed error came."""
        self.errors[name] += 1
        self._waited(name, waited_ns, deadline_ns)

    def add(self, other: Book) -> None:
        """Enter another load's requests here, too."""
        for name in ("sent", "results", "left", "lost", "wrong", "twice"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.errors.update(other.errors)
        self.ticks.update(other.ticks)
        self.slowest_ns = max(self.slowest_ns, other.slowest_ns)
        self.lag_ns = max(self.lag_ns, other.lag_ns)
        if other.latest_ns is not None:
            self._late(other.latest_name, other.latest_ns)

    def faults(self, slack_ns: int) -> list[str]:
        """What is not as promised, a line each; none where every request had one end, its own, in time."""
        ends = self.results + self.errors.total() + self.left + self.lost
        found = {
            f"{self.sent} sent, {ends} ends": self.sent != ends,
            f"{self.lost} lost": self.lost,
            f"{self.wrong} results went to another's request": self.wrong,
            f"{self.twice} answers to no open request": self.twice,
            f"an answer ({self.latest_name}) came {(self.latest_ns or 0) / 1e6:.0f} ms after its deadline; "
            f"the callers stood still for {self.lag_ns / 1e6:.0f} ms at most": (self.latest_ns or 0) > slack_ns,
        }
        return [words for words, is_so in found.items() if is_so]

    def rate_per_s(self, begin_s: float, end_s: float) -> float:
        """Results a second between two moments of the monotonic clock, to a tenth of a second."""
        ticks = range(int(begin_s * 10), int(end_s * 10))
        return 10 * sum(self.ticks[tick] for tick in ticks) / max(1, len(ticks))

    def told(self) -> str:
        """The counts on one line."""
        errors = ", ".join(f"{count} {name}" for name, count in sorted(self.errors.items()))
        return f"{self.sent} sent = {self.results} results + errors ({errors}) + {self.left} left + {self.lost} lost"

    def _waited(self, name: str, waited_ns: int, deadline_ns: int | None) -> None:
        self.slowest_ns = max(self.slowest_ns, waited_ns)
        if deadline_ns is not None and waited_ns > deadline_ns:
            self._late(name, waited_ns - deadline_ns)

    def _late(self, name: str, late_ns: int) -> None:
        if self.latest_ns is None or late_ns > self.latest_ns:
            self.latest_ns, self.latest_name = late_ns, name


def disagreements(book: Book, ended: list[Mapping[str, Any]]) -> list[str]:
    """Where the callers' counts and those of all their proxies, each ended in good order, cannot both be.

    What a caller would have heard whose connection ended is known to the proxy alone, and what was sent last on it
    may never have arrived: so many may differ, and no more. Everything else agrees to the request.
    """
    outcomes: Counter[str] = Counter()
    for each in ended:
        outcomes.update(each["outcomes"])
    received = sum(each["received"] for each in ended)
    heard = Counter({"answered": book.results, **book.errors})
    of_connections = [name for name in heard if name.startswith("connection_")]
    unknown = book.left + sum(heard.pop(name) for name in of_connections)
    found = []
    if received != outcomes.total() or any(each["open"] for each in ended):
        found.append(f"the proxy received {received} and ended {outcomes.total()}")
    if not book.sent - unknown <= received <= book.sent:
        found.append(f"sent {book.sent}, received {received}, {unknown} unknown")
    for name in {*outcomes, *heard} - {"disconnected"}:
        if not heard[name] <= outcomes[name] <= heard[name] + unknown:
            found.append(f"{name}: heard {heard[name]}, the proxy {outcomes[name]}, {unknown} unknown")
    return found


# callers


@dataclass(frozen=True, slots=True)
class Habits:
    """How often a caller, as it sends a request, does something odd with it."""

    withdraw: float = 0.0  # takes it back at once
    leave: float = 0.0  # cuts its connection off
    half: float = 0.0  # sends a part of it, then cuts its connection off
    trickle: float = 0.0  # sends it in two parts, 5 ms apart
    deaf: float = 0.0  # reads nothing for 20 ms

    @property
    def total(self) -> float:
        return self.withdraw + self.leave + self.half + self.trickle + self.deaf


class Load:
    """Callers that keep ``depth`` requests open each, until told to stop or a quota is reached.

    Args:
        place: the proxy's address.
        callers, depth: how many, and requests that each keeps open.
        deadline_s: of each request, given to the proxy.
        habits: of the callers.
        pause_s: how long a caller waits after an error before it asks in its place.
        open_rate_per_s: None for a closed loop; else requests a second, spread over the callers, whatever comes back.
    """

    def __init__(
        self,
        place: tuple[str, int],
        *,
        callers: int = 16,
        depth: int = 8,
        deadline_s: float | None = 5.0,
        expected: Expected = of_fake,
        habits: Habits = Habits(),
        seed: int = 1,
        pause_s: float = 0.005,
        open_rate_per_s: float | None = None,
        first_client: int = 0,
    ) -> None:
        self.place, self.depth, self.habits, self.pause_s = place, depth, habits, pause_s
        self.deadline_ns = None if deadline_s is None else round(deadline_s * NS)
        self.rng = random.Random(seed)
        self.book = Book(expected)
        self.is_open_loop = open_rate_per_s is not None
        self._rate = open_rate_per_s
        self._numbers = range(first_client, first_client + callers)
        self._quota: int | None = None
        self._callers: dict[int, Caller] = {}
        self._ids = dict.fromkeys(self._numbers, 1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._idle = asyncio.Event()

    async def run(self, *, requests: int | None = None, patience_s: float = _PATIENCE_S) -> Book:
        """Ask until ``stop`` or that many requests; then wait ``patience_s`` for what is open."""
        self._quota = requests
        for number in self._numbers:
            self._spawn(self._connect(number))
        if self._rate is not None:
            self._spawn(self._pace(self._rate))
        self._spawn(self._watch_lag())
        await self._idle.wait()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while any(caller.open for caller in self._callers.values()):
                    await asyncio.sleep(0.01)
        self.book.lost += sum(len(caller.open) for caller in self._callers.values())
        for task in self._tasks:
            task.cancel()
        for caller in list(self._callers.values()):
            caller.open.clear()
            caller.transport.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self.book

    def stop(self) -> None:
        """Ask no more."""
        self._stopping = True
        self._idle.set()

    def may_ask(self) -> bool:
        """Whether there is more to ask."""
        if not self._stopping and self._quota is not None and self.book.sent >= self._quota:
            self.stop()
        return not self._stopping

    def next_id(self, client: int) -> int:
        """Never the same again for one client, however often it connects: so no late answer passes for another."""
        self._ids[client] += 1
        return self._ids[client]

    def joined(self, caller: Caller) -> None:
        """A caller is connected."""
        self._callers[caller.client] = caller

    def gone(self, caller: Caller) -> None:
        """A caller's connection has ended; it comes again."""
        self._callers.pop(caller.client, None)
        if not self._stopping:
            self._spawn(self._connect(caller.client))

    async def _connect(self, client: int) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping:
            try:
                await loop.create_connection(lambda: Caller(self, client), *self.place)
                return
            except OSError:
                await asyncio.sleep(_RECONNECT_S)

    async def _pace(self, rate_per_s: float) -> None:
        """An open loop: what is due is sent, by whoever is connected and has room."""
        begin_s, due = time.monotonic(), 0
        while self.may_ask():
            await asyncio.sleep(0.005)
            waiting = [caller for caller in self._callers.values() if len(caller.open) < self.depth]
            owed = int((time.monotonic() - begin_s) * rate_per_s)
            for step in range(min(owed - due, 4 * len(waiting))):
                if self.may_ask():
                    waiting[step % len(waiting)].ask()
            due = owed

    async def _watch_lag(self) -> None:
        while True:
            due_ns = time.monotonic_ns() + _LAG_STEP_NS
            await asyncio.sleep(_LAG_STEP_NS / NS)
            self.book.lag_ns = max(self.book.lag_ns, time.monotonic_ns() - due_ns)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class Caller(asyncio.BufferedProtocol):
    """One client's connection, and what it has open."""

    def __init__(self, load: Load, client: int) -> None:
        self.load, self.client = load, client
        self.open: dict[int, tuple[bytes, int]] = {}
        self._reader = FrameReader(lambda head: memoryview(bytearray(head.payload_bytes)), accepts=FROM_PROXY)
        self._busy_sending = self._leaving = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.load.joined(self)
        self._fill()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        pause_s = 0.0
        for frame in self._reader.received(nbytes):
            pause_s = max(pause_s, self._hear(frame))
        if pause_s:
            asyncio.get_running_loop().call_later(pause_s, self._fill)
        else:
            self._fill()

    def eof_received(self) -> None:
        pass  # the transport closes, and ``connection_lost`` follows

    def connection_lost(self, exc: Exception | None) -> None:
        if self._leaving:
            self.load.book.left += len(self.open)
        else:
            self._end_all("connection_lost")
        self.open.clear()
        self._leaving = True
        self.load.gone(self)

    def ask(self) -> None:
        """Send one request, in the manner of the load's habits."""
        if self._busy_sending or self._leaving or self.transport.is_closing():
            return
        load, number = self.load, self.load.next_id(self.client)
        mark = self.client << 40 | number
        payload = ROW.pack(mark, mark * _MIX % 2**64)
        frame = encode(Request(number, "m", load.deadline_ns, (SPEC,)), [payload])
        self.open[number] = payload, time.monotonic_ns()
        load.book.sent += 1
        if load.rng.random() < load.habits.total:
            self._oddly(number, frame)
        else:
            self.transport.writelines(frame)

    def _oddly(self, number: int, frame: list[Buffer]) -> None:
        habits, loop = self.load.habits, asyncio.get_running_loop()
        (manner,) = self.load.rng.choices(
            ("withdraw", "leave", "half", "trickle", "deaf"),
            (habits.withdraw, habits.leave, habits.half, habits.trickle, habits.deaf),
        )
        whole = b"".join(bytes(piece) for piece in frame)
        cut = self.load.rng.randrange(1, len(whole))
        if manner == "half":
            self.transport.write(whole[:cut])
        elif manner == "trickle":
            self.transport.write(whole[:cut])
            self._busy_sending = True
            loop.call_later(0.005, self._send_rest, whole[cut:])
            return
        else:
            self.transport.write(whole)
        if manner == "withdraw":
            self.transport.writelines(encode(Cancel(number)))
        elif manner == "deaf":
            self.transport.pause_reading()
            loop.call_later(0.02, self._listen)
        else:
            self._leaving = True
            loop.call_soon(self.transport.abort)

    def _send_rest(self, rest: bytes) -> None:
        self._busy_sending = False
        if not self.transport.is_closing():
            self.transport.write(rest)
            self._fill()

    def _listen(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _fill(self) -> None:
        if self.load.is_open_loop:
            return
        before = -1
        while len(self.open) < self.load.depth and len(self.open) != before and self.load.may_ask():
            before = len(self.open)
            self.ask()

    def _hear(self, frame: Frame) -> float:
        """Enter an answer; how long to pause after it."""
        message, book = frame.message, self.load.book
        if isinstance(message, Failure) and message.request_id is None:
            self._end_all(f"connection_{message.code.name.lower()}")
            return self.load.pause_s
        entry = self.open.pop(message.request_id or 0, None)
        if entry is None:
            book.twice += 1
            return 0.0
        payload, sent_ns = entry
        waited_ns = time.monotonic_ns() - sent_ns
        if isinstance(message, Result):
            book.result(payload, bytes(frame.payload or b""), waited_ns, self.load.deadline_ns)
            return 0.0
        assert isinstance(message, Failure)
        book.error(message.code.name.lower(), waited_ns, self.load.deadline_ns)
        return self.load.pause_s

    def _end_all(self, name: str) -> None:
        now_ns = time.monotonic_ns()
        for _, sent_ns in self.open.values():
            self.load.book.error(name, now_ns - sent_ns, self.load.deadline_ns)
        self.open.clear()
