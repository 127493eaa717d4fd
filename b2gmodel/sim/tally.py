"""A series of times in memory that does not grow: group means for means, histograms for quantiles.

The series is cut into 512 to 1,024 groups of equal length; when they are full, neighbours are merged and groups are
twice as long. Every 16 groups share a histogram with 256 bins an octave, so that a quantile is read to about
0.1 % or better. Warm-up is cut by MSER-5 over the groups; intervals come from batch means of what remains, and those of
quantiles from the batch means of "lies at or below the quantile", turned back through the histogram.

What a run adds up beside its series (work done, time spent, requests lost) is noted now and then; ratios of such totals
get their intervals from the ratios' residuals over as many batches.

Sources: Law, Simulation Modeling and Analysis, 9.5.3 (batch means); White (1997) for MSER; Chen and Kelton (2006),
Quantile and tolerance-interval estimation in simulation, EJOR 168(2), for histograms and batched indicators; Cochran,
Sampling Techniques, ch. 6, for ratios; Hanley and Lippman-Hand (1983), JAMA 249(13), for the rule of three.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from b2gmodel.errors import EvidenceError
from b2gmodel.sim.compiled import compiled
from b2gmodel.sim.distributions import Floats
from b2gmodel.stats import Interval, block_means, mean_interval, student_interval, warmup_length

GROUPS: Final = 1024
BATCHES: Final = 16
_GROUPS_PER_ROW: Final = 16
_OCTAVE: Final = 256
_LOWEST_EXPONENT: Final = -34
_OCTAVES: Final = 48
_FIRST_BIN: Final = (1023 + _LOWEST_EXPONENT) * _OCTAVE
# Two standard errors of a variance over some 200 groups.
_SLACK: Final = 0.2
# Batches this much alike their neighbours are too short; by chance it happens to one run in a hundred.
_CORRELATED: Final = 0.5


class Tally:
    """Means and quantiles of one series with honest intervals, in the unit of the series."""

    def __init__(self) -> None:
        self._sums = np.zeros(GROUPS)
        self._rows = np.zeros((GROUPS // _GROUPS_PER_ROW, _OCTAVES * _OCTAVE), np.int32)
        self._state = np.array([1, 0, 0], np.int64)
        self._edges = np.array([[math.inf], [-math.inf]]).repeat(_OCTAVES * _OCTAVE, axis=1)

    def add(self, values: Floats) -> None:
        """The next values, shape ``[n]``."""
        _add(values, self._sums, self._rows, self._state, self._edges)

    @property
    def samples(self) -> int:
        size, groups, partial = self._state.tolist()
        return int(size * groups + partial)

    @property
    def groups(self) -> Floats:
        """Means of the full groups, in order of time."""
        size, full, _ = self._state.tolist()
        means: Floats = self._sums[:full] / size
        return means

    @property
    def group_size(self) -> int:
        return int(self._state[0])

    def warmup_groups(self) -> int:
        """How many groups to leave out at the front.

        Raises:
            EvidenceError: no steady state within the series, or batches that still depend on each other.
        """
        groups = self.groups
        if len(groups) < 2 * BATCHES:
            raise self._too_short("too few samples for an interval", 2 * BATCHES)
        if _is_constant(groups):
            return 0
        cut = warmup_length(groups, _SLACK)
        if cut is None:
            raise self._too_short("no steady state was reached", self.samples)
        means = block_means(groups[cut:], BATCHES)
        if not _is_constant(means) and _neighbours_alike(means) > _CORRELATED:
            raise self._too_short("the batches still depend on each other", self.samples)
        return cut

    def warmup_samples(self) -> int:
        """As ``warmup_groups``, in samples."""
        return self.warmup_groups() * self.group_size

    def mean(self, level: float) -> Interval:
        """The mean after the warm-up. Raises ``EvidenceError`` as ``warmup_groups`` does."""
        return mean_interval(self.groups[self.warmup_groups() :], level, BATCHES)

    def quantile(self, share: float, level: float) -> Interval:
        """The quantile after the warm-up.

        Args:
            share: between 0 and 1; 0.99 is P99.

        Raises:
            EvidenceError: as ``warmup_groups``, or too few samples beyond the quantile.
        """
        first = -(-self.warmup_groups() // _GROUPS_PER_ROW)
        rows = self._rows[first : int(self._state[1]) // _GROUPS_PER_ROW]
        if len(rows) < BATCHES:
            raise self._too_short("too few samples for an interval", self.samples)
        # As many batches as for the mean, alike in length to one row.
        starts = np.arange(BATCHES) * len(rows) // BATCHES
        rows = np.add.reduceat(rows, starts, axis=0, dtype=np.int64)
        total = np.cumsum(rows.sum(axis=0)).astype(np.float64)
        value = self._value_at(share, total)
        below = np.array([self._share_below(value, np.cumsum(row).astype(np.float64)) for row in rows])
        spread = float(np.std(below, ddof=1)) / math.sqrt(len(below))
        half = float(stdtrit(len(below) - 1, 0.5 + level / 2)) * spread
        if share + half > 1.0 - 1.0 / total[-1] or share - half < 1.0 / total[-1]:
            raise self._too_short(f"too few samples beyond the {share:g} quantile", 2 * self.samples)
        low, high = self._value_at(share - half, total), self._value_at(share + half, total)
        return Interval(value, low, high, level)

    def _value_at(self, share: float, cumulated: Floats) -> float:
        """The quantile of a histogram, on the straight line between the least and the greatest value of its bin."""
        wanted = share * cumulated[-1]
        place = int(np.searchsorted(cumulated, wanted))
        before = cumulated[place - 1] if place else 0.0
        part = (wanted - before) / max(1.0, cumulated[place] - before)
        low, high = self._edges[:, place].tolist()
        return float(low + part * (high - low))

    def _share_below(self, value: float, cumulated: Floats) -> float:
        place = int(_bin(value))
        before = cumulated[place - 1] if place else 0.0
        low, high = self._edges[:, place].tolist()
        part = (value - low) / (high - low) if low < high else 1.0
        return float((before + part * (cumulated[place] - before)) / cumulated[-1])

    def _too_short(self, problem: str, more: int) -> EvidenceError:
        return EvidenceError(problem, observed=f"{self.samples} samples", hint=f"needs about {more} samples more")


class Totals:
    """Running totals of a run as they stood now and then; the first of them counts the samples of its ``Tally``."""

    def __init__(self) -> None:
        self._notes: list[Floats] = []

    def note(self, samples: int, *totals: float | Floats) -> None:
        """How the totals stand; they never fall."""
        self._notes.append(np.hstack([samples, *totals]))

    def growth(self, begin: int) -> Floats:
        """What each total but the first grew by in each batch after the warm-up, shape ``[BATCHES, totals]``.

        Args:
            begin: samples in the warm-up.

        Raises:
            EvidenceError: too few notes for batches of about equal length.
        """
        notes = np.vstack([np.zeros_like(self._notes[0]), *self._notes])
        samples = notes[:, 0]
        edges = np.searchsorted(samples, np.linspace(begin, samples[-1], BATCHES + 1))
        if np.any(np.diff(edges) < 1):
            raise EvidenceError("too few samples for an interval", observed=f"{samples[-1]:.0f} samples")
        grown: Floats = np.diff(notes[edges, 1:], axis=0)
        return grown


def ratio_interval(over: Floats, under: Floats, level: float, most: float = math.inf) -> Interval:
    """The ratio of two totals that grow together, between 0 and ``most``.

    Args:
        over, under: growth in each batch, shape ``[batches]``.
        level: of the interval.
        most: the greatest value that the ratio can have.
    """
    mean = float(over.sum() / under.sum())
    half = student_interval((over - mean * under) / under.mean(), level).half_width
    return Interval(mean, max(0.0, mean - half), min(most, mean + half), level)


def share_interval(events: Floats, trials: Floats, level: float) -> Interval:
    """As ``ratio_interval`` for a share; one that is 0 of n may still be some 3 / n (the rule of three)."""
    if events.any():
        return ratio_interval(events, trials, level, 1.0)
    return Interval(0.0, 0.0, min(1.0, -math.log(1.0 - level) / float(trials.sum())), level)


def _is_constant(values: Floats) -> bool:
    return float(np.ptp(values)) <= 1e-9 * abs(float(values[0]))


def _neighbours_alike(means: Floats) -> float:
    """The correlation of each batch mean with the next."""
    apart = means - means.mean()
    return float((apart[:-1] * apart[1:]).sum() / (apart**2).sum())


@compiled
def _bin(value: float) -> int:
    """The exponent and the first eight bits of the fraction, read off the float itself."""
    place = int(np.float64(value).view(np.int64) >> 44) - _FIRST_BIN
    return min(max(place, 0), _OCTAVES * _OCTAVE - 1)


@compiled
def _add(values: Floats, sums: Floats, rows: NDArray[np.int32], state: NDArray[np.int64], edges: Floats) -> None:
    size, group, filled = state[0], state[1], state[2]
    for value in values:
        sums[group] += value
        place = _bin(value)
        rows[group // _GROUPS_PER_ROW, place] += 1
        edges[0, place] = min(edges[0, place], value)
        edges[1, place] = max(edges[1, place], value)
        filled += 1
        if filled == size:
            filled = 0
            group += 1
            if group == GROUPS:
                for merged in range(GROUPS // 2):
                    sums[merged] = sums[2 * merged] + sums[2 * merged + 1]
                sums[GROUPS // 2 :] = 0.0
                for row in range(rows.shape[0] // 2):
                    rows[row] = rows[2 * row] + rows[2 * row + 1]
                rows[rows.shape[0] // 2 :] = 0
                group = GROUPS // 2
                size *= 2
    state[0], state[1], state[2] = size, group, filled
