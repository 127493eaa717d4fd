"""The server's dynamic batcher as a state machine: an event and its time go in, the executions to start come out.

No clock, no randomness: time is the argument ``now_ns``, as in the proxy's own ``batcher.py``. Requests go in
order of arrival. A batch is formed only when an instance is free: the largest preferred size that the queue can
form, at once; else all that fit, once they fill the greatest batch or the oldest has waited the queue delay. With
no preferred size and no delay, whatever waits goes whenever an instance is free.

Source: Triton Inference Server, model configuration, "Dynamic Batcher" (preferred_batch_size,
max_queue_delay_microseconds).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from b2gmodel.errors import UsageError

R = TypeVar("R", bound=Hashable)


@dataclass(frozen=True, slots=True)
class DynamicBatching:
    """How the server merges requests.

    Attributes:
        max_batch: most rows to an execution.
        preferred: sizes that go at once.
        queue_delay_ns: how long the oldest may wait for a better batch.

    Raises:
        UsageError: a size below 1 or above ``max_batch``, or a negative delay.
    """

    max_batch: int
    preferred: tuple[int, ...] = ()
    queue_delay_ns: int = 0

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise UsageError("no batch at all", observed=self.max_batch, allowed=">= 1", where="max batch")
        if any(not 1 <= size <= self.max_batch for size in self.preferred):
            raise UsageError(
                "not a preferred size", observed=self.preferred, allowed=f"1 to {self.max_batch}", where="preferred"
            )
        if self.queue_delay_ns < 0:
            raise UsageError("a delay is not negative", observed=self.queue_delay_ns, allowed=">= 0", where="delay")


class Execution(NamedTuple, Generic[R]):
    """Start these requests together on a free instance; ``size`` is the sum of their rows."""

    requests: tuple[R, ...]
    size: int


class _Waiting(NamedTuple, Generic[R]):
    request: R
    size: int
    arrival_ns: int


class ServerBatcher(Generic[R]):
    """Merges requests for ``instances`` equal instances.

    After each event the driver sets its one timer to ``next_wake_ns``. Raises ``UsageError`` without an instance.
    """

    def __init__(self, settings: DynamicBatching, instances: int) -> None:
        if instances < 1:
            raise UsageError("no instance", observed=instances, allowed=">= 1", where="instances")
        self._settings = settings
        self._free = instances
        self._queue: deque[_Waiting[R]] = deque()

    def arrive(self, request: R, size: int, now_ns: int) -> list[Execution[R]]:
        """A request of ``size`` rows has come. Raises ``UsageError`` where it exceeds the greatest batch."""
        if not 1 <= size <= self._settings.max_batch:
            raise UsageError(
                "the server refuses a batch beyond its limit",
                observed=size,
                allowed=f"1 to {self._settings.max_batch}",
                where="max batch",
            )
        self._queue.append(_Waiting(request, size, now_ns))
        return self._start(now_ns)

    def instance_free(self, now_ns: int) -> list[Execution[R]]:
        """An execution has ended."""
        self._free += 1
        return self._start(now_ns)

    def tick(self, now_ns: int) -> list[Execution[R]]:
        """Time has come this far."""
        return self._start(now_ns)

    @property
    def next_wake_ns(self) -> int | None:
        """When ``tick`` is next needed; None while time alone starts nothing."""
        if not self._queue or not self._free:
            return None
        return self._queue[0].arrival_ns + self._settings.queue_delay_ns

    def _start(self, now_ns: int) -> list[Execution[R]]:
        started = []
        while self._free and (count := self._formed(now_ns)):
            batch = [self._queue.popleft() for _ in range(count)]
            self._free -= 1
            started.append(Execution(tuple(each.request for each in batch), sum(each.size for each in batch)))
        return started

    def _formed(self, now_ns: int) -> int:
        """How many of the oldest requests make the batch that goes now; 0 for none."""
        rows = count = preferred = 0
        full = False
        for waiting in self._queue:
            if rows + waiting.size > self._settings.max_batch:
                full = True
                break
            rows, count = rows + waiting.size, count + 1
            if rows in self._settings.preferred:
                preferred = count
        if preferred:
            return preferred
        waited = bool(self._queue) and now_ns >= self._queue[0].arrival_ns + self._settings.queue_delay_ns
        return count if full or rows == self._settings.max_batch or waited else 0
