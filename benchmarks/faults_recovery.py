"""How soon after a fault the proxy serves as before: the first second that is within 5 % of the rate before the fault.

    python benchmarks/faults_recovery.py [--rounds 3] [--no-triton]

The server's own times bound the rate, not this machine: 4 instances that take 20 ms a batch of 8. Each round takes the
rate over four seconds, lets a fault last about a second, and counts from its end: that of the pause, or the moment at
which the server or the proxy listens again. Then four seconds more give the rate after it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace

from fault_parts import NS, Load, of_triton
from fault_targets import Fake, Served, Triton, fake_model, free_port

from b2gmodel.live.fake import FakeScript, Fault, FaultKind
from b2gmodel.live.run_loop import run_loop

POLICY = ("-k", "8", "-M", "4", "--queue", "512", "--formation-deadline", "2ms", "--server-timeout", "500ms")
SCRIPT = FakeScript((fake_model(infer_ns=20_000_000),))
WINDOW_S, SHARE, BAR_S, LIMIT_S = 4.0, 0.95, 3.0, 20.0

Hurt = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Back:
    """One round: seconds to the first moment from which a whole second is as before, and the rates' ratio."""

    seconds: float
    ratio: float


async def round_of(load: Load, hurt: Hurt) -> Back:
    """Before, fault, after."""
    begin_s = time.monotonic()
    await asyncio.sleep(WINDOW_S)
    before = load.book.rate_per_s(begin_s, time.monotonic())
    await hurt()
    over_s = time.monotonic()
    while True:
        await asyncio.sleep(0.1)
        now_s = time.monotonic()
        if now_s - 1 >= over_s and load.book.rate_per_s(now_s - 1, now_s) >= SHARE * before:
            back_s = now_s - 1 - over_s
            break
        if now_s - over_s > LIMIT_S:
            return Back(LIMIT_S, 0.0)
    begin_s = time.monotonic()
    await asyncio.sleep(WINDOW_S)
    return Back(back_s, load.book.rate_per_s(begin_s, time.monotonic()) / before)


async def rounds_of(load: Load, hurt: Hurt, rounds: int) -> tuple[list[Back], list[str]]:
    running = asyncio.create_task(load.run())
    await asyncio.sleep(1)
    backs = [await round_of(load, hurt) for _ in range(rounds)]
    load.stop()
    return backs, (await running).faults(NS)


def tell(name: str, told: tuple[list[Back], list[str]]) -> bool:
    """Print a fault's row; whether it held."""
    backs, faults = told
    seconds = [each.seconds for each in backs]
    ratio = statistics.median(each.ratio for each in backs)
    held = max(seconds) <= BAR_S and ratio >= SHARE and not faults
    ratios = ", ".join(f"{each.ratio:.3f}" for each in backs)
    print(
        f"{name}: back after {statistics.median(seconds):.1f} s (worst {max(seconds):.1f}), then at {ratio:.3f} of the "
        f"rate before ({ratios}); held: {held}{''.join(f'; {each}' for each in faults)}",
        flush=True,
    )
    return held


def on_the_fake(rounds: int) -> list[bool]:
    async def paused() -> None:
        fake.pause()
        await asyncio.sleep(1)
        fake.resume()

    async def restarted() -> None:
        fake.kill()
        await asyncio.sleep(0.5)
        await asyncio.to_thread(fake.start)

    async def failing() -> None:
        storm = replace(SCRIPT, faults=(Fault(FaultKind.STATUS, probability=1.0, status=503),))
        await asyncio.to_thread(fake.install, storm)
        await asyncio.sleep(1)
        await asyncio.to_thread(fake.install, SCRIPT)

    async def crowded() -> None:
        crowd = Load(proxies[-1].place, callers=200, depth=8, first_client=1_000, deadline_s=0.5)
        running = asyncio.create_task(crowd.run())
        await asyncio.sleep(1)
        crowd.stop()
        await running

    async def proxy_restarted() -> None:
        proxies[-1].kill()
        proxies.append(stack.enter_context(await asyncio.to_thread(Served, fake.address, *POLICY, port=port)))

    held = []
    port = free_port()
    hurts = {
        "server paused for 1 s": paused,
        "server killed and started again": restarted,
        "server answers 503 for 1 s": failing,
        "200 clients more for 1 s": crowded,
        "proxy killed and started again": proxy_restarted,
    }
    with Fake(SCRIPT) as fake, ExitStack() as stack:
        proxies = [stack.enter_context(Served(fake.address, *POLICY, port=port))]
        for name, hurt in hurts.items():
            load = Load(("127.0.0.1", port), callers=16, depth=4)
            held.append(tell(name, run_loop(rounds_of(load, hurt, rounds))))
    return held


def on_triton(rounds: int) -> list[bool]:
    """The emulated model's times bound the rate here, too: one instance."""

    async def paused() -> None:
        server.pause()
        await asyncio.sleep(1)
        server.resume()

    async def restarted() -> None:
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

    held = []
    with Triton(s0_ms=20.0) as server:
        for transport in ("http", "grpc", "shm"):
            for name, hurt in (("paused for 1 s", paused), ("killed and started again", restarted)):
                with Served(server.address, *POLICY, *server.options, "--transport", transport) as it:
                    load = Load(it.place, callers=4, depth=16, expected=of_triton)
                    held.append(tell(f"Triton {name}, {transport}", run_loop(rounds_of(load, hurt, rounds))))
    return held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-triton", action="store_true")
    options = parser.parse_args()
    held = on_the_fake(options.rounds)
    if not options.no_triton:
        held += on_triton(options.rounds)
    bar = f"a second within 5 % after {BAR_S:g} s at most, then {SHARE} or more"
    print(json.dumps({"name": "faults_recovery", "value": sum(held), "bar": f"{len(held)} of {len(held)}: {bar}",
                      "held": all(held), "spread": None}))  # fmt: skip
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
