"""Rotary embedding of q and k, and the write of k and v into their slots: one pass over q, k, v.

What is written is what pdlab's torch store writes, byte for byte (`KVFormat.encode` of what
`apply_rope` returns, both on a CPU): products and divisions are rounded as there, and no
multiplication is joined with an addition. On a GPU torch itself divides by 127 by multiplying with
1/127, so there the two may differ by one code or one bit of a scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_parts import store_halves, understand_both
from .launch import (
    Launch,
    ceil_div,
    check_contiguous,
    check_float,
    check_integers,
    check_rows,
    check_shape,
    check_tensors,
    power_of_2,
    require,
)

MAX_BLOCK_H = 8


@triton.jit
def rotate_halves(at, cos, sin, inside, HALF: tl.constexpr):
    """Both halves of some heads, [heads, PADDED], each pair turned by its angle.

    In the dtype of x, every step rounded to it, as torch does it.
    """
    low = tl.load(at, mask=inside, other=0.0)
    high = tl.load(at + HALF, mask=inside, other=0.0)
    dtype: tl.constexpr = low.dtype
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    turned_low = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    turned_high = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    return turned_low.to(dtype), turned_high.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def rope_and_write_kv_kernel(
    out_ptr, q_ptr, q_stride, k_ptr, k_stride, v_ptr, v_stride,
    cos_ptr, sin_ptr, positions_ptr, slots_ptr,
    k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    K_FORMAT: tl.constexpr, K_GROUP: tl.constexpr,
    V_FORMAT: tl.constexpr, V_GROUP: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Program (i, t): token i; tile t of BLOCK_H heads, those of q first, then of k, then of v."""
    HALF: tl.constexpr = DIM // 2
    Q_TILES: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KV_TILES: tl.constexpr = (KV_HEADS + BLOCK_H - 1) // BLOCK_H
    i = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    channel = tl.arange(0, PADDED)
    position = tl.load(positions_ptr + i).to(tl.int64)
    slot = tl.load(slots_ptr + i).to(tl.int64)
    x_type: tl.constexpr = q_ptr.dtype.element_ty
    at = position * HALF + channel
    cos = tl.load(cos_ptr + at, mask=channel < HALF, other=0.0).to(x_type).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + at, mask=channel < HALF, other=0.0).to(x_type).to(tl.float32)[None, :]

    if tile < Q_TILES:
        head = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < HEADS)[:, None] & (channel < HALF)[None, :]
        offset = head[:, None] * DIM + channel[None, :]
        low, high = rotate_halves(q_ptr + i * q_stride + offset, cos, sin, inside, HALF)
        to = out_ptr + i * HEADS * DIM + offset
        tl.store(to, low, mask=inside)
        tl.store(to + HALF, high, mask=inside)
    elif tile < Q_TILES + KV_TILES:
        head = (tile - Q_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < KV_HEADS)[:, None] & (channel < HALF)[None, :]
        offset = head[:, None] * DIM + channel[None, :]
        low, high = rotate_halves(k_ptr + i * k_stride + offset, cos, sin, inside, HALF)
        store_halves(
            low, high, k_codes, k_scales, k_zeros, slot * KV_HEADS + head,
            (head < KV_HEADS) & (slot >= 0), DIM, PADDED, K_FORMAT, K_GROUP,
        )  # fmt: skip
    else:
        head = (tile - Q_TILES - KV_TILES) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (head < KV_HEADS)[:, None] & (channel < HALF)[None, :]
        at_v = v_ptr + i * v_stride + head[:, None] * DIM + channel[None, :]
        low = tl.load(at_v, mask=inside, other=0.0)
        high = tl.load(at_v + HALF, mask=inside, other=0.0)
        store_halves(
            low, high, v_codes, v_scales, v_zeros, slot * KV_HEADS + head,
            (head < KV_HEADS) & (slot >= 0), DIM, PADDED, V_FORMAT, V_GROUP,
        )  # fmt: skip


def rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_parts: tuple[Tensor, ...],
    v_parts: tuple[Tensor, ...],
) -> Tensor:
    """Rotate q and k by their positions; store k and v where their slots are.

    Args:
        q: [num_tokens, num_heads, head_dim], fp32, fp16 or bf16; rows may be strided.
        k, v: [num_tokens, num_kv_heads, head_dim], likewise.
        cos, sin: fp32 [max_positions, head_dim / 2].
        positions: int32 or int64 [num_tokens], each less than max_positions (not checked).
        slots: int32 or int64 [num_tokens], block * block_size + offset, all different and within
            the cache (not checked); < 0: k and v of this token are not stored.
        k_parts, v_parts: of one layer, see `kv_parts.py`. Written in place.

    Returns:
        q rotated, [num_tokens, num_heads, head_dim], contiguous.

    Raises:
        ValueError: for what the kernel cannot do.
    """
    out, launch = plan_rope_and_write_kv(q, k, v, cos, sin, positions, slots, k_parts, v_parts)
    launch.run()
    return out


def plan_rope_and_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_parts: tuple[Tensor, ...],
    v_parts: tuple[Tensor, ...],
) -> tuple[Tensor, Launch]:
    """The rotated q's tensor, and the launch that fills it; see `rope_and_write_kv`."""
    check_float(q=q, k=k, v=v)
    check_shape("q", q, None, None, None)
    num_tokens, num_heads, head_dim = q.shape
    k_stored, v_stored = understand_both(k_parts, v_parts, head_dim)
    for name, x in (("k", k), ("v", v)):
        check_shape(name, x, num_tokens, k_stored.num_kv_heads, head_dim)
    check_rows(q=q, k=k, v=v)
    for name, table in (("cos", cos), ("sin", sin)):
        check_shape(name, table, len(cos), head_dim // 2)
        require(table.dtype == torch.float32, f"{name} has dtype {table.dtype}, must be float32")
    check_contiguous(cos=cos, sin=sin)
    check_integers(positions=positions, slots=slots)
    check_shape("positions", positions, num_tokens)
    check_shape("slots", slots, num_tokens)
    check_tensors(
        q=q, k=k, v=v, cos=cos, sin=sin, positions=positions, slots=slots,
        **k_stored.kernel_args("k"), **v_stored.kernel_args("v"),
    )  # fmt: skip
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    block_h = min(MAX_BLOCK_H, power_of_2(num_heads))
    tiles = ceil_div(num_heads, block_h) + 2 * ceil_div(k_stored.num_kv_heads, block_h)
    args = {
        "out_ptr": out,
        "q_ptr": q,
        "q_stride": q.stride(0),
        "k_ptr": k,
        "k_stride": k.stride(0),
        "v_ptr": v,
        "v_stride": v.stride(0),
        "cos_ptr": cos,
        "sin_ptr": sin,
        "positions_ptr": positions,
        "slots_ptr": slots,
        **k_stored.kernel_args("k"),
        **v_stored.kernel_args("v"),
    }
    constants = {
        "HEADS": num_heads,
        "KV_HEADS": k_stored.num_kv_heads,
        "DIM": head_dim,
        "PADDED": power_of_2(head_dim // 2),
        **k_stored.kernel_constants("k"),
        **v_stored.kernel_constants("v"),
        "BLOCK_H": block_h,
    }
    grid = (num_tokens, tiles)
    launch = Launch(rope_and_write_kv_kernel, grid, args, constants, num_warps=2, contract=False)
    return out, launch
