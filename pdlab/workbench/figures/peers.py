"""pdlab and its peers: how fast each is in each column, and where the machine's floor lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from pdlab.workbench.figures.style import INK, styled
from pdlab.workbench.palette import MEANING

if TYPE_CHECKING:
    from pdlab.bench.speed import Column, Contestant, SpeedBench

ROW, HEAD = 26, 190
"""Pixels of a bar, and of what stands above and below the bars."""
NAME_WIDTH = 190
COLORS = {True: MEANING["decode"], False: MEANING["waiting"]}
"""Of pdlab's modes, and of peers."""


def peers_figure(found: SpeedBench, source: str | None = None) -> go.Figure:
    """Bars from the medians of a `SpeedBench`, lines from the least to the most of the rounds.

    A mark on each bar's row is the floor: what the weights and K and V that a decode step reads,
    or the FLOPs of a prompt, would take on this machine if nothing else did. It differs between
    rows because weights do.

    Raises:
        ValueError: nothing was measured.
    """
    columns = found.columns()
    if not columns:
        raise ValueError("found has no samples: nothing was measured")
    figure = make_subplots(
        rows=1,
        cols=len(columns),
        shared_yaxes=True,
        horizontal_spacing=0.025,
        subplot_titles=[_head(column) for column in columns],
    )
    for number, column in enumerate(columns, start=1):
        _add_bars(figure, found, column, number)
        _add_floor(figure, found, column, number)
    names = [contestant.name for contestant in found.contestants]
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=names[::-1], ticks="", showgrid=False
    )
    figure.update_xaxes(rangemode="tozero", nticks=4)
    height = HEAD + ROW * len(names)
    styled(figure, _title(found), source or recorded(found), height=height, horizontal=True)
    figure.update_layout(margin={"l": NAME_WIDTH, "t": figure.layout.margin.t + 44})
    for note in figure.layout.annotations:
        note.update(font={"size": 14, "color": INK.text})
    return figure


def _head(column: Column) -> str:
    """Two lines above a column's bars."""
    if column.kind == "ttft":
        return f"{column.name}, {column.unit}<br>(less is better)"
    return f"{column.name.replace(', ', '<br>')}, {column.unit}"


def _add_bars(figure: go.Figure, found: SpeedBench, column: Column, number: int) -> None:
    for is_pdlab, color in COLORS.items():
        rows = [
            (contestant, spread)
            for contestant in found.contestants
            if contestant.is_pdlab is is_pdlab and (spread := found.spread(contestant.name, column))
        ]
        figure.add_bar(
            x=[spread.median for _, spread in rows],
            y=[contestant.name for contestant, _ in rows],
            orientation="h",
            name="pdlab" if is_pdlab else "peer",
            showlegend=number == 1 and bool(rows),
            legendgroup=str(is_pdlab),
            marker_color=color,
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [spread.most - spread.median for _, spread in rows],
                "arrayminus": [spread.median - spread.least for _, spread in rows],
                "color": INK.text,
                "thickness": 1.5,
                "width": 3,
            },
            customdata=[_hover(found, contestant, column) for contestant, _ in rows],
            hovertemplate="%{y}: %{x:.3g} " + column.unit + "%{customdata}<extra></extra>",
            row=1,
            col=number,
        )


def _add_floor(figure: go.Figure, found: SpeedBench, column: Column, number: int) -> None:
    figure.add_scatter(
        x=[found.floor(contestant, column) for contestant in found.contestants],
        y=[contestant.name for contestant in found.contestants],
        mode="markers",
        name="floor: bytes / bandwidth, FLOPs / peak",
        showlegend=number == 1,
        legendgroup="floor",
        marker={
            "symbol": "line-ns",
            "size": 16,
            "line": {"width": 2.5, "color": MEANING["prefill"]},
        },
        hovertemplate="%{y}: the floor is %{x:.3g} " + column.unit + "<extra></extra>",
        row=1,
        col=number,
    )


def _hover(found: SpeedBench, contestant: Contestant, column: Column) -> str:
    share = found.share(contestant, column)
    return "" if share is None else f", {share:.0%} of the floor"


def _title(found: SpeedBench) -> str:
    """How pdlab's best mode stands to the best peer, from the worst column to the best."""
    ratios = []
    for column in found.columns():
        ours, theirs = found.best(column, pdlab=True), found.best(column, pdlab=False)
        if ours and theirs and (ratio := found.ratio(ours.name, theirs.name, column)):
            ratios.append(ratio)
    if not ratios:
        return "pdlab's modes beside the machine's floor"
    low, high = (f"{value:.2g}" for value in (min(ratios), max(ratios)))
    times = f"{low} times" if low == high else f"{low} to {high} times"
    return f"pdlab's best mode is {times} as fast as the best peer"


def recorded(found: SpeedBench) -> str:
    """The subtitle: what was measured, where and when."""
    machine = found.machine
    return (
        f"recorded: {found.model}, greedy, {found.threads} threads, medians of {found.rounds} "
        f"rounds, on {machine['processor']} ({machine['cores']} cores), {str(machine['date'])[:10]}"
    )
