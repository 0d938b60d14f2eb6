"""From logits to a token without a sort: temperature, top-k, top-p, min-p and the draw, fused.

What a filter keeps is all that lies at or above a threshold, so it is the threshold that is looked
for, by bisection: each pass over a row asks how many values (top-k) or how much probability (top-p)
lie at or above the middle. A pass also finds the row's own values next to the middle, and the
bounds move to these, so it ends, after some 10 to 20 passes, at the exact value that a sort would
give, ties kept (Park et al. 2024, Qrita, and FlashInfer's samplers search likewise). A row of
logits stays in the L2 cache meanwhile.

Order and meaning are those of pdlab's chain: temperature, top_k, top_p on what top_k left, min_p.
Probability is added up in float64, as there.

The draw takes one of two kinds of chance:

    uniforms   a number in [0, 1) for each row: the token in whose share of 0..1 it lands, tokens
               lying side by side in the order of their ids (inverse transform; pdlab's own draw)
    seeds      a seed for each row: the token with the greatest logit + Gumbel noise (Gumbel 1954;
               one pass less, and no sum). Noise comes from Philox (Salmon et al. 2011) by token id.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import (
    FLOATS,
    Launch,
    check_integers,
    check_rows,
    check_shape,
    check_tensors,
    power_of_2,
    require,
)

MAX_BLOCK = 4096


@triton.jit
def load_scaled(row_ptr, at, V, temperature):
    """Logits over temperature, -inf behind the last."""
    x = tl.load(row_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x, tl.zeros_like(x) + temperature)


@triton.jit
def lowest_kept(row_ptr, V, temperature, low, high, wanted, best,
                BY_MASS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The greatest value of a row such that those at or above it reach `wanted`.

    Args:
        low, high: values of the row; those at or above `low` reach what is wanted.
        wanted: float64; how many, or with BY_MASS how much of exp(value - best).
    """
    while low < high:
        middle = tl.minimum(low + (high - low) * 0.5, high)
        middle = tl.where(middle <= low, high, middle)
        reached = tl.zeros([BLOCK], tl.float64)
        above = tl.full([BLOCK], float("inf"), tl.float32)
        below = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, V, BLOCK):
            x = load_scaled(row_ptr, start + tl.arange(0, BLOCK), V, temperature)
            if BY_MASS:
                reached += tl.where(x >= middle, tl.exp(x - best), 0.0).to(tl.float64)
            else:
                reached += (x >= middle).to(tl.float64)
            above = tl.minimum(above, tl.where(x >= middle, x, float("inf")))
            below = tl.maximum(below, tl.where(x < middle, x, float("-inf")))
        enough = tl.sum(reached, 0) >= wanted
        low = tl.where(enough, tl.min(above, 0), low)
        high = tl.where(enough, high, tl.max(below, 0))
    return low


@triton.jit
def mass_from(row_ptr, V, temperature, lowest, best, BLOCK: tl.constexpr):
    """Sum of exp(value - best) over the values at or above `lowest`, float64."""
    mass = tl.zeros([BLOCK], tl.float64)
    for start in range(0, V, BLOCK):
        x = load_scaled(row_ptr, start + tl.arange(0, BLOCK), V, temperature)
        mass += tl.where(x >= lowest, tl.exp(x - best), 0.0).to(tl.float64)
    return tl.sum(mass, 0)


@triton.jit
def sample_kernel(
    out_ptr, logits_ptr, stride, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    uniforms_ptr, seeds_ptr, V, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program i: row i."""
    i = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + i * stride
    temperature = tl.load(temperature_ptr + i)
    greedy = temperature <= 0.0
    temperature = tl.where(greedy, 1.0, temperature)

    best = float("-inf")
    least = float("inf")
    token = -1
    broken = 0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = load_scaled(row_ptr, at, V, temperature)
        broken = tl.maximum(broken, tl.max((x != x).to(tl.int32), 0))
        top, place = tl.max(x, 0, return_indices=True)
        token = tl.where(top > best, start + place, token).to(tl.int32)
        best = tl.maximum(best, top)
        least = tl.minimum(least, tl.min(tl.where(x > float("-inf"), x, float("inf")), 0))
    usable = (broken == 0) & (best > float("-inf")) & (best < float("inf"))

    if usable & (greedy == 0):
        lowest = least
        top_k = tl.load(top_k_ptr + i).to(tl.int32)
        if (top_k > 0) & (top_k < V):
            lowest = lowest_kept(
                row_ptr, V, temperature, lowest, best, top_k.to(tl.float64), best, False, BLOCK
            )
        top_p = tl.load(top_p_ptr + i)
        if top_p < 1.0:
            wanted = mass_from(row_ptr, V, temperature, lowest, best, BLOCK)
            wanted *= top_p.to(tl.float64)
            lowest = lowest_kept(row_ptr, V, temperature, lowest, best, wanted, best, True, BLOCK)
        if min_p_ptr is not None:
            lowest = tl.maximum(lowest, best + tl.log(tl.load(min_p_ptr + i)))
        if seeds_ptr is not None:
            seed = tl.load(seeds_ptr + i)
            highest = float("-inf")
            for start in range(0, V, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = load_scaled(row_ptr, at, V, temperature)
                noise = -tl.log(-tl.log(tl.maximum(tl.rand(seed, at), 1e-30)))
                x = tl.where(x >= lowest, x + noise, float("-inf"))
                top, place = tl.max(x, 0, return_indices=True)
                token = tl.where(top > highest, start + place, token).to(tl.int32)
                highest = tl.maximum(highest, top)
        else:
            mass = mass_from(row_ptr, V, temperature, lowest, best, BLOCK)
            dart = tl.load(uniforms_ptr + i) * mass
            before = mass * 0.0
            passed = 0
            last = 0
            for start in range(0, V, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = load_scaled(row_ptr, at, V, temperature)
                share = tl.where(x >= lowest, tl.exp(x - best), 0.0).to(tl.float64)
                edge = before + tl.cumsum(share, 0)
                passed += tl.sum(((edge <= dart) & (at < V)).to(tl.int32), 0)
                last = tl.maximum(last, tl.max(tl.where(share > 0.0, at, 0), 0))
                before += tl.sum(share, 0)
            token = tl.minimum(passed, last)
    tl.store(out_ptr + i, tl.where(usable, token, -1).to(tl.int64))


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
    """A token for each row.

    Args:
        logits: [num_rows, vocab_size], fp32, fp16 or bf16; rows may be strided. -inf for forbidden.
        temperature: fp32 [num_rows]; 0 takes the greatest logit, of equal ones the first.
        top_k: int32 or int64 [num_rows]; 0 keeps all.
        top_p: fp32 [num_rows], above 0; 1 or more keeps all.
        min_p: fp32 [num_rows], 0 to 1; part of the best token's probability.
        uniforms: fp64 [num_rows], in [0, 1); or
        seeds: int64 [num_rows]. One of the two; for greedy rows it does not matter.

    Returns:
        int64 [num_rows]; -1 for a row in which nothing can be drawn (all -inf; NaN; +inf).

    Raises:
        ValueError: for what the kernel cannot do.
    """
    out, launch = plan_sample(
        logits, temperature, top_k, top_p, min_p, uniforms=uniforms, seeds=seeds
    )
    launch.run()
    return out


def plan_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor | None = None,
    *,
    uniforms: Tensor | None = None,
    seeds: Tensor | None = None,
) -> tuple[Tensor, Launch]:
    """The result's tensor, and the launch that fills it; see `sample`."""
    check_shape("logits", logits, None, None)
    num_rows, vocab_size = logits.shape
    require(logits.dtype in FLOATS, f"logits have dtype {logits.dtype}, not one of {FLOATS}")
    require(vocab_size > 0, "logits have no columns")
    check_rows(logits=logits)
    require(
        (uniforms is None) != (seeds is None), "give one of uniforms and seeds, not both or none"
    )
    check_integers(top_k=top_k)
    for name, tensor, dtype in (
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, top_k.dtype),
        ("top_p", top_p, torch.float32),
        ("min_p", min_p, torch.float32),
        ("uniforms", uniforms, torch.float64),
        ("seeds", seeds, torch.int64),
    ):
        if tensor is not None:
            require(tensor.dtype == dtype, f"{name} has dtype {tensor.dtype}, must be {dtype}")
            check_shape(name, tensor, num_rows)
            require(tensor.is_contiguous(), f"{name} is not contiguous")
    check_tensors(
        logits=logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        uniforms=uniforms, seeds=seeds,
    )  # fmt: skip
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    args = {
        "out_ptr": out,
        "logits_ptr": logits,
        "stride": logits.stride(0),
        "temperature_ptr": temperature,
        "top_k_ptr": top_k,
        "top_p_ptr": top_p,
        "min_p_ptr": min_p,
        "uniforms_ptr": uniforms,
        "seeds_ptr": seeds,
        "V": vocab_size,
    }
    constants = {"BLOCK": min(MAX_BLOCK, power_of_2(vocab_size))}
    return out, Launch(sample_kernel, (num_rows,), args, constants, num_warps=8)
