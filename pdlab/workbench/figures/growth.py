"""How memory grows with the prompt, and what each technique takes off it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from pdlab.workbench.figures.style import mega, recorded_on, styled
from pdlab.workbench.palette import MEANING, MEMORY, text_on

if TYPE_CHECKING:
    from pdlab.workbench.kv_experiments import MemoryPoint, Saving

BACKEND_NAMES = {"torch": "fused attention", "reference": "unfused attention"}
BAR = 58
"""Height of one bar, in pixels."""


def memory_growth(points: Sequence[MemoryPoint]) -> go.Figure:
    """KV, and the peak of activations with each attention backend, against the prompt's length.

    Raises:
        ValueError: no point at all.
    """
    if not points:
        raise ValueError("points is empty: it needs at least 1 MemoryPoint")
    backends = list(dict.fromkeys(point.backend for point in points))
    first = [p for p in points if p.backend == backends[0]]
    figure = go.Figure()
    _add_line(figure, "KV cache", first, [p.kv_bytes for p in first], MEMORY["used"], "solid")
    looks = (
        (MEMORY["activations"], "solid"),
        (MEANING["preempted"], "dash"),
        (MEANING["waiting"], "dot"),
    )
    for backend, (color, dash) in zip(backends, looks, strict=False):
        own = [p for p in points if p.backend == backend]
        name = f"activations at once, {BACKEND_NAMES.get(backend, backend)}"
        _add_line(figure, name, own, [p.peak_bytes for p in own], color, dash)
    ticks = sorted({p.num_tokens for p in points})
    figure.update_xaxes(
        title_text="tokens of prompt",
        tickvals=ticks,
        ticktext=[f"{n:,}" for n in ticks],
    )
    figure.update_yaxes(title_text="MB", rangemode="tozero")
    return styled(figure, _growth_title(points), recorded_on(points[0].trace))


def _add_line(
    figure: go.Figure,
    name: str,
    points: Sequence[MemoryPoint],
    values: list[int],
    color: str,
    dash: str,
) -> None:
    figure.add_scatter(
        x=[p.num_tokens for p in points],
        y=[v / 1e6 for v in values],
        name=name,
        mode="lines+markers",
        line={"color": color, "width": 2.5, "dash": dash},
        marker={"size": 9},
        hovertemplate="%{x:,} tokens: %{y:.1f} MB<extra>" + name + "</extra>",
    )


def _growth_title(points: Sequence[MemoryPoint]) -> str:
    """The growth of KV over the whole range; unfused activations beside it, if they are there."""
    by_length = sorted(points, key=lambda p: p.num_tokens)
    ends = by_length[0], by_length[-1]
    times = ends[1].num_tokens / ends[0].num_tokens
    title = f"{times:.3g} times the tokens: {ends[1].kv_bytes / ends[0].kv_bytes:.3g} times the KV"
    own = [p for p in by_length if p.backend == "reference"]
    if len(own) < 2:
        return title
    factor = own[-1].peak_bytes / own[0].peak_bytes
    return f"{title}, {factor:.3g} times the activations where attention is unfused"


def savings(bars: Sequence[Saving], source: str, baseline: str | None = None) -> go.Figure:
    """One bar for each knob, with what it takes off the bar before it.

    Args:
        bars: from top to bottom, one knob more in each.
        source: where the numbers come from, for the subtitle.
        baseline: label of the bar that the title compares the last one with; None for the first.

    Raises:
        ValueError: no bar at all, or no bar of the baseline's label.
    """
    if not bars:
        raise ValueError("bars is empty: it needs at least 1 Saving")
    named = {bar.label: bar for bar in bars}
    base = named.get(bars[0].label if baseline is None else baseline)
    if base is None:
        raise ValueError(f"baseline={baseline!r} is not one of the bars: {', '.join(named)}")
    colors = [MEANING["waiting"]] * len(bars)
    for i, bar in enumerate(bars):
        if bar.label.startswith("paged"):
            colors[i] = MEANING["quantized"] if "," in bar.label else MEMORY["used"]
    sizes = [bar.num_bytes for bar in bars]
    texts = [mega(sizes[0], "B")]
    for before, size in pairwise(sizes):
        texts.append(f"{mega(size, 'B')} ({100 * (size / before - 1):+.0f}%)")
    inside = [size > max(sizes) / 3 for size in sizes]
    figure = go.Figure(
        go.Bar(
            y=[bar.label for bar in bars],
            x=[size / 1e9 for size in sizes],
            orientation="h",
            marker={"color": colors, "line": {"width": 0}},
            text=texts,
            textposition=["inside" if yes else "outside" for yes in inside],
            insidetextfont={"color": [text_on(c) for c in colors], "size": 15},
            cliponaxis=False,
            textangle=0,
            showlegend=False,
            hovertemplate="%{y}: %{x:.2f} GB<extra></extra>",
        )
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title_text="KV memory taken, mean over time, GB")
    less = 1 - bars[-1].num_bytes / base.num_bytes
    title = f"From “{base.label}” to “{bars[-1].label}”: {less:.0%} less KV memory, on average"
    height = 220 + BAR * len(bars)
    return styled(figure, title, source, height=height, horizontal=True)
