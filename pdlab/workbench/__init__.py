"""The workbench: figures and widgets drawn from a recorded run, and what lessons need around them.

from pdlab import workbench as wb

wb.Stepper(engine.trace)                         # a widget
wb.show(wb.figures.kv_occupancy(engine.trace))   # a figure
"""

from pdlab.workbench import figures
from pdlab.workbench.attention_view import AttentionView
from pdlab.workbench.checks import check
from pdlab.workbench.display import show, static_png
from pdlab.workbench.frames import stepper_frames
from pdlab.workbench.lesson import Predictions, glossary, progress, solution
from pdlab.workbench.notebooks import execute_notebook
from pdlab.workbench.palette import legend
from pdlab.workbench.roofline_view import RooflineView
from pdlab.workbench.stepper import Stepper

__all__ = [
    "AttentionView",
    "Predictions",
    "RooflineView",
    "Stepper",
    "check",
    "execute_notebook",
    "figures",
    "glossary",
    "legend",
    "progress",
    "show",
    "solution",
    "static_png",
    "stepper_frames",
]
