"""GPTQ (Frantar et al. 2023): the weights that come later make up for the rounding so far.

What counts is not how far a weight W is off, but the product x W^T. Its expected squared error is
tr(E H E^T) for an error E = W' - W and the second moments H = E[x^T x] of what goes in. Inputs are
rounded one after the other, and the error of each is at once taken out of those not yet rounded, as
far as they often go together with it in H.
"""

from __future__ import annotations

import torch
from pdlab_kernels.cpu.weights import GROUP
from torch import Tensor

from pdlab.quantize.groups import Grid, fitted_grid

DAMPING = 0.01
"""Part of the mean of H's diagonal that is added to it, so that it can be inverted."""


def gptq(weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0..15 [out, in], scales and minima [out, in / 32] of a weight [out, in], float32.

    A group's scale and minimum are found when its turn comes (see `groups`), each input weighted
    with its own moment.

    Args:
        moments: H, [in, in].
    """
    inputs = weight.shape[1]
    steps = _compensation(moments)
    importance = moments.diagonal().clamp_min(1e-12 * float(moments.diagonal().max()) or 1.0)
    rest = weight.T.clone(memory_format=torch.contiguous_format)  # an input is a row, [in, out]
    codes = torch.empty_like(rest)
    grids = []
    for start in range(0, inputs, GROUP):
        end = start + GROUP
        group = rest[start:end]
        grid = fitted_grid(group.T.contiguous(), importance[start:end])
        errors = _round_group(group, grid, steps[start:end, start:end], codes[start:end])
        rest[end:].addmm_(steps[start:end, end:].T, errors, alpha=-1)
        grids.append(grid)
    scales, minima = (torch.stack(each, dim=1) for each in zip(*grids, strict=True))
    return codes.T.contiguous(), scales, minima


def _round_group(group: Tensor, grid: Grid, steps: Tensor, codes: Tensor) -> Tensor:
    """Round 32 inputs [32, out], each after the last one's error; returns their errors."""
    errors = torch.empty_like(group)
    inverse = torch.where(grid.scale == 0, 0.0, 1 / grid.scale)
    for i, values in enumerate(group):
        code = ((values - grid.minimum) * inverse).round_().clamp_(0, 15)
        errors[i] = (values - (code * grid.scale + grid.minimum)) / steps[i, i]
        codes[i] = code
        group[i + 1 :].addr_(steps[i, i + 1 :], errors[i], alpha=-1)
    return errors


def _compensation(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse of H: row i tells how input i's error spreads."""
    damped = moments.double()
    mean = float(damped.diagonal().mean())
    damped = damped + (DAMPING * mean or 1.0) * torch.eye(len(damped), dtype=torch.float64)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
