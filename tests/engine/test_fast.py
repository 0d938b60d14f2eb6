"""Fast mode: lossless knobs change greedy tokens at near ties only, and the test states the gap."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab import EngineConfig, NaiveGenerator, SamplingParams
from tests.helpers import SHAPES, random_model, random_prompt, run_watched, tie_gaps

NEAR_TIE = 1e-4
"""Logits of these models have a standard deviation near 1; fp32 sums differ by about 1e-6."""


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=15)
@given(data=st.data())
def test_greedy_tokens_are_the_best_ones_or_near_ties(shape, backend, data):
    model = random_model(SHAPES[shape])
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    config = EngineConfig(
        attention_backend=backend,
        block_size=block_size,
        num_blocks=-(-(max(lengths) + 7) // block_size) + data.draw(st.sampled_from([0, 2, 100])),
        chunk_size=data.draw(st.sampled_from([None, 1, 3, 16])),
        max_num_seqs=4,
        max_num_batched_tokens=data.draw(st.sampled_from([4, 11, 200])),
    )
    prompts = [random_prompt(length) for length in lengths]
    outputs, _, _ = run_watched(model, config, prompts, SamplingParams(max_tokens=8), kv=False)
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert max(tie_gaps(model, prompt, tokens)) < NEAR_TIE


def test_the_gap_of_a_token_that_is_not_the_best_is_large():
    """What the test above would see if the engine chose wrongly."""
    model, prompt = random_model(), random_prompt(9)
    params = SamplingParams(max_tokens=4)
    tokens = NaiveGenerator(model, exact=True).generate(prompt, params).token_ids
    assert tie_gaps(model, prompt, tokens) == [0.0] * 4
    assert all(gap > NEAR_TIE for gap in tie_gaps(model, prompt, [(t + 1) % 61 for t in tokens]))


@pytest.mark.parametrize("kv_format", ["fp16", "bf16"])
def test_a_smaller_kv_format_stores_rounded_values_of_the_same_run(kv_format):
    """A lossy knob: its error is bounded by the format's rounding, and its bytes are half."""
    model, prompts = random_model(), [random_prompt(30)]
    params = SamplingParams(max_tokens=1)
    _, [plain], _ = run_watched(model, EngineConfig(), prompts, params)
    _, [small], _ = run_watched(model, EngineConfig(kv_format=kv_format), prompts, params)
    assert small.kv[0].nbytes * 2 == plain.kv[0].nbytes
    rounding = {"fp16": 2**-11, "bf16": 2**-8}[kv_format]
    first_layer = (x.kv[0][:, 0].float() for x in (small, plain))
    error = (next(first_layer) - (exact := next(first_layer))).abs()
    assert (error <= rounding * exact.abs() + 1e-7).all()
    assert error.max() > 0
