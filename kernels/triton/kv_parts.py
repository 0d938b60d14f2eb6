"""How stored K and V are read and written inside a kernel.

K, or V, of one layer is a tuple of tensors, as pdlab's KVFormat.parts lays them out:

    codes   [num_blocks, block_size, num_kv_heads, head_dim]        int4: head_dim / 2
    scales  [num_blocks, block_size, num_kv_heads, num_groups, 1]   fp16; int8, fp8, int4
    zeros   likewise                                                fp16; int4 alone

    parts given             dtype of codes        value
    codes                   fp32, fp16, bf16      code
    codes, scales           int8                  code * scale
    codes, scales           uint8                 e4m3fn(code) * scale
    codes, scales, zeros    uint8                 code * scale + zero, two codes a byte

A byte of int4 holds channels i (low four bits) and i + head_dim / 2. So a head is always handled in
two halves: the low and the high bits of the same bytes. Rotary embeddings pair the same channels.

Scales that belong to whole blocks (head, channel) are not read here: their newest tokens are kept
elsewhere, in full precision.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import FLOATS, check_contiguous, check_shape, require

HEAD_DIMS = range(64, 129, 16)
MAX_GROUPS = 16

FP16_TINIEST = tl.constexpr(2.0**-24)
FP16_MAX = tl.constexpr(65504.0)
ROUNDER = tl.constexpr(1.5 * 2**23)
"""Added to a float32 below 2^22 and taken away again, it rounds to an integer, halves to even."""


class KVParts(NamedTuple):
    """What K or V of a layer is stored in, understood."""

    format: str
    """float, int8, fp8 or int4."""
    group: int
    """Channels that share a scale; head_dim if there is none."""
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None

    @property
    def num_blocks(self) -> int:
        return self.codes.shape[0]

    @property
    def block_size(self) -> int:
        return self.codes.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.codes.shape[2]

    def kernel_args(self, name: str) -> dict[str, Tensor | None]:
        return {
            f"{name}_codes": self.codes,
            f"{name}_scales": self.scales,
            f"{name}_zeros": self.zeros,
        }

    def kernel_constants(self, name: str) -> dict[str, object]:
        return {f"{name.upper()}_FORMAT": self.format, f"{name.upper()}_GROUP": self.group}


def understand(name: str, parts: tuple[Tensor, ...], head_dim: int) -> KVParts:
    """Which format these tensors are in.

    Raises:
        ValueError: in none that the kernels know, or not contiguous.
    """
    require(1 <= len(parts) <= 3, f"{name} has {len(parts)} parts, must be 1, 2 or 3")
    codes, rest = parts[0], (*parts[1:], None, None)
    scales, zeros = rest[0], rest[1]
    kinds = {(torch.int8, 2): "int8", (torch.uint8, 2): "fp8", (torch.uint8, 3): "int4"}
    kinds |= {(dtype, 1): "float" for dtype in FLOATS}
    kind = kinds.get((codes.dtype, len(parts)))
    if kind is None:
        raise ValueError(
            f"{name} has {len(parts)} parts with codes in {codes.dtype}: must be 1 in fp32, fp16 "
            "or bf16; 2 in int8 or (fp8) uint8; or 3 in (int4) uint8"
        )
    require(head_dim in HEAD_DIMS, f"head_dim={head_dim}, must be one of {list(HEAD_DIMS)}")
    width = head_dim // 2 if kind == "int4" else head_dim
    check_shape(f"{name} codes", codes, None, None, None, width)
    check_contiguous(**{f"{name}_codes": codes, f"{name}_scales": scales, f"{name}_zeros": zeros})
    group = head_dim
    if scales is not None:
        require(
            scales.dim() == 5 and scales.shape[:2] == codes.shape[:2],
            f"{name} scales have shape {list(scales.shape)}: only scales of tokens can be read, "
            f"[{codes.shape[0]}, {codes.shape[1]}, {codes.shape[2]}, groups, 1]",
        )
        groups = scales.shape[3]
        check_shape(f"{name} scales", scales, *codes.shape[:3], groups, 1)
        require(
            1 <= groups <= MAX_GROUPS and head_dim % groups == 0,
            f"{name} has {groups} groups of channels a head, must be 1 to {MAX_GROUPS} and divide "
            f"head_dim={head_dim}",
        )
        group = head_dim // groups
    for part, tensor in (("scales", scales), ("zeros", zeros)):
        require(
            tensor is None or tensor.dtype == torch.float16,
            f"{name} {part} are not float16",
        )
    if zeros is not None and scales is not None:
        check_shape(f"{name} zeros", zeros, *scales.shape)
    return KVParts(kind, group, codes, scales, zeros)


def understand_both(
    k_parts: tuple[Tensor, ...], v_parts: tuple[Tensor, ...], head_dim: int
) -> tuple[KVParts, KVParts]:
    """K and V of one layer, each in a format of its own, in the same blocks.

    Raises:
        ValueError: as `understand`, or the blocks are not the same.
    """
    k, v = understand("k_parts", k_parts, head_dim), understand("v_parts", v_parts, head_dim)
    check_shape("v_parts codes", v.codes, *k.codes.shape[:3], None)
    return k, v


# --- reading -------------------------------------------------------------------------------------


@triton.jit
def from_e4m3(code):
    """The float32 value of an fp8 code (e4m3fn). Not by tl.float8e4nv: sm_80 has no such cast.

    The seven bits under the sign, moved to where fp16 has them, are 2^-8 times the value.
    """
    bits = code.to(tl.int16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    value = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def group_values(ptr, rows, there, HALF: tl.constexpr, WHICH: tl.constexpr, DIM: tl.constexpr,
                 PADDED: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Scales (or zeros) of one half's channels, fp32: [rows, PADDED], or [rows, 1] if all equal."""
    GROUPS: tl.constexpr = DIM // GROUP
    FIRST: tl.constexpr = (WHICH * HALF) // GROUP
    LAST: tl.constexpr = ((WHICH + 1) * HALF - 1) // GROUP
    channel = WHICH * HALF + tl.arange(0, PADDED)
    values = tl.load(ptr + rows * GROUPS + FIRST, mask=there, other=0.0).to(tl.float32)[:, None]
    for g in tl.static_range(FIRST + 1, LAST + 1):
        next_ones = tl.load(ptr + rows * GROUPS + g, mask=there, other=0.0).to(tl.float32)
        values = tl.where((channel >= g * GROUP)[None, :], next_ones[:, None], values)
    return values


@triton.jit
def load_halves(codes_ptr, scales_ptr, zeros_ptr, rows, there, dtype: tl.constexpr,
                DIM: tl.constexpr, PADDED: tl.constexpr,
                FORMAT: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Values of some heads of some tokens, both halves [rows, PADDED], zero where not `there`.

    Args:
        rows: [rows] int64, slot * num_kv_heads + head.
        PADDED: a power of two, at least DIM / 2; channels from there on are zero.
    """
    HALF: tl.constexpr = DIM // 2
    channel = tl.arange(0, PADDED)
    inside = there[:, None] & (channel < HALF)[None, :]
    if FORMAT == "int4":
        byte = tl.load(codes_ptr + rows[:, None] * HALF + channel[None, :], mask=inside, other=0)
        low = (byte & 15).to(tl.float32)
        high = (byte >> 4).to(tl.float32)
    else:
        at = codes_ptr + rows[:, None] * DIM + channel[None, :]
        low = tl.load(at, mask=inside, other=0)
        high = tl.load(at + HALF, mask=inside, other=0)
    if FORMAT == "int8":
        low = low.to(tl.float32)
        high = high.to(tl.float32)
    elif FORMAT == "fp8":
        low = from_e4m3(low)
        high = from_e4m3(high)
    if FORMAT != "float":
        low *= group_values(scales_ptr, rows, there, HALF, 0, DIM, PADDED, GROUP)
        high *= group_values(scales_ptr, rows, there, HALF, 1, DIM, PADDED, GROUP)
    if FORMAT == "int4":
        low += group_values(zeros_ptr, rows, there, HALF, 0, DIM, PADDED, GROUP)
        high += group_values(zeros_ptr, rows, there, HALF, 1, DIM, PADDED, GROUP)
    if FORMAT != "float":
        # Changes no value that counts. But what is masked here is dequantized once and shared;
        # without it, Triton lets each warp dequantize the whole tile for itself, and spills.
        low = tl.where((channel < HALF)[None, :], low, 0.0)
        high = tl.where((channel < HALF)[None, :], high, 0.0)
    return low.to(dtype), high.to(dtype)


# --- writing -------------------------------------------------------------------------------------


@triton.jit
def round_to_integer(x):
    """Nearest integer, halves to even, of a float32 below 2^22."""
    return (x + ROUNDER) - ROUNDER


@triton.jit
def to_e4m3(x):
    """The fp8 code (e4m3fn) nearest to a float32 of at most 448, halves to even, as uint8."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal: keep 3 of 23 bits below the point; a carry walks up into the exponent as it should.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - ((127 - 7) << 3)
    # Subnormal, below 2^-6: steps of 2^-9, which is the spacing of float32 numbers at 2^14.
    small = (tl.abs(x) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(tl.abs(x) < 2.0**-6, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def fp16_scale(step):
    """A step as fp16 that still reaches the largest value; see `_scale` in pdlab's formats."""
    step = tl.minimum(tl.maximum(step + FP16_TINIEST / 2, FP16_TINIEST), FP16_MAX)
    return step.to(tl.float16)


@triton.jit
def fp16_at_most(low):
    """An fp16 number not above `low`; see `_at_most` in pdlab's formats."""
    low = low - tl.abs(low) * 2.0**-11 - FP16_TINIEST / 2
    return tl.minimum(tl.maximum(low, -FP16_MAX), FP16_MAX).to(tl.float16)


@triton.jit
def store_halves(low, high, codes_ptr, scales_ptr, zeros_ptr, rows, there,
                 DIM: tl.constexpr, PADDED: tl.constexpr,
                 FORMAT: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """Store both halves [rows, PADDED] of some heads, quantized if FORMAT says so."""
    HALF: tl.constexpr = DIM // 2
    GROUPS: tl.constexpr = DIM // GROUP
    channel = tl.arange(0, PADDED)
    inside = there[:, None] & (channel < HALF)[None, :]
    at = codes_ptr + rows[:, None] * DIM + channel[None, :]
    if FORMAT == "float":
        tl.store(at, low.to(codes_ptr.dtype.element_ty), mask=inside)
        tl.store(at + HALF, high.to(codes_ptr.dtype.element_ty), mask=inside)
    else:
        LARGEST: tl.constexpr = 15.0 if FORMAT == "int4" else 448.0 if FORMAT == "fp8" else 127.0
        low = low.to(tl.float32)
        high = high.to(tl.float32)
        for g in tl.static_range(GROUPS):
            # The channels of this group in each half. A group may reach from one into the other.
            in_low = (channel >= g * GROUP) & (channel < (g + 1) * GROUP) & (channel < HALF)
            upper = channel + HALF
            in_high = (upper >= g * GROUP) & (upper < (g + 1) * GROUP) & (upper < DIM)
            in_low = in_low[None, :]
            in_high = in_high[None, :]
            if FORMAT == "int4":
                least = tl.minimum(
                    tl.min(tl.where(in_low, low, float("inf")), 1),
                    tl.min(tl.where(in_high, high, float("inf")), 1),
                )
                zero = fp16_at_most(least)
                tl.store(zeros_ptr + rows * GROUPS + g, zero, mask=there)
                low = tl.where(in_low, low - zero.to(tl.float32)[:, None], low)
                high = tl.where(in_high, high - zero.to(tl.float32)[:, None], high)
                most = tl.maximum(
                    tl.max(tl.where(in_low, low, 0.0), 1), tl.max(tl.where(in_high, high, 0.0), 1)
                )
            else:
                most = tl.maximum(
                    tl.max(tl.where(in_low, tl.abs(low), 0.0), 1),
                    tl.max(tl.where(in_high, tl.abs(high), 0.0), 1),
                )
            scale = fp16_scale(tl.div_rn(most, tl.full(most.shape, LARGEST, tl.float32)))
            tl.store(scales_ptr + rows * GROUPS + g, scale, mask=there)
            by = scale.to(tl.float32)[:, None]
            low = tl.where(in_low, tl.div_rn(low, tl.broadcast_to(by, low.shape)), low)
            high = tl.where(in_high, tl.div_rn(high, tl.broadcast_to(by, high.shape)), high)
        if FORMAT == "int4":
            low = tl.minimum(tl.maximum(round_to_integer(low), 0.0), 15.0).to(tl.uint8)
            high = tl.minimum(tl.maximum(round_to_integer(high), 0.0), 15.0).to(tl.uint8)
            at = codes_ptr + rows[:, None] * HALF + channel[None, :]
            tl.store(at, low | (high << 4), mask=inside)
        elif FORMAT == "fp8":
            low = tl.minimum(tl.maximum(low, -LARGEST), LARGEST)
            high = tl.minimum(tl.maximum(high, -LARGEST), LARGEST)
            tl.store(at, to_e4m3(low), mask=inside)
            tl.store(at + HALF, to_e4m3(high), mask=inside)
        else:
            low = tl.minimum(tl.maximum(low, -LARGEST), LARGEST)
            high = tl.minimum(tl.maximum(high, -LARGEST), LARGEST)
            tl.store(at, round_to_integer(low).to(tl.int8), mask=inside)
            tl.store(at + HALF, round_to_integer(high).to(tl.int8), mask=inside)
