"""Links that forbid tokens: what must not, not yet, or cannot come next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdlab.sampling.matcher import Drawer
from pdlab.sampling.processors import LogitsProcessor

Mask = npt.NDArray[np.bool_]


class BadWords(LogitsProcessor):
    """Forbids the tokens that would complete a text, or a sequence of tokens, that is not wanted.

    A text is looked for in what the tokens spell, so it cannot come in by another spelling: "cat"
    forbids " cat", "cats", and "at" after "c".
    """

    name = "bad_words"

    def applies_to(self, drawer: Drawer) -> bool:
        return bool(drawer.params.bad_words)

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        allowed = np.ones(logits.shape, dtype=np.bool_)
        for row, drawer in zip(allowed, drawers, strict=True):
            if drawer.bad_words:
                row &= drawer.bad_words.allowed()
            row[_completing(drawer)] = False
        return _forbid(logits, ~allowed)


class MinTokens(LogitsProcessor):
    """Forbids the tokens that would end the text before it has `min_tokens`."""

    name = "min_tokens"

    def applies_to(self, drawer: Drawer) -> bool:
        return drawer.num_output_tokens < drawer.params.min_tokens and bool(drawer.stop_ids)

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        forbidden = np.zeros(logits.shape, dtype=np.bool_)
        for row, drawer in zip(forbidden, drawers, strict=True):
            row[list(drawer.stop_ids)] = True
        return _forbid(logits, forbidden)


class Constraint(LogitsProcessor):
    """Forbids what a schema, an expression, a choice or a grammar does not allow next.

    Tokens that end the text are allowed where it may end, however many a model has.
    """

    name = "constraint"

    def applies_to(self, drawer: Drawer) -> bool:
        return drawer.constraint is not None

    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        allowed = np.zeros(logits.shape, dtype=np.bool_)
        for row, drawer in zip(allowed, drawers, strict=True):
            assert drawer.constraint is not None
            row[:] = drawer.constraint.allowed()
            if drawer.constraint.may_end and drawer.num_output_tokens >= drawer.params.min_tokens:
                row[list(drawer.stop_ids)] = True
        return _forbid(logits, ~allowed)


def _completing(drawer: Drawer) -> list[int]:
    """The tokens that would complete one of the unwanted sequences of tokens."""
    output_ids = drawer.output_ids
    sequences = [word for word in drawer.params.bad_words if isinstance(word, tuple)]
    return [
        last for *first, last in sequences if output_ids[len(output_ids) - len(first) :] == first
    ]


def _forbid(logits: Tensor, forbidden: Mask) -> Tensor:
    return logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), -torch.inf)
