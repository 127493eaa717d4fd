"""Transport overhead D of our transports against tritonclient's synchronous gRPC client, the standard way.

All drive the same entry of the same server in single-flight cycles, in turn; the order within a round is drawn.
D is a cycle less the service time that the server booked for it. The rival gets what a user has, k separate
arrays, and does what its manual says: joins them, fills an ``InferInput``, reads the result as an array.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import tritonclient.grpc
from numpy.typing import NDArray

from b2gmodel.batcher import Placement, Policy
from b2gmodel.errors import EvidenceError
from b2gmodel.flights import Flight
from b2gmodel.live.gateway import Gateway
from b2gmodel.live.kserve import ControlPlane, ModelSpec
from b2gmodel.live.payloads import make_payloads
from b2gmodel.live.run_loop import run_loop
from b2gmodel.live.server import EmbeddedServer
from b2gmodel.live.target import Endpoint
from b2gmodel.live.transport import Transport
from b2gmodel.live.transports import TransportName, make_transport
from b2gmodel.live.workloads import load_workloads

K: Final = 8
RIVAL: Final = "tritonclient"
BARS: Final = {
    ("yolov8n", "http"): 0.5,
    ("yolov8n", "shm"): 0.1,
    ("resnet50", "http"): 0.6,
    ("resnet50", "shm"): 0.25,
}
WARMUP_ROUNDS: Final = 8
RESAMPLES: Final = 2000
PERF_ANALYZER_BAR: Final = 1.05
PERF_ANALYZER_GLIBC: Final = (2, 38)

Batch = Callable[[], Awaitable[int]]
"""Sends one batch and returns its cycle, ns."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way on one workload, a value a round, ms."""

    workload: str
    way: str
    cycle_ms: NDArray[np.float64]
    overhead_ms: NDArray[np.float64]


def ours(transport: Transport, model: ModelSpec) -> Batch:
    """Batches through the proxy's own core over one of its transports: from the seal to the last delivery."""
    flights: list[Flight] = []
    policy = Policy.for_placement(Placement.C3, batch_size=K, flights=1, concurrency=K, queue_limit=K)
    gateway = Gateway(policy, transport, run_id=f"bench.{transport.name}", on_flight=flights.append)
    payloads = make_payloads(model, K, transport)

    async def batch() -> int:
        flights.clear()
        await asyncio.gather(*(gateway.submit(payload) for payload in payloads))
        while not flights:  # The flight is reported just after its callers have their results.
            await asyncio.sleep(0)
        return flights[0].cycle_ns

    return batch


def theirs(client: Any, model: ModelSpec) -> Batch:
    """Batches as a user sends them: from the separate arrays to the separate results."""
    (spec,), (output,) = model.inputs, model.outputs
    rng = np.random.default_rng(1)
    arrays = [rng.random(spec.shape, dtype=np.float32) for _ in range(K)]

    async def batch() -> int:
        begin_ns = time.monotonic_ns()
        tensor = tritonclient.grpc.InferInput(spec.name, [K, *spec.shape], spec.datatype)
        tensor.set_data_from_numpy(np.stack(arrays))
        results = list(client.infer(model.name, [tensor]).as_numpy(output.name))
        cycle_ns = time.monotonic_ns() - begin_ns
        assert len(results) == K
        return cycle_ns

    return batch


async def measure(endpoint: Endpoint, workload: str, rounds: int, rng: random.Random) -> list[Row]:
    """Each way on one workload, in alternating cycles."""
    control = ControlPlane(endpoint.host, endpoint.port)
    model = await control.model(workload, {})
    transports = [make_transport(name, endpoint, model) for name in TransportName]
    client = tritonclient.grpc.InferenceServerClient(f"{endpoint.host}:{endpoint.grpc_port}")
    try:
        for transport in transports:
            await transport.warm(1)
        ways = {transport.name: ours(transport, model) for transport in transports} | {RIVAL: theirs(client, model)}
        seen: dict[str, list[tuple[int, int]]] = {way: [] for way in ways}
        counters = await control.counters(workload)
        for _ in range(WARMUP_ROUNDS + rounds):
            for way in rng.sample(list(ways), len(ways)):
                cycle_ns = await ways[way]()
                before, counters = counters, await control.booked_counters(workload, counters.executions + 1)
                added = counters.of(K).since(before.of(K))
                if added.executions != 1:
                    raise EvidenceError("the server did not execute our batch as one", observed=added.executions)
                seen[way].append((cycle_ns, cycle_ns - added.service_ns))
    finally:
        client.close()
        for transport in transports:
            await transport.aclose()
        control.close()
    series = {way: np.array(pairs[WARMUP_ROUNDS:]).T / 1e6 for way, pairs in seen.items()}
    return [Row(workload, way, cycle_ms, overhead_ms) for way, (cycle_ms, overhead_ms) in series.items()]


def ratio(ours_ms: NDArray[np.float64], rival_ms: NDArray[np.float64], rng: np.random.Generator) -> Sequence[float]:
    """Ratio of the medians, and its 95 % interval by resampling whole rounds."""
    picks = rng.integers(0, len(ours_ms), (RESAMPLES, len(ours_ms)))
    resampled = np.median(ours_ms[picks], axis=1) / np.median(rival_ms[picks], axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(np.median(ours_ms) / np.median(rival_ms)), float(low), float(high)


def why_no_perf_analyzer() -> str | None:
    """What keeps NVIDIA's client from running on this machine; None where nothing does."""
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < PERF_ANALYZER_GLIBC:
        return f"{library or 'no glibc'} {version}".strip()
    return None if shutil.which("perf_analyzer") else "it is not installed (pip install perf-analyzer)"


def perf_analyzer_cycle_ms(endpoint: Endpoint, workload: str, rounds: int) -> float:
    """Mean cycle of NVIDIA's own client over gRPC, one batch in flight."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.csv"
        command = ["perf_analyzer", "-m", workload, "-i", "grpc", "-u", f"{endpoint.host}:{endpoint.grpc_port}"]
        command += ["-b", str(K), "--concurrency-range", "1:1", "--measurement-mode", "count_windows"]
        command += ["--measurement-request-count", str(rounds), "-f", str(report)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with report.open() as lines:
            (row,) = csv.DictReader(lines)
    return 1000 * K / float(row["Inferences/Second"])


def main() -> int:
    """Prints a row each and the verdict as one line of JSON; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workload", choices=sorted({workload for workload, _ in BARS}), action="append")
    options = parser.parse_args()
    workloads = options.workload or ["yolov8n", "resnet50"]
    table = load_workloads()
    rows: list[Row] = []
    analyzer: dict[str, float] = {}
    with EmbeddedServer.start(table, models=workloads) as server:
        endpoint = Endpoint(*server.http_address, True, server.table_digest, server.grpc_address[1])
        for workload in workloads:
            rng = random.Random(options.seed)
            rows += run_loop(measure(endpoint, workload, options.rounds, rng))
            if why_no_perf_analyzer() is None:
                analyzer[workload] = perf_analyzer_cycle_ms(endpoint, workload, options.rounds)
    http_mean_ms = {row.workload: float(row.cycle_ms.mean()) for row in rows if row.way == "http"}
    print(f"transport_overhead: {K} requests a batch, {options.rounds} rounds, load {os.getloadavg()[0]:.2f}")
    values, spreads, bars, held = {}, {}, {}, True
    for row in rows:
        rival = next(each for each in rows if each.workload == row.workload and each.way == RIVAL)
        kib = table[row.workload].payload_bytes // 1024
        value, low, high = ratio(row.overhead_ms, rival.overhead_ms, np.random.default_rng(options.seed))
        bar = BARS.get((row.workload, row.way))
        kept = bar is None or value <= bar
        held = held and kept
        lower, median, upper = np.quantile(row.overhead_ms, [0.25, 0.5, 0.75])
        verdict = "" if bar is None else f"  bar {bar:g}: {'held' if kept else 'MISSED'}"
        print(
            f"  {kib:5d} KiB {row.way:12s} cycle {np.median(row.cycle_ms):7.2f} ms"
            f"  D {median:7.2f} ms [{lower:.2f}, {upper:.2f}]"
            f"  ratio {value:.3f} [{low:.3f}, {high:.3f}]{verdict}"
        )
        if bar is not None:
            key = f"{row.way} {kib} KiB"
            values[key], spreads[key], bars[key] = round(value, 4), [round(low, 4), round(high, 4)], bar
    for workload, cycle_ms in analyzer.items():
        kib = table[workload].payload_bytes // 1024
        value = http_mean_ms[workload] / cycle_ms
        kept = value <= PERF_ANALYZER_BAR
        held = held and kept
        print(
            f"  {kib:5d} KiB perf_analyzer gRPC cycle {cycle_ms:.2f} ms, ours over http {http_mean_ms[workload]:.2f} ms"
            f"  ratio {value:.3f}  bar {PERF_ANALYZER_BAR:g}: {'held' if kept else 'MISSED'}"
        )
        values[f"cycle {kib} KiB"], bars[f"cycle {kib} KiB"] = round(value, 4), PERF_ANALYZER_BAR
    if not analyzer:
        print(f"  perf_analyzer: not run here: {why_no_perf_analyzer()}")
    report = {"name": "transport_overhead", "value": values, "bar": bars, "held": held, "spread": spreads}
    print(json.dumps(report))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
