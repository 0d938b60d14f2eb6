"""From logits to tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdlab.engine.sequence import Sequence
from pdlab.trace import Candidate


@dataclass(frozen=True)
class Sampled:
    """A token drawn for one sequence, its probability, and the most probable ones beside it.

    The probabilities are those of the draw: after temperature. A greedy choice draws from nothing;
    its probabilities are the model's own, at temperature 1.
    """

    token_id: int
    probability: float
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
        temperatures = [1.0 if s.params.greedy else s.params.temperature for s in sequences]
        divisors = torch.tensor(temperatures, device=logits.device)[:, None]
        probabilities = (logits / divisors).softmax(dim=-1)
        token_ids = logits.argmax(dim=-1)
        for row, sequence in enumerate(sequences):
            if not sequence.params.greedy:
                token_ids[row] = _draw(probabilities[row], sequence)
        chosen = probabilities.gather(1, token_ids[:, None])[:, 0].tolist()
        top = probabilities.topk(min(self.top_k_recorded, logits.shape[-1]), dim=-1)
        candidates = [
            [Candidate(*pair) for pair in zip(ids, values, strict=True)]
            for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
        ]
        return list(map(Sampled, token_ids.tolist(), chosen, candidates))


def _draw(probabilities: Tensor, sequence: Sequence) -> Tensor:
    """One draw from a distribution, [vocab_size], by a race of exponential clocks.

    If clock i rings after Exp(1) / p_i, token i rings first with probability p_i.
    """
    generator = torch.Generator().manual_seed(mix(sequence.seed, sequence.num_output_tokens))
    clocks = torch.empty(probabilities.shape[-1]).exponential_(generator=generator)
    return (probabilities / clocks.to(probabilities.device)).argmax()


def mix(seed: int, index: int) -> int:
    """A 63-bit seed for draw number `index` (the SplitMix64 finalizer, Steele et al. 2014)."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1
