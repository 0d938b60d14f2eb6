"""Bytes moved and floating-point operations done by each kernel, counted from its tensors.

They give the floor: no kernel takes less time than its bytes over the memory's bandwidth, or its
FLOPs over the processor's peak. Each tensor counts once: what is read again comes from a cache, if
all goes well. A multiplication and an addition count as two FLOPs; exponentials, conversions and
comparisons count nothing.

Functions take what their kernel takes. Attention counts the keys that the queries really see, in
whole tokens, so it reads lengths, starts and tables: not for use in a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

Parts = tuple[Tensor, ...]


class Work(NamedTuple):
    """What a kernel moves and computes."""

    bytes: int
    flops: int

    def floor(self, bandwidth: float, peak: float) -> float:
        """Seconds that it takes at least, at so many bytes and FLOPs a second."""
        return max(self.bytes / bandwidth, self.flops / peak)


def token_bytes(parts: Parts) -> int:
    """Bytes that K, or V, of one token takes in a layer, scales included."""
    slots = parts[0].shape[0] * parts[0].shape[1]
    return sum(part.nbytes for part in parts) // slots


def prefill_attention(
    q: Tensor,
    k_parts: Parts,
    v_parts: Parts,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    window: int | None = None,
    sinks: int = 0,
    reach: int | None = None,
) -> Work:
    """Two products of each query with each key it sees; each key that is seen is read once."""
    block_size = k_parts[0].shape[1]
    num_heads, head_dim = q.shape[1:]
    keys_read = pairs = 0
    lens, starts = context_lens.tolist(), query_starts.tolist()
    for i, context in enumerate(lens):
        keys = torch.arange(context)
        queries = torch.arange(context - (starts[i + 1] - starts[i]), context)[:, None]
        seen = (keys <= queries) & (block_tables[i].cpu()[keys // block_size] >= 0)
        if window is not None:
            seen &= (keys > queries - window) | (keys < sinks)
        if reach is not None:
            seen &= keys > queries - reach
        pairs += int(seen.sum())
        keys_read += int(seen.any(0).sum())
    kv = keys_read * (token_bytes(k_parts) + token_bytes(v_parts))
    num_tokens = starts[-1] if starts else 0
    q_and_out = 2 * num_tokens * num_heads * head_dim * q.element_size()
    return Work(kv + q_and_out, 4 * pairs * num_heads * head_dim)


def decode_attention(
    q: Tensor,
    k_parts: Parts,
    v_parts: Parts,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    window: int | None = None,
    sinks: int = 0,
    reach: int | None = None,
) -> Work:
    """As a chunk of one query a sequence. What the splits hand on is not counted: it is small."""
    starts = torch.cat((torch.zeros(1, dtype=torch.long), (context_lens.cpu() > 0).cumsum(0)))
    return prefill_attention(
        q, k_parts, v_parts, block_tables, starts, context_lens,
        window=window, sinks=sinks, reach=reach,
    )  # fmt: skip


def rope_and_write_kv(q: Tensor, k: Tensor, v: Tensor, k_parts: Parts, v_parts: Parts) -> Work:
    """Reads q, k, v and the angles of each token; writes q and what is stored of k and v."""
    num_tokens, _, head_dim = q.shape
    read = (q.numel() + k.numel() + v.numel()) * q.element_size() + num_tokens * head_dim * 4
    written = q.numel() * q.element_size()
    written += num_tokens * (token_bytes(k_parts) + token_bytes(v_parts))
    return Work(read + written, 3 * (q.numel() + k.numel()))


def add_rms_norm(x: Tensor, residual: Tensor | None) -> Work:
    """Reads x, the residual and the weight; writes their sum and its norm."""
    passes = 2 if residual is None else 4
    size = x.element_size()
    return Work(passes * x.numel() * size + x.shape[1] * size, (passes // 2 + 3) * x.numel())


def silu_mul(gate_up: Tensor) -> Work:
    """Reads both halves, writes one."""
    return Work(gate_up.nbytes + gate_up.nbytes // 2, 3 * gate_up.numel() // 2)


def linear(x: Tensor, *weights: Tensor) -> Work:
    """int8 or int4: reads x and all parts of the weight (codes first), writes one row a row."""
    num_rows, size_in = x.shape
    size_out = weights[0].shape[0]
    moved = x.numel() * x.element_size() + num_rows * size_out * x.element_size()
    return Work(moved + sum(w.nbytes for w in weights), 2 * num_rows * size_in * size_out)


def sample(logits: Tensor) -> Work:
    """Reads the logits; the passes after the first come from the cache."""
    return Work(logits.nbytes, 0)
