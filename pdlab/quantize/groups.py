"""Scale and minimum of a group of 32 weights, so that 16 codes come closest to it.

The range from smallest to largest weight cut in 15 steps is where the search begins. A range that
cuts off an outlier may serve the other 31 better: so narrower and wider ones are tried, and of each
the scale and minimum that fit its codes best are taken, by weighted least squares, as in the
k-quants of llama.cpp (`make_qkx3_quants`). What is kept is the best after rounding to float16. So
the search never does worse than it began, and a group that lies on such a grid already stays there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST_CODE = 15
STRETCHES = (-1.6, -1.2, -0.8, -0.4, 0.4, 0.8)
"""What is added to the 15 steps that the range is cut in: fewer steps cut off less than none."""
CHUNK = 8192
"""Groups that are worked on at once: what they need stays in the processor's cache."""


class Grid(NamedTuple):
    """Scales and minima of groups, [num_groups], float32 values that float16 holds exactly."""

    scale: Tensor
    minimum: Tensor

    def codes(self, groups: Tensor) -> Tensor:
        """The nearest codes, as floats, of weights [num_groups, 32]."""
        inverse = torch.where(self.scale == 0, 0.0, 1 / self.scale)
        return ((groups - self.minimum[:, None]) * inverse[:, None]).round_().clamp_(0, 15)

    def values(self, codes: Tensor) -> Tensor:
        """What codes stand for."""
        return codes * self.scale[:, None] + self.minimum[:, None]

    def error(self, groups: Tensor, importance: Tensor) -> Tensor:
        """Weighted sum of squared errors of each group."""
        return ((groups - self.values(self.codes(groups))).square_() * importance).sum(dim=1)


def nearest_grid(groups: Tensor) -> Grid:
    """The range of each group, float32 [num_groups, 32], cut in 15 steps."""
    minimum = _half(groups.amin(dim=1))
    scale = (groups.amax(dim=1) - minimum).clamp_min_(0) / LARGEST_CODE
    return Grid(_half(scale), minimum)


def fitted_grid(groups: Tensor, importance: Tensor) -> Grid:
    """The grid with the least squared error that the search finds, weighted by `importance`.

    Args:
        groups: float32 [num_groups, 32].
        importance: of each of the 32 inputs, > 0.
    """
    found = [_fitted(part, importance.expand_as(part)) for part in groups.split(CHUNK)]
    return Grid(*(torch.cat(column) for column in zip(*found, strict=True)))


def _fitted(groups: Tensor, importance: Tensor) -> Grid:
    best = nearest_grid(groups)
    least = best.error(groups, importance)
    rest = least.nonzero()[:, 0]
    if not len(rest):
        return best
    scale, minimum = best.scale.clone(), best.minimum.clone()
    groups, importance, least = groups[rest], importance[rest], least[rest]
    low, high = groups.aminmax(dim=1)
    for stretch in STRETCHES:
        step = (high - low) / (LARGEST_CODE + stretch)
        grid = _least_squares(Grid(step, low).codes(groups), groups, importance)
        error = grid.error(groups, importance)
        better = error < least  # also false where a sum is no number
        least = torch.where(better, error, least)
        scale[rest[better]], minimum[rest[better]] = grid.scale[better], grid.minimum[better]
    return Grid(scale, minimum)


def _least_squares(codes: Tensor, groups: Tensor, importance: Tensor) -> Grid:
    """Scale and minimum with the least weighted squared error for these codes."""
    total = importance.sum(dim=1)
    weighted = importance * codes
    code, square = weighted.sum(dim=1), (weighted * codes).sum(dim=1)
    value, product = (importance * groups).sum(dim=1), (weighted * groups).sum(dim=1)
    scale = (total * product - code * value) / (total * square - code * code)
    return Grid(_half(scale), _half((value - scale * code) / total))


def _half(values: Tensor) -> Tensor:
    """Rounded to float16."""
    return values.half().float()
