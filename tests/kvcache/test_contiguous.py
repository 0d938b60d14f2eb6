"""Contiguous KV memory: nothing overlaps, nothing is lost, and the policies cost what they cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.kvcache.contiguous import (
    ContiguousAllocator,
    Policy,
    Region,
    grow,
    power_of_two,
    reserve_max,
)

POLICIES: dict[str, Policy] = {
    "max": reserve_max(20),
    "power_of_two": power_of_two,
    "grow": grow,
}


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    num_slots=st.integers(0, 90),
    moves=st.lists(st.tuples(st.sampled_from("aaggf"), st.integers(0, 19)), max_size=60),
)
def test_slots_are_never_shared_and_all_come_back(
    policy: str, num_slots: int, moves: list[tuple[str, int]]
) -> None:
    allocator = ContiguousAllocator(num_slots, POLICIES[policy])
    held: list[tuple[Region, int]] = []
    for kind, number in moves:
        if kind == "a":
            region = allocator.allocate(number + 1)
            if region is None:
                assert allocator.largest_free < POLICIES[policy](number + 1)
            else:
                assert region.size == POLICIES[policy](number + 1)
                held.append((region, number + 1))
        elif held:
            i = number % len(held)
            region, num_tokens = held[i]
            if kind == "f":
                allocator.free(region)
                del held[i]
            elif num_tokens < 20:
                new = allocator.grow(region, num_tokens + 1)
                if new is not None:
                    assert new.size >= num_tokens + 1
                    held[i] = (new, num_tokens + 1)
        allocator.check(region for region, _ in held)
    assert allocator.num_free + sum(region.size for region, _ in held) == num_slots
    for region, _ in held:
        allocator.free(region)
    allocator.check([])
    assert allocator.num_free == allocator.largest_free == num_slots


def test_first_fit_takes_the_lowest_hole_and_merges_neighbours() -> None:
    allocator = ContiguousAllocator(10, grow)
    a, b, c = (allocator.allocate(3) for _ in range(3))
    assert (a, b, c) == (Region(0, 3), Region(3, 3), Region(6, 3))
    allocator.free(a)
    allocator.free(c)
    assert (allocator.num_free, allocator.largest_free) == (7, 4)
    assert allocator.allocate(5) is None  # external fragmentation: 7 are free
    allocator.free(b)
    assert allocator.largest_free == 10
    assert allocator.allocate(2) == Region(0, 2)


def test_growing_by_copy_holds_old_and_new_at_once() -> None:
    allocator = ContiguousAllocator(9, grow)
    region = allocator.allocate(4)
    region = allocator.grow(region, 5)
    assert region == Region(4, 5)
    assert (allocator.num_copied_tokens, allocator.peak_taken, allocator.span) == (4, 9, 9)
    assert allocator.num_free == 4
    assert allocator.grow(region, 6) is None  # 4 free slots do not hold the copy
    allocator.check([region])


def test_power_of_two_moves_only_when_full() -> None:
    allocator = ContiguousAllocator(64, power_of_two)
    region = allocator.allocate(5)
    assert region == Region(0, 8)
    assert allocator.grow(region, 8) is region
    assert allocator.grow(region, 9) == Region(8, 16)
    assert allocator.num_copied_tokens == 8
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 1024, 1025)] == [1, 2, 4, 4, 8, 1024, 2048]


def test_reserving_the_maximum_never_moves() -> None:
    allocator = ContiguousAllocator(64, reserve_max(16))
    region = allocator.allocate(1)
    assert region == Region(0, 16)
    assert allocator.grow(region, 16) is region
    with pytest.raises(ValueError, match=r"num_tokens=17 exceeds max_model_len=16"):
        allocator.grow(region, 17)
    with pytest.raises(ValueError, match=r"max_model_len=0"):
        reserve_max(0)


def test_freeing_twice_is_our_bug() -> None:
    allocator = ContiguousAllocator(8, grow)
    region = allocator.allocate(2)
    allocator.free(region)
    with pytest.raises(AssertionError, match="not taken"):
        allocator.free(region)
