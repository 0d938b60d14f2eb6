"""Which physical block belongs to whom. Knows numbers of blocks, not what stands in them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: the last one may be partly empty."""
    return -(-num_tokens // block_size)


class BlockPool:
    """A fixed number of KV blocks, handed out and taken back (Kwon et al. 2023, PagedAttention).

    Freed blocks go to the end of the queue, so a block rests as long as possible before it is
    written again.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = deque(range(num_blocks))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            assert self._ref_counts[block] == 0, f"block {block} was free and in use"
            self._ref_counts[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> list[int]:
        """Drop one reference to each block; returns those that nobody holds any more."""
        released = []
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)
                released.append(block)
        return released

    def check(self, block_tables: Iterable[list[int]]) -> None:
        """Verify that free blocks and these tables account for every block exactly once.

        Raises:
            AssertionError: a block leaked, is shared without a reference, or is free and in use.
        """
        counts = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from the block tables"
        unused = {block for block, count in enumerate(counts) if count == 0}
        assert set(self._free) == unused, "the free list differs from the unused blocks"
        assert len(self._free) == len(unused), "a block is in the free list twice"
