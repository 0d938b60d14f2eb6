"""Drafts change how soon tokens come, and not which: the target's distribution is kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdlab import SamplingParams
from pdlab.engine.sequence import Sequence
from pdlab.sampling import Draft, Matcher, Sampled, Sampler, draw, run_chain, verify
from tests.sampling.drawers import drawer

SAMPLER = Sampler(2)
GENERATOR = torch.Generator().manual_seed(5)
TARGET = torch.randn(5, 5, generator=GENERATOR)
"""Logits of five tokens behind each of them."""
DRAFTER = TARGET + torch.randn(5, 5, generator=GENERATOR)
KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "top_p": SamplingParams(temperature=1.2, top_p=0.8),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "penalties": SamplingParams(
        temperature=1.0, frequency_penalty=0.7, presence_penalty=0.3, repetition_penalty=1.3
    ),
    "bias": SamplingParams(temperature=1.0, logit_bias={0: 1.0, 3: -2.0}),
    "stop": SamplingParams(temperature=1.0, min_tokens=2, stop_token_ids=[1]),
}


def rows_behind(token_ids: list[int], table: Tensor = TARGET) -> Tensor:
    return table[torch.tensor(token_ids)]


def plain(params: SamplingParams, seed: int, length: int, **fields) -> list[int]:
    """Tokens drawn one at a time."""
    sequence = drawer(params, seed=seed, **fields)
    while sequence.num_output_tokens < length:
        [sampled] = SAMPLER.sample(rows_behind(sequence.token_ids[-1:]), [sequence])
        assert isinstance(sampled, Sampled)
        sequence.token_ids.append(sampled.token_id)
    return sequence.output_ids


def with_drafts(
    params: SamplingParams, num_seeds: int, length: int, draft_of, **fields
) -> tuple[list[list[int]], int]:
    """Tokens of several seeds, drawn behind drafts, and how many drafts' tokens stood."""
    sequences, accepted = [drawer(params, seed=i, **fields) for i in range(num_seeds)], 0
    while pending := [s for s in sequences if s.num_output_tokens < length]:
        drafts = [draft_of(sequence) for sequence in pending]
        rows = [[s.token_ids[-1], *d.token_ids] for s, d in zip(pending, drafts, strict=True)]
        logits = rows_behind([token_id for row in rows for token_id in row])
        for sequence, verdict in zip(
            pending, verify(SAMPLER, logits, pending, drafts), strict=True
        ):
            assert verdict.error is None
            sequence.token_ids += [s.token_id for s in verdict.sampled]
            accepted += verdict.num_accepted
    return [sequence.output_ids[:length] for sequence in sequences], accepted


def chosen(sequence: Sequence) -> Draft:
    """The most probable tokens, one after the other."""
    token_ids = [sequence.token_ids[-1]]
    for _ in range(3):
        token_ids.append(int(TARGET[token_ids[-1]].argmax()))
    return Draft(token_ids[1:])


def drawn(sequence: Sequence) -> Draft:
    """From the drafter's distribution, with numbers of its own."""
    q = DRAFTER.softmax(-1)
    token_ids = [sequence.token_ids[-1]]
    for j in range(3):
        own = drawer(seed=1_000_003 * (sequence.seed + 1) + sequence.num_output_tokens + 7 * j)
        token_ids.append(int(draw(q[token_ids[-1:]], [own])[0]))
    return Draft(token_ids[1:], q[token_ids[:-1]])


@pytest.mark.parametrize("params", KINDS.values(), ids=list(KINDS))
def test_a_chosen_draft_changes_no_token(params: SamplingParams):
    outputs, stood = with_drafts(params, 40, 9, chosen, prompt=[3, 2])
    assert outputs == [plain(params, seed, 9, prompt=[3, 2]) for seed in range(40)]
    assert stood > 40


@pytest.mark.parametrize("params", list(KINDS.values())[1:], ids=list(KINDS)[1:])
def test_a_drawn_draft_keeps_the_distribution_of_every_pair(params: SamplingParams):
    """24 degrees of freedom: above 51.2 once in 1,000."""
    runs = 1200
    outputs, stood = with_drafts(params, runs, 2, drawn)
    counts = torch.zeros(5, 5, dtype=torch.float64)
    for first, second in outputs:
        counts[first, second] += 1
    expected = runs * pairs(params)
    assert 0.5 * runs < stood < 2.8 * runs, "some of three stand, and some do not"
    assert chi_square(counts, expected) < 51.2
    wrong = runs * pairs(params, DRAFTER)
    assert chi_square(counts, wrong.clamp(min=0.01)) > 51.2, "it could not fail"


def pairs(params: SamplingParams, table: Tensor = TARGET) -> Tensor:
    """How probable the first two tokens are, float64 [5, 5], by the chain alone."""
    first = distribution(params, [], table)
    return torch.stack([first[a] * distribution(params, [a], table) for a in range(5)])


def distribution(params: SamplingParams, output: list[int], table: Tensor) -> Tensor:
    sequence = drawer(params, output=output)
    logits = run_chain(rows_behind(sequence.token_ids[-1:], table), [sequence]).logits[0]
    return logits.double().softmax(-1)


def chi_square(counts: Tensor, expected: Tensor) -> float:
    seen = expected > 0
    assert counts[~seen].sum() == 0
    return float(((counts - expected) ** 2 / expected)[seen].sum())


def test_a_draft_from_the_targets_own_distribution_always_stands():
    q = TARGET.softmax(-1)
    for seed in range(200):
        sequence = drawer(SamplingParams(temperature=1.0), seed=seed)
        token_ids = [seed % 5, (seed // 5) % 5]
        rows = [1, *token_ids]
        [verdict] = verify(SAMPLER, rows_behind(rows), [sequence], [Draft(token_ids, q[rows[:-1]])])
        assert verdict.num_accepted == 2
        assert [s.token_id for s in verdict.sampled[:2]] == token_ids


def test_a_token_that_is_not_allowed_never_stands():
    """However sure the drafter was, and the token after it is drawn from what is left."""
    params = SamplingParams(temperature=1.0, top_k=1)
    q = torch.eye(5)
    for token_id in range(5):
        [verdict] = verify(
            SAMPLER, TARGET[[1, token_id]], [drawer(params)], [Draft([token_id], q[[token_id]])]
        )
        best = int(TARGET[1].argmax())
        assert verdict.sampled[0].token_id == best
        assert verdict.num_accepted == (token_id == best)


class OnlyRising(Matcher):
    """Each output token must be greater than the one before it."""

    def __init__(self, last: int = -1):
        self.last, self.taken = last, 0

    def sync(self, output_ids):
        for token_id in output_ids[self.taken :]:
            if token_id <= self.last:
                raise ValueError(f"{token_id} does not rise")
            self.last, self.taken = token_id, self.taken + 1

    def allowed(self):
        return (torch.arange(5) > self.last).numpy()

    may_end = is_over = False

    def fork(self):
        copy = OnlyRising(self.last)
        copy.taken = self.taken
        return copy


@pytest.mark.parametrize("draft_of", [chosen, drawn])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_constraint_looks_at_the_tokens_of_the_draft(draft_of, temperature):
    params = SamplingParams(temperature=temperature, json_schema={})
    for seed in range(60):
        draft = draft_of(drawer(params, seed=seed))
        sequence = drawer(params, seed=seed, constraint=OnlyRising())
        if temperature == 0:
            draft = Draft(draft.token_ids)
        logits = rows_behind([1, *draft.token_ids])
        [verdict] = verify(SAMPLER, logits, [sequence], [draft])
        token_ids = [s.token_id for s in verdict.sampled]
        assert token_ids == sorted(set(token_ids))
        assert sequence.constraint.taken == 0, "what was tried ahead is not taken"


def test_what_goes_wrong_behind_the_first_token_is_left_for_the_next_step():
    logits = TARGET[[1, 1]].clone()
    logits[1] = torch.nan
    best = int(TARGET[1].argmax())
    [verdict] = verify(SAMPLER, logits, [drawer(SamplingParams())], [Draft([best])])
    assert [s.token_id for s in verdict.sampled] == [best]
    assert verdict.error is None
    logits[0] = torch.nan
    [verdict] = verify(SAMPLER, logits, [drawer(SamplingParams())], [Draft([best])])
    assert verdict.sampled == []
    assert "not numbers" in str(verdict.error)


def test_several_sequences_with_drafts_of_several_lengths():
    """Each as alone, whoever stands beside it."""
    sequences = [drawer(KINDS[name], seed=i) for i, name in enumerate(KINDS)]
    drafts = [chosen(s).cut(i % 4) for i, s in enumerate(sequences)]
    rows = [rows_behind([1, *draft.token_ids]) for draft in drafts]
    together = verify(SAMPLER, torch.cat(rows), sequences, drafts)
    for each, sequence, draft, verdict in zip(rows, sequences, drafts, together, strict=True):
        [alone] = verify(SAMPLER, each, [sequence], [draft])
        assert [s.token_id for s in alone.sampled] == [s.token_id for s in verdict.sampled]
        looked_at = [s.proposed for s in verdict.sampled if s.proposed is not None]
        assert len(looked_at) == min(len(verdict.sampled), len(draft))


def test_the_probability_of_a_proposed_token_is_told():
    params = SamplingParams(temperature=0.5)
    [verdict] = verify(SAMPLER, TARGET[[1, 0]], [drawer(params)], [Draft([0])])
    assert verdict.sampled[0].proposed == pytest.approx(float((TARGET[1] / 0.5).softmax(-1)[0]))
