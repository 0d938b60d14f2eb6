"""One model on several devices: who holds what, what travels, when each computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from pdlab.models.shard_plan import ShardPlan
from pdlab.trace.records import StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.figures.parallel_plan import BUBBLE
from pdlab.workbench.figures.steps import find_step
from pdlab.workbench.figures.style import INK, mega, milliseconds, recorded_on, styled
from pdlab.workbench.palette import MEANING, phase_color, run_color, sequence_color
from pdlab.workbench.pipeline_data import Pipeline, Slot, in_words, named_runs, pipeline, shares
from pdlab.workbench.shard_data import Exchange, exchanges, holdings, uneven

ROW = 54
"""Pixels of a rank in a map: a line of text above a bar."""


# --- who holds what -------------------------------------------------------------------------------


def shard_map(plan: ShardPlan, *, element_bytes: float = 4, name: str = "the model") -> go.Figure:
    """Which layers, heads, MLP columns and tokens of the vocabulary live on which rank.

    Args:
        element_bytes: mean bytes of a weight, for the bytes beside each rank.
        name: of the model, for the subtitle.
    """
    c, held = plan.config, holdings(plan, element_bytes)
    columns = (
        ("layers", "layers", c.num_layers),
        ("kv_heads", "KV heads", c.num_kv_heads),
        ("heads", "query heads", c.num_heads),
        ("mlp", "MLP columns", c.intermediate_size),
        ("vocabulary", "tokens", c.vocab_size),
    )
    figure = make_subplots(
        rows=1,
        cols=len(columns),
        shared_yaxes=True,
        horizontal_spacing=0.022,
        column_widths=[0.8, 0.9, 1, 1.15, 1.45],
        subplot_titles=[f"{total:,} {thing}" for _, thing, total in columns],
    )
    rows = [each["rank"] for each in held]
    for i, (key, thing, total) in enumerate(columns, start=1):
        places = [_place(each, key) for each in held]
        for base, width, color in (
            ([0] * len(rows), [total] * len(rows), [MEANING["free"]] * len(rows)),
            ([a for a, _ in places], [b - a for a, b in places], [run_color(r) for r in rows]),
        ):
            figure.add_bar(
                x=width, base=base, y=rows, orientation="h", width=0.34, offset=0.05,
                marker={"color": color}, showlegend=False, hoverinfo="skip", row=1, col=i,
            )  # fmt: skip
        figure.add_scatter(
            x=[0] * len(rows), y=[r - 0.18 for r in rows], mode="text",
            text=[_words(each, key) for each in held], textposition="middle right",
            textfont={"size": 14, "color": INK.text}, showlegend=False, cliponaxis=False,
            hovertemplate=f"%{{text}} of {total:,} {thing}<extra></extra>", row=1, col=i,
        )  # fmt: skip
        figure.update_xaxes(range=[0, total], showticklabels=False, ticks="", row=1, col=i)
    labels = [_rank_label(plan, each) for each in held]
    figure.update_yaxes(range=[len(rows) - 0.4, -0.5], tickvals=rows, ticktext=labels)
    figure.update_layout(barmode="overlay")
    source = f"counted from the shape of {name}; E: embedding, H: head; KV: of a token's K and V"
    styled(figure, _map_title(plan), source, height=160 + ROW * len(rows), horizontal=True)
    figure.update_layout(margin={"b": 16, "t": figure.layout.margin.t + 20})
    figure.update_xaxes(showgrid=False, ticks="", showline=False)
    figure.update_yaxes(ticks="", showline=False, automargin=True, ticklabelstandoff=8)
    for note in figure.layout.annotations:
        note.update(font={"size": 14, "color": INK.muted})
    return figure


def _place(held: Mapping, key: str) -> tuple[int, int]:
    """First and end of what a rank holds; nothing of the vocabulary in a stage in the middle."""
    if key == "vocabulary" and not (held["has_embedding"] or held["has_head"]):
        return 0, 0
    return held[key][0], held[key][1]


def _words(held: Mapping, key: str) -> str:
    first, end = _place(held, key)
    if end <= first:
        return "–"
    words = f"{first:,}" if end == first + 1 else f"{first:,}–{end - 1:,}"
    if key == "vocabulary":
        words += " E" * held["has_embedding"] + " H" * held["has_head"]
    return words


def _rank_label(plan: ShardPlan, held: Mapping) -> str:
    stage = f", stage {held['stage']}" if plan.pipeline_parallel > 1 else ""
    return (
        f"rank {held['rank']}{stage}<br>{mega(held['weight_bytes'], 'B')}, "
        f"KV {held['kv_share']:.0%}"
    )


def _map_title(plan: ShardPlan) -> str:
    grid = f"{plan.tensor_parallel} x {plan.pipeline_parallel}"
    if plan.num_ranks == 1:
        return f"{grid}: one rank holds all"
    left = uneven(plan)
    return f"{grid} ranks: " + ("; ".join(left[:2]) if left else "everything is cut evenly")


# --- what travels ---------------------------------------------------------------------------------


def collectives_of_step(trace: Trace, step: int) -> go.Figure:
    """What the ranks told each other in a step: bytes beside the formula's, and the time it took.

    Raises:
        ValueError: there is no such step, or nobody told anybody anything in it.
    """
    record = find_step(trace, step)
    told = exchanges(trace, record)
    if not told:
        raise ValueError(f"step={step} has no collectives: one rank computed it alone")
    figure = make_subplots(
        rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.06, column_widths=[0.58, 0.42]
    )
    names = [_exchange_label(each) for each in told]
    most = max(each.wire_bytes for each in told)
    figure.add_bar(
        name="counted", x=[each.wire_bytes for each in told], y=names, orientation="h",
        marker={"color": MEANING["transfer"]}, textposition="outside", cliponaxis=False,
        text=[mega(each.wire_bytes, "B") for each in told],
        hovertemplate="%{y}: %{x:,} bytes<extra>counted</extra>", row=1, col=1,
    )  # fmt: skip
    known = [(n, e.formula_bytes) for n, e in zip(names, told, strict=True)]
    figure.add_scatter(
        name="by the formula, predicted", mode="markers",
        x=[value for _, value in known if value is not None],
        y=[name for name, value in known if value is not None],
        marker={"symbol": "line-ns", "size": 26, "line": {"width": 4, "color": INK.text}},
        hovertemplate="%{y}: %{x:,} bytes<extra>predicted</extra>", row=1, col=1,
    )  # fmt: skip
    longest = max(each.wall_s for each in told)
    figure.add_bar(
        name="time, recorded", x=[each.wall_s * 1e3 for each in told], y=names, orientation="h",
        marker={"color": MEANING["waiting"]}, textposition="outside", cliponaxis=False,
        text=[milliseconds(each.wall_s) for each in told],
        hovertemplate="%{y}: %{x:.3f} ms<extra>recorded</extra>", row=1, col=2,
    )  # fmt: skip
    figure.update_xaxes(title_text="bytes on the wires", range=[0, 1.3 * most or 1], row=1, col=1)
    figure.update_xaxes(
        title_text="ms, waiting included", range=[0, 1.45e3 * longest or 1], row=1, col=2
    )
    figure.update_yaxes(autorange="reversed", automargin=True, ticks="")
    title = exchange_words(record, told)
    height = 230 + 44 * len(told)
    return styled(figure, title, recorded_on(trace), height=height, horizontal=True)


def exchange_words(record: StepRecord, told: Sequence[Exchange]) -> str:
    """What travelled in a step, in one sentence."""
    total = sum(each.wire_bytes for each in told)
    if any(each.formula_bytes is None for each in told):
        compared = ""
    elif all(each.formula_bytes == each.wire_bytes for each in told):
        compared = ", as the formula says"
    else:
        compared = f"; the formula says {mega(sum(e.formula_bytes or 0 for e in told), 'B')}"
    return (
        f"Step {record.step} ({record.phase}, {record.num_tokens} "
        f"token{'s' * (record.num_tokens != 1)}): "
        f"{mega(total, 'B')} on the wires{compared}"
    )


def _exchange_label(each: Exchange) -> str:
    calls = each.kind.replace("_", "-") + "s" * (each.num_calls > 1)
    return f"{each.part}: {each.num_calls} {calls}"


# --- when each computes ---------------------------------------------------------------------------


def pipeline_timeline(
    runs: Trace | Mapping[str, Trace],
    steps: Sequence[int] | None = None,
    *,
    color: str = "micro-batch",
) -> go.Figure:
    """A lane for each rank: its micro-batches, and hatched between them the bubbles.

    Args:
        runs: a run, or several by name, such as one for each number of micro-batches.
        steps: numbers of the steps shown; by default the first that several ranks computed.
        color: `micro-batch`, or `phase` for prefill and decode.

    Raises:
        ValueError: there is no run, or no such step, or one that no ranks computed.
    """
    if color not in ("micro-batch", "phase"):
        raise ValueError(f"color={color!r} is not one of micro-batch, phase")
    named = named_runs(runs)
    shown = {name: pipeline(trace, _chosen(trace, steps)) for name, trace in named.items()}
    figure = go.Figure()
    _add_bubbles(figure, shown)
    kinds = list(dict.fromkeys(_kind(s, color) for each in shown.values() for s in each.slots))
    for kind in sorted(kinds, key=lambda name: (len(name), name)):  # 2 before 10
        rows = [
            (_lane(shown, name, slot.rank), slot)
            for name, each in shown.items()
            for slot in each.slots
            if _kind(slot, color) == kind
        ]
        figure.add_bar(
            name=kind,
            y=[row for row, _ in rows],
            x=[slot.wall_s * 1e3 for _, slot in rows],
            base=[slot.start_s * 1e3 for _, slot in rows],
            orientation="h",
            customdata=[[s.step, s.micro_batch, s.num_tokens] for _, s in rows],
            hovertemplate="step %{customdata[0]}, micro-batch %{customdata[1]}: %{customdata[2]} "
            "tokens, %{x:.3f} ms<extra></extra>",
            marker={"color": _color(rows[0][1], color), "line": {"width": 1, "color": INK.surface}},
        )
    lanes = [_lane(shown, name, r) for name, each in shown.items() for r in range(each.num_ranks)]
    figure.update_layout(barmode="overlay", bargap=0.22)
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=lanes[::-1], ticks="", automargin=True
    )
    figure.update_xaxes(title_text="ms since the first rank began")
    title = "; ".join(
        f"{name}: {shares(each)}" if len(shown) > 1 else in_words(each)
        for name, each in shown.items()
    )
    source = f"{recorded_on(next(iter(named.values())))}; predicted: (p - 1) / (m + p - 1)"
    return styled(figure, title, source, height=170 + 38 * len(lanes), horizontal=True)


def _chosen(trace: Trace, steps: Sequence[int] | None) -> list[StepRecord]:
    if steps is None:
        return [next(record for record in trace.steps if record.rank_spans)]
    return [find_step(trace, step) for step in steps]


def _add_bubbles(figure: go.Figure, shown: Mapping[str, Pipeline]) -> None:
    """The whole of each step, on every lane: what no micro-batch covers is a bubble."""
    lanes = [
        (_lane(shown, name, rank), start, end)
        for name, each in shown.items()
        for start, end in each.steps
        for rank in range(each.num_ranks)
    ]
    figure.add_bar(
        name="bubble",
        y=[lane for lane, _, _ in lanes],
        x=[(end - start) * 1e3 for _, start, end in lanes],
        base=[start * 1e3 for _, start, _ in lanes],
        orientation="h",
        hoverinfo="skip",
        marker=BUBBLE,
    )


def _kind(slot: Slot, color: str) -> str:
    return slot.phase if color == "phase" else f"micro-batch {slot.micro_batch}"


def _color(slot: Slot, color: str) -> str:
    return phase_color(slot.phase) if color == "phase" else sequence_color(slot.micro_batch)


def _lane(shown: Mapping[str, Pipeline], name: str, rank: int) -> str:
    each = shown[name]
    lane = (
        f"rank {rank}"
        if each.num_stages == each.num_ranks
        else (f"rank {rank} (stage {each.stage(rank)})")
    )
    return f"{name}: {lane}" if len(shown) > 1 else lane


# --- what it buys ---------------------------------------------------------------------------------


def parallel_gains(gains: Mapping[str, Mapping[str, float]], source: str) -> go.Figure:
    """Tokens a second of several ways to use the same cores, times those of the first.

    Args:
        gains: by way, then by kind of work.
    """
    figure = go.Figure()
    first, *others = gains
    works = list(gains[first])
    for index, way in enumerate(others):
        figure.add_bar(
            name=way, x=works, y=[gains[way][work] for work in works],
            marker_color=run_color(index), text=[f"{gains[way][work]:.2f}" for work in works],
            textposition="outside", cliponaxis=False, textfont={"size": 14},
            hovertemplate="%{x}, " + way + ": %{y:.2f} times<extra></extra>",
        )  # fmt: skip
    figure.add_hline(y=1, line_width=1.5, line_dash="dot", line_color=MEANING["waiting"])
    figure.update_yaxes(title_text=f"tokens a second, times {first}", rangemode="tozero")
    most, way, work = max((gains[way][work], way, work) for way in others for work in works)
    return styled(figure, f"{work}: {way} gives {most:.2f} times the tokens of {first}", source)
