"""Attention through torch's fused kernel: the default on a CPU, and a fallback everywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdlab.attention.interface import AttentionBackend, AttentionInputs, visible
from pdlab.kvcache import PagedKVCache


class FusedAttention(AttentionBackend):
    """`scaled_dot_product_attention`; on a CPU a fused kernel that never stores the score matrix.

    (Dao et al. 2022, FlashAttention. On a GPU, torch may fall back to storing it where there is a
    mask: chunked prefill, windows, batched decode.)

    Prefill chunks go one by one. All decodes of a batch go in one call over padded contexts.
    """

    name = "torch"

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        num_queries, context_len = q.shape[0], k.shape[0]
        if num_queries == 1:
            seen = slice(None if window is None else -window, None)
            return _single_queries(q, k[None, seen], v[None, seen])
        square = num_queries == context_len and window is None
        mask = None if square else visible(num_queries, context_len, window, q.device)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=square, enable_gqa=q.shape[1] != k.shape[1]
        )
        return out[0].transpose(0, 1)

    def paged(
        self,
        layer: int,
        q: Tensor,
        kv_cache: PagedKVCache,
        inputs: AttentionInputs,
        window: int | None = None,
    ) -> Tensor:
        num_decodes = 0  # decodes come first in a batch
        while num_decodes < inputs.num_sequences and inputs.num_queries(num_decodes) == 1:
            num_decodes += 1
        if num_decodes < 2:
            return super().paged(layer, q, kv_cache, inputs, window)
        decoded = self._decode(layer, q[:num_decodes], kv_cache, inputs, window)
        if num_decodes == inputs.num_sequences:
            return decoded
        rest = AttentionInputs(
            [start - num_decodes for start in inputs.query_starts[num_decodes:]],
            inputs.context_lens[num_decodes:],
            inputs.block_tables[num_decodes:],
        )
        prefilled = super().paged(layer, q[num_decodes:], kv_cache, rest, window)
        return torch.cat((decoded, prefilled))

    def _decode(
        self,
        layer: int,
        q: Tensor,
        kv_cache: PagedKVCache,
        inputs: AttentionInputs,
        window: int | None,
    ) -> Tensor:
        """One query a sequence, [num_decodes, num_heads, head_dim], all sequences at once."""
        rows = list(range(len(q)))
        tables = inputs.padded_block_tables(rows, kv_cache.block_size, q.device)
        k, v = kv_cache.gather(layer, tables, q.dtype)
        lengths = torch.tensor(inputs.context_lens[: len(q)], device=q.device)[:, None]
        keys = torch.arange(k.shape[1], device=q.device)[None, :]
        mask = keys < lengths
        for x in (k, v):  # a masked NaN or inf would still spread: 0 * NaN is NaN
            x.masked_fill_(~mask[:, :, None, None], 0)
        if window is not None:
            mask &= keys >= lengths - window
        return _single_queries(q, k, v, mask[:, None, None, :])


def _single_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of one query a sequence, which sees all of its context: no causal mask.

    So the heads of a group can stand as query rows of their KV head, and K and V need not be
    repeated.

    Args:
        q: [num_sequences, num_heads, head_dim].
        k, v: [num_sequences, context_len, num_kv_heads, head_dim].
    """
    grouped = q.unflatten(1, (k.shape[2], -1))
    out = F.scaled_dot_product_attention(
        grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    return out.flatten(1, 2)
