"""The KV memories that a replay compares: paged, with or without prefixes, and in one piece.

Each holds numbers of slots only. All count in token slots, so that their sizes compare.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pdlab.kvcache.block_pool import BlockPool, blocks_for
from pdlab.kvcache.contiguous import ContiguousAllocator, Policy, Region
from pdlab.kvcache.prefix import Prefix
from pdlab.workload.traces import TraceRequest


@dataclass(slots=True)
class Holding:
    """What one running request has: slots for `capacity` tokens, and where.

    `num_cached_tokens` were there already: other requests computed them.
    """

    capacity: int
    blocks: list[int] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    region: Region | None = None
    num_cached_tokens: int = 0


class SlotMemory(Protocol):
    """Token slots that requests take, fill and give back."""

    num_slots: int

    @property
    def num_taken(self) -> int:
        """Slots that belong to somebody, shared ones once."""

    @property
    def num_needed(self) -> int:
        """Slots that would have been enough up to now."""

    @property
    def num_evictions(self) -> int:
        """Cached blocks that were overwritten."""

    @property
    def num_copied_tokens(self) -> int:
        """Tokens copied because a sequence had to move."""

    def fits(self, num_tokens: int) -> bool:
        """Whether a request of so many tokens can run if it is alone."""

    def admit(self, request: TraceRequest, num_tokens: int) -> Holding | None:
        """Take room for the known tokens of a request, or None."""

    def extend(self, holding: Holding, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all, or change nothing and return False."""

    def note_computed(self, request: TraceRequest, holding: Holding, num_tokens: int) -> None:
        """The first `num_tokens` tokens are there now: others may share them."""

    def release(self, holding: Holding) -> None:
        """Give everything back."""

    def is_fragmented(self, num_tokens: int) -> bool:
        """Whether so many tokens do not fit although enough slots are free."""


class PagedMemory:
    """Blocks of `block_size` tokens; full blocks of a prompt are shared where the trace names them.

    A block's place in the prefix chain is made of the trace's own ids: a block's "tokens" are
    (prefix id, number of the block among those the id stands for). What was generated has no ids in
    a trace, so its blocks are never found again.
    """

    def __init__(self, num_blocks: int, block_size: int):
        self.pool = BlockPool(num_blocks, block_size)
        self.num_slots = num_blocks * block_size
        self.num_needed = 0
        self.num_copied_tokens = 0

    @property
    def num_taken(self) -> int:
        return self.num_slots - self.pool.num_free * self.pool.block_size

    @property
    def num_evictions(self) -> int:
        return self.pool.num_evictions

    def fits(self, num_tokens: int) -> bool:
        return blocks_for(num_tokens, self.pool.block_size) <= self.pool.num_blocks

    def admit(self, request: TraceRequest, num_tokens: int) -> Holding | None:
        pool = self.pool
        prefixes, blocks = self._find(request, num_tokens)
        new = blocks_for(num_tokens, pool.block_size) - len(blocks)
        revived = sum(pool.ref_count(block) == 0 for block in blocks)
        if new + revived > pool.num_free:
            return None
        pool.share(blocks)
        cached = len(blocks) * pool.block_size
        holding = Holding(cached, blocks, prefixes, num_cached_tokens=cached)
        self._take(holding, new)
        return holding

    def extend(self, holding: Holding, num_tokens: int) -> bool:
        new = blocks_for(num_tokens, self.pool.block_size) - len(holding.blocks)
        if new > self.pool.num_free:
            return False
        self._take(holding, new)
        return True

    def _take(self, holding: Holding, num_blocks: int) -> None:
        holding.blocks += self.pool.allocate(num_blocks)
        holding.capacity = len(holding.blocks) * self.pool.block_size
        self.num_needed = max(self.num_needed, self.num_taken)

    def note_computed(self, request: TraceRequest, holding: Holding, num_tokens: int) -> None:
        if request.prefix_block_size is None:
            return
        prefixes = holding.prefixes
        full = min(num_tokens, request.num_prompt_tokens) // self.pool.block_size
        for i in range(len(prefixes), full):
            prefix = self._prefix(request, i, prefixes)
            prefixes.append(self.pool.remember(holding.blocks[i], prefix))

    def release(self, holding: Holding) -> None:
        # ends first, so that they are evicted first: an end without its beginning is of no use
        self.pool.free(reversed(holding.blocks))

    def is_fragmented(self, num_tokens: int) -> bool:
        return False  # any free block is as good as any other

    def _find(self, request: TraceRequest, num_tokens: int) -> tuple[list[Prefix], list[int]]:
        """The longest cached prefix of whole blocks that leaves a token to compute.

        (The engine also uses the last full block of a prompt, and computes one token of it again.)
        """
        prefixes: list[Prefix] = []
        blocks: list[int] = []
        if request.prefix_block_size is None:
            return prefixes, blocks
        full = min(num_tokens - 1, request.num_prompt_tokens) // self.pool.block_size
        for i in range(full):
            found = self.pool.find(self._prefix(request, i, prefixes))
            if found is None:
                break
            prefixes.append(found[0])
            blocks.append(found[1])
        return prefixes, blocks

    def _prefix(self, request: TraceRequest, i: int, before: list[Prefix]) -> Prefix:
        assert request.prefix_block_size is not None
        which, part = divmod(i, request.prefix_block_size // self.pool.block_size)
        return Prefix(before[-1] if before else None, (request.prefix_ids[which], part))


class ContiguousMemory:
    """Every request in one piece of the slots; nothing can be shared."""

    num_evictions = 0

    def __init__(self, num_slots: int, policy: Policy):
        self.allocator = ContiguousAllocator(num_slots, policy)
        self.num_slots = num_slots

    @property
    def num_taken(self) -> int:
        return self.num_slots - self.allocator.num_free

    @property
    def num_needed(self) -> int:
        return self.allocator.span

    @property
    def num_copied_tokens(self) -> int:
        return self.allocator.num_copied_tokens

    def fits(self, num_tokens: int) -> bool:
        # alone it needs no copy: it can be preempted and start again in the right size
        return self.allocator.policy(num_tokens) <= self.num_slots

    def admit(self, request: TraceRequest, num_tokens: int) -> Holding | None:
        region = self.allocator.allocate(num_tokens)
        return None if region is None else Holding(region.size, region=region)

    def extend(self, holding: Holding, num_tokens: int) -> bool:
        assert holding.region is not None
        region = self.allocator.grow(holding.region, num_tokens)
        if region is None:
            return False
        holding.region, holding.capacity = region, region.size
        return True

    def note_computed(self, request: TraceRequest, holding: Holding, num_tokens: int) -> None:
        pass

    def release(self, holding: Holding) -> None:
        assert holding.region is not None
        self.allocator.free(holding.region)

    def is_fragmented(self, num_tokens: int) -> bool:
        wanted = self.allocator.policy(num_tokens)
        return self.allocator.largest_free < wanted <= self.allocator.num_free
