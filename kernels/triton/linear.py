"""Matrix products with weights read in 8 or 4 bits, for the few rows of a decode step.

A decode step reads every weight once for a handful of rows, so its time is that of the weights'
bytes: int8 halves it, int4 quarters it. The weights become the activations' dtype in registers, on
the way to the tensor cores (W8A16, W4A16; Dettmers et al. 2022, LLM.int8, keeps outliers apart,
which is not done here).

    int8   w[n, k] = codes[n, k] * scales[n], or * scales[n, k // 32] (GGUF's Q8_0)
    int4   w[n, k] = codes[n, k] * scales[n, k // 32] + minima[n, k // 32]

int4 is GGUF's Q4_1, its parts in tensors of their own (Q4_0 is it with minimum = -8 * scale): byte
16 g + j of a row holds k = 32 g + j in its low and k = 32 g + j + 16 in its high four bits.

With few output columns there are too few programs to keep the memory busy; then K is split over
several, and a second kernel adds their sums up, always in the same order.
"""

from __future__ import annotations

from typing import Any

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
    num_sms,
    power_of_2,
    require,
)

GROUP = 32
MAX_SPLITS = 16
HALF_GROUP = tl.constexpr(GROUP // 2)


@triton.jit
def store_sums(sums, out_ptr, partial_ptr, bias_ptr, m, n, split, M, N, SPLITS: tl.constexpr):
    """To the output, with the bias; or, of a part of K, to where `add_splits_kernel` reads."""
    inside = (m < M)[:, None] & (n < N)[None, :]
    if SPLITS == 1:
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, sums.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        at = partial_ptr + (split * M + m).to(tl.int64)[:, None] * N + n[None, :]
        tl.store(at, sums, mask=inside)


@triton.jit(do_not_specialize=["M"])
def int8_linear_kernel(
    out_ptr, partial_ptr, x_ptr, x_stride, codes_ptr, scales_ptr, bias_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Program (a, b, s): columns of tile a, rows of tile b, part s of K."""
    GROUPS: tl.constexpr = BLOCK_K // (2 * HALF_GROUP)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    num_steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_steps, SPLITS)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(split * share, tl.minimum((split + 1) * share, num_steps)):
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :],
            mask=(m < M)[:, None] & (k < K)[None, :], other=0.0,
        )  # fmt: skip
        codes = tl.load(
            codes_ptr + n.to(tl.int64)[:, None] * K + k[None, :],
            mask=(n < N)[:, None] & (k < K)[None, :], other=0,
        )  # fmt: skip
        if GROUPED:
            group = step * GROUPS + tl.arange(0, GROUPS)
            at = n.to(tl.int64)[:, None] * (K // (2 * HALF_GROUP)) + group[None, :]
            there = (n < N)[:, None] & (group < K // (2 * HALF_GROUP))[None, :]
            scales = tl.load(scales_ptr + at, mask=there, other=0.0).to(tl.float32)[:, :, None]
            values = tl.reshape(codes, (BLOCK_N, GROUPS, 2 * HALF_GROUP)).to(tl.float32) * scales
            weight = tl.reshape(values, (BLOCK_N, BLOCK_K)).to(x.dtype)
        else:
            weight = codes.to(x.dtype)
        sums = tl.dot(x, tl.trans(weight), sums, input_precision=PRECISION)
    if not GROUPED:
        sums *= tl.load(scales_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    store_sums(sums, out_ptr, partial_ptr, bias_ptr, m, n, split, M, N, SPLITS)


@triton.jit(do_not_specialize=["M"])
def int4_linear_kernel(
    out_ptr, partial_ptr, x_ptr, x_stride, codes_ptr, scales_ptr, minima_ptr, bias_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (a, b, s): columns of tile a, rows of tile b, part s of K."""
    BYTES: tl.constexpr = BLOCK_K // 2
    GROUPS: tl.constexpr = BYTES // HALF_GROUP
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    split = tl.program_id(2)
    row = n.to(tl.int64)[:, None]
    num_steps = tl.cdiv(K, BLOCK_K)
    share = tl.cdiv(num_steps, SPLITS)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(split * share, tl.minimum((split + 1) * share, num_steps)):
        byte = step * BYTES + tl.arange(0, BYTES)
        k = byte // HALF_GROUP * (2 * HALF_GROUP) + byte % HALF_GROUP
        x_at = x_ptr + m.to(tl.int64)[:, None] * x_stride + k[None, :]
        x_inside = (m < M)[:, None] & (k < K)[None, :]
        x_low = tl.load(x_at, mask=x_inside, other=0.0)
        x_high = tl.load(x_at + HALF_GROUP, mask=x_inside, other=0.0)
        codes = tl.load(
            codes_ptr + row * (K // 2) + byte[None, :],
            mask=(n < N)[:, None] & (k < K)[None, :], other=0,
        )  # fmt: skip
        group = step * GROUPS + tl.arange(0, GROUPS)
        at = row * (K // (2 * HALF_GROUP)) + group[None, :]
        there = (n < N)[:, None] & (group < K // (2 * HALF_GROUP))[None, :]
        scales = tl.load(scales_ptr + at, mask=there, other=0.0).to(tl.float32)[:, :, None]
        minima = tl.load(minima_ptr + at, mask=there, other=0.0).to(tl.float32)[:, :, None]
        codes = tl.reshape(codes, (BLOCK_N, GROUPS, HALF_GROUP))
        low = (codes & 15).to(tl.float32) * scales + minima
        high = (codes >> 4).to(tl.float32) * scales + minima
        low = tl.reshape(low, (BLOCK_N, BYTES)).to(x_low.dtype)
        high = tl.reshape(high, (BLOCK_N, BYTES)).to(x_low.dtype)
        sums = tl.dot(x_low, tl.trans(low), sums, input_precision=PRECISION)
        sums = tl.dot(x_high, tl.trans(high), sums, input_precision=PRECISION)
    store_sums(sums, out_ptr, partial_ptr, bias_ptr, m, n, split, M, N, SPLITS)


@triton.jit(do_not_specialize=["M"])
def add_splits_kernel(
    out_ptr, partial_ptr, bias_ptr, M, N, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (m, t): BLOCK columns of row m."""
    m = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        sums += tl.load(partial_ptr + (split * M + m) * N + n, mask=n < N, other=0.0)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * N + n, sums.to(out_ptr.dtype.element_ty), mask=n < N)


def int8_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """x W^T + b with int8 weights, one scale an output row, or one for 32 of its weights.

    Args:
        x: [num_rows, size_in], fp32, fp16 or bf16; rows may be strided.
        codes: int8 [size_out, size_in].
        scales: fp32 or fp16 [size_out]; or [size_out, size_in / 32], if 32 divides size_in.
        bias: [size_out], dtype of x.
        num_splits: parts of K that are summed apart; None chooses.

    Returns:
        [num_rows, size_out], dtype of x.

    Raises:
        ValueError: for what the kernel cannot do.
    """
    out, launches = plan_int8_linear(x, codes, scales, bias, num_splits=num_splits)
    for launch in launches:
        launch.run()
    return out


def int4_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    minima: Tensor,
    bias: Tensor | None = None,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """x W^T + b with int4 weights in groups of 32, each with a scale and a minimum.

    Args:
        x: [num_rows, size_in], fp32, fp16 or bf16; rows may be strided. 32 divides size_in.
        codes: uint8 [size_out, size_in / 2], two a byte as above.
        scales, minima: fp16 or fp32 [size_out, size_in / 32].
        bias: [size_out], dtype of x.
        num_splits: parts of K that are summed apart; None chooses.

    Returns:
        [num_rows, size_out], dtype of x.

    Raises:
        ValueError: for what the kernel cannot do.
    """
    out, launches = plan_int4_linear(x, codes, scales, minima, bias, num_splits=num_splits)
    for launch in launches:
        launch.run()
    return out


def plan_int8_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    num_splits: int | None = None,
) -> tuple[Tensor, list[Launch]]:
    """The result's tensor, and the launches that fill it; see `int8_linear`."""
    check_shape("codes", codes, None, None)
    size_out, size_in = codes.shape
    _check(x, size_out, size_in, bias, codes=codes, scales=scales)
    require(codes.dtype == torch.int8, f"codes have dtype {codes.dtype}, must be int8")
    grouped = scales.dim() == 2
    require(
        not grouped or size_in % GROUP == 0, f"size_in={size_in}, must be a multiple of {GROUP}"
    )
    check_shape("scales", scales, size_out, *([size_in // GROUP] if grouped else []))
    weights = {"codes_ptr": codes, "scales_ptr": scales}
    constants = {"GROUPED": grouped}
    return _plan(int8_linear_kernel, x, size_out, weights, bias, num_splits, constants)


def plan_int4_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    minima: Tensor,
    bias: Tensor | None = None,
    *,
    num_splits: int | None = None,
) -> tuple[Tensor, list[Launch]]:
    """The result's tensor, and the launches that fill it; see `int4_linear`."""
    check_shape("codes", codes, None, None)
    size_out, size_in = codes.shape[0], 2 * codes.shape[1]
    require(size_in % GROUP == 0, f"size_in={size_in}, must be a multiple of {GROUP}")
    _check(x, size_out, size_in, bias, codes=codes, scales=scales, minima=minima)
    require(codes.dtype == torch.uint8, f"codes have dtype {codes.dtype}, must be uint8")
    check_shape("scales", scales, size_out, size_in // GROUP)
    check_shape("minima", minima, size_out, size_in // GROUP)
    require(scales.dtype == minima.dtype, "scales and minima have different dtypes")
    weights = {"codes_ptr": codes, "scales_ptr": scales, "minima_ptr": minima}
    return _plan(int4_linear_kernel, x, size_out, weights, bias, num_splits, {})


def _check(x: Tensor, size_out: int, size_in: int, bias: Tensor | None, **weights: Tensor) -> None:
    check_float(x=x, bias=bias)
    check_shape("x", x, None, size_in)
    require(size_in > 0 and size_out > 0, f"weights are empty: [{size_out}, {size_in}]")
    check_rows(x=x)
    check_contiguous(bias=bias, **weights)
    for name in ("scales", "minima"):
        if name in weights:
            dtype = weights[name].dtype
            require(
                dtype in (torch.float32, torch.float16),
                f"{name} have dtype {dtype}, must be float32 or float16",
            )
    if bias is not None:
        check_shape("bias", bias, size_out)
    check_tensors(x=x, bias=bias, **weights)


def _plan(
    kernel: Any,
    x: Tensor,
    size_out: int,
    weights: dict[str, Tensor],
    bias: Tensor | None,
    num_splits: int | None,
    more: dict[str, Any],
) -> tuple[Tensor, list[Launch]]:
    num_rows, size_in = x.shape
    fp32 = x.dtype == torch.float32
    block_m = min(64, max(16, power_of_2(num_rows)))
    block_n, block_k = (32, 64) if fp32 else (32, 256) if block_m == 16 else (64, 128)
    tiles = ceil_div(size_out, block_n) * ceil_div(num_rows, block_m)
    if num_splits is None:
        # Two programs a multiprocessor, but no part of K of fewer than four steps.
        wanted = ceil_div(2 * num_sms(x.device), max(1, tiles))
        most = max(1, min(MAX_SPLITS, size_in // (4 * block_k)))
        num_splits = min(power_of_2(wanted), 1 << (most.bit_length() - 1))
    require(1 <= num_splits <= MAX_SPLITS, f"num_splits={num_splits}, must be 1 to {MAX_SPLITS}")
    out = torch.empty((num_rows, size_out), dtype=x.dtype, device=x.device)
    partial = None
    if num_splits > 1:
        shape = (num_splits, num_rows, size_out)
        partial = torch.empty(shape, dtype=torch.float32, device=x.device)
    args = {
        "out_ptr": out,
        "partial_ptr": partial,
        "x_ptr": x,
        "x_stride": x.stride(0),
        **weights,
        "bias_ptr": bias,
        "M": num_rows,
        "N": size_out,
        "K": size_in,
    }
    constants = {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "SPLITS": num_splits,
        "PRECISION": "ieee" if fp32 else "tf32",
        **more,
    }
    grid = (ceil_div(size_out, block_n), ceil_div(num_rows, block_m), num_splits)
    stages = 1 if fp32 else 3
    launches = [Launch(kernel, grid, args, constants, num_warps=4, num_stages=stages)]
    if num_splits > 1:
        block = min(1024, power_of_2(size_out))
        names = ("out_ptr", "partial_ptr", "bias_ptr", "M", "N")
        launches.append(
            Launch(
                add_splits_kernel,
                (num_rows, ceil_div(size_out, block)),
                {name: args[name] for name in names},
                {"SPLITS": num_splits, "BLOCK": block},
            )
        )
    return out, launches
