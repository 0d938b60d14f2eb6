"""From logits to tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdlab.engine.sequence import Sequence
from pdlab.trace import Candidate


@dataclass(frozen=True)
class Sampled:
    """A token drawn for one sequence, and the most probable ones it was drawn among."""

    token_id: int
    top: list[Candidate]


class Sampler:
    """Greedy or temperature sampling, each row by its own sequence's parameters.

    A draw depends on the sequence's seed and on how many tokens it has put out, and on nothing
    else: not on its neighbours, and not on whether it was preempted in between.
    """

    def __init__(self, top_k_recorded: int):
        self.top_k_recorded = top_k_recorded

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        """logits: float32 [len(sequences), vocab_size]."""
        probabilities = logits.softmax(dim=-1)
        token_ids = logits.argmax(dim=-1).tolist()
        for row, sequence in enumerate(sequences):
            if not sequence.params.greedy:
                token_ids[row] = _draw(logits[row], sequence)
        top = probabilities.topk(min(self.top_k_recorded, logits.shape[-1]), dim=-1)
        values, indices = top.values.tolist(), top.indices.tolist()
        return [
            Sampled(token_id, [Candidate(*pair) for pair in zip(ids, ps, strict=True)])
            for token_id, ids, ps in zip(token_ids, indices, values, strict=True)
        ]


def _draw(logits: Tensor, sequence: Sequence) -> int:
    """One draw from softmax(logits / temperature), by a race of exponential clocks.

    If clock i rings after Exp(1) / p_i, token i rings first with probability p_i.
    """
    probabilities = (logits / sequence.params.temperature).softmax(dim=-1)
    generator = torch.Generator().manual_seed(_mix(sequence.seed, sequence.num_output_tokens))
    clocks = torch.empty(logits.shape[-1]).exponential_(generator=generator)
    return int((probabilities / clocks.to(logits.device)).argmax())


def _mix(seed: int, index: int) -> int:
    """A 63-bit seed for draw number `index` (the SplitMix64 finalizer, Steele et al. 2014)."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1
