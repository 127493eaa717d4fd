"""perf_analyzer's JSON profile export: every request's times, nothing of the server. Text in, rows out.

Source of the form: perf_analyzer's profile data exporter: ``experiments`` with a mode and its value, ``requests`` with
a begin and the times of its responses in ns of the wall clock, and the boundaries of the measured windows. A row is the
responses within the last three windows, which is what the client's own report counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.foreign.rows import Kind, Row, Sweep, count, ordered
from b2gmodel.units import s_from_ns

WINDOWS: Final = 3
_QUANTILES: Final = (50, 90, 95, 99)
_LLM_PATHS: Final = ("chat/completions", "completions", "embeddings", "generate")
_LARGEST_NS: Final = 2**63


def parse(text: str, name: str) -> Sweep:
    """The sweep, in batches a second. Raises ``UsageError`` where malformed, ``EvidenceError`` where no answer."""
    try:
        document = json.loads(text, parse_constant=lambda constant: _malformed(name, constant))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "the export is no JSON, or cut off", observed=str(error)[:80], where=name, hint="export it anew"
        ) from None
    document = _object(document, name)
    service, endpoint = document.get("service_kind", ""), str(document.get("endpoint", ""))
    if service not in ("triton", "triton_c_api", "") or any(path in endpoint for path in _LLM_PATHS):
        raise EvidenceError(
            "an export of a service without compute times, or of a language model",
            observed=f"service_kind {str(service)[:40]!r}, endpoint {endpoint[:40]!r}",
            allowed="service_kind 'triton'",
            where=name,
            hint="M* is about batches that are answered at once by a server that states S",
        )
    experiments = document.get("experiments")
    if not isinstance(experiments, list):
        raise _bad("experiments", experiments, name)
    return Sweep(
        kinds=(Kind.PROFILE,),
        files=(name,),
        rows=ordered((_row(_object(each, name), name) for each in experiments), name),
        counts_batches=True,
        in_process=service == "triton_c_api",
    )


def _row(experiment: Mapping[str, Any], name: str) -> Row:
    said = _object(experiment.get("experiment"), name)
    if said.get("mode") != "concurrency":
        raise EvidenceError(
            "not a sweep over concurrency: the number in flight is not controlled, so there is no M",
            observed=str(said.get("mode"))[:40],
            allowed="concurrency",
            where=name,
            hint="run perf_analyzer with --concurrency-range 1:8",
        )
    value = said.get("value")
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _bad("value", value, name)
    where = f"{name}, concurrency {value}"
    requests, boundaries = experiment.get("requests"), experiment.get("window_boundaries", [])
    if not isinstance(requests, list) or not isinstance(boundaries, list):
        raise _bad("requests", type(requests).__name__, where)
    bounds = [_ns(each, where) for each in boundaries]
    if bounds != sorted(bounds):
        raise _bad("window_boundaries", "not in order", where)
    calls = [_call(_object(each, where), where) for each in requests]
    answered = [(begin, end) for begin, end in calls if end is not None]
    if not answered:
        raise EvidenceError("no request was answered", observed=len(requests), where=where, hint="run it anew")
    if len(bounds) >= 2:
        first, last = bounds[-min(len(bounds), WINDOWS + 1)], bounds[-1]
    else:
        first, last = min(begin for begin, _ in answered), max(end for _, end in answered)
    inside = [(begin, end) for begin, end in answered if first <= end <= last]
    if not inside or last <= first:
        raise EvidenceError("no request was answered within the measured windows", where=where, hint="run it anew")
    times_s = sorted(s_from_ns(end - begin) for begin, end in inside)
    mean_s = sum(times_s) / len(times_s)
    spread_s = (sum((each - mean_s) ** 2 for each in times_s) / max(len(times_s) - 1, 1)) ** 0.5
    return Row(
        concurrency=count(value, where=where, least=1),
        throughput_per_s=len(inside) / s_from_ns(last - first),
        latency_s=mean_s,
        latency_cv=spread_s / mean_s if mean_s > 0 and len(times_s) > 1 else None,
        quantiles={f"p{q}": times_s[min(len(times_s) * q // 100, len(times_s) - 1)] for q in _QUANTILES},
        batches=len(inside),
        failed=len(calls) - len(answered),
        duration_s=s_from_ns(last - first),
    )


def _call(request: Mapping[str, Any], where: str) -> tuple[int, int | None]:
    """Begin and end in ns; no end where it was not answered."""
    begin, ends = _ns(request.get("timestamp"), where), request.get("response_timestamps")
    if not isinstance(ends, list):
        raise _bad("response_timestamps", ends, where)
    if len(ends) > 1:
        raise EvidenceError(
            "a request with several responses: a decoupled or streaming model",
            observed=f"{len(ends)} responses",
            allowed="one a request",
            where=where,
            hint="M* is about batches that are answered at once",
        )
    end = _ns(ends[0], where) if ends else None
    if end is not None and end <= begin:
        raise _bad("response_timestamps", "an answer before its request", where)
    return begin, end


def _ns(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST_NS:
        raise _bad("a time in ns", value, where)
    return value


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _bad("an object", value, where)
    return value


def _malformed(name: str, constant: str) -> object:
    raise _bad("a number", constant, name)


def _bad(field: str, value: object, where: str) -> UsageError:
    return UsageError(
        f"not the form of a profile export: {field}",
        observed=str(value)[:60],
        allowed="experiments with mode, value, requests and window_boundaries",
        where=where,
        hint="export it anew",
    )
