"""Exact mode: lossless knobs change no bit of the KV cache, the logits, or the tokens."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab import EngineConfig, NaiveGenerator, SamplingParams
from tests.helpers import (
    SHAPES,
    Seen,
    load_prompts,
    plain_kv,
    random_model,
    random_prompt,
    run_watched,
)

KINDS = (SamplingParams(), SamplingParams(temperature=0.9, seed=7))


@cache
def plain_run(shape: str, prompt: tuple[int, ...], params: SamplingParams) -> tuple[list, Seen]:
    """The run to compare with: this request alone, in one chunk, with room for everything."""
    config = EngineConfig(exact=True)
    tokens, seen, _ = run_watched(random_model(SHAPES[shape]), config, [list(prompt)], [params])
    return tokens[0], seen[0]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[list[int]], list[SamplingParams], EngineConfig]:
    """Requests in any order and company, and any setting of the knobs that can serve them."""
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=4)
    )
    prompts = [random_prompt(length, seed=draw(st.integers(0, 2))) for length, _ in shapes]
    params = [
        SamplingParams(max_tokens=tokens, temperature=kind.temperature, seed=kind.seed)
        for _, tokens in shapes
        for kind in [draw(st.sampled_from(KINDS))]
    ]
    block_size = draw(st.sampled_from([1, 3, 4, 16, 64]))
    longest = max(length + tokens - 1 for length, tokens in shapes)
    least = -(-longest // block_size)
    max_num_seqs = draw(st.integers(1, 4))
    config = EngineConfig(
        exact=True,
        block_size=block_size,
        num_blocks=least + draw(st.sampled_from([0, 0, 1, 2, 100])),
        chunk_size=draw(st.sampled_from([None, 1, 2, 5, 16, 31])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 3, 17, 200])),
    )
    return prompts, params, config


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=25)
@given(workload=workloads())
def test_no_lossless_knob_changes_a_bit(shape, workload):
    prompts, params, config = workload
    outputs, seen, _ = run_watched(random_model(SHAPES[shape]), config, prompts, params)
    for prompt, each, tokens, mine in zip(prompts, params, outputs, seen, strict=True):
        plain_tokens, plain = plain_run(shape, tuple(prompt), each)
        assert tokens == plain_tokens
        assert_same_bits(mine, plain)


def assert_same_bits(mine: Seen, plain: Seen) -> None:
    """Every row of logits, and the KV cache after every step, preempted or not."""
    assert torch.equal(torch.stack(mine.logits), torch.stack(plain.logits))
    whole = plain.kv[-1]
    assert max(kv.shape[2] for kv in mine.kv) == whole.shape[2]
    for kv in mine.kv:
        assert torch.equal(kv, whole[:, :, : kv.shape[2]])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 70])
def test_paging_itself_changes_no_bit(shape, length):
    """Against a pass without engine, cache or blocks, and against the naive generator."""
    model, prompt = random_model(SHAPES[shape]), random_prompt(length)
    params = SamplingParams(max_tokens=5)
    tokens, seen = plain_run(shape, tuple(prompt), params)
    naive = NaiveGenerator(model, exact=True)
    assert naive.generate(prompt, params).token_ids == tokens
    logits = naive.logits(prompt + tokens[:-1])
    assert torch.equal(torch.stack(seen.logits), logits[length - 1 :])
    assert torch.equal(seen.kv[-1], plain_kv(model, prompt + tokens[:-1]))


@pytest.mark.parametrize("shape", SHAPES)
def test_preemption_changes_no_bit(shape):
    """Three sequences grow in a pool that holds one and a half of them."""
    prompts = [random_prompt(length) for length in (13, 8, 10)]
    params = SamplingParams(max_tokens=12)
    config = EngineConfig(exact=True, block_size=4, num_blocks=9)
    outputs, seen, engine = run_watched(random_model(SHAPES[shape]), config, prompts, params)
    assert sum(len(record.preempted) for record in engine.trace.steps) >= 2
    for prompt, tokens, mine in zip(prompts, outputs, seen, strict=True):
        plain_tokens, plain = plain_run(shape, tuple(prompt), params)
        assert tokens == plain_tokens
        assert_same_bits(mine, plain)


def test_fast_mode_would_fail_these_tests():
    """Why a mode is needed: the same comparison, in fast mode, finds other bits."""
    model = random_model(SHAPES["group-of-2"])
    prompts = [random_prompt(length) for length in (40, 23, 9)]
    params = SamplingParams(max_tokens=4)
    together = run_watched(model, EngineConfig(), prompts, params)[1]
    in_chunks = run_watched(model, EngineConfig(chunk_size=3), prompts, params)[1]
    pairs = zip(together, in_chunks, strict=True)
    assert any(not torch.equal(a.kv[-1], b.kv[-1]) for a, b in pairs)


def test_exact_mode_holds_on_the_real_model(smollm2):
    names = ("chinese-who", "capital")
    texts = [load_prompts()[name] for name in names]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    plain = [
        run_watched(smollm2, EngineConfig(exact=True, num_blocks=8), [t], params) for t in texts
    ]
    needed = max(seen[0].kv[-1].shape[2] for _, seen, _ in plain)
    config = EngineConfig(
        exact=True,
        block_size=3,
        num_blocks=-(-needed // 3) + 1,
        chunk_size=4,
        max_num_batched_tokens=32,
    )
    outputs, seen, engine = run_watched(smollm2, config, texts[::-1], params)
    assert sum(len(record.preempted) for record in engine.trace.steps) >= 1
    for tokens, mine, (solo_tokens, solo, _) in zip(outputs, seen, plain[::-1], strict=True):
        assert [tokens] == solo_tokens
        assert_same_bits(mine, solo[0])
    prompt_ids = smollm2.tokenizer.encode(texts[0])
    logits = NaiveGenerator(smollm2, exact=True).logits(prompt_ids + outputs[-1][:-1])
    assert torch.equal(torch.stack(seen[-1].logits), logits[len(prompt_ids) - 1 :])
