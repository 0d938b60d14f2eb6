"""What the lesson on sampling measures, against the engine and against small cases by hand."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.bench import MixCost, SamplingCosts
from pdlab.engine import beam_search
from pdlab.workbench import output_experiments as output
from pdlab.workbench import sampling_experiments as sampling
from pdlab.workbench.constraint_lab_data import ConstrainedRun, Decision
from pdlab.workbench.figures import sampling as pictures
from tests.helpers import random_model, random_prompt

PROMPT = "The capital of France is"


def place_of(chances: list[float]) -> sampling.Place:
    return sampling.Place("by hand", [0], torch.tensor(chances).log())


# --- logits to tokens ----------------------------------------------------------------------------


def test_a_place_has_the_logits_that_the_engine_draws_from(smollm2: Model) -> None:
    [place] = sampling.places(smollm2, [PROMPT])
    with Engine(smollm2) as engine:
        params = SamplingParams(max_tokens=1, logprobs=0)
        [found] = engine.generate(PROMPT, params)[0].logprobs or []
    assert int(place.logits.argmax()) == found.token_id
    assert float(place.chances[found.token_id].log()) == pytest.approx(found.logprob, abs=1e-3)


def test_draws_of_the_best_token_are_near_what_is_stated() -> None:
    place = place_of([0.2, 0.5, 0.3])
    for found in sampling.best_token_draws(place, [0.5, 1.0, 2.0], num=2000):
        weights = [p ** (1 / found.temperature) for p in (0.2, 0.5, 0.3)]
        assert found.stated == pytest.approx(weights[1] / sum(weights), rel=1e-5)
        assert abs(found.drawn - 2000 * found.stated) < 5 * found.spread


def test_cuts_keep_what_each_filter_says() -> None:
    settings = {"k": {"top_k": 1}, "p": {"top_p": 0.6}, "m": {"min_p": 0.5}, "off": {}}
    found = sampling.cuts(place_of([0.15, 0.5, 0.3, 0.05]), settings)
    assert [(cut.name, cut.num_left) for cut in found] == [("k", 1), ("p", 2), ("m", 2), ("off", 4)]
    assert [cut.mass_left for cut in found] == pytest.approx([0.5, 0.8, 0.8, 1.0])


def test_division_moves_negative_logits_up_and_the_engines_rule_moves_none(smollm2: Model) -> None:
    ids = smollm2.tokenizer.encode("one two three")
    logits = torch.zeros(smollm2.config.vocab_size)
    logits[ids] = torch.tensor([2.0, -2.0, 1.0])
    moves = sampling.repetition_moves(smollm2, sampling.Place("", ids, logits), 2.0)
    assert [m.logit for m in moves] == [2.0, 1.0, -2.0]
    assert [m.divided for m in moves] == [1.0, 0.5, -1.0]
    assert [m.penalized for m in moves] == [1.0, 0.5, -4.0]


def decision(before: list[float], possible: list[bool]) -> Decision:
    chances = torch.tensor(before, dtype=torch.float64)
    allowed = torch.tensor(possible)
    after = chances * allowed / chances[allowed].sum()
    return Decision([], 0, chances, after, allowed, sum(possible), False, 1.0, 0)


def test_tries_are_geometric_in_the_probability_that_is_left(smollm2: Model) -> None:
    steps = [decision([0.1, 0.9], [True, False])] * 400
    run = ConstrainedRun(SamplingParams(regex="x"), "pdlab", None, steps)  # type: ignore[arg-type]
    found = sampling.tries_without_mask(run, smollm2)
    assert all(step.mass_left == pytest.approx(0.1) for step in found)
    mean = sum(step.tries for step in found) / len(found)
    assert mean == pytest.approx(10, rel=0.25)


def test_a_mask_that_leaves_all_needs_one_draw(smollm2: Model) -> None:
    steps = [decision([0.4, 0.6], [True, True])]
    run = ConstrainedRun(SamplingParams(regex="x"), "pdlab", None, steps)  # type: ignore[arg-type]
    [step] = sampling.tries_without_mask(run, smollm2)
    assert (step.mass_left, step.tries) == (1.0, 1)


def test_only_llguidance_takes_digits_beyond_ascii(smollm2: Model) -> None:
    params = SamplingParams(regex=r"\d")
    ours = sampling.allowed_at_start(smollm2, params, "pdlab")
    assert [smollm2.tokenizer.decode([i]) for i in ours] == list("0123456789")
    assert set(ours) < set(sampling.allowed_at_start(smollm2, params, "llguidance"))
    with pytest.raises(ValueError, match="no constraint"):
        sampling.allowed_at_start(smollm2, SamplingParams(), "pdlab")


def test_darts_that_hit_another_token() -> None:
    first = torch.tensor([0.5, 0.5]).log()
    assert sampling.flip_chance(first, first) == 0
    assert sampling.flip_chance(first, torch.tensor([0.25, 0.75]).log()) == pytest.approx(0.25)
    assert sampling.flip_chance(first, torch.tensor([0.0, 1.0]).log()) == pytest.approx(0.5)


def test_in_exact_mode_company_changes_no_bit(smollm2: Model) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=3, ignore_eos=True)
    found = sampling.in_company(smollm2, PROMPT, ["Hello", "One, two,"], params, exact=True)
    assert found.alone == found.beside
    assert found.logit_difference == 0
    assert found.flip_chance == pytest.approx(0, abs=1e-9)


def test_ones_own_function_sees_its_own_row() -> None:
    seen: list[tuple[list[int], list[int]]] = []

    def only_next(logits: torch.Tensor, prompt: list[int], out: list[int]) -> torch.Tensor:
        seen.append((prompt, out))
        wanted = len(out) + 10
        logits[:wanted] = -math.inf
        logits[wanted + 1 :] = -math.inf
        return logits

    own = sampling.OwnProcessor("only_next", only_next)
    with Engine(random_model()) as engine:
        params = SamplingParams(max_tokens=3, ignore_eos=True, logits_processors=(own,))
        outputs = engine.generate([random_prompt(4), random_prompt(6)], params)
    assert [out.token_ids for out in outputs] == [[10, 11, 12]] * 2
    assert (random_prompt(6), [10, 11]) in seen


# --- tokens to readers ---------------------------------------------------------------------------


def test_a_stop_string_leaks_where_pieces_are_sent_at_once() -> None:
    found = output.stop_leak(["a S", "TO", "P b"], "STOP")
    assert found == ("a STO", "a ")
    assert found.leaked == "STO"
    with pytest.raises(ValueError, match="stop='x'"):
        output.stop_leak(["a"], "x")


def test_tokens_of_half_a_character_are_lost_one_by_one(smollm2: Model) -> None:
    ids = smollm2.tokenizer.encode("世 a")
    pieces = output.token_by_token(smollm2.tokenizer, ids)
    assert output.num_lost(pieces) == sum(output.LOST in piece for piece in pieces) > 0
    assert output.num_lost([smollm2.tokenizer.decode(ids)]) == 0


def test_readers_get_the_text_that_generate_gives(smollm2: Model) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    readers = [
        output.Reader("fast", PROMPT),
        output.Reader("slow", "Hello", delay_s=0.001, max_unread=1),
    ]
    read = asyncio.run(output.read_together(smollm2, readers, params))
    with Engine(smollm2) as engine:
        texts = [out.text for out in engine.generate([PROMPT, "Hello"], params)]
    assert [reader.text for reader in read] == texts
    for reader in read:
        assert len(reader.times_s) == reader.num_computed(reader.computed_s) == 4
        assert reader.num_computed(reader.times_s[0]) == 1


def test_blocks_are_counted_once_and_for_each_owner() -> None:
    with Engine(random_model(), EngineConfig(block_size=4, num_blocks=64)) as engine:
        engine.generate(random_prompt(16), SamplingParams(max_tokens=4, ignore_eos=True, n=3))
        found = output.blocks_of(engine.trace.steps[-1])
    assert found == (4 + 3, 3 * (4 + 1))


def test_reordering_copies_every_block_of_every_beam() -> None:
    config = EngineConfig(block_size=4, num_blocks=64)
    found = beam_search(
        random_model(), random_prompt(8), beam_width=2, max_tokens=5, ignore_eos=True, config=config
    )
    # 9 to 12 tokens have K and V when steps 2 to 5 compute: 3 blocks a beam
    assert output.copied_by_reordering(found) == 4 * 2 * 3
    assert found.num_copies < output.copied_by_reordering(found)


@pytest.mark.parametrize(
    ("ids", "share"), [([1, 2, 3, 4], 0), ([1, 2, 3, 1, 2, 3], 1 / 4), ([5] * 6, 3 / 4), ([1], 0)]
)
def test_share_of_repeated_trigrams(ids: list[int], share: float) -> None:
    assert output.repeated_share(ids) == pytest.approx(share)


def test_beams_find_a_text_at_least_as_probable_as_greedy(smollm2: Model) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    [greedy] = output.sampled_texts(smollm2, PROMPT, [("greedy", params)])
    found = beam_search(smollm2, PROMPT, beam_width=3, max_tokens=6, ignore_eos=True)
    best = output.beam_text("beam", found)
    assert best.text == found.hypotheses[0].text
    assert best.logprob_per_token >= greedy.logprob_per_token - 1e-3


# --- figures -------------------------------------------------------------------------------------


def test_filters_are_marked_where_they_cut() -> None:
    chances = {"sure": torch.tensor([0.1, 0.9]), "unsure": torch.tensor([0.4, 0.6])}
    cuts = {"sure": [sampling.Cut("p", 1, 0.9)], "unsure": [sampling.Cut("p", 2, 1.0)]}
    figure = pictures.filter_cuts(chances, cuts)
    curves = [trace for trace in figure.data if trace.mode == "lines"]
    assert [curve.name for curve in curves] == ["sure", "unsure"]
    assert list(curves[0].y) == pytest.approx([0.9, 0.1])
    marks = [trace for trace in figure.data if trace.mode != "lines"]
    assert [(m.x[0], m.text[0]) for m in marks] == [(1, "p: 1"), (2, "p: 2")]
    assert [m.y[0] for m in marks] == pytest.approx([0.9, 0.4])


def test_bars_of_a_mask_are_what_it_leaves() -> None:
    figure = pictures.mask_mass([sampling.Tries("1", 0.9, 1), sampling.Tries("-", 0.076, 13)])
    assert list(figure.data[0].y) == pytest.approx([90, 7.6])
    assert list(figure.data[0].x) == ["1: 1", "2: -"]
    assert figure.layout.title.text == "At step 2 the mask leaves 7.6% of the probability"


def test_sampling_costs_are_medians_of_the_recorded_steps() -> None:
    costs = SamplingCosts(
        costs=[MixCost("dear", [0.02, 0.04, 0.03], [0.1] * 3), MixCost("cheap", [0.01], [0.1])],
        model={"name": "m", "dtype": "float32"},
        batch=2,
        context_len=8,
        repeats=1,
        num_steps=3,
        prompts="random tokens",
        constraint_backend="pdlab",
        machine={"processor": "P", "cores": 2, "date": "2026-01-02T03:04:05"},
        versions={},
    )
    figure = pictures.sampling_costs(costs)
    bars = dict(zip(figure.data[0].y, figure.data[0].x, strict=True))
    assert bars == {"cheap": pytest.approx(10), "dear": pytest.approx(30)}
    assert figure.layout.title.text == "Sampling takes 10% to 30% of a decode step"
    assert "recorded" in figure.layout.title.subtitle.text
    assert "2026-01-02" in figure.layout.title.subtitle.text
