"""The paged engine computes what transformers computes, whatever the backend and the chunks."""

import pytest
import torch

from pdlab import EngineConfig, SamplingParams
from pdlab.attention import BACKENDS
from tests.helpers import gaps_below_best, random_prompt, relative_error, run_watched
from tests.models.hf_twins import FAMILIES, SIZES, hf_logits, twins

RELATIVE = 1e-4
PROMPTS = [random_prompt(length, SIZES["vocab_size"]) for length in (23, 1, 9, 16)]
GREEDY = SamplingParams(max_tokens=9)


@pytest.mark.parametrize("chunk_size", [None, 5])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_chunks_and_decodes_give_the_logits_of_transformers(family, backend, chunk_size):
    theirs, ours = twins(family)
    config = EngineConfig(
        attention_backend=backend, block_size=4, chunk_size=chunk_size, num_blocks=64
    )
    outputs, seen, _ = run_watched(ours, config, PROMPTS, GREEDY, kv=False)
    for prompt, token_ids, mine in zip(PROMPTS, outputs, seen, strict=True):
        expected = hf_logits(theirs, prompt + token_ids[:-1])[len(prompt) - 1 :]
        assert relative_error(torch.stack(mine.logits), expected) < RELATIVE
        assert max(gaps_below_best(expected, token_ids)) == 0
