"""Exact mode: lossless knobs change no bit of the KV cache, the logits, or the tokens."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdlab import Engine, EngineConfig, NaiveGenerator, RequestOutput, SamplingParams
from pdlab.attention import Window
from pdlab.engine.config import BATCHING_MODES
from pdlab.engine.policies import POLICIES
from pdlab.engine.sequence import Sequence
from pdlab.sampling import mix
from pdlab.trace import DROPPED, sample_ids
from tests.engine.guessing import Guess
from tests.engine.promises import LastCome
from tests.helpers import (
    SHAPES,
    end_of,
    load_prompts,
    plain_kv,
    random_model,
    random_prompt,
    rows_of,
    run_watched,
)

KINDS = (
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=7),
    SamplingParams(
        temperature=1.3,
        top_k=40,
        top_p=0.95,
        min_p=0.001,
        typical_p=0.95,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.2,
        logit_bias={3: 1.5},
        bad_words=[(5,), (7, 8)],
        seed=11,
        logprobs=2,
        prompt_logprobs=1,
    ),
)
FORMATS = ("fp32", "fp32", "int8", "int4", "fp8/int4:token:4")
"""Those with token scales: how a token is stored does not depend on its neighbours."""


@dataclass
class Stored:
    """What an engine computed and stored for one sequence."""

    logits: list[Tensor] = field(default_factory=list)
    raw: list[tuple[list[Tensor], Tensor]] = field(default_factory=list)
    """After each step that ran it: the bytes, and which positions are there."""


def run_stored(
    shape: str,
    config: EngineConfig,
    prompts: list[list[int]],
    params: list[SamplingParams],
    warm=(),
) -> tuple[list[list[list[int]]], dict[str, Stored], list[RequestOutput]]:
    """Tokens of all samples of each prompt, and what was stored, by sequence id.

    Args:
        warm: prompts to run before, for what they leave in the prefix cache.
    """
    with Engine(random_model(SHAPES[shape]), config) as engine:
        engine.generate(list(warm), SamplingParams(max_tokens=3))
        stored, run = defaultdict(Stored), engine.runner.run

        def watched(batch, clock, step):
            output = run(batch, clock, step)
            rows = iter(() if output.logits is None else output.logits)
            for part in batch.scheduled:
                for drawer, own in rows_of(part, rows, output):
                    stored[drawer.sequence_id].logits += own
                sequence, end = part.sequence, end_of(part, output)
                raw = engine.kv_cache.raw(sequence.block_table, end)
                there = torch.tensor(sequence.block_table) != DROPPED
                there = there.repeat_interleave(config.block_size)[:end]
                stored[sequence.sequence_id].raw.append((raw, there))
            return output

        engine.runner.run = watched  # type: ignore[method-assign]
        outputs = engine.generate(prompts, params)
        assert engine.pool.num_free == config.num_blocks
    return [[c.token_ids for c in o.completions] for o in outputs], stored, outputs


@cache
def plain_run(
    shape: str,
    prompt: tuple[int, ...],
    params: SamplingParams,
    kv_format: str = "fp32",
    window: Window | None = None,
) -> tuple[list[int], Stored]:
    """The run to compare with: one sample alone, in one chunk, in one block, nothing shared.

    In fp32 it is itself compared with generation without a cache.
    """
    config = EngineConfig(
        exact=True,
        block_size=64,
        num_blocks=2,
        kv_format=kv_format,
        enable_prefix_cache=False,
        window=window.size if window else None,
        sink_tokens=window.sinks if window else 0,
    )
    [[tokens]], stored, [output] = run_stored(shape, config, [list(prompt)], [params])
    if kv_format == "fp32":
        naive = NaiveGenerator(random_model(SHAPES[shape]), exact=True, window=window)
        alone = replace(params, prompt_logprobs=None)
        assert naive.generate(list(prompt), alone).token_ids == tokens
        logits = naive.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
        assert torch.equal(torch.stack(stored[output.request_id].logits), logits)
    return tokens, stored[output.request_id]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[list[int]], list[SamplingParams], EngineConfig, list]:
    """Requests in any order and company, and any setting of the knobs that can serve them.

    Prompts are beginnings of three texts, so that many begin alike.
    """
    shapes = draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=4)
    )
    prompts = [random_prompt(40, seed=draw(st.integers(0, 2)))[:length] for length, _ in shapes]
    max_num_seqs = draw(st.integers(1, 4))
    params = [
        replace(
            kind,
            max_tokens=tokens,
            min_tokens=draw(st.integers(0, tokens)),
            n=draw(st.sampled_from([1, 1, min(3, max_num_seqs)])),
        )
        for _, tokens in shapes
        for kind in [draw(st.sampled_from(KINDS))]
    ]
    block_size = draw(st.sampled_from([1, 3, 4, 16, 64]))
    longest = max(length + tokens - 1 for length, tokens in shapes)
    least = -(-longest // block_size)
    window = draw(st.sampled_from([None, None, 3, 9]))
    num_swap_blocks = draw(st.sampled_from([0, 4, 100]))
    config = EngineConfig(
        exact=True,
        block_size=block_size,
        num_blocks=least + draw(st.sampled_from([0, 0, 1, 2, 100])),
        chunk_size=draw(st.sampled_from([None, 1, 2, 5, 16, 31])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 3, 17, 200])),
        enable_prefix_cache=draw(st.booleans()),
        num_swap_blocks=num_swap_blocks,
        preemption="swap" if num_swap_blocks else "recompute",
        kv_format=draw(st.sampled_from(FORMATS)),
        window=window,
        sink_tokens=draw(st.sampled_from([0, 1, 5])) if window else 0,
        batching=draw(st.sampled_from(BATCHING_MODES)),
        policy=draw(st.sampled_from([*POLICIES, LastCome()])),
        max_overtakes=draw(st.sampled_from([0, 1, 100])),
        max_phase_steps=draw(st.sampled_from([1, 3, 16])),
        overlap=draw(st.booleans()),
    )
    warm = draw(st.sampled_from([[], prompts[:1], prompts]))
    return prompts, params, config, warm


def foreknowing(shape: str, config: EngineConfig, window: Window | None, right: float, seed: int):
    """With drafts that are mostly what the plain run says, at temperature 0 and above."""

    def truth(sequence: Sequence, length: int) -> list[int]:
        own = None if sequence.params.seed is None else sequence.seed
        alone = replace(sequence.params, n=1, seed=own)
        plain, _ = plain_run(shape, tuple(sequence.prompt_ids), alone, config.kv_format, window)
        return plain[sequence.num_output_tokens :][:length]

    guess = Guess(truth, SHAPES[shape].vocab_size, random.Random(seed), right)
    return replace(config, speculation=guess)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=16)
@given(
    workload=workloads(),
    split=st.booleans(),
    right=st.sampled_from([None, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 9),
)
def test_no_lossless_knob_changes_a_bit(shape, workload, split, right, seed):
    prompts, params, config, warm = workload
    if split:
        config = replace(config, kv_head_groups=SHAPES[shape].num_kv_heads)
    window = Window(config.window, config.sink_tokens) if config.window else None
    if right is not None:
        config = foreknowing(shape, config, window, right, seed)
    tokens, stored, outputs = run_stored(shape, config, prompts, params, warm)
    for prompt, each, samples, output in zip(prompts, params, tokens, outputs, strict=True):
        for index, (name, mine) in enumerate(
            zip(sample_ids(output.request_id, each.n), samples, strict=True)
        ):
            seed = each.seed if index == 0 or each.seed is None else mix(each.seed, -index)
            one = replace(each, n=1, seed=seed)
            plain, kept = plain_run(shape, tuple(prompt), one, config.kv_format, window)
            assert mine == plain
            assert_same_storage(stored[name], kept, min_steps=len(mine) > 1 or index == 0)


def assert_same_storage(mine: Stored, plain: Stored, min_steps: int) -> None:
    """Every row of logits, and the KV bytes after every step, preempted or not."""
    assert torch.equal(torch.stack(mine.logits), torch.stack(plain.logits))
    whole, _ = plain.raw[-1]
    assert len(mine.raw) >= min_steps
    assert not mine.raw or len(mine.raw[-1][1]) == whole[0].shape[1]
    for raw, there in mine.raw:
        for ours, theirs in zip(raw, whole, strict=True):
            assert torch.equal(ours[:, there], theirs[:, : len(there)][:, there])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 70])
def test_paging_itself_changes_no_bit(shape, length):
    """Against a pass without engine, cache or blocks, and against the naive generator."""
    model, prompt = random_model(SHAPES[shape]), random_prompt(length)
    params = SamplingParams(max_tokens=5)
    [tokens], [seen], _ = run_watched(model, EngineConfig(exact=True), [prompt], params)
    naive = NaiveGenerator(model, exact=True)
    assert naive.generate(prompt, params).token_ids == tokens
    logits = naive.logits(prompt + tokens[:-1])
    assert torch.equal(torch.stack(seen.logits), logits[length - 1 :])
    whole = plain_kv(model, prompt + tokens[:-1])
    assert seen.kv[-1].shape == whole.shape
    for kv in seen.kv:  # what fell out of the layers' windows may be gone
        kept = whole[:, :, : kv.shape[2]].masked_fill(kv.isnan(), 0)
        assert torch.equal(kv.nan_to_num(0), kept)
        assert model.config.layer_windows or not kv.isnan().any()


@pytest.mark.parametrize("policy", [*POLICIES, LastCome()], ids=str)
@pytest.mark.parametrize("batching", BATCHING_MODES)
def test_batching_and_its_order_change_no_bit(batching, policy):
    """Six requests, three seats, prompts longer than a step: every mode and policy has a choice."""
    shape = "group-of-2"
    lengths = (33, 5, 18, 9, 33, 2)
    prompts = [random_prompt(40, seed=n % 2)[:length] for n, length in enumerate(lengths)]
    params = [replace(KINDS[n % 3], max_tokens=2 + n) for n in range(len(lengths))]
    config = EngineConfig(
        exact=True,
        block_size=4,
        num_blocks=30,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        batching=batching,
        policy=policy,
        max_overtakes=2,
        max_phase_steps=2,
    )
    tokens, stored, outputs = run_stored(shape, config, prompts, params)
    for prompt, each, [mine], output in zip(prompts, params, tokens, outputs, strict=True):
        plain, kept = plain_run(shape, tuple(prompt), each)
        assert mine == plain
        assert_same_storage(stored[output.request_id], kept, min_steps=2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_swap_blocks", [0, 100], ids=["recompute", "swap"])
@pytest.mark.parametrize("kv_format", ["fp32", "int8"])
def test_preemption_changes_no_bit(shape, num_swap_blocks, kv_format):
    """Three sequences grow in a pool that holds one and a half of them."""
    prompts = [random_prompt(length) for length in (13, 8, 10)]
    params = SamplingParams(max_tokens=12)
    config = EngineConfig(
        exact=True,
        block_size=4,
        num_blocks=9,
        kv_format=kv_format,
        num_swap_blocks=num_swap_blocks,
        preemption="swap" if num_swap_blocks else "recompute",
    )
    tokens, stored, outputs = run_stored(shape, config, prompts, [params] * 3)
    assert sum(output.metrics.num_preemptions for output in outputs) >= 2
    assert bool(sum(output.metrics.num_swaps for output in outputs)) == bool(num_swap_blocks)
    for prompt, [mine], output in zip(prompts, tokens, outputs, strict=True):
        plain, kept = plain_run(shape, tuple(prompt), params, kv_format)
        assert mine == plain
        assert_same_storage(stored[output.request_id], kept, min_steps=2)


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
        assert torch.equal(torch.stack(mine.logits), torch.stack(solo[0].logits))
        for kv in mine.kv:
            assert torch.equal(kv, solo[0].kv[-1][:, :, : kv.shape[2]])
    prompt_ids = smollm2.tokenizer.encode(texts[0])
    logits = NaiveGenerator(smollm2, exact=True).logits(prompt_ids + outputs[-1][:-1])
    assert torch.equal(torch.stack(seen[-1].logits), logits[len(prompt_ids) - 1 :])
