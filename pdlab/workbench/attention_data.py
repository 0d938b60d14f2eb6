"""Attention weights of one sequence, put together from the captures of many steps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdlab.trace.records import Capture
from pdlab.trace.trace import Trace

Array = NDArray[np.float32]

MAX_SIDE = 256
"""Cells of a map along one side; longer sequences are averaged down to this."""
MAX_VALUES = 4_000_000
"""Values that one widget sends to the browser, over all layers and heads."""


class PooledMap(NamedTuple):
    """A map averaged over `factor` x `factor` tokens; NaN where nothing was captured."""

    array: Array
    factor: int


def attention_captures(trace: Trace, sequence_id: str) -> list[Capture]:
    """The sequence's captured attention weights, in order of steps."""
    mine = [c for c in trace.captures if c.name == "attention" and c.sequence_id == sequence_id]
    return sorted(mine, key=lambda c: c.step)


def captured_layers(trace: Trace, sequence_id: str) -> list[int]:
    """Layers with attention captures; ValueError if there is none."""
    layers = sorted({c.layer for c in attention_captures(trace, sequence_id)})
    if not layers:
        raise ValueError(
            f"sequence_id={sequence_id!r} has no attention in this trace: "
            "run its steps inside `with engine.probe():`"
        )
    return layers


def captured_heads(trace: Trace, sequence_id: str) -> list[int]:
    """Numbers of the heads that every capture of the sequence holds."""
    kept = [set(c.heads) for c in attention_captures(trace, sequence_id)]
    return sorted(set.intersection(*kept)) if kept else []


def attention_matrix(trace: Trace, sequence_id: str, layer: int) -> Array:
    """Weights [heads, num_tokens, num_tokens]: row = query position, column = key position.

    Prefill chunks and decode rows stand in one matrix. A cell is NaN where the key lies in the
    query's future, and in rows that were not captured.

    Raises:
        ValueError: no attention of this layer was captured.
    """
    captures = [c for c in attention_captures(trace, sequence_id) if c.layer == layer]
    if not captures:
        raise ValueError(f"layer={layer} has no captured attention for sequence {sequence_id!r}")
    side = max(c.array.shape[2] for c in captures)
    heads = captured_heads(trace, sequence_id)
    matrix = np.full((len(heads), side, side), np.nan, dtype=np.float32)
    for capture in captures:
        _, num_queries, num_keys = capture.array.shape
        rows = slice(capture.start, capture.start + num_queries)
        matrix[:, rows, :num_keys] = capture.array[[capture.heads.index(h) for h in heads]]
    matrix[:, np.triu(np.ones((side, side), dtype=bool), 1)] = np.nan
    return matrix


def pool(matrix: Array, max_side: int = MAX_SIDE) -> PooledMap:
    """Average the last two axes down to at most `max_side` cells, leaving NaN cells out."""
    side = matrix.shape[-1]
    factor = -(-side // max_side)
    if factor == 1:
        return PooledMap(matrix, 1)
    cells = -(-side // factor)
    padded = np.full((*matrix.shape[:-2], cells * factor, cells * factor), np.nan, np.float32)
    padded[..., :side, :side] = matrix
    tiles = padded.reshape(*matrix.shape[:-2], cells, factor, cells, factor)
    counts = np.sum(~np.isnan(tiles), axis=(-3, -1))
    sums = np.nansum(tiles, axis=(-3, -1))
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    return PooledMap(means.astype(np.float32), factor)


def query_rows(trace: Trace, sequence_id: str) -> list[tuple[str, int] | None]:
    """For each position: the phase and the step that captured its query, or None."""
    phases = {r.step: s.phase for r, s in trace.sequence_steps(sequence_id)}
    captures = attention_captures(trace, sequence_id)
    side = max((c.array.shape[2] for c in captures), default=0)
    rows: list[tuple[str, int] | None] = [None] * side
    for capture in captures:
        for position in range(capture.start, capture.start + capture.array.shape[1]):
            rows[position] = (phases[capture.step], capture.step)
    return rows


def side_limit(num_layers: int, num_heads: int) -> int:
    """Cells a side such that all maps of all layers together stay within MAX_VALUES."""
    return min(MAX_SIDE, int((MAX_VALUES / (num_layers * num_heads)) ** 0.5))
