"""What the KV cache saves: the same tokens made with and without it."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from pdlab.workbench.figures.style import milliseconds, recorded_on, styled
from pdlab.workbench.palette import MEANING

if TYPE_CHECKING:
    from pdlab.workbench.experiments import CacheComparison

TAIL = 8
"""Tokens at the end of the run whose median stands for "by then"."""


def naive_against_cached(comparison: CacheComparison) -> go.Figure:
    """Wall time in ms of every token, without a KV cache and with one."""
    naive_s, cached_s = comparison.naive.token_s, comparison.cached_s
    figure = go.Figure()
    for name, seconds, fill, line in (
        ("no cache: the whole text again", naive_s, MEANING["wasted"], MEANING["waiting"]),
        ("KV cache: one token", cached_s, MEANING["decode"], MEANING["decode"]),
    ):  # a yellow line would vanish on a white page, so the yellow fills the markers only
        figure.add_scatter(
            x=list(range(1, len(seconds) + 1)),
            y=[s * 1e3 for s in seconds],
            mode="lines+markers",
            name=name,
            line={"color": line, "width": 2.5},
            marker={"color": fill, "size": 9, "line": {"width": 1.5, "color": line}},
            hovertemplate="token %{x}: %{y:.1f} ms<extra></extra>",
        )
    figure.update_xaxes(title_text="token of the answer (the first one pays for the prompt)")
    figure.update_yaxes(title_text="wall time of the token, ms", rangemode="tozero", tickformat=",")
    late_naive, late_cached = median(naive_s[-TAIL:]), median(cached_s[-TAIL:])
    title = (
        f"The last {TAIL} tokens: {milliseconds(late_naive)} each without a cache, "
        f"{milliseconds(late_cached)} with one (medians)"
    )
    return styled(figure, title, recorded_on(comparison.cached))
