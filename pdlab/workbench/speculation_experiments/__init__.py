"""What the lesson on speculation and overlap runs and shows."""

from pdlab.workbench.speculation_experiments.guessing import Blind, Guessing
from pdlab.workbench.speculation_experiments.overlap import Loop, overlap_loops
from pdlab.workbench.speculation_experiments.rejection import Rejection
from pdlab.workbench.speculation_experiments.rows import StepCosts, step_costs
from pdlab.workbench.speculation_experiments.runs import (
    CHAT,
    COPY,
    Compared,
    batch_gains,
    compare,
    draft_lengths,
    own_work,
    recorded_lines,
)

__all__ = [
    "CHAT",
    "COPY",
    "Blind",
    "Compared",
    "Guessing",
    "Loop",
    "Rejection",
    "StepCosts",
    "batch_gains",
    "compare",
    "draft_lengths",
    "overlap_loops",
    "own_work",
    "recorded_lines",
    "step_costs",
]
