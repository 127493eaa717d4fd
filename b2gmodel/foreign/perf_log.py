"""perf_analyzer's text log. Text in, rows out; times in it are microseconds. Lines without a figure are passed over.

Source of the lines: perf_analyzer's inference profiler. A row that did not stabilise, or passed the latency limit, is
named in a line and (in current versions) not reported; older ones report it, too.
"""

from __future__ import annotations

import re
from typing import Any, Final

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.foreign.perf_csv import cached
from b2gmodel.foreign.rows import Kind, Row, Sweep, count, number, ordered, positive

SETTINGS: Final = "*** Measurement Settings ***"
BEGIN: Final = re.compile(r"^Request concurrency: (\S+)", re.MULTILINE)
_US: Final = 1e-6
_NUMBER: Final = r"(-?[\d.]+(?:e[+-]?\d+)?|-?nan|-?inf)"
# Lines of a row: attribute -> pattern, in the client's part and in the server's.
_CLIENT: Final = {
    "batches": re.compile(rf"Request count: {_NUMBER}$"),
    "throughput_per_s": re.compile(rf"Throughput: {_NUMBER} infer/sec"),
    "latency_s": re.compile(rf"Avg latency: {_NUMBER} usec"),
}
_DEVIATION: Final = re.compile(rf"standard deviation {_NUMBER} usec")
_PERCENTILE: Final = re.compile(rf"(p\d+) latency: {_NUMBER} usec")
_PROTOCOL: Final = re.compile(r"Avg (HTTP|gRPC) time: ")
_SERVER: Final = {
    "executions": re.compile(rf"Execution count: {_NUMBER}$"),
    "counted": re.compile(rf"Successful request count: {_NUMBER}$"),
}
_TIMES: Final = re.compile(
    rf"Avg request latency: {_NUMBER} usec \(overhead {_NUMBER} usec \+ queue {_NUMBER} usec \+ "
    rf"compute input {_NUMBER} usec \+ compute infer {_NUMBER} usec \+ compute output {_NUMBER} usec\)"
)
_CACHE_HITS: Final = re.compile(rf"Cache hit count: {_NUMBER}")
_UNSTABLE: Final = re.compile(r"Failed to obtain stable measurement.*?(?:for concurrency (\d+))?\. ")
_LIMIT: Final = re.compile(rf"Measured latency went over the set limit of {_NUMBER} msec")
_BATCH: Final = re.compile(r"^ *Batch size: (\S+)", re.MULTILINE)
_SERVICE: Final = re.compile(r"^ *Service Kind: (\S+)", re.MULTILINE)
_SHARED: Final = re.compile(r"--shared-memory[= ](\w+)")
_SERVICES: Final = ("TRITON", "TRITON_C_API")
_ERRORS: Final = re.compile(r"^.*(?:\] had error|Failed to maintain requested inference load).*$", re.MULTILINE)
_END: Final = "Inferences/Second vs. Client"


def parse(text: str, name: str) -> Sweep:
    """The sweep. Raises ``UsageError`` where malformed, ``EvidenceError`` where it holds no answer."""
    _refuse(text, name)
    settings = _settings(text, name)
    body = text.split(_END, maxsplit=1)[0]
    parts = BEGIN.split(body)
    unstable = {int(found[1] or 0) for found in _UNSTABLE.finditer(body)}
    rows: list[Row] = []
    protocols: set[str] = set()
    for concurrency, lines in zip(parts[1::2], parts[2::2], strict=True):
        where = f"{name}, concurrency {concurrency[:20]}"
        at = count(concurrency, where=where, least=1)
        if re.search(_UNSTABLE, lines):
            unstable.add(at)
        row = _row(at, lines, where)
        if row is not None:
            rows.append(row)
            protocols |= {found.lower() for found in _PROTOCOL.findall(lines)}
        elif at not in unstable and not _LIMIT.search(lines):
            raise UsageError(
                "the row was cut off",
                observed="no throughput",
                allowed="each row whole",
                where=where,
                hint="the run was interrupted: take its rows from the CSV, or run it anew",
            )
    limit = _LIMIT.search(body)
    if not rows and limit:
        raise EvidenceError(
            "the client broke off at its latency limit before a row was measured",
            observed=f"over {limit[1]} ms",
            where=name,
            hint="raise --latency-threshold",
        )
    return Sweep(
        kinds=(Kind.LOG,),
        files=(name,),
        rows=ordered(rows, name),
        protocol=protocols.pop() if len(protocols) == 1 else None,
        unstable=tuple(sorted(unstable - {0})),
        knows_stability=True,
        limit_ms=number(limit[1], where=name) if limit else None,
        **settings,
    )


def _refuse(text: str, name: str) -> None:
    """What no row can heal."""
    if "Detected decoupled model" in text:
        raise EvidenceError(
            "a decoupled model: its latency is that of a first response of several", where=name,
            hint="M* is about batches that are answered at once",
        )  # fmt: skip
    if "Request Rate: " in text and not BEGIN.search(text):
        raise EvidenceError(
            "a sweep over the request rate: the number in flight is not controlled, so there is no M",
            observed="Request Rate",
            allowed="Request concurrency",
            where=name,
            hint="run perf_analyzer with --concurrency-range 1:8",
        )
    if "Composing models:" in text:
        raise EvidenceError(
            "an ensemble: its compute is that of several models, each with instances of its own",
            where=name,
            hint="run perf_analyzer on the slowest of them",
        )
    if error := _ERRORS.search(text):
        raise EvidenceError(
            "requests failed in this run", observed=error[0].strip()[:100], where=name, hint="run it anew"
        )


def _settings(text: str, name: str) -> dict[str, Any]:
    service = _SERVICE.search(text)
    if service and service[1] not in _SERVICES:
        raise EvidenceError(
            "the service states no compute times, so that S is not known",
            observed=f"Service Kind: {service[1][:40]}",
            allowed=" or ".join(_SERVICES),
            where=name,
            hint="S needs a server with Triton's statistics",
        )
    batch, shared = _BATCH.search(text), _SHARED.search(text)
    return {
        "batch_size": count(batch[1], where=f"{name}, Batch size", least=1) if batch else None,
        "shared_memory": shared[1] != "none" if shared else None,
        "in_process": bool(service and service[1] == "TRITON_C_API"),
    }


def _row(concurrency: int, lines: str, where: str) -> Row | None:
    """None where the row was not reported."""
    client, _, server = lines.partition("Server:")
    # With -v each pass is shown, too: what is reported comes last.
    client = client[client.rfind("Client:") :]
    said: dict[str, Any] = {}
    for part, patterns in ((client, _CLIENT), (server, _SERVER)):
        for line in part.splitlines():
            for attribute, pattern in patterns.items():
                if attribute not in said and (found := pattern.match(line.strip())):
                    said[attribute] = found[1]
    if "throughput_per_s" not in said:
        return None
    if any(number(hits, where=where) > 0 for hits in _CACHE_HITS.findall(server)):
        raise cached(where)
    for attribute in ("batches", "executions", "counted"):
        if attribute in said:
            said[attribute] = count(said[attribute], where=f"{where}, {attribute}")
    said["throughput_per_s"] = positive(said["throughput_per_s"], where=f"{where}, Throughput")
    if "latency_s" in said:
        said["latency_s"] = number(said["latency_s"], where=f"{where}, Avg latency") * _US
        if (found := _DEVIATION.search(client)) and said["latency_s"] > 0:
            said["latency_cv"] = number(found[1], where=f"{where}, standard deviation") * _US / said["latency_s"]
    quantiles = {p: number(value, where=f"{where}, {p}") * _US for p, value in _PERCENTILE.findall(client)}
    times = _TIMES.search(server)
    if times is None and server.strip():
        raise UsageError(
            "the server's times are not there, or cut off",
            observed=(server.strip().splitlines() or [""])[-1].strip()[:60],
            allowed="Avg request latency with overhead, queue and compute times",
            where=where,
            hint="run it anew",
        )
    if times is not None:
        _, _, *parts = (number(each, where=f"{where}, Avg request latency") * _US for each in times.groups())
        said |= dict(zip(("queue_s", "input_s", "infer_s", "output_s"), parts, strict=True))
    return Row(
        concurrency=concurrency,
        quantiles=quantiles or None,
        is_overloaded="not able to keep up" in lines,
        **said,
    )
