"""What stands between the matrix products: residual add with norm, and the gated MLP's product.

Unfused, each is three to five passes over the hidden state; here each value is read and written
once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import (
    Launch,
    ceil_div,
    check_contiguous,
    check_float,
    check_rows,
    check_shape,
    check_tensors,
    power_of_2,
    require,
)

MAX_HIDDEN_SIZE = 16384


@triton.jit
def add_rms_norm_kernel(
    out_ptr, sum_ptr, x_ptr, x_stride, residual_ptr, weight_ptr, eps,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program i: row i, held in registers as a whole."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    inside = at < SIZE
    x = tl.load(x_ptr + i * x_stride + at, mask=inside, other=0.0)
    if residual_ptr is not None:
        x = (x + tl.load(residual_ptr + i * SIZE + at, mask=inside, other=0.0)).to(x.dtype)
        tl.store(sum_ptr + i * SIZE + at, x, mask=inside)
    x = x.to(tl.float32)
    mean_square = tl.sum(x * x, 0) / SIZE
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    out = x * tl.rsqrt(mean_square + eps) * weight
    tl.store(out_ptr + i * SIZE + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and norm the sum (Zhang and Sennrich 2019).

    Args:
        x: [num_tokens, hidden_size], fp32, fp16 or bf16; rows may be strided.
        residual: likewise, contiguous; None: x is normed alone.
        weight: [hidden_size], same dtype.
        eps: added to the mean square.

    Returns:
        (normed, sum), both [num_tokens, hidden_size]; sum is x itself where there is no residual.

    Raises:
        ValueError: for what the kernel cannot do.
    """
    normed, total, launch = plan_add_rms_norm(x, residual, weight, eps)
    launch.run()
    return normed, total


def plan_add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Launch]:
    """The results' tensors, and the launch that fills them; see `add_rms_norm`."""
    check_shape("x", x, None, None)
    num_tokens, size = x.shape
    require(1 <= size <= MAX_HIDDEN_SIZE, f"hidden_size={size}, must be 1 to {MAX_HIDDEN_SIZE}")
    check_rows(x=x)
    check_float(x=x, residual=residual, weight=weight)
    check_shape("weight", weight, size)
    if residual is not None:
        check_shape("residual", residual, num_tokens, size)
    check_contiguous(residual=residual, weight=weight)
    check_tensors(x=x, residual=residual, weight=weight)
    normed = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    args = {
        "out_ptr": normed,
        "sum_ptr": None if residual is None else total,
        "x_ptr": x,
        "x_stride": x.stride(0),
        "residual_ptr": residual,
        "weight_ptr": weight,
        "eps": float(eps),
    }
    padded = power_of_2(size)
    warps = min(16, max(1, padded // 512))
    constants = {"SIZE": size, "PADDED": padded}
    launch = Launch(add_rms_norm_kernel, (num_tokens,), args, constants, num_warps=warps)
    return normed, total, launch


@triton.jit
def silu_mul_kernel(out_ptr, x_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Program (i, t): BLOCK values of row i."""
    i = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < SIZE
    gate = tl.load(x_ptr + i * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + i * x_stride + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + i * SIZE + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a gated MLP (Shazeer 2020, SwiGLU), computed in fp32.

    Args:
        gate_up: [num_tokens, 2 * size], gate first; fp32, fp16 or bf16; rows may be strided.

    Returns:
        [num_tokens, size].

    Raises:
        ValueError: for what the kernel cannot do.
    """
    out, launch = plan_silu_mul(gate_up)
    launch.run()
    return out


def plan_silu_mul(gate_up: Tensor) -> tuple[Tensor, Launch]:
    """The result's tensor, and the launch that fills it; see `silu_mul`."""
    check_float(gate_up=gate_up)
    check_shape("gate_up", gate_up, None, None)
    num_tokens, width = gate_up.shape
    require(width % 2 == 0 and width > 0, f"gate_up has {width} columns, must be even")
    check_rows(gate_up=gate_up)
    check_tensors(gate_up=gate_up)
    size = width // 2
    out = torch.empty((num_tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(2048, power_of_2(size))
    args = {"out_ptr": out, "x_ptr": gate_up, "x_stride": gate_up.stride(0)}
    constants = {"SIZE": size, "BLOCK": block}
    grid = (num_tokens, ceil_div(size, block))
    return out, Launch(silu_mul_kernel, grid, args, constants, num_warps=4)
