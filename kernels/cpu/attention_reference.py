"""Paged attention in plain torch: what the kernels must compute, and what runs without Numba."""

import math
from typing import Any

import torch
from torch import Tensor

from .attention_plan import AttentionPlan, Stored

_LARGEST = {"fp8": 448, "int8": 127, "int4": 15}
_SHARED = {"token": (-1,), "head": (-4, -1), "channel": (-4,)}
"""Dimensions of [..., tokens, heads, groups, channels] over which a scale reaches."""


def attention(qkv: Tensor, plan: AttentionPlan, layer: int, *, kind: int = 0) -> Tensor:
    """See `attention.attention`."""
    kv = plan.kv
    sizes = [n * kv.head_dim for n in (kv.num_heads, kv.num_kv_heads, kv.num_kv_heads)]
    q, k, v = (part.unflatten(1, (-1, kv.head_dim)) for part in qkv.split(sizes, dim=1))
    for stored, x in ((kv.k, k), (kv.v, v)):
        for group, heads in enumerate(x.chunk(kv.head_groups, dim=1)):
            _write(stored, group, layer, plan, heads)
    out = torch.empty_like(q)
    for i, context in enumerate(plan.context_lens):
        rows = slice(plan.query_starts[i], plan.query_starts[i + 1])
        keys = torch.arange(context)
        table = torch.as_tensor(plan.block_tables[i], dtype=torch.int64)
        blocks = table[keys // kv.block_size]
        seen = visible(keys[context - len(q[rows]) :], keys, plan.windows[kind]) & (blocks >= 0)
        slots = blocks.clamp(min=0), keys % kv.block_size
        keys, values = (_read(s, layer, plan, *slots) for s in (kv.k, kv.v))
        shared = q[rows].unflatten(1, (kv.num_kv_heads, kv.group))
        scores = torch.einsum("qhgd,khd->hgqk", shared, keys) * kv.head_dim**-0.5
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
        out[rows] = torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
    return out.flatten(1)


def visible(queries: Tensor, keys: Tensor, window: Any) -> Tensor:
    """Which keys each query sees, from their positions: bool [num_queries, num_keys]."""
    before = queries[:, None] - keys
    seen = before >= 0
    if window is None:
        return seen
    seen &= (before < window.size) | (keys < window.sinks)
    return seen if window.reach is None else seen & (before < window.reach)


def _write(stored: Stored, group: int, layer: int, plan: AttentionPlan, x: Tensor) -> None:
    """Store x [num_rows, heads, head_dim] of a head group."""
    parts = [part[layer] for part in stored.parts[group]]
    if not stored.is_blockwise:
        for part, new in zip(parts, encode(stored, x), strict=True):
            part.flatten(0, 1)[torch.from_numpy(plan.slots)] = new
        return
    blocks, area = plan.blocks, stored.open[group]
    assert blocks is not None
    assert area is not None
    if len(blocks.whole_blocks):
        for part, new in zip(parts, encode(stored, x[blocks.whole_rows]), strict=True):
            part[blocks.whole_blocks] = new
    area[layer].flatten(0, 1)[blocks.open_slots] = x[blocks.open_rows]


def _read(
    stored: Stored, layer: int, plan: AttentionPlan, blocks: Tensor, offsets: Tensor
) -> Tensor:
    """Values of tokens, float32 [num_tokens, kv_heads, head_dim]."""
    groups = []
    for group, parts in enumerate(stored.parts):
        x = decode(stored, tuple(part[layer] for part in parts))[blocks, offsets]
        if stored.is_blockwise:
            area = stored.open[group]
            assert area is not None
            assert plan.kv.place_of is not None
            places = plan.kv.place_of[blocks]
            opened = area[layer][places.clamp(min=0), offsets]
            x = torch.where((places >= 0)[:, None, None], opened, x)
        groups.append(x)
    return torch.cat(groups, dim=1)


def encode(stored: Stored, x: Tensor) -> tuple[Tensor, ...]:
    """What is stored of x [..., tokens, heads, head_dim], as `pdlab.kvcache.KVFormat.encode`."""
    if stored.scales is None:
        return (x.to(stored.parts[0][0].dtype),)
    dims, most = _SHARED[stored.scales], _LARGEST[stored.name]
    x = x.unflatten(-1, (-1, stored.group or x.shape[-1]))
    if stored.name == "int4":
        low = x.amin(dims, keepdim=True)
        zero = (low - low.abs() * 2.0**-11 - 2.0**-25).clamp(-65504, 65504).half()
        x = x - zero.float()
        scale = _scale(x.amax(dims, keepdim=True) / most)
        codes = (x / scale.float()).round().clamp(0, most).to(torch.uint8).flatten(-2)
        first, second = codes.chunk(2, dim=-1)
        return first | (second << 4), scale, zero
    scale = _scale(x.abs().amax(dims, keepdim=True) / most)
    steps = (x / scale.float()).clamp(-most, most).flatten(-2)
    if stored.name == "fp8":
        return steps.to(torch.float8_e4m3fn).view(torch.uint8), scale
    return steps.round().to(torch.int8), scale


def decode(stored: Stored, parts: tuple[Tensor, ...]) -> Tensor:
    """The values of what `encode` returned, float32."""
    codes, *scaling = parts
    if not scaling:
        return codes.float()
    if stored.name == "int4":
        x = torch.cat((codes & 15, codes >> 4), dim=-1).float()
    elif stored.name == "fp8":
        x = codes.view(torch.float8_e4m3fn).float()
    else:
        x = codes.float()
    x = x.unflatten(-1, (-1, stored.group or x.shape[-1])) * scaling[0].float()
    return (x + scaling[1].float() if stored.name == "int4" else x).flatten(-2)


def _scale(step: Tensor) -> Tensor:
    return (step + 2.0**-25).clamp(2.0**-24, 65504).half()
