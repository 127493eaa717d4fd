"""A server that merges requests: which of them it takes together, and how long an execution of b rows lasts.

Rules here: as in ``sim/server_batcher.py``, whose rule this is. A batch is formed only when an instance is free: the
largest preferred size that the queue can form, at once; else all that fit, once they fill the greatest batch or the
oldest has waited the queue delay.

Source: Triton Inference Server, model configuration, "Dynamic Batcher".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from b2gmodel.closed_form import whole_number
from b2gmodel.errors import UsageError

Floats: TypeAlias = NDArray[np.float64]


def ladder_times(rows: Sequence[int], times_s: ArrayLike, wanted: ArrayLike) -> Floats:
    """S(b) from a ladder: on the straight line between two entries, beyond the ends on that through the last two.

    Args:
        rows: the ladder's sizes, increasing, shape ``[m]``. With one entry S is the same for every size.
        times_s: S of each, seconds, shape ``[..., m]``.
        wanted: sizes b, shape ``[w]``.

    Returns:
        seconds, shape ``[..., w]``; not checked for being positive.

    Raises:
        UsageError: no ladder, sizes that do not increase, or as many times as there are not sizes.
    """
    sizes, times, at = np.asarray(rows), np.asarray(times_s, dtype=np.float64), np.asarray(wanted)
    if sizes.ndim != 1 or not sizes.size or np.any(np.diff(sizes) <= 0):
        raise UsageError("not a ladder of S(k)", observed=list(rows), allowed="increasing sizes", where="S(k)")
    if times.ndim < 1 or times.shape[-1] != len(sizes):
        raise UsageError("sizes and times differ in number", observed=times.shape, allowed=f"... x {len(sizes)}")
    if len(sizes) == 1:
        return np.repeat(times, len(at), axis=-1)
    right = np.clip(np.searchsorted(sizes, at), 1, len(sizes) - 1)
    share = (at - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return np.asarray(times[..., right - 1] + share * (times[..., right] - times[..., right - 1]))


@dataclass(frozen=True, slots=True)
class BulkServer:
    """A server that merges requests, and how long it takes for what it merges.

    Attributes:
        ladder_s: (rows, S) with increasing rows, see ``ladder_times``; seconds.
        max_batch: most rows to an execution.
        preferred: sizes, in rows, that go at once.
        queue_delay_s: how long the oldest may wait for a better batch.
        instances: g.

    Raises:
        UsageError: a value outside its domain, or an S(b) that is not positive for some b up to ``max_batch``.
    """

    ladder_s: tuple[tuple[int, float], ...]
    max_batch: int
    preferred: tuple[int, ...] = ()
    queue_delay_s: float = 0.0
    instances: int = 1

    def __post_init__(self) -> None:
        whole_number(self.max_batch, "max batch")
        whole_number(self.instances, "instances")
        if any(not 1 <= size <= self.max_batch for size in self.preferred):
            raise UsageError(
                "not a preferred size", observed=self.preferred, allowed=f"1 to {self.max_batch}", where="preferred"
            )
        if not 0 <= self.queue_delay_s < np.inf:
            raise UsageError("not a delay", observed=self.queue_delay_s, allowed=">= 0, finite", where="queue delay")
        rows, times_s = [size for size, _ in self.ladder_s], [time_s for _, time_s in self.ladder_s]
        positive(ladder_times(rows, times_s, range(1, self.max_batch + 1)), "S(k)")

    def formed(self, waiting: int, rows: int, *, delay_over: bool) -> int:
        """How many of ``waiting`` requests of ``rows`` rows a free instance takes now; 0 for none.

        Args:
            delay_over: whether the oldest has waited the queue delay.
        """
        count = min(waiting, self.max_batch // rows)
        preferred = max(
            (size // rows for size in self.preferred if size % rows == 0 and size <= count * rows), default=0
        )
        full = waiting > count or count * rows == self.max_batch
        return preferred or (count if full or delay_over else 0)


def positive(values: Floats, where: str) -> Floats:
    """The values, or ``UsageError`` for one that is not positive and finite."""
    bad = values[~((values > 0) & (values < np.inf))]
    if bad.size:
        raise UsageError("must be positive", observed=float(bad[0]), allowed="positive and finite", where=where)
    return values
