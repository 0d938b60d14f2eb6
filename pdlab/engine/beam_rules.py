"""Which continuations a beam search follows, which it keeps as finished, and when it ends.

Knows log probabilities and tokens; no model, no cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Continuation:
    """A beam's place among the beams and one more token."""

    parent: int
    token_id: int
    logprob: float
    sum_logprob: float


def best_continuations(logits: Tensor, sums: list[float], count: int) -> list[Continuation]:
    """The likeliest continuations of all beams together, the best first.

    Sums are float64: long texts have large ones, in which close logits would fall together. Of
    equal ones, that of the earlier beam comes first, then that with the lower token id.

    Args:
        logits: float32 [num_beams, vocab_size].
        sums: log probability of each beam so far.
        count: how many are wanted; there are fewer in a small vocabulary.

    Raises:
        ValueError: the logits are not numbers.
    """
    log_probs = logits.double().log_softmax(dim=-1)
    totals = (log_probs + torch.tensor(sums, device=logits.device)[:, None]).flatten()
    if totals.isnan().any():
        raise ValueError("the model's logits are NaN: there is no likeliest continuation")
    worst = totals.topk(min(count, len(totals))).values[-1]
    good = ((totals >= worst) & totals.isfinite()).nonzero()[:, 0]
    best = good[totals[good].sort(descending=True, stable=True).indices[:count]]
    vocab_size = logits.shape[-1]
    columns = zip(
        best.tolist(), log_probs.flatten()[best].tolist(), totals[best].tolist(), strict=True
    )
    return [Continuation(i // vocab_size, i % vocab_size, one, total) for i, one, total in columns]


@dataclass
class BeamRules:
    """What counts as finished, what is kept of it, and when nothing better is to be expected.

    Scores divide the sum of log probabilities by `length ** length_penalty` (Wu et al. 2016,
    section 7, in the simpler form of transformers): above 0 favours long texts, below 0 short ones.

    Args:
        beam_width: beams that go on, and hypotheses that are kept.
        max_tokens: length at which every beam ends.
        early_stopping: True ends when as many hypotheses as beams are there; False, when the best
            beam, taken at its present length, scores no better than the worst of them; "never",
            when it could not even at the length that suits it best.
        end_ids: tokens that end a text.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    end_ids: frozenset[int] = frozenset()
    kept: list[tuple[float, list[int], float]] = field(default_factory=list)
    """(score, token ids, sum of log probabilities), the best first."""

    @property
    def num_candidates(self) -> int:
        """Continuations to look at: so many that `beam_width` are left when all others end."""
        return max(2, 1 + len(self.end_ids)) * self.beam_width

    def score(self, sum_logprob: float, num_tokens: int) -> float:
        return sum_logprob / num_tokens**self.length_penalty

    def split(
        self, best: list[Continuation], num_tokens: int
    ) -> tuple[list[Continuation], list[Continuation]]:
        """Those that go on, and those that end, with texts of `num_tokens` tokens.

        An end counts only if it is among the best `beam_width`.
        """
        ends = [num_tokens >= self.max_tokens or c.token_id in self.end_ids for c in best]
        going = [c for c, end in zip(best, ends, strict=True) if not end]
        width = self.beam_width
        ended = [c for c, end in zip(best[:width], ends[:width], strict=True) if end]
        return going[:width], ended

    def keep(self, texts: list[tuple[list[int], float]]) -> None:
        """Take finished texts, (token ids, sum of log probabilities), among the best."""
        scored = [(self.score(total, len(ids)), ids, total) for ids, total in texts]
        self.kept = sorted(self.kept + scored, key=lambda k: -k[0])[: self.beam_width]

    def is_over(self, going: list[Continuation], num_tokens: int) -> bool:
        """Whether to end with these beams, of `num_tokens` tokens each, the best first."""
        if not going:
            return True
        if len(self.kept) < self.beam_width:
            return False
        if self.early_stopping is True:
            return True
        grows = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_tokens if grows else num_tokens
        return self.score(going[0].sum_logprob, length) <= self.kept[-1][0]
