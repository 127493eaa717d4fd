"""A measurement of ours as perf_analyzer's plain CSV. Records in, text out.

Rules here: the client's own header and order of rows; times in whole microseconds, throughput with six digits, as it
writes them. S is one figure with us and stands under Infer, with 0 for input and output; sending and receiving are in
Network, which is C - S - queue, and 0 where that is negative, as the client has it. Server columns and percentiles are
left out, as the client does, where a run does not state them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from b2gmodel.errors import EvidenceError
from b2gmodel.foreign.perf_csv import CONCURRENCY, NETWORK, RATE, RECEIVE, SEND, SERVER
from b2gmodel.records import Measurement, Run

_US: Final = 1e6
_PERCENTILES: Final = ("p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Exported:
    """The CSV, and what did not fit in.

    Attributes:
        text: header and a row an M, in order of throughput.
        rows: how many.
        notes: a clause each.
    """

    text: str
    rows: int
    notes: tuple[str, ...]


def export_csv(measurement: Measurement) -> Exported:
    """C3 and C4 as rows: means over sessions and runs. Raises ``EvidenceError`` where there is no such run."""
    runs: dict[int, list[Run]] = {}
    for session in measurement.sessions:
        for run in session.runs:
            if run.placement in ("C3", "C4"):
                runs.setdefault(run.flights, []).append(run)
    if not runs:
        raise EvidenceError(
            "nothing to export: no run of C3 or C4",
            observed=", ".join(sorted({run.placement for each in measurement.sessions for run in each.runs})),
            allowed="C3 or C4, which keep a number of batches in flight",
            where=measurement.name,
        )
    every = [run for of in runs.values() for run in of]
    with_server = all(run.service_s is not None and run.cycle_s is not None for run in every)
    shown = tuple(p for p in _PERCENTILES if all(run.cycle_s and p in (run.cycle_s.quantiles or {}) for run in every))
    header = [CONCURRENCY, RATE, SEND, *((NETWORK, *SERVER) if with_server else ()), RECEIVE]
    header += [f"{p} latency" for p in shown]
    rows = sorted(
        (_row(flights, of, with_server, shown) for flights, of in runs.items()), key=lambda row: float(row[1])
    )
    lines = [",".join(cells) for cells in (header, *rows)]
    return Exported("\n".join(lines) + "\n", len(rows), tuple(_notes(measurement, header, rows, with_server)))


def _row(flights: int, runs: Sequence[Run], with_server: bool, shown: Sequence[str]) -> list[str]:
    cells = [str(flights), f"{np.mean([run.throughput_per_s for run in runs]):.6g}", "0"]
    if with_server:
        cycle_s, service_s = _mean(_cycles(runs)), _mean([run.service_s or 0.0 for run in runs])
        queue_s = _mean([run.queue_s or 0.0 for run in runs])
        # The parts as they are written add up to C as it is written.
        service_us, queue_us = _us(service_s), _us(queue_s)
        network_us = max(_us(cycle_s) - service_us - queue_us, 0)
        cells += [str(network_us), str(queue_us), "0", str(service_us), "0"]
    cells.append("0")
    for p in shown:
        cells.append(str(_us(_mean([(run.cycle_s.quantiles or {})[p] for run in runs if run.cycle_s is not None]))))
    return cells


def _cycles(runs: Sequence[Run]) -> list[float]:
    return [run.cycle_s.mean for run in runs if run.cycle_s is not None]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def _us(seconds: float) -> int:
    return round(seconds * _US)


def _notes(
    measurement: Measurement, header: Sequence[str], rows: Sequence[Sequence[str]], with_server: bool
) -> list[str]:
    notes = []
    left_out = sorted({run.placement for each in measurement.sessions for run in each.runs} - {"C3", "C4"})
    if left_out:
        notes.append(f"left out: {', '.join(left_out)}, which keep no number of batches in flight")
    if not with_server:
        notes.append("no server columns: the runs do not state C and S")
        return notes
    notes.append("S stands under Server Compute Infer; sending and receiving are within Network")
    clamped = [row[0] for row in rows if row[header.index(NETWORK)] == "0"]
    if clamped:
        notes.append(f"network cut off at 0, so that C cannot be read back, at M = {', '.join(clamped)}")
    return notes
