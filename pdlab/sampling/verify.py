"""Speculative decoding's half of the draw: which drafted tokens the target would have drawn.

A drafter guesses what follows; the model computes logits behind each guess in one step, and here is
decided how many of the guesses stand. The output has the target's own distribution in both cases:

chosen  The draft was chosen, not drawn (greedy, or looked up). The target draws at each place as it
        would have done without a draft, with the same random number, and goes on as long as it
        draws what was drafted. So the output is that of plain decoding, token for token, at every
        temperature. A draft of this kind is a point mass q, and the chance to stand is p(x), which
        is the most that rejection sampling could give: min(1, p(x) / q(x)) with q(x) = 1.
drawn   The draft was drawn from a distribution q. A token x stands with probability
        min(1, p(x) / q(x)); else the next token is drawn from max(0, p - q), normalized (Leviathan
        et al. 2023, section 2.3 and appendix A.1; Chen et al. 2023, algorithm 2).

p is what comes out of the whole chain: temperature, filters, penalties, constraints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from pdlab.sampling.matcher import Drawer, Matcher
from pdlab.sampling.params import SamplingParams
from pdlab.sampling.sampler import Proposal, Sampled, Sampler
from pdlab.sampling.tally import Tally


@dataclass(frozen=True, eq=False)
class Draft:
    """Tokens that are expected to follow a sequence."""

    token_ids: list[int]
    probabilities: Tensor | None = None
    """The distributions they were drawn from, float32 [len(token_ids), vocab_size]; None for a
    draft that was chosen, not drawn."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, length: int) -> Draft:
        """Its first `length` tokens."""
        if length >= len(self):
            return self
        q = self.probabilities
        return Draft(self.token_ids[:length], None if q is None else q[:length])


NO_DRAFT = Draft([])


@dataclass(frozen=True)
class Verdict:
    """What became of a draft."""

    sampled: list[Sampled]
    """The draft tokens that stand, and one more that the target drew behind them. Empty where the
    target could draw nothing at the first place."""
    error: ValueError | None
    """Why it could not."""

    @property
    def num_accepted(self) -> int:
        return max(0, len(self.sampled) - 1)


def verify(
    sampler: Sampler, logits: Tensor, drawers: Sequence[Drawer], drafts: Sequence[Draft]
) -> list[Verdict]:
    """Draw from logits that were computed behind drafts.

    Args:
        logits: [sum(1 + len(draft)), vocab_size]: for each drawer the row behind its newest token,
            then one behind each token of its draft.
    """
    rows: list[Drawer] = []
    proposals: dict[int, Proposal] = {}
    for drawer, draft in zip(drawers, drafts, strict=True):
        q = None if drawer.params.greedy else draft.probabilities
        for j, token_id in enumerate(draft.token_ids):
            proposals[len(rows) + j] = Proposal(token_id, None if q is None else q[j])
        rows.append(drawer)
        rows += [_Ahead(drawer, draft.token_ids[: j + 1]) for j in range(len(draft))]
    drawn = iter(sampler.sample(logits, rows, proposals))
    verdicts = []
    for draft in drafts:
        results = [next(drawn) for _ in range(1 + len(draft))]
        verdicts.append(_judge(draft.token_ids, results))
    return verdicts


def _judge(drafted: list[int], results: list[Sampled | ValueError]) -> Verdict:
    """The tokens up to the first that is not the drafted one.

    What goes wrong behind a token that stands is not reported: if that is where the sequence goes,
    it goes wrong again in the next step.
    """
    sampled: list[Sampled] = []
    for result, guess in zip(results, [*drafted, None], strict=True):
        if isinstance(result, ValueError):
            return Verdict(sampled, None if sampled else result)
        sampled.append(result)
        if result.token_id != guess:
            break
    return Verdict(sampled, None)


class _Ahead:
    """A drawer as it will be when some draft tokens stand."""

    def __init__(self, drawer: Drawer, draft_ids: list[int]):
        self._drawer = drawer
        self._draft_ids = draft_ids

    @property
    def params(self) -> SamplingParams:
        return self._drawer.params

    @property
    def seed(self) -> int:
        return self._drawer.seed

    @property
    def prompt_ids(self) -> list[int]:
        return self._drawer.prompt_ids

    @property
    def token_ids(self) -> list[int]:
        return self._drawer.token_ids + self._draft_ids

    @property
    def output_ids(self) -> list[int]:
        return self._drawer.output_ids + self._draft_ids

    @property
    def num_output_tokens(self) -> int:
        return self._drawer.num_output_tokens + len(self._draft_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._drawer.stop_ids

    @cached_property
    def tally(self) -> Tally:
        return self._drawer.tally.fork()

    @cached_property
    def bad_words(self) -> Matcher | None:
        return self._drawer.bad_words and self._drawer.bad_words.fork()

    @cached_property
    def constraint(self) -> Matcher | None:
        return self._drawer.constraint and self._drawer.constraint.fork()
