"""What a window costs: perplexity by window, without sinks and with them, and along a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go

from pdlab.workbench.figures.kv_costs import find_cost, measured_here
from pdlab.workbench.figures.style import INK, styled
from pdlab.workbench.palette import MEANING

if TYPE_CHECKING:
    from pdlab.workbench.kv_costs import KVCost


def window_costs(
    costs: Sequence[KVCost], reference: str = "full", source: str | None = None
) -> go.Figure:
    """Perplexity against the window, without sinks and with them, beside full attention.

    Raises:
        ValueError: there is no such reference among the costs.
    """
    right = find_cost(costs, reference)
    figure = go.Figure()
    sinks = sorted({c.config.sink_tokens for c in costs if c.config.window})
    colors = (MEANING["preempted"], MEANING["cached"], MEANING["transfer"])
    for i, count in enumerate(sinks):
        of_it = [c for c in costs if c.config.window and c.config.sink_tokens == count]
        of_it.sort(key=lambda c: c.config.window or 0)
        figure.add_scatter(
            x=[c.config.window for c in of_it],
            y=[c.perplexity for c in of_it],
            customdata=[c.peak_blocks for c in of_it],
            mode="lines+markers",
            name=f"window and {count} sinks" if count else "window alone",
            line={"color": colors[i % len(colors)], "width": 2.5},
            marker={"size": 10},
            hovertemplate="window %{x}: perplexity %{y:.3g}, at most %{customdata} blocks"
            "<extra></extra>",
        )
    windows = _windows(costs)
    figure.add_scatter(
        x=[windows[0], windows[-1]],
        y=[right.perplexity] * 2,
        mode="lines",
        name=f"{right.label} attention: {right.perplexity:.3g}",
        line={"color": INK.text, "width": 1.5, "dash": "dash"},
        hoverinfo="skip",
    )
    figure.update_xaxes(title_text="window, tokens", type="log", tickvals=windows)
    _log_perplexity(figure)
    return styled(figure, _window_title(costs), source or measured_here(costs))


def perplexity_by_position(
    costs: Sequence[KVCost], chunk_size: int = 256, source: str | None = None
) -> go.Figure:
    """Perplexity of each chunk of a long text: where in the text a window begins to hurt.

    Args:
        chunk_size: tokens of a chunk in the measurement.
    """
    figure = go.Figure()
    colors = (INK.text, *(MEANING[m] for m in ("preempted", "cached", "prefill", "decode")))
    for i, cost in enumerate(costs):
        figure.add_scatter(
            x=[chunk_size * (j + 0.5) for j in range(len(cost.chunk_nll))],
            y=np.exp(cost.chunk_nll).tolist(),
            mode="lines+markers",
            name=cost.label,
            line={"color": colors[i % len(colors)], "width": 2.5},
            hovertemplate="around token %{x}: perplexity %{y:.3g}<extra></extra>",
        )
    figure.update_xaxes(title_text="position in the text, tokens")
    _log_perplexity(figure)
    title = f"Perplexity along the text, {chunk_size} tokens at a time"
    return styled(figure, title, source or measured_here(costs))


def _log_perplexity(figure: go.Figure) -> None:
    """A logarithmic axis with ticks at 1, 2, 5, 10, 20, ... as far as the data goes."""
    values = [value for trace in figure.data for value in trace.y]
    low, high = min(values) / 1.2, max(values) * 1.2
    ticks = [step * 10**power for power in range(7) for step in (1, 2, 5)]
    figure.update_yaxes(
        title_text="perplexity (log scale)",
        type="log",
        range=[math.log10(low), math.log10(high)],
        tickvals=[tick for tick in ticks if low < tick < high],
    )


def _window_title(costs: Sequence[KVCost]) -> str:
    windowed = [c for c in costs if c.config.window]
    sizes = {
        s: {c.config.sink_tokens: c for c in windowed if c.config.window == s}
        for s in {c.config.window for c in windowed}
    }
    both = {size: found for size, found in sizes.items() if size and len(found) > 1 and 0 in found}
    if not both:
        return "What a window costs a model that was trained without one"
    size = max(s for s in both if s)
    alone, kept = both[size][0], both[size][max(both[size])]
    return (
        f"A window of {size} tokens: perplexity {alone.perplexity:.3g} alone, "
        f"{kept.perplexity:.3g} with {kept.config.sink_tokens} sinks"
    )


def _windows(costs: Sequence[KVCost]) -> list[int]:
    return sorted({c.config.window for c in costs if c.config.window})
