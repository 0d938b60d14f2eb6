"""Experiments on KV formats that a lesson runs: what rounding does, what a step then takes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.kvcache import KVFormat, PagedKVCache, blocks_for
from pdlab.models import Model, ModelConfig
from pdlab.trace import StepRecord
from pdlab.workbench.experiments import BLOCK_SIZE, random_prompt, warm_up
from pdlab.workbench.kv_costs import open_block_bytes
from pdlab.workbench.lesson import progress


def bytes_per_token(
    config: ModelConfig, formats: Sequence[str], block_size: int = BLOCK_SIZE
) -> dict[str, float]:
    """Bytes that a token's K and V take in each format, read off the tensors of a real block."""
    return {
        text: PagedKVCache(config, 1, block_size, text, max_open_blocks=1).bytes_per_token
        for text in formats
    }


def open_area_bytes(
    config: ModelConfig,
    kv_format: str,
    block_size: int = BLOCK_SIZE,
    num_blocks: int = 2 * EngineConfig().max_num_seqs,
) -> int:
    """Bytes beside the blocks for those that still fill; 0 for formats that are not block-wise.

    An engine makes room for two blocks a sequence: the one it fills, and the next.
    """
    return num_blocks * open_block_bytes(config, kv_format, block_size)


def as_stored(x: Tensor, kv_format: str, block_size: int = BLOCK_SIZE) -> Tensor:
    """K or V as a cache of this format would give it back, full blocks only.

    Args:
        x: [..., num_tokens, num_kv_heads, head_dim]; tokens after the last full block are left out.

    Raises:
        ValueError: there is no full block, or no such format.
    """
    num_blocks = x.shape[-3] // block_size
    if not num_blocks:
        raise ValueError(f"x has {x.shape[-3]} tokens, a block needs block_size={block_size}")
    fmt = KVFormat.parse(kv_format, x.shape[-1])
    blocks = x.narrow(-3, 0, num_blocks * block_size).unflatten(-3, (num_blocks, block_size))
    return fmt.decode(fmt.encode(blocks), torch.float32).flatten(-4, -3)


def relative_error(x: Tensor, kv_format: str, block_size: int = BLOCK_SIZE) -> float:
    """Length of the rounding error of `as_stored` over the length of what was stored (L2)."""
    stored = as_stored(x, kv_format, block_size)
    right = x.narrow(-3, 0, stored.shape[-3]).float()
    return ((stored - right).norm() / right.norm()).item()


def outlier_ratios(x: Tensor) -> Tensor:
    """How many times as large as the median channel the largest one is, [num_layers, num_kv_heads].

    A channel's size is the mean of its absolute values over all tokens.

    Args:
        x: K or V, [num_layers, num_tokens, num_kv_heads, head_dim].
    """
    sizes = x.float().abs().mean(1)
    return sizes.amax(-1) / sizes.median(-1).values


class BlockFilling(NamedTuple):
    """Error of the K of a prompt's tokens, as the cache gives it back, after some step."""

    num_tokens: int
    """Tokens cached by then."""
    k_error: float
    """Relative L2 error of the watched tokens' K in layer 0."""


def watch_a_block_fill(
    model: Model, kv_format: str, *, num_prompt: int = 12, num_steps: int = 8, block_size: int = 16
) -> list[BlockFilling]:
    """Decode until the prompt's block is full, and read K of the prompt after every step.

    Layer 0's K depends on the token alone, so the fp32 run has the right answer.
    """
    prompt = random_prompt(model, num_prompt)
    params = SamplingParams(max_tokens=num_steps + 1, ignore_eos=True)
    right: Tensor | None = None
    points: list[BlockFilling] = []
    for text in ("fp32", kv_format):
        config = EngineConfig(kv_format=text, block_size=block_size, num_blocks=8)
        with Engine(model, config) as engine:
            request_id = engine.submit(prompt, params)
            for _ in range(num_steps):
                engine.step()
                kv = engine.read_kv(request_id)
                k = kv[0, 0, :num_prompt].float()
                if text == "fp32":
                    right = k
                else:
                    assert right is not None
                    error = ((k - right).norm() / right.norm()).item()
                    points.append(BlockFilling(kv.shape[2], error))
    return points


def decode_by_format(
    model: Model, formats: Sequence[str], *, context_len: int, num_steps: int = 8
) -> dict[str, list[StepRecord]]:
    """Decode steps of one sequence at about this context length, in each format.

    The engines take turns step by step, so that a machine that is busy for a while does not slow
    one of them only.
    """
    warm_up(model)
    params = SamplingParams(max_tokens=num_steps + 1, ignore_eos=True)
    prompt = random_prompt(model, context_len - num_steps // 2)
    engines: dict[str, Engine] = {}
    try:
        for text in progress(formats, "prefill"):
            config = EngineConfig(
                kv_format=text,
                block_size=BLOCK_SIZE,
                num_blocks=blocks_for(context_len + num_steps, BLOCK_SIZE),
                max_num_batched_tokens=max(context_len, 32),
            )
            engines[text] = Engine(model, config)
            engines[text].submit(prompt, params)
            engines[text].step()
        for _ in progress(range(num_steps), "decode"):
            for engine in engines.values():
                engine.step()
        return {text: engine.trace.steps[1:] for text, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.close()


def step_s(steps: Sequence[StepRecord]) -> float:
    """Median wall time of some steps, in seconds."""
    return median(step.wall_s for step in steps)


def stored_bytes(
    model: Model, prompts: list[str], config: EngineConfig, num_decodes: int = 4
) -> list[Tensor]:
    """What is stored of the first prompt and its first tokens, bit by bit: codes and scales.

    All prompts run together; equal lists mean equal bytes.
    """
    params = SamplingParams(max_tokens=num_decodes + 1, ignore_eos=True)
    with Engine(model, config) as engine:
        first, *_ = [engine.submit(prompt, params) for prompt in prompts]
        raw: list[Tensor] = []
        while not engine.requests[first].finished:
            engine.step()
            sequence = engine.requests[first].samples[0].sequence
            if sequence.num_output_tokens == num_decodes:
                raw = engine.kv_cache.raw(sequence.block_table, sequence.num_computed_tokens)
        return raw


def same_bytes(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether two results of `stored_bytes` are equal, bit by bit."""
    return len(first) == len(second) > 0 and all(
        torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )
