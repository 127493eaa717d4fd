"""Model Analyzer's table of inference results (metrics-model-inference.csv). Text in, rows out; times are milliseconds.

Source of the columns: Model Analyzer's result table manager and its records. Which ones a table has is the user's
choice; by default neither mean latency nor compute times are among them, and ``inference_output_fields`` adds them. A
table holds one line a configuration and concurrency, so that one configuration has to be chosen; figures are rounded
to 0.1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.foreign.perf_csv import records
from b2gmodel.foreign.rows import Kind, Row, Sweep, count, number, ordered, positive

CONFIGURATION: Final = "Model Config Path"
_RATE: Final = "Throughput (infer/sec)"
_TIMES: Final = {
    "Avg Latency (ms)": ("latency_s", "perf_latency_avg"),
    "Server Queue time (ms)": ("queue_s", "perf_server_queue"),
    "Server Compute Input time (ms)": ("input_s", "perf_server_compute_input"),
    "Server Compute Infer time (ms)": ("infer_s", "perf_server_compute_infer"),
    "Server Compute Output time (ms)": ("output_s", "perf_server_compute_output"),
}
_CLIENT: Final = "Client Send/Recv time (ms)"
_PERCENTILE: Final = re.compile(r"(p\d+) Latency \(ms\)")
_TIME_COLUMN: Final = re.compile(r"(.*(?:[Ll]atency|time)) \((\w+)\)")
_MS: Final = 1e-3


def parse(text: str, name: str, *, configuration: str | None = None, batch_size: int | None = None) -> Sweep:
    """The sweep of one configuration at one batch size.

    Raises:
        UsageError: malformed, another unit than ms, or several configurations or batch sizes and none chosen.
        EvidenceError: a table without a concurrency, or of several models that ran together.
    """
    header, *lines = records(text, name)
    _check_columns(header, name)
    cells = [dict(zip(header, line, strict=True)) for line in lines]
    cells = _chosen(cells, CONFIGURATION, configuration, "--config", name)
    cells = _chosen(cells, "Batch", None if batch_size is None else str(batch_size), "--batch-size", name)
    first = cells[0] if cells else {}
    return Sweep(
        kinds=(Kind.TABLE,),
        files=(name,),
        rows=ordered((_row(each, name) for each in cells), name),
        batch_size=count(first["Batch"], where=f"{name}, Batch", least=1) if "Batch" in first else None,
        model=first.get("Model", "")[:200] or None,
        instances=_instances(first.get("Instance Group", "")),
        max_batch_size=_whole(first.get("Max Batch Size")),
    )


def fields_for_times() -> str:
    """What to ask Model Analyzer for."""
    return ", ".join(field for _, field in _TIMES.values())


def _check_columns(header: list[str], name: str) -> None:
    for column in header:
        found = _TIME_COLUMN.fullmatch(column)
        if found and found[2] != "ms":
            raise UsageError(
                "a time in another unit than Model Analyzer's",
                observed=column[:60],
                allowed=f"{found[1][:50]} (ms)",
                where=name,
                hint="give the table as Model Analyzer wrote it",
            )
    if "Concurrency" not in header:
        at = "Request Rate" if "Request Rate" in header else header[0][:40]
        raise EvidenceError(
            "a table without concurrency: there is no M in it",
            observed=at,
            allowed="Concurrency",
            where=name,
            hint="give metrics-model-inference.csv of a search over concurrency",
        )
    if _RATE not in header:
        raise UsageError(
            "a column is missing", observed=f"no {_RATE}", allowed=_RATE, where=name,
            hint="give metrics-model-inference.csv, not the table of GPU or server metrics",
        )  # fmt: skip


def _chosen(
    cells: list[dict[str, str]], column: str, wanted: str | None, option: str, name: str
) -> list[dict[str, str]]:
    """The lines with the wanted value of a column, or with the only one that there is."""
    known = sorted({each[column] for each in cells if column in each})
    if not known or (wanted is None and len(known) == 1):
        return cells
    if wanted is None or wanted not in known:
        raise UsageError(
            f"the table holds more than one {column}" if wanted is None else f"the table holds no such {column}",
            observed=wanted if wanted is not None else ", ".join(known)[:120],
            allowed=", ".join(known)[:120],
            where=name,
            hint=f"name one: {option} {known[0][:60]}",
        )
    return [each for each in cells if each[column] == wanted]


def _row(cells: Mapping[str, str], name: str) -> Row:
    if "," in cells["Concurrency"]:
        raise EvidenceError(
            "several models ran together: one cycle does not describe them",
            observed=cells["Concurrency"][:40],
            allowed="one concurrency a line",
            where=name,
            hint="profile one model at a time",
        )
    where = f"{name}, concurrency {cells['Concurrency'][:20]}"

    def seconds(column: str) -> float:
        return number(cells[column], where=f"{where}, {column}") * _MS

    times: dict[str, Any] = {attribute: seconds(column) for column, (attribute, _) in _TIMES.items() if column in cells}
    return Row(
        concurrency=count(cells["Concurrency"], where=f"{where}, Concurrency", least=1),
        throughput_per_s=positive(cells[_RATE], where=f"{where}, {_RATE}"),
        quantiles={found[1]: seconds(c) for c in cells if (found := _PERCENTILE.fullmatch(c))} or None,
        client_s=seconds(_CLIENT) if _CLIENT in cells else None,
        **times,
    )


def _instances(text: str) -> int | None:
    """From ``2:GPU + 1:CPU``, or ``2/GPU,1/CPU`` as older versions write it; None where neither."""
    found = re.findall(r"(\d{1,4})[:/][A-Z]+", text)
    return sum(map(int, found)) or None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 8 else None
