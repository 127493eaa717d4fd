"""`b2g demo`: two contrasting workloads on the embedded Triton, from calibration to verdict and figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from b2gmodel.judge import judge
from b2gmodel.ledger import Ledger
from b2gmodel.live.calibrate import Progress, Wanted
from b2gmodel.live.host import describe_software
from b2gmodel.live.sessions import calibrate_models, measure_frozen
from b2gmodel.live.target import EmbeddedTarget
from b2gmodel.prediction import predict
from b2gmodel.predictors import Simulator
from b2gmodel.records import Calibration, Measurement, Plan, Prediction, Verdict
from b2gmodel.report.figure import draw_throughput

# 588 KiB against 4,800 KiB a request: the transport share differs, and so should M*.
_WORKLOADS: Final = ("resnet50", "yolov8n")
# More sessions, not longer ones, tell M apart: what differs between sessions is most of what varies.
_SECONDS_PER_RUN: Final = {"resnet50": 0.6, "yolov8n": 1.2}
_SESSIONS: Final = 8
_CALIBRATION_S: Final = 15.0
_FLIGHTS: Final = (1, 2, 3, 4, 6)
# Smaller batches of the large payload: more of them fit into the minutes that a demo may take.
_K: Final = {"resnet50": 8, "yolov8n": 4}
# On a CPU a real model takes some hundred times as long as on a GPU: what fits is to show that it runs.
_CPU_K: Final = {"resnet50": 1, "yolov8n": 1}
_CPU_SESSIONS: Final = 3
_CPU_FLIGHTS: Final = (1, 2, 3)
# Shares of the whole time, for the progress shown.
_CALIBRATION_SHARE: Final = 0.3
_PREDICTION_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True)
class Case:
    """One workload's prediction, what was measured, and the judge's word."""

    prediction: Prediction
    measurement: Measurement
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Found:
    """What the demo found, and where it drew it."""

    cases: tuple[Case, ...]
    figure: Path

    @property
    def sentence(self) -> str:
        """The finding in plain words."""
        return "; ".join(
            f"{case.prediction.model.name}: M* = {case.verdict.m_star} was predicted and "
            f"{_OUTCOME[case.verdict.outcome]} (measured peak at M = {case.verdict.best_flights})"
            for case in self.cases
        )


_OUTCOME: Final = {
    "held": "held",
    "refuted": "was refuted",
    "inconclusive": "could not be decided",
    "invalid": "could not be judged",
}


SimulatorOf = Callable[[Path, Calibration, int | None], Simulator | None]
"""The simulation for a calibration at its path and batches of k: lent, as nothing live imports the simulation."""


def run_demo(folder: Path, progress: Progress, simulator_of: SimulatorOf, target: EmbeddedTarget) -> Found:
    """Calibrate both, freeze both predictions, then measure and judge; everything is kept in ``folder``."""
    slow = target.engine is not None and not target.engine.on_gpu
    k_of, sessions, flights = (_CPU_K, _CPU_SESSIONS, _CPU_FLIGHTS) if slow else (_K, _SESSIONS, _FLIGHTS)
    ledger = Ledger(folder / "predictions")
    wanted = [Wanted(name, (k_of[name],), budget_s=_CALIBRATION_S, null_model=f"{name}_null") for name in _WORKLOADS]
    progress("start the embedded Triton", 0.0)
    calibrations = calibrate_models(
        target,
        wanted,
        folder=folder / "calibration",
        name=None,
        progress=lambda stage, share: progress(stage, share * _CALIBRATION_SHARE),
    )
    frozen = []
    for number, (path, calibration) in enumerate(calibrations):
        share = number / len(calibrations)
        progress("predict", _CALIBRATION_SHARE + share * _PREDICTION_SHARE)
        k = k_of[calibration.model.name]
        plan = Plan(
            flights=flights,
            sessions=sessions,
            seconds_per_run=_SECONDS_PER_RUN[calibration.model.name],
            baseline_concurrency=k,
            order_seed=1,
        )
        prediction = predict(
            calibration, k=k, plan=plan, software=describe_software(), simulator=simulator_of(path, calibration, k)
        )
        frozen.append(ledger.load_frozen(ledger.freeze(prediction)))
    cases = []
    before = _CALIBRATION_SHARE + _PREDICTION_SHARE
    for number, (prediction, digest) in enumerate(frozen):
        first = before + number * (1 - before) / len(frozen)

        def told(stage: str, share: float, first: float = first) -> None:
            progress(f"measure {stage}", first + share * (1 - before) / len(frozen))

        _, measurement = measure_frozen(ledger, prediction, digest, target, flights=None, name=None, progress=told)
        verdict = judge(prediction, measurement)
        ledger.enter_verdict(measurement.name, verdict)
        cases.append(Case(prediction, measurement, verdict))
    figure = folder / f"{cases[-1].measurement.name}.png"
    draw_throughput([(case.prediction, case.measurement) for case in cases], figure)
    return Found(tuple(cases), figure)
