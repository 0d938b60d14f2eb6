"""From logits to tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from pdlab.sampling.chain import run_chain
from pdlab.sampling.matcher import Drawer
from pdlab.trace import Candidate

if TYPE_CHECKING:
    from pdlab_kernels.cpu.survey import Survey

    SurveyRows = Callable[[Tensor, int], Survey]


class Logprob(NamedTuple):
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """How probable a token was in the model's own distribution, before any parameter changed it."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token."""
    top: list[Logprob]
    """The most probable tokens, as many as were asked for."""


@dataclass(frozen=True)
class Sampled:
    """A token drawn for one sequence, its probability, and the most probable ones beside it.

    The probabilities are those of the draw: after the whole chain. A greedy choice draws from
    nothing; its probabilities are those at temperature 1.
    """

    token_id: int
    probability: float
    top: list[Candidate]
    num_allowed: int | None = None
    """Tokens that could have been drawn; None where nobody counted."""
    logprobs: TokenLogprobs | None = None
    proposed: float | None = None
    """The probability of the token that was proposed in its place, if one was."""


class Proposal(NamedTuple):
    """A token that somebody else named for a row."""

    token_id: int
    probabilities: Tensor | None = None
    """The distribution that it was drawn from, float32 [vocab_size]; None if it was chosen."""


NO_PROPOSALS: Mapping[int, Proposal] = {}


class Sampler:
    """Draws a token for each row, by its own sequence's parameters.

    A draw depends on the sequence's tokens, its seed and on how many tokens it has put out, and on
    nothing else: not on its neighbours, and not on whether it was preempted in between.
    """

    def __init__(self, top_k_recorded: int, survey: SurveyRows | None = None):
        """`survey` finds the most probable tokens of each row; None for torch's own way."""
        self.top_k_recorded = top_k_recorded
        self._survey = survey

    def sample(
        self,
        logits: Tensor,
        drawers: Sequence[Drawer],
        proposals: Mapping[int, Proposal] = NO_PROPOSALS,
    ) -> list[Sampled | ValueError]:
        """logits: [len(drawers), vocab_size]. A row that nothing can be drawn from gives an error.

        A row keeps the token that was drawn for it elsewhere as often as its own distribution
        allows; see `keep`. One that was chosen changes nothing.

        It costs one pass for the probabilities, one for their sums, and what the rows ask for; a
        `survey` does both where all rows are greedy. Its probabilities may differ from torch's in
        their last bits.
        """
        processed, errors = run_chain(logits, drawers)
        if self._survey and all(drawer.params.greedy for drawer in drawers):
            token_ids, chosen, top, num_allowed = self._best(processed)
        else:
            probabilities = processed.softmax(dim=-1)
            token_ids = draw(probabilities, drawers)
            keep(token_ids, probabilities, drawers, proposals)
            if any(greedy := [drawer.params.greedy for drawer in drawers]):
                best = processed.argmax(dim=-1)
                token_ids = torch.where(torch.tensor(greedy, device=best.device), best, token_ids)
            chosen = probabilities.gather(1, token_ids[:, None])[:, 0].tolist()
            top = most_probable(probabilities, self.top_k_recorded)
            num_allowed = (processed > -torch.inf).sum(dim=-1).tolist()
        logprobs = _logprobs(logits, token_ids, drawers)
        proposed = {
            row: chosen[row] * math.exp(processed[row, named] - processed[row, token_ids[row]])
            for row, (named, _) in proposals.items()
        }
        results: list[Sampled | ValueError] = []
        for row, drawer in enumerate(drawers):
            if chosen[row] > 0:
                sampled = Sampled(
                    int(token_ids[row]),
                    chosen[row],
                    top[row],
                    num_allowed[row],
                    logprobs[row],
                    proposed.get(row),
                )
                results.append(errors.get(row, sampled))
            else:  # NaN too
                results.append(errors.get(row) or _why_nothing(drawer, processed[row]))
        return results

    def _best(self, logits: Tensor) -> tuple[Tensor, list[float], list[list[Candidate]], list[int]]:
        """The best token of each row, its probability, those beside it, and how many may be."""
        assert self._survey
        k = min(self.top_k_recorded, logits.shape[-1])
        found = self._survey(logits, max(1, k))
        top = _candidates(found.token_ids[:, :k].tolist(), found.probabilities[:, :k].tolist())
        best = torch.from_numpy(found.token_ids[:, 0].copy())
        return best, found.probabilities[:, 0].tolist(), top, found.num_allowed.tolist()


def draw(probabilities: Tensor, drawers: Sequence[Drawer]) -> Tensor:
    """A token for each row of [num_rows, vocab_size]: that in whose share of 0..1 a dart lands.

    Tokens lie side by side in the order of their ids, each as wide as its probability. The dart's
    place is the only random number (inverse transform sampling), and the same on every device.
    """
    edges = probabilities.cumsum(dim=-1, dtype=torch.float64)
    darts = [uniform(drawer.seed, drawer.num_output_tokens) for drawer in drawers]
    places = torch.tensor(darts, dtype=torch.float64, device=edges.device)[:, None] * edges[:, -1:]
    return torch.searchsorted(edges, places, right=True)[:, 0].clamp_(max=edges.shape[-1] - 1)


COIN = 0x2545F4914F6CDD1D
"""Makes of a request's seed another one: what decides whether a proposal stands must not depend on
the number that draws the token in its place."""


def keep(
    token_ids: Tensor,
    probabilities: Tensor,
    drawers: Sequence[Drawer],
    proposals: Mapping[int, Proposal],
) -> None:
    """Put tokens that were drawn before into `token_ids` [num_rows], as often as p, each row's
    distribution, allows.

    x from q stands with probability min(1, p(x) / q(x)). Where it does not, the token is drawn from
    max(0, p - q), so that both ways together give p (Leviathan et al. 2023, appendix A.1).
    """
    for row, (proposed, q) in proposals.items():
        if q is None:
            continue
        p, drawer = probabilities[row], drawers[row]
        coin = uniform(drawer.seed ^ COIN, drawer.num_output_tokens)
        if coin * float(q[proposed]) < float(p[proposed]):
            token_ids[row] = proposed
            continue
        rest = (p - q.to(p)).clamp_(min=0)
        if rest.any():  # or p and q are the same but for rounding
            token_ids[row] = draw(rest[None], [drawer])[0]


def most_probable(probabilities: Tensor, k: int) -> list[list[Candidate]]:
    """The `k` most probable tokens of each row, and their probabilities."""
    top = probabilities.topk(min(k, probabilities.shape[-1]), dim=-1)
    return _candidates(top.indices.tolist(), top.values.tolist())


def _candidates(token_ids: list[list[int]], values: list[list[float]]) -> list[list[Candidate]]:
    return [
        [Candidate(*pair) for pair in zip(*row, strict=True)]
        for row in zip(token_ids, values, strict=True)
    ]


def logprobs_of(logits: Tensor, token_ids: Tensor, k: int) -> list[TokenLogprobs]:
    """How probable some tokens are.

    Args:
        logits: [num_rows, vocab_size].
        token_ids: the token asked about in each row, [num_rows].
        k: most probable tokens to name beside it.
    """
    logits = logits.float()
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, token_ids[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    top = logits.topk(min(k, logits.shape[-1]), dim=-1)
    rows = zip(
        token_ids.tolist(),
        (own - total)[:, 0].tolist(),
        ranks.tolist(),
        top.indices.tolist(),
        (top.values - total).tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(token_id, logprob, rank, list(map(Logprob, ids, values)))
        for token_id, logprob, rank, ids, values in rows
    ]


def _logprobs(
    logits: Tensor, token_ids: Tensor, drawers: Sequence[Drawer]
) -> list[TokenLogprobs | None]:
    """Of those rows that asked for them."""
    results: list[TokenLogprobs | None] = [None] * len(drawers)
    wanted = {i: k for i, d in enumerate(drawers) if (k := d.params.logprobs) is not None}
    if wanted:
        rows = torch.tensor(list(wanted), device=logits.device)
        found = logprobs_of(logits[rows], token_ids[rows], max(wanted.values()))
        for (row, k), each in zip(wanted.items(), found, strict=True):
            results[row] = TokenLogprobs(each.token_id, each.logprob, each.rank, each.top[:k])
    return results


def _why_nothing(drawer: Drawer, logits: Tensor) -> ValueError:
    """A row without a probability above 0: all is forbidden, or the model computed no numbers."""
    after = f"after {drawer.num_output_tokens} tokens"
    if not (logits == -torch.inf).all():
        return ValueError(f"the model's logits are not numbers {after}")
    params = drawer.params
    given = [name for name in ("bad_words", "logits_processors") if getattr(params, name)]
    given += [params.constraint_name] if params.constraint_name else []
    if drawer.num_output_tokens < params.min_tokens:
        given.append(f"min_tokens={params.min_tokens}")
    if drawer.constraint and drawer.constraint.problem:
        given.append(drawer.constraint.problem)
    return ValueError(f"no token is allowed {after}: " + " and ".join(given) + " leave none")


def uniform(seed: int, index: int) -> float:
    """Draw number `index` of a seed: a number from 0 up to, but not 1, in steps of 2^-53."""
    return (mix(seed, index) >> 10) * 2.0**-53


def mix(seed: int, index: int) -> int:
    """A 63-bit seed for draw number `index` (the SplitMix64 finalizer, Steele et al. 2014)."""
    x = (seed + (index + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) >> 1
