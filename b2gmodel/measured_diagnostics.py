"""What measured runs show against the single-flight figures that their prediction states.

Rules here: as in ``diagnostics``, which holds what a calibration shows already. A measurement arrives here, so no
module that a prediction is made with imports this one.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

import numpy as np

from b2gmodel.diagnostics import LOAD_CHANGE, SERVICE_UNDER_LOAD, over_wall, under_load
from b2gmodel.records import Diagnostic, Measurement, Prediction
from b2gmodel.units import format_duration

GAIN_ABOVE_LIMIT: Final = "gain-above-limit"
PLATEAU_BELOW_COMPUTE: Final = "plateau-below-compute"
SERVICE_NOT_AS_PREDICTED: Final = "service-not-as-predicted"

_GAIN_SLACK: Final = 1.05
# Of a run's batches, a few are counted that began before it.
_WALL_SLACK: Final = 1.05
_BUSY: Final = 0.90


def of_measurement(prediction: Prediction, measurement: Measurement) -> tuple[Diagnostic, ...]:
    """What the measured runs show against the single-flight figures that the prediction states."""
    batch, instances = prediction.k, prediction.model.instances or 1
    rates: dict[int, list[float]] = defaultdict(list)
    services: list[float] = []
    # Busy and measured seconds at each M: one run alone may begin or end in the middle of a batch.
    busy_s: dict[int, float] = defaultdict(float)
    measured_s: dict[int, float] = defaultdict(float)
    for session in measurement.sessions:
        for run in session.runs:
            if run.placement not in ("C3", "C4"):
                continue
            rates[run.flights].append(run.throughput_per_s)
            if run.service_s and run.flights > 1:
                services.append(run.service_s)
            if run.service_s and run.batches and run.duration_s:
                busy_s[run.flights] += run.batches * run.service_s
                measured_s[run.flights] += run.duration_s
    if not rates:
        return ()
    found = []
    busy = max((busy_s[m] / measured_s[m] for m in busy_s), default=0.0)
    if busy > instances * _WALL_SLACK:
        found.append(over_wall(busy, instances))
    curve = {flights: float(np.mean(values)) for flights, values in rates.items()}
    peak = max(curve.values())
    limit = prediction.predictors[0].peak_per_s
    alone = curve.get(1)
    promised = prediction.predictors[0].at(1)
    if alone is not None and promised is not None:
        gain, bound = peak / alone, limit / promised.throughput_per_s
        if gain > bound * _GAIN_SLACK and not prediction.model.dynamic_batching:
            found.append(
                Diagnostic(
                    name=GAIN_ABOVE_LIMIT,
                    observed=gain,
                    bound=bound,
                    sentence=f"the peak is {gain:.2f} times the single-flight throughput, and g C / S allows "
                    f"{bound:.2f}: the server merges batches, S fell under load, or one of the two was disturbed (few, "
                    "short sessions?); read S at M > 1 and the executions in the server's counters",
                )
            )
    if services and prediction.service_s is not None and batch is not None:
        loaded_s = float(np.mean(services))
        share = peak / batch * loaded_s / instances
        if share < _BUSY and max(curve) > 1 and not prediction.model.dynamic_batching:
            found.append(
                Diagnostic(
                    name=PLATEAU_BELOW_COMPUTE,
                    observed=share,
                    bound=_BUSY,
                    sentence=f"at the peak the instances are busy {share:.0%} of the time: transport, the client's "
                    "channel or the server's frontend binds, and not compute; try shared memory, more connections, or "
                    "a smaller payload before a faster model",
                )
            )
        change = loaded_s / prediction.service_s - 1
        if abs(change) > LOAD_CHANGE:
            found.append(under_load(change))
        predicted = _predicted_change(prediction)
        off = (1 + change) / (1 + predicted) - 1
        if predicted and abs(off) > LOAD_CHANGE:
            found.append(_not_as_predicted(prediction.service_s * (1 + predicted), loaded_s, off))
    return tuple(found)


def _predicted_change(prediction: Prediction) -> float:
    """By what share of S alone S was predicted to change under load; 0 where by no more than is worth saying."""
    return next((each.observed for each in prediction.diagnostics if each.name == SERVICE_UNDER_LOAD), 0.0)


def _not_as_predicted(predicted_s: float, measured_s: float, off: float) -> Diagnostic:
    """``off`` is by what share of the predicted S under load the measured one differs from it."""
    return Diagnostic(
        name=SERVICE_NOT_AS_PREDICTED,
        observed=off,
        bound=LOAD_CHANGE if off > 0 else -LOAD_CHANGE,
        sentence="heights of mva and simulation were predicted with S = "
        f"{format_duration(predicted_s)} under load, and {format_duration(measured_s)} was measured: "
        "the server was otherwise loaded during one of the two; "
        "calibrate anew with a longer --budget, on a quiet machine",
    )
