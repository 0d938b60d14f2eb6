"""Links that move the logits of single tokens: biases and penalties."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from pdlab.sampling.matcher import Drawer
from pdlab.sampling.processors import LogitsProcessor, column


class LogitBias(LogitsProcessor):
    """Adds a number to the logits of single tokens."""

    name = "logit_bias"

    def applies_to(self, drawer: Drawer) -> bool:
        return bool(drawer.params.logit_bias)

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        biases = [drawer.params.logit_bias for drawer in drawers]
        width = logits.shape[-1]
        cells = [row * width + token for row, bias in enumerate(biases) for token in bias]
        values = list(chain.from_iterable(bias.values() for bias in biases))
        logits.view(-1)[torch.tensor(cells, device=logits.device)] += torch.tensor(
            values, dtype=logits.dtype, device=logits.device
        )
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
        seen = _seen(logits, drawers, [d.params.repetition_penalty for d in drawers])
        before = logits.view(-1)[seen.cells]
        after = torch.where(before > 0, before / seen.penalties, before * seen.penalties)
        logits.view(-1)[seen.cells] = after
        return logits


class FrequencyPenalty(LogitsProcessor):
    """Subtracts from a token's logit for each time that it stands in the output."""

    name = "frequency_penalty"

    def applies_to(self, drawer: Drawer) -> bool:
        return drawer.params.frequency_penalty != 0 and drawer.num_output_tokens > 0

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        seen = _seen(logits, drawers, [d.params.frequency_penalty for d in drawers])
        logits.view(-1)[seen.cells] -= seen.penalties * seen.counts
        return logits


class PresencePenalty(LogitsProcessor):
    """Subtracts from a token's logit, once, if it stands in the output."""

    name = "presence_penalty"

    def applies_to(self, drawer: Drawer) -> bool:
        return drawer.params.presence_penalty != 0 and drawer.num_output_tokens > 0

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        seen = _seen(logits, drawers, [d.params.presence_penalty for d in drawers])
        logits.view(-1)[seen.cells] -= seen.penalties * (seen.counts > 0)
        return logits


class _Seen(NamedTuple):
    """All tokens that the sequences of a batch have seen, one after the other."""

    cells: Tensor
    """Where they stand in the flattened logits."""
    counts: Tensor
    """How often each stands in its output."""
    penalties: Tensor
    """That of its sequence."""


def _seen(logits: Tensor, drawers: Sequence[Drawer], penalties: list[float]) -> _Seen:
    tallies = [drawer.tally for drawer in drawers]
    for tally, drawer in zip(tallies, drawers, strict=True):
        tally.sync(drawer.token_ids)
    rows = torch.repeat_interleave(torch.tensor([len(tally.token_ids) for tally in tallies]))
    cells = rows * logits.shape[-1] + torch.cat([tally.token_ids for tally in tallies])
    return _Seen(
        cells.to(logits.device),
        torch.cat([tally.counts for tally in tallies]).to(logits.device),
        column(penalties, logits)[rows.to(logits.device), 0],
    )
