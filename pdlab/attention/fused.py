"""Attention through torch's fused kernel: the default on a CPU, and a fallback everywhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdlab.attention.interface import (
    NOWHERE,
    AttentionBackend,
    AttentionInputs,
    positions_of,
)
from pdlab.attention.window import Window, visible
from pdlab.kvcache import PagedKVCache


class FusedAttention(AttentionBackend):
    """`scaled_dot_product_attention`; on a CPU a fused kernel that never stores the score matrix.

    (Dao et al. 2022, FlashAttention. On a GPU, torch may fall back to storing it where there is a
    mask: chunked prefill, windows, batched decode.)

    Prefill chunks go one by one. All decodes of a batch go in one call over padded contexts.
    """

    name = "torch"

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        mask = None  # enough where all keys are seen, or those up to one's own
        square = len(q) == len(k) and window is None
        if window is not None or not (square or len(q) == 1):
            keys = positions_of(k, positions)
            mask = visible(keys[-len(q) :], keys, window)
        if len(q) == 1:
            return _single_queries(q, k[None], v[None], mask)
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
        window: Window | None = None,
    ) -> Tensor:
        num_decodes = 0  # decodes come first in a batch
        while num_decodes < inputs.num_sequences and inputs.num_queries(num_decodes) == 1:
            num_decodes += 1
        if num_decodes < 2:
            return super().paged(layer, q, kv_cache, inputs, window)
        decoded = self._decode(layer, q[:num_decodes], kv_cache, inputs, window)
        if num_decodes == inputs.num_sequences:
            return decoded
        chunks = range(num_decodes, inputs.num_sequences)
        return torch.cat((decoded, self._one_by_one(layer, q, kv_cache, inputs, window, chunks)))

    def _decode(
        self,
        layer: int,
        q: Tensor,
        kv_cache: PagedKVCache,
        inputs: AttentionInputs,
        window: Window | None,
    ) -> Tensor:
        """One query a sequence, [num_decodes, num_heads, head_dim], all sequences at once."""
        reads = inputs.reads(range(len(q)), kv_cache.block_size, window, q.device)
        k, v = kv_cache.gather(layer, reads.tables, q.dtype)
        absent = reads.positions == NOWHERE
        for x in (k, v):  # a masked NaN or inf would still spread: 0 * NaN is NaN
            x.masked_fill_(absent[:, :, None, None], 0)
        queries = torch.tensor(inputs.context_lens[: len(q)], device=q.device)[:, None] - 1
        mask = visible(queries, reads.positions, window)
        return _single_queries(q, k, v, mask[:, None])


def _single_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of one query a sequence: no key comes after it, so it needs no causal mask.

    And the heads of a group can stand as query rows of their KV head, and K and V need not be
    repeated.

    Args:
        q: [num_sequences, num_heads, head_dim].
        k, v: [num_sequences, num_keys, num_kv_heads, head_dim].
        mask: bool, broadcastable to [num_sequences, 1, 1, num_keys]; True where a query may look.
    """
    grouped = q.unflatten(1, (k.shape[2], -1))
    out = F.scaled_dot_product_attention(
        grouped, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
    )
    return out.flatten(1, 2)
