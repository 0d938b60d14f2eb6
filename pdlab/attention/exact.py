"""Attention whose bits do not depend on what else is in the batch, nor on how it was cut up.

Floating-point sums depend on their order, and fast kernels choose the order by shape: a decode row
and the same row inside a prefill differ in the last bits. Here the shapes never change. Queries
come in tiles of QUERY_TILE rows (padded), keys in tiles of KEY_TILE tokens counted from position 0
(padded with zeros), and a row adds up its key tiles in order, from the first to its own. A key that
a row may not see has weight 0 and adds exactly nothing, so it does not matter what the other rows
of its tile see, nor whether a key out of the window is still there: its place in the tile may hold
zeros, and a tile without any key is left out. (The sums start at +0, so that adding -0 changes
nothing either. The maximum that softmax subtracts needs no care: it is the same in any order.) The
tiles do not follow the cache's blocks, so block size does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdlab.attention.interface import NOWHERE, AttentionBackend, positions_of
from pdlab.attention.window import Window, visible

QUERY_TILE = 32
KEY_TILE = 64


class ExactAttention(AttentionBackend):
    """Batch-invariant attention in float32."""

    name = "exact"

    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        places, num_tiles = _layout(k, positions)
        keys, values = _head_major(k, places, num_tiles), _head_major(v, places, num_tiles)
        standing = positions_of(k, positions)
        stands = standing.new_full((num_tiles * KEY_TILE,), NOWHERE)
        stands[places] = standing
        queries = standing[-len(q) :]
        out = torch.empty_like(q)
        for start in range(0, len(q), QUERY_TILE):
            rows = slice(start, start + QUERY_TILE)
            mask = visible(queries[rows], stands, window).unflatten(1, (num_tiles, KEY_TILE))
            seen = mask.any(2).any(0).nonzero().flatten().tolist()
            tiles = [keys[t] for t in seen], [values[t] for t in seen]
            out[rows] = _attend(q[rows], *tiles, mask[:, seen])
        return out


def _layout(k: Tensor, positions: Tensor | None) -> tuple[slice | Tensor, int]:
    """Where each key goes among the rows of the tiles that hold any, and how many tiles do."""
    if positions is None:
        return slice(len(k)), -(-len(k) // KEY_TILE)
    tiles, tile = torch.unique_consecutive(positions // KEY_TILE, return_inverse=True)
    return tile * KEY_TILE + positions % KEY_TILE, len(tiles)


def _head_major(x: Tensor, places: slice | Tensor, num_tiles: int) -> Tensor:
    """[num_keys, num_kv_heads, head_dim] to [num_tiles, num_kv_heads, KEY_TILE, head_dim]."""
    padded = x.new_zeros(num_tiles * KEY_TILE, *x.shape[1:])
    padded[places] = x
    return padded.unflatten(0, (num_tiles, KEY_TILE)).transpose(1, 2).contiguous()


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], mask: Tensor) -> Tensor:
    """Attention of one query tile.

    Rows are laid out per KV head: [num_kv_heads, QUERY_TILE * group, ...], group being the query
    heads that share it.

    Args:
        q: [num_rows, num_heads, head_dim], at most QUERY_TILE rows.
        keys, values: tiles [num_kv_heads, KEY_TILE, head_dim], those that some row may see.
        mask: bool [num_rows, num_tiles, KEY_TILE], True where a row may look.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = len(keys[0])
    group = num_heads // num_kv_heads
    padded = q.new_zeros(num_kv_heads, QUERY_TILE, group, head_dim)
    padded[:, :num_rows] = q.unflatten(1, (num_kv_heads, group)).transpose(0, 1)
    queries = padded.flatten(1, 2) * head_dim**-0.5

    looks = mask.new_zeros(QUERY_TILE, len(keys) * KEY_TILE)
    looks[:num_rows] = mask.flatten(1)
    looks[num_rows:, 0] = True  # padding rows look at something, so that they stay finite
    hidden = ~looks.repeat_interleave(group, dim=0)

    scores = torch.cat([torch.bmm(queries, k.transpose(1, 2)) for k in keys], dim=-1)
    scores.masked_fill_(hidden, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    parts = weights.unflatten(-1, (len(keys), KEY_TILE))
    total, mixed = queries.new_zeros(*queries.shape[:2]), torch.zeros_like(queries)
    for tile, v in enumerate(values):
        part = parts[:, :, tile].contiguous()
        total += part.sum(-1)
        mixed += torch.bmm(part, v)
    out = (mixed / total[..., None]).unflatten(1, (QUERY_TILE, group)).transpose(0, 1)
    return out[:num_rows].flatten(1, 2)
