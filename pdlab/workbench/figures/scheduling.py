"""Scheduling, swept: latency against load, against the token budget, and by policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from pdlab.workbench.figures.serving import BARS, DASHES, add_range, sources
from pdlab.workbench.figures.style import INK, milliseconds, styled
from pdlab.workbench.gantt_data import KINDS, gantt_data
from pdlab.workbench.palette import MEANING, run_color
from pdlab.workload.serving import SLO, ServingRun

if TYPE_CHECKING:
    from pdlab.workbench.scheduling_experiments import Budget, Load, Prediction, Served

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "pentagon")
SECONDS = [step * 10.0**power for power in range(-3, 4) for step in (1, 2, 5)]
"""Ticks of a logarithmic axis of seconds."""
FEW_SECONDS = [step * 10.0**power for power in range(-3, 4) for step in (1, 3)]
LANES = BARS | {
    "waiting": {
        "width": 0.36,
        "marker": {"color": INK.surface, "line": {"color": MEANING["waiting"], "width": 1.2}},
    }
}
"""As in the Gantt chart, but who waits is an outline: the line of a stall is as thin as there."""
TOLERANCE = 0.15
"""Half the width of the band around agreement."""


def lanes(runs: Mapping[str, ServingRun], labels: Sequence[str], title: str = "") -> go.Figure:
    """The same few requests under several plans, one above the other, on one time axis.

    Args:
        labels: what to call the requests, in order of arrival.
    """
    _require_some("runs", runs)
    figure = make_subplots(
        rows=len(runs),
        shared_xaxes=True,
        vertical_spacing=0.22 / len(runs),
        subplot_titles=[f"{name}: done in {run.duration_s:.1f} s" for name, run in runs.items()],
    )
    shown: set[str] = set()
    for number, run in enumerate(runs.values(), start=1):
        rows = gantt_data(run)["rows"]
        for kind in ("waiting", "stalled", "preempted", "prefill", "decode"):
            spans = [
                (label, span)
                for label, row in zip(labels, rows, strict=True)
                for span in row["spans"]
                if KINDS[span[0]] == kind
            ]
            if spans:
                _add_spans(figure, kind, spans, number, showlegend=kind not in shown)
                shown.add(kind)
        figure.update_yaxes(
            type="category",
            categoryorder="array",
            categoryarray=list(labels),
            range=[len(labels) - 0.4, -0.6],
            row=number,
        )
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="seconds", row=len(runs))
    title = title or "The same requests, scheduled in different ways"
    height = 150 + len(runs) * (62 + 19 * len(labels))
    styled(figure, title, sources(runs), height=height, horizontal=True)
    _name_panels(figure)
    figure.update_yaxes(showgrid=False, ticks="", tickfont={"size": 14})
    return figure


def _add_spans(
    figure: go.Figure, kind: str, spans: Sequence[Any], row: int, showlegend: bool
) -> None:
    figure.add_bar(
        name=kind,
        y=[label for label, _ in spans],
        base=[span[1] for _, span in spans],
        x=[span[2] - span[1] for _, span in spans],
        customdata=[span[3] for _, span in spans],
        orientation="h",
        legendgroup=kind,
        showlegend=showlegend,
        hovertemplate="%{y} " + kind + ", %{customdata} tokens, %{x:.4g} s<extra></extra>",
        row=row,
        col=1,
        **LANES[kind],
    )


def load_curves(sweep: Mapping[str, Sequence[Load]], slo: SLO) -> go.Figure:
    """TTFT (median and p99, logarithmic) and goodput against the rate offered, a line a plan."""
    _require_some("sweep", sweep)
    names = ("TTFT p50", "TTFT p99", "goodput, requests/s")
    figure = make_subplots(rows=1, cols=3, horizontal_spacing=0.09, subplot_titles=names)
    panels: tuple[Callable[[Any], Any], ...] = (
        lambda s: s.ttft_s.p50,
        lambda s: s.ttft_s.p99,
        lambda s: s.goodput_per_s,
    )
    for i, (name, loads) in enumerate(sweep.items()):
        rates = [load.rate_rps for load in loads]
        for col, value in enumerate(panels, start=1):
            _line(figure, name, i, rates, [value(load.summary) for load in loads], col)
    figure.update_xaxes(title_text="requests/s offered", rangemode="tozero")
    for col in (1, 2):
        _log_seconds(figure, col)
        _limit(figure, slo.ttft_s, col)
    every = [load for loads in sweep.values() for load in loads]
    top = max(load.rate_rps for load in every)
    figure.add_scatter(
        x=[0, top], y=[0, top], mode="lines", line={"color": INK.muted, "width": 1},
        name="all of them in time", hoverinfo="skip", row=1, col=3,
    )  # fmt: skip
    best = {name: max(x.summary.goodput_per_s or 0.0 for x in sweep[name]) for name in sweep}
    title = f"Most goodput: {_extremes(best, lambda v: f'{v:.2g} requests/s')}"
    source = f"{_basis(every[0].summary)}; limits: {_slo(slo)}"
    return _name_panels(styled(figure, title, source, height=420))


def budget_curves(points: Sequence[Budget], ttft_s: float, gap_s: float) -> go.Figure:
    """Gaps, first tokens, and who keeps a limit for each, against the token budget of a step."""
    _require_some("points", points)
    names = ("gap between tokens (ITL)", "TTFT", "% of requests within")
    figure = make_subplots(rows=1, cols=3, horizontal_spacing=0.1, subplot_titles=names)
    budgets = [str(point.budget) for point in points]
    summaries = [point.summary for point in points]
    kept = [point.kept for point in points]
    lines = (
        ("p50", 0, [s.itl_s.p50 for s in summaries], 1),
        ("p99", 1, [s.itl_s.p99 for s in summaries], 1),
        ("p50", 0, [s.ttft_s.p50 for s in summaries], 2),
        ("p99", 1, [s.ttft_s.p99 for s in summaries], 2),
        ("both limits", 4, [100 * k.both for k in kept], 3),
        ("limit on the first token", 2, [100 * k.first_token for k in kept], 3),
        ("limit on every gap", 3, [100 * k.gaps for k in kept], 3),
    )
    for name, i, values, col in lines:
        _line(figure, name, i, budgets, values, col, shown=col != 2)
    # below the other two, one of which it follows
    broad = {"line": {"width": 9, "dash": "solid"}, "opacity": 0.45}
    figure.update_traces(broad, selector={"name": "both limits"})
    every = 1 + (len(budgets) - 1) // 5  # as many as there is room for, side by side
    figure.update_xaxes(
        title_text="token budget", type="category", tickangle=0, tickvals=budgets[::every]
    )
    for col, limit_s in ((1, gap_s), (2, ttft_s)):
        _log_seconds(figure, col)
        _limit(figure, limit_s, col)
    figure.update_yaxes(range=[-3, 103], col=3)
    shares = {f"a budget of {p.budget}": 100 * p.kept.both for p in points}
    title = f"Within both limits: {_extremes(shares, lambda v: f'{v:.0f} %')}"
    limits = f"TTFT {milliseconds(ttft_s)}, each gap {milliseconds(gap_s)}"
    source = f"{_basis(summaries[0])}; limits (dashed): {limits}"
    return _name_panels(styled(figure, title, source, height=420))


def policy_ranges(served: Mapping[str, Served], slo: SLO) -> go.Figure:
    """TTFT of chats and of documents from median to p99, and the part within the limits."""
    _require_some("served", served)
    figure = make_subplots(cols=3, shared_yaxes=True, horizontal_spacing=0.04)
    for i, (name, each) in enumerate(served.items()):
        for col, found in enumerate((each.chats, each.documents), start=1):
            add_range(figure, name, found, run_color(i), col)
    for col, who in enumerate(("chats", "documents"), start=1):
        figure.add_vline(x=slo.ttft_s, line=_dashed(), col=col)
        figure.update_xaxes(
            title_text=f"TTFT of {who}<br>● p50 ◇ p99",
            type="log", tickvals=FEW_SECONDS, ticktext=[milliseconds(s) for s in FEW_SECONDS],
            col=col,
        )  # fmt: skip
    shares = {name: 100 * each.attainment for name, each in served.items()}
    figure.add_bar(
        x=list(shares.values()), y=list(shares), orientation="h", textposition="auto",
        text=[f"{share:.0f} %" for share in shares.values()], showlegend=False,
        marker={"color": [run_color(i) for i in range(len(shares))]}, row=1, col=3,
    )  # fmt: skip
    figure.update_xaxes(title_text="% within both limits", range=[0, 100], col=3)
    figure.update_yaxes(autorange="reversed", type="category")
    title = f"Within the limits: {_extremes(shares, lambda v: f'{v:.0f} %')}"
    source = f"{next(iter(served.values())).provenance}; limits (dashed): {_slo(slo)}"
    return styled(figure, title, source, height=240 + 40 * len(served), horizontal=True)


def predicted_against_measured(found: Mapping[str, Prediction]) -> go.Figure:
    """Each time of each plan, simulated over measured; 1 is agreement."""
    _require_some("found", found)
    names = {
        "question_ttft_s": "TTFT, slowest question",
        "chat_gap_s": "longest gap of a chat",
        "document_ttft_s": "TTFT, document",
        "done_s": "all done",
    }
    figure = go.Figure()
    figure.add_vrect(
        x0=1 - TOLERANCE, x1=1 + TOLERANCE, fillcolor=INK.grid, line_width=0, layer="below"
    )
    figure.add_vline(x=1, line={"color": INK.text, "width": 1.5}, layer="below")
    rows = np.arange(len(found))
    for i, (name, label) in enumerate(names.items()):
        figure.add_scatter(
            name=label,
            x=[each.ratios()[name] for each in found.values()],
            y=rows + 0.17 * (i - 1.5),  # a line of its own for each, so that none hides another
            mode="markers",
            marker={"symbol": SYMBOLS[i], "size": 13, "color": run_color(i), "opacity": 0.9},
            text=list(found),
            hovertemplate="%{text}, " + label + ": %{x:.2f}<extra></extra>",
        )
    ratios = [ratio for each in found.values() for ratio in each.ratios().values()]
    near = sum(abs(ratio - 1) <= TOLERANCE for ratio in ratios)
    figure.update_xaxes(title_text=f"simulated / measured (grey: 1 ± {TOLERANCE})")
    figure.update_yaxes(
        range=[len(found) - 0.5, -0.5], tickvals=rows, ticktext=list(found), showgrid=False
    )
    title = f"{near} of {len(ratios)} times simulated to within {TOLERANCE:.0%}"
    source = f"simulated: {next(iter(found.values())).run.basis}"
    return styled(figure, title, source, height=440, horizontal=True)


# --- parts ---------------------------------------------------------------------------------------


def _name_panels(figure: go.Figure) -> go.Figure:
    """Put the names of panels above their left edges."""
    figure.update_layout(margin_t=figure.layout.margin.t + 26)
    for axis, note in zip(figure.select_xaxes(), figure.layout.annotations, strict=False):
        note.update(x=axis.domain[0], xanchor="left", font={"size": 15, "color": INK.text})
    return figure


def _line(
    figure: go.Figure,
    name: str,
    i: int,
    x: Sequence[Any],
    y: Sequence[float | None],
    col: int,
    shown: bool | None = None,
) -> None:
    figure.add_scatter(
        name=name,
        x=list(x),
        y=list(y),
        mode="lines+markers",
        line={"color": run_color(i), "dash": DASHES[i], "width": 2.5},
        marker={"symbol": SYMBOLS[i], "size": 8},
        showlegend=col == 1 if shown is None else shown,
        legendgroup=name,
        hovertemplate=name + ", %{x}: %{y:.3g}<extra></extra>",
        row=1,
        col=col,
    )


def _log_seconds(figure: go.Figure, col: int) -> None:
    text = [milliseconds(s) for s in SECONDS]
    figure.update_yaxes(type="log", tickvals=SECONDS, ticktext=text, col=col)


def _limit(figure: go.Figure, seconds: float, col: int) -> None:
    figure.add_hline(y=seconds, line=_dashed(), row=1, col=col)


def _dashed() -> dict[str, Any]:
    return {"color": INK.text, "width": 1.5, "dash": "dash"}


def _require_some(name: str, values: Any) -> None:
    if not values:
        raise ValueError(f"{name} is empty: it needs at least 1")


def _slo(slo: SLO) -> str:
    return f"TTFT {milliseconds(slo.ttft_s)}, TPOT {milliseconds(slo.tpot_s)}"


def _basis(summary: Any) -> str:
    return f"{summary.provenance}: {summary.basis}"


def _extremes(values: Mapping[str, float], written: Callable[[float], str]) -> str:
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    if low == high:
        return f"{written(values[high])} with {high}"
    return f"{written(values[high])} with {high}, {written(values[low])} with {low}"
