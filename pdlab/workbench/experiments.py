"""Measurements that lessons repeat with other numbers: sweeps over the real engine.

Every function runs the engine, shows a progress bar, can be interrupted, and returns plain points.
Each point is the median of several runs; runs of different points alternate, so that a machine that
is busy for a while does not slow one point only.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from tqdm.auto import tqdm

from pdlab.costmodel import StepCost
from pdlab.engine import Engine, EngineConfig, NaiveGenerator, SamplingParams
from pdlab.models import Model
from pdlab.trace import StepRecord

Key = TypeVar("Key")


@dataclass(frozen=True)
class PrefillPoint:
    """Time to first token of a prompt that came alone, and the work its prefill was."""

    num_tokens: int
    ttft_s: float
    cost: StepCost
    runs_s: tuple[float, ...]


@dataclass(frozen=True)
class DecodePoint:
    """A decode step with `batch_size` sequences of about `context_len` tokens each."""

    batch_size: int
    context_len: int
    step_s: float
    """Median wall time of a step: also the time between two tokens of one sequence."""
    cost: StepCost

    @property
    def tokens_per_s(self) -> float:
        """All sequences together."""
        return self.batch_size / self.step_s


@dataclass(frozen=True)
class CacheComparison:
    """The same tokens made without and with a KV cache; one entry a token."""

    token_ids: list[int]
    naive_s: list[float]
    naive_costs: list[StepCost]
    cached_s: list[float]
    cached_costs: list[StepCost]
    same_tokens: bool


def random_prompt(model: Model, num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids drawn at random: as good as text where only the time matters."""
    draw = random.Random(seed)
    return [draw.randrange(model.config.vocab_size) for _ in range(num_tokens)]


def step_cost_of(record: StepRecord) -> StepCost:
    """The work a recorded step did."""
    return StepCost(dict(record.flops), dict(record.bytes_moved))


def prefill_sweep(
    model: Model, lengths: Sequence[int], *, repeats: int = 3, chunk_size: int | None = None
) -> list[PrefillPoint]:
    """TTFT against prompt length, one prompt at a time, whole or in chunks."""
    longest = max(lengths)
    config = EngineConfig(
        num_blocks=-(-longest // 16) + 1,
        max_num_batched_tokens=max(longest, 32),
        chunk_size=chunk_size,
    )
    with Engine(model, config) as engine:

        def run(length: int) -> tuple[float, StepCost]:
            first = len(engine.trace.steps)
            prompt = random_prompt(model, length, seed=length)
            output = engine.generate(prompt, SamplingParams(max_tokens=1, ignore_eos=True))[0]
            assert output.metrics.ttft_s is not None
            steps = engine.trace.steps[first:]
            return output.metrics.ttft_s, sum(map(step_cost_of, steps), StepCost.zero())

        run(lengths[0])  # warm up
        results = _alternate(run, lengths, repeats, "prefill")
    return [
        PrefillPoint(n, median(t for t, _ in runs), runs[0][1], tuple(t for t, _ in runs))
        for n, runs in results.items()
    ]


def decode_sweep(
    model: Model, shapes: Sequence[tuple[int, int]], *, num_steps: int = 8, repeats: int = 2
) -> list[DecodePoint]:
    """Time of a decode step for (batch_size, context_len) pairs.

    The prompts are prefilled first; only steps in which all sequences decode are timed.
    """
    most_blocks = max(b * -(-(n + num_steps + 1) // 16) for b, n in shapes)
    largest = max(b for b, _ in shapes)
    config = EngineConfig(num_blocks=most_blocks, max_num_seqs=largest)
    with Engine(model, config) as engine:

        def run(shape: tuple[int, int]) -> list[StepRecord]:
            batch_size, context_len = shape
            prompts = [random_prompt(model, context_len, seed=i) for i in range(batch_size)]
            first = len(engine.trace.steps)
            params = SamplingParams(max_tokens=num_steps + 1, ignore_eos=True)
            engine.generate(prompts, params)
            full = [s for s in engine.trace.steps[first:] if s.phase == "decode"]
            return [s for s in full if len(s.sequences) == batch_size]

        results = _alternate(run, shapes, repeats, "decode")
    points = []
    for (batch_size, context_len), runs in results.items():
        steps = [step for one in runs for step in one]
        middle = step_cost_of(runs[0][len(runs[0]) // 2])
        points.append(DecodePoint(batch_size, context_len, median(s.wall_s for s in steps), middle))
    return points


def compare_with_naive(model: Model, prompt: str, num_tokens: int) -> CacheComparison:
    """Generate the same greedy continuation without and with a KV cache."""
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    with Engine(model) as engine:
        engine.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))  # warm up
        first = len(engine.trace.steps)
        output = engine.generate(prompt, params)[0]
        steps = engine.trace.steps[first:]
    naive = NaiveGenerator(model).generate(output.prompt_ids, params, progress=True)
    return CacheComparison(
        token_ids=output.token_ids,
        naive_s=naive.token_s,
        naive_costs=naive.costs,
        cached_s=[step.wall_s for step in steps],
        cached_costs=[step_cost_of(step) for step in steps],
        same_tokens=naive.token_ids == output.token_ids,
    )


def _alternate(
    run: Callable[[Key], object], keys: Sequence[Key], repeats: int, what: str
) -> dict[Key, list]:
    """Run every key `repeats` times, round after round."""
    results: dict[Key, list] = {key: [] for key in keys}
    with tqdm(total=repeats * len(keys), desc=what, leave=False) as bar:
        for _ in range(repeats):
            for key in keys:
                results[key].append(run(key))
                bar.update()
    return results
