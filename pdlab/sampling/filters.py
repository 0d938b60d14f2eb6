"""Links that shape the distribution of a random draw: temperature, and what leaves its tail out.

A filter finds the lowest value that stays and sets what is below it to -inf. So tokens as probable
as the last that stays stay, too, and the best token always does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdlab.sampling.matcher import Drawer
from pdlab.sampling.processors import LogitsProcessor, column

LARGEST_SURPRISE = 1e4
"""Above -log p of any token that could ever be drawn."""
BISECTIONS = 40
"""Halvings that take LARGEST_SURPRISE below the spacing of float32 numbers."""


class Temperature(LogitsProcessor):
    """Divides the logits: above 1 flattens the distribution, below 1 sharpens it."""

    name = "temperature"

    def applies_to(self, drawer: Drawer) -> bool:
        return not drawer.params.greedy and drawer.params.temperature != 1

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        return logits.div_(column([d.params.temperature for d in drawers], logits))


class TopK(LogitsProcessor):
    """Keeps the k most probable tokens (Fan et al. 2018, section 5.4)."""

    name = "top_k"

    def applies_to(self, drawer: Drawer) -> bool:
        return not drawer.params.greedy and drawer.params.top_k > 0

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        places = [min(d.params.top_k, logits.shape[-1]) - 1 for d in drawers]
        best = logits.topk(max(places) + 1, dim=-1).values
        lowest = best.gather(1, torch.tensor(places, device=logits.device)[:, None])
        return cut_below(logits, lowest)


class TopP(LogitsProcessor):
    """Keeps the fewest most probable tokens that have the probability p together."""

    name = "top_p"

    def applies_to(self, drawer: Drawer) -> bool:
        return not drawer.params.greedy and drawer.params.top_p < 1

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        probabilities = logits.softmax(dim=-1)
        wanted = column([d.params.top_p for d in drawers], probabilities)
        # All tokens under (1 - p) / V have less than 1 - p together, so none of them is needed.
        likely = probabilities >= (1 - wanted) / logits.shape[-1]
        ranked = sort_rows(probabilities * likely)[:, -most_in_a_row(likely) :].flip(-1)
        before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
        # The token that reaches p is the last for which those before it have less.
        num_kept = (before < wanted).sum(dim=-1, keepdim=True).clamp_(min=1)
        lowest = ranked.gather(1, num_kept - 1)
        return logits.masked_fill_(probabilities < lowest, -torch.inf)


class MinP(LogitsProcessor):
    """Keeps tokens with at least a given part of the best token's probability."""

    name = "min_p"

    def applies_to(self, drawer: Drawer) -> bool:
        return not drawer.params.greedy and drawer.params.min_p > 0

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        # p >= part * p_best  <=>  logit >= logit_best + log(part)
        parts = column([d.params.min_p for d in drawers], logits)
        return cut_below(logits, logits.amax(dim=-1, keepdim=True) + parts.log())


class TypicalP(LogitsProcessor):
    """Keeps the tokens whose surprise -log p is nearest to the distribution's entropy.

    What stays lies within some distance of the entropy, on both sides: among the sorted surprises
    an interval, whose half width is found by bisection.
    """

    name = "typical_p"

    def applies_to(self, drawer: Drawer) -> bool:
        return not drawer.params.greedy and drawer.params.typical_p < 1

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        surprise = logits.log_softmax(dim=-1).neg_()
        parts = (-surprise).exp_().mul_(surprise)
        entropy = sum_rows(parts.nan_to_num_(0.0))
        wanted = column([max(d.params.typical_p, 1e-9) for d in drawers], surprise)
        # As for top_p, likely tokens are enough; unless the interval reaches to less likely ones.
        limit = -((1 - wanted) / logits.shape[-1]).log()
        likely = surprise <= limit
        ranked = sort_rows(torch.where(likely, surprise, torch.inf))
        ranked = ranked[:, : most_in_a_row(likely)].contiguous()
        half_width = _half_width(ranked, entropy, wanted)
        if (entropy + half_width > limit).any():
            ranked = sort_rows(surprise)
            half_width = _half_width(ranked, entropy, wanted)
        first, end = _interval(ranked, entropy, half_width)
        least, most = ranked.gather(1, first), ranked.gather(1, end - 1)
        return logits.masked_fill_((surprise < least).logical_or_(surprise > most), -torch.inf)


def _half_width(ranked: Tensor, entropy: Tensor, wanted: Tensor) -> Tensor:
    """How far around the entropy the tokens have the probability that is wanted, [num_rows, 1].

    Args:
        ranked: surprises in ascending order, [num_rows, num_tokens].
    """
    mass = torch.nn.functional.pad((-ranked).exp_().cumsum(-1, dtype=torch.float64), (1, 0))
    wanted = torch.minimum(wanted, mass[:, -1:])  # they have it all but for rounding
    narrow, wide = torch.zeros_like(wanted), torch.full_like(wanted, LARGEST_SURPRISE)
    for _ in range(BISECTIONS):
        middle = (narrow + wide) / 2
        first, end = _interval(ranked, entropy, middle)
        enough = mass.gather(1, end) - mass.gather(1, first) >= wanted
        narrow = torch.where(enough, narrow, middle)
        wide = torch.where(enough, middle, wide)
    return wide


def _interval(ranked: Tensor, center: Tensor, half_width: Tensor) -> tuple[Tensor, Tensor]:
    """The first place in a sorted row, and the one after the last, near enough to the center.

    In a row where nothing can be drawn, neither means anything, but both are in it.
    """
    first = torch.searchsorted(ranked, (center - half_width).float())
    end = torch.searchsorted(ranked, (center + half_width).float(), right=True)
    return first.clamp_(max=ranked.shape[-1] - 1), end.clamp_(min=1)


def most_in_a_row(mask: Tensor) -> int:
    """The greatest number of true values in a row; at least 1."""
    return max(1, int(mask.sum(dim=-1).max()))


def cut_below(logits: Tensor, lowest: Tensor) -> Tensor:
    """Set what is below `lowest`, [num_rows, 1], to -inf."""
    return logits.masked_fill_(logits < lowest, -torch.inf)


def sum_rows(values: Tensor) -> Tensor:
    """Each row's sum, float64 [num_rows, 1]. On a CPU by numpy: torch would add up one long row
    otherwise than one of several."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.add.reduce(values.numpy(), axis=-1, keepdims=True)).double()
    return values.sum(dim=-1, keepdim=True, dtype=torch.float64)


def sort_rows(values: Tensor) -> Tensor:
    """Each row in ascending order. On a CPU by numpy, which is several times faster."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values
