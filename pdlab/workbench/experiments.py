"""Runs that lessons repeat with other numbers. Each returns the trace that pictures are drawn from.

Runs of different sizes alternate, round after round, so that a machine that is busy for a while
does not slow one size only. All show a progress bar and can be interrupted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from torch import Tensor

from pdlab.costmodel import StepCost
from pdlab.engine import Engine, EngineConfig, NaiveGenerator, NaiveOutput, SamplingParams
from pdlab.engine.recorder import cost_of
from pdlab.kvcache import blocks_for
from pdlab.models import Model
from pdlab.trace import StepRecord, Trace
from pdlab.workbench.figures.latency import NEAR, ttft_points
from pdlab.workbench.lesson import progress

BLOCK_SIZE = 16


def random_prompt(model: Model, num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids drawn at random: as good as text where only the time matters."""
    draw = random.Random(seed)
    return [draw.randrange(model.config.vocab_size) for _ in range(num_tokens)]


def prefill_sweep(
    model: Model, lengths: Sequence[int], *, repeats: int = 3, chunk_size: int | None = None
) -> Trace:
    """Random prompts of these lengths, each alone from its arrival to its first token.

    Args:
        chunk_size: most prompt tokens a step; None computes each prompt in one step.
    """
    longest = max(lengths)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=blocks_for(longest, BLOCK_SIZE),
        max_num_batched_tokens=max(longest, 32),
        chunk_size=chunk_size,
        enable_prefix_cache=False,
    )
    warm_up(model)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    with Engine(model, config) as engine:
        for length in progress([n for _ in range(repeats) for n in lengths], "prefill"):
            engine.generate(random_prompt(model, length, seed=length), params)
        return engine.trace


def decode_sweep(
    model: Model,
    batch_sizes: Sequence[int] = (1,),
    context_lens: Sequence[int] = (128,),
    *,
    num_steps: int = 6,
    repeats: int = 2,
) -> Trace:
    """Every batch size with every context length: random prompts prefilled, then decoded together.

    The prompts are `num_steps / 2` tokens shorter, so the decode steps lie around the context
    length asked for. Each combination leaves `num_steps` decode steps a repeat. All prompts of a
    place in the batch begin alike, so the prefix cache spares most of the prefill; K and V that a
    step reads are as many.
    """
    shapes = [(b, n) for b in batch_sizes for n in context_lens]
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=max(b * blocks_for(n + num_steps, BLOCK_SIZE) for b, n in shapes),
        max_num_seqs=max(batch_sizes),
        max_num_batched_tokens=max(b * n for b, n in shapes) + max(batch_sizes),
    )
    warm_up(model)
    params = SamplingParams(max_tokens=num_steps + 1, ignore_eos=True)
    with Engine(model, config) as engine:
        for batch_size, context_len in progress(shapes * repeats, "decode"):
            length = max(1, context_len - num_steps // 2)
            engine.generate([random_prompt(model, length, i) for i in range(batch_size)], params)
        return engine.trace


def median_ttft_s(trace: Trace, num_tokens: int | None = None) -> float:
    """Median time to first token, in seconds, of the requests with this prompt length (or all)."""
    points = ttft_points(trace)
    return median(p.ttft_s for p in points if num_tokens in (None, p.prompt_tokens))


def decode_steps(
    trace: Trace, batch_size: int | None = None, context_len: int | None = None
) -> list[StepRecord]:
    """The steps that only decoded: with this many sequences, near this context length (or all)."""
    return [
        step
        for step in trace.steps
        if step.phase == "decode"
        and batch_size in (None, len(step.sequences))
        and (context_len is None or abs(step.sequences[0].end - context_len) <= NEAR)
    ]


def decode_step_s(
    trace: Trace, batch_size: int | None = None, context_len: int | None = None
) -> float:
    """Median wall time of `decode_steps`, in seconds."""
    return median(step.wall_s for step in decode_steps(trace, batch_size, context_len))


def kv_after_prefill(
    model: Model, prompt: str | list[int], *, exact: bool = False, chunk_size: int | None = None
) -> Tensor:
    """K and V of a prompt, [2, num_layers, num_tokens, num_kv_heads, head_dim], from the cache."""
    with Engine(model, EngineConfig(exact=exact, chunk_size=chunk_size)) as engine:
        request_id = engine.submit(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        while (record := engine.step()) and record.sequences[0].sampled is None:
            pass
        return engine.read_kv(request_id)


@dataclass(frozen=True)
class CacheComparison:
    """The same greedy tokens made without and with a KV cache, on one machine in one run."""

    naive: NaiveOutput
    cached: Trace

    @property
    def same_tokens(self) -> bool:
        return self.naive.token_ids == self.cached.output_ids(next(iter(self.cached.requests)))

    @property
    def cached_s(self) -> list[float]:
        """Wall time of each token's step, the prefill's first."""
        return [step.wall_s for step in self.cached.steps]

    @property
    def cached_costs(self) -> list[StepCost]:
        return [cost_of(step) for step in self.cached.steps]


def compare_with_naive(model: Model, prompt: str, num_tokens: int) -> CacheComparison:
    """Continue a prompt greedily by `num_tokens` tokens, without a KV cache and with one."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    warm_up(model)
    with Engine(model) as engine:
        prompt_ids = engine.generate(prompt, params)[0].prompt_ids
        cached = engine.trace
    naive = NaiveGenerator(model).generate(
        prompt_ids, params, track=lambda tokens: progress(tokens, "without a cache")
    )
    return CacheComparison(naive, cached)


def warm_up(model: Model) -> None:
    """Run a few steps whose times nobody looks at: the first ones are slower."""
    with Engine(model, EngineConfig(num_blocks=8, record_trace=False)) as engine:
        engine.generate(list(range(64)), SamplingParams(max_tokens=3, ignore_eos=True))
