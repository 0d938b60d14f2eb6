"""What every link of the chain is: a change to the logits of some rows of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from pdlab.sampling.matcher import Drawer


class LogitsProcessor(ABC):
    """One link of the chain.

    To write your own, give it a `name` and `process`, and pass it in
    `SamplingParams.logits_processors`. It must depend on nothing but its arguments: a sequence may
    be preempted, and a step may be computed twice.
    """

    name: str = ""

    def applies_to(self, drawer: Drawer) -> bool:
        """Whether this sequence's row is to be processed."""
        return True

    @abstractmethod
    def process(self, logits: Tensor, drawers: Sequence[Drawer]) -> Tensor:
        """New logits for the rows that this applies to, all of them together.

        Args:
            logits: float32 [len(drawers), vocab_size]; may be changed in place.
            drawers: the sequences of these rows.

        Returns:
            a tensor of the same shape; -inf stands for a token that must not be drawn.
        """


def column(values: Sequence[float], like: Tensor) -> Tensor:
    """One number a row, [num_rows, 1]."""
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
