"""Calibration -> Prediction. Single-flight data and the laws only: no function here takes a measurement.

No clock, no file: the same calibration and options give the same prediction, byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal

import numpy as np

from b2gmodel.bulk_server import BulkServer
from b2gmodel.closed_form import optimal_flights
from b2gmodel.diagnostics import of_calibration
from b2gmodel.errors import UsageError
from b2gmodel.laws import Floats, Laws, choose_point, laws_of
from b2gmodel.predictors import (
    BULK,
    LEVEL,
    Curves,
    Simulator,
    bounds_curves,
    bulk_compute_limit_per_s,
    bulk_curves,
    bulk_knee,
    closed_form_curves,
    closed_form_knee,
    mva_curves,
    simulation_curves,
    summary,
    twice_instances_curves,
)
from b2gmodel.records import (
    NAME_PATTERN,
    Binding,
    Calibration,
    CalibrationPoint,
    Claim,
    Estimate,
    Plan,
    Prediction,
    Software,
    digest_of,
)
from b2gmodel.what_if import Change, changed

DEFAULT_FLIGHTS: Final = (1, 2, 3, 4, 6, 8)
DEFAULT_CURVE: Final = tuple(range(1, 17))
DEFAULT_PLAN: Final = Plan(
    flights=DEFAULT_FLIGHTS, sessions=4, seconds_per_run=2.0, baseline_concurrency=8, order_seed=1
)
REGRET_BOUND: Final = 0.05
HEIGHT_BOUND: Final = 0.10


def predict(
    calibration: Calibration,
    *,
    k: int | None = None,
    plan: Plan = DEFAULT_PLAN,
    software: Software | None = None,
    name: str | None = None,
    flights: Sequence[int] = DEFAULT_CURVE,
    seed: int = 1,
    draws: int = 2000,
    simulator: Simulator | None = None,
    what_if: Sequence[Change] = (),
) -> Prediction:
    """Predict X(M), M* and what binds for one point of a calibration.

    Args:
        calibration: what single-flight shows, and the laws where they were measured.
        k: batch size; None takes the only point, or the largest batch.
        plan: what will be measured; M* is added to its flights where it is not among them.
        software: what predicts; a prediction that is to be frozen states it.
        flights: the M of the curves.
        seed, draws: of the bootstrap over the calibration's blocks.
        simulator: gives the ``simulation`` predictor (``b2gmodel.sim.simulation.Simulation``); None leaves it out.
        what_if: changes to the system; the prediction is then an extrapolation, and says what it assumes.

    Returns:
        Predictors in this order: closed-form, bounds, mva, simulation where asked for, twice-instances; where the
        server merges requests bulk-service, closed-form, twice-instances. The M* of the first is what is claimed.
        Throughput in requests a second, times in seconds, intervals of 90 %.

    Raises:
        UsageError: no such point, a plan of M* alone, a name that is none, or a change that means nothing here.
        EvidenceError: the calibration lacks what the closed form needs, or its times are not physical.
    """
    rng = np.random.default_rng(seed)
    if what_if:
        calibration_seen, point, laws, assumed = changed(calibration, k, what_if, draws, rng)
    else:
        calibration_seen, point, assumed = calibration, choose_point(calibration, k), ()
        laws = laws_of(calibration, point, draws, rng)
    server = merging_server(calibration_seen, laws.batch)
    knee = closed_form_knee(laws) if server is None else bulk_knee(laws, server)
    plan = _plan_with(plan, optimal_flights(float(knee[0]) / laws.instances, laws.instances))
    shown = sorted({*flights, *plan.flights})
    curves = _curves(laws, server, shown, simulator, seed)
    return Prediction(
        name=_check_name(name or _default_name(calibration, point, what_if)),
        calibration_name=calibration.name,
        calibration_digest=digest_of(calibration),
        calibration_session_ids=calibration.session_ids,
        software=software,
        server=calibration.server,
        model=calibration_seen.model,
        transport=calibration_seen.transport,
        k=point.k,
        payload_bytes=point.payload_bytes,
        seed=seed,
        draws=draws,
        cycle_s=float(laws.cycle_s[0]) if laws.is_timed else None,
        service_s=float(laws.service_s[0]) if laws.is_timed else None,
        predictors=tuple(summary(each, shown, laws) for each in curves),
        binding=binding_of(laws, None if server is None else bulk_compute_limit_per_s(laws, server)),
        diagnostics=of_calibration(calibration, point),
        claims=_claims(curves),
        plan=plan,
        notes=(*assumed, *_notes(calibration_seen, laws, curves)),
    )


def _curves(
    laws: Laws, server: BulkServer | None, flights: Sequence[int], simulator: Simulator | None, seed: int
) -> list[Curves]:
    """All predictors; the first is the one whose M* is claimed."""
    plain = [closed_form_curves(laws, flights), bounds_curves(laws, flights)]
    if server is not None:
        return [bulk_curves(laws, server, flights), plain[0], twice_instances_curves(laws, flights)]
    plain.append(mva_curves(laws, flights))
    if simulator is not None:
        plain.append(simulation_curves(laws, flights, simulator, seed))
    return [*plain, twice_instances_curves(laws, flights)]


def merging_server(calibration: Calibration, k: int) -> BulkServer | None:
    """The server as one that merges flights of k; None where it merges nothing, or S(b) was calibrated at one b alone.

    A flight of the greatest batch cannot be merged with another.
    """
    model = calibration.model
    ladder = tuple(sorted((p.k, p.service_s.mean) for p in calibration.points if p.k is not None and p.service_s))
    if not model.dynamic_batching or not model.max_batch_size or k >= model.max_batch_size or len(ladder) < 2:
        return None
    return BulkServer(
        ladder_s=ladder,
        max_batch=model.max_batch_size,
        preferred=model.preferred_batch_sizes or (),
        queue_delay_s=model.queue_delay_s or 0.0,
        instances=model.instances or 1,
    )


def binding_of(laws: Laws, compute_limit_per_s: Floats | None = None) -> Binding:
    """What limits throughput once enough batches are in flight, with the margin between the two limits, in words.

    Args:
        compute_limit_per_s: of a server that merges requests, shape ``[1 + draws]``; None for the laws' own.
    """
    compute = laws.compute_limit_per_s if compute_limit_per_s is None else compute_limit_per_s
    transport = laws.transport_limit_per_s
    if transport is None:
        return Binding(
            what="unknown",
            compute_limit_per_s=float(compute[0]),
            transport_limit_per_s=None,
            margin=None,
            sentence=f"the instances can compute {compute[0]:.4g} request/s; what the transport can carry is not "
            "known: no transport law was measured",
        )
    ratio = transport / compute
    low, high = (float(q) for q in np.quantile(ratio[1:] if laws.draws else ratio, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2]))
    what: Literal["compute", "transport", "neither"]
    what = "compute" if low > 1.0 else "transport" if high < 1.0 else "neither"
    turned = ratio[0] < 1.0
    margin = Estimate(
        mean=float(1 / ratio[0] if turned else ratio[0]),
        low=1 / high if turned else low,
        high=1 / low if turned else high,
        level=LEVEL if laws.draws else None,
    )
    computed = f"the instances can compute {compute[0]:.4g} request/s"
    carried = f"the transport can carry {transport[0]:.4g} request/s"
    sentence = {
        "compute": f"compute binds: {computed}, {carried} ({margin.mean:.2f} times as much)",
        "transport": f"transport binds: {carried}, {computed} ({margin.mean:.2f} times as much)",
        "neither": f"neither binds alone: {computed}, {carried}, and the calibration cannot tell which is less",
    }[what]
    return Binding(
        what=what,
        compute_limit_per_s=float(compute[0]),
        transport_limit_per_s=float(transport[0]),
        margin=margin,
        sentence=sentence,
    )


def _claims(curves: Sequence[Curves]) -> tuple[Claim, ...]:
    """The place, by the first predictor; and the height, by the last estimate where there is one."""
    claims = [Claim(quantity="regret_at_m_star", predictor=curves[0].name, comparator="<=", bound=REGRET_BOUND)]
    estimates = [each.name for each in curves if each.kind == "estimate"]
    if estimates:
        claims.append(
            Claim(quantity="height_error_at_m_star", predictor=estimates[-1], comparator="<=", bound=HEIGHT_BOUND)
        )
    return tuple(claims)


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


def _default_name(calibration: Calibration, point: CalibrationPoint, what_if: Sequence[Change]) -> str:
    name = calibration.name if point.k is None else f"{calibration.name}-k{point.k}"
    return f"{name}-what-if" if what_if else name


def _check_name(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise UsageError("this cannot be the prediction's name", observed=name, where="--name", hint="choose another")
    return name


def _notes(calibration: Calibration, laws: Laws, curves: Sequence[Curves]) -> tuple[str, ...]:
    model = calibration.model
    notes = []
    if laws.transport_rates_per_s is None:
        notes.append(
            "no transport law was measured, so transport is taken for a pure delay, and heights are upper bounds as "
            "far as transport goes: calibrate with --null-model"
        )
    else:
        notes.append(
            f"the transport law is measured up to {laws.transport_rates_per_s.shape[1]} batches in transport; with "
            "more its rate is taken to stay"
        )
    if not laws.draws:
        notes.append("no intervals: the calibration states no uncertainty")
    elif len(calibration.session_ids) == 1:
        notes.append("the intervals are those of one start of the server: what differs between starts is not in them")
    if model.instances is None:
        notes.append(f"the number of instances is not stated; {laws.instances} is assumed")
    if not laws.is_compute_law_measured:
        notes.append(
            f"S with {laws.instances} instances busy was not measured, and S alone stands for it: heights are upper "
            "bounds; calibrate the model as it is served"
        )
    if model.dynamic_batching:
        notes.append("the closed form does not apply to a model with the server's dynamic batching on")
        if not any(each.name == BULK for each in curves) and laws.batch != model.max_batch_size:
            notes.append(
                "heights under dynamic batching need S at several batch sizes, and here they are those of a server "
                "that merges nothing: calibrate a ladder, -k 1,2,4,8"
            )
    if model.compute == "emulated":
        notes.append("the compute was emulated")
    return tuple(notes)
