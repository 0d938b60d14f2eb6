"""Attention whose bits do not depend on what else is in the batch, nor on how it was cut up.

Floating-point sums depend on their order, and fast kernels choose the order by shape: a decode row
and the same row inside a prefill differ in the last bits. Here the shapes never change. Queries
come in tiles of QUERY_TILE rows (padded), keys in tiles of KEY_TILE tokens counted from position 0
(padded with zeros), and a row adds up its key tiles in order, from the first to its own. A key tile
beyond a row's position has weight 0 and adds exactly nothing to it, so it does not matter how far
the other rows of its tile reach. The tiles do not follow the cache's blocks, so block size does not
matter either. (The maximum that softmax subtracts needs no such care: a maximum is the same in any
order.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdlab.attention.interface import AttentionBackend, visible

QUERY_TILE = 32
KEY_TILE = 64


class ExactAttention(AttentionBackend):
    """Batch-invariant attention in float32."""

    name = "exact"

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        first = k.shape[0] - q.shape[0]
        num_key_tiles = -(-k.shape[0] // KEY_TILE)
        keys, values = _head_major(k, num_key_tiles), _head_major(v, num_key_tiles)
        out = torch.empty_like(q)
        for start in range(0, q.shape[0], QUERY_TILE):
            rows = q[start : start + QUERY_TILE]
            context_len = first + start + len(rows)
            seen = -(-context_len // KEY_TILE)
            mask = visible(len(rows), context_len, window, q.device)
            out[start : start + QUERY_TILE] = _attend(rows, keys[:seen], values[:seen], mask)
        return out


def _head_major(x: Tensor, num_tiles: int) -> Tensor:
    """[context_len, num_kv_heads, head_dim] to [num_tiles, num_kv_heads, KEY_TILE, head_dim]."""
    padded = x.new_zeros(num_tiles * KEY_TILE, *x.shape[1:])
    padded[: len(x)] = x
    return padded.unflatten(0, (num_tiles, KEY_TILE)).transpose(1, 2).contiguous()


def _attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention of one query tile.

    Rows are laid out per KV head: [num_kv_heads, QUERY_TILE * group, ...], group being the query
    heads that share it.

    Args:
        q: [num_rows, num_heads, head_dim], at most QUERY_TILE rows.
        keys, values: [num_tiles, num_kv_heads, KEY_TILE, head_dim], all that any row may see.
        mask: bool [num_rows, context_len], True where a row may look.
    """
    num_rows, num_heads, head_dim = q.shape
    num_tiles, num_kv_heads = keys.shape[:2]
    group = num_heads // num_kv_heads
    padded = q.new_zeros(num_kv_heads, QUERY_TILE, group, head_dim)
    padded[:, :num_rows] = q.unflatten(1, (num_kv_heads, group)).transpose(0, 1)
    queries = padded.flatten(1, 2) * head_dim**-0.5

    looks = mask.new_zeros(QUERY_TILE, num_tiles * KEY_TILE)
    looks[:num_rows, : mask.shape[1]] = mask
    looks[num_rows:, 0] = True  # padding rows look at something, so that they stay finite
    hidden = ~looks.repeat_interleave(group, dim=0)

    scores = torch.cat([torch.bmm(queries, k.transpose(1, 2)) for k in keys], dim=-1)
    scores.masked_fill_(hidden, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    parts = weights.unflatten(-1, (num_tiles, KEY_TILE))
    total, mixed = queries.new_zeros(*queries.shape[:2]), torch.zeros_like(queries)
    for tile, v in enumerate(values):
        part = parts[:, :, tile].contiguous()
        total += part.sum(-1)
        mixed += torch.bmm(part, v)
    out = (mixed / total[..., None]).unflatten(1, (QUERY_TILE, group)).transpose(0, 1)
    return out[:num_rows].flatten(1, 2)
