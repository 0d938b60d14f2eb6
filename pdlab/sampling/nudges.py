"""Links that move the logits of single tokens: biases and penalties."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

import torch
from torch import Tensor

from pdlab.sampling.matcher import Drawer
from pdlab.sampling.processors import LogitsProcessor


class LogitBias(LogitsProcessor):
    """Adds a number to the logits of single tokens."""

    name = "logit_bias"

    def applies_to(self, drawer: Drawer) -> bool:
        return bool(drawer.params.logit_bias)

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        biases = [drawer.params.logit_bias for drawer in drawers]
        cells = _cells(biases, logits)
        values = list(chain.from_iterable(bias.values() for bias in biases))
        logits.view(-1)[cells] += torch.tensor(values, device=logits.device)
        return logits


class RepetitionPenalty(LogitsProcessor):
    """Makes tokens of the prompt and of the output less likely, once, however often they came.

    Positive logits are divided and negative ones multiplied: dividing a negative logit by more than
    1 would move it up (Keskar et al. 2019, CTRL, section 4.1, has no sign; its users added it).
    """

    name = "repetition_penalty"

    def applies_to(self, drawer: Drawer) -> bool:
        return drawer.params.repetition_penalty != 1

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        cells = _cells([{*d.prompt_ids, *d.output_ids} for d in drawers], logits)
        penalties = _column([d.params.repetition_penalty for d in drawers], logits)
        penalty = penalties[cells // logits.shape[-1], 0]
        before = logits.view(-1)[cells]
        logits.view(-1)[cells] = torch.where(before > 0, before / penalty, before * penalty)
        return logits


class FrequencyPenalty(LogitsProcessor):
    """Subtracts from a token's logit for each time that it stands in the output."""

    name = "frequency_penalty"

    def applies_to(self, drawer: Drawer) -> bool:
        return drawer.params.frequency_penalty != 0 and drawer.num_output_tokens > 0

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        cells, counts = _cells([d.output_ids for d in drawers], logits).unique(return_counts=True)
        penalties = _column([d.params.frequency_penalty for d in drawers], logits)
        logits.view(-1)[cells] -= penalties[cells // logits.shape[-1], 0] * counts
        return logits


class PresencePenalty(LogitsProcessor):
    """Subtracts from a token's logit, once, if it stands in the output."""

    name = "presence_penalty"

    def applies_to(self, drawer: Drawer) -> bool:
        return drawer.params.presence_penalty != 0 and drawer.num_output_tokens > 0

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        cells = _cells([set(d.output_ids) for d in drawers], logits)
        penalties = _column([d.params.presence_penalty for d in drawers], logits)
        logits.view(-1)[cells] -= penalties[cells // logits.shape[-1], 0]
        return logits


def _cells(token_ids: Sequence[Collection[int]], logits: Tensor) -> Tensor:
    """Where each row's tokens stand in the flattened logits."""
    width = logits.shape[-1]
    flat = [row * width + token for row, several in enumerate(token_ids) for token in several]
    return torch.tensor(flat, dtype=torch.long, device=logits.device)


def _column(values: Sequence[float], logits: Tensor) -> Tensor:
    """One number a row, [num_rows, 1]."""
    return torch.tensor(values, dtype=logits.dtype, device=logits.device)[:, None]
