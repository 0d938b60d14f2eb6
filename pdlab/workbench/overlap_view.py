"""The OverlapView widget: the host's lane and the model's, with overlap and without."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import traitlets

from pdlab.requirements import require_int
from pdlab.trace.trace import Trace
from pdlab.workbench.figures.overlap import in_words
from pdlab.workbench.overlap_data import Lanes, lanes
from pdlab.workbench.widget import TraceWidget, machine_line

MAX_RUNS = 4
MAX_SHOWN = 40


class OverlapView(TraceWidget):
    """A few steps of each run on one time axis: what the caller's thread did, when the model
    computed, and, hatched, what of the first was hidden by the second.

    `first` moves along the runs, from Python too.

    Args:
        runs: recorded runs by name (at most 4), such as one without overlap and one with.
        first: place of the first step shown, counted from 0.
        num_steps: steps shown at once (at most 40).

    Raises:
        ValueError: there is no run, or one of fewer than two steps.
    """

    name = "overlap_view"

    runs = traitlets.List().tag(sync=True)
    """Name, pieces and figures of each run; see `overlap_data.Lanes`."""
    first = traitlets.Int(0).tag(sync=True)
    last_first = traitlets.Int(0).tag(sync=True)
    """The largest `first` there is."""
    num_steps = traitlets.Int(4).tag(sync=True)
    machine = traitlets.Unicode().tag(sync=True)

    def __init__(self, runs: Mapping[str, Trace], first: int = 0, num_steps: int = 4) -> None:
        if not isinstance(runs, Mapping) or not 1 <= len(runs) <= MAX_RUNS:
            raise ValueError(f"runs must be 1 to {MAX_RUNS} traces by name")
        for name, trace in runs.items():
            if not isinstance(trace, Trace) or len(trace.steps) < 2:
                raise ValueError(f"runs[{name!r}] must be a Trace of at least two steps")
        require_int("num_steps", num_steps, 1, MAX_SHOWN)
        require_int("first", first, 0)
        self._traces = dict(runs)
        shortest = min(len(trace.steps) for trace in runs.values())
        super().__init__(
            num_steps=num_steps,
            machine=machine_line(next(iter(runs.values()))),
            last_first=max(0, shortest - 1 - num_steps),
        )
        self.first = first
        self._reload()

    @property
    def lanes(self) -> dict[str, Lanes]:
        """What is shown of each run."""
        return {n: lanes(trace, self.first, self.num_steps) for n, trace in self._traces.items()}

    def summary(self) -> str:
        return f"Overlap: {in_words(self.lanes)}; recorded on {self.machine}"

    @traitlets.validate("first")
    def _clip_first(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], self.last_first))

    @traitlets.observe("first")
    def _on_first(self, _change: Any) -> None:
        self._reload()

    def _reload(self) -> None:
        self.runs = [
            {
                "name": name,
                "pieces": [list(piece) for piece in each.pieces],
                "wall_s": each.wall_s,
                "step_s": each.step_s,
                "host_s": each.host_s / each.num_steps,
                "hidden_s": each.hidden_s / each.num_steps,
                "compute_share": each.compute_share,
            }
            for name, each in self.lanes.items()
        ]
