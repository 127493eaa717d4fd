"""Place and height on this machine: four workloads over three transports, predictions frozen before any measurement.

python calibration/local/make.py [--sessions 6] [--seconds 1.5] [--only WORKLOAD/TRANSPORT ...]

Each cell is calibrated on an embedded Triton of its own start (calibration/local/), predicted and frozen
(predictions/); once all are frozen they are measured, C4 over M = 1, 2, 3, 4, 6, 8, and judged. What is there already
is not done again, so that a second call goes on where the first one stopped. The compute is emulated.
benchmarks/heights.py reads the verdicts.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from b2gmodel.cli.predict_command import simulator_of
from b2gmodel.judge import judge
from b2gmodel.ledger import Ledger
from b2gmodel.live.calibrate import Wanted
from b2gmodel.live.host import describe_software
from b2gmodel.live.sessions import calibrate_models, measure_frozen
from b2gmodel.live.target import EmbeddedTarget
from b2gmodel.live.workloads import load_workloads
from b2gmodel.prediction import predict
from b2gmodel.records import Calibration, Plan, Prediction
from b2gmodel.store import read_record

HERE = Path(__file__).parent
FLIGHTS = (1, 2, 3, 4, 6, 8)
TRANSPORTS = ("http", "grpc", "shm")
# Batches of 4.6 to 18.8 MiB.
K = {"resnet50": 8, "mobilenetv2": 8, "yolov5s": 4, "yolov8n": 4}


def main() -> int:
    options = _options()
    cells = [(model, transport) for transport in TRANSPORTS for model in K]
    cells = [cell for cell in cells if not options.only or "/".join(cell) in options.only]
    ledger = Ledger(HERE.parent.parent / "predictions")
    target = EmbeddedTarget(load_workloads())
    predictions = [_predicted(ledger, target, *cell, options) for cell in cells]
    for prediction, digest in predictions:
        name = f"{prediction.name}-measured"
        if (ledger.folder / f"{name}.json").exists():
            continue
        _, measurement = measure_frozen(ledger, prediction, digest, target, flights=None, name=name, progress=_tell)
        verdict = judge(prediction, measurement)
        ledger.enter_verdict(name, verdict)
        print(f"{time.strftime('%X')} {prediction.name}: {verdict.sentence}", flush=True)
    return 0


def _predicted(
    ledger: Ledger, target: EmbeddedTarget, model: str, transport: str, options: argparse.Namespace
) -> tuple[Prediction, str]:
    name, k = f"local-{model}-{transport}", K[model]
    frozen = [path for path in ledger.folder.glob(f"{name}-k{k}-*.json") if len(path.stem) > len(name) + 60]
    if frozen:
        return ledger.load_frozen(frozen[0])
    path = HERE / f"{name}.json"
    if not path.exists():
        wanted = Wanted(model, (k,), budget_s=20.0, precision=0.01, transport=transport, null_model=f"{model}_null")
        calibrate_models(target, [wanted], folder=HERE, name=name, progress=_tell)
    calibration = read_record(path, Calibration)
    plan = Plan(
        flights=FLIGHTS,
        sessions=options.sessions,
        seconds_per_run=options.seconds,
        baseline_concurrency=k,
        order_seed=1,
    )
    simulator = simulator_of(path, calibration, k)
    made = predict(calibration, k=k, plan=plan, software=describe_software(), simulator=simulator)
    print(f"{time.strftime('%X')} frozen: {made}", flush=True)
    return ledger.load_frozen(ledger.freeze(made))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--only", nargs="*", help="cells, such as resnet50/http")
    return parser.parse_args()


def _tell(stage: str, share: float) -> None:
    """Progress is not shown: the frozen predictions and the verdicts are."""


if __name__ == "__main__":
    sys.exit(main())
