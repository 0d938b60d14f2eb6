"""Each row is sampled by its own parameters and its own seed, whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdlab import Engine, EngineConfig, NaiveGenerator, SamplingParams
from pdlab.engine.sequence import Sequence
from pdlab.sampling import Sampler
from tests.helpers import random_model, random_prompt

SEEDED = SamplingParams(temperature=1.0, seed=42, max_tokens=10)


def sequence(params: SamplingParams, seed: int = 0, num_output: int = 0) -> Sequence:
    made = Sequence("r", "r", [1], params, seed)
    made.token_ids += [0] * num_output
    return made


def draw(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    return [s.token_id for s in Sampler(0).sample(logits, sequences)]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-6])
def test_no_temperature_takes_the_best_token(temperature):
    logits = 30 * torch.randn(50, 20)
    greedy = SamplingParams(temperature=temperature)
    expected = logits.argmax(dim=-1).tolist()
    assert draw(logits, [sequence(greedy, seed=i) for i in range(50)]) == expected


@pytest.mark.parametrize("temperature", [1e-5, 1e-3])
def test_a_small_temperature_neither_overflows_nor_hesitates(temperature):
    logits = 30 * torch.randn(50, 20)
    params = SamplingParams(temperature=temperature)
    expected = logits.argmax(dim=-1).tolist()
    assert draw(logits, [sequence(params, seed=i) for i in range(50)]) == expected


def test_greedy_and_sampled_rows_in_one_batch_do_not_touch_each_other():
    logits = torch.randn(1, 20).expand(60, -1)
    kinds = [SamplingParams(temperature=t) for t in (0.0, 5.0, 1e-8)]
    rows = [sequence(kinds[i % 3], seed=i) for i in range(60)]
    tokens = draw(logits, rows)
    best = int(logits[0].argmax())
    assert {tokens[i] for i in range(60) if i % 3 != 1} == {best}
    assert len(set(tokens[1::3])) > 5
    assert tokens == [draw(logits[:1], [row])[0] for row in rows]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("varied", ["seed", "output"])
def test_tokens_follow_the_tempered_distribution(temperature, varied):
    """Chi-square over 8 tokens, 7 degrees of freedom: 24.3 is passed by chance once in 1,000.

    Draws of many requests, and draws of one request one after the other, must both be fair.
    """
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -2.0]])
    params = SamplingParams(temperature=temperature)
    count = 4000
    row = sequence(params, seed=7)
    counts = torch.zeros(8)
    for i in range(count):
        if varied == "seed":
            row.seed = i
        counts[draw(logits, [row])[0]] += 1
        if varied == "output":
            row.token_ids.append(0)
    assert chi_square(counts, logits[0] / temperature) < 24.3
    assert chi_square(counts, logits[0] / (temperature * 1.25)) > 24.3, "it could not fail"


def chi_square(counts: Tensor, scaled_logits: Tensor) -> float:
    expected = scaled_logits.softmax(dim=-1) * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, [3, 500]] = 0.0
    row = [sequence(SamplingParams(temperature=1.0), seed=i) for i in range(300)]
    assert set(draw(logits.expand(300, -1), row)) == {3, 500}


def test_recorded_candidates_are_the_best_with_their_probabilities():
    logits = torch.randn(3, 20)
    sampled = Sampler(4).sample(logits, [sequence(SamplingParams())] * 3)
    for row, mine in zip(logits.softmax(dim=-1), sampled, strict=True):
        values, indices = row.sort(descending=True)
        assert [c.token_id for c in mine.top] == indices[:4].tolist()
        assert [c.probability for c in mine.top] == pytest.approx(values[:4].tolist())
    assert len(Sampler(50).sample(logits, [sequence(SamplingParams())] * 3)[0].top) == 20


# --- seeds ------------------------------------------------------------------------------------


def seeded_alone() -> list[int]:
    with Engine(random_model(), EngineConfig(exact=True)) as engine:
        return engine.generate(random_prompt(9), SEEDED)[0].token_ids


def test_a_seed_gives_the_same_tokens_alone_and_in_any_company():
    company = [
        (random_prompt(5), SamplingParams(temperature=1.0, max_tokens=12)),
        (random_prompt(9), SamplingParams(temperature=2.0, seed=1, max_tokens=3)),
        (random_prompt(30), SamplingParams(max_tokens=7)),
    ]
    expected = seeded_alone()
    for place in range(len(company) + 1):
        requests = [*company[:place], (random_prompt(9), SEEDED), *company[place:]]
        prompts, params = zip(*requests, strict=True)
        with Engine(random_model(), EngineConfig(exact=True, chunk_size=7)) as engine:
            outputs = engine.generate(list(prompts), list(params))
        assert outputs[place].token_ids == expected


def test_a_seed_gives_the_same_tokens_after_preemption():
    prompts = [random_prompt(11), random_prompt(9)]
    with Engine(random_model(), EngineConfig(exact=True, block_size=4, num_blocks=6)) as engine:
        outputs = engine.generate(prompts, SEEDED)
    assert outputs[1].metrics.num_preemptions > 0
    assert outputs[1].token_ids == seeded_alone()


def test_a_seed_gives_the_same_tokens_without_a_cache():
    naive = NaiveGenerator(random_model(), exact=True)
    assert naive.generate(random_prompt(9), SEEDED).token_ids == seeded_alone()


def test_seed_0_is_a_seed():
    naive, prompt = NaiveGenerator(random_model()), random_prompt(9)
    zero, none = (SamplingParams(temperature=1.0, seed=s, max_tokens=10) for s in (0, None))
    by_params = naive.generate(prompt, zero, seed=5).token_ids
    assert by_params == naive.generate(prompt, none, seed=0).token_ids
    assert by_params != naive.generate(prompt, none, seed=5).token_ids


def test_other_seeds_give_other_tokens():
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=10) for s in range(20)]
    with Engine(random_model()) as engine:
        outputs = engine.generate([random_prompt(9)] * 20, params)
    assert len({tuple(o.token_ids) for o in outputs}) > 15


def test_unseeded_requests_differ_unless_the_engine_has_a_seed():
    params = SamplingParams(temperature=1.0, max_tokens=10)

    def run(seed: int | None) -> list[list[int]]:
        with Engine(random_model(), EngineConfig(seed=seed)) as engine:
            return [o.token_ids for o in engine.generate([random_prompt(9)] * 2, params)]

    first, second = run(None)
    assert first != second
    assert run(3) == run(3) != run(4)
    assert run(None) != run(None)


def test_recorded_probabilities_are_those_of_the_draw():
    logits = torch.randn(1, 20).expand(3, -1)
    temperatures = (0.0, 0.5, 2.0)
    row = [sequence(SamplingParams(temperature=t), seed=3) for t in temperatures]
    for mine, temperature in zip(Sampler(20).sample(logits, row), temperatures, strict=True):
        drawn_from = (logits[0] / (temperature or 1.0)).softmax(dim=-1)
        assert mine.probability == pytest.approx(drawn_from[mine.token_id].item())
        recorded = {c.token_id: c.probability for c in mine.top}
        assert [recorded[i] for i in range(20)] == pytest.approx(drawn_from.tolist())
