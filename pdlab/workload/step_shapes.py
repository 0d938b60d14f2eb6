"""The shapes of the engine's steps: what their times are fitted to."""

from __future__ import annotations

from collections.abc import Iterable

from pdlab.costmodel import StepShape, causal_pairs
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.trace import StepRecord, Trace

Sample = tuple[StepShape, float]
"""A step's shape and its seconds."""
LARGEST_GAP = 0.05
"""Part of a step's time: a longer one before the next step was spent waiting."""


def shape_of(batch: ScheduledBatch) -> StepShape:
    """The shape of a step that the scheduler planned."""
    return _shape((p.phase == "decode", p.start, p.num_tokens) for p in batch.scheduled)


def shape_of_record(step: StepRecord) -> StepShape:
    """The shape of a step that the engine recorded."""
    computed = [s for s in step.sequences if s.num_tokens]
    return _shape((s.phase == "decode", s.start, s.end - s.start) for s in computed)


def _shape(parts: Iterable[tuple[bool, int, int]]) -> StepShape:
    prompts = tokens = pairs = decodes = context = longest = 0
    for is_decode, start, num_tokens in parts:
        if is_decode:
            end = start + num_tokens
            decodes += 1
            context += end
            if end > longest:  # called millions of times in a simulation
                longest = end
        else:
            prompts += 1
            tokens += num_tokens
            pairs += causal_pairs(start, num_tokens)
    return StepShape(prompts, tokens, pairs, decodes, context, longest)


def samples_of(trace: Trace) -> list[Sample]:
    """Shape and seconds of each recorded step, to fit step times to a real run.

    The seconds are those from its start to the next one's, as long as the engine did not idle
    between them: then its own time counts, which leaves out the time to record it.
    """
    starts = [*(step.start_s for step in trace.steps[1:]), float("inf")]
    samples = []
    for step, next_s in zip(trace.steps, starts, strict=False):
        to_next_s = next_s - step.start_s
        busy = to_next_s < step.wall_s * (1 + LARGEST_GAP)
        samples.append((shape_of_record(step), to_next_s if busy else step.wall_s))
    return samples
