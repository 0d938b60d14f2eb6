"""The real model against transformers: same logits, same greedy tokens, on sixteen prompts."""

import pytest
import torch
from pdlab_kernels.cpu.target import TARGET

import pdlab
from pdlab import EngineConfig, SamplingParams
from tests.helpers import gaps_below_best, load_prompts, relative_error, run_watched

PROMPTS = load_prompts()
NUM_TOKENS = 64
RELATIVE = 1e-4
NEAR_TIE = 2e-4
"""Logits here reach 44, and two fp32 implementations differ by up to 1e-4 in one of them."""


@pytest.fixture(scope="module")
def generated(smollm2):
    """All prompts in one batch: by name, (prompt ids, output ids, logits of each)."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = list(PROMPTS.values())
    outputs, seen, engine = run_watched(smollm2, EngineConfig(), prompts, params, kv=False)
    ids = [request.prompt_ids for request in engine.trace.requests.values()]
    assert max(len(record.sequences) for record in engine.trace.steps) == len(PROMPTS) == 16
    results = zip(ids, outputs, [torch.stack(s.logits) for s in seen], strict=True)
    return dict(zip(PROMPTS, results, strict=True))


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name, generated, smollm2_hf):
    """One forward pass over prompt and output judges every token: each must be the best after
    those before it, which is what greedy decoding means."""
    prompt_ids, token_ids, logits = generated[name]
    assert len(token_ids) == NUM_TOKENS
    with torch.inference_mode():
        expected = smollm2_hf(torch.tensor([prompt_ids + token_ids[:-1]])).logits[0]
    expected = expected[len(prompt_ids) - 1 :]
    assert relative_error(logits, expected) < RELATIVE
    flips = {i: gap for i, gap in enumerate(gaps_below_best(expected, token_ids)) if gap > 0}
    assert all(gap < NEAR_TIE for gap in flips.values()), f"tokens that are not the best: {flips}"


@pytest.mark.parametrize("name", ["chinese-who", "chat-turns"])
def test_tokens_equal_those_that_transformers_generates(name, generated, smollm2_hf):
    prompt_ids, token_ids, _ = generated[name]
    ids = torch.tensor([prompt_ids])
    output = smollm2_hf.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    assert output[0, len(prompt_ids) :].tolist() == token_ids


@pytest.mark.skipif(TARGET == "torch", reason="no compiled kernels here")
@pytest.mark.parametrize(("weights", "relative"), [("fp32", 1e-4), ("file", 1e-3)])
def test_the_compiled_step_takes_the_same_path(weights, relative, generated):
    """The blocks of the file too, which fp32 was made of: only activations are rounded."""
    model = pdlab.load("smollm2-135m", weights=weights, dtype="fp32", progress=False)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts, config = list(PROMPTS.values()), EngineConfig(backend="cpu")
    outputs, seen, _ = run_watched(model, config, prompts, params, kv=False)
    for (_, token_ids, logits), tokens, ours in zip(generated.values(), outputs, seen, strict=True):
        same = next((i for i in range(NUM_TOKENS) if tokens[i] != token_ids[i]), NUM_TOKENS)
        compared = min(same + 1, NUM_TOKENS)
        assert relative_error(torch.stack(ours.logits[:compared]), logits[:compared]) < relative
        if same < NUM_TOKENS:
            [gap] = gaps_below_best(logits[same : same + 1], tokens[same : same + 1])
            assert gap < NEAR_TIE * 10, f"token {same}"
