"""When each rank of a pipeline computed, and the bubbles between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pdlab.costmodel import bubble_share
from pdlab.trace.records import StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.shard_data import plan_of


class Slot(NamedTuple):
    """What one rank did with one micro-batch. Seconds from the first slot that is shown."""

    rank: int
    step: int
    micro_batch: int
    num_tokens: int
    phase: str
    """Of its rows: `prefill`, `decode` or `mixed`."""
    start_s: float
    wall_s: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.wall_s


class Pipeline(NamedTuple):
    """Some steps of a run on a grid of ranks."""

    slots: list[Slot]
    steps: list[tuple[float, float]]
    """Of each step, when its first slot began and its last one ended."""
    num_ranks: int
    num_stages: int
    num_micro_batches: int
    """Of the step that has the most."""

    @property
    def wall_s(self) -> float:
        """From the first slot to the end of the last."""
        return self.steps[-1][1]

    @property
    def step_s(self) -> float:
        """A step, on average: from its first slot to the end of its last."""
        return sum(end - start for start, end in self.steps) / len(self.steps)

    @property
    def bubble_share(self) -> float:
        """Part of the steps in which a rank had nothing to do, mean of all ranks: measured."""
        busy_s = sum(slot.wall_s for slot in self.slots)
        return 1 - busy_s / (self.num_ranks * self.step_s * len(self.steps))

    @property
    def formula_share(self) -> float:
        """The same by (p - 1) / (m + p - 1), for stages and micro-batches alike: predicted."""
        return bubble_share(self.num_stages, self.num_micro_batches)

    def stage(self, rank: int) -> int:
        return rank * self.num_stages // self.num_ranks


def has_ranks(record: StepRecord) -> bool:
    """Whether a step was computed by several ranks and says when."""
    return bool(record.rank_spans)


def pipeline(trace: Trace, steps: Sequence[StepRecord]) -> Pipeline:
    """The lanes of these steps of a run.

    Raises:
        ValueError: there is no step, or one that no ranks computed.
    """
    if not steps:
        raise ValueError("steps is empty: it needs at least 1")
    for record in steps:
        if not has_ranks(record):
            raise ValueError(f"step {record.step} has no rank_spans: no ranks computed it")
    plan = plan_of(trace)
    origin_s = min(span.start_s for span in steps[0].rank_spans)
    slots = [
        Slot(
            span.rank,
            record.step,
            span.micro_batch,
            span.num_tokens,
            phases[span.micro_batch],
            span.start_s - origin_s,
            span.wall_s,
        )
        for record in steps
        for phases in [_phases(record)]
        for span in record.rank_spans
    ]
    by_step = [[slot for slot in slots if slot.step == record.step] for record in steps]
    return Pipeline(
        slots=slots,
        steps=[(min(s.start_s for s in own), max(s.end_s for s in own)) for own in by_step],
        num_ranks=plan.num_ranks,
        num_stages=plan.pipeline_parallel,
        num_micro_batches=max(len({s.micro_batch for s in own}) for own in by_step),
    )


def _phases(record: StepRecord) -> dict[int, str]:
    """What each micro-batch consists of: its rows are those of the sequences, in order."""
    of_rows = [s.phase for s in [*record.sequences, *record.wasted] for _ in range(s.num_tokens)]
    first = record.rank_spans[0].rank
    phases: dict[int, str] = {}
    at = 0
    for span in record.rank_spans:
        if span.rank == first:
            own: set[str] = set(of_rows[at : at + span.num_tokens])
            phases[span.micro_batch] = own.pop() if len(own) == 1 else "mixed"
            at += span.num_tokens
    return phases


def named_runs(runs: Trace | Mapping[str, Trace]) -> dict[str, Trace]:
    """One run, or several by name.

    Raises:
        ValueError: there is none, or one of them is no trace, or no step of it has ranks.
    """
    named = dict(runs) if isinstance(runs, Mapping) else {"this run": runs}
    if not named:
        raise ValueError("runs is empty: it needs at least 1")
    for name, trace in named.items():
        if not isinstance(trace, Trace):
            raise ValueError(f"runs[{name!r}]={trace!r:.60} must be a Trace")
        if not any(has_ranks(record) for record in trace.steps):
            raise ValueError(f"runs[{name!r}] has no step that ranks computed")
    return named


def in_words(shown: Pipeline) -> str:
    """`2 stages, 4 micro-batches: 27% bubbles measured, 20% predicted`."""
    stages, count = shown.num_stages, shown.num_micro_batches
    return (
        f"{stages} stage{'s' * (stages > 1)}, {count} micro-batch{'es' * (count > 1)}: "
        f"{shares(shown)}"
    )


def shares(shown: Pipeline) -> str:
    return f"{shown.bubble_share:.0%} bubbles measured, {shown.formula_share:.0%} predicted"
