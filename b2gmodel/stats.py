"""Intervals, warm-up and resampling for series that are neither independent nor stationary from the start.

No clock and no global random state: generators arrive as arguments. Too few samples raise; they never make a
narrow interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from b2gmodel.errors import EvidenceError

Floats = NDArray[np.float64]

MIN_BATCHES: Final = 10
_MSER_GROUP: Final = 5


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with a two-sided confidence interval, in the unit of its samples."""

    mean: float
    low: float
    high: float
    level: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2


def student_interval(samples: Floats, level: float = 0.95) -> Interval:
    """Student's interval for the mean of independent samples (at least two)."""
    n = len(samples)
    if n < 2:
        raise EvidenceError("too few samples for an interval", observed=n, allowed=">= 2", hint="measure more")
    mean = float(np.mean(samples))
    half = float(stdtrit(n - 1, 0.5 + level / 2)) * float(np.std(samples, ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, level)


def block_means(series: Floats, blocks: int) -> Floats:
    """Means of ``blocks`` consecutive blocks of equal length; the first few samples that do not fill one are left out.

    Args:
        series: shape [n] or [n, columns], in order of time.

    Returns:
        shape [blocks] or [blocks, columns].
    """
    length = len(series) // blocks
    if length < 1:
        raise EvidenceError(
            "too few samples to form blocks",
            observed=len(series),
            allowed=f">= {blocks}",
            hint="measure more",
        )
    kept = series[len(series) - blocks * length :]
    return np.asarray(kept.reshape(blocks, length, *series.shape[1:]).mean(axis=1))


def mean_interval(series: Floats, level: float = 0.95, blocks: int = 20) -> Interval:
    """Interval for the mean of a correlated series by non-overlapping batch means (Law, Simulation Modeling, 9.5.3).

    Raises:
        EvidenceError: fewer than ``MIN_BATCHES`` samples.
    """
    n = len(series)
    if n < MIN_BATCHES:
        raise EvidenceError(
            "too few samples for an interval", observed=n, allowed=f">= {MIN_BATCHES}", hint="measure longer"
        )
    of_blocks = student_interval(block_means(series, min(blocks, n)), level)
    mean = float(np.mean(series))
    return Interval(mean, mean - of_blocks.half_width, mean + of_blocks.half_width, level)


def warmup_length(series: Floats, slack: float = 0.0) -> int | None:
    """How many samples to drop from the front, by MSER-5 (White 1997; White, Cobb & Spratt 2000).

    The cut that minimises the standard error of what remains, searched over the first half of the series. None
    where the minimum lies at the end of that half: then no steady state was reached within the series.

    Args:
        series: shape [n], in order of time.
        slack: relative. Takes the earliest cut whose score is within this of the least: cutting by the very least
            leaves out chance peaks, too, and what remains then varies less than it should.
    """
    groups = len(series) // _MSER_GROUP
    if groups < 4:
        return None
    means = series[: groups * _MSER_GROUP].reshape(groups, _MSER_GROUP).mean(axis=1)
    last = groups // 2
    scores = [float(np.var(means[cut:])) / (groups - cut) for cut in range(last + 1)]
    best = int(np.argmin(scores))
    if best == last:
        return None
    return next(cut for cut, score in enumerate(scores) if score <= scores[best] * (1 + slack)) * _MSER_GROUP


def bootstrap_means(blocks: Floats, sessions: NDArray[np.int64], draws: int, rng: np.random.Generator) -> Floats:
    """Draws of the mean. The units are the sessions, as wholes; with one session its blocks.

    A draw adds each unit's deviation with a standard normal weight (the multiplier bootstrap). Resampling units
    would do as well for twenty, but of two or three it makes a handful of values. The spread is the standard error
    exactly, times Student's 95 % point over the normal's, so that 90 % of the draws mean 90 %. Blocks are not drawn
    within a session: its mean has their noise in it already.

    Args:
        blocks: shape ``[n, columns]``; the blocks of one session are exchangeable.
        sessions: the session of each block, shape ``[n]``. With one session what differs between sessions is not
            seen.

    Returns:
        shape ``[draws, columns]``.

    Raises:
        EvidenceError: fewer than two blocks, which have no spread.
    """
    groups = [blocks[sessions == each] for each in np.unique(sessions)]
    units = np.stack([group.mean(axis=0) for group in groups]) if len(groups) > 1 else blocks
    n = len(units)
    if n < 2:
        raise EvidenceError("too few blocks to resample", observed=n, allowed=">= 2", hint="measure longer")
    centre = units.mean(axis=0)
    stretch = float(stdtrit(n - 1, 0.95) / ndtri(0.95)) / math.sqrt(n * (n - 1))
    return np.asarray(centre + rng.standard_normal((draws, n)) @ (units - centre) * stretch)
