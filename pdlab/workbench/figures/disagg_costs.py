"""What prefill and decode in workers of their own cost and buy: plans, links, devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from pdlab.disagg.simulated.break_even import BreakEven
from pdlab.link import LINKS
from pdlab.workbench.figures.style import INK, mega, milliseconds, styled
from pdlab.workbench.palette import MEANING, run_color

if TYPE_CHECKING:
    from pdlab.bench.disaggregation import Overlap, PlanFigures

DASHES = ("solid", "dash", "dot", "dashdot")
"""Of lines, so that colour is not all that tells them apart."""


def plans_figure(plans: Sequence[PlanFigures], source: str, title: str = "") -> go.Figure:
    """ITL from median to p99, and throughput, of several plans; a row for each workload.

    Lines through the marks and ends of the bars reach from the lowest to the highest of the turns.

    Args:
        source: what was measured where, say `measured: smollm2-135m on ...`.

    Raises:
        ValueError: there is no plan.
    """
    if not plans:
        raise ValueError("plans is empty: it needs at least 1")
    workloads = list(dict.fromkeys(p.workload for p in plans))
    names = list(dict.fromkeys(p.plan for p in plans))
    figure = make_subplots(
        rows=len(workloads),
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.05,
        vertical_spacing=0.3 / len(workloads),
        subplot_titles=[text for w in workloads for text in (w, "")],
    )
    for row, workload in enumerate(workloads, start=1):
        of_row = [p for p in plans if p.workload == workload]
        for p in of_row:
            _add_itl(figure, p, run_color(names.index(p.plan)), row)
        middle = [p.tokens_per_s[0] for p in of_row]
        figure.add_bar(
            x=middle,
            y=[p.plan for p in of_row],
            orientation="h",
            marker={"color": [run_color(names.index(p.plan)) for p in of_row]},
            error_x=_reach([p.tokens_per_s for p in of_row]),
            text=[f"{value:.3g}" for value in middle],
            textposition="inside",
            insidetextanchor="start",
            showlegend=False,
            hovertemplate="%{y}: %{x:.4g} tokens/s<extra></extra>",
            row=row,
            col=2,
        )
        figure.update_yaxes(
            type="category", categoryorder="array", categoryarray=names[::-1], row=row
        )
    figure.update_xaxes(rangemode="tozero")
    figure.update_xaxes(
        title_text="ms between tokens: ● p50 ◇ p99", rangemode="tozero", row=len(workloads), col=1
    )
    figure.update_xaxes(title_text="output tokens/s", row=len(workloads), col=2)
    height = 190 + len(workloads) * (46 + 34 * len(names))
    styled(figure, title or _plans_title(plans), source, height=height, horizontal=True)
    figure.update_layout(margin_t=figure.layout.margin.t + 24)
    for note in figure.layout.annotations:
        note.update(x=0, xanchor="left", font={"size": 15, "color": INK.text, "weight": 600})
    figure.update_yaxes(showgrid=False, ticks="")
    return figure


def _add_itl(figure: go.Figure, plan: PlanFigures, color: str, row: int) -> None:
    marks = ((plan.itl_p50_s, "circle"), (plan.itl_p99_s, "diamond-open"))
    figure.add_scatter(
        x=[1e3 * value[0] for value, _ in marks],
        y=[plan.plan] * 2,
        mode="lines+markers",
        line={"color": color, "width": 2.5},
        marker={"size": 13, "symbol": [s for _, s in marks], "color": color, "line": {"width": 2}},
        error_x=_reach([[1e3 * v for v in value] for value, _ in marks]),
        showlegend=False,
        hovertemplate="%{y}: %{x:.3g} ms<extra></extra>",
        row=row,
        col=1,
    )


def _reach(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """From (middle, least, most) to plotly's error bars."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [v[2] - v[0] for v in values],
        "arrayminus": [v[0] - v[1] for v in values],
        "color": INK.text,
        "thickness": 1.5,
        "width": 4,
    }


def _plans_title(plans: Sequence[PlanFigures]) -> str:
    parts = []
    for workload in dict.fromkeys(p.workload for p in plans):
        of_row = [p for p in plans if p.workload == workload]
        calm = min(of_row, key=lambda p: p.itl_p99_s[0])
        fast = max(of_row, key=lambda p: p.tokens_per_s[0])
        parts.append(f"{workload}: {calm.plan} is calmest, {fast.plan} makes most tokens")
    return "; ".join(parts)


def overlap_figure(overlaps: Sequence[Overlap], source: str, title: str = "") -> go.Figure:
    """How long the receiver waits once the prompt is computed: as a whole, and layer by layer.

    Args:
        source: what was measured where.

    Raises:
        ValueError: there is none.
    """
    if not overlaps:
        raise ValueError("overlaps is empty: it needs at least 1")
    ways = (
        ("the whole prompt, once computed", "waiting", -0.2, [o.push_wait_s for o in overlaps]),
        ("layer by layer", "transfer", 0.2, [o.stream_wait_s for o in overlaps]),
    )
    most = max(max(o.push_wait_s[2], o.stream_wait_s[2], o.link_s) for o in overlaps)
    figure = go.Figure()
    for name, meaning, shift, waits in ways:
        rows = [i + shift for i in range(len(overlaps))]
        figure.add_bar(
            name=name,
            x=[1e3 * wait[0] for wait in waits],
            y=rows,
            width=0.36,
            orientation="h",
            marker={"color": MEANING[meaning]},
            error_x=_reach([[1e3 * v for v in wait] for wait in waits]),
            hovertemplate=name + ": %{x:.3g} ms<extra></extra>",
        )
        figure.add_scatter(
            x=[
                1e3 * _beside(wait[2], o.link_s, most)
                for wait, o in zip(waits, overlaps, strict=True)
            ],
            y=rows,
            mode="text",
            text=[f"  {milliseconds(wait[0])}" for wait in waits],
            textposition="middle right",
            showlegend=False,
            hoverinfo="skip",
        )
    figure.add_scatter(
        name="the link alone, by its bandwidth",
        x=[x for o in overlaps for x in (1e3 * o.link_s, 1e3 * o.link_s, None)],
        y=[y for i in range(len(overlaps)) for y in (i - 0.44, i + 0.44, None)],
        mode="lines",
        line={"color": INK.text, "width": 2.5},
        hovertemplate="link: %{x:.3g} ms<extra></extra>",
    )
    figure.update_xaxes(range=[0, 1.15e3 * most])
    figure.update_xaxes(title_text="ms waited after the first token")
    figure.update_yaxes(
        range=[len(overlaps) - 0.4, -0.6],
        tickvals=list(range(len(overlaps))),
        ticktext=[f"{o.link} (simulated)<br>{mega(o.num_bytes, 'B')}" for o in overlaps],
    )
    hidden = [o.hidden for o in overlaps]
    span = f"{min(hidden):.0%}" + (f" to {max(hidden):.0%}" if len(hidden) > 1 else "")
    title = title or f"Layer by layer hides {span} of the wait"
    styled(figure, title, source, height=240 + 80 * len(overlaps), horizontal=True)
    figure.update_layout(margin_l=150)
    figure.update_yaxes(showgrid=False, ticks="")
    return figure


def _beside(end: float, mark: float, most: float) -> float:
    """Where a number stands: behind its bar, or behind a mark that it would lie upon."""
    return mark if end < mark < end + 0.15 * most else end


def break_even_figure(found: BreakEven, names: Mapping[int, str], title: str = "") -> go.Figure:
    """Seconds that the split saves against the slow machine alone, by the link's bandwidth.

    A line for K and V of each size; a mark where it crosses 0 and the split begins to pay. No line
    gets higher than what the fast machine's prefill saves.

    Args:
        names: what to call K and V of so many bytes a token.
    """
    figure = go.Figure()
    most_s = found.slow.ttft_s - found.fast.ttft_s
    for i, (num_bytes, name) in enumerate(names.items()):
        points = [p for p in found.points if p.kv_bytes_per_token == num_bytes]
        least, color = found.least_bandwidth_bytes_s[num_bytes], run_color(i)
        pays = f"pays from {mega(least, 'B/s')}" if math.isfinite(least) else "never pays"
        figure.add_scatter(
            name=f"{name}: {mega(num_bytes, 'B')} a token, {pays}",
            x=[p.bandwidth_bytes_s for p in points],
            y=[found.slow.e2e_s - p.split.e2e_s for p in points],
            mode="lines",
            line={"color": color, "width": 2.5, "dash": DASHES[i % len(DASHES)]},
            hovertemplate="%{x:.3g} B/s: %{y:.3g} s saved<extra></extra>",
        )
        figure.add_scatter(
            x=[least],
            y=[0],
            mode="markers",
            marker={"color": color, "size": 11, "line": {"color": INK.surface, "width": 1.5}},
            showlegend=False,
            hovertemplate="pays from %{x:.3g} B/s<extra></extra>",
        )
    for y, name in ((0.0, "the slow machine alone"), (most_s, f"at most {most_s:.2g} s")):
        figure.add_hline(
            y=y,
            line={"color": INK.text, "width": 1.5, "dash": "dash"},
            annotation={"text": name, "font": {"size": 14}},
            annotation_position="top left",
        )
    _add_links(figure, [p.bandwidth_bytes_s for p in found.points])
    figure.update_xaxes(type="log", title_text="bandwidth of the link, bytes a second")
    figure.update_yaxes(range=[-2 * most_s, 1.6 * most_s], title_text="seconds saved")
    return styled(figure, title or "Above the line the split pays", found.basis, height=480)


def _add_links(figure: go.Figure, bandwidths: Sequence[float]) -> None:
    """A line at each link that there is a name for."""
    for link in LINKS.values():
        if not min(bandwidths) <= link.bandwidth_bytes_s <= max(bandwidths):
            continue
        figure.add_vline(
            x=link.bandwidth_bytes_s,
            line={"color": MEANING["transfer"], "width": 1.5, "dash": "dot"},
        )
        figure.add_annotation(  # on a logarithmic axis, an annotation stands at the logarithm
            x=math.log10(link.bandwidth_bytes_s),
            y=0.02,
            yref="paper",
            yanchor="bottom",
            xanchor="right",
            text=link.name,
            textangle=-90,
            showarrow=False,
            font={"size": 14},
        )
