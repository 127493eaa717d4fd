"""(StudyPrediction, StudyMeasurement) -> StudyVerdict. No file, no clock; sessions are the units.

As in ``judge.py``: a claim is held or refuted where its whole interval says so, and inconclusive otherwise; the verdict
is that of the worst claim, and invalid where the evidence fails. R is scored wherever it is defined, and claimed
through the sign of X_C3 - X_C1, which is R's wherever X_C2 lies above X_C1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np

from b2gmodel.crossover import LEVEL, crossover
from b2gmodel.errors import EvidenceError
from b2gmodel.placement_records import (
    Crossover,
    CrossoverScore,
    MeasuredCell,
    PlacementCell,
    PlacementRun,
    StudyClaim,
    StudyMeasurement,
    StudyPrediction,
    StudyVerdict,
)
from b2gmodel.placement_scores import p99_spread_ratio, score
from b2gmodel.records import Check, Estimate, EvidenceCheck, digest_of
from b2gmodel.scores import SessionLogs
from b2gmodel.stats import bootstrap_means, student_interval

_RISK: Final = 0.05
_DRAWS: Final = 2000
_MOST_SESSIONS: Final = 1000
_WORST_FIRST: Final = ("refuted", "inconclusive", "held")

Outcome = Literal["held", "refuted", "inconclusive"]
CellKey = tuple[str, str, int, int]
"""Workload, transport, k, clients."""
Rates = Mapping[str, Mapping[int, float]]
"""Placement -> session -> mean X over its repetitions, requests a second."""


def judge_study(prediction: StudyPrediction, measurement: StudyMeasurement) -> StudyVerdict:
    """Score a study against what was frozen before it.

    Raises:
        EvidenceError: the measurement is of another prediction or another study, or lacks C1 or C3 of a claimed cell.
    """
    _refuse_foreign(prediction, measurement)
    evidence = _examine(prediction, measurement)
    rates, runs = _by_cell(measurement)
    predicted = {_key(cell): cell for cell in prediction.cells}
    cells = {key: _measured(key, rates[key], runs[key], predicted.get(key)) for key in rates if _has_both(rates[key])}
    crossovers = tuple(_crossover(each, rates, cells, prediction.seed) for each in prediction.crossovers)
    failed = [check for check in evidence if check.outcome == "failed"]
    checks = () if failed else tuple(
        _sign(claim, rates) if claim.quantity == "sign_of_gain" else _place(claim, crossovers)
        for claim in prediction.claims
    )  # fmt: skip
    outcome: Literal["held", "refuted", "inconclusive", "invalid"] = "invalid"
    if not failed:
        outcome = min((check.outcome for check in checks), key=_WORST_FIRST.index)
    return StudyVerdict(
        prediction_digest=digest_of(prediction),
        measurement_digest=digest_of(measurement),
        outcome=outcome,
        checks=checks,
        evidence=evidence,
        cells=tuple(cells.values()),
        crossovers=crossovers,
        sentence=_sentence(checks, crossovers, failed),
    )


def _refuse_foreign(prediction: StudyPrediction, measurement: StudyMeasurement) -> None:
    for what, named, wanted in (
        ("prediction", measurement.prediction_digest, digest_of(prediction)),
        ("study", measurement.study_digest, prediction.study_digest),
    ):
        if named != wanted:
            raise EvidenceError(
                f"the measurement was made for another {what}", observed=named, allowed=wanted, where=measurement.name
            )


def _by_cell(measurement: StudyMeasurement) -> tuple[dict[CellKey, Rates], dict[CellKey, list[PlacementRun]]]:
    """Session means of each placement, and the runs, for each cell. Runs of C1 and C2 belong to every k."""
    batches: dict[tuple[str, str, int], set[int]] = defaultdict(set)
    for run in measurement.runs:
        if run.placement in ("C3", "C4"):
            batches[run.workload, run.transport, run.concurrency].add(run.k)
    runs: dict[CellKey, list[PlacementRun]] = defaultdict(list)
    for run in measurement.runs:
        sizes = {run.k} if run.placement in ("C3", "C4") else batches[run.workload, run.transport, run.concurrency]
        for k in sorted(sizes):
            runs[run.workload, run.transport, k, run.concurrency].append(run)
    rates: dict[CellKey, Rates] = {}
    for key, own in runs.items():
        found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run in own:
            found[run.placement][run.session].append(run.throughput_per_s)
        rates[key] = {
            placement: {session: float(np.mean(values)) for session, values in sorted(by_session.items())}
            for placement, by_session in found.items()
        }
    return rates, runs


def _has_both(rates: Rates) -> bool:
    return "C1" in rates and "C3" in rates


def _key(cell: PlacementCell | StudyClaim) -> CellKey:
    return cell.workload or "", cell.transport, cell.k, cell.concurrency


def _log_gains(rates: Rates) -> dict[int, float]:
    """log(X_C3 / X_C1) of each session that ran both."""
    one, three = rates.get("C1", {}), rates.get("C3", {})
    return {session: math.log(three[session] / one[session]) for session in one if session in three}


def _measured(
    key: CellKey, rates: Rates, runs: Sequence[PlacementRun], predicted: PlacementCell | None
) -> MeasuredCell:
    workload, transport, k, concurrency = key
    sessions = [s for s in rates["C1"] if s in rates["C3"]]
    three = [s for s in sessions if s in rates.get("C2", {})]
    whole = score(concurrency, [(rates["C1"][s], rates["C2"][s], rates["C3"][s]) for s in three]) if three else None
    p99_s = {
        name: [run.p99_s for run in runs if run.placement == name and run.p99_s is not None] for name in ("C1", "C3")
    }
    gains = list(_log_gains(rates).values())
    gain = _estimate(gains)
    return MeasuredCell(
        workload=workload,
        payload_bytes=runs[0].payload_bytes,
        transport=transport,
        k=k,
        concurrency=concurrency,
        sessions=len(sessions),
        c1_per_s=_estimate([rates["C1"][s] for s in sessions]),
        c2_per_s=_estimate([rates["C2"][s] for s in three]) if three else None,
        c3_per_s=_estimate([rates["C3"][s] for s in sessions]),
        proxy_gain_per_s=_estimate([rates["C3"][s] - rates["C1"][s] for s in sessions]),
        gain=Estimate(
            mean=math.expm1(gain.mean),
            low=None if gain.low is None else math.expm1(gain.low),
            high=None if gain.high is None else math.expm1(gain.high),
            level=gain.level,
        ),
        ratio=None if whole is None else whole.ratio,
        undefined="C2 was not measured" if whole is None else whole.undefined,
        p99_spread_ratio=p99_spread_ratio(p99_s["C1"], p99_s["C3"]),
        predicted=predicted,
    )


def _crossover(
    predicted: Crossover, rates: Mapping[CellKey, Rates], cells: Mapping[CellKey, MeasuredCell], seed: int
) -> CrossoverScore:
    """The measured crossover over the sessions that ran the whole ladder."""
    ladder = sorted(
        (cell.payload_bytes, key)
        for key, cell in cells.items()
        if key[1:] == (predicted.transport, predicted.k, predicted.concurrency)
    )
    by_session = [_log_gains(rates[key]) for _, key in ladder]
    sessions = sorted(set.intersection(*(set(each) for each in by_session))) if by_session else []
    if len(sessions) < 2:
        raise EvidenceError(
            "too few sessions ran the whole ladder of payloads", observed=len(sessions), allowed=">= 2",
            hint="b2g study run does what is missing",
        )  # fmt: skip
    gains = np.array([[each[session] for each in by_session] for session in sessions])
    drawn = bootstrap_means(gains, np.arange(len(sessions)), _DRAWS, np.random.default_rng(seed))
    seen = crossover(
        [payload for payload, _ in ladder],
        np.concatenate([gains.mean(axis=0)[np.newaxis], drawn]),
        transport=predicted.transport,
        k=predicted.k,
        concurrency=predicted.concurrency,
    )
    error, inside = None, None
    if predicted.payload_bytes is not None and seen.payload_bytes is not None:
        promised, found = predicted.payload_bytes.mean, seen.payload_bytes
        error = promised / found.mean - 1
        inside = (found.low is None or found.low <= promised) and (found.high is None or promised <= found.high)
    return CrossoverScore(predicted=predicted, measured=seen, error=error, inside=inside)


def _sign(claim: StudyClaim, rates: Mapping[CellKey, Rates]) -> Check:
    own = rates.get(_key(claim), {})
    gains = list(_log_gains(own).values())
    if not gains:
        raise EvidenceError(
            "a cell that was claimed was not measured", observed=f"{claim.workload}, k = {claim.k}, "
            f"c = {claim.concurrency}", hint="b2g study run does what is missing",
        )  # fmt: skip
    logs = SessionLogs.of([gains])

    def decide(extra: int) -> Outcome:
        low, high = float(logs.below(_RISK, extra)[0]), float(logs.above(_RISK, extra)[0])
        if not (low > 0 or high < 0):
            return "inconclusive"
        return "held" if (low > 0) == (claim.bound > 0) else "refuted"

    outcome = decide(0)
    low, high = float(logs.below(_RISK)[0]), float(logs.above(_RISK)[0])
    seen = f"X_C3 / X_C1 - 1 = {math.expm1(float(logs.means[0])):+.1%}"
    if len(gains) > 1:
        seen += f" [{math.expm1(low):+.1%}, {math.expm1(high):+.1%}]"
    more = None
    if outcome == "inconclusive" and len(gains) > 1:
        more = next((n for n in range(1, _MOST_SESSIONS + 1) if decide(n) != "inconclusive"), None)
        seen += (
            f"; too close to 0 for {_MOST_SESSIONS} more sessions"
            if more is None
            else (f"; needs about {more} more session{'s' if more > 1 else ''}")
        )
    return Check(
        name=f"sign of X_C3 - X_C1 of {claim.workload}",
        predictor="placement",
        outcome=outcome,
        observed=seen,
        bound="above 0" if claim.bound > 0 else "below 0",
        more_sessions=more,
    )


def _place(claim: StudyClaim, crossovers: Sequence[CrossoverScore]) -> Check:
    """Held where all of the measured interval lies within the bound of what was predicted."""
    found = next(
        each for each in crossovers
        if (each.predicted.transport, each.predicted.k, each.predicted.concurrency)
        == (claim.transport, claim.k, claim.concurrency)
    )  # fmt: skip
    promised, seen = found.predicted.payload_bytes, found.measured.payload_bytes
    assert promised is not None, "a crossover outside the ladder is not claimed"
    outcome: Outcome = "inconclusive"
    if seen is None:
        outcome, observed = "refuted", f"none within the ladder: it lies {found.measured.beyond}"
    else:
        reach = math.exp(claim.bound)
        low, high = seen.low, seen.high
        if low is not None and high is not None and promised.mean / reach <= low and high <= promised.mean * reach:
            outcome = "held"
        elif (low is not None and low > promised.mean * reach) or (high is not None and high < promised.mean / reach):
            outcome = "refuted"
        observed = f"{_kib(seen.mean)} [{_kib(low)}, {_kib(high)}] KiB"
    return Check(
        name="crossover payload",
        predictor="placement",
        outcome=outcome,
        observed=observed,
        bound=f"within {math.expm1(claim.bound):.0%} of {_kib(promised.mean)} KiB",
    )


def _examine(prediction: StudyPrediction, measurement: StudyMeasurement) -> tuple[EvidenceCheck, ...]:
    limits = prediction.limits
    lost = max((run.failed / max(run.requests, 1), _named(run)) for run in measurement.runs)
    partial = [(1 - run.full_batches_share, _named(run)) for run in measurement.runs
               if run.full_batches_share is not None and run.placement in ("C3", "C4")]  # fmt: skip
    emptiest = max(partial, default=(0.0, ""))
    off = max((run.count_difference / max(run.requests, 1), _named(run)) for run in measurement.runs)
    calibrated = set(prediction.calibration_session_ids)
    shared = sorted(calibrated & {session.session_id for session in measurement.sessions})
    per_cell: dict[tuple[str, str, str, int], set[int]] = defaultdict(set)
    for run in measurement.runs:
        per_cell[run.workload, run.transport, run.placement, run.concurrency].add(run.session)
    fewest = min(len(sessions) for sessions in per_cell.values())

    def check(name: str, passes: bool, observed: str, bound: str) -> EvidenceCheck:
        return EvidenceCheck(name=name, outcome="passed" if passes else "failed", observed=observed, bound=bound)

    return (
        check("no requests lost", lost[0] <= limits.failed_share, f"{lost[0]:.1%} at the most ({lost[1]})",
              f"at most {limits.failed_share:.1%} of a run's requests"),
        check("batches are full", emptiest[0] <= 1 - limits.full_batches_share,
              f"{1 - emptiest[0]:.1%} hold k at the least", f"at least {limits.full_batches_share:.0%} in C3 and C4"),
        check("the server's counts agree", off[0] <= limits.count_difference_share, f"{off[0]:.1%} off at the most",
              f"within {limits.count_difference_share:.1%} of ours in each run"),
        check("sessions are new", bool(calibrated) and not shared,
              f"session {shared[0]} was in a calibration" if shared
              else f"{len(measurement.sessions)} session(s), {len(calibrated)} in the calibrations",
              "none of the calibrations'"),
        check("sessions are enough", fewest >= 2, f"{fewest} at the least", "two or more of every placement"),
    )  # fmt: skip


def _named(run: PlacementRun) -> str:
    return f"{run.workload} {run.placement} c = {run.concurrency}, session {run.session + 1}"


def _estimate(values: Sequence[float]) -> Estimate:
    if len(values) < 2:
        return Estimate(mean=float(np.mean(values)))
    found = student_interval(np.array(values), LEVEL)
    return Estimate(mean=found.mean, low=found.low, high=found.high, level=LEVEL)


def _kib(value: float | None) -> str:
    return "outside" if value is None else f"{value / 1024:.0f}"


def _sentence(checks: Sequence[Check], crossovers: Sequence[CrossoverScore], failed: Sequence[EvidenceCheck]) -> str:
    if failed:
        reasons = "; ".join(f"{check.name}: {check.observed}, allowed: {check.bound}" for check in failed)
        return f"The evidence fails, and nothing is judged. {reasons}."
    signs = [check for check in checks if check.name != "crossover payload"]
    held = sum(check.outcome == "held" for check in signs)
    wrong = sum(check.outcome == "refuted" for check in signs)
    told = [f"Of {len(signs)} predicted signs of X_C3 - X_C1 {held} held, {wrong} were refuted and "
            f"{len(signs) - held - wrong} could not be told."]  # fmt: skip
    for each in crossovers:
        promised, seen = each.predicted.payload_bytes, each.measured.payload_bytes
        said = (
            "none was predicted within the ladder" if promised is None else f"{_kib(promised.mean)} KiB was predicted"
        )
        found = "none was found" if seen is None else (
            f"{_kib(seen.mean)} [{_kib(seen.low)}, {_kib(seen.high)}] KiB was measured"
        )  # fmt: skip
        told.append(f"Crossover payload at {each.predicted.concurrency} clients over {each.predicted.transport}: "
                    f"{said}, {found}.")  # fmt: skip
    return " ".join(told)
