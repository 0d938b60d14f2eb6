"""What every attention backend is given and returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from pdlab.kvcache import PagedKVCache, blocks_for


@dataclass(frozen=True)
class AttentionInputs:
    """Where the queries of a batch stand, and where the KV they may see is kept.

    Sequence i owns the query rows `query_starts[i]` to `query_starts[i + 1] - 1`. Its last query is
    at position `context_lens[i] - 1`, and its KV, these tokens included, is already written.
    """

    query_starts: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    def num_queries(self, i: int) -> int:
        return self.query_starts[i + 1] - self.query_starts[i]

    def padded_block_tables(self, rows: list[int], block_size: int, device: torch.device) -> Tensor:
        """Block tables of some sequences, [len(rows), longest], filled up with block 0."""
        counts = [blocks_for(self.context_lens[i], block_size) for i in rows]
        width = max(counts)
        tables = [
            self.block_tables[i][:count] + [0] * (width - count)
            for i, count in zip(rows, counts, strict=True)
        ]
        return torch.tensor(tables, dtype=torch.long, device=device)


class AttentionBackend(ABC):
    """Causal attention with grouped KV heads (GQA) and an optional sliding window.

    A query at position p sees the keys at positions max(0, p - window + 1) to p.
    """

    name: str

    @abstractmethod
    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Attention of one sequence whose K and V stand in one piece.

        Args:
            q: [num_queries, num_heads, head_dim], the last `num_queries` positions.
            k, v: [context_len, num_kv_heads, head_dim], all positions.

        Returns:
            [num_queries, num_heads, head_dim].
        """

    def paged(
        self,
        layer: int,
        q: Tensor,
        kv_cache: PagedKVCache,
        inputs: AttentionInputs,
        window: int | None = None,
    ) -> Tensor:
        """Attention of a batch over the paged cache, [num_tokens, num_heads, head_dim].

        Here: one sequence after the other, each gathered from its blocks first.
        """
        out = torch.empty_like(q)
        for i in range(inputs.num_sequences):
            rows = slice(inputs.query_starts[i], inputs.query_starts[i + 1])
            table = inputs.padded_block_tables([i], kv_cache.block_size, q.device)[0]
            k, v = kv_cache.gather(layer, table, q.dtype)
            context_len = inputs.context_lens[i]
            out[rows] = self.dense(q[rows], k[:context_len], v[:context_len], window)
        return out


def visible(num_queries: int, context_len: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys each query may see: bool [num_queries, context_len].

    The offset is the point: the queries are the *last* positions, not the first ones.
    """
    queries = torch.arange(context_len - num_queries, context_len, device=device)[:, None]
    keys = torch.arange(context_len, device=device)[None, :]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    return mask
