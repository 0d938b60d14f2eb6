"""What speculation brings: each drafter beside plain decoding, and beside the formula.

On one target, for one task and batch, all engines decode the same prompts in turn, round after
round. Measured is decoding: from the first step without a prompt to the last token, the draft
model's own prompt included, which it computes in the first of these steps (prompts are not found in
any prefix cache).

The formula (Leviathan et al. 2023) is given what was counted and timed in the same run: acceptance
(one number for all positions), and what drafting costs over a plain step. Its theorem takes the
step that checks a draft to be as long as a plain one. Beside it stands the same with the time that
checking did take: what is left between that and the measurement is only that acceptance is not one
number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tqdm.auto import tqdm

from pdlab.bench.files import write_by_line
from pdlab.bench.speculation_prompts import TASKS
from pdlab.engine import Engine, EngineConfig, Prompt, SamplingParams
from pdlab.engine.drafting import Speculation
from pdlab.machine import describe_machine
from pdlab.models import Model, load
from pdlab.quantize import regroup
from pdlab.requirements import require_int
from pdlab.speculate import (
    EarlyExit,
    ModelDrafter,
    PromptLookup,
    SelfDraft,
    acceptance_of,
    expected_tokens,
)
from pdlab.trace import StepRecord

DRAFTERS: dict[str, Speculation] = {
    "prompt_lookup:5": PromptLookup(num_tokens=5),
    "prompt_lookup:auto": PromptLookup(num_tokens="auto"),
    "self:int4:4": SelfDraft("int4", num_tokens=4),
    "self:int4:auto": SelfDraft("int4", num_tokens="auto"),
    "early_exit:20:3": EarlyExit(20, num_tokens=3),
}
"""By what `--speculate` calls them."""
PLAIN = "plain"
REGROUPED = "fp32, regrouped"
"""The same model with its channels in another order: as if its weights did not come from a 4-bit
file, which an int4 draft would hold without loss."""
TARGETS = ("fp32", REGROUPED, "int8")
BATCHES = (1, 4, 8)
NUM_TOKENS = 64
PROMPTS = 4
"""Prompts of a scene, at least."""
DIGITS = 4


@dataclass
class Counts:
    """What the decoding steps of one engine did, all rounds together."""

    num_tokens: int = 0
    num_parts: int = 0
    """Tokens there would be without drafts: one of each sequence in each step."""
    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    """Drafts that lost a token."""
    reached: list[int] = field(default_factory=list)
    """Drafts whose token at this position was looked at."""
    stood: list[int] = field(default_factory=list)
    """Those of them where it was accepted."""

    def add(self, step: StepRecord) -> None:
        drafts = [part.draft for part in step.sequences if part.draft]
        self.num_tokens += sum(len(part.put_out) for part in step.sequences)
        self.num_parts += len(step.sequences)
        self.num_drafts += len(drafts)
        for draft in drafts:
            length = len(draft.token_ids)
            self.num_drafted += length
            self.num_accepted += draft.num_accepted
            self.num_rejected += draft.num_accepted < length
            _count(self.reached, min(draft.num_accepted + 1, length))
            _count(self.stood, draft.num_accepted)

    def expected_tokens(self, acceptance: float) -> float:
        """Of a sequence in a step (equation 1), where some steps had no draft, and drafts were as
        long as these were on average."""
        length = self.num_drafted / self.num_drafts
        whole = int(length)
        shorter, longer = (expected_tokens(acceptance, k) for k in (whole, whole + 1))
        tokens = shorter + (length - whole) * (longer - shorter)
        return 1 + (tokens - 1) * self.num_drafts / self.num_parts

    @classmethod
    def sum_of(cls, several: Sequence[Counts]) -> Counts:
        total = cls()
        for name in vars(total):
            values = [getattr(each, name) for each in several]
            lists = isinstance(values[0], list)
            places = zip_longest(*values, fillvalue=0) if lists else ()
            setattr(total, name, [sum(place) for place in places] if lists else sum(values))
        return total


def _count(positions: list[int], num: int) -> None:
    """One more for each of the first `num` positions."""
    positions += [0] * (num - len(positions))
    for position in range(num):
        positions[position] += 1


@dataclass(frozen=True)
class DraftCost:
    """One drafter (or none) on one target, task and batch. Times are medians of the rounds."""

    drafter: str
    tokens_s: float
    """Tokens a second, of all sequences together."""
    step_s: float
    """A step of the target, without the proposing."""
    draft_s: float
    """The proposing of a step."""
    speedup: float
    """Measured: over plain decoding in the same rounds."""
    num_prompts: int
    num_equal: int
    """Prompts whose tokens are those of plain decoding. Where a step has more rows, products may
    round otherwise, and a near tie end otherwise."""
    counts: Counts
    theorem: float = 1.0
    """Predicted by theorem 3.8 from acceptance and the cost of drafts, if checking is free."""
    formula: float = 1.0
    """The same with the time that checking took."""
    cost_ratio: float = 0.0
    """A drafted token over a plain step, measured."""
    check_ratio: float = 1.0
    """A step that checks drafts over a plain step, measured."""
    byte_ratio: float | None = None
    """Bytes of the draft model's weights over the target's: what `cost_ratio` is predicted to be
    where reading weights is all that counts."""

    @property
    def acceptance(self) -> float:
        """Of the tokens looked at."""
        c = self.counts
        return acceptance_of(c.num_accepted, c.num_drafted, c.num_rejected)

    @property
    def by_position(self) -> list[float]:
        """Acceptance at each position of a draft, given that all before it stood."""
        stood = [*self.counts.stood, *[0] * len(self.counts.reached)]
        return [s / r for s, r in zip(stood, self.counts.reached, strict=False)]


@dataclass(frozen=True)
class Scene:
    """All drafters on one target, task and batch."""

    target: str
    task: str
    batch: int
    costs: list[DraftCost]


@dataclass(frozen=True)
class SpeculationCosts:
    """All of it, and what it was measured on."""

    scenes: list[Scene]
    model: str
    backend: str
    num_tokens: int
    """Of each sequence."""
    rounds: int
    machine: Mapping[str, str | int]
    versions: Mapping[str, str]

    def save(self, path: Path) -> None:
        """Write JSON, a drafter a line."""
        data = asdict(self)
        scenes = []
        for scene in data.pop("scenes"):
            costs = ",\n".join("    " + json.dumps(_short(cost)) for cost in scene.pop("costs"))
            scenes.append(f'{json.dumps(scene)[:-1]}, "costs": [\n{costs}\n  ]}}')
        write_by_line(path, data, "scenes", scenes)

    @classmethod
    def load(cls, path: Path) -> SpeculationCosts:
        """Read what `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        for scene in data["scenes"]:
            scene["costs"] = [
                DraftCost(**cost | {"counts": Counts(**cost["counts"])}) for cost in scene["costs"]
            ]
        return cls(**data | {"scenes": [Scene(**scene) for scene in data["scenes"]]})


def _short(values: dict[str, Any]) -> dict[str, Any]:
    """Measured numbers with the digits that mean something."""
    return {k: float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for k, v in values.items()}


def measure_speculation(
    name: str = "smollm2-135m",
    *,
    targets: Sequence[str] = TARGETS,
    tasks: Sequence[str] = tuple(TASKS),
    batches: Sequence[int] = BATCHES,
    drafters: Mapping[str, Speculation] = DRAFTERS,
    num_tokens: int = NUM_TOKENS,
    rounds: int = 3,
    backend: str = "cpu",
    progress: bool = False,
) -> SpeculationCosts:
    """Measure what drafters bring.

    Args:
        targets: formats of the target's weights; or REGROUPED.
        tasks: of TASKS.
        batches: prompts that decode together, at most 8; of a smaller batch several are measured.
        num_tokens: of each sequence.

    Raises:
        ValueError: a number is out of range, or a name unknown.
    """
    require_int("rounds", rounds, least=1)
    require_int("num_tokens", num_tokens, least=2)
    for batch in batches:
        require_int("batches: batch", batch, least=1, most=8)
    for task in tasks:
        if task not in TASKS:
            raise ValueError(f"tasks: {task!r:.60} is not one of {', '.join(TASKS)}")
    scenes = []
    bar = tqdm(total=len(targets) * len(tasks) * len(batches), disable=not progress, unit="scene")
    for target in targets:
        model = _target(name, target)
        base = EngineConfig(backend=backend, num_blocks=256)
        for task in tasks:
            for batch in batches:
                bench = _Bench(model, base, drafters, _batches(task, batch), num_tokens)
                scenes.append(Scene(target, task, batch, bench.costs(rounds)))
                bar.update()
    bar.close()
    return SpeculationCosts(
        scenes=scenes,
        model=name,
        backend=backend,
        num_tokens=num_tokens,
        rounds=rounds,
        machine=describe_machine() | {"threads": torch.get_num_threads()},
        versions={"torch": torch.__version__},
    )


def _batches(task: str, batch: int) -> list[list[Prompt]]:
    """As many prompts as are in a scene, in batches that decode one after the other."""
    prompts = TASKS[task][: max(batch, PROMPTS)]
    return [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]


def _target(name: str, target: str) -> Model:
    if target != REGROUPED:
        return load(name, dtype="fp32", weights=target, progress=False)
    model = load(name, dtype="fp32", progress=False)
    regroup(model.decoder)
    return model


class _Bench:
    """The engines of one scene, which take turns."""

    def __init__(
        self,
        model: Model,
        base: EngineConfig,
        drafters: Mapping[str, Speculation],
        batches: Sequence[Sequence[Prompt]],
        num_tokens: int,
    ):
        self._model, self._batches = model, batches
        self._params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, prefix_cache=False)
        self._configs = {PLAIN: base} | {
            name: replace(base, speculation=drafter) for name, drafter in drafters.items()
        }

    def costs(self, rounds: int) -> list[DraftCost]:
        """Each engine decodes a batch to warm up, and then all of them in turn with the others."""
        engines = {name: Engine(self._model, config) for name, config in self._configs.items()}
        try:
            runs: dict[str, list[_Run]] = {name: [] for name in engines}
            for engine in engines.values():
                self._run(engine, self._batches[:1])
            for _ in range(rounds):
                for name, engine in engines.items():
                    runs[name].append(self._run(engine, self._batches))
            ratios = {name: _byte_ratio(engine) for name, engine in engines.items()}
        finally:
            for engine in engines.values():
                engine.close()
        return [_cost(name, runs, ratios[name]) for name in runs]

    def _run(self, engine: Engine, batches: Sequence[Sequence[Prompt]]) -> _Run:
        run = _Run()
        for batch in batches:
            for prompt in batch:
                engine.submit(prompt, self._params)
            request_ids = list(engine.requests)
            for step in iter(engine.step, None):
                if step.phase == "decode":
                    run.add(step)
            run.tokens += [engine.collect(request_id).token_ids for request_id in request_ids]
        return run


@dataclass
class _Run:
    """The decoding of one round."""

    counts: Counts = field(default_factory=Counts)
    tokens: list[list[int]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    draft_s: list[float] = field(default_factory=list)
    pass_s: list[float] = field(default_factory=list)
    """Proposing over the length of the longest draft, of steps that had any."""

    def add(self, step: StepRecord) -> None:
        self.counts.add(step)
        draft_s = step.stage_s.get("draft", 0.0)
        self.draft_s.append(draft_s)
        self.step_s.append(step.wall_s - draft_s)
        depth = max((len(p.draft.token_ids) for p in step.sequences if p.draft), default=0)
        if depth:
            self.pass_s.append(draft_s / depth)

    @property
    def tokens_s(self) -> float:
        return self.counts.num_tokens / (sum(self.step_s) + sum(self.draft_s))

    @property
    def checking_s(self) -> float:
        """Of one sequence's part in a step, without proposing."""
        return sum(self.step_s) / self.counts.num_parts

    @property
    def drafting_s(self) -> float:
        """The proposing for it."""
        return sum(self.draft_s) / self.counts.num_parts


def _byte_ratio(engine: Engine) -> float | None:
    drafter = engine.drafter
    if not isinstance(drafter, ModelDrafter):
        return None
    return drafter.model.weight_bytes / engine.model.weight_bytes


def _cost(name: str, runs: Mapping[str, Sequence[_Run]], byte_ratio: float | None) -> DraftCost:
    mine, plain = runs[name], runs[PLAIN]
    counts = Counts.sum_of([run.counts for run in mine])
    cost = DraftCost(
        drafter=name,
        tokens_s=median(run.tokens_s for run in mine),
        step_s=median(s for run in mine for s in run.step_s),
        draft_s=median(s for run in mine for s in run.draft_s),
        speedup=median(a.tokens_s / b.tokens_s for a, b in zip(mine, plain, strict=True)),
        num_prompts=len(mine[0].tokens),
        num_equal=sum(a == b for a, b in zip(mine[0].tokens, plain[0].tokens, strict=True)),
        counts=counts,
        byte_ratio=byte_ratio,
    )
    if not counts.num_drafts:
        return cost
    pairs = list(zip(mine, plain, strict=True))
    check_ratio = median(a.checking_s / b.checking_s for a, b in pairs)
    draft_ratio = median(a.drafting_s / b.checking_s for a, b in pairs)
    tokens = counts.expected_tokens(cost.acceptance)
    plain_s = median(s for run in plain for s in run.step_s)
    return replace(
        cost,
        theorem=tokens / (1 + draft_ratio),
        formula=tokens / (check_ratio + draft_ratio),
        cost_ratio=median(s for run in mine for s in run.pass_s) / plain_s,
        check_ratio=check_ratio,
    )
