"""Attention whose bits do not depend on what else is in the batch, nor on how it was cut up.

Floating-point sums depend on their order, and fast kernels choose the order by shape: a decode row
and the same row inside a prefill differ in the last bits. Here the shapes never change. Queries
come in tiles of QUERY_TILE rows (padded), keys in tiles of KEY_TILE tokens counted from position 0
(padded with zeros), and a row adds up its key tiles from the first to its own (the online softmax
of Milakov and Gimelshein 2018). A key tile that lies beyond a row's position adds exactly nothing
to it, so it does not matter how far the other rows of the tile reach. The tiles do not follow the
cache's blocks, so block size does not matter either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdlab.attention.interface import AttentionBackend

QUERY_TILE = 16
KEY_TILE = 64
NEVER = float("-inf")


class ExactAttention(AttentionBackend):
    """Batch-invariant attention in float32."""

    name = "exact"

    def dense(self, q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        first = k.shape[0] - q.shape[0]
        key_tiles = [(_tile(k, s), _tile(v, s)) for s in range(0, k.shape[0], KEY_TILE)]
        out = torch.empty_like(q)
        for start in range(0, q.shape[0], QUERY_TILE):
            rows = q[start : start + QUERY_TILE]
            out[start : start + QUERY_TILE] = _attend(rows, first + start, key_tiles, window)
        return out


def _tile(x: Tensor, start: int) -> Tensor:
    """KEY_TILE tokens of one head after the other: [num_kv_heads, KEY_TILE, head_dim]."""
    tile = x.new_zeros(x.shape[1], KEY_TILE, x.shape[2])
    part = x[start : start + KEY_TILE]
    tile[:, : len(part)] = part.transpose(0, 1)
    return tile


def _attend(
    q: Tensor, position: int, key_tiles: list[tuple[Tensor, Tensor]], window: int | None
) -> Tensor:
    """Attention of one query tile whose first row stands at `position`.

    Rows are laid out per KV head, [num_kv_heads, QUERY_TILE * group, head_dim].
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = key_tiles[0][0].shape[0]
    group = num_heads // num_kv_heads
    padded = q.new_zeros(num_kv_heads, QUERY_TILE, group, head_dim)
    padded[:, :num_rows] = q.unflatten(1, (num_kv_heads, group)).transpose(0, 1)
    queries = padded.flatten(1, 2) * head_dim**-0.5
    positions = torch.arange(position, position + QUERY_TILE, device=q.device)
    positions = positions.repeat_interleave(group)[:, None]

    highest = queries.new_full((*queries.shape[:2], 1), NEVER)
    total = torch.zeros_like(highest)
    mixed = torch.zeros_like(queries)
    for index, (k, v) in enumerate(key_tiles[: (position + num_rows - 1) // KEY_TILE + 1]):
        keys = torch.arange(index * KEY_TILE, (index + 1) * KEY_TILE, device=q.device)
        hidden = keys > positions
        if window is not None:
            hidden |= keys <= positions - window
        scores = torch.bmm(queries, k.transpose(1, 2)).masked_fill_(hidden, NEVER)
        new_highest = torch.maximum(highest, scores.amax(-1, keepdim=True))
        origin = new_highest.masked_fill(new_highest == NEVER, 0.0)  # nothing visible so far
        weights = (scores - origin).exp_()
        fade = (highest - origin).exp_()
        total = total * fade + weights.sum(-1, keepdim=True)
        mixed = mixed * fade + torch.bmm(weights, v)
        highest = new_highest
    out = (mixed / total).unflatten(1, (QUERY_TILE, group)).transpose(0, 1)
    return out[:num_rows].flatten(1, 2)
