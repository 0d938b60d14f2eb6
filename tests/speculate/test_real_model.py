"""On the real model: sampled output has the target's distribution, whatever was drafted."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace

import torch

from pdlab import Engine, EngineConfig, NaiveGenerator, SamplingParams
from pdlab.sampling import Draft, run_chain
from tests.sampling.drawers import drawer

PROMPT = "The best thing about a cat is that"
RUNS, SAMPLES = 15, 32
PARAMS = SamplingParams(temperature=1.4, top_k=3, max_tokens=3, n=SAMPLES)
Pairs = dict[tuple[int, int], float]


@dataclass(eq=False)
class Even:
    """Draws each of some tokens as often as the others."""

    token_ids: list[int]
    vocab_size: int
    rng: random.Random

    def make(self, model, config):
        return self

    def propose(self, sequences, limits):
        q = torch.zeros(1, self.vocab_size)
        q[0, self.token_ids] = 1 / len(self.token_ids)
        return [Draft([self.rng.choice(self.token_ids)], q).cut(limit) for limit in limits]

    def learn(self, outcomes, draft_s, step_s):
        pass

    def forget(self, sequence):
        pass

    def close(self):
        pass


def test_the_first_two_tokens_have_the_targets_distribution(smollm2):
    """The second is drafted, from another one. 8 degrees of freedom: above 26.1 once in 1,000."""
    expected = {pair: RUNS * SAMPLES * p for pair, p in pairs(smollm2).items()}
    guesses = sorted({second for _, second in expected})
    config = EngineConfig(
        speculation=Even(guesses, smollm2.config.vocab_size, random.Random(4)),
        max_num_seqs=SAMPLES,
    )
    counts: Counter[tuple[int, int]] = Counter()
    drafted = accepted = 0
    with Engine(smollm2, config) as engine:
        for seed in range(RUNS):
            [output] = engine.generate([PROMPT], replace(PARAMS, seed=seed))
            for each in output.completions:
                counts[each.token_ids[0], each.token_ids[1]] += 1
                drafted += each.metrics.num_draft_tokens
                accepted += each.metrics.num_accepted_tokens
    assert drafted == RUNS * SAMPLES
    assert 0.1 * drafted < accepted < 0.9 * drafted, "some drafts stand, and some do not"
    assert set(counts) <= set(expected)
    assert chi_square(counts, expected) < 26.1
    even = dict.fromkeys(expected, RUNS * SAMPLES / len(expected))
    assert chi_square(counts, even) > 26.1, "it could not fail"


def pairs(model) -> Pairs:
    """How probable each pair is, by the model's logits and the chain alone."""
    prompt_ids = model.tokenizer.encode(PROMPT)
    return {
        (a, b): p * q
        for a, p in distribution(model, prompt_ids).items()
        for b, q in distribution(model, [*prompt_ids, a]).items()
    }


def distribution(model, token_ids: list[int]) -> dict[int, float]:
    logits = NaiveGenerator(model).logits(token_ids)[-1:]
    kept = run_chain(logits, [drawer(PARAMS)]).logits[0].double().softmax(-1)
    return {int(i): float(kept[i]) for i in torch.nonzero(kept)[:, 0]}


def chi_square(counts: Counter, expected: Pairs) -> float:
    return sum((counts[pair] - n) ** 2 / n for pair, n in expected.items())
