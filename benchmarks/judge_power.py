"""The judge on truths that we know: how often a right prediction is held, a wrong height refuted, noise left open.

    python benchmarks/judge_power.py [--draws 1000] [--seed 1]

A prediction claims M* = 3 and the height of one estimate there. Each draw is a measurement of six sessions from a
known curve: a factor for each session and one for each run, log-normal, of 1.5 % each (2.1 % together). Held where
each share is at least 90 %, and no pure noise (60 % each) is held.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np

from b2gmodel.judge import judge
from b2gmodel.prediction import predict
from b2gmodel.records import (
    Calibration,
    CalibrationPoint,
    Claim,
    Clock,
    CurvePoint,
    Estimate,
    Measurement,
    ModelInfo,
    Plan,
    Prediction,
    PredictorResult,
    Run,
    Session,
    Software,
    digest_of,
)

BAR = 0.90
SESSIONS = 6
TRUTH = {1: 320.0, 2: 560.0, 3: 700.0, 4: 695.0, 6: 690.0, 8: 680.0}


@dataclass(frozen=True)
class Case:
    """``factor`` is predicted over true height; ``noise`` the spread of sessions and of runs, each."""

    name: str
    expected: str
    factor: float
    noise: float


CASES = (
    Case("right", "held", 1.0, 0.015),
    Case("15 % too high", "refuted", 1.15, 0.015),
    Case("pure noise", "inconclusive", 1.0, 0.60),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    shares: dict[str, float] = {}
    noise_held = 0.0
    for case in CASES:
        counts = outcomes(case, options.draws, options.seed)
        told = {name: counts[name] / options.draws for name in ("held", "refuted", "inconclusive", "invalid")}
        print(f"{case.name:>14}: " + ", ".join(f"{name} {share:.1%}" for name, share in told.items()), flush=True)
        shares[f"{case.name}: {case.expected}"] = told[case.expected]
        noise_held = told["held"]
    held = all(share >= BAR for share in shares.values()) and noise_held == 0.0
    print(json.dumps({"name": "judge_power", "value": shares, "bar": BAR, "held": held, "spread": None}))
    return 0 if held else 1


def outcomes(case: Case, draws: int, seed: int) -> Counter[str]:
    """The verdicts of so many measurements."""
    rng = np.random.default_rng(seed)
    prediction = prediction_of(case.factor)
    return Counter(judge(prediction, measurement_of(prediction, case.noise, rng)).outcome for _ in range(draws))


def prediction_of(factor: float) -> Prediction:
    """The closed form's M* = 3 for k = 8, S = 10 ms, C = 25 ms; and an estimate whose curve is the truth's, scaled."""
    point = CalibrationPoint(
        k=8, payload_bytes=48, cycle_s=Estimate(mean=0.025), service_s=Estimate(mean=0.010),
        transport_s=Estimate(mean=0.015), transport_share=Estimate(mean=0.6),
    )  # fmt: skip
    model = ModelInfo(
        name="m", compute="emulated", compute_table_digest=None, platform=None, max_batch_size=8, instances=1,
        dynamic_batching=False, inputs=(),
    )  # fmt: skip
    calibration = Calibration(
        name="known", source="synthetic", host=None, software=None, clock=None, server=None, model=model,
        transport=None, session_ids=("calibrated",), points=(point,), raw=None,
    )  # fmt: skip
    plan = Plan(flights=tuple(TRUTH), sessions=SESSIONS, seconds_per_run=1.0, baseline_concurrency=8, order_seed=1)
    software = Software(b2gmodel="0", commit=None, python="3", packages={})
    made = predict(calibration, plan=plan, software=software)
    estimate = PredictorResult(
        name="estimate", kind="estimate", m_star=3, m_star_probabilities=None, m_95=3, m_recommended=3,
        peak_per_s=max(TRUTH.values()) * factor, level=None,
        curve=tuple(CurvePoint(flights=m, throughput_per_s=x * factor, low=None, high=None) for m, x in TRUTH.items()),
    )  # fmt: skip
    height = Claim(quantity="height_error_at_m_star", predictor="estimate", comparator="<=", bound=0.10)
    return made.model_copy(update={"predictors": (*made.predictors, estimate), "claims": (made.claims[0], height)})


def measurement_of(prediction: Prediction, noise: float, rng: np.random.Generator) -> Measurement:
    """Six sessions with sound evidence."""
    sessions = []
    for number in range(SESSIONS):
        common = rng.normal(scale=noise)
        runs = tuple(_run(m, float(x * np.exp(common + rng.normal(scale=noise)))) for m, x in TRUTH.items())
        sessions.append(
            Session(session_id=f"m{number}", boot_id="boot", begin_boottime_ns=str(number), server_restarted=True,
                    warmup_batches=24, runs=runs)
        )  # fmt: skip
    return Measurement(
        name="drawn", prediction_digest=digest_of(prediction), preregistered=True, source="synthetic", host=None,
        software=None, clock=Clock(domain="CLOCK_MONOTONIC", boot_id="boot"), server=None, model=prediction.model,
        transport=None, k=8, payload_bytes=48, sessions=tuple(sessions), raw=None,
    )  # fmt: skip


def _run(flights: int, rate_per_s: float) -> Run:
    return Run(
        placement="C3" if flights == 1 else "C4", flights=flights, throughput_per_s=rate_per_s, batches=100,
        delivered_batches=112, full_batches=100, server_executions=112, failed=0, blocks_per_s=(rate_per_s,) * 5,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
