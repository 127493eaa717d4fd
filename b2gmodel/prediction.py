"""Calibration -> Prediction. Single-flight data only: no function here takes a measurement.

No clock, no file: the same calibration and options give the same prediction, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from b2gmodel.closed_form import (
    cycle_to_service_from_share,
    flights_distribution,
    optimal_flights,
    throughput,
)
from b2gmodel.errors import EvidenceError, UsageError
from b2gmodel.records import (
    NAME_PATTERN,
    Calibration,
    CalibrationPoint,
    Claim,
    CurvePoint,
    Plan,
    Prediction,
    PredictorResult,
    Software,
    digest_of,
)
from b2gmodel.stats import bootstrap_blocks

CLOSED_FORM: Final = "closed-form"
DEFAULT_FLIGHTS: Final = (1, 2, 3, 4, 6, 8)
DEFAULT_CURVE: Final = tuple(range(1, 17))
REGRET_BOUND: Final = 0.05
_LEVEL: Final = 0.90

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SingleFlight:
    """What the closed form needs: X(1) and C/S, with draws of both where the calibration's uncertainty is known.

    Attributes:
        throughput_per_s: requests a second with one batch in flight.
        cycle_to_service: C / S.
        draws: shape [draws, 2], columns as above; None where the calibration states no uncertainty.
    """

    throughput_per_s: float
    cycle_to_service: float
    draws: Floats | None


def predict(
    calibration: Calibration,
    *,
    k: int | None,
    plan: Plan,
    software: Software,
    name: str | None = None,
    flights: Sequence[int] = DEFAULT_CURVE,
    seed: int = 1,
    draws: int = 2000,
) -> Prediction:
    """Predict X(M) and M* for one point of a calibration.

    Args:
        calibration: what single-flight showed.
        k: which point; None takes the only one, or the largest batch.
        plan: what will be measured; M* is added to its flights where it is not among them.
        software: what predicts.
        flights: the M of the curve.
        seed, draws: of the bootstrap over the calibration's blocks.

    Raises:
        UsageError: no such point, a plan of M* alone, or a name that is none.
        EvidenceError: the calibration lacks what the closed form needs, or its times are not physical.
    """
    point = _choose(calibration, k)
    instances = calibration.model.instances or 1
    single = _single_flight(calibration, point, np.random.default_rng(seed), draws)
    plan = _plan_with(plan, optimal_flights(single.cycle_to_service, instances))
    result = closed_form_result(single, instances, sorted({*flights, *plan.flights}))
    return Prediction(
        name=_check_name(name or (f"{calibration.name}-k{point.k}" if point.k is not None else calibration.name)),
        calibration_name=calibration.name,
        calibration_digest=digest_of(calibration),
        software=software,
        server=calibration.server,
        model=calibration.model,
        transport=calibration.transport,
        k=point.k,
        payload_bytes=point.payload_bytes,
        seed=seed,
        draws=draws,
        predictors=(result,),
        claims=(Claim(quantity="regret_at_m_star", comparator="<=", bound=REGRET_BOUND),),
        plan=plan,
        notes=_notes(calibration, single, instances),
    )


def _choose(calibration: Calibration, k: int | None) -> CalibrationPoint:
    if k is None:
        return max(calibration.points, key=lambda point: point.k or 0)
    point = calibration.point(k)
    if point is None:
        raise UsageError(
            "the calibration has no point for this batch size",
            observed=k,
            allowed=", ".join(str(each.k) for each in calibration.points),
            where="-k",
            hint=f"calibrate it: b2g calibrate --model {calibration.model.name} -k {k}",
        )
    return point


def _plan_with(plan: Plan, m_star: int) -> Plan:
    flights = tuple(sorted({*plan.flights, m_star}))
    if len(flights) == 1:
        raise UsageError(
            "the plan measures M* alone: there would be nothing to compare it with",
            observed=m_star,
            allowed="at least one other M",
            where="--flights",
        )
    return plan.model_copy(update={"flights": flights})


def _check_name(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError("this cannot be the prediction's name", observed=name, where="--name", hint="choose another")
    return name


def _single_flight(
    calibration: Calibration, point: CalibrationPoint, rng: np.random.Generator, draws: int
) -> SingleFlight:
    if point.cycle_s is not None and point.service_s is not None and point.k is not None:
        batch = point.k
        if not (point.cycle_s.mean > 0 and point.service_s.mean > 0):
            raise EvidenceError(
                "the calibration's times are not physical",
                observed=f"S = {point.service_s.mean} s of a cycle of {point.cycle_s.mean} s",
                allowed="> 0",
                where=calibration.name,
                hint="calibrate anew: the server's counters booked no time",
            )
        single = SingleFlight(batch / point.cycle_s.mean, point.cycle_s.mean / point.service_s.mean, None)
        if not point.blocks:
            return single
        blocks = np.array([(block.cycle_s, block.service_s) for block in point.blocks])

        def of_means(means: Floats) -> Floats:
            return np.stack([batch / means[:, 0], means[:, 0] / means[:, 1]], axis=1)

        drawn = bootstrap_blocks(blocks, of_means, draws, rng)
        if not (drawn > 0).all():
            raise EvidenceError(
                "the calibration is too uncertain to predict from: zero lies within reach of its S or C",
                where=calibration.name,
                hint="calibrate for longer",
            )
        return SingleFlight(single.throughput_per_s, single.cycle_to_service, drawn)
    if point.transport_share is not None and point.throughput_per_s is not None:
        ratio = cycle_to_service_from_share(point.transport_share.mean)
        return SingleFlight(point.throughput_per_s, ratio, None)
    missing = [
        name
        for name, value in (
            ("the transport share, or S and D", point.transport_share),
            ("the single-flight throughput", point.throughput_per_s),
        )
        if value is None
    ]
    raise EvidenceError(
        "the calibration does not state what the closed form needs",
        observed=f"no {' and no '.join(missing)}",
        where=calibration.name,
        hint="calibrate the model on a server of yours with b2g calibrate",
    )


def closed_form_result(single: SingleFlight, instances: int, flights: Sequence[int]) -> PredictorResult:
    """M* and X(M) by the closed form, with intervals where ``single`` has draws."""
    m_star = optimal_flights(single.cycle_to_service, instances)
    curve = [
        throughput(
            m,
            single_flight_rate_per_s=single.throughput_per_s,
            cycle_to_service=single.cycle_to_service,
            instances=instances,
        )
        for m in flights
    ]
    lows: Sequence[float | None] = [None] * len(flights)
    highs: Sequence[float | None] = lows
    probabilities = None
    if single.draws is not None:
        rates, ratios = single.draws[:, :1], single.draws[:, 1:]
        drawn = rates * np.minimum(np.asarray(flights, dtype=float), instances * ratios)
        lows, highs = np.quantile(drawn, [0.5 - _LEVEL / 2, 0.5 + _LEVEL / 2], axis=0).tolist()
        shares = flights_distribution(ratios[:, 0].tolist(), instances)
        probabilities = {str(m): share for m, share in shares.items()}
    return PredictorResult(
        name=CLOSED_FORM,
        m_star=m_star,
        m_star_probabilities=probabilities,
        peak_per_s=single.throughput_per_s * instances * max(1.0, single.cycle_to_service),
        level=None if single.draws is None else _LEVEL,
        curve=tuple(
            CurvePoint(flights=m, throughput_per_s=x, low=low, high=high)
            for m, x, low, high in zip(flights, curve, lows, highs, strict=True)
        ),
    )


def _notes(calibration: Calibration, single: SingleFlight, instances: int) -> tuple[str, ...]:
    notes = ["heights are upper bounds: the closed form takes transport for a pure delay"]
    if single.draws is None:
        notes.append("no intervals: the calibration states no uncertainty")
    if calibration.model.instances is None:
        notes.append(f"the number of instances is not stated; {instances} is assumed")
    if calibration.model.dynamic_batching:
        notes.append("the closed form does not apply to a model with the server's dynamic batching on")
    if calibration.model.compute == "emulated":
        notes.append("the compute was emulated")
    return tuple(notes)
