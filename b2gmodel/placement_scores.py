"""Where to batch, as measured: R = (X_C3 - X_C1) / (X_C2 - X_C1) at one number of concurrent clients.

R < 0: batching in a single-flight proxy loses against not batching; R = 1: it gains all that the server's own
batching gains. The publication does not spell the formula out: this one is inferred from its figures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from scipy.special import fdtri, stdtrit

from b2gmodel.measured import LEVEL
from b2gmodel.records import Estimate, Measurement, PlacementScore
from b2gmodel.stats import student_interval


def placement_score(measurement: Measurement) -> PlacementScore | None:
    """R over the sessions that ran C1, C2 and C3 with as many clients; None where none did.

    With several such numbers of clients, the one that most sessions ran, and of those the largest.
    """
    found: dict[int, list[tuple[float, float, float]]] = defaultdict(list)
    for session in measurement.sessions:
        rates: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for run in session.runs:
            if run.concurrency is not None:
                rates[run.concurrency][run.placement].append(run.throughput_per_s)
        for concurrency, by_placement in rates.items():
            if {"C1", "C2", "C3"} <= set(by_placement):
                one, two, three = (float(np.mean(by_placement[name])) for name in ("C1", "C2", "C3"))
                found[concurrency].append((one, two, three))
    if not found:
        return None
    concurrency = max(found, key=lambda c: (len(found[c]), c))
    return score(concurrency, found[concurrency])


def score(concurrency: int, sessions: Sequence[tuple[float, float, float]]) -> PlacementScore:
    """R of sessions' (X_C1, X_C2, X_C3), by Fieller's theorem for paired means: its interval is finite just where the
    denominator differs from zero at the same level. Where it does not, or is negative, R has no meaning.
    """
    x = np.array(sessions)
    gains = np.log(x[:, 2] / x[:, 0])
    gain = Estimate(mean=math.expm1(float(gains.mean())))
    if len(x) < 2:
        return PlacementScore(concurrency=concurrency, ratio=None, undefined="one session has no interval", gain=gain)
    of_gain = student_interval(gains, LEVEL)
    gain = Estimate(mean=gain.mean, low=math.expm1(of_gain.low), high=math.expm1(of_gain.high), level=LEVEL)
    proxy, server = x[:, 2] - x[:, 0], x[:, 1] - x[:, 0]
    of_server = student_interval(server, LEVEL)
    if of_server.low <= 0:
        word = "is negative" if of_server.high < 0 else "cannot be told from zero"
        why = f"X_C2 - X_C1 {word}: {of_server.mean:.4g} [{of_server.low:.4g}, {of_server.high:.4g}] request/s"
        return PlacementScore(concurrency=concurrency, ratio=None, undefined=why, gain=gain)
    return PlacementScore(concurrency=concurrency, ratio=_fieller(proxy, server), undefined=None, gain=gain)


def _fieller(
    u: np.ndarray[tuple[int], np.dtype[np.float64]], v: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> Estimate:
    """mean(u) / mean(v) of pairs; all r for which mean(u) - r mean(v) does not differ from zero (Fieller 1954)."""
    n = len(u)
    (s_uu, s_uv), (_, s_vv) = np.cov(u, v)
    reach = float(stdtrit(n - 1, 0.5 + LEVEL / 2)) ** 2 / n
    a, b, c = v.mean() ** 2 - reach * s_vv, u.mean() * v.mean() - reach * s_uv, u.mean() ** 2 - reach * s_uu
    root = math.sqrt(max(0.0, float(b * b - a * c)))
    return Estimate(mean=float(u.mean() / v.mean()), low=float((b - root) / a), high=float((b + root) / a), level=LEVEL)


def p99_spread_ratio(unbatched_s: Sequence[float], batched_s: Sequence[float]) -> Estimate | None:
    """Standard deviation of runs' P99 without batching over that with, by the F distribution of normal samples.

    Exploratory: runs of a few thousand requests know their P99 badly, and its spread has no reason to be normal.

    Args:
        unbatched_s, batched_s: P99 of each run of C1 and of C3, seconds.

    Returns:
        None with fewer than two runs of either, or without spread.
    """
    if min(len(unbatched_s), len(batched_s)) < 2:
        return None
    one, three = (float(np.var(each, ddof=1)) for each in (unbatched_s, batched_s))
    if not (one > 0 and three > 0):
        return None
    free = (len(unbatched_s) - 1, len(batched_s) - 1)
    low, high = (one / three / float(fdtri(*free, 0.5 + sign * LEVEL / 2)) for sign in (1, -1))
    return Estimate(mean=math.sqrt(one / three), low=math.sqrt(low), high=math.sqrt(high), level=LEVEL)
