"""Attention weights as a heatmap: the prefill triangle with the decode rows below it."""

from __future__ import annotations

import plotly.graph_objects as go

from pdlab.trace.trace import Trace
from pdlab.workbench.attention_data import (
    MAX_SIDE,
    attention_matrix,
    captured_heads,
    pool,
    query_rows,
)
from pdlab.workbench.figures.style import recorded_on, styled
from pdlab.workbench.frames import token_strings
from pdlab.workbench.palette import HEAT

TOKEN_LABELS = 32
"""Tokens up to which the axes carry the tokens themselves."""


def attention_heatmap(trace: Trace, sequence_id: str, layer: int, head: int) -> go.Figure:
    """Weights of one head, [query, key]; above 256 tokens each cell is a mean, as the title says.

    The colour follows the square root of the weight, so that small weights show beside large ones.

    Raises:
        ValueError: the layer was not captured, or it has no such head.
    """
    matrix = attention_matrix(trace, sequence_id, layer)
    heads = captured_heads(trace, sequence_id)
    if head not in heads:
        raise ValueError(f"head={head} was not captured; these were: {heads}")
    cells, factor = pool(matrix[heads.index(head)], MAX_SIDE)
    positions = [i * factor for i in range(len(cells))]
    figure = go.Figure(
        go.Heatmap(
            z=cells**0.5,
            x=positions,
            y=positions,
            customdata=cells,
            hovertemplate="query %{y}, key %{x}: %{customdata:.4f}<extra></extra>",
            colorscale=[[i / (len(HEAT["light"]) - 1), c] for i, c in enumerate(HEAT["light"])],
            zmin=0,
            zmax=1,
            colorbar={
                "title": {"text": "weight", "side": "right"},
                "tickvals": [0, 0.1, 0.316, 0.707, 1],
                "ticktext": ["0", "0.01", "0.1", "0.5", "1"],
                "tickfont": {"size": 14},
                "thickness": 16,
            },
        )
    )
    _label_axes(figure, trace, sequence_id, matrix.shape[-1])
    styled(
        figure,
        _title(trace, sequence_id, layer, head, factor),
        f"recomputed from the engine's own q and cached K; {recorded_on(trace)}",
        height=680,
    )
    figure.update_layout(margin={"l": 110, "b": 110})
    figure.update_yaxes(autorange="reversed", scaleanchor="x", showgrid=False, constrain="domain")
    return figure.update_xaxes(constrain="domain")


def _label_axes(figure: go.Figure, trace: Trace, sequence_id: str, num_tokens: int) -> None:
    figure.update_xaxes(title_text="key position: the token looked at")
    figure.update_yaxes(title_text="query position: the token that looks")
    if num_tokens <= TOKEN_LABELS:
        texts = [text.strip() or "·" for _, text in token_strings(trace, sequence_id)[:num_tokens]]
        ticks = {"tickvals": list(range(num_tokens)), "ticktext": texts}
        figure.update_xaxes(**ticks, tickangle=-90)
        figure.update_yaxes(**ticks)


def _title(trace: Trace, sequence_id: str, layer: int, head: int, factor: int) -> str:
    phases = {row[0] for row in query_rows(trace, sequence_id) if row}
    what = "prefill triangle and decode rows" if len(phases) == 2 else f"{phases.pop()} rows"
    pooled = f" (mean over {factor} × {factor} tokens)" if factor > 1 else ""
    return f"Layer {layer}, head {head}: {what}{pooled}"
