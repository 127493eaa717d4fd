"""What if the system were another: the same laws with one quantity changed, and what that assumes, in words.

Rules here: a change is an extrapolation and says so. What cannot be known from the calibration is refused, with what
to calibrate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.laws import (
    Floats,
    Laws,
    LinearLaw,
    choose_point,
    laws_of,
    points_with_blocks,
    service_line,
    transport_line,
)
from b2gmodel.records import Calibration, CalibrationPoint

PARAMETERS: Final = ("payload", "k", "instances", "service", "link", "transport")
_ALLOWED: Final = "payload=0.5x, k=16, instances=2, service=0.5x, link=10x, transport=shm"


@dataclass(frozen=True, slots=True)
class Change:
    """One changed quantity.

    Attributes:
        parameter: one of ``PARAMETERS``.
        value: the factor for payload, service and link; the number itself for k and instances; 1 for transport.
        other: for transport, the calibration over the other transport.
    """

    parameter: str
    value: float
    other: Calibration | None = None

    def __str__(self) -> str:
        if self.other is not None:
            return f"transport={self.other.transport}"
        return f"{self.parameter}={self.value:g}{'x' if self.parameter in _FACTORS else ''}"


_FACTORS: Final = ("payload", "service", "link")
_MOST_INSTANCES: Final = 1024


def parse_changes(text: str, others: Sequence[Calibration] = ()) -> tuple[Change, ...]:
    """``payload=0.5x,instances=2`` as changes.

    Args:
        text: comma-separated; payload, service and link take a factor with an x, k and instances a whole number,
            transport the name of a transport over which one of ``others`` was calibrated.
        others: calibrations over other transports.

    Raises:
        UsageError: an unknown quantity, one named twice, or a value outside its domain.
    """
    changes: list[Change] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in PARAMETERS or not value:
            raise _refused(part)
        if any(change.parameter == name for change in changes):
            raise UsageError("changed twice", observed=name, allowed="once", where="--what-if")
        if name == "transport":
            changes.append(_transport(value, others))
            continue
        number = value.removesuffix("x")
        if (name in _FACTORS) != value.endswith("x"):
            raise _refused(part)
        try:
            amount = float(number)
        except ValueError:
            raise _refused(part) from None
        whole = name not in _FACTORS
        if not (np.isfinite(amount) and amount > 0) or (whole and amount != int(amount)):
            raise _refused(part)
        if name == "instances" and amount > _MOST_INSTANCES:
            raise UsageError(
                "too many instances", observed=int(amount), allowed=f"1 to {_MOST_INSTANCES}", where="--what-if"
            )
        changes.append(Change(name, amount))
    if not changes:
        raise _refused(text)
    return tuple(changes)


def _refused(part: str) -> UsageError:
    return UsageError("not a change", observed=part, allowed=_ALLOWED, where="--what-if")


def _transport(value: str, others: Sequence[Calibration]) -> Change:
    found = [other for other in others if other.transport == value]
    if not found:
        raise UsageError(
            "no calibration over this transport is given",
            observed=value,
            allowed=", ".join(str(other.transport) for other in others) or "none given",
            where="--what-if",
            hint=f"calibrate over it, b2g calibrate --transport {value}, and name that with --transport-from",
        )
    return Change("transport", 1.0, found[0])


def changed(
    calibration: Calibration, k: int | None, changes: Sequence[Change], draws: int, rng: np.random.Generator
) -> tuple[Calibration, CalibrationPoint, Laws, tuple[str, ...]]:
    """The laws after all changes.

    Returns:
        The calibration with its model and transport changed, the point with its k and payload changed, the laws, and
        one sentence a change: what it assumes.

    Raises:
        UsageError: a payload of no byte, or k beyond what the model takes.
        EvidenceError: a law that is needed was not measured, or the calibration states no times.
    """
    wanted = {change.parameter: change for change in changes}
    point, model = choose_point(calibration, k), calibration.model
    laws = laws_of(calibration, point, draws, rng)
    if not laws.is_timed:
        raise EvidenceError(
            "a what-if needs S and D in seconds",
            observed="a transport share alone",
            where=calibration.name,
            hint="calibrate the model on a server of yours with b2g calibrate",
        )
    said = [f"what if {', '.join(map(str, changes))}: an extrapolation, not a measurement of this system"]
    if "instances" in wanted:
        laws, words = _with_instances(laws, int(wanted["instances"].value))
        model = model.model_copy(update={"instances": laws.instances})
        said.append(words)
    if "k" in wanted:
        laws, point, words = _with_batch(calibration, laws, point, int(wanted["k"].value), rng)
        said.append(words)
    if "service" in wanted:
        factor = wanted["service"].value
        laws = _with_service(laws, laws.service_s * factor, laws.busy_service_s * factor)
        said.append(f"service: S becomes {factor:g} times as long at every load; D stays")
    if "transport" in wanted:
        laws, words = _with_transport(laws, point, wanted["transport"].other, rng)
        said.append(words)
    if "payload" in wanted or "link" in wanted:
        payload = wanted["payload"].value if "payload" in wanted else 1.0
        link = wanted["link"].value if "link" in wanted else 1.0
        laws, words = _with_bytes(calibration, laws, point, payload / link)
        said.append(words)
        payload_bytes = round(point.payload_bytes * payload)
        if payload_bytes < 1:
            raise UsageError("a payload without a byte", observed=payload, where="--what-if payload")
        point = point.model_copy(update={"payload_bytes": payload_bytes})
    seen: dict[str, object] = {"model": model}
    if "transport" in wanted and wanted["transport"].other is not None:
        seen["transport"] = wanted["transport"].other.transport
    return calibration.model_copy(update=seen), point, laws, tuple(said)


def _with_instances(laws: Laws, instances: int) -> tuple[Laws, str]:
    had = laws.instances
    if instances <= had:
        known = laws.is_compute_law_measured or instances == 1
        fewer = replace(laws, busy_service_s=laws.busy_service_s[:, :instances], is_compute_law_measured=known)
        return fewer, f"instances: S(j) as measured up to {had}"
    longer = np.repeat(laws.busy_service_s[:, -1:], instances - had, axis=1)
    busy_s = np.concatenate([laws.busy_service_s, longer], axis=1)
    return replace(laws, busy_service_s=busy_s, is_compute_law_measured=False), (
        f"instances: S stays as it is with {had} busy, though published sweeps show two instances on one GPU slower "
        "than one: an upper bound, until S(j) is calibrated with that many"
    )


def _with_batch(
    calibration: Calibration, laws: Laws, point: CalibrationPoint, k: int, rng: np.random.Generator
) -> tuple[Laws, CalibrationPoint, str]:
    most = calibration.model.max_batch_size
    if most is not None and k > max(1, most):
        raise UsageError("the batch is larger than the model takes", observed=k, allowed=f"1 to {most}", where="k")
    service, transport = service_line(calibration), transport_line(calibration)
    rows = len(laws.cycle_s)
    service_s = _drawn(service, k, rows, rng)
    transport_s = _drawn(transport, k * point.payload_bytes, rows, rng)
    if not ((service_s > 0).all() and (transport_s + service_s > 0).all()):
        raise EvidenceError("the lines reach zero at this batch size", observed=k, where="k", hint="calibrate it")
    grown = laws.busy_service_s / laws.service_s[:, np.newaxis]
    moved = _with_service(laws, service_s, service_s[:, np.newaxis] * grown)
    moved = _with_transport_s(replace(moved, batch=k), laws.transport_s, transport_s)
    doubt = [name for name, line in (("S(k)", service), ("D(bytes)", transport)) if line.is_wrong]
    words = f"k: S and D on the lines through k = {', '.join(f'{value:g}' for value in service.x)}"
    if doubt:
        words += f", and a line does not fit {' and '.join(doubt)}"
    return moved, point.model_copy(update={"k": k}), words


def _with_service(laws: Laws, service_s: Floats, busy_s: Floats) -> Laws:
    """Another S with the same D."""
    return replace(laws, cycle_s=laws.cycle_s - laws.service_s + service_s, service_s=service_s, busy_service_s=busy_s)


def _with_transport_s(laws: Laws, before_s: Floats, after_s: Floats) -> Laws:
    """Another D, with transport's rates in the same proportion to 1 / D."""
    rates = laws.transport_rates_per_s
    if rates is not None:
        rates = rates * (before_s / after_s)[:, np.newaxis]
    return replace(laws, cycle_s=laws.service_s + after_s, transport_rates_per_s=rates)


def _with_bytes(calibration: Calibration, laws: Laws, point: CalibrationPoint, factor: float) -> tuple[Laws, str]:
    """D's part that grows with the bytes, times ``factor``: fewer bytes, or a faster link, act alike."""
    fixed_share = 0.0
    words = "payload and link: all of D is taken to grow with the bytes (one batch size was calibrated)"
    if len(points_with_blocks(calibration)) > 1:
        line = transport_line(calibration)
        batch_bytes = (point.k or 1) * point.payload_bytes
        whole_s = line.at(batch_bytes)
        fixed_share = min(max(line.intercept / whole_s, 0.0), 1.0) if whole_s > 0 else 0.0
        words = f"payload and link: {1 - fixed_share:.0%} of D grows with the bytes, by the line D = a + b bytes"
        if line.is_wrong:
            words += ", which does not fit well"
    after_s = laws.transport_s * (fixed_share + (1 - fixed_share) * factor)
    words += "; the rates of several batches in transport change as 1 / D does, and S stays, though it reads the input"
    return _with_transport_s(laws, laws.transport_s, after_s), words


def _with_transport(
    laws: Laws, point: CalibrationPoint, other: Calibration | None, rng: np.random.Generator
) -> tuple[Laws, str]:
    """D and the transport's rates of another calibration, at the same bytes."""
    assert other is not None
    batch_bytes = (point.k or 1) * point.payload_bytes
    same = [each for each in other.points if each.k is not None and each.k * each.payload_bytes == batch_bytes]
    if not same or same[0].cycle_s is None or same[0].service_s is None:
        raise EvidenceError(
            "the other calibration has no batch of these bytes",
            observed=", ".join(str((each.k or 0) * each.payload_bytes) for each in other.points),
            allowed=str(batch_bytes),
            where=other.name,
            hint="calibrate the same payload and k over the other transport",
        )
    theirs = laws_of(other, same[0], laws.draws, rng)
    # Where only one of the two states an uncertainty, the other's estimate stands for all its draws.
    rows = range(1 + laws.draws) if theirs.draws else [0] * (1 + laws.draws)
    rates = theirs.transport_rates_per_s
    moved = replace(
        laws,
        cycle_s=laws.service_s + theirs.transport_s[rows],
        transport_rates_per_s=None if rates is None else rates[rows],
        transport_cv=theirs.transport_cv,
    )
    return moved, f"transport: D and the transport law of {other.name} ({other.transport}); S stays"


def _drawn(line: LinearLaw, x: float, rows: int, rng: np.random.Generator) -> Floats:
    return np.concatenate([[line.at(x)], line.draws_at(x, rows - 1, rng)])
