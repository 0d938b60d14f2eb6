"""Each row is sampled by its own parameters and its own seed, whatever stands beside it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdlab import Engine, EngineConfig, NaiveGenerator, SamplingParams
from pdlab.sampling import Sampled, Sampler, run_chain, uniform
from tests.helpers import random_model, random_prompt
from tests.sampling.drawers import drawer, draws

SEEDED = SamplingParams(temperature=1.0, seed=42, max_tokens=10)


def draw(logits: Tensor, rows: list) -> list[int]:
    return [s.token_id for s in Sampler(0).sample(logits, rows)]


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-8, 1e-6])
def test_no_temperature_takes_the_best_token(temperature):
    logits = 30 * torch.randn(50, 20)
    greedy = SamplingParams(temperature=temperature)
    expected = logits.argmax(dim=-1).tolist()
    assert draw(logits, [drawer(greedy, seed=i) for i in range(50)]) == expected


@pytest.mark.parametrize("temperature", [1e-5, 1e-3])
def test_a_small_temperature_neither_overflows_nor_hesitates(temperature):
    logits = 30 * torch.randn(50, 20)
    params = SamplingParams(temperature=temperature)
    expected = logits.argmax(dim=-1).tolist()
    assert draw(logits, [drawer(params, seed=i) for i in range(50)]) == expected


def test_greedy_and_sampled_rows_in_one_batch_do_not_touch_each_other():
    logits = torch.randn(1, 20).expand(60, -1)
    kinds = [SamplingParams(temperature=t) for t in (0.0, 5.0, 1e-8)]
    rows = [drawer(kinds[i % 3], seed=i) for i in range(60)]
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
    row = drawer(params, seed=7)
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
    seen = expected > 0
    assert counts[~seen].sum() == 0
    return float(((counts - expected) ** 2 / expected)[seen].sum())


EIGHT = torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -0.5, -1.0, -2.0])
MASKED = -torch.inf
STATED = {
    "top_k": ({"top_k": 3}, [2.0, 1.0, 0.5, *[MASKED] * 5]),
    "top_p": ({"top_p": 0.8}, [2.0, 1.0, 0.5, 0.0, 0.0, MASKED, MASKED, MASKED]),
    "min_p": ({"min_p": 0.2}, [2.0, 1.0, 0.5, *[MASKED] * 5]),
    "temperature, then top_k": ({"temperature": 2.0, "top_k": 2}, [1.0, 0.5, *[MASKED] * 6]),
    "repetition": (
        {"repetition_penalty": 2.0},  # prompt 7, output 0, 0, 5
        [1.0, 1.0, 0.5, 0.0, 0.0, -1.0, -1.0, -4.0],
    ),
    "frequency": (
        {"frequency_penalty": 0.5},
        [1.0, 1.0, 0.5, 0.0, 0.0, -1.0, -1.0, -2.0],
    ),
    "presence": (
        {"presence_penalty": 0.5},
        [1.5, 1.0, 0.5, 0.0, 0.0, -1.0, -1.0, -2.0],
    ),
    "bias and bad words": (
        {"logit_bias": {6: 2.0}, "bad_words": [(0,), (5, 1)]},
        [MASKED, MASKED, 0.5, 0.0, 0.0, -0.5, 1.0, -2.0],
    ),
    "all penalties, temperature": (
        {
            "repetition_penalty": 2,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.5,
            "temperature": 0.5,
        },
        [-1.0, 2.0, 1.0, 0.0, 0.0, -4.0, -2.0, -8.0],
    ),
}


@pytest.mark.parametrize("name", STATED)
def test_tokens_follow_the_stated_distribution(name: str):
    """What each parameter makes of the logits is written down here by hand."""
    params, stated = STATED[name]
    given = SamplingParams(**{"temperature": 1.0} | params)
    counts = draws(EIGHT, given, 4000, prompt=[7], output=[0, 0, 5])
    expected = torch.tensor(stated, dtype=torch.float64)
    assert chi_square(counts, expected) < 24.3
    assert chi_square(counts, 1.25 * expected) > 24.3, "it could not fail"


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=1.0), SamplingParams(temperature=1, top_p=0.9)]
)
def test_draws_from_the_whole_vocabulary_follow_the_distribution(params: SamplingParams):
    """Tokens of the same hundredth of the probability are counted together."""
    logits = 3 * torch.randn(49_152, generator=torch.Generator().manual_seed(3))
    left = run_chain(logits[None], [drawer(params)]).logits[0].double().softmax(dim=-1)
    bins = (left.cumsum(0) * 99.999).long()
    expected = torch.zeros(100, dtype=torch.float64).index_add_(0, bins, left) * 3000
    counts = torch.zeros(100, dtype=torch.float64)
    for start in range(0, 3000, 100):
        rows = [drawer(params, seed=seed) for seed in range(start, start + 100)]
        for token_id in draw(logits.expand(100, -1), rows):
            counts[bins[token_id]] += 1
    chi = float(((counts - expected) ** 2 / expected)[expected > 0].sum())
    assert 50 < chi < 149, "99 degrees of freedom: once in 1,000 above, once in 10,000 below"


# --- the dart ---------------------------------------------------------------------------------


def test_uniform_numbers_lie_in_0_to_1_and_never_reach_it():
    numbers = [uniform(seed, index) for seed in (0, 1, 42, 2**64 - 1) for index in range(2000)]
    assert 0 <= min(numbers) < 0.001
    assert 0.999 < max(numbers) < 1
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01


def test_uniform_numbers_are_the_same_on_every_machine():
    assert [round(uniform(42, i), 12) for i in range(3)] == [
        0.741564878772,
        0.159910392877,
        0.278601130255,
    ]


@pytest.mark.parametrize("place", [0.0, 1 - 2**-53])
def test_the_ends_of_the_line_hit_tokens_that_have_probability(monkeypatch, place: float):
    monkeypatch.setattr("pdlab.sampling.sampler.uniform", lambda seed, index: place)
    for seed in range(200):
        logits = torch.randn(1, 501, generator=torch.Generator().manual_seed(seed))
        logits[0, :3] = logits[0, -3:] = -torch.inf
        assert draw(logits, [drawer()]) == [3 if place == 0 else 497]


def test_a_token_is_hit_as_its_cumulative_probability_says(monkeypatch):
    logits = torch.tensor([[0.2, 0.3, 0.0, 0.5]]).log()
    hits = {0.0: 0, 0.19: 0, 0.21: 1, 0.49: 1, 0.51: 3, 0.99: 3}
    for place, token_id in hits.items():
        monkeypatch.setattr("pdlab.sampling.sampler.uniform", lambda seed, index, p=place: p)
        assert draw(logits, [drawer()]) == [token_id]


# --- what cannot be drawn from ------------------------------------------------------------------


def test_a_row_with_nothing_allowed_fails_alone():
    logits = torch.randn(3, 4)
    stuck = SamplingParams(temperature=1.0, bad_words=[(i,) for i in range(4)])
    results = Sampler(0).sample(logits, [drawer(), drawer(stuck), drawer(SamplingParams())])
    assert isinstance(results[1], ValueError)
    assert "bad_words leave none" in str(results[1])
    assert [isinstance(r, Sampled) for r in results] == [True, False, True]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error_of_that_row(temperature: float):
    logits = torch.randn(2, 5)
    logits[0, 2] = torch.nan
    params = SamplingParams(temperature=temperature)
    bad, good = Sampler(0).sample(logits, [drawer(params), drawer(params)])
    assert isinstance(bad, ValueError)
    assert "not numbers" in str(bad)
    assert isinstance(good, Sampled)


def test_num_allowed_counts_what_could_have_been_drawn():
    rows = [drawer(SamplingParams(temperature=1, top_k=k)) for k in (0, 1, 3)]
    sampled = Sampler(0).sample(torch.randn(3, 9), rows)
    assert [each.num_allowed for each in sampled] == [9, 1, 3]


# --- log probabilities --------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_before_the_chain():
    logits = torch.randn(1, 50)
    params = SamplingParams(temperature=0.3, top_k=2, logit_bias={7: 90}, logprobs=4)
    [sampled] = Sampler(0).sample(logits, [drawer(params)])
    own = logits[0].log_softmax(dim=-1)
    found = sampled.logprobs
    assert sampled.token_id == found.token_id == 7
    assert sampled.probability == pytest.approx(1)
    assert found.logprob == pytest.approx(own[7].item())
    assert found.rank == 1 + (own > own[7]).sum()
    best = own.topk(4)
    assert [each.token_id for each in found.top] == best.indices.tolist()
    assert [each.logprob for each in found.top] == pytest.approx(best.values.tolist())


def test_each_row_gets_as_many_logprobs_as_it_asked_for():
    wanted = [None, 0, 1, 5, 1000]
    rows = [drawer(SamplingParams(logprobs=k)) for k in wanted]
    sampled = Sampler(0).sample(torch.randn(5, 20), rows)
    assert [s.logprobs and len(s.logprobs.top) for s in sampled] == [None, 0, 1, 5, 20]


def test_a_token_of_no_probability_is_never_drawn():
    logits = torch.full((1, 1000), float("-inf"))
    logits[0, [3, 500]] = 0.0
    row = [drawer(SamplingParams(temperature=1.0), seed=i) for i in range(300)]
    assert set(draw(logits.expand(300, -1), row)) == {3, 500}


def test_recorded_candidates_are_the_best_with_their_probabilities():
    logits = torch.randn(3, 20)
    sampled = Sampler(4).sample(logits, [drawer(SamplingParams())] * 3)
    for row, mine in zip(logits.softmax(dim=-1), sampled, strict=True):
        values, indices = row.sort(descending=True)
        assert [c.token_id for c in mine.top] == indices[:4].tolist()
        assert [c.probability for c in mine.top] == pytest.approx(values[:4].tolist())
    assert len(Sampler(50).sample(logits, [drawer(SamplingParams())] * 3)[0].top) == 20


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
    row = [drawer(SamplingParams(temperature=t), seed=3) for t in temperatures]
    for mine, temperature in zip(Sampler(20).sample(logits, row), temperatures, strict=True):
        drawn_from = (logits[0] / (temperature or 1.0)).softmax(dim=-1)
        assert mine.probability == pytest.approx(drawn_from[mine.token_id].item())
        recorded = {c.token_id: c.probability for c in mine.top}
        assert [recorded[i] for i in range(20)] == pytest.approx(drawn_from.tolist())
