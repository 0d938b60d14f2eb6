"""The same work on the same pipeline, with more and more micro-batches: recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.models import Model
from pdlab.parallel import ParallelRunner
from pdlab.requirements import require_int
from pdlab.trace.trace import Trace
from pdlab.workbench.experiments import random_prompt
from pdlab.workbench.lesson import progress

MICRO_BATCHES = (1, 2, 4, 8)


def record_pipelines(
    model: Model,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    *,
    pipeline_parallel: int = 2,
    prompt_tokens: int = 256,
    batch: int = 8,
    output_tokens: int = 6,
    config: EngineConfig | None = None,
) -> dict[str, Trace]:
    """One prompt alone, then a batch of short ones: a run for each number of micro-batches.

    The first steps of an engine, in which everything is slow, are computed before and not kept.

    Args:
        micro_batches: most pieces of a step, a run for each.
        prompt_tokens: of the prompt that is computed alone, drawn at random.
        batch: sequences that then decode together.
        output_tokens: of each of them.
        config: the engine's other knobs.

    Returns:
        traces by name: `1 micro-batch`, `2 micro-batches` and so on.

    Raises:
        ValueError: a number is out of range, or the model cannot be cut so.
    """
    if not micro_batches:
        raise ValueError("micro_batches is empty: it needs at least 1")
    require_int("prompt_tokens", prompt_tokens, least=1)
    require_int("batch", batch, least=1)
    for count in micro_batches:
        require_int("micro_batches", count, least=1)
    knobs = replace(
        config or EngineConfig(),
        pipeline_parallel=pipeline_parallel,
        micro_batches=max(micro_batches),
        enable_prefix_cache=False,
    )
    params = SamplingParams(max_tokens=output_tokens, temperature=0, ignore_eos=True)
    prompt = random_prompt(model, prompt_tokens)
    short = [random_prompt(model, 4, seed=i) for i in range(batch)]
    runs = {}
    with Engine(model, knobs) as engine:
        assert isinstance(engine.runner, ParallelRunner)
        for count in progress(micro_batches, "micro-batches"):
            engine.runner.micro_batches = count
            for _ in range(2):  # the first time warms up
                first = len(engine.trace.steps)
                engine.generate(prompt, replace(params, max_tokens=1))
                engine.generate(short, params)
            name = f"{count} micro-batch{'es' * (count > 1)}"
            runs[name] = replace(
                engine.trace,
                engine=engine.trace.engine | {"micro_batches": count},
                steps=engine.trace.steps[first:],
            )
    return runs
