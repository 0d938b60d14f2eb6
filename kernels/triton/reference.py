"""What each kernel computes, in plain torch: short, slow, and with the kernels' signatures.

Computed in float32 whatever the dtype of the inputs, and rounded to it at the end. They run on any
device, and need no Triton. They check nothing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Parts = tuple[Tensor, ...]


# --- stored K and V ------------------------------------------------------------------------------


def decode_parts(parts: Parts, head_dim: int) -> Tensor:
    """fp32 values of stored K or V, [num_blocks, block_size, num_kv_heads, head_dim]."""
    codes, *scaling = parts
    if not scaling:
        return codes.float()
    if len(scaling) == 2:
        x = torch.cat((codes & 15, codes >> 4), dim=-1).float()
    elif codes.dtype == torch.uint8:
        x = codes.view(torch.float8_e4m3fn).float()
    else:
        x = codes.float()
    grouped = x.unflatten(-1, (scaling[0].shape[-2], -1)) * scaling[0].float()
    if len(scaling) == 2:
        grouped = grouped + scaling[1].float()
    return grouped.flatten(-2)


def encode(x: Tensor, parts: Parts) -> Parts:
    """What is stored of x, [num_tokens, num_kv_heads, head_dim], in the format of `parts`."""
    codes, *scaling = parts
    if not scaling:
        return (x.to(codes.dtype),)
    grouped = x.float().unflatten(-1, (scaling[0].shape[-2], -1))
    if len(scaling) == 2:
        low = grouped.amin(-1, keepdim=True)
        zero = (low - low.abs() * 2.0**-11 - 2.0**-25).clamp(-65504, 65504).half()
        grouped = grouped - zero.float()
        scale = _scale(grouped.amax(-1, keepdim=True) / 15)
        steps = (grouped / scale.float()).round().clamp(0, 15).to(torch.uint8).flatten(-2)
        first, second = steps.chunk(2, dim=-1)
        return first | (second << 4), scale, zero
    largest = 448 if codes.dtype == torch.uint8 else 127
    scale = _scale(grouped.abs().amax(-1, keepdim=True) / largest)
    steps = (grouped / scale.float()).clamp(-largest, largest).flatten(-2)
    if codes.dtype == torch.uint8:
        return steps.to(torch.float8_e4m3fn).view(torch.uint8), scale
    return steps.round().to(torch.int8), scale


def _scale(step: Tensor) -> Tensor:
    return (step + 2.0**-25).clamp(2.0**-24, 65504).half()


# --- attention -----------------------------------------------------------------------------------


def prefill_attention(
    q: Tensor,
    k_parts: Parts,
    v_parts: Parts,
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    reach: int | None = None,
) -> Tensor:
    """Attention of a ragged batch of chunks over their paged KV."""
    head_dim = q.shape[-1]
    k_stored, v_stored = decode_parts(k_parts, head_dim), decode_parts(v_parts, head_dim)
    block_size, num_kv_heads = k_stored.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    starts = query_starts.tolist()
    for i, context in enumerate(context_lens.tolist()):
        queries = torch.arange(context - (starts[i + 1] - starts[i]), context, device=q.device)
        keys = torch.arange(context, device=q.device)
        blocks = block_tables[i, keys // block_size].long()
        seen = (keys <= queries[:, None]) & (blocks >= 0)
        if window is not None:
            near = (keys > queries[:, None] - window) | (keys < sinks)
            seen &= near & (keys > queries[:, None] - (context + 1 if reach is None else reach))
        k, v = (x[blocks.clamp(min=0), keys % block_size] for x in (k_stored, v_stored))
        k, v = (x.where((blocks >= 0)[:, None, None], 0.0) for x in (k, v))
        rows = slice(starts[i], starts[i + 1])
        grouped = q[rows].float().unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * (scale or head_dim**-0.5)
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num(0.0)
        out[rows] = torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2)
    return out.to(q.dtype)


def decode_attention(
    q: Tensor,
    k_parts: Parts,
    v_parts: Parts,
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    reach: int | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of one query a sequence over its paged KV; zeros where the context is empty."""
    del num_splits
    some = context_lens > 0
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    out[some] = prefill_attention(
        q[some], k_parts, v_parts, block_tables[some],
        torch.arange(int(some.sum()) + 1), context_lens[some],
        scale=scale, window=window, sinks=sinks, reach=reach,
    )  # fmt: skip
    return out


# --- token-wise ----------------------------------------------------------------------------------


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_parts: Parts,
    v_parts: Parts,
) -> Tensor:
    """Rotate q and k, store k and v; here every step is rounded to the dtype of q."""
    written = slots >= 0
    for x, parts in ((_rotate(k, cos, sin, positions), k_parts), (v, v_parts)):
        for part, new in zip(parts, encode(x, parts), strict=True):
            part.flatten(0, 1)[slots[written].long()] = new[written]
    return _rotate(q, cos, sin, positions)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    cos, sin = (table[positions.long()].unsqueeze(1).to(x.dtype) for table in (cos, sin))
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream (rounded to its dtype) and norm the sum."""
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return normed.to(x.dtype), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a gated MLP."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


# --- matrix products -----------------------------------------------------------------------------


def int8_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """x W^T + b with int8 weights, one scale an output row, or one for 32 of its weights."""
    del num_splits
    scales = scales.float()[:, None] if scales.dim() == 1 else scales.repeat_interleave(32, 1)
    return _linear(x, codes.float() * scales.float(), bias)


def int4_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    minima: Tensor,
    bias: Tensor | None = None,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """x W^T + b with int4 weights in groups of 32, each with a scale and a minimum."""
    del num_splits
    groups = codes.unflatten(1, (-1, 16))
    values = torch.cat((groups & 15, groups >> 4), dim=-1).float()
    values = values * scales.float()[..., None] + minima.float()[..., None]
    return _linear(x, values.flatten(1), bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.float(), weight, None if bias is None else bias.float()).to(x.dtype)


# --- sampling ------------------------------------------------------------------------------------


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None = None,
    *,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
) -> Tensor:
    """A token for each row; -1 where nothing can be drawn. By a sort, row by row."""
    tokens = []
    for i, row in enumerate(logits.float()):
        if row.isnan().any() or not row.max().isfinite():
            tokens.append(-1)
            continue
        if temperature[i] <= 0:
            tokens.append(int(row.argmax()))
            continue
        row = row / temperature[i]
        ranked = row.sort(descending=True).values
        if 0 < top_k[i] < len(row):
            row = row.masked_fill(row < ranked[int(top_k[i]) - 1], -math.inf)
        if top_p[i] < 1:
            mass = (ranked - row.max()).exp().double()
            mass = mass.where(ranked >= row[row > -math.inf].min(), 0.0)
            before = mass.cumsum(0) - mass
            kept = int((before < top_p[i].double() * mass.sum()).sum())
            row = row.masked_fill(row < ranked[max(kept, 1) - 1], -math.inf)
        if min_p is not None:
            row = row.masked_fill(row < row.max() + min_p[i].log(), -math.inf)
        if seeds is not None:
            noise = -(-_philox_uniform(int(seeds[i]), len(row)).clamp(min=1e-30).log()).log()
            tokens.append(int((row + noise.to(row.device)).argmax()))
        else:
            assert uniforms is not None
            edges = (row - row.max()).exp().double().cumsum(0)
            dart = uniforms[i] * edges[-1]
            tokens.append(int(torch.searchsorted(edges, dart, right=True).clamp(max=len(row) - 1)))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def _philox_uniform(seed: int, count: int) -> Tensor:
    """fp32 [count] in [0, 1): Philox 4x32-10 (Salmon et al. 2011) at counters 0 to count - 1."""
    mask = 0xFFFFFFFF
    c0 = torch.arange(count, dtype=torch.int64)
    c1 = c2 = c3 = torch.zeros_like(c0)
    key0, key1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = _product(c0, 0xD2511F53), _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ c1 ^ key0, low_b, high_a ^ c3 ^ key1, low_a
        key0, key1 = (key0 + 0x9E3779B9) & mask, (key1 + 0xBB67AE85) & mask
    signed = torch.where(c0 >= 1 << 31, c0 - (1 << 32), c0)
    positive = torch.where(signed < 0, -signed - 1, signed)
    return positive.float() * torch.tensor(4.6566127342e-10)


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a * b, both below 2^32; in int64 without overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & 0xFFFFFFFF
