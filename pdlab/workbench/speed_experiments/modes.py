"""From plain torch to the compiled step over fewer and fewer bytes, measured in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import pdlab
from pdlab.costmodel import Hardware
from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.engine.recorder import cost_of
from pdlab.kvcache import blocks_for
from pdlab.models import Model
from pdlab.trace import StepRecord
from pdlab.workbench.experiments import BLOCK_SIZE, random_prompt
from pdlab.workbench.lesson import progress


class Mode(NamedTuple):
    """Weights in a format, and what computes with them."""

    name: str
    weights: str
    backend: str


MODES = (
    Mode("torch, fp32", "fp32", "torch"),
    Mode("compiled, fp32", "fp32", "cpu"),
    Mode("compiled, int8", "int8", "cpu"),
    Mode("compiled, the file's blocks", "file", "cpu"),
    Mode("compiled, int4 and its head", "int4/int4", "cpu"),
)


class Case(NamedTuple):
    """Prompts that are read in one step and continued together."""

    batch: int
    prompt: int
    steps: int
    """Decode steps that follow."""


ALONE, EIGHT, MANY = Case(1, 128, 8), Case(8, 32, 4), Case(32, 8, 3)


@dataclass(frozen=True)
class Point:
    """Steps of one kind, of one mode: what they did, counted, and how long they took."""

    mode: str
    phase: str
    batch: int
    tokens: int
    """Of all sequences together, in a step."""
    flops: int
    bytes: int
    step_s: float
    """Median."""
    num_steps: int

    @property
    def intensity(self) -> float:
        """FLOPs for each byte moved."""
        return self.flops / self.bytes

    @property
    def label(self) -> str:
        if self.phase == "prefill":
            return f"a prompt of {self.tokens}"
        return f"decode, batch {self.batch}"

    def floor_s(self, machine: Hardware) -> float:
        """Seconds that its bytes or its FLOPs take at least, in fp32."""
        return max(self.bytes / machine.bandwidth_bytes_s, self.flops / machine.peak("fp32"))


class Modes:
    """An engine of each mode, ready to be measured in turns; close it at the end.

    Args:
        name: of the model; each mode loads it.
    """

    def __init__(self, name: str = "smollm2-135m", modes: Sequence[Mode] = MODES):
        self.modes = tuple(modes)
        self.models: dict[str, Model] = {}
        self._engines: dict[str, Engine] = {}
        for mode in progress(self.modes, "loading"):
            self.models[mode.name] = self._load(name, mode)
            self._engines[mode.name] = _engine(self.models[mode.name], mode.backend)
            self._run(mode, Case(2, 4, 1))  # compiles, where nothing is compiled yet

    def _load(self, name: str, mode: Mode) -> Model:
        for other in self.modes:
            if other.weights == mode.weights and other.name in self.models:
                return self.models[other.name]
        return pdlab.load(name, device="cpu", dtype="fp32", weights=mode.weights, progress=False)

    @property
    def weight_bytes(self) -> dict[str, int]:
        """What a decode step reads of weights, by mode."""
        return {mode.name: self.models[mode.name].weight_bytes for mode in self.modes}

    def measure(self, cases: Sequence[Case] = (ALONE, EIGHT, MANY), rounds: int = 3) -> list[Point]:
        """All cases in all modes, each round beginning with another mode."""
        turns = [
            (case, self.modes[(k + turn) % len(self.modes)])
            for turn in range(rounds)
            for case in cases
            for k in range(len(self.modes))
        ]
        found: dict[tuple[str, str, int], list[StepRecord]] = {}
        for case, mode in progress(turns, "measuring"):
            for record in self._run(mode, case):
                if record.phase == "decode" or case.batch == 1:
                    key = mode.name, record.phase, len(record.sequences)
                    found.setdefault(key, []).append(record)
        return [_point(*key, records) for key, records in found.items()]

    def _run(self, mode: Mode, case: Case) -> list[StepRecord]:
        engine = self._engines[mode.name]
        before = len(engine.trace.steps)
        prompts = [random_prompt(engine.model, case.prompt, seed) for seed in range(case.batch)]
        engine.generate(prompts, SamplingParams(max_tokens=case.steps + 1, ignore_eos=True))
        return engine.trace.steps[before:]

    def close(self) -> None:
        """End all engines. Closing again does nothing."""
        for engine in self._engines.values():
            engine.close()


def _engine(model: Model, backend: str) -> Engine:
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=MANY.batch * blocks_for(ALONE.prompt // 4 + BLOCK_SIZE, BLOCK_SIZE),
        max_num_seqs=MANY.batch,
        backend=backend,
        enable_prefix_cache=False,
    )
    return Engine(model, config)


def _point(mode: str, phase: str, batch: int, records: Sequence[StepRecord]) -> Point:
    middle = records[len(records) // 2]
    cost = cost_of(middle)
    return Point(
        mode=mode,
        phase=phase,
        batch=batch,
        tokens=middle.num_tokens,
        flops=cost.total_flops,
        bytes=cost.total_bytes,
        step_s=median(record.wall_s for record in records),
        num_steps=len(records),
    )


def pick(points: Sequence[Point], phase: str = "decode", batch: int = 1) -> dict[str, Point]:
    """The points of one kind of step, by mode."""
    return {p.mode: p for p in points if (p.phase, p.batch) == (phase, batch)}
