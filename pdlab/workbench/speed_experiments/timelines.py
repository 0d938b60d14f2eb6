"""One decode step on a time axis: as torch runs it, operator by operator, and as the compiled step
does, phase by phase."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from pdlab.engine import Engine, EngineConfig, SamplingParams
from pdlab.engine.compiled import CompiledForward
from pdlab.engine.runner import ModelRunner, Runner, StepOutput
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.engine.timing import StageClock
from pdlab.kvcache import Release, blocks_for
from pdlab.models import Model
from pdlab.trace import BlockMove
from pdlab.workbench.experiments import BLOCK_SIZE, random_prompt

if TYPE_CHECKING:
    from pdlab_kernels.cpu.decoder import StepResult

CONTEXT, STEPS = 128, 7
MODEL_STAGES = ("embed", "qkv", "attention", "output", "mlp", "logits")
VIEWS = frozenset(
    f"aten::{name}"
    for name in (
        "to", "flatten", "unsqueeze", "select", "chunk", "unflatten", "slice", "view", "transpose",
        "split_with_sizes", "detach", "detach_", "lift_fresh", "resolve_conj", "resolve_neg", "t",
        "expand", "reshape", "permute", "squeeze", "alias", "split", "empty",
    )
)  # fmt: skip
"""Operators that only describe memory anew, and compute nothing."""
_MARK = "pdlab stage: "


class Span(NamedTuple):
    """An operator or a phase, in seconds since the step's forward pass began."""

    name: str
    stage: str
    layer: int | None
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """The forward pass of one step."""

    name: str
    spans: list[Span]
    wall_s: float
    """From the pass's begin to its end."""

    @property
    def stages(self) -> list[Span]:
        """Each stage of each layer as a whole, from the end of the one before."""
        found: list[Span] = []
        for span in self.spans:
            if not found or (found[-1].stage, found[-1].layer) != (span.stage, span.layer):
                start_s = found[-1].end_s if found else 0.0
                found.append(span._replace(name=span.stage, start_s=start_s))
            found[-1] = found[-1]._replace(end_s=span.end_s)
        return found

    @property
    def between_s(self) -> float:
        """Seconds in which no operator ran: Python's, and of torch what leads to an operator."""
        return self.wall_s - sum(span.seconds for span in self.spans)

    @property
    def usual_layer(self) -> int:
        """The layer that took the median time."""
        layers = {s.layer: self.layer(s.layer).wall_s for s in self.spans if s.layer is not None}
        return sorted(layers, key=lambda number: layers[number])[len(layers) // 2]

    def layer(self, number: int) -> Timeline:
        """One layer alone, from the end of what lies before it."""
        own = [span for span in self.spans if span.layer == number]
        if not own:
            raise ValueError(f"number={number}: {self.name} has no such layer")
        start = max((s.end_s for s in self.spans if s.end_s <= own[0].start_s), default=0.0)
        moved = [s._replace(start_s=s.start_s - start, end_s=s.end_s - start) for s in own]
        return Timeline(self.name, moved, own[-1].end_s - start)


@contextmanager
def decoding(model: Model, backend: str, context: int = CONTEXT) -> Iterator[Engine]:
    """An engine whose next steps decode one sequence, about so many tokens long."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=blocks_for(context + 2 * STEPS, BLOCK_SIZE),
        backend=backend,
        enable_prefix_cache=False,
    )
    with Engine(model, config) as engine:
        prompt = random_prompt(model, context - STEPS)
        engine.submit(prompt, SamplingParams(max_tokens=3 * STEPS, ignore_eos=True))
        for _ in range(STEPS):
            engine.step()
        yield engine


def typical(timelines: Iterable[Timeline]) -> Timeline:
    """The one whose step took the median time."""
    ordered = sorted(timelines, key=lambda timeline: timeline.wall_s)
    return ordered[len(ordered) // 2]


# --- torch ----------------------------------------------------------------------------------------


class _Marks:
    """A step's clock that also leaves its laps in torch's profile."""

    def __init__(self, clock: StageClock) -> None:
        self._clock = clock

    def lap(self, stage: str) -> None:
        self._clock.lap(stage)
        with record_function(_MARK + stage):
            pass


class _Marking:
    """A runner whose steps have such a clock."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def carry_out(self, orders: Iterable[BlockMove | Release]) -> None:
        self._runner.carry_out(orders)

    def run(self, batch: ScheduledBatch, clock: StageClock, step: int) -> StepOutput:
        return self._runner.run(batch, _Marks(clock), step)  # type: ignore[arg-type]

    def commit(self) -> None:
        self._runner.commit()


def torch_timeline(model: Model, steps: int = STEPS) -> Timeline:
    """A decode step of the torch backend under torch's profiler, which slows it a little."""
    found = []
    with decoding(model, "torch") as engine:
        engine.runner = _Marking(engine.runner)
        for _ in range(steps):
            with _no_stderr(), profile(activities=[ProfilerActivity.CPU]) as profiled:
                engine.step()
            found.append(_of_profile(profiled))
    return typical(found)


def _of_profile(profiled: Any) -> Timeline:
    events = [event for event in profiled.events() if event.cpu_parent is None]
    events.sort(key=lambda event: event.time_range.start)
    spans: list[Span] = []
    waiting: list[Any] = []
    layer, start_us = 0, None
    for event in events:
        if not event.name.startswith(_MARK):
            waiting.append(event)
            continue
        stage = event.name.removeprefix(_MARK)
        if stage == "prepare":
            start_us = event.time_range.end
        elif stage in MODEL_STAGES and start_us is not None:
            number = None if stage in ("embed", "logits") else layer
            spans += [_span(each, stage, number, start_us) for each in waiting]
            layer += stage == "mlp"
        waiting = []
    return Timeline("torch", spans, spans[-1].end_s)


def _span(event: Any, stage: str, layer: int | None, start_us: float) -> Span:
    begin, end = event.time_range.start, event.time_range.end
    return Span(event.name, stage, layer, (begin - start_us) * 1e-6, (end - start_us) * 1e-6)


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Without what torch's profiler says of its start and end, past Python."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


# --- compiled -------------------------------------------------------------------------------------


def compiled_timeline(model: Model, steps: int = STEPS) -> Timeline:
    """A decode step of the compiled backend, by the stamps that it leaves itself.

    Raises:
        ValueError: the system has no clock for it.
    """
    results: list[StepResult] = []
    with decoding(model, "cpu") as engine:
        assert isinstance(engine.runner, ModelRunner)
        assert isinstance(engine.runner.fast, CompiledForward)
        decoder = engine.runner.fast.decoder
        run = decoder.run

        def run_and_keep(*args: Any, **kwargs: Any) -> StepResult:
            results.append(run(*args, **kwargs))
            return results[-1]

        decoder.run = run_and_keep
        for _ in range(steps):
            engine.step()
    if not results[0].phases:
        raise ValueError("the compiled step has no clock on this system")
    return typical(map(_of_result, results))


def _of_result(result: StepResult) -> Timeline:
    phases = result.phases
    ends_s = [*(phase.began_s for phase in phases[1:]), result.ended_s]
    start_s = phases[0].began_s
    spans = []
    for phase, end_s in zip(phases, ends_s, strict=True):
        stage = phase.stage
        layer = None if stage in ("embed", "logits") else phase.layer
        spans.append(Span(phase.name, stage, layer, phase.began_s - start_s, end_s - start_s))
    return Timeline("one compiled call", spans, result.ended_s - start_s)


# --- what a call costs ----------------------------------------------------------------------------


def call_costs(repeats: int = 5, calls: int = 2000) -> dict[str, float]:
    """Seconds of calls that do next to nothing: the least of some repeats."""
    x, weight = torch.zeros(1), torch.ones(576)
    hidden = torch.zeros(1, 576)

    def nothing() -> None:
        pass

    functions = {
        "a Python function that does nothing": nothing,
        "a view: x.view(1)": lambda: x.view(1),
        "an addition of one number: x + x": lambda: x + x,
        "a norm of 576 numbers": lambda: torch.nn.functional.rms_norm(hidden, (576,), weight, 1e-5),
    }
    found = dict.fromkeys(functions, float("inf"))
    with torch.inference_mode():
        for _ in range(repeats):
            for name, function in functions.items():
                start_s = perf_counter()
                for _ in range(calls):
                    function()
                found[name] = min(found[name], (perf_counter() - start_s) / calls)
    return found
