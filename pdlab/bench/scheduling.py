"""What is promised of scheduling, measured.

The agreement of simulator and engine stands in `pdlab.bench.agreement`, the comparison with what
was published in `pdlab.bench.published_fits`. Here are the simulator's speed and the engine's own
time a step, and what is kept of all.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from pdlab.bench.agreement import Agreement, measure_agreement
from pdlab.bench.published_fits import FitErrors, measure_published
from pdlab.costmodel import published
from pdlab.engine import Engine, EngineConfig
from pdlab.engine.batch import prepare
from pdlab.engine.runner import StepOutput
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.engine.timing import StageClock
from pdlab.kvcache import blocks_for
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.requirements import require_choice, require_int
from pdlab.sampling import Sampled, SamplingParams
from pdlab.trace import Candidate
from pdlab.workload import WORKLOADS, scaled
from pdlab.workload.serving import SLO
from pdlab.workload.simulation import simulate
from pdlab.workload.step_calibration import LEAST_SHARE, IdleRunner, ProcessorShare
from pdlab.workload.synthetic import AZURE_CONVERSATION, azure_like

VERSIONS = ("pdlab", "torch", "numpy")
DIGITS = 4
"""Significant digits of the numbers that are kept."""

# --- the simulator's speed -----------------------------------------------------------------------

SIMULATED = "a100-opt-13b"
MOST_SEQS, BUDGET = 256, 2048
RATES_RPS = (2.5, 5.5)
"""One that this machine keeps up with, and that of Azure's trace, under which the queue grows."""


@dataclass(frozen=True)
class SimulatorSpeed:
    """One simulation, and how long it took."""

    machine: str
    num_requests: int
    rate_rps: float
    num_steps: int
    duration_s: float
    """In simulated time."""
    wall_s: float


def measure_simulator(num_requests: int = 10_000, rate_rps: float = RATES_RPS[0]) -> SimulatorSpeed:
    """Simulate conversations like Azure's, cut to the context of OPT-13B, on one A100.

    Raises:
        ValueError: a number is out of range.
    """
    require_int("num_requests", num_requests, least=2, most=1_000_000)
    times, knobs = published(SIMULATED)
    config = EngineConfig(**knobs, max_num_seqs=MOST_SEQS, max_num_batched_tokens=BUDGET)
    requests = azure_like(AZURE_CONVERSATION, num_requests)
    own_rps = (num_requests - 1) / requests[-1].arrival_s
    requests = scaled(requests, rate=rate_rps / own_rps, max_len=knobs["max_model_len"])
    start_s = time.perf_counter()
    run = simulate(requests, config, times)
    return SimulatorSpeed(
        machine=SIMULATED,
        num_requests=num_requests,
        rate_rps=rate_rps,
        num_steps=sum(step.num_steps for step in run.steps),
        duration_s=run.duration_s,
        wall_s=time.perf_counter() - start_s,
    )


# --- the engine's own time -----------------------------------------------------------------------

PARTS = ("schedule", "prepare", "deliver", "record")
CONTEXT_LEN = 128
CANDIDATES_DRAWN = 64
"""Different tokens, so that their texts are not all looked up in one place."""


@dataclass(frozen=True)
class StepOverhead:
    """What a decode step takes beside the model and sampling: medians over the steps."""

    batch: int
    num_steps: int
    record_trace: bool
    part_s: dict[str, float]
    """`schedule`, `prepare` (the batch as flat lists), `deliver` (tokens and text to the requests),
    `record` (the step's record)."""
    total_s: float
    """Median of the sums."""


class _Bookkeeper(IdleRunner):
    """Lays out the batch as the model's runner does, and gives out tokens as the sampler does."""

    def __init__(self, vocab_size: int, block_size: int, num_candidates: int):
        draw = random.Random(0)
        self.block_size = block_size
        self.drawn = [
            Sampled(
                draw.randrange(vocab_size),
                0.5,
                [Candidate(draw.randrange(vocab_size), 0.1) for _ in range(num_candidates)],
            )
            for _ in range(CANDIDATES_DRAWN)
        ]

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        prepare(batch, self.block_size)
        clock.lap("prepare")
        sampled = {
            drawer.sequence_id: [self.drawn[(step + i) % CANDIDATES_DRAWN]]
            for i, drawer in enumerate(batch.drawers)
        }
        clock.lap("sample")
        return StepOutput(sampled)


def measure_overhead(
    model: Model, *, batch: int = 32, num_steps: int = 100, record_trace: bool = True
) -> StepOverhead:
    """Decode steps of a whole batch on a runner that computes nothing.

    Raises:
        ValueError: a number is out of range, or the steps are more than the model's context.
    """
    require_int("batch", batch, least=1, most=4096)
    most = model.config.max_model_len - CONTEXT_LEN - 2
    require_int("num_steps", num_steps, least=1, most=most)
    config = EngineConfig(
        num_blocks=batch * blocks_for(CONTEXT_LEN + num_steps + 2, 16) + batch,
        max_num_seqs=batch,
        max_num_batched_tokens=batch * CONTEXT_LEN,
        record_trace=record_trace,
    )
    draw = random.Random(0)
    vocabulary = range(model.config.vocab_size)
    params = SamplingParams(max_tokens=num_steps + 2, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in (*PARTS, "total")}
    with Engine(model, config) as engine:
        engine.runner = _Bookkeeper(
            len(vocabulary), config.block_size, engine.config.top_k_recorded
        )
        for _ in range(batch):
            engine.submit(draw.choices(vocabulary, k=CONTEXT_LEN), params)
        engine.step()
        for _ in range(num_steps):
            for name, value in _parts(engine).items():
                seconds[name].append(value)
    medians = {name: median(values) for name, values in seconds.items()}
    return StepOverhead(batch, num_steps, record_trace, medians, medians.pop("total"))


def _parts(engine: Engine) -> dict[str, float]:
    """Seconds of one step's parts, and of all of them together."""
    start_s = time.perf_counter()
    step = engine.step()
    wall_s = time.perf_counter() - start_s
    assert step is not None, "all sequences are still running"
    total_s = wall_s - step.stage_s["sample"]
    named = {name: step.stage_s[name] for name in PARTS if name in step.stage_s}
    return named | {"record": total_s - sum(named.values()), "total": total_s}


# --- all together --------------------------------------------------------------------------------

SECTIONS = ("agreement", "simulator", "overhead", "published")
SHARE_TESTS = 50


@dataclass(frozen=True)
class SchedulingBench:
    """What was measured, and what on; parts that were not asked for are empty."""

    model: dict[str, Any]
    config: dict[str, Any]
    """Knobs of the engine that served the workloads."""
    agreements: list[Agreement]
    speeds: list[SimulatorSpeed]
    overheads: list[StepOverhead]
    published: list[FitErrors]
    machine: dict[str, str | int | float | None]
    """As in a trace, and `processor_share`: what this process got before the measurement began."""
    versions: dict[str, str]

    @property
    def busy(self) -> bool:
        """Whether other processes took a fifth of the processor or more."""
        before = self.machine["processor_share"]
        shares = [turn.processor_share for each in self.agreements for turn in each.turns]
        return min([before if isinstance(before, float) else 1.0, *shares]) < LEAST_SHARE

    def with_parts_of(self, earlier: SchedulingBench) -> SchedulingBench:
        """Also what was measured earlier, where it was not measured now; turns of other seeds
        join.

        Raises:
            ValueError: that was another machine, model or configuration.
        """
        earlier.require_like(self.model, self.config, self.machine)
        found = {each.workload: each for each in earlier.agreements}
        for each in self.agreements:
            before = found.get(each.workload)
            found[each.workload] = each.with_turns_of(before) if before else each
        return replace(
            self,
            agreements=[found[name] for name in WORKLOADS if name in found],
            speeds=self.speeds or earlier.speeds,
            overheads=self.overheads or earlier.overheads,
            published=self.published or earlier.published,
        )

    def require_like(
        self, model: dict[str, Any], config: dict[str, Any], machine: dict[str, Any]
    ) -> None:
        """That parts measured so may stand beside these.

        Raises:
            ValueError: they may not.
        """
        for name in ("processor", "threads", "device"):
            if machine[name] != self.machine[name]:
                raise ValueError(
                    f"{name}={machine[name]!r}: what was kept is of {self.machine[name]!r}"
                )
        kept_config = EngineConfig().to_dict() | self.config  # knobs that came later were at rest
        for name, new, old in (("model", model, self.model), ("config", config, kept_config)):
            if different := [key for key in new if new[key] != old.get(key)]:
                raise ValueError(f"{name} differs in {', '.join(different)} from what was kept")

    def save(self, path: Path) -> None:
        """Write JSON, with four significant digits."""
        path.write_text(json.dumps(_rounded(asdict(self)), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> SchedulingBench:
        """Read what `save` wrote."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            **data
            | {
                "agreements": [Agreement.from_dict(each) for each in data["agreements"]],
                "speeds": [SimulatorSpeed(**each) for each in data["speeds"]],
                "overheads": [StepOverhead(**each) for each in data["overheads"]],
                "published": [FitErrors(**each) for each in data["published"]],
            }
        )


def measure_scheduling(
    model: Model,
    config: EngineConfig | None = None,
    *,
    sections: Sequence[str] = SECTIONS,
    workloads: Sequence[str] = tuple(WORKLOADS),
    num_requests: int = 24,
    repeats: int = 2,
    seed: int = 0,
    rate: float = 1.0,
    slo: SLO | None = None,
    num_simulated: int = 10_000,
    published_data: Path | None = None,
    earlier: SchedulingBench | None = None,
    progress: bool = False,
) -> SchedulingBench:
    """Measure what is asked for, the long part last.

    Args:
        config: knobs of the engine that serves the workloads.
        sections: of `SECTIONS`. `published` needs `published_data`, and is left out without.
        workloads, num_requests, repeats, seed, rate, slo: of the agreement; see
            `measure_agreement`.
        num_simulated: requests of the simulator's test.
        published_data: a folder with `distserve_sim` and `splitwise_sim`.
        earlier: what was measured before and is kept, see `with_parts_of`.

    Raises:
        ValueError: a number is out of range, there is no such section, or `earlier` is of another
            machine, model or configuration.
    """
    for name in sections:
        require_choice("sections", name, SECTIONS)
    config = config or EngineConfig()
    machine: dict[str, str | int | float | None] = {
        **describe_machine(),
        "threads": torch.get_num_threads(),
        "device": str(model.decoder.device),
        "processor_share": _processor_share(model),
    }
    found = SchedulingBench(
        model={
            "name": model.name,
            "dtype": str(model.decoder.dtype).removeprefix("torch."),
            "num_parameters": model.config.num_parameters,
        },
        config=config.to_dict(),
        agreements=[],
        speeds=[],
        overheads=[],
        published=[],
        machine=machine,
        versions={name: version(name) for name in VERSIONS},
    )
    if earlier:
        earlier.require_like(found.model, found.config, found.machine)
    fits = measure_published(published_data) if published_data and "published" in sections else []
    overheads = [
        measure_overhead(model, record_trace=records)
        for records in (True, False)
        if "overhead" in sections
    ]
    speeds = [
        measure_simulator(num_simulated, rate_rps)
        for rate_rps in RATES_RPS
        if "simulator" in sections
    ]
    agreements = (
        measure_agreement(
            model,
            config,
            workloads=workloads,
            num_requests=num_requests,
            repeats=repeats,
            seed=seed,
            rate=rate,
            slo=slo,
            progress=progress,
        )
        if "agreement" in sections
        else []
    )
    found = replace(
        found, agreements=agreements, speeds=speeds, overheads=overheads, published=fits
    )
    return found.with_parts_of(earlier) if earlier else found


def _processor_share(model: Model) -> float | None:
    """What this process gets of the processor; None where the model is elsewhere."""
    if model.decoder.device.type != "cpu":
        return None
    share = ProcessorShare()
    for _ in range(SHARE_TESTS):
        share.test()
    return round(share(), 2)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
