"""Paged caches with something in them, and steps that the kernels and pdlab's torch path do."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from pdlab_kernels.cpu.attention import attention
from pdlab_kernels.cpu.attention_plan import AttentionPlan, BlockRows, PagedKV, Stored
from torch import Tensor

from pdlab.attention import AttentionInputs, ReferenceAttention, Window, visible_blocks
from pdlab.kvcache import PagedKVCache, WritePlan
from pdlab.models import ModelConfig
from pdlab.trace import DROPPED
from tests.helpers import TINY

LAYER = 1


def config_of(num_heads: int = 9, num_kv_heads: int = 3, head_dim: int = 64) -> ModelConfig:
    return replace(
        TINY, num_layers=2, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
    )


def paged_kv(cache: PagedKVCache) -> PagedKV:
    """What the kernels know of a cache."""
    k, v = (
        Stored(
            stores[0].format.name,
            stores[0].format.scales,
            stores[0].format.group,
            [store.parts for store in stores],
            [store.open for store in stores],
        )
        for stores in cache.stores
    )
    opened = cache.open_blocks
    return PagedKV(k, v, cache.config.num_heads, None if opened is None else opened.place_of)


@dataclass
class Case:
    """A batch over a cache: of sequence i's `contexts[i]` tokens the last `queries[i]` are new.

    What lies before is written by pdlab, in pieces of `piece` tokens.
    """

    contexts: Sequence[int]
    queries: Sequence[int]
    config: ModelConfig = field(default_factory=config_of)
    block_size: int = 16
    kv_format: str = "fp32"
    head_groups: int = 1
    dropped: Sequence[tuple[int, int]] = ()
    """Sequence, entry of its table."""
    piece: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        needed = [-(-context // self.block_size) for context in self.contexts]
        blocks = torch.randperm(sum(needed) + 3, generator=random).tolist()
        self.tables = []
        for n in needed:
            self.tables.append(blocks[:n])
            blocks = blocks[n:]
        self.num_blocks = sum(needed) + 3
        c = self.config
        width = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
        self.rows = [torch.randn(n, width, generator=random) for n in self.contexts]
        for x in self.rows:
            x[:, 3 :: c.head_dim] *= 4  # channels that are large in every token
            x[:, :: c.head_dim] += 2

    def cache(self) -> PagedKVCache:
        """A new cache that holds what came before."""
        cache = PagedKVCache(
            self.config,
            self.num_blocks,
            self.block_size,
            self.kv_format,
            head_groups=self.head_groups,
        )
        for i, queries in enumerate(self.queries):
            before = self.contexts[i] - queries
            for start in range(0, before, self.piece):
                end = min(start + self.piece, before)
                plan = cache.write_plan(self.slots(i, start, end))
                write(cache, plan, self.rows[i][start:end])
                cache.commit(plan)
        return cache

    def slots(self, i: int, start: int, end: int) -> list[int]:
        size, table = self.block_size, self.tables[i]
        return [table[p // size] * size + p % size for p in range(start, end)]

    @property
    def step_slots(self) -> list[int]:
        pairs = enumerate(zip(self.contexts, self.queries, strict=True))
        return [slot for i, (n, queries) in pairs for slot in self.slots(i, n - queries, n)]

    @property
    def qkv(self) -> Tensor:
        """The step's rows."""
        pairs = zip(self.rows, self.queries, strict=True)
        rows = [x[len(x) - queries :] for x, queries in pairs]
        c = self.config
        nothing = torch.empty(0, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)
        return torch.cat([nothing, *rows])

    def unseen(self, window: Window) -> list[list[int]]:
        """Entries of each table that hold no key which a query of the step sees."""
        pairs = zip(self.contexts, self.queries, strict=True)
        seen = [visible_blocks(n - queries, n, self.block_size, window) for n, queries in pairs]
        return [
            [entry for entry in range(len(table)) if entry not in entries]
            for table, entries in zip(self.tables, seen, strict=True)
        ]

    @property
    def inputs(self) -> AttentionInputs:
        starts = [0]
        for queries in self.queries:
            starts.append(starts[-1] + queries)
        tables = [list(table) for table in self.tables]
        for i, entry in self.dropped:
            tables[i][entry] = DROPPED
        return AttentionInputs(starts, list(self.contexts), tables)

    def plan(
        self,
        cache: PagedKVCache,
        plan: WritePlan,
        windows: Sequence[Window | None] = (None,),
        num_threads: int = 1,
    ) -> AttentionPlan:
        blocks, inputs = None, self.inputs
        if plan.blocks is not None:
            b = plan.blocks
            blocks = BlockRows(b.whole_blocks, b.whole_rows, b.open_slots, b.open_rows)
        return AttentionPlan(
            paged_kv(cache),
            inputs.query_starts,
            inputs.context_lens,
            inputs.block_tables,
            plan.slots,
            windows=windows,
            blocks=blocks,
            num_threads=num_threads,
        )

    def by_kernels(self, window: Window | None = None, team=None) -> tuple[Tensor, PagedKVCache]:
        cache = self.cache()
        written = cache.write_plan(self.step_slots)
        threads = team.num_threads if team else 1
        plan = self.plan(cache, written, [None, window], threads)
        out = attention(self.qkv, plan, LAYER, kind=1, team=team)
        return out, cache

    def by_torch(self, window: Window | None = None) -> tuple[Tensor, PagedKVCache]:
        c, cache = self.config, self.cache()
        plan = cache.write_plan(self.step_slots)
        sizes = [n * c.head_dim for n in (c.num_heads, c.num_kv_heads, c.num_kv_heads)]
        q, k, v = (x.unflatten(1, (-1, c.head_dim)) for x in self.qkv.split(sizes, dim=1))
        cache.write(LAYER, plan, k, v)
        out = ReferenceAttention().paged(LAYER, q, cache, self.inputs, window)
        return out.flatten(1), cache

    def check(self, window: Window | None = None, team=None) -> None:
        """The kernels compute what torch does, and store the same bytes."""
        out, cache = self.by_kernels(window, team)
        expected, expected_cache = self.by_torch(window)
        torch.testing.assert_close(out, expected, rtol=2e-5, atol=3e-5)
        check_bytes(cache, expected_cache)


def write(cache: PagedKVCache, plan: WritePlan, rows: Tensor) -> None:
    c = cache.config
    k, v = rows[:, c.num_heads * c.head_dim :].unflatten(1, (2, -1, c.head_dim)).unbind(1)
    for layer in range(c.num_layers):
        cache.write(layer, plan, k, v)


def check_bytes(cache: PagedKVCache, expected: PagedKVCache) -> None:
    """All that is stored is the same, but for which NaN a NaN is."""
    stores = zip(cache._each_store(), expected._each_store(), strict=True)
    for ours, theirs in stores:
        pairs = list(zip(ours.parts, theirs.parts, strict=True))
        if ours.open is not None:
            pairs.append((ours.open, theirs.open))
        for part, other in pairs:
            assert torch.equal(bits_of(part), bits_of(other))


def bits_of(part: Tensor) -> Tensor:
    part = part.where(~part.isnan(), torch.nan) if part.is_floating_point() else part
    return part.contiguous().view(torch.uint8)
