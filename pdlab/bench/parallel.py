"""What several ranks cost and buy: the same cores as one process, and dealt out in three ways.

All ways serve the same prompts in turns, round after round, so that a machine that is busy for a
while does not slow one of them only.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch

from pdlab.bench.files import write_by_line
from pdlab.bench.prompts import passages
from pdlab.costmodel import bubble_share
from pdlab.disagg.hosts.processes import process_cluster
from pdlab.disagg.hosts.spec import local_specs
from pdlab.engine import Engine, EngineConfig, RequestOutput, SamplingParams
from pdlab.link import Link, name_of
from pdlab.machine import describe_machine, num_cores
from pdlab.models import Model, load
from pdlab.requirements import require_int
from pdlab.trace import StepRecord

BATCHES = (1, 8)
PROMPTS = (1, 2)
"""Long prompts that come at the same time."""
PROMPT_TOKENS = 512
SHORT_TOKENS = 32
"""Of the prompts of those that decode."""


@dataclass(frozen=True)
class Way:
    """How the cores are used."""

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    micro_batches: int | None = None
    replicas: int = 1
    link: Link | None = None
    """Between ranks, simulated."""

    @property
    def name(self) -> str:
        if self.replicas > 1:
            return f"DP={self.replicas}"
        if self.tensor_parallel == self.pipeline_parallel == 1:
            return "one process"
        sizes = (("TP", self.tensor_parallel), ("PP", self.pipeline_parallel))
        text = " ".join(f"{kind}={size}" for kind, size in sizes if size > 1)
        if self.micro_batches:
            text += f", {self.micro_batches} micro-batch{'es' * (self.micro_batches > 1)}"
        return f"{text}, {name_of(self.link)}" if self.link else text

    @property
    def num_processes(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.replicas


WAYS = (
    Way(),
    Way(tensor_parallel=2),
    Way(pipeline_parallel=2, micro_batches=1),
    Way(pipeline_parallel=2, micro_batches=2),
    Way(pipeline_parallel=2, micro_batches=4),
    Way(replicas=2),
)


@dataclass(frozen=True)
class ParallelCost:
    """One way, one kind of work. Seconds of each round; the counted of a step."""

    way: str
    work: str
    """`prefill b2` (two prompts at once) or `decode b8` (a batch of 8)."""
    seconds: list[float]
    """Until all have their first token; or between two of a sequence, median of the batch."""
    tokens_s: float
    """Of prompts, or of outputs, all together: by the median."""
    wire_bytes: int | None
    """That a step put on the wire, all ranks together; None where ranks are replicas."""
    exchange_share: float | None
    """Of the ranks' time, that of collectives; median of the steps."""
    idle_share: float | None
    """Of the ranks' time, that of bubbles; median of the steps."""
    predicted_idle: float | None
    """The same by (p - 1) / (m + p - 1)."""

    @property
    def median_s(self) -> float:
        return median(self.seconds)


@dataclass(frozen=True)
class ParallelCosts:
    """Every way and kind of work, and what it was measured on."""

    costs: list[ParallelCost]
    model: str
    prompt_tokens: int
    num_steps: int
    rounds: int
    busy: bool
    """Whether other processes were at work: then times may be too high."""
    machine: dict[str, Any]
    versions: dict[str, str]

    def of(self, way: str, work: str) -> ParallelCost:
        """One of them."""
        return next(cost for cost in self.costs if (cost.way, cost.work) == (way, work))

    def ratio(self, way: str, work: str) -> float:
        """How many times the tokens a second of one process: median of the rounds' ratios, but for
        replicas of several sequences, which is that of the medians."""
        one, other = self.of(WAYS[0].name, work), self.of(way, work)
        gain = median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))
        return gain * (other.tokens_s * other.median_s) / (one.tokens_s * one.median_s)

    def save(self, path: Path) -> None:
        """Write JSON, a way and kind of work a line."""
        raw = asdict(self)
        write_by_line(path, raw, "costs", [json.dumps(cost) for cost in raw.pop("costs")])

    @classmethod
    def load(cls, path: Path) -> ParallelCosts:
        """Read what `save` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(**raw | {"costs": [ParallelCost(**cost) for cost in raw["costs"]]})


class Server(Protocol):
    """An engine, or a cluster of them."""

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, /
    ) -> list[RequestOutput]: ...


def measure_parallel(
    name: str = "smollm2-135m",
    *,
    ways: Sequence[Way] = WAYS,
    batches: Sequence[int] = BATCHES,
    prompt_tokens: int = PROMPT_TOKENS,
    num_steps: int = 16,
    rounds: int = 3,
    watch: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> ParallelCosts:
    """Serve a prompt, and batches that decode, in every way.

    Each rank and replica has its share of the cores, and so many threads. All ways are there at the
    same time: of three with two ranks each, six processes wait while one way is at work.

    Args:
        name: of the model, as of `load`.
        prompt_tokens: of the prompt whose first token is waited for.
        num_steps: decode steps of a round.
        watch: gives the rounds back one after the other, and may show how far they are.

    Raises:
        ValueError: an argument is out of range, or the model cannot be cut so.
    """
    for batch in batches:
        require_int("batch", batch, least=1, most=64)
    require_int("prompt_tokens", prompt_tokens, least=1)
    require_int("num_steps", num_steps, least=2, most=1000)
    require_int("rounds", rounds, least=1, most=1000)
    load_before = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    model = load(name, dtype="fp32", progress=False)
    with ExitStack() as stack:
        trials = [stack.enter_context(_trial(model, way, prompt_tokens)) for way in ways]
        for number in watch(range(rounds + 1)):
            for trial in trials[:: -1 if number % 2 else 1]:
                trial.turn(batches, num_steps, counts=number > 0)  # the first warms up
        costs = [cost for trial in trials for cost in trial.costs()]
    return ParallelCosts(
        costs,
        name,
        prompt_tokens,
        num_steps,
        rounds,
        busy=load_before > 0.5,
        machine=describe_machine()
        | {"threads": torch.get_num_threads(), "load_before": round(load_before, 2)},
        versions={"torch": torch.__version__},
    )


@contextmanager
def _trial(model: Model, way: Way, prompt_tokens: int) -> Iterator[_Trial]:
    knobs: dict[str, Any] = {
        "enable_prefix_cache": False,
        "backend": "torch",
        "num_blocks": 64 + PROMPTS[-1] * prompt_tokens // 16,
    }
    if way.replicas > 1:
        specs = local_specs(0, way.replicas, model=model.name, config=EngineConfig(**knobs))
        with process_cluster(model.outline, specs) as cluster:
            yield _Trial(model, way, cluster, prompt_tokens)
        return
    if way.num_processes > 1:
        knobs |= {
            "tensor_parallel": way.tensor_parallel,
            "pipeline_parallel": way.pipeline_parallel,
            "micro_batches": way.micro_batches,
            "rank_threads": max(1, num_cores() // way.num_processes),
            "rank_link": way.link,
        }
    with Engine(model, EngineConfig(**knobs)) as engine:
        yield _Trial(model, way, engine, prompt_tokens)


@dataclass
class _Trial:
    """One way, and what was measured of it, by kind of work."""

    model: Model
    way: Way
    server: Server
    prompt_tokens: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    steps: dict[str, list[StepRecord]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Tokens that come in those seconds."""

    def turn(self, batches: Sequence[int], num_steps: int, *, counts: bool) -> None:
        """Each kind of work once."""
        for batch in PROMPTS:
            prompts = passages(self.model, batch, self.prompt_tokens)
            self._serve(f"prefill b{batch}", prompts, 1, batch * self.prompt_tokens, counts)
        for batch in batches:
            prompts = passages(self.model, batch, SHORT_TOKENS)
            self._serve(f"decode b{batch}", prompts, num_steps + 1, batch, counts)

    def _serve(
        self, work: str, prompts: list[list[int]], max_tokens: int, size: int, counts: bool
    ) -> None:
        engine = self.server if isinstance(self.server, Engine) else None
        first = len(engine.trace.steps) if engine else 0
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0)
        outputs = self.server.generate(prompts, params)
        if not counts:
            return
        metrics = [output.metrics for output in outputs]
        if work.startswith("prefill"):
            seconds = max(m.ttft_s for m in metrics if m.ttft_s is not None)
        else:
            seconds = median(m.tpot_s for m in metrics if m.tpot_s is not None)
        self.seconds.setdefault(work, []).append(seconds)
        self.sizes[work] = size
        if engine:
            phase = work.split()[0]
            own = [step for step in engine.trace.steps[first:] if step.phase == phase]
            self.steps.setdefault(work, []).extend(own)

    def costs(self) -> Iterator[ParallelCost]:
        stages = self.way.pipeline_parallel
        for work, seconds in self.seconds.items():
            steps = self.steps.get(work, [])
            last = steps[-1] if steps else None
            pieces = len({s.micro_batch for s in last.rank_spans}) if last else 0
            yield ParallelCost(
                self.way.name,
                work,
                seconds,
                self.sizes[work] / median(seconds),
                sum(c.wire_bytes for c in last.collectives) if last else None,
                median(step.exchange_share for step in steps) if steps else None,
                median(step.idle_share for step in steps) if steps else None,
                bubble_share(stages, pieces) if pieces else None,
            )


def by_work(found: ParallelCosts) -> Mapping[str, list[ParallelCost]]:
    """The ways beside each other, for each kind of work."""
    works = dict.fromkeys(cost.work for cost in found.costs)
    return {work: [cost for cost in found.costs if cost.work == work] for work in works}
