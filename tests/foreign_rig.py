"""Files of other tools for tests: the kept samples, and edits of them.

The samples are real output of perf_analyzer against emulated compute on two cores: ``resnet_http`` (batch 8 of
588 KiB), ``yolo_shm`` (batch 8 of 4,800 KiB in shared memory) and ``dyn_http`` (dynamic batching, batch 1).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SAMPLES = Path(__file__).parent / "data" / "foreign"
PLAIN = (
    "Concurrency,Inferences/Second,Client Send,Network+Server Send/Recv,Server Queue,Server Compute Input,"
    "Server Compute Infer,Server Compute Output,Client Recv,p50 latency,p90 latency,p95 latency,p99 latency"
)
# C = 10 ms, S = 1 + 4 + 1 = 6 ms, k = 1, and a second row that is near the bound of 166.7 request/s.
ALONE = "1,99,1000,2500,500,1000,4000,1000,0,10000,11000,11500,12000"
TWO = "2,160,1000,3000,2500,1000,4000,1000,0,12500,13000,13500,14000"
TABLE = (
    "Model,Batch,Concurrency,Model Config Path,Instance Group,Max Batch Size,Satisfies Constraints,"
    "Throughput (infer/sec),p99 Latency (ms)"
)
TIMES = (
    "Avg Latency (ms),Server Queue time (ms),Server Compute Input time (ms),Server Compute Infer time (ms),"
    "Server Compute Output time (ms)"
)


def sample(name: str) -> str:
    return (SAMPLES / name).read_text(encoding="utf-8")


def plain(*rows: str, header: str = PLAIN) -> str:
    return "\n".join((header, *rows)) + "\n"


def cell(row: str, column: str, value: object, header: str = PLAIN) -> str:
    """A row with one cell changed."""
    cells = row.split(",")
    cells[header.split(",").index(column)] = str(value)
    return ",".join(cells)


def table(*rows: str, header: str = f"{TABLE},{TIMES}") -> str:
    return "\n".join((header, *rows)) + "\n\n"


def log_row(concurrency: int, rate: float, latency_us: int, *, batches: int = 100, executions: int = 100) -> str:
    return f"""\
Request concurrency: {concurrency}
  Client:
    Request count: {batches}
    Throughput: {rate} infer/sec
    Avg latency: {latency_us} usec (standard deviation {latency_us // 10} usec)
    p50 latency: {latency_us} usec
    Avg HTTP time: {latency_us - 10} usec (send/recv 100 usec + response wait {latency_us - 110} usec)
  Server:
    Inference count: {batches}
    Execution count: {executions}
    Successful request count: {batches}
    Avg request latency: 6510 usec (overhead 10 usec + queue 500 usec + compute input 1000 usec + compute infer 4000 \
usec + compute output 1000 usec)
"""


def log(*rows: str, settings: str = "  Batch size: 1\n  Service Kind: TRITON\n") -> str:
    return f"*** Measurement Settings ***\n{settings}\n" + "".join(rows) + "Inferences/Second vs. Client Average\n"


def profile(
    *concurrencies: int, batches: int = 50, latency_ns: int = 10_000_000, mode: str = "concurrency", **changes: Any
) -> str:
    """A profile export with constant latency, each experiment in one window."""
    experiments = []
    for concurrency in concurrencies:
        begins = [10**18 + number * latency_ns for number in range(batches) for _ in range(concurrency)]
        requests = [
            {
                "timestamp": begin,
                "request_inputs": {},
                "response_timestamps": [begin + latency_ns],
                "response_outputs": [],
            }
            for begin in begins
        ]
        experiments.append(
            {
                "experiment": {"mode": mode, "value": concurrency},
                "requests": requests,
                "window_boundaries": [10**18, 10**18 + batches * latency_ns],
            }
        )
    return json.dumps({"experiments": experiments, "version": "0", "service_kind": "triton", "endpoint": ""} | changes)
