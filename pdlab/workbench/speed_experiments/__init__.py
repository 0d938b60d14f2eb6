"""What the lesson on kernels and speed runs and shows."""

from pdlab.workbench.speed_experiments.modes import MODES, Modes, Point, pick
from pdlab.workbench.speed_experiments.recorded import (
    recorded_compile,
    recorded_line,
    recorded_resources,
    recorded_weights,
)
from pdlab.workbench.speed_experiments.rows import rounding_errors, row_costs
from pdlab.workbench.speed_experiments.timelines import (
    VIEWS,
    Timeline,
    call_costs,
    compiled_timeline,
    torch_timeline,
)
from pdlab.workbench.speed_experiments.traffic import count_step, linear_rates
from pdlab.workbench.speed_experiments.triton_trial import triton_language, try_silu_mul

__all__ = [
    "MODES",
    "VIEWS",
    "Modes",
    "Point",
    "Timeline",
    "call_costs",
    "compiled_timeline",
    "count_step",
    "linear_rates",
    "pick",
    "recorded_compile",
    "recorded_line",
    "recorded_resources",
    "recorded_weights",
    "rounding_errors",
    "row_costs",
    "torch_timeline",
    "triton_language",
    "try_silu_mul",
]
