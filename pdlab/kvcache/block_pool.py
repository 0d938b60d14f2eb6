"""Which physical blocks are taken, by how many, and which free ones still hold a known prefix.

Knows numbers of blocks and what identifies their content; not what stands in them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable

from pdlab.kvcache.prefix import Prefix
from pdlab.trace import DROPPED


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens: the last one may be partly empty."""
    return -(-num_tokens // block_size)


class BlockPool:
    """A fixed number of KV blocks, handed out, shared and taken back (Kwon et al. 2023).

    A block is taken (somebody holds it), cached (nobody holds it, but its prefix is known and it
    may be taken up again) or empty. Empty blocks are handed out first, the longest free first;
    then cached ones, the least recently used first.

        allocate        share              free
    empty  ---->  taken  <---->  cached   ---->  (evicted when allocated)
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._empty = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._ref_counts = [0] * num_blocks
        self._known: dict[Prefix, tuple[Prefix, int]] = {}
        self._prefixes: list[Prefix | None] = [None] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out, cached ones included."""
        return len(self._empty) + len(self._cached)

    @property
    def cached_blocks(self) -> list[int]:
        """Free blocks with a known prefix, the next to be evicted first."""
        return list(self._cached)

    def ref_count(self, block: int) -> int:
        """How many hold the block."""
        return self._ref_counts[block]

    def is_private(self, block: int) -> bool:
        """Whether one alone holds the block, and nobody may find it by its prefix."""
        return self._ref_counts[block] == 1 and self._prefixes[block] is None

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks asked, {self.num_free} free"
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._empty:
            block = self._empty.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            self.forget(block)
            self.num_evictions += 1
        assert self._ref_counts[block] == 0, f"block {block} was free and in use"
        self._ref_counts[block] = 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block: taken by somebody already, or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]  # KeyError: neither taken nor cached
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> list[int]:
        """Drop one reference to each block; returns those that nobody holds any more."""
        released = []
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self._prefixes[block] is None:
                    self._empty.append(block)
                else:
                    self._cached[block] = None
                released.append(block)
        return released

    # --- content --------------------------------------------------------------------------------

    def find(self, prefix: Prefix) -> tuple[Prefix, int] | None:
        """The block that holds this prefix, and the prefix as it was first remembered."""
        return self._known.get(prefix)

    def remember(self, block: int, prefix: Prefix) -> Prefix:
        """Note what a full block holds. A prefix that another block holds already stays there.

        Returns the prefix as it is known, to continue the chain from.
        """
        known, _ = self._known.setdefault(prefix, (prefix, block))
        if known is prefix:
            assert self._prefixes[block] is None, f"block {block} has two contents"
            self._prefixes[block] = prefix
        return known

    def is_known(self, block: int) -> bool:
        """Whether others may find this block by its prefix."""
        return self._prefixes[block] is not None

    def forget(self, block: int) -> None:
        """A block is about to be written: nobody may find it any more."""
        prefix = self._prefixes[block]
        assert prefix is not None
        del self._known[prefix]
        self._prefixes[block] = None

    def forget_all(self) -> None:
        """Empty the prefix cache; blocks that are held stay so."""
        for _, block in list(self._known.values()):
            self.forget(block)
        self._empty.extend(self._cached)
        self._cached.clear()

    def check(self, block_tables: Iterable[list[int]]) -> None:
        """Verify that free blocks and these tables account for every reference exactly once.

        Raises:
            AssertionError: a block leaked, is shared without a reference, or is free and in use.
        """
        counts = [0] * self.num_blocks
        for table in block_tables:
            for block in table:
                if block != DROPPED:
                    counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from the block tables"
        unused = {block for block, count in enumerate(counts) if count == 0}
        free = [*self._empty, *self._cached]
        assert set(free) == unused, "the free lists differ from the unused blocks"
        assert len(free) == len(unused), "a block is free twice"
        assert all(self._prefixes[b] is None for b in self._empty), "an empty block has a prefix"
        by_block = {block: prefix for prefix, (_, block) in self._known.items()}
        assert by_block == {b: p for b, p in enumerate(self._prefixes) if p is not None}, (
            "the prefix table differs from the blocks"
        )
