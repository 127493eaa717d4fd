"""A crowd at the proxy: far more clients than it queues, then clients that cancel and leave at random.

    python benchmarks/proxy_crowd.py [--requests 100000] [--seed 1]

Crowd: 1,000 clients, five requests each, against ``b2g serve`` with a queue of 256. Every request has exactly one
answer, a result or BUSY; as many BUSY as the proxy counted; peak resident memory at most that before the first
client plus the bound that the proxy stated (its payloads are taken before).
Chaos: so many requests with random cancellations and disconnects. Every request whose client stayed has exactly
one answer, its own; the proxy's counts balance; nothing is open at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from proxy_parts import MARK, resident_bytes

from b2gmodel.live.fake import Delays, FakeModel, FakeScript, FakeServer, FakeTensor
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.wire import (
    FROM_PROXY,
    Cancel,
    Datatype,
    ErrorCode,
    Failure,
    FrameReader,
    Message,
    Request,
    Result,
    TensorSpec,
    encode,
)

CROWD, REQUESTS_EACH, QUEUE = 1_000, 5, 256
CHAOS_CLIENTS, PIPELINE = 64, 8
CHAOS_QUEUE = 480  # with the flights' 32, a slot for all that is open: BUSY only where the gone still hold theirs
CANCELLED_SHARE, LEAVING_SHARE = 0.15, 0.02
ROW_BYTES = 16 * 1024
MODEL = FakeModel(
    "m",
    inputs=(FakeTensor("x", "UINT8", (ROW_BYTES,)),),
    max_batch=32,
    instances=4,
    delays=Delays(compute_infer_base_ns=2_000_000),
)
SPEC = TensorSpec("x", Datatype.UINT8, (ROW_BYTES,), ROW_BYTES)


class Served:
    """A running ``b2g serve`` and what it said first."""

    def __init__(self, address: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "from b2gmodel.cli import main; main()",
                "serve",
                "--url",
                address,
                "--model",
                "m",
                "--json",
                *options,
            ],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        self.first: dict[str, Any] = json.loads(self.process.stdout.readline())
        host, port = self.first["listening"].rsplit(":", 1)
        self.place = (host, int(port))

    def end(self) -> dict[str, Any]:
        """Stopped in good order: its last counts."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=60)
        return {**json.loads(out), "exit": self.process.returncode}


@contextmanager
def served(address: str, *options: str) -> Iterator[Served]:
    it = Served(address, *options)
    try:
        yield it
    finally:
        it.process.kill()
        it.process.communicate()


@dataclass(slots=True)
class Tally:
    """What clients saw. ``wrong``: an answer that is another's, a second one, or to no request."""

    asked: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    left_open: int = 0
    missing: int = 0
    wrong: int = 0


class Caller:
    """One connection, its requests and their answers."""

    def __init__(self, stream: asyncio.StreamReader, writer: asyncio.StreamWriter, tally: Tally, client: int) -> None:
        self.stream, self.writer, self.tally = stream, writer, tally
        self.client, self.number = client, 0
        self.open: set[int] = set()
        self.reader = FrameReader(lambda head: memoryview(bytearray(head.payload_bytes)), accepts=FROM_PROXY)
        self.padding = bytes(ROW_BYTES - MARK.size)

    def ask(self) -> int:
        self.number += 1
        self.open.add(self.number)
        self.tally.asked += 1
        self._send(Request(self.number, "m", None, (SPEC,)), MARK.pack(self._mark(self.number)) + self.padding)
        return self.number

    def withdraw(self, number: int) -> None:
        self._send(Cancel(number))

    async def hear(self) -> None:
        """The next answers. Raises ``EOFError`` at the end of the connection."""
        data = await self.stream.read(65536)
        if not data:
            raise EOFError
        for frame in self.reader.feed(data):
            number = frame.message.request_id or 0
            if number not in self.open:
                self.tally.wrong += 1
                continue
            self.open.remove(number)
            if isinstance(frame.message, Result):
                own = frame.payload is not None and MARK.unpack(frame.payload)[0] == self._mark(number)
                self.tally.wrong += not own
                self.tally.answers["result"] += 1
            elif isinstance(frame.message, Failure):
                self.tally.answers[ErrorCode(frame.message.code).name.lower()] += 1

    def _mark(self, number: int) -> int:
        return self.client << 32 | number

    def _send(self, message: Message, payload: bytes = b"") -> None:
        self.writer.writelines(encode(message, [payload] if payload else []))


async def crowd(place: tuple[str, int], tally: Tally) -> None:
    """All connect first; then each asks its requests in turn."""

    async def one(client: int) -> Caller:
        return Caller(*await asyncio.open_connection(*place), tally, client)

    callers = await asyncio.gather(*(one(client) for client in range(CROWD)))

    async def ask_all(caller: Caller) -> None:
        try:
            for _ in range(REQUESTS_EACH):
                caller.ask()
                while caller.open:
                    await caller.hear()
        except (EOFError, ConnectionError):
            tally.missing += len(caller.open)

    await asyncio.gather(*(ask_all(caller) for caller in callers))
    for caller in callers:
        caller.writer.close()


async def chaos(place: tuple[str, int], tally: Tally, requests: int, seed: int) -> int:
    """Pipelined requests; some are withdrawn, some clients leave in mid-air and come again. How often they left."""
    left = 0

    async def one(client: int) -> None:
        nonlocal left
        rng = random.Random(f"{seed}/{client}")
        caller: Caller | None = None
        quota, number = -(-requests // CHAOS_CLIENTS), 0
        while number < quota or (caller is not None and caller.open):
            if caller is None:
                caller = Caller(*await asyncio.open_connection(*place), tally, client)
                caller.number = number
            while number < quota and len(caller.open) < PIPELINE:
                number = caller.ask()
                if rng.random() < CANCELLED_SHARE:
                    caller.withdraw(rng.choice(sorted(caller.open)))
            if rng.random() < LEAVING_SHARE:
                left += 1
                tally.left_open += len(caller.open)
                caller.writer.transport.abort()
                caller = None
                continue
            try:
                await caller.hear()
            except (EOFError, ConnectionError):
                tally.missing += len(caller.open)
                caller = None
        if caller is not None:
            caller.writer.close()

    await asyncio.gather(*(one(client) for client in range(CHAOS_CLIENTS)))
    return left


def _crowd(address: str) -> bool:
    with served(address, "-k", "8", "-M", "2", "--queue", str(QUEUE), "--formation-deadline", "0ms") as it:
        before = resident_bytes(it.process.pid)
        tally = Tally()
        run_loop(crowd(it.place, tally))
        grown = resident_bytes(it.process.pid, "VmHWM") - before
        end = it.end()
    bound = it.first["memory_bound_bytes"] - it.first["payload_bytes"]
    answers = dict(tally.answers)
    held = (
        tally.missing == tally.wrong == 0
        and sum(answers.values()) == tally.asked == CROWD * REQUESTS_EACH == end["received"]
        and answers.get("busy", 0) == end["outcomes"]["busy"] > 0
        and answers.get("result", 0) + answers.get("busy", 0) == tally.asked
        and grown <= bound
        and end["exit"] == 0
    )
    print(f"crowd: {CROWD} clients, queue {QUEUE}, {tally.asked} requests: {answers}; proxy: {_told(end)}")
    print(f"  memory grew by {grown / 2**20:.1f} MiB, bound {bound / 2**20:.1f} beside the payloads; held: {held}")
    return held


def _chaos(address: str, requests: int, seed: int) -> tuple[bool, int]:
    with served(address, "-k", "8", "-M", "4", "--queue", str(CHAOS_QUEUE), "--formation-deadline", "1ms") as it:
        tally = Tally()
        left = run_loop(chaos(it.place, tally, requests, seed))
        end = it.end()
    answered = sum(tally.answers.values())
    lost = tally.asked - answered - tally.left_open
    # What a client sent just before it left may never have reached the proxy; everything that did is accounted for.
    held = (
        lost == tally.missing == tally.wrong == 0
        and sum(end["outcomes"].values()) == end["received"]
        and answered <= end["received"] <= tally.asked
        and end["open"] == 0
        and end["protocol_errors"] == 0
        and end["exit"] == 0
    )
    print(
        f"chaos: {tally.asked} requests, {left} clients left with {tally.left_open} open: {dict(tally.answers)}, "
        f"{lost} lost, {tally.wrong} wrong; proxy: {_told(end)}; held: {held}"
    )
    return held, lost + tally.wrong


def _told(end: dict[str, Any]) -> str:
    outcomes = {name: count for name, count in end["outcomes"].items() if count}
    return f"{end['received']} received = {outcomes}, {end['flights']} flights, exit {end['exit']}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with FakeServer.start(FakeScript((MODEL,))) as fake:
        crowd_held = _crowd(fake.address)
        chaos_held, lost = _chaos(fake.address, options.requests, options.seed)
    held = crowd_held and chaos_held
    print(json.dumps({"name": "proxy_crowd", "value": lost, "bar": "0 lost", "held": held, "spread": None}))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
