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
from pdlab.sampling.processors import LogitsProcessor


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
        ranked = sort_descending(probabilities)
        before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
        wanted = column([d.params.top_p for d in drawers], before)
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
    """Keeps the tokens whose surprise -log p is nearest to the distribution's entropy."""

    name = "typical_p"

    def applies_to(self, drawer: Drawer) -> bool:
        return not drawer.params.greedy and drawer.params.typical_p < 1

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        surprise = -logits.log_softmax(dim=-1)
        probabilities = (-surprise).exp()
        entropy = (probabilities * surprise).nan_to_num_(0.0).sum(dim=-1, keepdim=True)
        distance = (surprise - entropy).abs()
        nearest, order = distance.sort(dim=-1)
        ranked = probabilities.gather(1, order)
        before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
        wanted = column([d.params.typical_p for d in drawers], before)
        num_kept = (before < wanted).sum(dim=-1, keepdim=True).clamp_(min=1)
        farthest = nearest.gather(1, num_kept - 1)
        return logits.masked_fill_(distance > farthest, -torch.inf)


def cut_below(logits: Tensor, lowest: Tensor) -> Tensor:
    """Set what is below `lowest`, [num_rows, 1], to -inf."""
    return logits.masked_fill_(logits < lowest, -torch.inf)


def sort_descending(values: Tensor) -> Tensor:
    """Each row sorted. On a CPU by numpy, which is several times faster and needs no indices."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return values.sort(dim=-1, descending=True).values


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """One number a row, [num_rows, 1]."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
