"""perf_analyzer's CSV (``-f``), plain and ``--verbose-csv``. Text in, rows out; times in the file are microseconds.

Source of the columns: perf_analyzer's report writer. They come in one order, with percentiles as asked for; those of
the server are left out where it has no statistics; a response cache adds two; rows are sorted by throughput. Network is
the client's wait less the server's times, averages of different clocks, and is written as 0 where that is negative.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.foreign.rows import Kind, Row, Sweep, count, number, ordered, positive

CONCURRENCY: Final = "Concurrency"
RATE: Final = "Inferences/Second"
NETWORK: Final = "Network+Server Send/Recv"
SEND: Final = "Client Send"
RECEIVE: Final = "Client Recv"
SERVER: Final = {
    "Server Queue": "queue_s",
    "Server Compute Input": "input_s",
    "Server Compute Infer": "infer_s",
    "Server Compute Output": "output_s",
}
HEADER: Final = (CONCURRENCY, RATE, SEND, NETWORK, *SERVER, RECEIVE)
AVERAGE: Final = "Avg latency"
_PERCENTILE: Final = re.compile(r"(p\d+) latency")
_CACHE_HIT: Final = "Server Cache Hit"
_US: Final = 1e-6


def parse(text: str, name: str) -> Sweep:
    """The sweep. Raises ``UsageError`` where malformed, ``EvidenceError`` where it holds no concurrency sweep."""
    header, *lines = records(text, name)
    if CONCURRENCY not in header:
        if "Request Rate" in header:
            raise _no_concurrency(name)
        raise _lacks(CONCURRENCY, name)
    for column in (RATE, SEND, RECEIVE):
        if column not in header:
            raise _lacks(column, name)
    present = [column for column in (NETWORK, *SERVER) if column in header]
    if present and len(present) <= len(SERVER):
        raise _lacks(next(column for column in (NETWORK, *SERVER) if column not in header), name)
    cells = [dict(zip(header, line, strict=True)) for line in lines]
    return Sweep(kinds=(Kind.CSV,), files=(name,), rows=ordered((_row(each, name) for each in cells), name))


def records(text: str, name: str) -> Iterator[list[str]]:
    """The header and each row, of one length. Raises ``UsageError`` at one that is cut off, or a name twice."""
    width = None
    try:
        for number_of, record in enumerate(csv.reader(text.splitlines(), strict=True), 1):
            if not any(cell.strip() for cell in record):
                continue
            cells = [cell.strip() for cell in record]
            if width is None:
                width = len(cells)
                if len(set(cells)) < width:
                    raise UsageError("two columns of one name", observed=", ".join(cells)[:80], where=name)
            elif len(cells) != width:
                raise UsageError(
                    "a line has another number of cells than the header",
                    observed=f"{len(cells)} in line {number_of}",
                    allowed=str(width),
                    where=name,
                    hint="the file was cut off, or two files were joined: export it anew",
                )
            yield cells
    except csv.Error as error:
        raise UsageError("this is no CSV", observed=str(error), where=name, hint="export it anew") from None


def _row(cells: Mapping[str, str], name: str) -> Row:
    where = f"{name}, concurrency {cells[CONCURRENCY][:20]}"

    def seconds(column: str) -> float:
        return number(cells[column], where=f"{where}, {column}") * _US

    if _CACHE_HIT in cells and seconds(_CACHE_HIT) > 0:
        raise cached(where)
    times: dict[str, Any] = {attribute: seconds(column) for column, attribute in SERVER.items() if column in cells}
    network_s = seconds(NETWORK) if NETWORK in cells else None
    client_s = seconds(SEND) + seconds(RECEIVE)
    return Row(
        concurrency=count(cells[CONCURRENCY], where=f"{where}, {CONCURRENCY}", least=1),
        throughput_per_s=positive(cells[RATE], where=f"{where}, {RATE}"),
        latency_s=seconds(AVERAGE) if AVERAGE in cells else _sum_of(times, network_s, client_s),
        quantiles={found[1]: seconds(c) for c in cells if (found := _PERCENTILE.fullmatch(c))} or None,
        network_s=network_s,
        client_s=client_s,
        **times,
    )


def _sum_of(times: Mapping[str, float], network_s: float | None, client_s: float) -> float | None:
    """The plain form states no mean latency, but its parts; None where one of them was cut off at 0."""
    return network_s + client_s + sum(times.values()) if network_s else None


def cached(where: str) -> EvidenceError:
    """A response cache answered some requests, so that the server's times are those of the others."""
    return EvidenceError(
        "the server's response cache answered requests: no S is that of all of them",
        where=where,
        hint="measure with response_cache { enable: false }",
    )


def _no_concurrency(name: str) -> EvidenceError:
    return EvidenceError(
        "a sweep over the request rate: the number in flight is not controlled, so there is no M",
        observed="Request Rate",
        allowed=CONCURRENCY,
        where=name,
        hint="run perf_analyzer with --concurrency-range 1:8",
    )


def _lacks(column: str, name: str) -> UsageError:
    return UsageError(
        "a column is missing", observed=f"no {column}", allowed=", ".join(HEADER), where=name, hint="export it anew"
    )
