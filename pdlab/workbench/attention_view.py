"""The AttentionView widget: captured attention weights over the real tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import traitlets

from pdlab.trace.trace import Trace
from pdlab.workbench.attention_data import (
    attention_matrix,
    captured_heads,
    captured_layers,
    pool,
    query_rows,
    side_limit,
)
from pdlab.workbench.frames import token_strings
from pdlab.workbench.widget import TraceWidget, machine_line


class AttentionView(TraceWidget):
    """Which token looks at which: the prefill triangle and the decode rows, by layer and head.

    The weights come from `engine.probe()`. All maps are sent once, as float16, so every slider
    answers in the browser; `layer`, `head` and `query` can also be set from Python.
    """

    name = "attention"

    layers = traitlets.List(traitlets.Int()).tag(sync=True)
    """Layers that were captured."""
    heads = traitlets.List(traitlets.Int()).tag(sync=True)
    """Heads that were captured."""
    side = traitlets.Int().tag(sync=True)
    """Cells of a map along one side."""
    factor = traitlets.Int(1).tag(sync=True)
    """Tokens a cell stands for, along each side."""
    weights = traitlets.Bytes().tag(sync=True)
    """float16, [layers, heads, side, side], NaN where there is nothing."""
    tokens = traitlets.List().tag(sync=True)
    rows = traitlets.List().tag(sync=True)
    footer = traitlets.Dict().tag(sync=True)
    layer = traitlets.Int().tag(sync=True)
    """Number of the layer shown."""
    head = traitlets.Int().tag(sync=True)
    """Number of the head shown."""
    query = traitlets.Int().tag(sync=True)
    """Position of the query token whose row is spelled out."""

    def __init__(
        self,
        trace: Trace,
        sequence_id: str | None = None,
        *,
        layer: int | None = None,
        head: int | None = None,
        query: int | None = None,
    ) -> None:
        sequence_id = sequence_id or next(iter(trace.requests), "")
        layers = captured_layers(trace, sequence_id)
        heads = captured_heads(trace, sequence_id)
        matrices = [attention_matrix(trace, sequence_id, n) for n in layers]
        num_tokens = matrices[0].shape[-1]
        pooled = pool(np.stack(matrices), side_limit(len(layers), len(matrices[0])))
        super().__init__(
            layers=layers,
            heads=heads,
            side=pooled.array.shape[-1],
            factor=pooled.factor,
            weights=pooled.array.astype("<f2").tobytes(),
            tokens=[list(pair) for pair in token_strings(trace, sequence_id)[:num_tokens]],
            rows=[list(row) if row else None for row in query_rows(trace, sequence_id)],
            footer={"machine": machine_line(trace), "source": _source_line(trace)},
            layer=layers[0] if layer is None else layer,
            head=heads[0] if head is None else head,
            query=num_tokens - 1 if query is None else query,
        )

    def map(self) -> np.ndarray[Any, Any]:
        """The map shown now, [side, side], as the browser draws it."""
        shape = (len(self.layers), len(self.heads), self.side, self.side)
        maps = np.frombuffer(self.weights, dtype="<f2").reshape(shape)
        return maps[self.layers.index(self.layer), self.heads.index(self.head)]

    def summary(self) -> str:
        return (
            f"Attention weights of layer {self.layer}, head {self.head}, over "
            f"{len(self.tokens)} tokens"
        )

    @traitlets.validate("layer")
    def _check_layer(self, proposal: Any) -> int:
        if proposal["value"] not in self.layers:
            raise ValueError(
                f"layer={proposal['value']} was not captured; these were: {self.layers}"
            )
        return int(proposal["value"])

    @traitlets.validate("head")
    def _check_head(self, proposal: Any) -> int:
        if proposal["value"] not in self.heads:
            raise ValueError(f"head={proposal['value']} was not captured; these were: {self.heads}")
        return int(proposal["value"])

    @traitlets.validate("query")
    def _check_query(self, proposal: Any) -> int:
        if not 0 <= proposal["value"] < len(self.tokens):
            raise ValueError(f"query={proposal['value']} is not one of 0 to {len(self.tokens) - 1}")
        return int(proposal["value"])


def _source_line(trace: Trace) -> str:
    sources = {c.source for c in trace.captures if c.name == "attention"}
    if sources == {"reference"}:
        return "recomputed by the reference path from the engine's own q and cached K"
    return "taken from the engine's own attention"
