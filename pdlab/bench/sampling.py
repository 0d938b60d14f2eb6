"""What sampling costs, beside the decode steps that it is part of.

A real engine decodes one batch with one mix of parameters after the other, round after round, so
that a machine that is busy for a while does not slow one mix only. Both times are those of the
engine's own clock: `stage_s["sample"]`, from logits to tokens, and `wall_s`, the whole step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from pdlab.bench.files import write_by_line
from pdlab.bench.mixes import Mix, all_mixes, possible
from pdlab.bench.prompts import passages
from pdlab.engine import Engine, EngineConfig
from pdlab.kvcache import blocks_for
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.requirements import require_int
from pdlab.trace import StepRecord

NUM_STEPS = 6
"""Decode steps of a run."""
BLOCK_SIZE = 16
DIGITS = 4
"""Significant digits of the times that are kept."""
VERSIONS = ("pdlab", "torch", "numpy", "llguidance")


@dataclass(frozen=True)
class MixCost:
    """One mix: the times of each decode step, in seconds, round after round."""

    name: str
    sample_s: list[float]
    step_s: list[float]

    @property
    def median_sample_s(self) -> float:
        return median(self.sample_s)

    @property
    def median_step_s(self) -> float:
        return median(self.step_s)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Half of the steps sampled for a time between these."""
        first, third = np.percentile(self.sample_s, (25, 75)).tolist()
        return first, third

    @property
    def share(self) -> float:
        """Median part of a step that it sampled for."""
        pairs = zip(self.sample_s, self.step_s, strict=True)
        return median(sample / step for sample, step in pairs)


@dataclass(frozen=True)
class SamplingCosts:
    """Every mix, and what it was measured on."""

    costs: list[MixCost]
    model: dict[str, Any]
    batch: int
    context_len: int
    """Tokens of each prompt."""
    repeats: int
    num_steps: int
    prompts: str
    constraint_backend: str
    machine: dict[str, str | int | float | None]
    """As in a trace, and `load_before`: processes that wanted to run before the measurement."""
    versions: dict[str, str]

    @property
    def busy(self) -> bool:
        """Whether other processes had work for half a core or more before this one began."""
        load = self.machine.get("load_before")
        return isinstance(load, float) and load >= 0.5

    def save(self, path: Path) -> None:
        """Write JSON, a mix a line: small, and readable in a diff."""
        data = asdict(self)
        costs = [json.dumps(_rounded(cost)) for cost in data.pop("costs")]
        write_by_line(path, data, "costs", costs)

    @classmethod
    def load(cls, path: Path) -> SamplingCosts:
        """Read what `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**data | {"costs": [MixCost(**cost) for cost in data["costs"]]})


def measure_sampling(
    model: Model,
    *,
    batch: int = 32,
    context_len: int = 128,
    repeats: int = 3,
    num_steps: int = NUM_STEPS,
    constraint_backend: str = "llguidance",
    progress: bool = False,
) -> SamplingCosts:
    """Decode a batch with every mix in turn, and keep what each step and its sampling took.

    A round before the first is not counted: it fills the prefix cache, which spares the prompts
    of all others, and compiles the grammars. A model without a tokenizer is measured without the
    mixes that need text, our own masker without JSON.

    Args:
        batch: sequences that decode together.
        context_len: tokens of each prompt.
        repeats: rounds that count; each gives `num_steps` steps of each mix.

    Raises:
        ValueError: a number is below 1, or the context is too long for the model.
    """
    for name, value in {"batch": batch, "repeats": repeats, "num_steps": num_steps}.items():
        require_int(name, value, least=1, most=10_000)
    require_int("context_len", context_len, least=1)
    limit = model.config.max_model_len
    if context_len + num_steps + 1 > limit:
        raise ValueError(
            f"context_len={context_len} and {num_steps + 1} more tokens are more than the {limit} "
            "that the model takes"
        )
    mixes = possible(
        all_mixes(num_steps + 1),
        has_text=model.tokenizer is not None,
        constraint_backend=constraint_backend,
    )
    machine = describe_machine() | {
        "threads": torch.get_num_threads(),
        "device": str(model.decoder.device),
        "load_before": _load(),
    }
    prompts = passages(model, batch, context_len)
    config = _config(batch, context_len, num_steps, constraint_backend)
    records: dict[str, list[StepRecord]] = {mix.name: [] for mix in mixes}
    with Engine(model, config) as engine:
        for number, mix in tqdm(_turns(mixes, repeats), disable=not progress, leave=False):
            steps = _decode(engine, prompts, mix, num_steps)
            if number:
                records[mix.name] += steps
    return SamplingCosts(
        costs=[
            MixCost(name, [s.stage_s["sample"] for s in steps], [s.wall_s for s in steps])
            for name, steps in records.items()
        ],
        model={
            "name": model.name,
            "dtype": str(model.decoder.dtype).removeprefix("torch."),
            "vocab_size": model.config.vocab_size,
            "num_parameters": model.config.num_parameters,
        },
        batch=batch,
        context_len=context_len,
        repeats=repeats,
        num_steps=num_steps,
        prompts="random tokens" if model.tokenizer is None else "pydoc_data.topics",
        constraint_backend=constraint_backend,
        machine=machine,
        versions={name: version(name) for name in VERSIONS},
    )


def _turns(mixes: Sequence[Mix], repeats: int) -> list[tuple[int, Mix]]:
    """Every mix once a round, each round beginning with another; round 0 is for warming up."""
    rounds = range(repeats + 1)
    return [(n, mixes[(n + i) % len(mixes)]) for n in rounds for i in range(len(mixes))]


def _decode(
    engine: Engine, prompts: Sequence[list[int]], mix: Mix, num_steps: int
) -> list[StepRecord]:
    """Run the batch to its end; returns its decode steps."""
    ids = [engine.submit(prompt, mix.row(i)) for i, prompt in enumerate(prompts)]
    steps = [s for s in _steps(engine) if s.phase == "decode" and len(s.sequences) == len(ids)]
    outputs = [engine.collect(request_id) for request_id in ids]
    if len(steps) != num_steps:
        reasons = sorted({str(o.error or o.finish_reason) for o in outputs})
        raise RuntimeError(f"{mix.name}: {len(steps)} decode steps of the whole batch: {reasons}")
    return steps


def _steps(engine: Engine) -> Iterator[StepRecord]:
    while record := engine.step():
        yield record


def _config(batch: int, context_len: int, num_steps: int, constraint_backend: str) -> EngineConfig:
    """Room for the whole batch, prefilled in one step and found in the prefix cache afterwards."""
    blocks = batch * blocks_for(context_len + num_steps, BLOCK_SIZE)
    return EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        watermark=0,
        max_num_seqs=batch,
        max_num_batched_tokens=batch * context_len,
        constraint_backend=constraint_backend,
        record_trace=False,
    )


def _load() -> float | None:
    """Processes that wanted to run in the last minute; None where the system does not count."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def _rounded(cost: dict[str, Any]) -> dict[str, Any]:
    times = ("sample_s", "step_s")
    return cost | {name: [float(f"{x:.{DIGITS}g}") for x in cost[name]] for name in times}
