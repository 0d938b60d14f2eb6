"""The numbers in a KV cache themselves: which channels are large, in K and in V."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from pdlab.machine import describe_machine
from pdlab.workbench.figures.style import styled
from pdlab.workbench.palette import HEAT

MAX_TOKENS = 96
"""Rows that are drawn; more would be too thin to see."""


def kv_magnitudes(kv: Tensor, layer: int, head: int, source: str | None = None) -> go.Figure:
    """Size of every number of K and of V in one layer and head, tokens down, channels across.

    In K and in V each, 1 is the size of the median channel: its mean absolute value.

    Args:
        kv: [2, num_layers, num_tokens, num_kv_heads, head_dim].
        source: subtitle; None says that they come from a run in this session.

    Raises:
        ValueError: there is no such layer or head.
    """
    _, num_layers, _, num_heads, _ = kv.shape
    if not (0 <= layer < num_layers and 0 <= head < num_heads):
        raise ValueError(
            f"layer={layer}, head={head}: there are {num_layers} layers of {num_heads} KV heads"
        )
    shown = kv[:, layer, :MAX_TOKENS, head].float().abs().cpu()
    shown /= shown.mean(1, keepdim=True).median(-1, keepdim=True).values
    top = float(shown.max())
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, subplot_titles=("K", "V"), horizontal_spacing=0.04
    )
    for column, values in enumerate(shown, 1):
        figure.add_heatmap(
            z=values.numpy().round(2),
            row=1,
            col=column,
            zmin=0,
            zmax=top,
            showscale=column == 1,
            colorscale=[[i / (len(HEAT["light"]) - 1), c] for i, c in enumerate(HEAT["light"])],
            colorbar={
                "title": {"text": "size, median channel = 1", "side": "right"},
                "tickfont": {"size": 14},
            },
            hovertemplate="token %{y}, channel %{x}: %{z}<extra></extra>",
        )
    source = source or f"as cached in this session, {describe_machine()['processor']}"
    styled(figure, f"Layer {layer}, KV head {head}: {_title(shown)}", source, height=480)
    figure.update_xaxes(title_text="channel", showgrid=False)
    figure.update_yaxes(showgrid=False, autorange="reversed")
    figure.update_yaxes(title_text="token", col=1)
    return figure


def _title(shown: Tensor) -> str:
    """The message: how far the largest channel stands out in each."""
    k, v = shown.mean(1).amax(-1).tolist()
    return f"the largest channel is {k:.1f} times the median in K, {v:.1f} times in V"
