"""The judge of studies: right, wrong and undecidable claims; each evidence check refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from b2gmodel.errors import EvidenceError
from b2gmodel.placement_records import (
    Crossover,
    PlacementCell,
    PlacementRun,
    StudyClaim,
    StudyMeasurement,
    StudyPrediction,
    StudySessionInfo,
)
from b2gmodel.placement_scores import p99_spread_ratio
from b2gmodel.records import Estimate, digest_of
from b2gmodel.study_judge import judge_study

STUDY = "0" * 64
PAYLOADS = {"w1": 1000, "w2": 4000}


def prediction(signs: Mapping[str, int], crossover_bytes: float | None = 2000.0) -> StudyPrediction:
    x = Estimate(mean=100.0)
    cells = [
        PlacementCell(
            workload=name, payload_bytes=PAYLOADS[name], transport="http", k=8, concurrency=16, calibration_name="c",
            calibration_digest=STUDY, c1_per_s=x, c2_per_s=x, c3_per_s=x, proxy_gain_per_s=x, server_gain_per_s=x,
            gain=x, ratio=None, undefined="made up",
        )
        for name in PAYLOADS
    ]  # fmt: skip
    at = {"transport": "http", "k": 8, "concurrency": 16}
    claims = [
        StudyClaim(quantity="sign_of_gain", workload=name, comparator="==", bound=float(sign), **at)
        for name, sign in signs.items()
    ]
    crossovers = []
    if crossover_bytes is not None:
        claims.append(
            StudyClaim(quantity="crossover_error", workload=None, comparator="<=", bound=math.log(1.15), **at)
        )
        crossovers.append(
            Crossover(
                payload_bytes=Estimate(mean=crossover_bytes), beyond=None, rootless_share=0.0,
                least_payload_bytes=1000, greatest_payload_bytes=4000, **at,
            )
        )  # fmt: skip
    return StudyPrediction(
        name="st", study_digest=STUDY, calibration_session_ids=("cal",), software=None, seed=1, draws=0,
        cells=tuple(cells), crossovers=tuple(crossovers), claims=tuple(claims),
    )  # fmt: skip


def run(workload: str, placement: str, session: int, x: float, **changes: object) -> PlacementRun:
    facts: dict[str, object] = {
        "workload": workload, "payload_bytes": PAYLOADS[workload], "transport": "http", "placement": placement,
        "k": 8 if placement == "C3" else 1, "flights": 1 if placement == "C3" else 16, "concurrency": 16,
        "session": session, "repetition": 0, "session_id": f"m{session}", "throughput_per_s": x, "p99_s": 0.1,
        "requests": 1000, "failed": 0, "full_batches_share": 1.0 if placement == "C3" else None,
        "count_difference": 0,
    }  # fmt: skip
    return PlacementRun.model_validate(facts | changes)


def measurement(of: StudyPrediction, runs: Sequence[PlacementRun], **changes: object) -> StudyMeasurement:
    numbers = sorted({each.session for each in runs})
    facts: dict[str, object] = {
        "name": "st-measured", "study_digest": STUDY, "prediction_digest": digest_of(of), "compute": "emulated",
        "host": None, "software": None, "clock": None, "runs": tuple(runs),
        "sessions": tuple(
            StudySessionInfo(session=n, session_id=f"m{n}", boot_id="b", begin_boottime_ns=str(n)) for n in numbers
        ),
    }  # fmt: skip
    return StudyMeasurement.model_validate(facts | changes)


def truth(gains: Mapping[str, float], *, noise: float = 0.01, sessions: int = 4, seed: int = 1) -> list[PlacementRun]:
    """X_C1 = 100, X_C2 = 200, X_C3 = 100 exp(gain), each with lognormal noise a session."""
    rng = np.random.default_rng(seed)
    return [
        run(workload, placement, session, x * math.exp(rng.normal(0, noise)))
        for session in range(sessions)
        for workload, gain in gains.items()
        for placement, x in (("C1", 100.0), ("C2", 200.0), ("C3", 100.0 * math.exp(gain)))
    ]


RIGHT = {"w1": 0.5, "w2": -0.5}


def test_right_predictions_are_held() -> None:
    made = prediction({"w1": 1, "w2": -1})
    verdict = judge_study(made, measurement(made, truth(RIGHT)))
    assert [check.outcome for check in verdict.checks] == ["held"] * 3
    assert verdict.outcome == "held"
    assert verdict.crossovers[0].inside
    ratio = verdict.cells[0].ratio
    assert ratio is not None
    assert ratio.mean == pytest.approx(math.expm1(0.5), rel=0.1)
    assert verdict.cells[1].ratio is not None
    assert verdict.cells[1].ratio.mean < 0


def test_a_wrong_sign_is_refuted() -> None:
    made = prediction({"w1": -1, "w2": -1}, None)
    verdict = judge_study(made, measurement(made, truth(RIGHT)))
    assert [check.outcome for check in verdict.checks] == ["refuted", "held"]
    assert verdict.outcome == "refuted"


def test_noise_is_not_held() -> None:
    made = prediction({"w1": 1}, None)
    outcomes = [
        judge_study(made, measurement(made, truth({"w1": 0.0}, noise=0.05, seed=seed))).outcome for seed in range(200)
    ]
    assert outcomes.count("inconclusive") >= 170
    assert outcomes.count("held") <= 20


@pytest.mark.parametrize(
    ("predicted", "noise", "outcome"),
    [(2000.0, 0.01, "held"), (3200.0, 0.01, "refuted"), (2000.0, 0.2, "inconclusive")],
)
def test_crossover(predicted: float, noise: float, outcome: str) -> None:
    made = prediction({}, predicted)
    verdict = judge_study(made, measurement(made, truth(RIGHT, noise=noise)))
    assert [check.outcome for check in verdict.checks] == [outcome], verdict.checks


def test_a_crossover_that_is_not_there_is_refuted() -> None:
    made = prediction({}, 2000.0)
    verdict = judge_study(made, measurement(made, truth({"w1": 0.9, "w2": 0.5})))
    assert verdict.outcome == "refuted"
    assert "lies above" in verdict.checks[0].observed


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("no requests lost", {"failed": 1}),
        ("batches are full", {"full_batches_share": 0.9}),
        ("the server's counts agree", {"count_difference": 20}),
        ("sessions are new", {"session_id": "cal"}),
    ],
)
def test_failed_evidence_makes_it_invalid(name: str, change: dict[str, object]) -> None:
    made = prediction({"w1": 1, "w2": -1})
    runs = truth(RIGHT)
    runs[2] = runs[2].model_copy(update=change)
    extra = StudySessionInfo(session=9, session_id="cal", boot_id="b", begin_boottime_ns="9")
    whole = measurement(made, truth(RIGHT))
    sessions = (*whole.sessions, extra) if name == "sessions are new" else whole.sessions
    verdict = judge_study(made, measurement(made, runs, sessions=sessions))
    assert verdict.outcome == "invalid"
    assert [check.name for check in verdict.evidence if check.outcome == "failed"] == [name]
    assert verdict.checks == ()
    assert name in verdict.sentence


def test_one_session_is_not_enough() -> None:
    made = prediction({"w1": 1}, None)
    verdict = judge_study(made, measurement(made, truth({"w1": 0.5}, sessions=1)))
    assert verdict.outcome == "invalid"
    assert "sessions are enough" in verdict.sentence


def test_another_study_or_prediction_is_refused() -> None:
    made = prediction({"w1": 1}, None)
    runs = truth({"w1": 0.5})
    with pytest.raises(EvidenceError, match="another prediction"):
        judge_study(made, measurement(made, runs, prediction_digest="1" * 64))
    with pytest.raises(EvidenceError, match="another study"):
        judge_study(made, measurement(made, runs, study_digest="1" * 64))


def test_a_claimed_cell_that_was_not_measured_is_refused() -> None:
    made = prediction({"w1": 1, "w2": -1}, None)
    with pytest.raises(EvidenceError, match="was not measured"):
        judge_study(made, measurement(made, truth({"w1": 0.5})))


def test_p99_spread() -> None:
    rng = np.random.default_rng(1)
    found = p99_spread_ratio(rng.normal(1, 0.07, 30).tolist(), rng.normal(1, 0.01, 30).tolist())
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert found.low < 7 < found.high
    assert p99_spread_ratio([1.0], [1.0, 2.0]) is None
