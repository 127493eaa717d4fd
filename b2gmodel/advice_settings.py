"""Settings to paste, for the server, for Ray Serve and for our proxy: each with its reason and its confidence.

Rules here: a setting says no more than the recommendation does; what is not known is named in capitals, for the reader
to fill in.

Sources: Triton Inference Server, model configuration (``instance_group``, ``dynamic_batching``); Ray Serve, API of
``serve.batch`` and ``serve.deployment``.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Final, Literal

from b2gmodel.records import Calibration, Record, Text

Confidence = Literal["high", "medium", "low", "not known"]
Placed = Literal["C1", "C2", "C3", "C4"]

_QUEUE: Final = 256
"""The default of ``b2g serve --queue``."""


class Setting(Record):
    """What to paste where, why, and how far to trust it."""

    where: Literal["triton", "ray-serve", "b2g-serve"]
    text: Text
    reason: Text
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the settings are to bring about.

    Attributes:
        calibration: of the model.
        placed: where batches are formed.
        k, flights: most requests to a batch, and batches in flight; for C2 the server's greatest batch, and the
            requests in flight.
        wait_s: the formation deadline; None where the proxy forms no batches.
        why_wait: the reason for it.
        confidence: in the whole.
    """

    calibration: Calibration
    placed: Placed
    k: int
    flights: int
    wait_s: float | None
    why_wait: str
    confidence: Confidence


def counted(number: int, one: str) -> str:
    """``1 request``, ``2 requests``."""
    return f"{number} {one}" if number == 1 else f"{number} {one}s"


def settings(wanted: Wanted) -> tuple[Setting, ...]:
    """One for each of the three."""
    return (_triton(wanted), _ray_serve(wanted), _b2g_serve(wanted))


def _triton(wanted: Wanted) -> Setting:
    model = wanted.calibration.model
    batches = "the server merges" if wanted.placed == "C2" else "it gets"
    lines = [
        f"max_batch_size: {max(wanted.k, model.max_batch_size or 0)}",
        f"instance_group [ {{ count: {model.instances or 1} }} ]",
    ]
    instances, together = counted(model.instances or 1, "instance"), counted(wanted.k, "request")
    reason = f"{instances}, as calibrated, of the kind that it has; {batches} up to {together} at once; "
    if wanted.placed == "C2":
        lines.append("dynamic_batching { max_queue_delay_microseconds: 0 }")
        reason += "it waits for none and prefers no size, as predicted: what has queued goes together"
    elif wanted.placed == "C1":
        reason += "without dynamic_batching: one request at a time is the better here"
    elif model.dynamic_batching:
        preferred = "".join(
            f" preferred_batch_size: [ {', '.join(map(str, sizes))} ]"
            for sizes in [model.preferred_batch_sizes]
            if sizes
        )
        delay_us = round(1e6 * (model.queue_delay_s or 0.0))
        lines.append(f"dynamic_batching {{{preferred} max_queue_delay_microseconds: {delay_us} }}")
        reason += "dynamic_batching as it was when this was calibrated: the prediction holds with it alone"
    else:
        reason += (
            "without dynamic_batching: batches come full from the proxy, and a queue delay would only hold them up"
        )
    return Setting(where="triton", text="\n".join(lines), reason=reason, confidence=wanted.confidence)


def _ray_serve(wanted: Wanted) -> Setting:
    if wanted.placed in ("C1", "C2"):
        text = f"@serve.deployment(max_ongoing_requests={wanted.flights})"
        reason = f"{counted(wanted.flights, 'request')} in flight, passed on one by one: no @serve.batch"
    else:
        wait_s = wanted.wait_s or 0.0
        text = (
            f"@serve.deployment(max_ongoing_requests={wanted.k * (wanted.flights + 1)})\n"
            f"@serve.batch(max_batch_size={wanted.k}, batch_wait_timeout_s={wait_s:.4g}, "
            f"max_concurrent_batches={wanted.flights})"
        )
        reason = (
            f"k = {wanted.k} and M = {wanted.flights}; the first line goes on the class, the second on its method; "
            f"with fewer ongoing requests than k (M + 1) the next batch could not form while M fly; {wanted.why_wait}"
        )
    return Setting(where="ray-serve", text=text, reason=reason, confidence=wanted.confidence)


def _b2g_serve(wanted: Wanted) -> Setting:
    of, transport = wanted.calibration, wanted.calibration.transport or "http"
    address = None if of.server is None else of.server.address
    url = "http://HOST:8000" if address is None else address if "://" in address else f"http://{address}"
    parts = [f"b2g serve --url {shlex.quote(url)} --model {shlex.quote(of.model.name)}"]
    if wanted.placed in ("C1", "C2"):
        parts.append(f"--placement {wanted.placed} -k 1 -M {wanted.flights}")
        reason = f"requests one by one, up to {wanted.flights} in flight"
    else:
        wait = f"{1e3 * (wanted.wait_s or 0.0):.4g}ms"
        parts.append(f"-k {wanted.k} -M {wanted.flights} --formation-deadline {wait}")
        reason = f"batches of up to {wanted.k}, at most {wanted.flights} in flight; {wanted.why_wait}"
        if wanted.k * (wanted.flights + 1) > _QUEUE:
            parts.append(f"--queue {wanted.k * (wanted.flights + 1)}")
    parts.append(f"--transport {shlex.quote(transport)}")
    if transport == "grpc":
        parts.append("--grpc-url HOST:8001")
    if transport == "shm":
        reason += "; shared memory needs the proxy on the server's own machine"
    return Setting(where="b2g-serve", text=" ".join(parts), reason=reason, confidence=wanted.confidence)
