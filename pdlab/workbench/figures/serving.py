"""A served workload as static pictures: who did what when, latencies, levels, and runs compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from pdlab.requirements import require_choice
from pdlab.workbench.figures.style import INK, milliseconds, styled
from pdlab.workbench.gantt_data import KINDS, gantt_data, named_runs
from pdlab.workbench.latency_data import METRICS, NAMES, curve, is_wide, provenance_line
from pdlab.workbench.palette import MEANING, phase_color, run_color
from pdlab.workload.report import MIXES, latency_samples, over_time, summarize
from pdlab.workload.serving import SLO, ServingRun

Runs = ServingRun | Mapping[str, ServingRun]
FIGURE_ROWS, FIGURE_SEGMENTS = 40, 1500
"""Requests, and spans or steps, that one figure shows."""
BINS = 160
"""Spans of time that a curve over time has."""
DASHES = (
    "solid",
    "dash",
    "dot",
    "dashdot",
    "longdash",
    "12px,3px,3px,3px",
    "2px,6px",
    "longdashdot",
)
BARS: dict[str, dict[str, Any]] = {
    "waiting": {"width": 0.2, "marker": {"color": MEANING["waiting"]}},
    "stalled": {"width": 0.08, "marker": {"color": INK.text}},
    "preempted": {
        "width": 0.6,
        "marker": {
            "color": INK.surface,
            "line": {"color": MEANING["preempted"], "width": 1},
            "pattern": {"shape": "/", "fgcolor": MEANING["preempted"], "size": 6},
        },
    },
    "prefill": {
        "width": 0.8,
        "marker": {"color": MEANING["prefill"], "line": {"color": INK.surface, "width": 0.5}},
    },
    "decode": {"width": 0.8, "marker": {"color": MEANING["decode"]}},
}
"""How a kind of span looks: by thickness and texture too, not only by colour."""


def gantt_figure(
    run: ServingRun, *, name: str = "", slo: SLO | None = None, first: int = 0
) -> go.Figure:
    """One row a request, in order of arrival, and below the tokens of each step.

    Args:
        slo: limits; requests that missed them end with a cross instead of a dot.
        first: number of the request in the topmost row, of the 40 shown at most.
    """
    data = gantt_data(
        run, name=name, slo=slo, first=first, max_rows=FIGURE_ROWS, max_segments=FIGURE_SEGMENTS
    )
    rows = data["rows"]
    tall = max(120, 24 * len(rows) if len(rows) < 20 else 13 * len(rows))
    figure = make_subplots(
        rows=2, shared_xaxes=True, row_heights=[tall, 110], vertical_spacing=30 / (tall + 140)
    )
    for kind in ("waiting", "stalled", "preempted", "prefill", "decode"):
        _add_spans(figure, rows, kind)
    _add_ends(figure, rows, slo)
    _add_steps(figure, data)
    order = [row["id"] for row in rows]
    figure.update_yaxes(
        row=1,
        type="category",
        categoryorder="array",
        categoryarray=order,
        range=[len(order) - 0.4, -0.6],
    )
    figure.update_yaxes(title_text="tokens<br>in a step", row=2)
    figure.update_xaxes(title_text="seconds", row=2)
    figure.update_layout(barmode="overlay")
    done = data["facts"]["finished"]
    head = f"{name}: " if name else ""
    every = data["num_requests"]
    title = f"{head}{done} of {every} requests finished in {milliseconds(run.duration_s)}"
    cut = f"; requests {first + 1} to {first + len(rows)} of {every}" if len(rows) < every else ""
    styled(figure, title, provenance_line(run) + cut, height=tall + 340, horizontal=True)
    figure.update_yaxes(row=1, showgrid=False, ticks="")
    return figure


def _add_spans(figure: go.Figure, rows: Sequence[dict[str, Any]], kind: str) -> None:
    number = KINDS.index(kind)
    found = [(row["id"], s) for row in rows for s in row["spans"] if s[0] == number]
    if not found:
        return
    figure.add_bar(
        name=kind,
        y=[name for name, _ in found],
        base=[span[1] for _, span in found],
        x=[span[2] - span[1] for _, span in found],
        customdata=[span[3] for _, span in found],
        orientation="h",
        hovertemplate="%{y} " + kind + ", %{customdata} tokens, %{x:.4g} s<extra></extra>",
        row=1,
        col=1,
        **BARS[kind],
    )


def _add_ends(figure: go.Figure, rows: Sequence[dict[str, Any]], slo: SLO | None) -> None:
    """A dot for who finished, a cross for who missed the limits, a square for other ends."""
    kinds = {
        "finished" if slo is None else "finished, within limits": ("circle", 9),
        "limits missed": ("x", 9),
        "aborted or refused": ("square-open", 10),
    }
    for (label, (symbol, size)), number in zip(kinds.items(), range(3), strict=True):
        some = [row for row in rows if _end_of(row) == number]
        if some:
            figure.add_scatter(
                name=label,
                x=[row["spans"][-1][2] if row["spans"] else row["arrival_s"] for row in some],
                y=[row["id"] for row in some],
                mode="markers",
                marker={"symbol": symbol, "size": size, "color": INK.text},
                hovertemplate="%{y} " + label + "<extra></extra>",
                row=1,
                col=1,
            )


def _end_of(row: dict[str, Any]) -> int | None:
    if row["end"] in ("stop", "length"):
        return 1 if row["met"] is False else 0
    return None if row["end"] == "running" else 2


def _add_steps(figure: go.Figure, data: dict[str, Any]) -> None:
    """Steps as bars by mix; a mixed step shows its decodes below its prompt tokens."""
    for number, mix in enumerate(MIXES):
        steps = [s for s in data["steps"] if s["mix"] == number]
        prompts = [s["prompt"] if mix != "decode" else s["decodes"] for s in steps]
        base = [s["decodes"] if mix == "mixed" else 0 for s in steps]
        if steps:
            name = "mixed step" if mix == "mixed" else mix
            _bars(figure, steps, prompts, base, name, phase_color(mix), mix == "mixed")
        if steps and mix == "mixed":
            _bars(figure, steps, base, [0] * len(base), "decode", phase_color("decode"), False)
    if data["budget"] and data["budget"] <= 1.15 * data["most_tokens"]:
        line = {"color": INK.text, "width": 1.5, "dash": "dash"}
        text = f"budget {data['budget']:,}"
        figure.add_hline(y=data["budget"], line=line, row=2, col=1, annotation_text=text)


def _bars(
    figure: go.Figure,
    steps: Sequence[dict[str, Any]],
    heights: Sequence[float],
    base: Sequence[float],
    name: str,
    color: str,
    named: bool,
) -> None:
    figure.add_bar(
        name=name,
        x=[s["at"][0] for s in steps],
        width=[s["at"][1] - s["at"][0] for s in steps],
        offset=0,
        y=list(heights),
        base=list(base),
        marker={"color": color, "line": {"width": 0}},
        showlegend=named,
        hovertemplate=name + ": %{y:.4g} tokens<extra></extra>",
        row=2,
        col=1,
    )


def latency_cdf_figure(runs: Runs, metric: str = "ttft", slo: SLO | None = None) -> go.Figure:
    """For each run, the part of the requests (for `itl`: of the gaps) that took no longer.

    Args:
        metric: `ttft`, `tpot`, `itl` or `e2e`.
        slo: draws its limit on the metric, where it has one.

    Raises:
        ValueError: there is no such metric.
    """
    require_choice("metric", metric, METRICS)
    named = named_runs(runs)
    samples = [latency_samples(run.requests) for run in named.values()]
    wide = is_wide(samples, metric)
    figure = go.Figure()
    for i, (name, found) in enumerate(zip(named, samples, strict=True)):
        seconds, parts = curve(found[f"{metric}_s"])
        figure.add_scatter(
            name=name,
            x=[seconds[0], *seconds] if seconds else [],
            y=[0, *(100 * part for part in parts)] if parts else [],
            mode="lines",
            line={"color": run_color(i), "dash": DASHES[i], "width": 3, "shape": "hv"},
            hovertemplate=name + ": %{y:.3g} % within %{x:.4g} s<extra></extra>",
        )
    limit = getattr(slo, f"{metric}_s", None)
    if limit is not None:
        line = {"color": INK.text, "width": 2, "dash": "dash"}
        text = f"limit {milliseconds(limit)}"
        figure.add_vline(x=limit, line=line, annotation_text=text, annotation_position="top")
    if limit and wide:
        figure.layout.annotations[0].x = math.log10(limit)  # a label's place on a log axis
    if wide:
        ticks = [step * 10.0**power for power in range(-6, 7) for step in (1, 2, 5)]
        figure.update_xaxes(type="log", tickvals=ticks, ticktext=[milliseconds(t) for t in ticks])
    what = "gaps" if metric == "itl" else "requests"
    unit = " (log scale)" if wide else ", s"
    figure.update_xaxes(title_text=f"{NAMES[metric]}{unit}")
    figure.update_yaxes(title_text=f"% of the {what}", range=[0, 101], tickvals=[0, 50, 90, 99])
    return styled(figure, _cdf_title(named, metric), sources(named))


def queue_figure(runs: Runs) -> go.Figure:
    """Queue depth, batch size and KV occupancy over time, a line for each run."""
    named = named_runs(runs)
    figure = make_subplots(rows=3, shared_xaxes=True, vertical_spacing=0.06)
    panels = (
        ("queue_depth", "queue depth", 1),
        ("batch_size", "batch size", 1),
        ("kv_occupancy", "KV used, %", 100),
    )
    for i, (name, run) in enumerate(named.items()):
        levels = over_time(run, BINS)
        for row, (field, _, scale) in enumerate(panels, start=1):
            values = (scale * getattr(levels, field)).tolist()
            figure.add_scatter(
                name=name,
                x=levels.edges_s.tolist(),
                y=[*values, values[-1]],
                line={"color": run_color(i), "dash": DASHES[i], "width": 2.5, "shape": "hv"},
                showlegend=row == 1,
                hovertemplate=name + ": %{y:.3g} at %{x:.3g} s<extra></extra>",
                row=row,
                col=1,
            )
    for row, (_, label, _) in enumerate(panels, start=1):
        figure.update_yaxes(title_text=label, rangemode="tozero", row=row)
    figure.update_xaxes(title_text="seconds", row=3)
    return styled(figure, _queue_title(named), sources(named), height=600)


def comparison_figure(runs: Runs, slo: SLO | None = None) -> go.Figure:
    """Runs side by side: TTFT and TPOT from median to p99, and goodput.

    Without an SLO, all finished requests a second stand in place of the goodput.
    """
    named = named_runs(runs)
    summaries = {name: summarize(run, slo) for name, run in named.items()}
    rates = {
        name: s.requests_per_s if slo is None else s.goodput_per_s or 0.0
        for name, s in summaries.items()
    }
    figure = make_subplots(cols=3, shared_yaxes=True, horizontal_spacing=0.05)
    for col, metric in enumerate(("ttft", "tpot"), start=1):
        for i, (name, summary) in enumerate(summaries.items()):
            add_range(figure, name, getattr(summary, f"{metric}_s"), run_color(i), col)
        limit = getattr(slo, f"{metric}_s", None)
        if limit is not None:
            line = {"color": INK.text, "width": 1.5, "dash": "dash"}
            figure.add_vline(x=limit, line=line, col=col)
        figure.update_xaxes(
            title_text=f"{metric.upper()}, s: ● p50 ◇ p99", rangemode="tozero", col=col
        )
    figure.add_bar(
        x=list(rates.values()),
        y=list(rates),
        orientation="h",
        marker={"color": [run_color(i) for i in range(len(rates))]},
        text=[f"{rate:.3g}" for rate in rates.values()],
        textposition="auto",
        hovertemplate="%{y}: %{x:.3g} requests/s<extra></extra>",
        showlegend=False,
        row=1,
        col=3,
    )
    what = "requests/s" if slo is None else "goodput, requests/s"
    figure.update_xaxes(title_text=what, rangemode="tozero", col=3)
    figure.update_xaxes(nticks=5)
    figure.update_yaxes(autorange="reversed", type="category")
    title = _extremes("Goodput" if slo else "Finished", rates, lambda v: f"{v:.3g} requests/s")
    source = sources(named)
    if slo is not None:
        limits = f"TTFT {milliseconds(slo.ttft_s)}, TPOT {milliseconds(slo.tpot_s)}"
        source += f"; limits (dashed): {limits}"
    return styled(figure, title, source, height=250 + 46 * len(named), horizontal=True)


def add_range(figure: go.Figure, name: str, found: Any, color: str, col: int) -> None:
    """A line from the median, a full dot, to p99, an open diamond."""
    if found.p50 is None:
        return
    figure.add_scatter(
        x=[found.p50, found.p99],
        y=[name, name],
        mode="lines+markers",
        line={"color": color, "width": 4},
        marker={
            "symbol": ["circle", "diamond-open"],
            "size": [14, 13],
            "line": {"width": 3},
            "opacity": 1,
        },
        text=["p50", "p99"],
        hovertemplate="%{y}: %{text} %{x:.4g} s<extra></extra>",
        showlegend=False,
        row=1,
        col=col,
    )


# --- words ----------------------------------------------------------------------------------------


def sources(named: Mapping[str, ServingRun]) -> str:
    """Where the numbers come from: each line once."""
    return "; ".join(dict.fromkeys(provenance_line(run) for run in named.values()))


def _extremes(what: str, values: Mapping[str, float], written: Any) -> str:
    """`what` of the one run, or of the highest and the lowest."""
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    if low == high or len(values) == 1:
        return f"{what}: {written(values[high])}"
    return f"{what}: {written(values[high])} with {high}, {written(values[low])} with {low}"


def _cdf_title(named: Mapping[str, ServingRun], metric: str) -> str:
    summaries = {name: getattr(summarize(run), f"{metric}_s") for name, run in named.items()}
    p99 = {name: d.p99 for name, d in summaries.items() if d.p99 is not None}
    if not p99:
        return f"No request has a {metric.upper()} yet"
    return _extremes(f"{metric.upper()}, 99th percentile", p99, milliseconds)


def _queue_title(named: Mapping[str, ServingRun]) -> str:
    means = {name: summarize(run).queue_depth.mean for name, run in named.items()}
    return _extremes("Requests that wait, on average", means, lambda v: f"{v:.3g}")
