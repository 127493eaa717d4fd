"""Which steps, in which order, for a compute and a number of minutes. Nothing runs here."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from steps import Step

HERE = Path(__file__).parent
MODELS = ("resnet50", "yolov8n", "mobilenetv2", "yolov5s")
"""The most important first."""
VERDICTS = (0, 1, 3)
"""Exit codes of a judge that has done its work: held, refuted, inconclusive."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of each: a GPU's, or what a CPU can do in the same minutes.

    Attributes:
        k: requests in a batch.
        flights: M, for predictions' plans.
        sessions, seconds: of a measurement, and of each of its runs.
        budget: of a calibration's single-flight.
        chain_s: what a model's calibration, prediction and measurement take at least, in seconds.
        clients, models: of the study.
    """

    k: int
    flights: str
    sessions: int
    seconds: str
    budget: str
    chain_s: tuple[float, float, float]
    clients: int
    models: tuple[str, ...]


GPU = Size(8, "1,2,3,4,6,8", 3, "1s", "12s", (40.0, 8.0, 50.0), 16, MODELS[:2])
CPU = Size(1, "1,2", 2, "300ms", "4s", (25.0, 8.0, 15.0), 2, ("mobilenetv2",))


def plan(out: Path, compute: str, size: Size) -> list[Step]:
    """All steps: two models whole, S at idle and under load, the placements, then the other two models."""
    steps: list[Step] = []
    for model in MODELS[:2]:
        steps += _chain(out, compute, size, model)
    first = MODELS[0]
    options = ("--compute", compute, "-k", str(size.k))
    idle = (sys.executable, str(HERE / "idle.py"), str(out / f"idle-{first}.json"), "--model", first, *options)
    of_study = ("--clients", str(size.clients), *(word for name in size.models for word in ("--model", name)))
    study = (sys.executable, str(HERE / "study.py"), str(out / "study"), *options, *of_study)
    steps.append(Step(f"idle-{first}", idle, 25.0))
    steps.append(Step("study", study, 60.0))
    judge = (sys.executable, "-m", "b2gmodel", "study", "judge", str(out / "study"))
    steps.append(Step("judge-study", judge, 3.0, ("study",), VERDICTS))
    for model in MODELS[2:]:
        steps += _chain(out, compute, size, model)
    return steps


def _chain(out: Path, compute: str, size: Size, model: str) -> list[Step]:
    """One model: calibrate, predict and freeze, measure C4 over M and C1, judge and draw."""
    b2g = (sys.executable, "-m", "b2gmodel")
    k, predictions = str(size.k), ("--predictions", str(out / "predictions"))
    names = [f"{verb}-{model}" for verb in ("calibrate", "predict", "measure", "validate")]
    calibrate, predict, measure, validate = names
    calibrating_s, predicting_s, measuring_s = size.chain_s
    served = ("--compute", compute, "-q")
    calibration = (
        "--model",
        model,
        "-k",
        k,
        "--budget",
        size.budget,
        "--name",
        model,
        "--out",
        str(out / "calibration"),
    )
    planned = ("--flights", size.flights, "--sessions", str(size.sessions), "--seconds", size.seconds)
    source = (str(out / "calibration" / f"{model}.json"), "-k", k, "--name", model)
    prediction = str(out / "predictions" / f"{model}-*.json")  # its name ends in a digest that is not known yet
    measured = ("--name", f"{model}.measured")
    figure = ("--figure", str(out / f"{model}.svg"))
    return [
        Step(calibrate, (*b2g, "calibrate", *calibration, *served), calibrating_s, tries=2),
        Step(predict, (*b2g, "predict", *source, *planned, *predictions, "-q"), predicting_s, (calibrate,)),
        Step(measure, (*b2g, "measure", prediction, *measured, *predictions, *served), measuring_s, (predict,)),
        Step(validate, (*b2g, "validate", prediction, *predictions, *figure), 3.0, (measure,), VERDICTS),
    ]
