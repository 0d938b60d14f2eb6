"""The kernels in plain torch: what they must compute, and what runs where they cannot."""

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear as torch_linear

from .weights import GROUP, Weight, unpack

if TYPE_CHECKING:
    from .team import Team


def quantize_groups(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int8 codes [rows, width], scales and sums [rows, width / 32] of x float32 [rows, width]."""
    groups = x.view(len(x), -1, GROUP)
    most = groups.abs().amax(dim=2, keepdim=True)
    codes = torch.round(groups * _inverse(127.0, most))
    scales = most.squeeze(2) / 127.0 + (groups * 0).sum(dim=2)
    return codes.to(torch.int8).view_as(x), scales, scales * codes.sum(dim=2)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int16 codes [rows, width] and scales [rows] of x float32 [rows, width]."""
    most = x.abs().amax(dim=1, keepdim=True)
    codes = torch.round(x * _inverse(32767.0, most))
    return codes.to(torch.int16), most.squeeze(1) / 32767.0 + (x * 0).sum(dim=1)


def rounded(x: torch.Tensor, weight: Weight, planes: int = 2) -> torch.Tensor:
    """The activations as the product with a weight of this format sees them."""
    if weight.format == "fp32":
        return x
    if weight.format != "int4":
        codes, scales = quantize_rows(x)
        return codes * scales[:, None]
    seen = torch.zeros_like(x)
    for _ in range(planes):
        codes, scales, _ = quantize_groups(x)
        plane = (codes.view(len(x), -1, GROUP) * scales[..., None]).view_as(x)
        seen, x = seen + plane, x - plane
    return seen


def linear(
    x: torch.Tensor, weight: Weight, team: "Team | None" = None, *, planes: int = 2
) -> torch.Tensor:
    """y = x W^T, float32 [rows, out], of x float32 [rows, in]; `team` is not used."""
    return torch_linear(rounded(x, weight, planes), unpack(weight))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, along the last axis."""
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * weight


def silu_multiply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate / (1 + e^-gate) * up"""
    return torch.nn.functional.silu(gate) * up


def _inverse(limit: float, most: torch.Tensor) -> torch.Tensor:
    # a Python number over a tensor would be a product with the reciprocal, rounded twice
    return torch.where(most > 1e-30, torch.full_like(most, limit) / most, torch.zeros_like(most))
