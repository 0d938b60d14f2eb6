"""The common look of all figures: large fonts, a quiet grid, a subtitle that names the source."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from pdlab.trace.trace import Trace
from pdlab.workbench.palette import THEME
from pdlab.workbench.widget import machine_line

FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
WIDTH, HEIGHT = 900, 440
FONT_SIZE = 15
"""Pixels; nothing in a figure is smaller than 14."""
INK = THEME["light"]
"""Figures keep a white page in either theme, so that colours mean the same in both."""


def styled(
    figure: go.Figure, title: str, source: str, *, height: int = HEIGHT, horizontal: bool = False
) -> go.Figure:
    """Give a figure its title (the message), its subtitle (the source) and the common look.

    `horizontal` puts the grid along the x axis, for bars that lie.
    """
    has_legend = (
        sum(trace.showlegend is not False and bool(trace.name) for trace in figure.data) > 1
    )
    figure.update_layout(
        title={
            "text": title,
            "subtitle": {"text": source, "font": {"size": 14, "color": INK.muted, "weight": 400}},
            "font": {"size": 19, "color": INK.text, "weight": 600},
            "x": 0.012,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": 22},
        },
        font={"family": FONT, "size": FONT_SIZE, "color": INK.text},
        width=WIDTH,
        height=height,
        paper_bgcolor=INK.surface,
        plot_bgcolor=INK.surface,
        margin={"l": 80, "r": 30, "t": 122 if has_legend else 88, "b": 66},
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "traceorder": "normal"},
        hoverlabel={"font": {"family": FONT, "size": 14}},
        bargap=0.2,
        showlegend=has_legend,
    )
    figure.update_xaxes(**_axis(), showgrid=horizontal)
    figure.update_yaxes(**_axis(), showgrid=not horizontal)
    return figure


def recorded_on(trace: Trace) -> str:
    """The subtitle of a figure whose numbers all come from the trace."""
    return f"recorded on {machine_line(trace)}"


def milliseconds(seconds: float) -> str:
    """0.01234 -> `12.3 ms`; three significant digits."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


def mega(value: float, unit: str) -> str:
    """1234567 -> `1.23 MB`; decimal prefixes, three significant digits."""
    for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _axis() -> dict[str, Any]:
    return {
        "zeroline": False,
        "gridcolor": INK.grid,
        "linecolor": INK.muted,
        "ticks": "outside",
        "tickcolor": INK.grid,
        "tickfont": {"size": 14, "color": INK.muted},
        "title_font": {"size": 15, "color": INK.muted},
        "title_standoff": 10,
    }
