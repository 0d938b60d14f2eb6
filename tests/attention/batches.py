"""Batches over a paged cache in which every slot that nobody may read holds NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from pdlab.attention import AttentionInputs, Window, narrower
from pdlab.kvcache import PagedKVCache, blocks_for
from pdlab.trace import DROPPED
from tests.helpers import TINY

HEAD_DIM = TINY.head_dim
HEADS = st.sampled_from([(1, 1), (4, 2), (6, 1), (9, 3), (4, 4)])
BLOCK_SIZES = st.sampled_from([1, 3, 4, 16, 64])
STALE = float("nan")


@st.composite
def windows(draw, longest: int = 100) -> Window | None:
    """No window, a layer's own, the engine's with or without sinks, or both at once."""
    size = st.one_of(st.sampled_from([1, 4, 30]), st.integers(1, longest))
    engine = st.none() | st.builds(Window, size, st.sampled_from([0, 1, 4, 70]))
    return narrower(draw(engine), draw(st.none() | size))


def sees(query: int, key: int, window: Window | None) -> bool:
    """Whether a query sees a key, from the words of `Window`."""
    if window is None:
        return key <= query
    near = query - key < window.size or key < window.sinks
    return key <= query and near and (window.reach is None or query - key < window.reach)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, window: Window | None, present: list[int] | None = None
) -> Tensor:
    """One query, one head, one key at a time, in float64; `present` keys are there, or all."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    first, group = len(k) - len(q), q.shape[1] // k.shape[1]
    for row in range(len(q)):
        there = range(len(k)) if present is None else present
        seen = [key for key in there if sees(first + row, key, window)]
        for head in range(q.shape[1]):
            keys, values = k[seen, head // group].double(), v[seen, head // group].double()
            scores = [float(q[row, head].double() @ key) / math.sqrt(HEAD_DIM) for key in keys]
            weights = [math.exp(score - max(scores)) for score in scores]
            for weight, value in zip(weights, values, strict=True):
                out[row, head] += weight / sum(weights) * value
    return out.float()


@dataclass
class Batch:
    """Some sequences: queries of all in one piece, keys and values of each."""

    cache: PagedKVCache
    inputs: AttentionInputs
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]

    @property
    def queries(self) -> list[Tensor]:
        return [self.q[self.inputs.rows(i)] for i in range(self.inputs.num_sequences)]

    def dropped(self, i: int, entries: set[int]) -> Batch:
        """Some blocks of sequence i given back: others wrote to them since."""
        tables = [list(table) for table in self.inputs.block_tables]
        for entry in entries:
            spoil(self.cache, [tables[i][entry]])
            tables[i][entry] = DROPPED
        starts, lengths = self.inputs.query_starts, self.inputs.context_lens
        return replace(self, inputs=AttentionInputs(starts, lengths, tables))


def make_batch(
    lengths: list[int], num_queries: list[int], block_size: int, num_heads: int, num_kv_heads: int
) -> Batch:
    shape = [(n, num_kv_heads, HEAD_DIM) for n in lengths]
    k, v = ([torch.randn(s) for s in shape] for _ in range(2))
    q = torch.randn(sum(num_queries), num_heads, HEAD_DIM)
    return batch_of(q, k, v, num_queries, block_size)


def batch_of(
    q: Tensor, k: list[Tensor], v: list[Tensor], num_queries: list[int], block_size: int
) -> Batch:
    """These sequences in blocks here and there; the last block (the one at -1) is nobody's."""
    num_heads, num_kv_heads = q.shape[1], k[0].shape[1]
    config = replace(TINY, num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads)
    lengths = [len(keys) for keys in k]
    counts = [blocks_for(n, block_size) for n in lengths]
    cache = PagedKVCache(config, sum(counts) + 2, block_size)
    spoil(cache, list(range(sum(counts) + 2)))
    free = torch.randperm(sum(counts) + 1).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    for table, keys, values in zip(tables, k, v, strict=True):
        slots = [table[p // block_size] * block_size + p % block_size for p in range(len(keys))]
        cache.write(0, cache.write_plan(slots), keys, values)
    starts = [sum(num_queries[:i]) for i in range(len(lengths) + 1)]
    return Batch(cache, AttentionInputs(starts, lengths, tables), q, k, v)


def spoil(cache: PagedKVCache, blocks: list[int]) -> None:
    size = cache.block_size
    slots = [block * size + offset for block in blocks for offset in range(size)]
    heads = cache.gather(0, torch.tensor([0]), torch.float32)[0].shape[1]
    stale = torch.full((len(slots), heads, HEAD_DIM), STALE)
    cache.write(0, cache.write_plan(slots), stale, stale)
