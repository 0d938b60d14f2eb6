"""What the lesson on several devices runs and shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from torch import Tensor

from pdlab.bench.parallel import ParallelCosts, Way, measure_parallel
from pdlab.costmodel import rank_weight_bytes
from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.link import LINKS, Link
from pdlab.models import Model
from pdlab.models.shard_plan import ShardPlan
from pdlab.trace import StepRecord, Trace
from pdlab.workbench.experiments import random_prompt
from pdlab.workbench.lesson import progress

QUESTION = [{"role": "user", "content": "Why does ice float on water? Answer in two sentences."}]
GRIDS = (
    Way(),
    Way(tensor_parallel=2),
    Way(pipeline_parallel=2, micro_batches=1),
    Way(pipeline_parallel=2, micro_batches=4),
    Way(replicas=2),
)
"""The ways that the lesson compares."""


@dataclass(frozen=True)
class Run:
    """An answer, and how it was computed."""

    trace: Trace
    token_ids: list[int]
    text: str

    def steps(self, phase: str) -> list[StepRecord]:
        return [step for step in self.trace.steps if step.phase == phase]

    def typical(self, phase: str) -> StepRecord:
        """The step of the (lower) median time."""
        return sorted(self.steps(phase), key=lambda step: step.wall_s)[
            (len(self.steps(phase)) - 1) // 2
        ]


def answer(model: Model, max_tokens: int = 24, **knobs: Any) -> Run:
    """The question's answer, greedy, by an engine with these knobs."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    with Engine(model, EngineConfig(**knobs)) as engine:
        [output] = engine.generate([QUESTION], params)
        return Run(engine.trace, output.token_ids, output.text)


def mlp_weights(model: Model, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """gate and up [inner, hidden], and down [hidden, inner], of a layer's MLP."""
    own = model.decoder.layers[layer]
    gate, up = own.gate_up.weight.chunk(2)
    return gate, up, own.down.weight


def weight_shares(model: Model, plan: ShardPlan) -> list[float]:
    """Of each rank, the part of all weights that it holds; what two ranks hold counts twice."""
    held = rank_weight_bytes(plan, model.dtype.itemsize)
    return [each / model.weight_bytes for each in held]


def side_by_side(
    name: str = "smollm2-135m",
    ways: Sequence[Way] = GRIDS,
    *,
    prompt_tokens: int = 256,
    num_steps: int = 8,
    rounds: int = 2,
) -> ParallelCosts:
    """`pdlab bench parallel`, small."""
    return measure_parallel(
        name,
        ways=ways,
        prompt_tokens=prompt_tokens,
        num_steps=num_steps,
        rounds=rounds,
        watch=partial(progress, label="rounds"),
    )


@dataclass(frozen=True)
class LinkRun:
    """A prompt and some decode steps over one link; medians."""

    prefill_s: float
    decode_s: float
    wire_prefill_s: float
    """What the link alone takes of the prompt, one exchange after the other: predicted."""
    wire_decode_s: float
    """The same of a decode step."""


def over_links(
    model: Model,
    names: Sequence[str | None] = (None, "10GbE", "1GbE"),
    *,
    prompt_tokens: int = 128,
    num_steps: int = 24,
) -> Mapping[str, LinkRun]:
    """The same prompt with TP = 2, over links as slow as these, simulated; None is this machine's
    own sockets."""
    found = {}
    params = SamplingParams(max_tokens=num_steps + 1, ignore_eos=True, temperature=0)
    for name in progress(names, "links"):
        link = LINKS[name] if name else None
        config = EngineConfig(tensor_parallel=2, rank_link=link, enable_prefix_cache=False)
        with Engine(model, config) as engine:
            for _ in range(2):  # the first warms up
                first = len(engine.trace.steps)
                engine.generate(random_prompt(model, prompt_tokens), params)
            prefill, *decodes = engine.trace.steps[first:]
        found[name or "this machine"] = LinkRun(
            prefill.wall_s,
            median(step.wall_s for step in decodes),
            _wire_s(prefill, link),
            _wire_s(decodes[-1], link),
        )
    return found


def _wire_s(step: StepRecord, link: Link | None) -> float:
    """What a link takes for all that rank 0 sends in a step, one after the other."""
    sent = [c.wire_bytes for c in step.collectives if c.rank == 0 and c.wire_bytes]
    return sum(map(link.transfer_s, sent)) if link else 0.0
