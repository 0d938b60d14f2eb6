"""Two lanes of a run, with overlap and without."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from pdlab.trace.trace import Trace
from pdlab.workbench.figures.style import milliseconds, recorded_on, styled
from pdlab.workbench.overlap_data import Lanes, lanes
from pdlab.workbench.palette import overlap_color


def overlap_timeline(runs: Mapping[str, Trace], first: int = 4, num_steps: int = 4) -> go.Figure:
    """What the caller's thread did and when the model computed, a run below the other.

    Hatched: what the host did while the model computed. `wait` is the host's waiting for it.

    Args:
        runs: recorded runs by name, such as one without overlap and one with.
        first: place of the first step shown in each trace, counted from 0.
        num_steps: steps shown.

    Raises:
        ValueError: there is no run, or not that many steps in one.
    """
    if not runs:
        raise ValueError("runs is empty")
    shown = {name: lanes(trace, first, num_steps) for name, trace in runs.items()}
    figure = go.Figure()
    kinds = dict.fromkeys((p.name, p.hidden) for each in shown.values() for p in each.pieces)
    for kind, hidden in kinds:
        rows = [
            (f"{name}: {piece.lane}", piece)
            for name, each in shown.items()
            for piece in each.pieces
            if (piece.name, piece.hidden) == (kind, hidden)
        ]
        figure.add_bar(
            name=f"{kind}, hidden" if hidden and kind != "wait" else kind,
            showlegend=not (kind == "wait" and hidden and ("wait", False) in kinds),
            y=[row for row, _ in rows],
            x=[piece.wall_s * 1e3 for _, piece in rows],
            base=[piece.start_s * 1e3 for _, piece in rows],
            orientation="h",
            customdata=[piece.step for _, piece in rows],
            hovertemplate="step %{customdata}: " + kind + ", %{x:.3f} ms<extra></extra>",
            marker={
                "color": overlap_color(kind),
                "pattern": {"shape": "/" if hidden and kind != "wait" else "", "size": 6},
            },
        )
    figure.update_layout(barmode="overlay", bargap=0.25)
    order = [f"{name}: {lane}" for name in shown for lane in ("host", "compute")]
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1])
    figure.update_xaxes(title_text="ms since the first step shown was planned")
    return styled(figure, in_words(shown), recorded_on(next(iter(runs.values()))), horizontal=True)


def in_words(shown: Mapping[str, Lanes]) -> str:
    """What the figure says."""
    return "; ".join(
        f"{name}: {milliseconds(each.step_s)} from step to step, "
        f"{milliseconds(each.hidden_s / each.num_steps)} of "
        f"{milliseconds(each.host_s / each.num_steps)} host time hidden"
        for name, each in shown.items()
    )
