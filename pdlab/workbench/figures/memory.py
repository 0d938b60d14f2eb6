"""Where K and V live: bytes over time, and the blocks of one moment."""

from __future__ import annotations

import plotly.graph_objects as go

from pdlab.trace.records import DROPPED, StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.figures.steps import find_step
from pdlab.workbench.figures.style import INK, recorded_on, styled
from pdlab.workbench.memory_data import (
    Ledger,
    Owner,
    block_owners,
    cached_free_blocks,
    kv_capacity_bytes,
    ledger,
    shares_memory,
)
from pdlab.workbench.memory_events import name_blocks
from pdlab.workbench.palette import MEMORY, THEME, UNKNOWN, sequence_color
from pdlab.workbench.sequences import sequence_ids

MAX_BLOCKS = 1024
"""Blocks that one grid draws."""
FREE = THEME["light"].free
HATCH = {"shape": "/", "fgcolor": MEMORY["used"], "bgcolor": FREE, "size": 7, "solidity": 0.35}
"""Free blocks that keep a cached prefix, as in the widgets."""
CROSS = {"shape": "x", "fgcolor": INK.muted, "bgcolor": FREE, "size": 7, "solidity": 0.3}
"""Blocks that only other engines hold, as in the widgets."""
OTHERS_Z, FREE_Z = -2, -1
"""Values of blocks that no sequence of the trace holds, in the grid's heatmap."""


def kv_occupancy(trace: Trace) -> go.Figure:
    """The KV pool's bytes at each step, stacked up to its size (MB, 10^6).

    Used, wasted (taken but empty) and free, and where there are any: blocks of other engines on the
    same memory, free blocks that keep a cached prefix, what sequences would hold without sharing
    (dashed), bytes swapped to the host (line).
    """
    books = [ledger(trace, record) for record in trace.steps]
    steps = [r.step for r in trace.steps]
    figure = go.Figure()
    for name, values, style in _parts(books):
        figure.add_bar(
            name=name,
            x=steps,
            y=[v / 1e6 for v in values],
            marker=style | {"line": {"width": 0}},
            hovertemplate="step %{x}: %{y:.2f} MB<extra>" + name.split(":")[0] + "</extra>",
        )
    if any(book.shared for book in books):
        unshared = [b.used + b.wasted + b.shared if b.shared else None for b in books]
        _add_line(figure, "without sharing", steps, unshared, INK.text, "dash")
    if any(book.swapped for book in books):
        swapped = [b.swapped or None for b in books]
        _add_line(figure, "swapped, in host memory", steps, swapped, MEMORY["swapped"], "solid")
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title_text="engine step")
    figure.update_yaxes(title_text="KV cache, MB")
    styled(figure, _occupancy_title(trace), recorded_on(trace))
    return figure.update_layout(bargap=0)


def _parts(books: list[Ledger]) -> list[tuple[str, list[int], dict]]:
    """Name, bytes of each step and look of the pool's parts, from the bottom up."""
    parts: list[tuple[str, list[int], dict]] = [
        ("used", [b.used for b in books], {"color": MEMORY["used"]}),
        (
            "wasted: slots taken, still empty",
            [b.wasted for b in books],
            {"color": MEMORY["wasted"]},
        ),
        ("other engines", [b.others for b in books], {"pattern": CROSS}),
        ("cached: free, keeps a prefix", [b.cached for b in books], {"pattern": HATCH}),
        ("free", [b.free for b in books], {"color": FREE}),
    ]
    return [part for part in parts if "pattern" not in part[2] or any(part[1])]


def _add_line(
    figure: go.Figure, name: str, steps: list[int], values: list[int | None], color: str, dash: str
) -> None:
    figure.add_scatter(
        name=name,
        x=steps,
        y=[None if v is None else v / 1e6 for v in values],
        mode="lines",
        line={"color": color, "width": 2.5, "dash": dash, "shape": "hvh"},
        hovertemplate="step %{x}: %{y:.2f} MB<extra>" + name + "</extra>",
    )


def _occupancy_title(trace: Trace) -> str:
    fullest = max(trace.steps, key=lambda r: r.kv_used_bytes + r.kv_wasted_bytes, default=None)
    if fullest is None:
        return "No step was recorded"
    taken = fullest.kv_used_bytes + fullest.kv_wasted_bytes
    wasted = fullest.kv_wasted_bytes / taken if taken else 0
    share = taken / kv_capacity_bytes(trace)
    when = f"At its fullest (step {fullest.step}), "
    if not shares_memory(trace):
        return f"{when}{share:.0%} of the pool is taken, and {wasted:.0%} of that is empty slots"
    others = len(fullest.blocks_of_others) / trace.engine["num_blocks"]
    return (
        f"{when}this engine holds {share:.0%} of the pool ({wasted:.0%} of that is empty slots), "
        f"other engines {others:.0%}"
    )


def block_grid(trace: Trace, step: int, columns: int = 16) -> go.Figure:
    """Every physical block at one step, coloured by its owner, with the number of filled slots.

    A block shared by several sequences takes the colour of the first, with a dot in the colour of
    each other one; a free block that keeps a cached prefix bears a green cross, one that only other
    engines hold is dark grey with a grid. What was swapped or dropped has no block here; the
    subtitle counts it.

    Raises:
        ValueError: the trace has no such step.
    """
    record = find_step(trace, step)
    count = min(trace.engine["num_blocks"], MAX_BLOCKS)
    owners = block_owners(trace, record)
    sequences = sequence_ids(trace)
    figure = go.Figure(_grid(record, owners, sequences, count, columns))
    for index, name in enumerate(sequences):
        if any(o.sequence_id == name for users in owners.values() for o in users):
            _add_owner(figure, name, sequence_color(index), owners, count, columns)
    marks = (
        ("free, keeps a prefix", cached_free_blocks(record), "x", MEMORY["used"]),
        ("held by another engine", record.blocks_of_others, "hash-open", INK.muted),
    )
    for name, blocks, symbol, color in marks:
        if shown := [b for b in blocks if b < count]:
            _add_marks(figure, name, shown, symbol, color, columns)
    rows = -(-count // columns)
    figure.update_yaxes(autorange="reversed", visible=False)
    figure.update_xaxes(visible=False)
    title = f"Step {step}: {len(owners)} of {trace.engine['num_blocks']} KV blocks are taken"
    if record.blocks_of_others:
        title += f", {len(record.blocks_of_others)} more by other engines"
    size = trace.engine["block_size"]
    source = "; ".join(
        [f"the number in a block: filled slots of {size}", *_elsewhere(record), recorded_on(trace)]
    )
    styled(figure, title, source, height=max(260, min(640, 150 + 34 * rows)), min_legend=1)
    return figure.update_layout(margin={"l": 20, "b": 20})


def _grid(
    record: StepRecord,
    owners: dict[int, list[Owner]],
    sequences: list[str],
    count: int,
    columns: int,
) -> go.Heatmap:
    """The blocks as a heatmap whose values are numbers of first owners, FREE_Z or OTHERS_Z."""
    kept, others = set(cached_free_blocks(record)), set(record.blocks_of_others)
    first = {b: min(sequences.index(o.sequence_id) for o in users) for b, users in owners.items()}
    fills = {b: str(max(o.filled for o in users)) for b, users in owners.items()}
    padding = -count % columns
    first |= dict.fromkeys(others, OTHERS_Z)
    shown: list = [first.get(b, FREE_Z) for b in range(count)] + [None] * padding
    texts = [fills.get(b, "") for b in range(count)] + [""] * padding
    hovers = [_hover(b, owners.get(b, []), kept, others) for b in range(count)] + [""] * padding
    return go.Heatmap(
        z=_rows(shown, columns),
        text=_rows(texts, columns) if count <= 256 else None,
        customdata=_rows(hovers, columns),
        texttemplate="%{text}",
        textfont={"size": 14},
        hovertemplate="%{customdata}<extra></extra>",
        colorscale=_owner_scale(len(sequences)),
        zmin=OTHERS_Z - 0.5,
        zmax=len(sequences) - 0.5,
        showscale=False,
        xgap=3,
        ygap=3,
    )


def _add_owner(
    figure: go.Figure,
    name: str,
    color: str,
    owners: dict[int, list[Owner]],
    count: int,
    columns: int,
) -> None:
    """A sequence's legend entry, and a dot in the blocks that it shares with an earlier one."""
    places: list[tuple[float | None, float | None]] = []
    for block, users in owners.items():
        place = [o.sequence_id for o in users].index(name) if _uses(users, name) else 0
        if place and block < count:
            places.append((block % columns + 0.5 - 0.22 * place, block // columns - 0.3))
    figure.add_scatter(
        x=[x for x, _ in places or [(None, None)]],
        y=[y for _, y in places or [(None, None)]],
        name=f"sequence {name}",
        mode="markers",
        marker={
            "symbol": "square",
            "size": 11,
            "color": color,
            "line": {"width": 1.5, "color": "white"},
        },
        hoverinfo="skip",
    )


def _add_marks(
    figure: go.Figure, name: str, blocks: list[int], symbol: str, color: str, columns: int
) -> None:
    """A symbol in each of these blocks, and its legend entry."""
    figure.add_scatter(
        x=[b % columns for b in blocks],
        y=[b // columns for b in blocks],
        name=name,
        mode="markers",
        marker={"symbol": symbol, "size": 13, "color": color},
        hoverinfo="skip",
    )


def _uses(users: list[Owner], name: str) -> bool:
    return any(o.sequence_id == name for o in users)


def _elsewhere(record: StepRecord) -> list[str]:
    """Blocks of sequences that the grid cannot show: swapped to the host, or dropped."""
    notes = []
    for name, blocks in record.swapped.items():
        held = [b for b in blocks if b != DROPPED]
        notes.append(f"{name} lies in {name_blocks(held, 'host block')}")
    dropped = sum(r.block_table.count(DROPPED) for r in record.residents)
    if dropped:
        notes.append(f"{dropped} logical blocks were given back by a window")
    return notes


def _hover(block: int, users: list[Owner], kept: set[int], others: set[int]) -> str:
    if block in others:
        return f"block {block}: held by another engine"
    if not users:
        return f"block {block}: free{', keeps a cached prefix' * (block in kept)}"
    names = " and ".join(o.sequence_id for o in users)
    return f"block {block}: sequence {names}, {max(o.filled for o in users)} slots filled"


def _rows(values: list, columns: int) -> list[list]:
    return [values[i : i + columns] for i in range(0, len(values), columns)]


def _owner_scale(num_sequences: int) -> list[tuple[float, str]]:
    """A colour scale of flat steps: other engines, free, then one colour a sequence."""
    colors = [UNKNOWN, FREE, *(sequence_color(i) for i in range(num_sequences))]
    width = 1 / len(colors)
    edges = ((i * width, (i + 1) * width, color) for i, color in enumerate(colors))
    return [(edge, color) for low, high, color in edges for edge in (low, min(1.0, high))]
