"""The BlockTableView widget: from logical blocks to physical ones; who shares, moves, evicts."""

from __future__ import annotations

from typing import Any

import traitlets

from pdlab.trace.records import DROPPED
from pdlab.trace.trace import Trace
from pdlab.workbench.block_frames import block_frames
from pdlab.workbench.memory_data import num_host_blocks, shares_memory
from pdlab.workbench.sequences import sequence_index
from pdlab.workbench.widget import TraceWidget, machine_line

MAX_FRAMES = 1000
"""Steps that one view sends to the browser; its footer says when it cuts."""


class BlockTableView(TraceWidget):
    """Paging at every recorded step: each sequence's block table beside the pool it points into.

    Left and right keys walk through the steps, up and down through the logical blocks; pointing at
    a block shows where it lies, whose it is, and which slots its positions take. `step` and
    `selected` can also be set from Python.

    Args:
        trace: a run of the engine.
        step: number of the recorded step to begin with, counted from 0.
        selected: a logical block to point at, as (sequence_id, number).
    """

    name = "block_table"
    shared = ("transport",)

    header = traitlets.Dict().tag(sync=True)
    frames = traitlets.List().tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    """Number of the recorded step shown, counted from 0."""
    selected = traitlets.List().tag(sync=True)
    """The logical block pointed at, [sequence_id, number]; empty for none."""

    def __init__(
        self, trace: Trace, step: int = 0, *, selected: tuple[str, int] | None = None
    ) -> None:
        if not trace.steps:
            raise ValueError("trace holds no step: run the engine first")
        engine = trace.engine
        super().__init__(
            header={
                "sequences": sequence_index(trace),
                "block_size": engine["block_size"],
                "num_blocks": engine["num_blocks"],
                "num_host_blocks": num_host_blocks(trace),
                "shares_memory": shares_memory(trace),
                "machine": machine_line(trace),
                "cut": max(0, len(trace.steps) - MAX_FRAMES),
            },
            frames=block_frames(trace, MAX_FRAMES),
            selected=list(selected or ()),
        )
        self.step = step

    @property
    def frame(self) -> dict[str, Any]:
        """The frame shown now, as `block_frames` made it."""
        return self.frames[self.step]

    def summary(self) -> str:
        frame = self.frame
        others = len(frame["others"])
        more = f", {others} more by other engines" if others else ""
        held = {b for t in frame["tables"] for b in t["blocks"]} - {DROPPED}
        return (
            f"Block tables, engine step {frame['step']}: {len(held)} of "
            f"{self.header['num_blocks']} blocks are held{more}. {' '.join(frame['events'])}"
        )

    @traitlets.validate("step")
    def _clip_step(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self.frames) - 1))
