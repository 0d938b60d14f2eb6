"""The engine on the kernels themselves: `EngineConfig(backend="triton")` beside torch."""

from dataclasses import replace

import pytest
import torch

from pdlab import Engine, EngineConfig, ModelConfig, SamplingParams
from pdlab.engine.triton_forward import why_not

from ....helpers import TINY, random_model, random_prompt, run_watched

SHAPE = replace(TINY, head_dim=64)
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)
BOTH = ("triton", "torch")


def logits_of(shape: ModelConfig, prompts: list[list[int]], **knobs):
    """By backend: the first and the last row of logits of each prompt."""
    found = []
    for backend in BOTH:
        config = EngineConfig(backend=backend, max_num_seqs=4, num_blocks=32, **knobs)
        _, seen, engine = run_watched(random_model(shape), config, prompts, GREEDY, kv=False)
        assert engine.config.backend == backend
        found.append([torch.stack((mine.logits[0], mine.logits[-1])) for mine in seen])
    return found


@pytest.mark.parametrize("graphs", [True, False], ids=["padded", "one by one"])
def test_chunks_beside_decodes(graphs: bool) -> None:
    """Three sequences, so a bucket of four; the long prompt's chunks run beside two decodes."""
    prompts = [random_prompt(n) for n in (4, 1, 21)]
    knobs = {"chunk_size": 8, "max_num_batched_tokens": 12, "cuda_graphs": graphs}
    ours, theirs = logits_of(SHAPE, prompts, **knobs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 3, "num_kv_heads": 1},
        {"qk_norm": True, "family": "qwen3"},
        {"qkv_bias": True, "family": "qwen2", "head_dim": 80},
    ],
    ids=["3-over-1", "qk-norm", "bias"],
)
def test_shapes(changes: dict) -> None:
    ours, theirs = logits_of(replace(SHAPE, num_layers=1, **changes), [random_prompt(9)])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "knobs",
    [{"window": 7}, {"window": 9, "sink_tokens": 3, "block_size": 4}],
    ids=["window", "sinks"],
)
def test_windows(knobs: dict) -> None:
    shape = replace(SHAPE, family="mistral", layer_windows=(8, 17))
    ours, theirs = logits_of(shape, [random_prompt(26)], chunk_size=11, **knobs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_format", ["fp16", "int8/int4", "fp8"])
def test_kv_formats(kv_format: str) -> None:
    shape = replace(SHAPE, num_layers=1)
    ours, theirs = logits_of(shape, [random_prompt(18)], kv_format=kv_format)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def test_a_cached_prefix_is_read() -> None:
    model, prompt = random_model(replace(SHAPE, num_layers=1)), random_prompt(35)
    tokens = []
    for backend in BOTH:
        with Engine(model, EngineConfig(backend=backend, num_blocks=32)) as engine:
            for _ in range(2):
                [output] = engine.generate([prompt], SamplingParams(max_tokens=2))
            assert engine.trace.steps[-2].sequences[0].num_tokens < 35
            tokens.append(output.token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
    ("shape", "knobs", "reason"),
    [
        (SHAPE, {"kv_format": "int8:channel"}, "only scales of tokens"),
        (SHAPE, {"kv_format": "int8:token:2"}, "32 groups"),
        (replace(SHAPE, head_dim=32), {"kv_format": "fp32"}, "head_dim=32"),
        (replace(SHAPE, num_heads=34, num_kv_heads=2), {"kv_format": "fp32"}, "num_heads=34"),
    ],
)
def test_what_the_kernels_refuse_is_named(shape: ModelConfig, knobs: dict, reason: str) -> None:
    assert reason in why_not(random_model(shape), EngineConfig(**knobs))
