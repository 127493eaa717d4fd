"""Half an hour at one and a half times what the proxy can take, with faults at random: nothing grows, counts balance.

    python benchmarks/soak.py [--minutes 30] [--seed 1]

Two thirds of the time before the fake, over HTTP, with every fault of ``faults_million.py``; one third before a real
Triton, over shared memory, which is paused and killed. In each part the capacity is taken first, in a closed loop;
then requests come at 1.5 times that rate whatever comes back, from callers with odd habits. The proxy's memory,
descriptors, threads and shared memory are read every two seconds; after a warm-up of a fifth they may not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fault_parts import NS, Book, Expected, Load, disagreements, of_fake, of_triton
from fault_targets import Fake, Served, Triton, fake_model
from faults_million import HABITS, POLICY, SERVER_FAULTS, Hurt, hurt_fake, hurt_triton
from proxy_parts import resident_bytes

from b2gmodel.live.fake import FakeScript
from b2gmodel.live.run_loop import run_loop

OVERLOAD, CAPACITY_S, SAMPLE_S, SETTLE_S = 1.5, 5.0, 2.0, 10.0
CALLERS, DEPTH = 64, 24
WARM_SHARE = 0.2
GROWTH_BYTES = 4 * 2**20
"""From the first fifth after the warm-up to the last; the slope's bound is this over the part's time."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A proxy at one moment, its children included."""

    at_s: float
    resident_bytes: int
    descriptors: int
    threads: int
    shared_names: int
    shared_bytes: int


def sample(pid: int) -> Sample:
    """Read it from /proc, and ``/dev/shm``'s part of proxies in use."""
    pids = [pid, *_children(pid)]
    names = list(Path("/dev/shm").glob("b2g-proxy-*"))
    return Sample(
        time.monotonic(),
        sum(resident_bytes(each) for each in pids),
        sum(len(os.listdir(f"/proc/{each}/fd")) for each in pids),
        sum(len(os.listdir(f"/proc/{each}/task")) for each in pids),
        len(names),
        sum(resident_bytes(each, "RssShmem") for each in pids),
    )


def _children(pid: int) -> list[int]:
    words = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
    return [each for word in words for each in (int(word), *_children(int(word)))]


async def take_capacity(place: tuple[str, int], expected: Expected) -> tuple[float, Book]:
    """Results a second from callers who always have something open, and their book."""
    load = Load(place, callers=16, depth=16, expected=expected, first_client=10_000)
    running = asyncio.create_task(load.run())
    await asyncio.sleep(1)
    before, begin_s = load.book.results, time.monotonic()
    await asyncio.sleep(CAPACITY_S)
    rate_per_s = (load.book.results - before) / (time.monotonic() - begin_s)
    load.stop()
    return rate_per_s, await running


async def soak(
    it: Served, load: Load, seconds: float, hurt: Hurt, rng: random.Random
) -> tuple[list[Sample], Counter[str]]:
    """Load and faults for so long; what was read of the proxy meanwhile."""
    running, hurts, samples = asyncio.create_task(load.run()), Counter[str](), list[Sample]()
    ends_s = time.monotonic() + seconds

    async def watch() -> None:
        while True:
            samples.append(sample(it.pid))
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.create_task(watch())
    while time.monotonic() < ends_s:
        await asyncio.sleep(rng.uniform(1, 6))
        hurts[await hurt(rng)] += 1
    watching.cancel()
    await asyncio.wait([watching])
    load.stop()
    await running
    return samples, hurts


def grown(samples: list[Sample]) -> list[str]:
    """Print what became of each quantity; which of them grew."""
    kept = samples[int(WARM_SHARE * len(samples)) :]
    minutes = np.array([each.at_s for each in kept]) / 60
    fifth = max(1, len(kept) // 5)
    bounds = {"resident_bytes": GROWTH_BYTES, "descriptors": 0, "threads": 0, "shared_names": 0, "shared_bytes": 0}
    found = []
    for name, bound in bounds.items():
        values = np.array([getattr(each, name) for each in kept], float)
        slope = float(np.polyfit(minutes, values, 1)[0]) if len(kept) > 2 else 0.0
        # Descriptors come and go with their callers: the most of them is what may not grow.
        middle = np.max if name == "descriptors" else np.median
        first, last = float(middle(values[:fifth])), float(middle(values[-fifth:]))
        allowed = bound + (0.1 * CALLERS if name == "descriptors" else 0)
        unit, words = (2**20, " MiB") if name.endswith("bytes") else (1, "")
        print(
            f"  {name}: {first / unit:.2f}{words} after the warm-up, {last / unit:.2f} at the end, "
            f"slope {slope / unit:+.4f} a minute, {values.max() / unit:.2f} at most; "
            f"growth allowed {allowed / unit:.1f}"
        )
        if last - first > allowed:
            found.append(f"{name} grew by {(last - first) / unit:.2f}")
    return found


def part(name: str, it: Served, expected: Expected, seconds: float, hurt: Hurt, seed: int) -> list[str]:
    """One proxy's soak from capacity to drained end; what is not as promised."""
    capacity_per_s, book = run_loop(take_capacity(it.place, expected))
    load = Load(
        it.place, callers=CALLERS, depth=DEPTH, expected=expected, habits=HABITS, seed=seed,
        open_rate_per_s=OVERLOAD * capacity_per_s,
    )  # fmt: skip
    before = sample(it.pid)
    samples, hurts = run_loop(soak(it, load, seconds, hurt, random.Random(seed)))
    print(f"{name}: capacity {capacity_per_s:.0f}/s, {OVERLOAD} times that for {seconds / 60:.1f} min")
    print(f"  {load.book.told()}")
    slowest_s, lag_s = load.book.slowest_ns / NS, load.book.lag_ns / NS
    print(f"  slowest {slowest_s:.2f} s; the callers stood still for {lag_s:.2f} s at most")
    print(f"  {', '.join(f'{count} {what}' for what, count in sorted(hurts.items()))}")
    faults = grown(samples)
    book.add(load.book)
    faults += book.faults(NS)
    after = settled(it.pid, before.descriptors)
    if after > before.descriptors:
        faults.append(f"{after - before.descriptors} descriptors more than before the soak")
    ended = it.end()
    faults += disagreements(book, [ended]) + it.complaints().splitlines()
    if ended["exit"] != 0:
        faults.append(f"exit code {ended['exit']}")
    for each in faults:
        print(f"  NOT AS PROMISED: {each}")
    sys.stdout.flush()
    return faults


def settled(pid: int, wanted: int) -> int:
    """Descriptors once the proxy has let go of its last callers' connections."""
    ends_s = time.monotonic() + SETTLE_S
    while (now := sample(pid).descriptors) > wanted and time.monotonic() < ends_s:
        time.sleep(0.1)
    return now


def on_the_fake(seconds: float, seed: int) -> list[str]:
    script = FakeScript((fake_model(),), SERVER_FAULTS, seed)
    with Fake(script) as fake, Served(fake.address, *POLICY) as it:
        return part("fake, http", it, of_fake, seconds, hurt_fake(fake, script), seed)


def on_triton(seconds: float, seed: int) -> list[str]:
    with Triton() as server, Served(server.address, *POLICY, *server.options, "--transport", "shm") as it:
        return part("Triton, shm", it, of_triton, seconds, hurt_triton(server), seed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-triton", action="store_true")
    options = parser.parse_args()
    seconds = 60 * options.minutes
    faults = on_the_fake(seconds if options.no_triton else seconds * 2 / 3, options.seed)
    if not options.no_triton:
        faults += on_triton(seconds / 3, options.seed)
    print(json.dumps({"name": "soak", "value": len(faults), "bar": "0: flat, and counts that balance",
                      "held": not faults, "spread": None}))  # fmt: skip
    return 0 if not faults else 1


if __name__ == "__main__":
    sys.exit(main())
