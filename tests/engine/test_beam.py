"""Beam search finds what transformers finds, and its beams share their KV blocks."""

import signal
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache
from typing import Any

import pytest
import torch

from pdlab import Engine, EngineConfig, Model, SamplingParams
from pdlab.engine.beam import BeamSearch, beam_search
from pdlab.engine.beam_records import BeamOutput
from pdlab.engine.beam_rules import BeamRules, Continuation, best_continuations
from pdlab.models.decoder import Decoder
from tests.helpers import SHAPES, TINY, load_prompts, plain_kv, random_model, random_prompt
from tests.models.hf_twins import SIZES, hf_logits, twins

SEEDS = range(3)
NUM_TOKENS = 14
CONFIG = EngineConfig(block_size=4, num_blocks=256, chunk_size=8)
EXACT = replace(CONFIG, exact=True)


@cache
def seeded_twins(seed: int) -> tuple[Any, Model]:
    """(transformers model, pdlab model) of one small Llama, with weights of this seed."""
    theirs, ours = twins("llama")
    theirs = deepcopy(theirs)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    decoder = Decoder(ours.config)
    decoder.load_weights(theirs.state_dict().items())
    return theirs, replace(ours, decoder=decoder)


def with_ends(model: Model, end_ids: list[int]) -> Model:
    return replace(model, config=replace(model.config, eos_token_ids=tuple(end_ids)))


def end_ids_in_play(model: Model, prompt: list[int], count: int) -> list[int]:
    """Tokens that good hypotheses have at different places."""
    found = beam_search(model, prompt, max_tokens=NUM_TOKENS, config=CONFIG, ignore_eos=True)
    chosen = [node.token_id for step in found.steps[2:] for node in step.beams]
    return list(dict.fromkeys(chosen[1::3]))[:count]


def hf_beams(
    theirs: Any, prompt: list[int], width: int, end_ids: list[int] | None = None, **settings: Any
) -> tuple[list[list[int]], list[float]]:
    """Hypotheses of transformers, the best first, without padding; their scores."""
    ids = torch.tensor([prompt])
    found = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=end_ids or None,
        return_dict_in_generate=True,
        output_scores=True,
        **settings,
    )
    texts = found.sequences[:, len(prompt) :].tolist()
    return [cut(text, end_ids or []) for text in texts], found.sequences_scores.tolist()


def cut(token_ids: list[int], end_ids: list[int]) -> list[int]:
    ends = [i for i, token_id in enumerate(token_ids) if token_id in end_ids]
    return token_ids[: ends[0] + 1] if ends else token_ids


def assert_equal_to_transformers(
    output: BeamOutput, theirs: Any, width: int, end_ids: list[int] | None, **settings: Any
) -> None:
    texts, scores = hf_beams(theirs, output.prompt_ids, width, end_ids, **settings)
    assert [h.token_ids for h in output.hypotheses] == texts
    assert [h.score for h in output.hypotheses] == pytest.approx(scores, rel=1e-4, abs=1e-4)


# --- what is found ------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_hypotheses_equal_those_of_transformers(seed: int, width: int) -> None:
    theirs, ours = seeded_twins(seed)
    prompt = random_prompt(11 + seed, SIZES["vocab_size"])
    output = beam_search(ours, prompt, beam_width=width, max_tokens=NUM_TOKENS, config=CONFIG)
    assert_equal_to_transformers(output, theirs, width, None, max_new_tokens=NUM_TOKENS)
    assert {h.finish_reason for h in output.hypotheses} == {"length"}


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_end_tokens_penalties_and_stopping_are_those_of_transformers(
    seed: int, length_penalty: float, early_stopping: bool | str
) -> None:
    theirs, ours = seeded_twins(seed)
    prompt = random_prompt(9, SIZES["vocab_size"], seed=seed)
    end_ids = end_ids_in_play(ours, prompt, 1 + seed)
    settings = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    for width in (2, 3, 4, 5)[seed % 2 :: 2]:
        output = beam_search(
            with_ends(ours, end_ids),
            prompt,
            beam_width=width,
            max_tokens=NUM_TOKENS,
            config=CONFIG,
            **settings,
        )
        assert_equal_to_transformers(
            output, theirs, width, end_ids, max_new_tokens=NUM_TOKENS, **settings
        )
        stopped = [h.token_ids[-1] in end_ids for h in output.hypotheses]
        assert [h.finish_reason == "stop" for h in output.hypotheses] == stopped


def test_the_cases_compared_with_transformers_differ() -> None:
    """The comparison above is of use only if ends occur and the knobs change what is found."""
    _, ours = seeded_twins(0)
    prompt = random_prompt(9, SIZES["vocab_size"])
    model = with_ends(ours, end_ids_in_play(ours, prompt, 1))
    found = {}
    for penalty in (0.0, 2.0, -1.0):
        for early in (False, True, "never"):
            output = beam_search(
                model, prompt, max_tokens=14, length_penalty=penalty, early_stopping=early
            )
            lengths = tuple(len(h.token_ids) for h in output.hypotheses)
            found[penalty, early] = lengths, len(output.steps)
    assert len(set(found.values())) >= 4
    assert any(min(lengths) < 14 for lengths, _ in found.values())


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_one_beam_is_greedy_decoding(
    seed: int, length_penalty: float, early_stopping: bool
) -> None:
    _, ours = seeded_twins(seed)
    prompt = random_prompt(7, SIZES["vocab_size"], seed=seed)
    greedy = SamplingParams(max_tokens=NUM_TOKENS)
    with Engine(ours, EXACT) as engine:
        [free] = engine.generate([prompt], greedy)
    for end_ids in ([], [free.token_ids[5]]):
        model = with_ends(ours, end_ids)
        with Engine(model, EXACT) as engine:
            [expected] = engine.generate([prompt], greedy)
        [found] = beam_search(
            model,
            prompt,
            beam_width=1,
            max_tokens=NUM_TOKENS,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            config=EXACT,
        ).hypotheses
        assert found.token_ids == expected.token_ids
        assert found.finish_reason == expected.finish_reason


@pytest.mark.parametrize("name", ["chinese-who", "chat-turns"])
def test_the_real_model_finds_what_transformers_finds(name, smollm2, smollm2_hf) -> None:
    end_ids = list(smollm2.config.eos_token_ids)
    output = beam_search(smollm2, load_prompts()[name], beam_width=3, max_tokens=12)
    assert_equal_to_transformers(output, smollm2_hf, 3, end_ids, max_new_tokens=12)
    for hypothesis in output.hypotheses:
        text = smollm2.tokenizer.decode(hypothesis.token_ids, skip_special_tokens=True)
        assert hypothesis.text == text != ""


def test_scores_follow_from_the_logits_of_each_token() -> None:
    theirs, ours = seeded_twins(1)
    prompt = random_prompt(6, SIZES["vocab_size"])
    output = beam_search(ours, prompt, max_tokens=8, length_penalty=0.7, config=EXACT)
    for hypothesis in output.hypotheses:
        log_probs = hf_logits(theirs, prompt + hypothesis.token_ids)[5:-1].log_softmax(-1)
        total = float(log_probs.gather(1, torch.tensor(hypothesis.token_ids)[:, None]).sum())
        assert hypothesis.sum_logprob == pytest.approx(total, abs=1e-4)
        assert hypothesis.score == pytest.approx(total / 8**0.7, abs=1e-4)


def test_beams_go_on_when_nearly_every_token_is_an_end() -> None:
    theirs, ours = seeded_twins(1)
    prompt, end_ids = random_prompt(9, SIZES["vocab_size"]), list(range(3, 67))
    model = with_ends(ours, end_ids)
    settings = {"early_stopping": "never", "length_penalty": 3.0}
    for width in (2, 3):
        output = beam_search(model, prompt, beam_width=width, max_tokens=8, **settings)
        assert all(len(step.beams) == width for step in output.steps[:-1])
        assert_equal_to_transformers(output, theirs, width, end_ids, max_new_tokens=8, **settings)


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "best_sum", "over"),
    [
        (True, 1.0, -0.1, True),
        (False, 1.0, -4.1, True),  # at 2 tokens -2.05
        (False, 1.0, -4.0, True),  # no better than the worst that is kept
        (False, 1.0, -3.9, False),
        ("never", 1.0, -19.9, False),  # at 10 tokens -1.99
        ("never", 1.0, -20.1, True),
        ("never", -1.0, -0.9, False),  # at 2 tokens -1.8; longer texts only lose
        ("never", 0.0, -1.9, False),
        ("never", 0.0, -2.1, True),
    ],
)
def test_when_a_search_ends(
    early_stopping: bool | str, length_penalty: float, best_sum: float, over: bool
) -> None:
    rules = BeamRules(2, 10, length_penalty, early_stopping)
    going = [Continuation(0, 5, -0.1, best_sum)]
    rules.kept = [(-1.0, [1], -1.0)]
    assert not rules.is_over(going, 2)
    rules.kept.append((-2.0, [1, 2], -4.0))
    assert rules.is_over(going, 2) == over
    assert rules.is_over([], 2)


def test_equal_continuations_come_in_the_order_of_beams_and_tokens() -> None:
    best = best_continuations(torch.zeros(2, 5), [0.0, 0.0], 7)
    assert [(c.parent, c.token_id) for c in best] == [(0, i) for i in range(5)] + [(1, 0), (1, 1)]
    with pytest.raises(ValueError, match="NaN"):
        best_continuations(torch.full((1, 5), torch.nan), [0.0], 2)


def test_end_tokens_can_be_ignored() -> None:
    _, ours = seeded_twins(2)
    prompt = random_prompt(5, SIZES["vocab_size"])
    plain = beam_search(ours, prompt, max_tokens=6, config=EXACT)
    model = with_ends(ours, plain.hypotheses[0].token_ids[:2])
    assert beam_search(model, prompt, max_tokens=6, config=EXACT).hypotheses != plain.hypotheses
    ignoring = beam_search(model, prompt, max_tokens=6, config=EXACT, ignore_eos=True)
    assert ignoring.hypotheses == plain.hypotheses


def test_the_tree_leads_to_the_hypotheses() -> None:
    _, ours = seeded_twins(0)
    prompt = random_prompt(9, SIZES["vocab_size"])
    model = with_ends(ours, end_ids_in_play(ours, prompt, 2))
    output = beam_search(model, prompt, beam_width=3, max_tokens=NUM_TOKENS, config=CONFIG)
    texts: list[list[int]] = [[]]
    sums, ended = [0.0], []
    for step in output.steps:
        for node in step.beams + step.finished:
            assert node.sum_logprob == pytest.approx(sums[node.parent] + node.logprob)
        ended += [
            (node.score, [*texts[node.parent], node.token_id], node.sum_logprob)
            for node in step.finished
        ]
        texts = [[*texts[node.parent], node.token_id] for node in step.beams]
        sums = [node.sum_logprob for node in step.beams]
    best = sorted(ended, key=lambda e: -e[0])[:3]
    assert best == [(h.score, h.token_ids, h.sum_logprob) for h in output.hypotheses]
    assert isinstance(asdict(output)["steps"][0]["beams"][0]["block_table"], list)


# --- what the memory does -----------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_every_beam_has_the_kv_of_its_own_text_bit_for_bit(shape: str) -> None:
    model, prompt = random_model(SHAPES[shape]), random_prompt(13)
    search = BeamSearch(model, prompt, beam_width=4, max_tokens=18, config=EXACT)
    num_seen = 0
    for _ in search.steps_left():
        for beam in search.scheduler.running:
            kv = search.memory.cache.read(beam.block_table, beam.num_computed_tokens)
            kept = ~kv.isnan()
            plain = plain_kv(model, beam.token_ids[: beam.num_computed_tokens])
            assert torch.equal(kv[kept], plain[kept])
            assert kept[:, :, -4:].all()
            num_seen += 1
    assert num_seen == 4 * 17


@pytest.mark.parametrize("shape", ["group-of-2", "windowed"])
def test_block_size_chunks_and_head_groups_do_not_change_a_bit(shape: str) -> None:
    model, prompt = random_model(SHAPES[shape]), random_prompt(21)

    def search(**knobs: Any) -> BeamOutput:
        config = replace(EXACT, **knobs)
        return beam_search(model, prompt, beam_width=4, max_tokens=15, config=config)

    def choices(output: BeamOutput) -> list:
        return [[replace(n, block_table=[]) for n in step.beams] for step in output.steps]

    first = search(block_size=4, chunk_size=None)
    for block_size, chunk_size, groups in ((1, 7, 1), (3, 1, 2), (16, 5, 1), (64, None, 2)):
        other = search(block_size=block_size, chunk_size=chunk_size, kv_head_groups=groups)
        assert other.hypotheses == first.hypotheses
        assert choices(other) == choices(first)


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"block_size": 1},
        {"block_size": 16, "chunk_size": 3},
        {"kv_format": "int4:token:4", "kv_head_groups": 2},
        {"kv_format": "int8:head"},
        {"kv_format": "int4:channel/int8:channel", "block_size": 3},
        {"window": 7, "sink_tokens": 2},
        {"window": 9, "kv_format": "fp8:head", "block_size": 2},
        {"preemption": "swap", "num_swap_blocks": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [1, 2, 6])
def test_blocks_are_enough_are_shared_and_all_come_back(width: int, knobs: dict) -> None:
    model, prompt = random_model(), random_prompt(19)
    config = replace(CONFIG, **knobs)
    search = BeamSearch(model, prompt, beam_width=width, max_tokens=25, config=config)
    pool, names = search.memory.manager.pool, {"beam0"}
    for step in search.steps_left():
        pool.check([beam.block_table for beam in search.scheduler.running])
        names |= {beam.sequence_id for beam in search.scheduler.running}
        assert step.num_blocks <= pool.num_blocks
    assert pool.num_free == pool.num_blocks
    output = search.output()
    assert len(output.hypotheses) == width
    assert output.num_forks == len(names) - 1  # a first child is its parent
    assert output.peak_blocks <= output.peak_blocks_unshared
    if width > 1:
        assert output.peak_blocks < output.peak_blocks_unshared
        assert output.blocks_saved > 0
        assert output.num_forks > 0
    else:
        assert (output.num_forks, output.num_copies, output.blocks_saved) == (0, 0, 0)


def test_beams_take_turns_sharing_as_the_paper_counts_it() -> None:
    """A prompt of two and a half blocks: the two full ones are there once, for all beams; only a
    block that two beams write to is copied, once for each but the last."""
    prompt = random_prompt(10)
    output = beam_search(random_model(), prompt, beam_width=4, max_tokens=6, config=CONFIG)
    first, second = output.steps[:2]
    assert [node.block_table for node in first.beams] == [[0, 1, 2]] * 4
    assert [move.source for move in second.copies] == [2, 2, 2]
    assert (second.num_blocks, second.num_blocks_unshared) == (2 + 4, 3 * 4)
    for step in output.steps[1:]:
        assert all(node.block_table[:2] == [0, 1] for node in step.beams)
    copied = {move.target for step in output.steps for move in step.copies}
    assert len(copied) <= output.num_copies <= output.num_forks


def test_beams_that_end_on_a_block_boundary_copy_nothing() -> None:
    prompt = random_prompt(8)
    output = beam_search(random_model(), prompt, beam_width=4, max_tokens=2, config=CONFIG)
    assert output.num_forks == 3
    assert output.num_copies == 0
    assert output.final_blocks == 2 + 4
    assert output.final_blocks_unshared == 3 * 4


def test_the_peak_may_be_in_the_prompt() -> None:
    """29 tokens in chunks of 14 and then 1: a window of 5 lets most of each chunk go."""
    config = EngineConfig(block_size=2, window=5, chunk_size=14)
    output = beam_search(
        random_model(), random_prompt(29), beam_width=2, max_tokens=3, config=config
    )
    assert output.steps[0].num_blocks == output.peak_blocks >= 7 + 2


def test_the_pool_may_be_as_small_as_the_error_says() -> None:
    model, prompt = random_model(), random_prompt(10)
    needed = 2 + 4 * (5 - 2)  # 17 slots in 5 blocks, the first 2 shared

    def search(num_blocks: int) -> BeamOutput:
        config = replace(CONFIG, num_blocks=num_blocks)
        return beam_search(model, prompt, beam_width=4, max_tokens=8, config=config)

    assert search(needed).peak_blocks <= needed
    with pytest.raises(ValueError, match=f"{needed} KV blocks .*num_blocks is {needed - 1}"):
        search(needed - 1)


# --- what is refused, and interrupted -----------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beam_width": 0}, "beam_width=0 must be an integer >= 1"),
        ({"beam_width": -1}, "beam_width=-1 must be an integer >= 1"),
        ({"beam_width": True}, "beam_width=True"),
        ({"beam_width": 62}, "beam_width=62 is more than vocab_size=61"),
        ({"beam_width": 33}, "beam_width=33 is more than max_num_seqs=32"),
        ({"max_tokens": 0}, "max_tokens=0 must be an integer >= 1"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"length_penalty": 11}, "length_penalty=11 must be a number from -10"),
        ({"early_stopping": "maybe"}, "early_stopping='maybe' must be True, False or 'never'"),
        ({"early_stopping": 1}, "early_stopping=1"),
        ({"ignore_eos": "no"}, "ignore_eos='no'"),
        ({"progress": None}, "progress=None"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [61]}, "token id 61, vocab_size is 61"),
        ({"prompt": [1] * 129}, "prompt has 129 tokens, max_model_len is 128"),
        ({"prompt": "text"}, "no tokenizer"),
        (
            {"config": EngineConfig(window=8, heavy_tokens=4, enable_prefix_cache=False)},
            "heavy_tokens=4 must be 0 in beam search",
        ),
        ({"config": EngineConfig(num_blocks=1)}, "num_blocks is 1"),
        ({"config": EngineConfig(kv_head_groups=3)}, "kv_head_groups=3"),
    ],
    ids=str,
)
def test_what_cannot_be_searched_is_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        beam_search(random_model(), **{"prompt": [1, 2, 3], **settings})


def test_a_longest_prompt_gets_one_token_and_long_texts_end_at_the_limit() -> None:
    for length, most in ((128, 1), (127, 1), (125, 3)):
        output = beam_search(random_model(), random_prompt(length), max_tokens=9, config=CONFIG)
        assert {len(h.token_ids) for h in output.hypotheses} == {most}


@pytest.mark.parametrize("vocab_size", [1, 2, 3])
def test_as_many_beams_as_there_are_tokens_find_as_many_hypotheses(vocab_size: int) -> None:
    model = with_ends(random_model(replace(TINY, vocab_size=vocab_size)), [0])
    for max_tokens in (1, 2, 5):
        output = beam_search(model, [0], beam_width=vocab_size, max_tokens=max_tokens)
        assert len({tuple(h.token_ids) for h in output.hypotheses}) == vocab_size


@pytest.mark.parametrize("method", ["schedule", "update"])
@pytest.mark.parametrize("call", range(5))
def test_an_interrupted_step_can_be_made_again(method: str, call: int) -> None:
    model, prompt = random_model(), random_prompt(13)
    config = replace(EXACT, chunk_size=8)
    expected = beam_search(model, prompt, max_tokens=5, config=config)
    search = BeamSearch(model, prompt, max_tokens=5, config=config)
    original, calls = getattr(search.scheduler, method), []

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        calls.append(method)
        if len(calls) == call + 1:
            signal.raise_signal(signal.SIGINT)
        return result

    setattr(search.scheduler, method, interrupted)
    num_interrupts = 0
    while not search.is_over:
        try:
            search.step()
        except KeyboardInterrupt:
            num_interrupts += 1
    assert num_interrupts == 1
    assert search.output() == expected
    assert search.memory.manager.pool.num_free == search.memory.manager.pool.num_blocks


def test_a_step_that_fails_while_it_computes_counts_for_nothing(monkeypatch) -> None:
    model, prompt = random_model(), random_prompt(13)
    expected = beam_search(model, prompt, max_tokens=5, config=EXACT)
    search = BeamSearch(model, prompt, max_tokens=5, config=EXACT)
    compute, fails = search.runner.compute, iter([True, False] * 20)

    def failing(*args: Any) -> Any:
        computed = compute(*args)
        if next(fails):
            raise KeyboardInterrupt
        return computed

    monkeypatch.setattr(search.runner, "compute", failing)
    while not search.is_over:
        try:
            search.step()
        except KeyboardInterrupt:
            continue
    assert search.output() == expected
