"""The BubbleView widget: a pipeline's lanes and bubbles, against the number of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import traitlets

from pdlab.models import Model
from pdlab.trace.records import StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.pipeline_data import has_ranks, in_words, named_runs, pipeline
from pdlab.workbench.pipeline_runs import record_pipelines
from pdlab.workbench.widget import TraceWidget, machine_line

MAX_RUNS = 8
MAX_STEPS = 200
"""Steps that can be chosen."""


class BubbleView(TraceWidget):
    """One step of a pipeline: a lane for each rank, its micro-batches in colour, bubbles hatched.
    Below, the part that is bubbles in every run: measured, and by (p - 1) / (m + p - 1).

    The slider goes through the runs, in the browser alone. `run` and `step` can be set from Python.

        wb.BubbleView(model)                            # records 1, 2, 4 and 8 micro-batches
        wb.BubbleView({"m = 1": one, "m = 4": four})    # traces of the same work

    Args:
        source: a model, whose runs are recorded then (some seconds), or a trace, or several by
            name (at most 8) that did the same work.
        step: place of the step to begin with, among those that several ranks computed.
        run: name of the run to begin with; by default the last.
        knobs: of `pdlab.workbench.pipeline_runs.record_pipelines`, for a model.

    Raises:
        ValueError: there is no run, one without ranks, or no such one; or knobs do not suit.
    """

    name = "bubble_view"

    runs = traitlets.List().tag(sync=True)
    """The step of each run: slots as [rank, micro-batch, tokens, phase, start, end], shares."""
    steps = traitlets.List().tag(sync=True)
    """What can be chosen, in words."""
    step = traitlets.Int(0).tag(sync=True)
    run = traitlets.Int(0).tag(sync=True)
    """Place of the run shown."""
    machine = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        source: Model | Trace | Mapping[str, Trace],
        *,
        step: int = 0,
        run: str | None = None,
        **knobs: Any,
    ) -> None:
        if knobs and not isinstance(source, Model):
            raise ValueError(f"{', '.join(knobs)}: runs that are recorded already have no knobs")
        traces = record_pipelines(source, **knobs) if isinstance(source, Model) else source
        self._traces = named_runs(traces)
        names = list(self._traces)
        if len(names) > MAX_RUNS:
            raise ValueError(f"source has {len(names)} runs, more than {MAX_RUNS}")
        if run is not None and run not in names:
            raise ValueError(f"run={run!r} is not one of {', '.join(names)}")
        self._ranked = {n: [r for r in t.steps if has_ranks(r)] for n, t in self._traces.items()}
        count = min(MAX_STEPS, *(len(records) for records in self._ranked.values()))
        first = self._ranked[names[0]]
        super().__init__(
            steps=[_label(record) for record in first[:count]],
            machine=machine_line(self._traces[names[0]]),
            run=len(names) - 1 if run is None else names.index(run),
        )
        self.step = step
        self._reload()

    def summary(self) -> str:
        parts = [f"{shown['name']}: {shown['words']}" for shown in self.runs]
        return f"Bubbles, {self.steps[self.step]}. {'; '.join(parts)}; recorded on {self.machine}"

    @traitlets.validate("step")
    def _clip_step(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self.steps) - 1))

    @traitlets.validate("run")
    def _clip_run(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self._traces) - 1))

    @traitlets.observe("step")
    def _on_step(self, _change: Any) -> None:
        self._reload()

    def _reload(self) -> None:
        self.runs = [self._shown(name) for name in self._traces]

    def _shown(self, name: str) -> dict[str, Any]:
        found = pipeline(self._traces[name], [self._ranked[name][self.step]])
        return {
            "name": name,
            "words": in_words(found),
            "num_ranks": found.num_ranks,
            "num_stages": found.num_stages,
            "num_micro_batches": found.num_micro_batches,
            "wall_s": found.wall_s,
            "bubble_share": found.bubble_share,
            "formula_share": found.formula_share,
            "slots": [
                [s.rank, s.micro_batch, s.num_tokens, s.phase, s.start_s, s.end_s]
                for s in found.slots
            ],
        }


def _label(record: StepRecord) -> str:
    """`step 3: prefill, 256 tokens`."""
    tokens = f"{record.num_tokens} token{'s' * (record.num_tokens != 1)}"
    return f"step {record.step}: {record.phase}, {tokens}"
