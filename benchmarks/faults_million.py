"""A million requests across all faults at once: none lost, none answered twice, none answered with another's result.

    python benchmarks/faults_million.py [--requests 1000000] [--seed 1] [--no-triton]

Callers with odd habits (they withdraw, leave, stop in mid-frame, send slowly, do not read) keep ``b2g serve`` busy.
Its server is killed and started again, paused, slowed down, and answers a share of the batches with errors, too short,
too long, not at all, or with what belongs to no batch. The proxy is drained or killed under load at the end of each
stretch. What the callers have in their book agrees to the request with what the proxies counted. A tenth of the
requests goes to a real Triton, over each transport, which is paused, killed and started again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fault_parts import NS, Book, Habits, Load, disagreements, of_triton
from fault_targets import Fake, Served, Triton, fake_model

from b2gmodel.live.fake import Delays, FakeScript, Fault, FaultKind
from b2gmodel.live.run_loop import run_loop

STRETCH = 100_000
SLACK_NS = NS
HABITS = Habits(withdraw=0.01, leave=0.001, half=0.001, trickle=0.003, deaf=0.003)
POLICY = ("-k", "32", "-M", "4", "--queue", "512", "--formation-deadline", "1ms", "--server-timeout", "300ms")
SERVER_FAULTS = (
    *(Fault(FaultKind.STATUS, probability=0.004, status=status) for status in (400, 500, 503)),
    *(
        Fault(kind, probability=0.004)
        for kind in (
            FaultKind.CLOSE_BEFORE_ANSWER,
            FaultKind.CLOSE_MID_BODY,
            FaultKind.LONG_BODY,
            FaultKind.WRONG_SHAPE,
            FaultKind.WRONG_DATATYPE,
            FaultKind.WRONG_ID,
        )
    ),
    Fault(FaultKind.SHORT_BODY, probability=0.001),
    Fault(FaultKind.NEVER_ANSWER, probability=0.001),
)


@dataclass(slots=True)
class Total:
    """All stretches together."""

    book: Book = field(default_factory=Book)
    hurts: Counter[str] = field(default_factory=Counter)
    complaints: list[str] = field(default_factory=list)

    def add(self, book: Book, complaints: list[str]) -> None:
        self.book.add(book)
        self.complaints += complaints


Hurt = Callable[[random.Random], Awaitable[str]]
"""Does something to the server, undoes it, and says what it was."""


def hurt_fake(fake: Fake, script: FakeScript) -> Hurt:
    """One of the things that can be done to the fake."""

    async def hurt(rng: random.Random) -> str:
        what = rng.choice(("pause", "restart", "storm", "slow"))
        match what:
            case "pause":
                fake.pause()
                await asyncio.sleep(rng.uniform(0.05, 0.6))
                fake.resume()
            case "restart":
                fake.kill()
                await asyncio.sleep(rng.uniform(0, 0.3))
                await asyncio.to_thread(fake.start)
            case "storm":
                await asyncio.to_thread(
                    fake.install, replace(script, faults=(Fault(FaultKind.STATUS, probability=1.0, status=503),))
                )
                await asyncio.sleep(rng.uniform(0.05, 0.3))
                await asyncio.to_thread(fake.install, script)
            case "slow":
                slow = replace(
                    fake_model(), delays=Delays(compute_infer_base_ns=50_000_000, answer_delay_ns=20_000_000)
                )
                await asyncio.to_thread(fake.install, replace(script, models=(slow,)))
                await asyncio.sleep(rng.uniform(0.05, 0.3))
                await asyncio.to_thread(fake.install, script)
        return what

    return hurt


def hurt_triton(server: Triton) -> Hurt:
    """As ``hurt_fake``; a start takes seconds, so it comes seldom."""

    async def hurt(rng: random.Random) -> str:
        if rng.random() < 0.9:
            server.pause()
            await asyncio.sleep(rng.uniform(0.05, 0.6))
            server.resume()
            return "pause (Triton)"
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        return "restart (Triton)"

    return hurt


async def stretch(
    it: Served, load: Load, requests: int, end: str, hurt: Hurt, rng: random.Random, hurts: Counter[str]
) -> tuple[Book, list[str]]:
    """One proxy's life: its load's book, and what is not as promised."""
    running = asyncio.create_task(load.run())
    enough = asyncio.Event()

    async def watch() -> None:
        # Errors are quick: a stretch in which the server is away for long has to do its work all the same.
        while load.book.sent < requests or load.book.results < requests / 2:
            await asyncio.sleep(0.02)
        enough.set()

    watching = asyncio.create_task(watch())
    while not enough.is_set():
        hurts[await hurt(rng)] += 1
        try:
            await asyncio.wait_for(enough.wait(), rng.uniform(0.5, 2.0))
        except TimeoutError:
            continue
    await watching
    told: Mapping[str, Any] | None = None
    hurts[f"proxy: {end}"] += 1
    if end == "killed":
        it.kill()
    elif end == "drained":
        told = await asyncio.to_thread(it.end)
    load.stop()
    book = await running
    if end == "quiet":
        told = await asyncio.to_thread(it.end)
    complaints = book.faults(SLACK_NS)
    if told is not None:
        complaints += disagreements(book, [told])
        if told["exit"] != 0:
            complaints.append(f"the proxy ended with exit code {told['exit']}")
    return book, complaints + it.complaints().splitlines()


def on_the_fake(total: Total, requests: int, seed: int) -> None:
    """A stretch after the other, each with a proxy of its own, before one fake."""
    script = FakeScript((fake_model(),), SERVER_FAULTS, seed)
    with Fake(script) as fake:
        hurt = hurt_fake(fake, script)
        for number in range(-(-requests // STRETCH)):
            rng = random.Random(f"{seed}/{number}")
            end = ("drained", "killed", "quiet")[number % 3]
            with Served(fake.address, *POLICY) as it:
                load = Load(it.place, callers=16, depth=16, habits=HABITS, seed=seed + number)
                wanted = min(STRETCH, requests - number * STRETCH)
                tell(f"fake {number + 1}", total, run_loop(stretch(it, load, wanted, end, hurt, rng, total.hurts)))


def on_triton(total: Total, requests: int, seed: int) -> None:
    """A stretch over each transport before a real server."""
    with Triton() as server:
        for number, transport in enumerate(("http", "grpc", "shm")):
            rng = random.Random(f"{seed}/{transport}")
            end = ("drained", "quiet", "drained")[number]
            with Served(server.address, *POLICY, *server.options, "--transport", transport) as it:
                load = Load(it.place, callers=16, depth=16, habits=HABITS, seed=seed + number, expected=of_triton)
                told = run_loop(stretch(it, load, requests // 3, end, hurt_triton(server), rng, total.hurts))
                tell(f"Triton, {transport}", total, told)


def tell(name: str, total: Total, told: tuple[Book, list[str]]) -> None:
    """Add a stretch, and print its row."""
    book, complaints = told
    total.add(book, complaints)
    late = "none late" if book.latest_ns is None else f"latest {book.latest_ns / 1e6:.0f} ms after its deadline"
    print(f"{name}: {book.told()}; slowest {book.slowest_ns / NS:.2f} s, {late}", flush=True)
    for each in complaints:
        print(f"  NOT AS PROMISED: {each}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-triton", action="store_true")
    options = parser.parse_args()
    total, begin_s = Total(), time.monotonic()
    of_triton_too = 0 if options.no_triton else options.requests // 10
    on_the_fake(total, options.requests - of_triton_too, options.seed)
    if of_triton_too:
        on_triton(total, of_triton_too, options.seed)
    book, took_s = total.book, time.monotonic() - begin_s
    hurts = ", ".join(f"{count} {what}" for what, count in sorted(total.hurts.items()))
    print(f"together: {book.told()}, {book.wrong} wrong, {book.twice} twice")
    print(f"  {hurts}; {took_s:.0f} s, {book.sent / took_s:.0f} requests/s")
    held = not total.complaints and book.sent >= options.requests
    value = book.lost + book.twice + book.wrong
    print(json.dumps({"name": "faults_million", "value": value, "bar": "0 lost, 0 twice, 0 astray", "held": held,
                      "spread": None}))  # fmt: skip
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
