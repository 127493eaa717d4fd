"""The payload at which a gain changes its sign, with its uncertainty: the same for what is predicted and measured.

Rules here: row 0 is the estimate, the others are draws; gains are logarithms of X_C3 / X_C1. No clock, no file.

Source: Robertson, Wright and Dykstra (1988), Order Restricted Statistical Inference, sec. 1.4, for the monotone fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from b2gmodel.errors import UsageError
from b2gmodel.placement_records import Crossover
from b2gmodel.records import Estimate

Floats = NDArray[np.float64]

LEVEL = 0.90


def not_rising(gains: Floats) -> Floats:
    """Least squares among all sequences that never rise, row by row; shape as ``gains``, ``[rows, n]``.

    By the min-max formula: at i the least over a <= i of the greatest over b >= i of the mean of a..b.
    """
    rows, n = gains.shape
    sums = np.concatenate([np.zeros((rows, 1)), np.cumsum(gains, axis=1)], axis=1)
    means = np.full((n, n, rows), -np.inf)
    for a in range(n):
        for b in range(a, n):
            means[a, b] = (sums[:, b + 1] - sums[:, a]) / (b + 1 - a)
    fitted = [means[: i + 1, i:].max(axis=1).min(axis=0) for i in range(n)]
    return np.stack(fitted, axis=1)


def roots(payload_bytes: Sequence[int], gains: Floats) -> Floats:
    """Where each row's monotone fit passes zero, on straight lines over the logarithm of the payload, bytes.

    Returns:
        shape ``[rows]``: 0 where the gain is negative from the least payload on, infinity where it is positive up
        to the greatest.
    """
    at = np.log(np.asarray(payload_bytes, dtype=float))
    found = np.empty(len(gains))
    for row, fit in enumerate(not_rising(gains)):
        if fit[0] <= 0:
            found[row] = 0.0
        elif fit[-1] > 0:
            found[row] = np.inf
        else:
            right = int(np.argmax(fit <= 0))
            share = fit[right - 1] / (fit[right - 1] - fit[right])
            found[row] = np.exp(at[right - 1] + share * (at[right] - at[right - 1]))
    return found


def crossover(payload_bytes: Sequence[int], gains: Floats, *, transport: str, k: int, concurrency: int) -> Crossover:
    """The payload above which batching in a single-flight proxy loses against not batching.

    Args:
        payload_bytes: of a request, increasing, at least two.
        gains: log(X_C3 / X_C1), shape ``[1 + draws, payloads]``.

    Raises:
        UsageError: fewer than two payloads, or payloads that do not increase.
    """
    if len(payload_bytes) < 2 or any(b <= a for a, b in pairwise(payload_bytes)):
        raise UsageError(
            "a crossover needs a ladder of payloads", observed=list(payload_bytes), allowed="two or more, increasing"
        )
    found = roots(payload_bytes, gains)
    inside = bool(0 < found[0] < np.inf)
    drawn = found[1:]
    where = None
    if inside:
        low, high = _limits(drawn) if len(drawn) else (None, None)
        where = Estimate(mean=float(found[0]), low=low, high=high, level=LEVEL if len(drawn) else None)
    rootless = float(np.mean((drawn == 0) | np.isinf(drawn))) if len(drawn) else None
    return Crossover(
        transport=transport,
        k=k,
        concurrency=concurrency,
        payload_bytes=where,
        beyond=None if inside else "below" if found[0] == 0 else "above",
        rootless_share=rootless,
        least_payload_bytes=payload_bytes[0],
        greatest_payload_bytes=payload_bytes[-1],
    )


def _limits(drawn: Floats) -> tuple[float | None, float | None]:
    """Quantiles of the draws; None where one lies outside the ladder, so that nothing is known of it."""
    ranked = np.sort(drawn)
    low = float(ranked[int(np.floor((0.5 - LEVEL / 2) * (len(ranked) - 1)))])
    high = float(ranked[int(np.ceil((0.5 + LEVEL / 2) * (len(ranked) - 1)))])
    return (low if low > 0 else None), (high if np.isfinite(high) else None)
