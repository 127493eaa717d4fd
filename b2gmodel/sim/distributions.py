"""Times as distributions: a sampler, and the analytic moments next to it.

No global random state: generators arrive as arguments. Times are float seconds; a distribution of mean 1 may
stand for dimensionless work. ``scaled`` keeps the shape, so a measured spread can be laid over any mean.

Sources for the moments: Johnson, Kotz and Balakrishnan, Continuous Univariate Distributions, vol. 1, ch. 14
(lognormal), 17 (gamma), 19 (exponential).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from b2gmodel.errors import UsageError
from b2gmodel.sim.compiled import compiled

Floats: TypeAlias = NDArray[np.float64]


class Distribution(Protocol):
    """A positive random time."""

    def moment(self, order: int) -> float:
        """E[X^order], order >= 1, in s^order."""
        ...

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        """``n`` independent values, shape ``[n]``."""
        ...


def mean(distribution: Distribution) -> float:
    """E[X], seconds."""
    return distribution.moment(1)


def variation(distribution: Distribution) -> float:
    """The coefficient of variation: standard deviation over mean."""
    first = distribution.moment(1)
    # The difference of nearly equal numbers can come out just below zero where there is no spread.
    return math.sqrt(max(0.0, distribution.moment(2) / first**2 - 1.0))


@dataclass(frozen=True, slots=True)
class Constant:
    """Always ``value_s``. Raises ``UsageError`` unless it is positive and finite."""

    value_s: float

    def __post_init__(self) -> None:
        _positive(self.value_s, "constant time")

    def moment(self, order: int) -> float:
        return float(self.value_s**order)

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return np.full(n, self.value_s)


@dataclass(frozen=True, slots=True)
class Exponential:
    """Memoryless, cv = 1. Raises ``UsageError`` unless the mean is positive and finite."""

    mean_s: float

    def __post_init__(self) -> None:
        _positive(self.mean_s, "mean")

    def moment(self, order: int) -> float:
        return float(math.factorial(order) * self.mean_s**order)

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return rng.exponential(self.mean_s, n)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gamma by its mean and coefficient of variation; ``Gamma.erlang`` for a sum of exponential stages.

    Raises:
        UsageError: a value that is not positive and finite.
    """

    mean_s: float
    cv: float

    def __post_init__(self) -> None:
        _positive(self.mean_s, "mean")
        _positive(self.cv, "coefficient of variation")

    @classmethod
    def erlang(cls, mean_s: float, stages: int) -> Gamma:
        """The sum of ``stages`` equal exponential stages with the given mean in all."""
        if stages < 1:
            raise UsageError("an Erlang distribution needs a stage", observed=stages, allowed=">= 1", where="stages")
        return cls(mean_s, 1.0 / math.sqrt(stages))

    @property
    def shape(self) -> float:
        return 1.0 / self.cv**2

    def moment(self, order: int) -> float:
        rising = math.prod(self.shape + step for step in range(order))
        return rising * (self.mean_s / self.shape) ** order

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return rng.gamma(self.shape, self.mean_s / self.shape, n)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lognormal by its mean and coefficient of variation. Raises ``UsageError`` as ``Gamma`` does."""

    mean_s: float
    cv: float

    def __post_init__(self) -> None:
        _positive(self.mean_s, "mean")
        _positive(self.cv, "coefficient of variation")

    @property
    def _sigma(self) -> float:
        return math.sqrt(math.log1p(self.cv**2))

    def moment(self, order: int) -> float:
        return float(self.mean_s**order * math.exp(order * (order - 1) / 2 * self._sigma**2))

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return rng.lognormal(math.log(self.mean_s) - self._sigma**2 / 2, self._sigma, n)


@dataclass(frozen=True, slots=True, eq=False)
class Empirical:
    """Resampled with replacement from measured times, shape ``[n]``; the moments are those of the sample.

    Raises:
        UsageError: no value, or one that is not positive and finite.
    """

    values_s: Floats

    def __init__(self, values_s: ArrayLike) -> None:
        object.__setattr__(self, "values_s", _measured(values_s, dimensions=1))

    def moment(self, order: int) -> float:
        return float(np.mean(self.values_s**order))

    def sample(self, rng: np.random.Generator, n: int) -> Floats:
        return _resampled(rng, self.values_s.reshape(-1, 1), n)[:, 0]


class CycleTimes(Protocol):
    """The times of all legs of a cycle, drawn together."""

    @property
    def legs(self) -> int:
        """Columns of a draw."""
        ...

    @property
    def means_s(self) -> tuple[float, ...]:
        """The mean of each leg."""
        ...

    @property
    def streams(self) -> int:
        """How many generators ``draw`` needs. One a leg keeps runs that differ in one leg comparable."""
        ...

    def draw(self, streams: Sequence[np.random.Generator], n: int) -> Floats:
        """``n`` cycles, shape ``[n, legs]``, in C order."""
        ...


@dataclass(frozen=True, slots=True)
class Independent:
    """Legs that know nothing of each other, each with its distribution and its own stream of numbers."""

    distributions: tuple[Distribution, ...]

    def __init__(self, distributions: Sequence[Distribution]) -> None:
        if not distributions:
            raise UsageError("a cycle without legs", observed=0, allowed="at least one", where="legs")
        object.__setattr__(self, "distributions", tuple(distributions))

    @property
    def legs(self) -> int:
        return len(self.distributions)

    @property
    def means_s(self) -> tuple[float, ...]:
        return tuple(mean(each) for each in self.distributions)

    @property
    def streams(self) -> int:
        return self.legs

    def draw(self, streams: Sequence[np.random.Generator], n: int) -> Floats:
        times = np.empty((n, self.legs))
        for leg, (distribution, rng) in enumerate(zip(self.distributions, streams, strict=True)):
            times[:, leg] = distribution.sample(rng, n)
        return times


@dataclass(frozen=True, slots=True, eq=False)
class Resampled:
    """Whole measured cycles, drawn with replacement: what is correlated within a cycle stays so.

    Attributes:
        rows_s: shape ``[cycles, legs]``; a row is one measured cycle.

    Raises:
        UsageError: no row, or a time that is not positive and finite.
    """

    rows_s: Floats

    def __init__(self, rows_s: ArrayLike) -> None:
        object.__setattr__(self, "rows_s", _measured(rows_s, dimensions=2))

    @property
    def legs(self) -> int:
        return int(self.rows_s.shape[1])

    @property
    def means_s(self) -> tuple[float, ...]:
        return tuple(self.rows_s.mean(axis=0).tolist())

    @property
    def streams(self) -> int:
        return 1

    def draw(self, streams: Sequence[np.random.Generator], n: int) -> Floats:
        (rng,) = streams
        return _resampled(rng, self.rows_s, n)


def _resampled(rng: np.random.Generator, rows: Floats, n: int) -> Floats:
    """``n`` of the rows, drawn with replacement, two from each raw 64-bit number: its low half first."""
    picked = np.empty((n, rows.shape[1]))
    raw = rng.bit_generator.random_raw((n + 1) // 2).astype("<u8", copy=False)
    _pick(raw.view("<u4"), rows, picked)
    return picked


@compiled
def _pick(numbers: NDArray[np.uint32], rows: Floats, picked: Floats) -> None:
    """A row's chance is off by less than ``len(rows) / 2**32`` of itself (Lemire 2019, without the rejection)."""
    count, half = np.uint64(len(rows)), np.uint64(32)
    # Column by column: a loop over the few columns inside costs more than to work out the row anew.
    for column in range(rows.shape[1]):
        for place in range(len(picked)):
            picked[place, column] = rows[(np.uint64(numbers[place]) * count) >> half, column]


def _positive(value: float, what: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"the {what} must be positive and finite", observed=value, allowed="> 0", where=what)


def _measured(values: ArrayLike, *, dimensions: int) -> Floats:
    array = np.array(values, dtype=np.float64, order="C")
    if array.ndim != dimensions or array.size == 0:
        shape = "cycles x legs" if dimensions == 2 else "values"
        raise UsageError("not a sample", observed=array.shape, allowed=f"an array of {shape}, at least one")
    bad = array[~(np.isfinite(array) & (array > 0))]
    if bad.size:
        raise UsageError(
            "a measured time must be positive and finite",
            observed=float(bad[0]),
            allowed="> 0",
            hint="a negative transport time says that counters and clock disagree",
        )
    array.setflags(write=False)
    return array
