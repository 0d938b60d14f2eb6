"""What the lesson on windows measures, against the engine and against small cases by hand."""

import numpy as np
import pytest
import torch

import pdlab
from pdlab import Engine, EngineConfig, Model, NaiveGenerator, SamplingParams, Trace
from pdlab.attention import Window
from pdlab.kvcache import blocks_for
from pdlab.trace import DROPPED, Capture
from pdlab.workbench.window_experiments import (
    blocks_held,
    forced_decode_logits,
    generate_switched,
    recall,
    sink_shares,
    window_losses,
)
from tests.helpers import random_model, random_prompt

LENGTH, PREFILL = 40, 24
NARROW = Window(6)


@pytest.fixture
def ids() -> list[int]:
    return random_prompt(LENGTH)


def logits(ids: list[int], prefill: Window | None, decode: Window | None) -> torch.Tensor:
    return forced_decode_logits(random_model(), torch.tensor(ids), PREFILL, prefill, decode)


@pytest.mark.parametrize("window", [None, NARROW, Window(6, sinks=2)], ids=str)
def test_one_window_in_both_phases_is_what_the_naive_generator_computes(
    ids: list[int], window: Window | None
) -> None:
    whole = NaiveGenerator(random_model(), window=window).logits(ids)
    torch.testing.assert_close(logits(ids, window, window), whole[PREFILL:-1])


def test_the_window_of_each_phase_counts(ids: list[int]) -> None:
    full = logits(ids, None, None)
    assert not torch.allclose(logits(ids, None, NARROW), full, atol=1e-3)
    assert not torch.allclose(logits(ids, NARROW, None), full, atol=1e-3)
    wide = Window(LENGTH)
    torch.testing.assert_close(logits(ids, wide, wide), full)


def test_losses_begin_with_full_attention_and_agree_with_it(ids: list[int]) -> None:
    losses = window_losses(random_model(), ids, {"narrow": (NARROW, NARROW)}, num_prefill=PREFILL)
    assert list(losses) == ["full", "narrow"]
    assert losses["full"].agreement == 1
    assert losses["full"].num_tokens == LENGTH - PREFILL - 1
    rows = logits(ids, None, None).log_softmax(-1)
    right = -rows.gather(1, torch.tensor(ids[PREFILL + 1 :])[:, None]).mean()
    assert losses["full"].perplexity == pytest.approx(float(right.exp()), rel=1e-4)


@pytest.mark.parametrize("num_prefill", [0, LENGTH - 1])
def test_a_text_needs_both_phases(ids: list[int], num_prefill: int) -> None:
    with pytest.raises(ValueError, match="num_prefill"):
        window_losses(random_model(), ids, {}, num_prefill=num_prefill)


@pytest.mark.parametrize("window", [None, NARROW], ids=str)
def test_generating_with_one_window_is_the_engine_with_that_window(
    window: Window | None,
) -> None:
    prompt = random_prompt(20)
    output = generate_switched(random_model(), prompt, prefill=window, decode=window, max_tokens=10)
    config = EngineConfig(window=window.size if window else None)
    with Engine(random_model(), config) as engine:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        assert output.token_ids == engine.generate(prompt, params)[0].token_ids


def test_a_window_in_decode_leaves_the_first_token_alone() -> None:
    """The first token comes from the prefill; what follows, from decode."""
    prompt = random_prompt(20)
    full = generate_switched(random_model(), prompt, max_tokens=10).token_ids
    last = generate_switched(random_model(), prompt, decode=Window(1), max_tokens=10).token_ids
    assert last[0] == full[0]
    assert last != full


def test_share_of_the_sinks() -> None:
    trace = Trace(machine={}, model={}, engine={})
    weights = np.array([[[1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]]])  # one head, three tokens
    trace.captures.append(Capture(0, "r0", 4, "attention", "reference", 0, [0], weights))
    assert sink_shares(trace, 1) == {4: pytest.approx((1 + 0.5 + 0.2) / 3)}
    assert sink_shares(trace, 2, after=2) == {4: pytest.approx(0.5)}
    with pytest.raises(ValueError, match="after=3"):
        sink_shares(trace, 1, after=3)


def test_blocks_held_counts_neither_dropped_ones_nor_shared_ones_twice() -> None:
    model = pdlab.load("random:tiny-mistral", progress=False)
    config = EngineConfig(block_size=8, chunk_size=8, num_blocks=16)
    with Engine(model, config) as engine:
        engine.generate(list(range(80)), SamplingParams(max_tokens=4, ignore_eos=True, n=2))
        steps = engine.trace.steps
    last = steps[-1].residents
    assert DROPPED in last[0].block_table
    assert len(last) == 2
    own = [set(r.block_table) - {DROPPED} for r in last]
    assert blocks_held(steps[-1]) == len(own[0] | own[1]) < len(own[0]) + len(own[1])


STORY = (
    "This is a short story about a small town. The code is 7319. Two, three, four, five, six, "
    "seven, eight. The code is"
)


def test_what_is_recalled_stands_in_a_kept_block(smollm2: Model) -> None:
    full = recall(smollm2, STORY, "7319")
    token_ids = smollm2.tokenizer.encode(STORY)
    assert full.knows
    assert full.num_visible == len(token_ids) + 5  # six are generated, the last one is never fed
    assert full.kept == list(range(blocks_for(full.num_visible, 8)))
    texts = [smollm2.tokenizer.decode(token_ids[8 * i : 8 * i + 8]) for i in full.fact_blocks]
    assert "7319" in "".join(texts)

    narrow = recall(smollm2, STORY, "7319", window=8, sink_tokens=2)
    assert narrow.num_visible == 8 + 2
    assert not set(narrow.fact_blocks) & set(narrow.kept)
    assert not narrow.knows


def test_heavy_hitters_see_whole_blocks(smollm2: Model) -> None:
    knobs = {"window": 8, "sink_tokens": 2, "heavy_tokens": 8}
    seen = recall(smollm2, STORY, "7319", **knobs)
    full = recall(smollm2, STORY, "7319")
    gone = len(full.kept) - len(seen.kept)
    assert gone > 0
    assert seen.num_visible == full.num_visible - 8 * gone
    with pytest.raises(ValueError, match="fact='9999' is not in the story"):
        recall(smollm2, STORY, "9999")
