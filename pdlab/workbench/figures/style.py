"""The common look of all figures: large fonts, a quiet grid, a subtitle that names the source."""

from __future__ import annotations

from textwrap import wrap
from typing import Any

import plotly.graph_objects as go

from pdlab.trace.trace import Trace
from pdlab.workbench.palette import THEME
from pdlab.workbench.widget import machine_line

FONT = "Inter, system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
WIDTH, HEIGHT = 780, 440
"""Pixels; this wide, a figure fits into JupyterLab at 1280 x 720 with its file browser open."""
FONT_SIZE = 15
"""Pixels; nothing in a figure is smaller than 14."""
TITLE_CHARS, SOURCE_CHARS = 76, 104
"""Characters that fit into one line of a title and of a subtitle."""
TITLE_LINE, SOURCE_LINE, LEGEND_LINE, PAD = 24, 20, 24, 22
"""Heights in pixels."""
HEAD = PAD + TITLE_LINE + SOURCE_LINE + PAD + LEGEND_LINE
"""Room above the plot for a title, a subtitle and a legend of one line each."""
INK = THEME["light"]
"""Figures keep a white page in either theme, so that colours mean the same in both."""


def styled(
    figure: go.Figure,
    title: str,
    source: str,
    *,
    height: int = HEIGHT,
    horizontal: bool = False,
    min_legend: int = 2,
) -> go.Figure:
    """Give a figure its title (the message), its subtitle (the source) and the common look.

    What stands above the plot takes the room it needs: long lines wrap, the legend lies below.

    Args:
        horizontal: puts the grid along the x axis, for bars that lie.
        min_legend: named parts from which on there is a legend.
    """
    names = [str(t.name) for t in figure.data if t.showlegend is not False and t.name]
    has_legend = len(names) >= min_legend
    titles, sources = _lines(title, TITLE_CHARS), _lines(source, SOURCE_CHARS)
    head = PAD + TITLE_LINE * len(titles) + SOURCE_LINE * len(sources)
    top = head + PAD + (LEGEND_LINE * _legend_rows(names) if has_legend else 0)
    height += max(0, top - HEAD)
    figure.update_layout(
        title={
            "text": "<br>".join(titles),
            "subtitle": {
                "text": "<br>".join(sources),
                "font": {"size": 14, "color": INK.muted, "weight": 400},
            },
            "font": {"size": 18, "color": INK.text, "weight": 600},
            "x": 0.012,
            "xanchor": "left",
            "y": 1,
            "yanchor": "top",
            "pad": {"t": PAD},
        },
        font={"family": FONT, "size": FONT_SIZE, "color": INK.text},
        width=WIDTH,
        height=height,
        paper_bgcolor=INK.surface,
        plot_bgcolor=INK.surface,
        margin={"l": 80, "r": 30, "t": top, "b": 66},
        legend={
            "orientation": "h",
            "x": 0,
            "y": 1 - (head + 14) / height,
            "yref": "container",
            "yanchor": "top",
            "traceorder": "normal",
        },
        hoverlabel={"font": {"family": FONT, "size": 14}},
        bargap=0.2,
        showlegend=has_legend,
    )
    figure.update_xaxes(**_axis(), showgrid=horizontal)
    figure.update_yaxes(**_axis(), showgrid=not horizontal)
    return figure


def _lines(text: str, most: int) -> list[str]:
    """A text in as few lines as it needs, of about the same length."""
    count = len(wrap(text, most))
    even = range(-(-len(text) // count), most)
    return next((lines for n in even if len(lines := wrap(text, n)) == count), wrap(text, most))


def _legend_rows(names: list[str]) -> int:
    """Rows that plotly needs for a horizontal legend: columns of one width once it breaks."""
    widths = [48 + 0.52 * FONT_SIZE * len(name) for name in names]
    if sum(widths) <= WIDTH - 110:
        return 1
    columns = max(1, int((WIDTH - 110) / max(widths)))
    return -(-len(names) // columns)


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
