"""Drafts in the engine: what they may use, what ends them, and that nothing else changes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pdlab import Engine, EngineConfig, RequestOutput, SamplingParams, Trace, beam_search
from pdlab.sampling import Draft
from tests.engine.guessing import Guess
from tests.engine.test_exact import assert_same_storage, foreknowing, plain_run, run_stored
from tests.helpers import SHAPES, TINY, random_model, random_prompt

MODEL = random_model(TINY)


def knowing(outputs: list[RequestOutput], right: float = 1.0, longest: int = 6) -> Guess:
    """Drafts of what these outputs say."""

    def truth(sequence, length):
        index = int(sequence.sequence_id.partition(".")[2] or 0)
        [own] = [o for o in outputs if o.prompt_ids == sequence.prompt_ids]
        told = own.completions[index].token_ids
        return told[sequence.num_output_tokens :][:length]

    return Guess(truth, TINY.vocab_size, random.Random(1), right, longest)


def both_ways(prompts, params, config=None, right=1.0, longest=6):
    """Outputs without drafts, with them, and the trace of the latter."""
    config = config or EngineConfig(exact=True)
    with Engine(MODEL, config) as engine:
        plain = engine.generate(prompts, params)
    guess = knowing(plain, right, longest)
    with Engine(MODEL, replace(config, speculation=guess)) as engine:
        outputs = engine.generate(prompts, params)
        assert engine.pool.num_free == config.num_blocks
        trace = engine.trace
    assert not guess.seen, "the drafter was not told of an end"
    assert guess.closed
    return plain, outputs, trace


def what(output: RequestOutput) -> list:
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs)
        for c in output.completions
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_seqs", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_format", ["fp32", "fp8/int4:token:4"])
def test_tokens_logits_and_bytes_are_those_of_plain_decoding(shape, num_seqs, kv_format):
    """Also the bytes after a rewind, across the edges of blocks."""
    prompts = [random_prompt(3 + 5 * n, seed=n) for n in range(num_seqs)]
    params = SamplingParams(max_tokens=14)
    config = EngineConfig(exact=True, block_size=4, kv_format=kv_format)
    config = foreknowing(shape, config, None, right=0.7, seed=2)
    tokens, stored, outputs = run_stored(shape, config, prompts, [params] * num_seqs)
    for prompt, [mine], output in zip(prompts, tokens, outputs, strict=True):
        plain, kept = plain_run(shape, tuple(prompt), params, kv_format)
        assert mine == plain
        assert_same_storage(stored[output.request_id], kept, min_steps=2)
    outcomes, metrics = config.speculation.outcomes, [output.metrics for output in outputs]
    assert sum(o.num_accepted for o in outcomes) == sum(m.num_accepted_tokens for m in metrics)
    assert sum(o.num_drafted for o in outcomes) == sum(m.num_draft_tokens for m in metrics)
    assert sum(o.num_accepted for o in outcomes) > 2 * num_seqs
    assert any(o.num_accepted < o.num_drafted for o in outcomes)


def test_right_drafts_save_steps_and_the_trace_says_so():
    prompts, params = [random_prompt(9), random_prompt(5)], SamplingParams(max_tokens=30)
    plain, outputs, trace = both_ways(prompts, params, longest=6)
    assert [what(o) for o in outputs] == [what(o) for o in plain]
    assert len(trace.steps) < 20
    for output in outputs:
        assert trace.output_ids(output.request_id) == output.token_ids
        drafted = [s.draft for _, s in trace.sequence_steps(output.request_id) if s.draft]
        assert all(d.num_accepted == len(d.token_ids) for d in drafted)
        assert all(len(d.probabilities) == len(d.token_ids) for d in drafted)
        assert output.metrics.num_accepted_tokens == sum(d.num_accepted for d in drafted)
        assert output.metrics.num_output_tokens == 30
        times = output.metrics.token_times_s
        assert len(set(times)) == len(trace.sequence_steps(output.request_id))
    assert all("draft" in r.stage_s for r in trace.steps[1:])


def test_a_trace_with_drafts_survives_a_file(tmp_path):
    _, _, trace = both_ways([random_prompt(9)], SamplingParams(max_tokens=20), right=0.6)
    trace.save(tmp_path / "t.json.gz")
    loaded = Trace.load(tmp_path / "t.json.gz")
    assert loaded.steps == trace.steps
    assert any(s.draft for r in loaded.steps for s in r.sequences)


def test_the_trace_names_tokens_that_were_drafted_and_rejected():
    _, [output], trace = both_ways([random_prompt(9)], SamplingParams(max_tokens=20), right=0.3)
    parts = [part for _, part in trace.sequence_steps(output.request_id)]
    drafts = [part.draft for part in parts if part.draft]
    rejected = {token for d in drafts for token in d.token_ids[d.num_accepted :]}
    known = {*trace.requests[output.request_id].prompt_ids, *output.token_ids}
    known |= {candidate.token_id for part in parts for candidate in part.top}
    assert rejected - known
    assert all(trace.tokens[token] == str(token) for token in rejected)  # it has no tokenizer


@pytest.mark.parametrize("right", [0.5, 1.0])
def test_each_way_to_end_ends_within_a_draft_as_without(right):
    prompt = random_prompt(7)
    with Engine(MODEL, EngineConfig(exact=True)) as engine:
        ids = engine.generate(prompt, SamplingParams(max_tokens=24))[0].token_ids
    kinds = [SamplingParams(max_tokens=n, stop_token_ids=[ids[n - 1]]) for n in range(1, 24, 3)]
    kinds += [SamplingParams(max_tokens=24, stop_token_ids=[i]) for i in ids[2:20:3]]
    kinds += [SamplingParams(max_tokens=24, stop_token_ids=[ids[3]], min_tokens=9)]
    kinds += [SamplingParams(max_tokens=n) for n in range(1, 9)]
    kinds += [SamplingParams(max_tokens=12, bad_words=[(ids[4],), (ids[6], ids[7])])]
    ended = 0
    for params in kinds:
        plain, outputs, trace = both_ways([prompt], params, right=right)
        assert what(outputs[0]) == what(plain[0])
        last = trace.steps[-1].sequences[0]
        ended += last.draft is not None and len(last.put_out) <= len(last.draft.token_ids)
    assert ended > 3, "some end within a draft"
    config = EngineConfig(exact=True, max_model_len=15)
    plain, outputs, _ = both_ways([prompt], SamplingParams(max_tokens=24), config, right)
    assert what(outputs[0]) == what(plain[0])


def test_several_samples_logprobs_and_penalties_at_temperature():
    params = SamplingParams(
        temperature=0.8,
        top_p=0.95,
        seed=3,
        n=3,
        logprobs=2,
        max_tokens=16,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
    )
    plain, outputs, _ = both_ways([random_prompt(9), random_prompt(4)], params, right=0.9)
    assert [what(o) for o in outputs] == [what(o) for o in plain]
    assert all(len(c.logprobs) == 16 for o in outputs for c in o.completions)
    assert all(c.metrics.num_accepted_tokens for o in outputs for c in o.completions)


@pytest.mark.parametrize("kv_format", ["int8:channel", "int4:channel/int8"])
def test_drafts_never_fill_a_block_that_could_not_be_reopened(kv_format):
    """Where a block's scale is fixed when it is full, no guess may fill it."""
    config = EngineConfig(kv_format=kv_format, block_size=8, attention_backend="reference")
    prompts = [random_prompt(n) for n in (3, 8, 13)]
    _, _, trace = both_ways(prompts, SamplingParams(max_tokens=20), config, right=0.5)
    drafts = [s for r in trace.steps for s in r.sequences if s.draft]
    assert len(drafts) > 10
    assert all(s.start % 8 + len(s.draft.token_ids) <= 6 for s in drafts)


def test_drafts_take_only_what_nobody_else_needs():
    """Budget behind the prompts, and blocks without taking any away."""
    config = EngineConfig(
        exact=True, block_size=2, num_blocks=16, max_num_seqs=2, max_num_batched_tokens=4
    )
    prompts, params = [random_prompt(6), random_prompt(9)], SamplingParams(max_tokens=8)
    plain, outputs, trace = both_ways(prompts, params, config, longest=20)
    assert [what(o) for o in outputs] == [what(o) for o in plain]
    assert not any(r.preempted for r in trace.steps[:-8])
    assert all(r.num_tokens <= 4 for r in trace.steps)
    assert any(s.draft for r in trace.steps for s in r.sequences)
    phases = [r for r in trace.steps if r.phase == "mixed"]
    assert all(
        not s.draft
        for r in phases
        for s in r.sequences
        if len(r.sequences) > 1 and r.num_tokens < 4
    )


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft([1] * 100), "a draft has 100 tokens, the limit was"),
        (Draft([61]), "token id 61, vocab_size=61"),
        (Draft([-1]), "token id -1"),
        (Draft([1, 2], torch.zeros(1, 61)), "probabilities of shape (1, 61), not (2, 61)"),
    ],
)
def test_a_bad_draft_is_refused_and_the_engine_goes_on(draft, message):
    prompt, params = random_prompt(9), SamplingParams(max_tokens=8)
    with Engine(MODEL, EngineConfig(exact=True)) as engine:
        [plain] = engine.generate(prompt, params)
    guess = knowing([plain])
    with Engine(MODEL, EngineConfig(exact=True, speculation=guess)) as engine:
        request_id = engine.submit(prompt, params)
        engine.step()
        honest, guess.propose = guess.propose, lambda sequences, limits: [draft]
        with pytest.raises(ValueError, match="speculation") as caught:
            engine.step()
        assert message in str(caught.value)
        guess.propose = honest
        while engine.step():
            pass
        assert engine.collect(request_id).token_ids == plain.token_ids
        assert engine.pool.num_free == engine.config.num_blocks


def test_an_interrupt_while_guessing_loses_nothing():
    prompt, params = random_prompt(9), SamplingParams(max_tokens=8)
    with Engine(MODEL, EngineConfig(exact=True)) as engine:
        [plain] = engine.generate(prompt, params)
    guess = knowing([plain])
    propose, calls = guess.propose, iter(range(100))

    def interrupted(sequences, limits):
        if next(calls) % 2:
            raise KeyboardInterrupt
        return propose(sequences, limits)

    guess.propose = interrupted
    with Engine(MODEL, EngineConfig(exact=True, speculation=guess, block_size=2)) as engine:
        request_id, caught = engine.submit(prompt, params), 0
        while engine.scheduler.has_work:
            try:
                engine.step()
            except KeyboardInterrupt:
                caught += 1
        assert caught > 1
        assert engine.collect(request_id).token_ids == plain.token_ids
        assert engine.pool.num_free == engine.config.num_blocks


def test_an_abort_between_steps_gives_back_what_drafts_had():
    prompts = [random_prompt(9), random_prompt(5)]
    with Engine(MODEL, EngineConfig(exact=True)) as engine:
        plain = engine.generate(prompts, SamplingParams(max_tokens=20))
    guess = knowing(plain, right=0.7)
    with Engine(MODEL, EngineConfig(exact=True, speculation=guess, block_size=2)) as engine:
        first, second = (engine.submit(p, SamplingParams(max_tokens=20)) for p in prompts)
        for _ in range(4):
            engine.step()
        engine.abort(first)
        assert len(guess.seen) == 1
        while engine.step():
            pass
        assert engine.collect(second).token_ids == plain[1].token_ids
        assert engine.pool.num_free == engine.config.num_blocks
    assert not guess.seen


def test_streams_and_prefix_cache_with_drafts():
    prompt, params = random_prompt(17), SamplingParams(max_tokens=12)
    with Engine(MODEL, EngineConfig(exact=True)) as engine:
        [plain] = engine.generate(prompt, params)
    config = EngineConfig(exact=True, block_size=4, speculation=knowing([plain], right=0.8))
    with Engine(MODEL, config) as engine:
        for _ in range(2):
            chunks = list(engine.stream(prompt, params))
            assert [i for chunk in chunks for i in chunk.token_ids] == plain.token_ids
        follow_up = prompt + plain.token_ids[:8]
        hits = engine.prefix_cache_stats.num_hit_tokens
        [output] = engine.generate([follow_up], SamplingParams(max_tokens=1))
        assert engine.prefix_cache_stats.num_hit_tokens - hits == 24
        assert output.token_ids == [plain.token_ids[8]]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"speculation": "prompt_lookup"}, "speculation='prompt_lookup' must be None"),
        ({"heavy_tokens": 4, "window": 8, "enable_prefix_cache": False}, "heavy_tokens=4"),
    ],
)
def test_what_does_not_go_together_is_refused(knobs, message):
    guess = Guess(lambda sequence, length: [], 61, random.Random(0))
    with pytest.raises(ValueError, match="speculation") as caught:
        EngineConfig(**({"speculation": guess} | knobs))
    assert message in str(caught.value)


def test_beam_search_refuses_drafts():
    guess = Guess(lambda sequence, length: [], 61, random.Random(0))
    with pytest.raises(ValueError, match="must be None in beam search"):
        beam_search(
            MODEL, [1, 2], beam_width=2, max_tokens=3, config=EngineConfig(speculation=guess)
        )
