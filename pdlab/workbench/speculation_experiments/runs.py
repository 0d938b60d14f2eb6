"""One task decoded in several ways; batches; lengths that adapt; the engine's own work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from pdlab.bench.speculation import PLAIN, DraftCost, SpeculationCosts
from pdlab.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from pdlab.engine.drafting import Speculation
from pdlab.models import Model
from pdlab.shipped import shipped
from pdlab.trace import StepRecord, Trace
from pdlab.workbench.lesson import progress
from pdlab.workbench.speculation_data import Drafting, drafting

_TEXT = (
    "The engine reads all of its weigths once for every token that it writes. The weigths do not "
    "change from one token to the next, so most of the time is spent on reading the same numbers "
    "again and again. A draft is a guess at the next few tokens. It lets the engine read its "
    "weigths once and check all the guessed tokens in one pass. If the guess was right, several "
    "tokens have been written for the price of one."
)
COPY = [
    {
        "role": "user",
        "content": "Correct the spelling of this text and give it back, with nothing else "
        f"changed: {_TEXT}",
    }
]
"""What is written stands in the prompt, all but a few words. (The small model gives the mistakes
back, too.)"""
CHAT = [{"role": "user", "content": "Why is the sky blue? Answer in three sentences."}]
"""What is written stands nowhere before."""
RESULTS = "speculation.json"
STAGES = ("schedule", "draft", "prepare", "sample", "deliver")
"""The engine's own work in a step; all the rest is the model."""


@dataclass(frozen=True)
class Compared:
    """A task, decoded in several ways on one machine in one go."""

    traces: dict[str, Trace]
    """By name; `plain` among them, if it was."""
    token_ids: dict[str, list[list[int]]]
    """What each wrote, prompt by prompt."""
    texts: dict[str, list[str]]

    @property
    def drafted(self) -> dict[str, Trace]:
        """All but plain decoding."""
        return {name: trace for name, trace in self.traces.items() if name != PLAIN}

    def told(self, name: str) -> Drafting:
        """What a way's drafts came to, against plain decoding."""
        return drafting(self.traces[name], self.traces.get(PLAIN))

    def num_equal(self, name: str) -> int:
        """Tokens, of the first prompt's output, that are those of plain decoding before one is
        not."""
        pairs = zip(self.token_ids[name][0], self.token_ids[PLAIN][0], strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), len(self.token_ids[name][0]))

    def tokens_s(self, name: str) -> float:
        """Tokens a second while decoding."""
        told = self.told(name)
        return told.num_tokens / told.wall_s


def compare(
    model: Model,
    ways: Mapping[str, Speculation | None],
    prompts: Sequence[Any],
    max_tokens: int = 96,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    rounds: int = 1,
    backend: str = "cpu",
) -> Compared:
    """Decode the prompts, all together, in each of the ways, rounds one after the other.

    The engines take turns, a step each, so that a machine that is slow for a second is so for all.
    The prompt is computed in the first round only: later ones find it in the prefix cache.
    """
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    outputs: dict[str, list[RequestOutput]] = {}
    engines = {name: _engine(model, speculation, backend) for name, speculation in ways.items()}
    try:
        for _ in progress(range(rounds), "decoding"):
            ids = {name: [e.submit(p, params) for p in prompts] for name, e in engines.items()}
            running = list(engines.values())
            while running:
                running = [engine for engine in running if engine.step()]
            outputs = {n: [engines[n].collect(i) for i in ids[n]] for n in engines}
        return Compared(
            traces={name: engine.trace for name, engine in engines.items()},
            token_ids={name: [o.token_ids for o in out] for name, out in outputs.items()},
            texts={name: [o.text for o in out] for name, out in outputs.items()},
        )
    finally:
        for engine in engines.values():
            engine.close()


def _engine(model: Model, speculation: Speculation | None, backend: str) -> Engine:
    """An engine that has run once, with nothing of that in its trace."""
    config = EngineConfig(backend=backend, speculation=speculation, num_blocks=144)
    engine = Engine(model, config)
    engine.generate([1, 2, 3, 1, 2, 3, 1, 2], SamplingParams(max_tokens=8, ignore_eos=True))
    engine.trace.steps.clear()
    engine.trace.requests.clear()
    return engine


def batch_gains(
    model: Model,
    speculation: Speculation,
    prompt: Any = None,
    sizes: Sequence[int] = (1, 4, 8),
    max_tokens: int = 48,
    rounds: int = 1,
    backend: str = "cpu",
) -> dict[int, Compared]:
    """The same task for 1, 4, 8 sequences at once, with drafts and without."""
    ways = {PLAIN: None, "drafts": speculation}
    prompts = [COPY if prompt is None else prompt]
    return {
        size: compare(model, ways, prompts * size, max_tokens, rounds=rounds, backend=backend)
        for size in sizes
    }


def draft_lengths(trace: Trace) -> list[tuple[int, int]]:
    """(drafted, stood) of each step that decoded, for runs of one sequence at a time."""
    return [
        (len(draft.token_ids), draft.num_accepted) if (draft := record.draft) else (0, 0)
        for step in trace.steps
        if step.phase == "decode"
        for record in step.sequences
    ]


def own_work(trace: Trace) -> dict[str, float]:
    """Seconds of a decode step by the engine's own stages, medians; and `model`, all the rest."""
    steps = [step for step in trace.steps if step.phase == "decode"]

    def usual(stage: str) -> float:
        return median(step.stage_s.get(stage, 0.0) for step in steps)

    found = {stage: usual(stage) for stage in STAGES}
    return {"model": median(map(_model_s, steps)), **found}


def _model_s(step: StepRecord) -> float:
    return step.wall_s - sum(step.stage_s.get(stage, 0.0) for stage in STAGES)


def recorded_lines() -> list[str]:
    """All that `pdlab bench speculation` recorded, as a table; empty where nothing was."""
    path = shipped("data") / "measured" / RESULTS
    return lines_of(SpeculationCosts.load(path)) if path.exists() else []


def lines_of(costs: SpeculationCosts) -> list[str]:
    """A line for each target, task and drafter: of each batch the speed-up that the theorem has
    (checking is free), that of the formula with what checking took, and the measured one."""
    sizes = sorted({scene.batch for scene in costs.scenes})
    rows: dict[tuple[str, str, str], dict[int, DraftCost]] = {}
    for scene in costs.scenes:
        for cost in scene.costs:
            if cost.drafter != PLAIN:
                row = rows.setdefault((scene.target, scene.task, cost.drafter), {})
                row[scene.batch] = cost
    head = "".join(f"{f'batch of {size}':>20}" for size in sizes)
    lines = [f"{'target':17} {'task':5} {'drafter':18} {'stood':>5} {'c':>5}{head}"]
    for (target, task, drafter), row in rows.items():
        first = row[min(row)]
        cells = [_three(row[size]) if size in row else "not measured" for size in sizes]
        lines.append(
            f"{target:17} {task:5} {drafter:18} {first.acceptance:5.0%} {first.cost_ratio:5.2f}"
            + "".join(f"{cell:>20}" for cell in cells)
        )
    machine = costs.machine
    return [
        *lines,
        "speed-up: predicted with checking free, predicted with what checking took, measured;",
        f"stood and c: of the smallest batch; recorded on {machine.get('processor')}, "
        f"{str(machine.get('date', ''))[:10]}",
    ]


def _three(cost: DraftCost) -> str:
    return f"{cost.theorem:.2f}  {cost.formula:.2f}  {cost.speedup:.2f}"
