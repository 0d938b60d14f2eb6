"""KV memory before paging: each sequence lies in one piece of the token slots.

What paging is compared with (Kwon et al. 2023, PagedAttention, sections 2 and 3.1, figures 2, 3).
How much a sequence of n tokens takes is a policy, a function of n:

    reserve_max(m)   m slots             room for the longest sequence there may be
    power_of_two     2^ceil(log2 n)      moves to twice the space when full
    grow             n                   moves at every token, as a cache that is concatenated does

    slots   |AAAAAA..AAAA|BBBB....|      |CCCCCC......|   |
                  ^^ inside: taken, unused       ^^^ outside: free, and perhaps too short
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import NamedTuple

Policy = Callable[[int], int]
"""Slots to take for a sequence of so many tokens; at least that many."""


def reserve_max(max_model_len: int) -> Policy:
    """Always the longest sequence there may be, `max_model_len` tokens."""
    if max_model_len < 1:
        raise ValueError(f"max_model_len={max_model_len} must be at least 1 token")

    def slots(num_tokens: int) -> int:
        if num_tokens > max_model_len:
            raise ValueError(f"num_tokens={num_tokens} exceeds max_model_len={max_model_len}")
        return max_model_len

    return slots


def power_of_two(num_tokens: int) -> int:
    """The next power of two."""
    return 1 << (num_tokens - 1).bit_length()


def grow(num_tokens: int) -> int:
    """Exactly as many as there are tokens."""
    return num_tokens


class Region(NamedTuple):
    """`size` slots from `start` on that belong to one sequence."""

    start: int
    size: int


class ContiguousAllocator:
    """Token slots `0 .. num_slots - 1`, handed out in one piece: first fit, neighbours merged.

    Attributes:
        num_free: slots that belong to nobody.
        num_copied_tokens: tokens copied so far because their sequence had to move.
        peak_taken: most slots taken at once; while a sequence moves, old and new count.
        span: one past the highest slot ever taken: the memory that would have been enough.
    """

    def __init__(self, num_slots: int, policy: Policy):
        self.num_slots = num_slots
        self.policy = policy
        self.num_free = num_slots
        self.num_copied_tokens = 0
        self.peak_taken = 0
        self.span = 0
        # The free intervals in order: never empty, never adjacent.
        self._starts = [0] if num_slots else []
        self._sizes = [num_slots] if num_slots else []
        self._taken: dict[int, int] = {}

    @property
    def largest_free(self) -> int:
        """Slots of the longest free interval."""
        return max(self._sizes, default=0)

    def allocate(self, num_tokens: int) -> Region | None:
        """Take what the policy wants for `num_tokens` tokens; None if no interval is that long."""
        wanted = self.policy(num_tokens)
        for i, size in enumerate(self._sizes):
            if size >= wanted:
                return self._take(i, wanted)
        return None

    def grow(self, region: Region, num_tokens: int) -> Region | None:
        """Make room for `num_tokens` tokens in all: the same region, or a new one, copied to.

        The old region is given back after the copy, so both must fit at once. Returns None, and
        leaves the sequence where it is, if they do not.
        """
        if num_tokens <= region.size:
            return region
        new = self.allocate(num_tokens)
        if new is not None:
            self.num_copied_tokens += region.size  # it is full, or it would not move
            self.free(region)
        return new

    def free(self, region: Region) -> None:
        """Give a region back and merge it with the free intervals beside it."""
        start, size = region
        assert self._taken.get(start) == size, f"{region} is not taken"
        del self._taken[start]
        self.num_free += size
        starts, sizes = self._starts, self._sizes
        i = bisect_left(starts, start)
        if i < len(starts) and start + size == starts[i]:
            size += sizes[i]
            del starts[i], sizes[i]
        if i > 0 and starts[i - 1] + sizes[i - 1] == start:
            sizes[i - 1] += size
        else:
            starts.insert(i, start)
            sizes.insert(i, size)

    def _take(self, i: int, size: int) -> Region:
        """The first `size` slots of free interval `i`."""
        start = self._starts[i]
        if self._sizes[i] == size:
            del self._starts[i], self._sizes[i]
        else:
            self._starts[i] += size
            self._sizes[i] -= size
        self._taken[start] = size
        self.num_free -= size
        # no `max`: a replay comes here once a token, millions of times
        if self.num_slots - self.num_free > self.peak_taken:
            self.peak_taken = self.num_slots - self.num_free
        if start + size > self.span:
            self.span = start + size
        return Region(start, size)

    def check(self, regions: Iterable[Region]) -> None:
        """Verify that these regions and the free intervals are all slots, each exactly once.

        Raises:
            AssertionError: a region leaked or overlaps, or two free intervals were not merged.
        """
        regions = sorted(regions)
        assert regions == sorted(Region(*item) for item in self._taken.items()), "regions differ"
        free = [Region(*item) for item in zip(self._starts, self._sizes, strict=True)]
        end, end_is_free = 0, False
        for region in sorted(regions + free):
            assert region.size > 0, f"{region} is empty"
            assert region.start == end, f"slots {end} to {region.start} overlap or are lost"
            is_free = region in free
            assert not (end_is_free and is_free), f"free intervals meet at {end}"
            end, end_is_free = region.start + region.size, is_free
        assert end == self.num_slots, f"slots from {end} on are lost"
        assert self.num_free == sum(size for _, size in free), "num_free is wrong"
