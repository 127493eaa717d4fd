"""Memory for request payloads: there from the start, handed out in slots, used again and again.

Rules that hold here: nothing is allocated after the pool is made; a slot has one owner, from ``take`` to
``release``; slots lie side by side, so that those taken in turn make one stretch of memory wherever the pool
has a free run of them (a batch in shared memory must be one stretch).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

from b2gmodel.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class Slot:
    """A place for one payload: its number in the pool and its memory, ``slot_bytes`` long."""

    index: int
    view: memoryview


class BufferPool:
    """Slots over memory that the caller brings.

    A fresh run is always the first wholly free one, so that a lightly used pool keeps to its first, warm pages.

    Args:
        memory: contiguous, writable, of bytes; anonymous memory or a shared region. Cut into as many slots as
            fit. The pool neither closes nor clears it.
        slot_bytes: size of a slot; payloads up to this size fit. 0 is taken as 1.
        run: slots that should lie side by side, the batch size k.

    Raises:
        UsageError: the memory does not hold one slot, or is read-only or not plain bytes.
    """

    def __init__(self, memory: memoryview, slot_bytes: int, *, run: int = 1) -> None:
        if memory.readonly or not memory.c_contiguous or memory.format != "B":
            raise UsageError(
                "not memory for payloads",
                observed=f"format {memory.format}, {'read-only' if memory.readonly else 'writable'}",
                allowed="writable contiguous bytes",
                where="buffer pool",
            )
        self.slot_bytes = max(1, slot_bytes)
        self.slots = memory.nbytes // self.slot_bytes
        self.run = run
        if self.slots < 1 or slot_bytes < 0 or run < 1:
            raise UsageError(
                "the pool has no slot",
                observed=f"{memory.nbytes} bytes in slots of {slot_bytes}, runs of {run}",
                allowed="at least one slot, runs of at least 1",
                where="buffer pool",
            )
        self.memory = memory
        self._slots = tuple(
            Slot(index, memory[index * self.slot_bytes : (index + 1) * self.slot_bytes]) for index in range(self.slots)
        )
        self._used = bytearray(self.slots)
        self._used_of_run = [0] * -(-self.slots // run)
        # Wholly free runs, and only those: their slots are taken through this heap alone.
        self._free_runs = list(range(len(self._used_of_run)))
        self._next: int | None = None  # the slot after the last one taken, while that is in the same run
        self.in_use = 0

    def take(self) -> Slot | None:
        """A slot of one's own: beside the last one taken where possible. None while all are in use."""
        if self.in_use == self.slots:
            return None
        index = self._next
        if index is None or self._used[index]:
            index = self._fresh()
        following = index + 1
        self._next = following if following % self.run and following < self.slots else None
        self._used[index] = 1
        self._used_of_run[index // self.run] += 1
        self.in_use += 1
        return self._slots[index]

    def release(self, slot: Slot) -> None:
        """The slot is free again. Raises ``ValueError`` for one that is not taken."""
        if not self._used[slot.index]:
            raise ValueError(f"slot {slot.index} is free already")
        self._used[slot.index] = 0
        self.in_use -= 1
        run = slot.index // self.run
        self._used_of_run[run] -= 1
        if not self._used_of_run[run]:
            heappush(self._free_runs, run)
            if self._next is not None and self._next // self.run == run:
                self._next = None

    def _fresh(self) -> int:
        """The start of the first free run; without one, the first free slot anywhere."""
        return heappop(self._free_runs) * self.run if self._free_runs else self._used.find(0)
