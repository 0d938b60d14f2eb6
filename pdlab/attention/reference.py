"""Attention as the formula is written, softmax(q K^T / sqrt(d)) V: the one that has weights."""

from __future__ import annotations

import torch
from torch import Tensor

from pdlab.attention.interface import AttentionBackend, positions_of
from pdlab.attention.window import Window, visible


class ReferenceAttention(AttentionBackend):
    """Unfused attention (Vaswani et al. 2017) in float32: the score matrix really exists."""

    name = "reference"

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        weights = self.weights(q, k, window, positions)
        values = _share(v, q).float()
        return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        window: Window | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attention weights, float32 [num_heads, num_queries, num_keys]; each row sums to 1."""
        scores = torch.einsum("qhd,khd->hqk", q.float(), _share(k, q).float())
        scores *= q.shape[-1] ** -0.5
        keys = positions_of(k, positions)
        mask = visible(keys[-len(q) :], keys, window)
        return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)


def _share(kv: Tensor, q: Tensor) -> Tensor:
    """Repeat each KV head for the query heads that read it: heads 0, 0, 1, 1 for 4 over 2."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)
