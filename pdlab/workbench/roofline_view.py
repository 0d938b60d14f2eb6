"""The RooflineView widget: a trace's steps under the ceilings of this machine, or of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import traitlets

from pdlab.costmodel import Hardware, load_hardware
from pdlab.trace.trace import Trace
from pdlab.workbench.roofline_data import on_hardware, points, supporting, trace_dtype
from pdlab.workbench.widget import TraceWidget, machine_line


class RooflineView(TraceWidget):
    """Prefill under the flat roof, decode under the slanted one, and how far below each stays.

    On the trace's own machine a point stands where the step was recorded. On any other machine a
    point stands where the cost model predicts it, drawn hollow and marked as predicted.

    Args:
        trace: a run; every step is a point.
        hardware: the machine that recorded it, from `pdlab.costmodel.calibrate()`.
        others: machines to compare with, by default the published table of the cost model.
    """

    name = "roofline"

    points = traitlets.List().tag(sync=True)
    machines = traitlets.List().tag(sync=True)
    """This machine first; each with its ceilings and the predicted time of every point."""
    footer = traitlets.Dict().tag(sync=True)
    selected = traitlets.Int(0).tag(sync=True)
    """Index of the highlighted point."""
    machine = traitlets.Int(0).tag(sync=True)
    """Index of the machine shown; 0 is the one the trace was recorded on."""

    def __init__(
        self,
        trace: Trace,
        hardware: Hardware,
        others: Mapping[str, Hardware] | None = None,
    ) -> None:
        steps = points(trace)
        if not steps:
            raise ValueError("trace holds no step that computed anything")
        table = load_hardware() if others is None else others
        machines = [hardware, *supporting(trace, table)]
        super().__init__(
            points=[p._asdict() for p in steps],
            machines=[on_hardware(trace, m) for m in machines],
            footer={"machine": machine_line(trace), "dtype": trace_dtype(trace)},
        )

    def summary(self) -> str:
        point, machine = self.points[self.selected], self.machines[self.machine]
        return (
            f"Roofline of {machine['name']}; step {point['step']} ({point['phase']}): "
            f"{point['flops'] / point['bytes']:.3g} FLOP/byte"
        )

    @traitlets.validate("selected")
    def _clip_selected(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self.points) - 1))

    @traitlets.validate("machine")
    def _clip_machine(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self.machines) - 1))
