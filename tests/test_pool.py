"""Slots: each with one owner, side by side where there is room, and never more memory than at the start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from b2gmodel.errors import UsageError
from b2gmodel.live.pool import BufferPool, Slot


def pool_of(slots: int, run: int = 1, slot_bytes: int = 16) -> BufferPool:
    return BufferPool(memoryview(bytearray(slots * slot_bytes)), slot_bytes, run=run)


def take(pool: BufferPool, count: int = 1) -> list[Slot]:
    taken = [pool.take() for _ in range(count)]
    assert all(slot is not None for slot in taken)
    return [slot for slot in taken if slot is not None]


def indexes(slots: list[Slot]) -> list[int]:
    return [slot.index for slot in slots]


def test_slots_are_disjoint_views_of_the_callers_memory() -> None:
    memory = bytearray(4 * 16 + 7)
    pool = BufferPool(memoryview(memory), 16)
    assert pool.slots == 4  # the seven bytes left over are no slot
    for slot in take(pool, 4):
        slot.view[:] = bytes([slot.index + 1]) * 16
    assert bytes(memory) == b"".join(bytes([n]) * 16 for n in (1, 2, 3, 4)) + bytes(7)


def test_none_when_all_are_taken_and_again_after_a_release() -> None:
    pool = pool_of(2)
    first, _ = take(pool, 2)
    assert pool.take() is None
    pool.release(first)
    assert take(pool) == [first]


def test_a_slot_is_released_once() -> None:
    pool = pool_of(2)
    (slot,) = take(pool)
    pool.release(slot)
    with pytest.raises(ValueError, match="slot 0 is free already"):
        pool.release(slot)
    assert pool.in_use == 0


def test_a_lightly_used_pool_keeps_to_its_first_slots() -> None:
    pool = pool_of(100)
    for _ in range(10):
        first, second = take(pool, 2)
        assert indexes([first, second]) == [0, 1]
        pool.release(second)
        pool.release(first)


def test_runs_in_turn_although_an_earlier_one_has_holes() -> None:
    pool = pool_of(12, run=4)
    first = take(pool, 4)
    assert indexes(first) == [0, 1, 2, 3]
    pool.release(first[1])  # a hole: too small for a batch
    assert indexes(take(pool, 4)) == [4, 5, 6, 7]
    for slot in (first[0], first[2], first[3]):
        pool.release(slot)
    assert indexes(take(pool, 4)) == [0, 1, 2, 3]
    assert indexes(take(pool, 4)) == [8, 9, 10, 11]


def test_holes_serve_when_no_run_is_left() -> None:
    pool = pool_of(8, run=4)
    taken = take(pool, 8)
    for index in (6, 1):
        pool.release(taken[index])
    assert indexes(take(pool, 2)) == [1, 6]


def test_a_run_begun_and_given_up_starts_afresh() -> None:
    pool = pool_of(8, run=4)
    for slot in take(pool, 2):
        pool.release(slot)
    assert indexes(take(pool, 4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("memory", "slot_bytes"), [(memoryview(bytearray(15)), 16), (memoryview(bytes(64)), 16), (memoryview(b""), 0)]
)
def test_memory_that_does_not_do(memory: memoryview, slot_bytes: int) -> None:
    with pytest.raises(UsageError):
        BufferPool(memory, slot_bytes)


@given(st.integers(1, 20), st.integers(1, 6), st.lists(st.one_of(st.none(), st.integers(0, 19)), max_size=80))
def test_one_owner_a_slot_under_any_order(slots: int, run: int, steps: list[int | None]) -> None:
    pool, held = pool_of(slots, run), dict[int, Slot]()
    for step in steps:
        if step is None:
            slot = pool.take()
            assert (slot is None) == (len(held) == slots)
            if slot is not None:
                assert slot.index not in held
                held[slot.index] = slot
        elif step in held:
            pool.release(held.pop(step))
        assert pool.in_use == len(held)
    for slot in held.values():
        pool.release(slot)
    assert indexes(take(pool, slots)) == list(range(slots))
