"""Where the time of a decode step goes, and what fewer operators and fewer bytes make of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from pdlab.costmodel import Hardware, ridge_point
from pdlab.workbench.figures.style import INK, mega, milliseconds, styled
from pdlab.workbench.palette import MEANING, run_color, stage_color, text_on

if TYPE_CHECKING:
    from pdlab.workbench.speed_experiments.modes import Point
    from pdlab.workbench.speed_experiments.rows import RowCosts
    from pdlab.workbench.speed_experiments.timelines import Span, Timeline

STAGES = ("embed", "qkv", "attention", "output", "mlp", "logits")
MODE_COLORS = (MEANING["waiting"], MEANING["prefill"], MEANING["quantized"], MEANING["cached"],
               MEANING["decode"])  # fmt: skip
SYMBOLS = {1: "circle", 8: "diamond", 32: "square"}
"""Of a batch; a prompt is a star."""
DASHES = ("solid", "dash", "dot", "dashdot")


# --- timelines ------------------------------------------------------------------------------------


def step_timelines(timelines: Sequence[Timeline], source: str) -> go.Figure:
    """The stages of one decode step, several ways on one time axis.

    Raises:
        ValueError: there is no timeline.
    """
    if not timelines:
        raise ValueError("timelines is empty: it needs at least 1")
    figure = go.Figure()
    for stage in STAGES:
        bars = [(t.name, s) for t in timelines for s in t.stages if s.stage == stage]
        _add_spans(figure, stage, stage_color(stage), bars)
    _lay_out(figure, [t.name for t in timelines], "ms since the forward pass began")
    slow, fast = timelines[0], timelines[-1]
    title = (
        f"One decode step: {milliseconds(slow.wall_s)} as {len(slow.spans):,} calls of operators"
    )
    if len(timelines) > 1:
        title += f", {milliseconds(fast.wall_s)} as one call with {len(fast.spans)} phases"
    return styled(figure, title, source, height=330, horizontal=True)


def layer_timelines(timelines: Sequence[Timeline], number: int, source: str) -> go.Figure:
    """One layer of a step, operator by operator and phase by phase; white is where none ran.

    Raises:
        ValueError: there is no such layer.
    """
    layers = [timeline.layer(number) for timeline in timelines]
    wide_s = 0.09 * max(layer.wall_s for layer in layers)
    figure = go.Figure()
    for stage in STAGES:
        bars = [(t.name, s) for t in layers for s in t.spans if s.stage == stage]
        _add_spans(figure, stage, stage_color(stage), bars, wide_s)
    _lay_out(figure, [t.name for t in layers], "ms since the layer began")
    first = layers[0]
    title = (
        f"Layer {number}: {len(first.spans)} operators, and for "
        f"{first.between_s / first.wall_s:.0%} of its {milliseconds(first.wall_s)} none of them ran"
    )
    return styled(figure, title, source, height=330, horizontal=True)


def _add_spans(
    figure: go.Figure,
    name: str,
    color: str,
    bars: Sequence[tuple[str, Span]],
    wide_s: float = math.inf,
) -> None:
    """Bars on the time axis; from `wide_s` on they have their name in them."""
    edge = wide_s < math.inf
    if bars:
        figure.add_bar(
            name=name,
            x=[round(s.seconds * 1e3, 4) for _, s in bars],
            base=[round(s.start_s * 1e3, 4) for _, s in bars],
            y=[row for row, _ in bars],
            customdata=[_name(s) for _, s in bars],
            text=[_short(s) if s.seconds >= wide_s else "" for _, s in bars],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"size": 14, "color": text_on(color)},
            orientation="h",
            marker={"color": color, "line": {"width": 0.5 if edge else 0, "color": INK.text}},
            hovertemplate="%{customdata}: %{x:.3f} ms, from %{base:.3f} ms<extra></extra>",
        )


def _name(span: Span) -> str:
    where = "" if span.layer is None else f", layer {span.layer}"
    return f"{_short(span)}{where}"


def _short(span: Span) -> str:
    return span.name.removeprefix("aten::").replace("scaled_dot_product_", "")


def _lay_out(figure: go.Figure, names: Sequence[str], title: str) -> None:
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text=title, rangemode="tozero")
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=names[::-1], ticks="",
        automargin=True,
    )  # fmt: skip


# --- modes ----------------------------------------------------------------------------------------


def mode_bars(points: Mapping[str, Point], machine: Hardware, source: str) -> go.Figure:
    """Milliseconds of one kind of step, by mode, beside the floor of each.

    Raises:
        ValueError: there is no point.
    """
    if not points:
        raise ValueError("points is empty: it needs at least 1")
    values = [p.step_s * 1e3 for p in points.values()]
    figure = go.Figure(
        go.Bar(
            name="measured",
            y=list(points),
            x=values,
            orientation="h",
            marker_color=[_mode_color(points, mode) for mode in points],
            text=[milliseconds(p.step_s) for p in points.values()],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.2f} ms<extra></extra>",
        )
    )
    figure.add_scatter(
        name="floor, predicted: bytes / measured bandwidth",
        x=[p.floor_s(machine) * 1e3 for p in points.values()],
        y=list(points),
        mode="markers",
        marker={"symbol": "line-ns", "size": 30, "line": {"width": 4, "color": INK.text}},
        hovertemplate="%{y}, at least: %{x:.2f} ms<extra></extra>",
    )
    figure.update_yaxes(autorange="reversed", automargin=True, ticks="")
    figure.update_xaxes(title_text="ms a step", range=[0, max(values) * 1.15])
    first, *_, last = points.values()
    title = (
        f"{last.label.capitalize()}: from {milliseconds(first.step_s)} to "
        f"{milliseconds(last.step_s)}, {first.step_s / last.step_s:.1f} times as fast"
    )
    return styled(figure, title, source, height=400, horizontal=True)


def mode_roofline(points: Sequence[Point], machine: Hardware, source: str) -> go.Figure:
    """All steps of all modes under the machine's roofline in fp32 (Williams et al. 2009).

    Raises:
        ValueError: there is no point.
    """
    if not points:
        raise ValueError("points is empty: it needs at least 1")
    ridge, peak = ridge_point(machine, "fp32"), machine.peak("fp32")
    low = min(*(p.intensity for p in points), ridge) / 2
    high = max(*(p.intensity for p in points), ridge) * 3
    figure = go.Figure()
    figure.add_scatter(
        name="ceiling, fp32", mode="lines",
        x=[low, ridge, high], y=[low * peak / ridge, peak, peak],
        line={"color": INK.text, "width": 2.5}, hoverinfo="skip",
    )  # fmt: skip
    modes = list(dict.fromkeys(p.mode for p in points))
    for mode in modes:
        own = sorted((p for p in points if p.mode == mode), key=lambda p: p.phase)
        figure.add_scatter(
            name=mode,
            x=[p.intensity for p in own],
            y=[p.flops / p.step_s for p in own],
            mode="markers",
            marker={
                "color": _mode_color(modes, mode),
                "symbol": ["star" if p.phase == "prefill" else SYMBOLS[p.batch] for p in own],
                "size": 13,
                "line": {"width": 1, "color": INK.surface},
            },
            customdata=[f"{p.label}: {milliseconds(p.step_s)}" for p in own],
            hovertemplate="%{customdata}<br>%{x:.3g} FLOP/byte, %{y:.3s}FLOP/s<extra>"
            + mode
            + "</extra>",
        )
    figure.update_xaxes(
        type="log", dtick=1, title_text="FLOP per byte moved (● batch 1, ◆ 8, ■ 32, ★ prompt)"
    )
    figure.update_yaxes(type="log", title_text="FLOP/s", dtick=1, exponentformat="SI")
    title = (
        f"Fewer bytes move a step to the right: batch 1 from {_least(points, modes[0]):.2g} to "
        f"{_least(points, modes[-1]):.2g} FLOP/byte, the ridge at {ridge:.3g}"
    )
    styled(figure, title, source, height=540)
    return figure.update_xaxes(showgrid=True)


def _least(points: Sequence[Point], mode: str) -> float:
    return min(p.intensity for p in points if p.mode == mode)


def _mode_color(modes: Sequence[str] | Mapping[str, Point], mode: str) -> str:
    return MODE_COLORS[list(modes).index(mode) % len(MODE_COLORS)]


# --- rows -----------------------------------------------------------------------------------------


def rows_figure(costs: RowCosts, machine: Hardware, source: str) -> go.Figure:
    """Milliseconds of one product by its rows; dotted, what reading the weight takes at least."""
    figure = go.Figure()
    for index, (name, times) in enumerate(costs.seconds.items()):
        color, rows = run_color(index), list(times)
        figure.add_scatter(
            name=f"{name}, {mega(costs.nbytes[name], 'B')}",
            x=rows,
            y=[s * 1e3 for s in times.values()],
            mode="lines+markers",
            line={"color": color, "width": 2.5, "dash": DASHES[index % len(DASHES)]},
            marker={"size": 9},
            hovertemplate="%{x} rows: %{y:.2f} ms<extra>" + name + "</extra>",
        )
        floor_ms = costs.nbytes[name] / machine.bandwidth_bytes_s * 1e3
        figure.add_scatter(
            x=[rows[0], rows[-1]], y=[floor_ms] * 2, mode="lines", showlegend=False,
            line={"color": color, "width": 1.5, "dash": "dot"}, hoverinfo="skip",
        )  # fmt: skip
    figure.update_xaxes(type="log", title_text="rows (sequences in the batch)", tickvals=rows)
    figure.update_yaxes(
        type="log", title_text="ms", tickvals=[1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    )
    fp32 = next(iter(costs.seconds))
    title = (
        f"One row costs the bytes of the weight; in {fp32}, {costs.free_rows(fp32)} rows cost "
        "hardly more, and then each one costs its arithmetic"
    )
    styled(figure, title, source, height=460)
    return figure.update_xaxes(showgrid=True)
