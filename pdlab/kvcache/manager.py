"""Who holds which blocks: growing, sharing, copying, swapping out and in, dropping.

Knows numbers of blocks and tokens; no tensors, no scheduler. What must happen to bytes is put down
in `moves`, in order, for somebody who has the storage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from pdlab.kvcache.block_pool import BlockPool, blocks_for
from pdlab.kvcache.prefix import Prefix
from pdlab.trace import DROPPED, BlockMove, MoveKind


class Holder(Protocol):
    """What the manager needs to know of a sequence, and changes in it.

    The first `num_computed_tokens` of `token_ids` have their K and V in the blocks of
    `block_table`, or, when swapped out, in the blocks of `host_table`. `prefixes` names the full
    blocks that others may find; `block_mass` is the attention each block has received.
    """

    sequence_id: str
    token_ids: list[int]
    num_computed_tokens: int
    block_table: list[int]
    host_table: list[int]
    prefixes: list[Prefix]
    block_mass: list[float]

    @property
    def uses_prefix_cache(self) -> bool: ...


@dataclass(frozen=True)
class Retention:
    """Which tokens stay in the cache. The default keeps all.

    `window` is the number of tokens a query looks back on, itself included (Beltagy et al. 2020,
    Longformer); `sinks` first tokens stay visible (Xiao et al. 2024, StreamingLLM); and blocks of
    `heavy` older tokens stay, those that received the most attention (Zhang et al. 2023, H2O).
    """

    window: int | None = None
    sinks: int = 0
    heavy: int = 0

    def peak_blocks(self, num_tokens: int, chunk: int, block_size: int) -> int:
        """Most blocks that a sequence of `num_tokens` needs at once, computed in such chunks."""
        everything = blocks_for(num_tokens, block_size)
        if self.window is None:
            return everything
        span = self.window + chunk - 1  # the positions that a chunk's queries see
        seen = (span - 2) // block_size + 2 if span > 1 else 1  # however they lie in the blocks
        kept = blocks_for(self.sinks, block_size) + blocks_for(self.heavy, block_size)
        return min(everything, seen + kept)


KEEP_ALL = Retention()
NO_LIMIT = 2**31
MISSING = -2
"""Stands for a block that is not cached where it would be needed."""


@dataclass
class PrefixCacheStats:
    """What new sequences asked of the prefix cache and what it had, since it was made.

    One that comes back after a preemption, and finds its own blocks, does not count.
    """

    num_queries: int = 0
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Hit tokens over tokens looked up; 0 before the first query."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0


class Release(NamedTuple):
    """A block that became free: whatever the storage kept beside it may go."""

    block: int
    on_host: bool


@dataclass(frozen=True)
class Hits:
    """The longest cached prefix of a sequence, as it would stand in its block table."""

    prefixes: list[Prefix]
    table: list[int]
    num_tokens: int


class KVManager:
    """The block tables of all sequences that share one pool.

    What must happen to bytes is kept in the order in which blocks changed hands. Carried out in
    this order, each block still holds what it held when the move was decided.

    Args:
        pool: device blocks.
        host: blocks in host memory, for sequences that are swapped out.
        retention: which tokens stay.
        max_swapped: most sequences in host memory at once.
        rewrites: whether a token of a full block can be written again. Block-wise formats cannot:
            they would round the block's other tokens once more.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: BlockPool,
        retention: Retention = KEEP_ALL,
        max_swapped: int | None = None,
        rewrites: bool = True,
    ):
        self.pool = pool
        self.host = host
        self.retention = retention
        self.max_swapped = host.num_blocks if max_swapped is None else max_swapped
        self.rewrites = rewrites
        self.num_swapped = 0
        self._orders: list[BlockMove | Release] = []
        self._stats = PrefixCacheStats()

    @property
    def stats(self) -> PrefixCacheStats:
        """A copy, as of now."""
        return replace(self._stats, num_evictions=self.pool.num_evictions)

    def take_orders(self) -> list[BlockMove | Release]:
        """What is to be done to bytes, in this order, before anything is computed."""
        orders, self._orders = self._orders, []
        return orders

    # --- starting -------------------------------------------------------------------------------

    def look_up(self, holder: Holder, num_left: int = 1) -> Hits:
        """Find the longest cached prefix.

        At least one token is left to compute: its logits are needed, and logits are not cached. So
        if all blocks are found, the last token is computed again (or the last block, if blocks
        cannot be rewritten). Where the logits are computed elsewhere, `num_left` is 0. What another
        sequence computes in the same step cannot be found yet: twins that start together both
        compute, each in blocks of its own, and later ones find those of the first. Blocks behind
        the window are not needed, and need not be there.
        """
        chain = self._known_chain(holder, num_left)
        while chain:
            num_tokens = min(len(chain) * self.pool.block_size, len(holder.token_ids) - num_left)
            goes_on = max(num_tokens, holder.num_computed_tokens)  # host memory may hold more
            table = [b if self._stays(i, goes_on) else DROPPED for i, (_, b) in enumerate(chain)]
            if MISSING not in table:
                return Hits([prefix for prefix, _ in chain], table, num_tokens)
            chain.pop()
        return Hits([], [], 0)

    def _known_chain(self, holder: Holder, num_left: int) -> list[tuple[Prefix, int]]:
        """The full blocks of a sequence, and where each is cached; without a window, up to the
        first that is not."""
        size, tokens = self.pool.block_size, holder.token_ids
        full = (len(tokens) if self.rewrites else len(tokens) - num_left) // size
        chain: list[tuple[Prefix, int]] = []
        for i in range(full if holder.uses_prefix_cache else 0):
            prefix = Prefix(
                chain[-1][0] if chain else None, tuple(tokens[i * size : (i + 1) * size])
            )
            known, block = self.pool.find(prefix) or (prefix, MISSING)
            if block == MISSING and self.retention.window is None:
                break
            chain.append((known, block))
        return chain

    def blocks_to_start(self, holder: Holder, hits: Hits, chunk: int) -> int:
        """Free blocks that must be there to admit a sequence: for all its known tokens.

        Args:
            chunk: most tokens that one step computes of it.
        """
        held = [block for block in hits.table if block != DROPPED]
        known = len(holder.token_ids)
        need = self.retention.peak_blocks(known, chunk, self.pool.block_size) - len(held)
        whole = hits.num_tokens < len(hits.table) * self.pool.block_size
        copies = whole and self._is_taken(hits.table[-1])
        return max(0, need) + copies + sum(self.pool.ref_count(block) == 0 for block in held)

    def _is_taken(self, block: int) -> bool:
        return self.pool.ref_count(block) > 0

    def start(self, holder: Holder, hits: Hits) -> int:
        """Give a waiting sequence its cached blocks and what it has in host memory.

        Returns how many of its tokens the prefix cache spared.
        """
        assert not holder.block_table
        self.pool.share(block for block in hits.table if block != DROPPED)
        holder.block_table = list(hits.table)
        holder.prefixes = list(hits.prefixes)
        if holder.host_table:
            if holder.num_computed_tokens > hits.num_tokens:
                self._swap_in(holder)
                return 0
            self._leave_host(holder)
        holder.num_computed_tokens = hits.num_tokens
        holder.block_mass = []
        return hits.num_tokens

    def count(self, holder: Holder, hits: Hits) -> None:
        """Put a sequence that starts for the first time into the statistics."""
        if holder.uses_prefix_cache:
            self._stats.num_queries += 1
            self._stats.num_query_tokens += len(holder.token_ids)
            self._stats.num_hit_tokens += hits.num_tokens

    # --- growing --------------------------------------------------------------------------------

    def blocks_missing(self, holder: Holder, num_tokens: int) -> int:
        """Free blocks needed to compute the next `num_tokens` tokens."""
        end = holder.num_computed_tokens + num_tokens
        new = blocks_for(end, self.pool.block_size) - len(holder.block_table)
        return (new if new > 0 else 0) + self._writes_shared(holder)

    def has_slot(self, holder: Holder, num_tokens: int = 1) -> bool:
        """Whether the next tokens have slots, in blocks that nobody else holds or may find: then
        `grow` by so many would change nothing. Mostly so, and quicker to ask."""
        first, size, table = holder.num_computed_tokens, self.pool.block_size, holder.block_table
        return first + num_tokens <= len(table) * size and self.pool.is_private(
            table[first // size]
        )

    def _writes_shared(self, holder: Holder) -> bool:
        """Whether the next token's slot is in a block that somebody else holds too."""
        index = holder.num_computed_tokens // self.pool.block_size
        table = holder.block_table
        return index < len(table) and self.pool.ref_count(table[index]) > 1

    def grow(self, holder: Holder, num_tokens: int) -> list[int]:
        """Take the blocks for the next `num_tokens` tokens; returns those taken.

        A block that others hold or may find is never written: it is copied first (copy-on-write),
        or, where nobody else holds it, withdrawn from the prefix cache.
        """
        taken = self.pool.allocate(self.blocks_missing(holder, num_tokens))
        new = list(taken)
        index = holder.num_computed_tokens // self.pool.block_size
        if self._writes_shared(holder):
            shared, own = holder.block_table[index], new.pop(0)
            holder.block_table[index] = own
            self._move("copy", shared, own, holder)
            self._free([shared])
        elif index < len(holder.block_table) and self.pool.is_known(holder.block_table[index]):
            self.pool.forget(holder.block_table[index])
        del holder.prefixes[index:]
        holder.block_table += new
        return taken

    def draft_room(self, holder: Holder) -> int:
        """How many tokens may be computed behind the next one that may have to be rewound.

        Where blocks cannot be rewritten, none of them may fill its block.
        """
        size = self.pool.block_size
        return size - 2 - holder.num_computed_tokens % size if not self.rewrites else NO_LIMIT

    def rewind(self, holder: Holder) -> list[int]:
        """Give back the blocks behind the computed tokens; returns those now free.

        For a sequence whose last tokens are taken back: what their slots hold is written again, and
        by then nobody has read it.
        """
        kept = blocks_for(holder.num_computed_tokens, self.pool.block_size)
        behind = holder.block_table[kept:]
        del holder.block_table[kept:]
        return self._free(behind[::-1])

    def register(self, holder: Holder) -> None:
        """Let others find the blocks that have become full."""
        size = self.pool.block_size
        first, end = len(holder.prefixes), holder.num_computed_tokens // size
        if first >= end or not holder.uses_prefix_cache:
            return
        for i in range(first, end):
            parent = holder.prefixes[-1] if holder.prefixes else None
            prefix = Prefix(parent, tuple(holder.token_ids[i * size : (i + 1) * size]))
            block = holder.block_table[i]
            known = prefix if block == DROPPED else self.pool.remember(block, prefix)
            holder.prefixes.append(known)

    def fork(self, parent: Holder, child: Holder) -> None:
        """Let `child` start from all that `parent` has computed, sharing every block."""
        self.pool.share(block for block in parent.block_table if block != DROPPED)
        child.block_table = list(parent.block_table)
        child.prefixes = list(parent.prefixes)
        child.block_mass = list(parent.block_mass)
        child.num_computed_tokens = parent.num_computed_tokens

    # --- giving back ----------------------------------------------------------------------------

    def drop_unseen(self, holder: Holder) -> list[int]:
        """Give back the blocks that no later query will see; returns those now free."""
        dropped = []
        table = holder.block_table
        for i in self._unseen(holder):
            dropped.append(table[i])
            table[i] = DROPPED
        return self._free(dropped)

    def _unseen(self, holder: Holder) -> list[int]:
        """Indices of blocks to drop: out of the window, and not among the heaviest."""
        if self.retention.window is None:
            return []
        live = [i for i, block in enumerate(holder.block_table) if block != DROPPED]
        old = [i for i in live if not self._stays(i, holder.num_computed_tokens)]
        heavy = blocks_for(self.retention.heavy, self.pool.block_size)
        if heavy:
            old.sort(key=lambda i: (holder.block_mass[i], i))
        return old[: max(0, len(old) - heavy)]

    def _stays(self, index: int, next_position: int) -> bool:
        """Whether a block holds a sink or is in the window of the query at `next_position`."""
        window, size = self.retention.window, self.pool.block_size
        if window is None or index * size < self.retention.sinks:
            return True
        return (index + 1) * size > next_position - window + 1

    def release(self, holder: Holder) -> list[int]:
        """Take everything away from a sequence; returns the device blocks that this freed.

        The last blocks go first, so that they are also evicted first: a prefix without its end is
        of use, an end without its beginning is not.
        """
        freed = self._free([b for b in reversed(holder.block_table) if b != DROPPED])
        if holder.host_table:
            self._leave_host(holder)
        holder.block_table, holder.prefixes = [], []
        holder.num_computed_tokens = 0
        return freed

    def _free(self, blocks: list[int]) -> list[int]:
        freed = self.pool.free(blocks)
        self._orders += [Release(block, on_host=False) for block in freed]
        return freed

    # --- swapping -------------------------------------------------------------------------------

    def can_swap_out(self, holder: Holder) -> bool:
        """Whether there is something to keep, and room for it in host memory."""
        blocks = sum(b != DROPPED for b in self._computed_table(holder))
        return 0 < blocks <= self.host.num_free and self.num_swapped < self.max_swapped

    def swap_out(self, holder: Holder) -> list[int]:
        """Move a sequence's K and V to host memory; returns the device blocks that this freed.

        Each sequence gets host blocks of its own: forks that shared blocks share them no more.
        """
        table = self._computed_table(holder)
        hosts = iter(self.host.allocate(sum(b != DROPPED for b in table)))
        host_table = [DROPPED if b == DROPPED else next(hosts) for b in table]
        for source, target in zip(table, host_table, strict=True):
            if source != DROPPED:
                self._move("swap_out", source, target, holder)
        computed = holder.num_computed_tokens
        freed = self.release(holder)
        holder.host_table, holder.num_computed_tokens = host_table, computed
        self.num_swapped += 1
        return freed

    def _computed_table(self, holder: Holder) -> list[int]:
        """The blocks that hold something: a step that failed may have taken more."""
        return holder.block_table[: blocks_for(holder.num_computed_tokens, self.pool.block_size)]

    def _swap_in(self, holder: Holder) -> None:
        """Bring back the blocks that the prefix cache did not have any more."""
        found = len(holder.block_table)
        for source in holder.host_table[found:]:
            target = DROPPED
            if source != DROPPED:
                [target] = self.pool.allocate(1)
                self._move("swap_in", source, target, holder)
            holder.block_table.append(target)
        self._leave_host(holder)

    def _leave_host(self, holder: Holder) -> None:
        freed = self.host.free(b for b in holder.host_table if b != DROPPED)
        self._orders += [Release(block, on_host=True) for block in freed]
        holder.host_table = []
        self.num_swapped -= 1

    def _move(self, kind: MoveKind, source: int, target: int, holder: Holder) -> None:
        self._orders.append(BlockMove(kind, source, target, holder.sequence_id))
