"""The Gantt widget: when each request waits, is computed, stalls and ends, over the steps below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import traitlets

from pdlab.requirements import require_choice, require_int
from pdlab.workbench.gantt_data import MAX_ROWS, MAX_SEGMENTS, gantt_data, named_runs, run_facts
from pdlab.workbench.widget import TraceWidget
from pdlab.workload.serving import SLO, ServingRun


class Gantt(TraceWidget):
    """One row a request, in order of arrival; the engine's steps below, on the same time axis.

    `Gantt(run)` shows one run; `Gantt({"static": one, "mixed": other})` shifts between several,
    which keep one time axis, so that what becomes shorter looks shorter.

    `widget.view = (0.5, 1.2)` shows those seconds; `()` shows all of them.

    Args:
        runs: a served workload, measured or simulated, or several by name (at most 8).
        slo: limits; a request that missed them gets a cross at its end instead of a dot.
        run: name of the run to begin with.
        first: number of the request in the topmost row; at most 80 are shown at once.

    Raises:
        ValueError: there is no run, or none of that name, or a limit is negative.
    """

    name = "gantt"

    runs = traitlets.List().tag(sync=True)
    """`gantt_data` of each run."""
    slo = traitlets.Dict(allow_none=True, default_value=None).tag(sync=True)
    run = traitlets.Unicode().tag(sync=True)
    """Name of the run shown."""
    first = traitlets.Int(0).tag(sync=True)
    view = traitlets.List(traitlets.Float()).tag(sync=True)
    """Beginning and end of the time shown, in seconds; empty shows all."""
    selected = traitlets.Unicode().tag(sync=True)
    """The request whose times stand below the chart."""

    def __init__(
        self,
        runs: ServingRun | Mapping[str, ServingRun],
        *,
        slo: SLO | None = None,
        run: str | None = None,
        first: int = 0,
    ) -> None:
        self._runs = named_runs(runs)
        self._slo = slo.checked() if slo else None
        self._facts = {name: run_facts(each, slo) for name, each in self._runs.items()}
        names = tuple(self._runs)
        if run is not None:
            require_choice("run", run, names)
        require_int("first", first, 0)
        super().__init__(slo=slo._asdict() if slo else None, run=names[0] if run is None else run)
        self.first = first
        if not self.runs:
            self._reload()

    @property
    def data(self) -> dict[str, Any]:
        """What is shown of the chosen run."""
        return next(data for data in self.runs if data["name"] == self.run)

    def summary(self) -> str:
        data = self.data
        numbers = data["facts"]
        done = f"{numbers['finished']} of {data['num_requests']} requests finished"
        met = "" if self._slo is None else f", {numbers['met']} within their limits"
        what = f"Gantt chart of {self.run}" if len(self.runs) > 1 else "Gantt chart"
        return f"{what}: {done}{met}, in {data['duration_s']:.3g} s; {data['line']}"

    def _reload(self) -> None:
        share = max(MAX_ROWS, MAX_SEGMENTS // len(self._runs))
        self.runs = [
            gantt_data(
                run,
                name=name,
                slo=self._slo,
                first=self.first,
                max_segments=share,
                facts=self._facts[name],
            )
            for name, run in self._runs.items()
        ]

    @traitlets.observe("first")
    def _on_first(self, _change: Any) -> None:
        self._reload()
        self.view = []

    @traitlets.validate("first")
    def _clip_first(self, proposal: Any) -> int:
        longest = max(len(run.requests) for run in self._runs.values())
        return max(0, min(proposal["value"], longest - 1))

    @traitlets.validate("run")
    def _check_run(self, proposal: Any) -> str:
        require_choice("run", proposal["value"], tuple(self._runs))
        return str(proposal["value"])

    @traitlets.validate("view")
    def _check_view(self, proposal: Any) -> list[float]:
        view = list(proposal["value"])
        if view and not (len(view) == 2 and view[0] < view[1]):
            raise ValueError(f"view={view} must be a start and a later end in seconds, or empty")
        return view
