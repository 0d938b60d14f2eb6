"""The same steps with and without overlap, and a caller who has something to do between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.models import Model
from pdlab.trace import StepRecord
from pdlab.workbench.lesson import progress
from pdlab.workbench.speculation_experiments.runs import CHAT

BEFORE, AFTER = ("schedule", "draft", "prepare"), ("sample", "deliver")
"""The engine's own stages, before and behind the model's."""


class Piece(NamedTuple):
    """What one of the two lanes did: `host` the engine and its caller, `compute` the model."""

    lane: str
    name: str
    start_s: float
    wall_s: float


@dataclass(frozen=True)
class Loop:
    """A loop over steps, with a caller that waits between them."""

    overlap: bool
    caller_s: float
    loop_s: float
    """From one step's return to the next one's, median."""
    steps: list[StepRecord]

    def pieces(self, num_steps: int = 4) -> list[Piece]:
        """What was done when in some steps from the middle, from 0 on."""
        first = len(self.steps) // 2
        chosen = self.steps[first : first + num_steps]
        found = [piece for step in chosen for piece in _pieces(step)]
        start_s = min(piece.start_s for piece in found)
        return [piece._replace(start_s=piece.start_s - start_s) for piece in found]


def _pieces(step: StepRecord) -> list[Piece]:
    """As recorded; without overlap, stages lie one behind the other."""
    if step.spans:
        return [Piece(span.lane, span.name, span.start_s, span.wall_s) for span in step.spans]
    stages, at, found = step.stage_s, step.start_s, []
    model_s = sum(s for name, s in stages.items() if name not in (*BEFORE, *AFTER))
    parts = [("host", name, stages.get(name, 0.0)) for name in BEFORE]
    parts += [("compute", "compute", model_s)]
    parts += [("host", name, stages.get(name, 0.0)) for name in AFTER]
    for lane, name, wall_s in parts:
        if wall_s:
            found.append(Piece(lane, name, at, wall_s))
            at += wall_s
    return found


def overlap_loops(
    model: Model,
    prompt: Any = None,
    *,
    batch: int = 8,
    waits_s: Sequence[float] = (0.0, 0.005),
    num_steps: int = 10,
    rounds: int = 3,
    backend: str = "cpu",
) -> list[Loop]:
    """Decode without overlap and with it, for each of the waits, in turns: the caller waits so long
    after each step, as one does that sends what it got to somebody and hears that it came."""
    turns = [(overlap, wait_s) for wait_s in waits_s for overlap in (False, True)]
    gaps: dict[tuple[bool, float], list[float]] = {turn: [] for turn in turns}
    steps: dict[tuple[bool, float], list[StepRecord]] = {}
    prompts = [CHAT if prompt is None else prompt] * batch
    for turn in progress(turns * rounds, "overlap"):
        config = EngineConfig(num_blocks=64, backend=backend, overlap=turn[0])
        with Engine(model, config) as engine:
            gaps[turn] += _loop(engine, prompts, turn[1], num_steps)
            steps[turn] = [step for step in engine.trace.steps if step.phase == "decode"]
    return [Loop(*turn, median(gaps[turn]), steps[turn]) for turn in turns]


def _loop(engine: Engine, prompts: Sequence[Any], wait_s: float, num_steps: int) -> list[float]:
    """Seconds from the end of one turn of the loop to that of the next, prompts left out."""
    params = SamplingParams(max_tokens=num_steps, ignore_eos=True, temperature=0)
    for prompt in prompts:
        engine.submit(prompt, params)
    ends = []
    while engine.step():
        time.sleep(wait_s)
        ends.append(time.perf_counter())
    return [after - before for before, after in pairwise(ends[1:])]
