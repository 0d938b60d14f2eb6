"""The same steps with and without overlap, and a caller who has something to do between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.models import Model
from pdlab.trace import Trace
from pdlab.workbench.lesson import progress
from pdlab.workbench.speculation_experiments.runs import CHAT


@dataclass(frozen=True)
class Loop:
    """A loop over steps, with a caller that waits between them."""

    overlap: bool
    caller_s: float
    loop_s: float
    """From one step's return to the next one's, median of all rounds."""
    trace: Trace
    """Of the last round."""


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
    traces: dict[tuple[bool, float], Trace] = {}
    prompts = [CHAT if prompt is None else prompt] * batch
    for turn in progress(turns * rounds, "overlap"):
        config = EngineConfig(num_blocks=64, backend=backend, overlap=turn[0])
        with Engine(model, config) as engine:
            gaps[turn] += _loop(engine, prompts, turn[1], num_steps)
            traces[turn] = engine.trace
    return [Loop(*turn, median(gaps[turn]), traces[turn]) for turn in turns]


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
