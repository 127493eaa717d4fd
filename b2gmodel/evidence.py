"""Can this measurement carry a verdict on this prediction? What fails is named.

Rules here: no judgement of what was predicted; a pre-registered measurement states what is checked, or fails, and
what any other one leaves unsaid is not checked. What belongs to another prediction is refused outright.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

import numpy as np
from scipy.special import stdtrit

from b2gmodel.errors import EvidenceError
from b2gmodel.records import EvidenceCheck, Measurement, Prediction, Run, digest_of

DIGESTS: Final = "digests chain"
CLOCKS: Final = "one clock"
FAILED: Final = "no requests lost"
FULL: Final = "batches are full"
COUNTS: Final = "the server's counts agree"
SESSIONS: Final = "sessions are new"
STEADY: Final = "steady state"

_DRIFT_LEVEL: Final = 0.99
_LEAST_BLOCKS: Final = 3


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one check found; None in its place means that the record does not state what it needs."""

    passes: bool
    observed: str


def refuse_foreign(prediction: Prediction, digest: str, measurement: Measurement) -> None:
    """Raises ``EvidenceError`` where the measurement was made for another prediction, or is of something else."""
    if measurement.prediction_digest is not None and measurement.prediction_digest != digest:
        raise EvidenceError(
            "the measurement was made for another prediction",
            observed=measurement.prediction_digest,
            allowed=digest,
            where=measurement.name,
            hint="validate it against its own prediction",
        )
    if measurement.preregistered and measurement.prediction_digest is None:
        raise EvidenceError("a pre-registered measurement must name its prediction", where=measurement.name)
    for aspect in ("model", "transport", "k", "payload_bytes"):
        claimed, seen = getattr(prediction, aspect), getattr(measurement, aspect)
        if claimed != seen:
            raise EvidenceError(
                f"the measurement is of something else: its {aspect} differs",
                observed=str(seen),
                allowed=str(claimed),
                where=measurement.name,
            )


def examine(prediction: Prediction, measurement: Measurement) -> tuple[EvidenceCheck, ...]:
    """Every check in turn; the limits are those that the prediction set."""
    limits = prediction.limits
    checks = (
        (DIGESTS, _digests(prediction, measurement), "the digest of what was frozen"),
        (CLOCKS, _clocks(measurement), "one boot, sessions one after the other"),
        (FAILED, _failed(measurement, limits.failed_share), f"at most {limits.failed_share:.1%} of a run's batches"),
        (FULL, _full(measurement, limits.full_batches_share), f"at least {limits.full_batches_share:.0%} hold k"),
        (
            COUNTS,
            _counts(measurement, limits.count_difference_share),
            f"executions within {limits.count_difference_share:.1%} of ours in each run",
        ),
        (SESSIONS, _sessions(prediction, measurement), "none of the calibration's, none twice"),
        (STEADY, _steady(measurement, limits.drift_share), f"drift of X within ±{limits.drift_share:.0%} of a run"),
    )
    unsaid: Literal["failed", "not checked"] = "failed" if measurement.preregistered else "not checked"
    return tuple(
        EvidenceCheck(name=name, outcome=unsaid, observed="not stated", bound=bound)
        if seen is None
        else EvidenceCheck(
            name=name, outcome="passed" if seen.passes else "failed", observed=seen.observed, bound=bound
        )
        for name, seen, bound in checks
    )


def _digests(prediction: Prediction, measurement: Measurement) -> _Seen | None:
    """A measurement of another prediction is refused before; this is the proof that it is of this one."""
    named = measurement.prediction_digest
    if named is None:
        return None
    is_this = named == digest_of(prediction)
    return _Seen(is_this, "it names this prediction" if is_this else f"it names {named}")


def _runs(measurement: Measurement) -> Iterator[tuple[str, Run]]:
    """Each run with the words that name it."""
    for number, session in enumerate(measurement.sessions, start=1):
        for run in session.runs:
            yield f"session {number}, {run.placement} M = {run.flights}", run


def _clocks(measurement: Measurement) -> _Seen | None:
    """Times of different boots or out of order cannot be compared."""
    boots = [session.boot_id for session in measurement.sessions]
    begins = [session.begin_boottime_ns for session in measurement.sessions]
    if measurement.clock is None or None in boots or None in begins:
        return None
    foreign = {boot for boot in boots if boot != measurement.clock.boot_id}
    if foreign:
        return _Seen(False, f"{len(foreign)} other boot(s) than the measurement's own")
    order = [int(begin) for begin in begins if begin is not None]
    if any(later <= earlier for earlier, later in pairwise(order)):
        return _Seen(False, "a session begins before the one that it follows")
    return _Seen(True, f"{measurement.clock.domain}, one boot, {len(order)} session(s) in order")


def _failed(measurement: Measurement, bound: float) -> _Seen | None:
    shares = []
    for where, run in _runs(measurement):
        if run.failed is None or run.delivered_batches is None:
            return None
        shares.append((run.failed / max(run.delivered_batches, 1), where))
    return _worst(shares, bound, "failed")


def _full(measurement: Measurement, bound: float) -> _Seen | None:
    shares = []
    for where, run in _runs(measurement):
        if run.full_batches is None or run.batches is None:
            return None
        # A run without batches has none that are full.
        shares.append((1 - run.full_batches / run.batches if run.batches else 1.0, where))
    share, where = max(shares)
    return _Seen(share <= 1 - bound, f"{1 - share:.1%} at the least ({where})" if share else "all hold k")


def _counts(measurement: Measurement, bound: float) -> _Seen | None:
    """Of C2 the server makes batches of its own, so that executions are not ours to count."""
    shares = []
    for where, run in _runs(measurement):
        if run.placement == "C2":
            continue
        if run.server_executions is None or run.delivered_batches is None:
            return None
        difference = abs(run.server_executions - run.delivered_batches)
        shares.append((difference / max(run.delivered_batches, 1), where))
    return _worst(shares, bound, "off") if shares else None


def _worst(shares: list[tuple[float, str]], bound: float, word: str) -> _Seen:
    share, where = max(shares)
    return _Seen(share <= bound, f"{share:.1%} {word} at the most ({where})" if share else f"none {word}")


def _sessions(prediction: Prediction, measurement: Measurement) -> _Seen | None:
    """A measurement that shares a session with the calibration was not predicted; one counted twice is not two."""
    calibrated = set(prediction.calibration_session_ids)
    if not calibrated:
        return None
    counts = Counter(session.session_id for session in measurement.sessions)
    shared = sorted(calibrated & set(counts))
    if shared:
        return _Seen(False, f"session {shared[0]} was in the calibration")
    twice = sorted(each for each, count in counts.items() if count > 1)
    if twice:
        return _Seen(False, f"session {twice[0]} is there {counts[twice[0]]} times")
    return _Seen(True, f"{len(counts)} session(s), {len(calibrated)} in the calibration")


def _steady(measurement: Measurement, bound: float) -> _Seen | None:
    """Fails where it is shown that X drifts by more than ``bound`` from a run's first block to its last.

    A straight line through the logarithms of each placement's and M's blocks, over all its runs: MSER needs more
    blocks than a run keeps. The level is that of all placements and M together.
    """
    groups: dict[tuple[str, int], list[np.ndarray[tuple[int], np.dtype[np.float64]]]] = defaultdict(list)
    for _, run in _runs(measurement):
        if run.blocks_per_s is None or len(run.blocks_per_s) < _LEAST_BLOCKS:
            return None
        if min(run.blocks_per_s) <= 0:
            return _Seen(False, f"a block without throughput at {run.placement} M = {run.flights}")
        groups[run.placement, run.flights].append(np.log(np.array(run.blocks_per_s)))
    worst, where = 0.0, ""
    for (placement, flights), series in groups.items():
        drift, half = _drift(series, 1 - (1 - _DRIFT_LEVEL) / len(groups))
        if abs(drift) - half > bound:
            return _Seen(False, f"X drifts by {math.expm1(drift):+.1%} during the runs of {placement} M = {flights}")
        if abs(drift) > abs(worst):
            worst, where = drift, f" ({placement} M = {flights})"
    return _Seen(True, f"no drift shown; the largest is {math.expm1(worst):+.1%}{where}")


def _drift(series: list[np.ndarray[tuple[int], np.dtype[np.float64]]], level: float) -> tuple[float, float]:
    """Change of the logarithm over a run and its half-width: one slope, and a level of its own for each run."""
    x = np.concatenate([np.linspace(-0.5, 0.5, len(each)) for each in series])
    y = np.concatenate([each - each.mean() for each in series])
    slope = float(x @ y / (x @ x))
    freedom = len(x) - len(series) - 1
    error = math.sqrt(float(np.sum((y - slope * x) ** 2)) / freedom / float(x @ x))
    return slope, float(stdtrit(freedom, 0.5 + level / 2)) * error
