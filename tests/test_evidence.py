"""Each check on the evidence: a clean record passes, one planted defect is refused by name, what is unsaid is told."""

from __future__ import annotations

from collections.abc import Callable

import builders
import numpy as np
import pytest

from b2gmodel import evidence
from b2gmodel.evidence import examine
from b2gmodel.judge import judge
from b2gmodel.records import Clock, Measurement, Prediction, Run, Session, digest_of

CURVE = {1: [320.0, 322.0, 321.0], 3: [700.0, 702.0, 701.0], 4: [690.0, 691.0, 692.0]}
NAMES = [
    evidence.DIGESTS,
    evidence.CLOCKS,
    evidence.FAILED,
    evidence.FULL,
    evidence.COUNTS,
    evidence.SESSIONS,
    evidence.STEADY,
]
Plant = Callable[[Measurement], Measurement]


@pytest.fixture(scope="module")
def prediction() -> Prediction:
    return builders.prediction()


@pytest.fixture
def clean(prediction: Prediction) -> Measurement:
    return builders.measurement(prediction, CURVE, baseline=250.0)


def in_session(number: int, **changes: object) -> Plant:
    def plant(measured: Measurement) -> Measurement:
        sessions = list(measured.sessions)
        sessions[number] = sessions[number].model_copy(update=changes)
        return measured.model_copy(update={"sessions": tuple(sessions)})

    return plant


def in_run(number: int, order: int, **changes: object) -> Plant:
    def plant(measured: Measurement) -> Measurement:
        runs = list(measured.sessions[number].runs)
        runs[order] = runs[order].model_copy(update=changes)
        return in_session(number, runs=tuple(runs))(measured)

    return plant


def in_runs_of(flights: int, change: Callable[[Run], Run]) -> Plant:
    def changed(session: Session) -> Session:
        runs = [change(run) if run.flights == flights else run for run in session.runs]
        return session.model_copy(update={"runs": tuple(runs)})

    return lambda measured: measured.model_copy(update={"sessions": tuple(map(changed, measured.sessions))})


def ramp(share: float) -> Callable[[Run], Run]:
    """X rises by that share from the first block to the last."""
    steps = np.linspace(-0.5, 0.5, 5)
    return lambda run: run.model_copy(
        update={"blocks_per_s": tuple((run.throughput_per_s * (1 + share) ** steps).tolist())}
    )


DEFECTS = [
    (evidence.CLOCKS, in_session(1, boot_id="another"), "1 other boot(s) than the measurement's own"),
    (evidence.CLOCKS, in_session(1, begin_boottime_ns="999"), "a session begins before the one that it follows"),
    (evidence.FAILED, in_run(1, 2, failed=1), "0.9% failed at the most (session 2, C4 M = 4)"),
    (evidence.FULL, in_run(0, 1, full_batches=94), "94.0% at the least (session 1, C4 M = 3)"),
    (evidence.FULL, in_run(0, 1, full_batches=0, batches=0), "0.0% at the least (session 1, C4 M = 3)"),
    (evidence.COUNTS, in_run(2, 0, server_executions=114), "1.8% off at the most (session 3, C3 M = 1)"),
    (evidence.COUNTS, in_run(2, 0, server_executions=110), "1.8% off at the most (session 3, C3 M = 1)"),
    (evidence.SESSIONS, in_session(1, session_id="s0"), "session s0 was in the calibration"),
    (evidence.SESSIONS, in_session(1, session_id="measured-2"), "session measured-2 is there 2 times"),
    (evidence.STEADY, in_runs_of(3, ramp(0.3)), "X drifts by +30.0% during the runs of C4 M = 3"),
    (evidence.STEADY, in_runs_of(4, ramp(-0.2)), "X drifts by -20.0% during the runs of C4 M = 4"),
    (evidence.STEADY, in_run(0, 0, blocks_per_s=(320.0, 0.0, 320.0)), "a block without throughput at C3 M = 1"),
]  # fmt: skip


def test_a_clean_record_passes(prediction: Prediction, clean: Measurement) -> None:
    checks = examine(prediction, clean)
    assert [check.name for check in checks] == NAMES
    assert {check.outcome for check in checks} == {"passed"}
    assert judge(prediction, clean).outcome == "held"


@pytest.mark.parametrize(("name", "plant", "observed"), DEFECTS)
def test_a_planted_defect_is_refused_by_name(
    prediction: Prediction, clean: Measurement, name: str, plant: Plant, observed: str
) -> None:
    verdict = judge(prediction, plant(clean))
    (failed,) = [check for check in verdict.evidence if check.outcome == "failed"]
    assert (failed.name, failed.observed) == (name, observed)
    assert (verdict.outcome, verdict.checks, verdict.scores) == ("invalid", (), ())
    assert verdict.sentence == (
        f"The evidence fails, and nothing is judged. {name}: {observed}, allowed: {failed.bound}."
    )


def test_every_check_has_a_defect_here() -> None:
    """The first one's is refused before there could be a verdict: test_judge.py."""
    assert {name for name, _, _ in DEFECTS} | {evidence.DIGESTS} == set(NAMES)


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        (evidence.FULL, in_run(0, 1, full_batches=95)),
        (evidence.COUNTS, in_run(2, 0, server_executions=113)),
        (evidence.STEADY, in_runs_of(3, ramp(0.09))),
    ],
)
def test_what_lies_within_its_limit_passes(prediction: Prediction, clean: Measurement, name: str, plant: Plant) -> None:
    assert judge(prediction, plant(clean)).outcome == "held"


def test_the_limits_are_the_predictions_own(prediction: Prediction, clean: Measurement) -> None:
    lenient = prediction.model_copy(
        update={"limits": prediction.limits.model_copy(update={"failed_share": 0.02, "count_difference_share": 0.02})}
    )
    measured = clean.model_copy(update={"prediction_digest": digest_of(lenient)})
    seen = in_run(1, 2, failed=2, server_executions=114)(measured)
    assert {check.outcome for check in examine(lenient, seen)} == {"passed"}


@pytest.mark.parametrize(
    ("name", "plant"),
    [
        (evidence.CLOCKS, lambda measured: measured.model_copy(update={"clock": None})),
        (evidence.CLOCKS, in_session(0, boot_id=None)),
        (evidence.FAILED, in_run(0, 0, failed=None)),
        (evidence.FULL, in_run(0, 0, full_batches=None)),
        (evidence.COUNTS, in_run(0, 0, server_executions=None)),
        (evidence.STEADY, in_run(0, 0, blocks_per_s=None)),
        (evidence.STEADY, in_run(0, 0, blocks_per_s=(1.0, 1.0))),
    ],
)
def test_what_a_preregistered_measurement_leaves_unsaid_fails(
    prediction: Prediction, clean: Measurement, name: str, plant: Plant
) -> None:
    """And what any other one leaves unsaid is not checked, and said to be so."""
    for preregistered, outcome in ((True, "failed"), (False, "not checked")):
        seen = plant(clean).model_copy(update={"preregistered": preregistered})
        (check,) = [check for check in examine(prediction, seen) if check.outcome != "passed"]
        assert (check.name, check.outcome, check.observed) == (name, outcome, "not stated")


def test_a_calibration_that_names_no_session_cannot_be_told_from_the_measurement(clean: Measurement) -> None:
    anonymous = builders.prediction(builders.calibration().model_copy(update={"session_ids": ()}))
    seen = clean.model_copy(update={"prediction_digest": digest_of(anonymous)})
    assert judge(anonymous, seen).outcome == "invalid"
    (failed,) = [check for check in examine(anonymous, seen) if check.outcome == "failed"]
    assert failed.name == evidence.SESSIONS


def test_noise_in_the_blocks_is_no_drift(prediction: Prediction, clean: Measurement) -> None:
    """200 measurements in a steady state, blocks of 15 % noise: the check fails one in a hundred at the most."""
    rng = np.random.default_rng(2)

    def noisy(run: Run) -> Run:
        rates = run.throughput_per_s * np.exp(rng.normal(scale=0.15, size=5))
        return run.model_copy(update={"blocks_per_s": tuple(rates.tolist())})

    failures = 0
    for _ in range(200):
        seen = clean
        for flights in (1, 3, 4, 8):
            seen = in_runs_of(flights, noisy)(seen)
        failures += examine(prediction, seen)[-1].outcome == "failed"
    assert failures <= 4


def test_of_the_servers_own_batching_executions_are_not_counted(prediction: Prediction, clean: Measurement) -> None:
    merged = builders.run("C2", 8, 400.0).model_copy(update={"server_executions": 20})
    seen = in_session(0, runs=(*clean.sessions[0].runs, merged))(clean)
    assert {check.outcome for check in examine(prediction, seen)} == {"passed"}


def test_clocks_are_told(clean: Measurement, prediction: Prediction) -> None:
    assert clean.clock == Clock(domain="CLOCK_MONOTONIC", boot_id="boot")
    assert examine(prediction, clean)[1].observed == "CLOCK_MONOTONIC, one boot, 3 session(s) in order"


def test_the_digest_is_compared_and_not_taken_on_trust(prediction: Prediction, clean: Measurement) -> None:
    """The judge refuses a foreign measurement before it examines it; the check itself fails for one, too."""
    foreign = clean.model_copy(update={"prediction_digest": "0" * 64})
    found = {check.name: check.outcome for check in examine(prediction, foreign)}
    assert found[evidence.DIGESTS] == "failed"
    assert {check.name: check.outcome for check in examine(prediction, clean)}[evidence.DIGESTS] == "passed"
