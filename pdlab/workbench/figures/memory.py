"""Where K and V live: bytes over time, and the blocks of one moment."""

from __future__ import annotations

import plotly.graph_objects as go

from pdlab.trace.records import StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.figures.steps import find_step
from pdlab.workbench.figures.style import recorded_on, styled
from pdlab.workbench.palette import MEANING, sequence_color
from pdlab.workbench.sequences import sequence_ids

MAX_BLOCKS = 1024
"""Blocks that one grid draws."""


def kv_capacity_bytes(trace: Trace) -> int:
    """Bytes of the whole KV pool."""
    engine = trace.engine
    return int(engine["num_blocks"] * engine["block_size"] * engine["kv_bytes_per_token"])


def free_bytes(trace: Trace, record: StepRecord) -> int:
    """Bytes of blocks that nobody held while the step ran."""
    return kv_capacity_bytes(trace) - record.kv_used_bytes - record.kv_wasted_bytes


def kv_occupancy(trace: Trace) -> go.Figure:
    """Used, wasted and free KV bytes at each step, stacked up to the pool's size (MB, 10^6)."""
    steps = [r.step for r in trace.steps]
    parts = {
        "used": ("cached", [r.kv_used_bytes for r in trace.steps]),
        "wasted: slots taken, still empty": ("wasted", [r.kv_wasted_bytes for r in trace.steps]),
        "free": ("free", [free_bytes(trace, r) for r in trace.steps]),
    }
    figure = go.Figure()
    for name, (meaning, values) in parts.items():
        figure.add_bar(
            name=name,
            x=steps,
            y=[v / 1e6 for v in values],
            marker_color=MEANING[meaning],
            hovertemplate="step %{x}: %{y:.2f} MB<extra>" + name.split(":")[0] + "</extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="engine step")
    figure.update_yaxes(title_text="KV cache, MB")
    figure.update_traces(marker_line_width=0)
    styled(figure, _occupancy_title(trace), recorded_on(trace))
    return figure.update_layout(bargap=0)


def _occupancy_title(trace: Trace) -> str:
    fullest = max(trace.steps, key=lambda r: r.kv_used_bytes + r.kv_wasted_bytes, default=None)
    if fullest is None:
        return "No step was recorded"
    taken = fullest.kv_used_bytes + fullest.kv_wasted_bytes
    wasted = fullest.kv_wasted_bytes / taken if taken else 0
    return (
        f"At its fullest (step {fullest.step}), {taken / kv_capacity_bytes(trace):.0%} of the pool "
        f"is taken, and {wasted:.0%} of that is empty slots"
    )


def block_grid(trace: Trace, step: int, columns: int = 16) -> go.Figure:
    """Every physical block at one step, coloured by its owner, with the number of filled slots.

    A block shared by several requests takes the colour of the one that arrived first.

    Raises:
        ValueError: the trace has no such step.
    """
    record = find_step(trace, step)
    count = min(trace.engine["num_blocks"], MAX_BLOCKS)
    owners, fills = _owners(trace, record)
    requests = sequence_ids(trace)
    shown = [owners.get(b, -1) for b in range(count)] + [None] * (-count % columns)
    texts = [str(fills[b]) if b in fills else "" for b in range(count)] + [""] * (-count % columns)
    hovers = [_hover(b, owners, fills, requests) for b in range(count)] + [""] * (-count % columns)
    figure = go.Figure(
        go.Heatmap(
            z=_rows(shown, columns),
            text=_rows(texts, columns) if count <= 256 else None,
            customdata=_rows(hovers, columns),
            texttemplate="%{text}",
            textfont={"size": 14},
            hovertemplate="%{customdata}<extra></extra>",
            colorscale=_owner_scale(len(requests)),
            zmin=-1.5,
            zmax=len(requests) - 0.5,
            showscale=False,
            xgap=3,
            ygap=3,
        )
    )
    for index, request in enumerate(requests):
        if index in owners.values():
            figure.add_scatter(
                x=[None],
                y=[None],
                name=f"request {request}",
                mode="markers",
                marker={"symbol": "square", "size": 13, "color": sequence_color(index)},
            )
    rows = -(-count // columns)
    figure.update_yaxes(autorange="reversed", visible=False)
    figure.update_xaxes(visible=False)
    title = f"Step {step}: {len(owners)} of {trace.engine['num_blocks']} KV blocks are taken"
    size = trace.engine["block_size"]
    source = f"the number in a block: filled slots of {size}; {recorded_on(trace)}"
    styled(figure, title, source, height=max(260, min(640, 150 + 34 * rows)), min_legend=1)
    return figure.update_layout(margin={"l": 20, "b": 20})


def _owners(trace: Trace, record: StepRecord) -> tuple[dict[int, int], dict[int, int]]:
    """For each taken block: the index of its owner, and the slots it has filled."""
    size, requests = trace.engine["block_size"], sequence_ids(trace)
    owners: dict[int, int] = {}
    fills: dict[int, int] = {}
    for resident in record.residents:
        for logical, block in enumerate(resident.block_table):
            filled = max(0, min(size, resident.num_computed_tokens - logical * size))
            index = requests.index(resident.sequence_id)
            owners[block] = min(owners.get(block, index), index)
            fills[block] = max(fills.get(block, 0), filled)
    return owners, fills


def _hover(block: int, owners: dict[int, int], fills: dict[int, int], requests: list[str]) -> str:
    if block not in owners:
        return f"block {block}: free"
    return f"block {block}: request {requests[owners[block]]}, {fills[block]} slots filled"


def _rows(values: list, columns: int) -> list[list]:
    return [values[i : i + columns] for i in range(0, len(values), columns)]


def _owner_scale(num_requests: int) -> list[tuple[float, str]]:
    """A colour scale of flat steps: free, then one colour a request."""
    colors = [MEANING["free"], *(sequence_color(i) for i in range(num_requests))]
    width = 1 / len(colors)
    edges = ((i * width, (i + 1) * width, color) for i, color in enumerate(colors))
    return [(edge, color) for low, high, color in edges for edge in (low, min(1.0, high))]
