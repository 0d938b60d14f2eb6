"""Prefill and decode in workers of their own: who did what when, and when it pays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from pdlab.disagg.serving import ClusterRun
from pdlab.trace import FailureRecord
from pdlab.workbench.figures.style import INK, mega, milliseconds, styled
from pdlab.workbench.gantt_data import gantt_data
from pdlab.workbench.palette import MEANING, run_color, text_on
from pdlab.workbench.transfer_data import Cluster, Story, request_of
from pdlab.workload.report import MIXES
from pdlab.workload.serving import ServingRun

if TYPE_CHECKING:
    from pdlab.bench.disaggregation import Overlap, PlanFigures

MAX_STEPS = 1500
"""Steps of all lanes; more are drawn with their neighbours."""
MAX_ARROWS = 300
LANE = 0.34
"""Half of a lane's thickness, where the next lane is 1 away."""
NOBODY = "none of them"
"""What wins where no mode does."""
Segment = tuple[float, float, float, float]
"""x and y of both ends."""


# --- a run ----------------------------------------------------------------------------------------


def cluster_timeline(run: Cluster, title: str = "") -> go.Figure:
    """A lane per worker: its steps, transfers as arrows between lanes, and failures.

    Of a lost worker only its end is known: what it recorded is lost with it. A dotted line leads
    from there to each step in which one of its requests went on.
    """
    story = Story.of(run)
    lanes = _lanes_of(story)
    zero_s = min((s.start_s for w in story.workers.values() for s in w.steps), default=0.0)
    zero_s = 0.0 if isinstance(run, ClusterRun) else zero_s
    figure = go.Figure()
    _add_steps(figure, story, lanes, zero_s)
    _add_arrows(figure, story, lanes, zero_s)
    _add_failures(figure, story, lanes, zero_s)
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="seconds")
    figure.update_yaxes(
        range=[len(lanes) - 0.4, -0.6],
        tickvals=list(lanes.values()),
        ticktext=[_lane_name(story, name) for name in lanes],
    )
    styled(
        figure,
        title or _timeline_title(story),
        _source(story),
        height=210 + 74 * len(lanes),
        horizontal=True,
    )
    figure.update_yaxes(showgrid=False, ticks="")
    return figure


def _timeline_title(story: Story) -> str:
    moved = mega(sum(t.num_bytes for t in story.transfers), "B")
    lost = ", ".join(f.worker for f in story.failures)
    head = f"{lost} is lost, its requests go on elsewhere; " if lost else ""
    return f"{head}{len(story.transfers)} transfers, {moved} of K and V in all"


def _source(story: Story) -> str:
    links = sorted({t.link for t in story.transfers if t.link})
    return story.line + (f"; simulated link: {', '.join(links)}" if links else "")


def _lanes_of(story: Story) -> dict[str, int]:
    """Workers by name, prompts before outputs, the lost ones too."""
    lost = {f.worker for f in story.failures} | {
        name for t in story.transfers for name in (t.source, t.target) if name
    }
    order = {"prefill": 0, "both": 1, "decode": 2}
    sources = {t.source for t in story.transfers}

    def rank(name: str) -> tuple[int, str]:
        if name in story.workers:
            return order.get(story.workers[name].role, 1), name
        return (0 if name in sources else 2), name

    return {n: i for i, n in enumerate(sorted({*story.workers, *lost}, key=rank))}


def _lane_name(story: Story, name: str) -> str:
    role = story.workers[name].role if name in story.workers else "lost"
    return f"<b>{name}</b><br>{role}"


def _add_steps(figure: go.Figure, story: Story, lanes: Mapping[str, int], zero_s: float) -> None:
    """Steps of both phases in two halves, so that colours mean the same as everywhere."""
    found: dict[str, list[tuple[float, float, float, float, str]]] = {"prefill": [], "decode": []}
    share = max(1, MAX_STEPS // max(1, len(story.workers)))
    for name, worker in story.workers.items():
        run = ServingRun("measured", "", {}, [], worker.steps, worker.num_blocks)
        data = gantt_data(run, max_rows=1, max_segments=share, facts={})
        for step in data["steps"]:
            start_s, end_s = step["at"]
            mix = MIXES[step["mix"]]
            text = f"{name}: {step['prompt']:g} prompt tokens, {step['decodes']:g} decodes"
            for phase, side in (("prefill", -0.5), ("decode", 0.5)):
                if mix in (phase, "mixed"):
                    shift = side * LANE if mix == "mixed" else 0.0
                    thick = LANE if mix == "mixed" else 2 * LANE
                    bar = (start_s - zero_s, end_s - start_s, lanes[name] + shift, thick, text)
                    found[phase].append(bar)
    for phase, bars in found.items():
        figure.add_bar(
            name=phase,
            base=[bar[0] for bar in bars],
            x=[bar[1] for bar in bars],
            y=[bar[2] for bar in bars],
            width=[bar[3] for bar in bars],
            text=[bar[4] for bar in bars],
            textposition="none",
            orientation="h",
            marker={"color": MEANING[phase], "line": {"color": INK.surface, "width": 0.5}},
            hovertemplate="%{text}, %{x:.4g} s<extra></extra>",
        )


def _add_arrows(figure: go.Figure, story: Story, lanes: Mapping[str, int], zero_s: float) -> None:
    known = [t for t in story.transfers if t.source in lanes and t.target in lanes]
    known = sorted(known, key=lambda t: -t.num_bytes)[:MAX_ARROWS]
    segments, texts = [], []
    for t in known:
        side = LANE if lanes[t.target] > lanes[t.source] else -LANE
        begin = (t.start_s - zero_s, lanes[t.source] + side)
        segments.append((*begin, t.ready_s - zero_s, lanes[t.target] - side))
        texts.append(f"{t.request_id}: {mega(t.num_bytes, 'B')} in {milliseconds(t.wall_s)}")
    if segments:
        # twice: an arrow shows between the lanes and over a lane that it crosses
        _segments(figure, "", segments, texts, {"color": INK.surface, "width": 5}, arrow=False)
        line = {"color": MEANING["transfer"], "width": 2.5}
        _segments(figure, "transfer", segments, texts, line, arrow=True)


def _add_failures(figure: go.Figure, story: Story, lanes: Mapping[str, int], zero_s: float) -> None:
    if not story.failures:
        return
    segments: list[Segment] = []
    texts: list[str] = []
    for failure in story.failures:
        for request_id, at_s in failure.recovered_s.items():
            lane = _lane_where(story, request_id, at_s)
            if lane is not None:
                begin = (failure.time_s - zero_s, float(lanes[failure.worker]))
                segments.append((*begin, at_s - zero_s, float(lanes[lane])))
                texts.append(f"{request_id} goes on {milliseconds(at_s - failure.time_s)} later")
    line = {"color": MEANING["preempted"], "width": 1.8, "dash": "dot"}
    if segments:
        _segments(figure, "goes on elsewhere", segments, texts, line, arrow=True)
    figure.add_scatter(
        name="worker lost",
        x=[f.time_s - zero_s for f in story.failures],
        y=[lanes[f.worker] for f in story.failures],
        mode="markers",
        marker={
            "symbol": "x",
            "size": 17,
            "color": MEANING["preempted"],
            "line": {"color": INK.surface, "width": 1.5},
        },
        text=[f"{f.worker}: {f.reason}" for f in story.failures],
        hovertemplate="%{text}<extra></extra>",
    )


def _lane_where(story: Story, request_id: str, at_s: float) -> str | None:
    """The worker whose step gave a request its token of that moment."""

    def distances() -> Iterator[tuple[float, str]]:
        for name, worker in story.workers.items():
            for step in worker.steps:
                if any(request_of(s) == request_id for s in (*step.prompts, *step.decodes)):
                    yield abs(step.end_s - at_s), name

    return min(distances(), default=(0.0, None))[1]


def _segments(
    figure: go.Figure,
    name: str,
    segments: Sequence[Segment],
    texts: Sequence[str],
    line: dict[str, Any],
    arrow: bool,
) -> None:
    figure.add_scatter(
        name=name,
        showlegend=bool(name),
        x=[x for x0, _, x1, _ in segments for x in (x0, x1, None)],
        y=[y for _, y0, _, y1 in segments for y in (y0, y1, None)],
        text=[text for text in texts for _ in range(3)],
        mode="lines+markers" if arrow else "lines",
        line=line,
        marker={
            "symbol": "arrow",
            "angleref": "previous",
            "size": [0, 13, 0] * len(segments),
            "color": line["color"],
            "opacity": 1,
        },
        hovertemplate="%{text}<extra></extra>" if arrow else None,
        hoverinfo=None if arrow else "skip",
    )


def recovery_figure(run: ClusterRun, title: str = "") -> go.Figure:
    """A row for each request that a lost worker had: its tokens, and how long none came.

    Raises:
        ValueError: no worker was lost.
    """
    if not run.failures:
        raise ValueError("run has no failure: no worker was lost")
    rows = [(failure, name) for failure in run.failures for name in failure.request_ids]
    times = {r.request_id: r.metrics.token_times_s for r in run.requests}
    figure = go.Figure()
    gaps = [_gap(failure, name, times.get(name, [])) for failure, name in rows]
    figure.add_bar(
        name="nothing comes",
        base=[begin_s for begin_s, _ in gaps],
        x=[end_s - begin_s for begin_s, end_s in gaps],
        y=[name for _, name in rows],
        orientation="h",
        width=0.5,
        marker={
            "color": INK.surface,
            "line": {"color": MEANING["preempted"], "width": 1},
            "pattern": {"shape": "/", "fgcolor": MEANING["preempted"], "size": 7},
        },
        hovertemplate="%{y}: no token for %{x:.3g} s<extra></extra>",
    )
    figure.add_scatter(
        name="a token",
        x=[t for _, name in rows for t in times.get(name, [])],
        y=[name for _, name in rows for _ in times.get(name, [])],
        mode="markers",
        marker={"symbol": "line-ns", "size": 15, "line": {"color": MEANING["decode"], "width": 2}},
        hovertemplate="%{y}: %{x:.4g} s<extra></extra>",
    )
    for failure in run.failures:
        figure.add_vline(
            x=failure.time_s,
            line={"color": INK.text, "width": 1.5, "dash": "dash"},
            annotation={"text": f"{failure.worker} is lost", "font": {"size": 14}},
            annotation_position="top",
        )
    figure.update_xaxes(title_text="seconds", rangemode="tozero")
    figure.update_yaxes(type="category", autorange="reversed")
    slowest = max(
        (at - f.time_s for f in run.failures for at in f.recovered_s.values()), default=None
    )
    went_on = sum(len(f.recovered_s) for f in run.failures)
    late = f", the last after {milliseconds(slowest)}" if slowest is not None else ""
    title = title or f"{went_on} of {len(rows)} requests of the lost worker go on{late}"
    styled(figure, title, _source(Story.of(run)), height=250 + 34 * len(rows), horizontal=True)
    figure.update_layout(margin_t=figure.layout.margin.t + 18)
    figure.update_yaxes(showgrid=False)
    return figure


def _gap(failure: FailureRecord, name: str, times_s: Sequence[float]) -> tuple[float, float]:
    """From the last token before a failure was noticed, or that moment, to the next one."""
    before = [t for t in times_s if t <= failure.time_s]
    begin_s = before[-1] if before else failure.time_s
    return begin_s, failure.recovered_s.get(name, begin_s)


# --- plans and links ------------------------------------------------------------------------------


def plans_figure(plans: Sequence[PlanFigures], source: str, title: str = "") -> go.Figure:
    """ITL from median to p99, and throughput, of several plans; a row for each workload.

    Lines through the marks and ends of the bars reach from the lowest to the highest of the turns.

    Args:
        source: what was measured where, say `measured: smollm2-135m on ...`.

    Raises:
        ValueError: there is no plan.
    """
    if not plans:
        raise ValueError("plans is empty: it needs at least 1")
    workloads = list(dict.fromkeys(p.workload for p in plans))
    names = list(dict.fromkeys(p.plan for p in plans))
    figure = make_subplots(
        rows=len(workloads),
        cols=2,
        shared_yaxes=True,
        horizontal_spacing=0.05,
        vertical_spacing=0.3 / len(workloads),
        subplot_titles=[text for w in workloads for text in (w, "")],
    )
    for row, workload in enumerate(workloads, start=1):
        of_row = [p for p in plans if p.workload == workload]
        for p in of_row:
            _add_itl(figure, p, run_color(names.index(p.plan)), row)
        middle = [p.tokens_per_s[0] for p in of_row]
        figure.add_bar(
            x=middle,
            y=[p.plan for p in of_row],
            orientation="h",
            marker={"color": [run_color(names.index(p.plan)) for p in of_row]},
            error_x=_reach([p.tokens_per_s for p in of_row]),
            text=[f"{value:.3g}" for value in middle],
            textposition="inside",
            insidetextanchor="start",
            showlegend=False,
            hovertemplate="%{y}: %{x:.4g} tokens/s<extra></extra>",
            row=row,
            col=2,
        )
        figure.update_yaxes(
            type="category", categoryorder="array", categoryarray=names[::-1], row=row
        )
    figure.update_xaxes(rangemode="tozero")
    figure.update_xaxes(
        title_text="ms between tokens: ● p50 ◇ p99", rangemode="tozero", row=len(workloads), col=1
    )
    figure.update_xaxes(title_text="output tokens/s", row=len(workloads), col=2)
    height = 190 + len(workloads) * (46 + 34 * len(names))
    styled(figure, title or _plans_title(plans), source, height=height, horizontal=True)
    figure.update_layout(margin_t=figure.layout.margin.t + 24)
    for note in figure.layout.annotations:
        note.update(x=0, xanchor="left", font={"size": 15, "color": INK.text, "weight": 600})
    figure.update_yaxes(showgrid=False, ticks="")
    return figure


def _add_itl(figure: go.Figure, plan: PlanFigures, color: str, row: int) -> None:
    marks = ((plan.itl_p50_s, "circle"), (plan.itl_p99_s, "diamond-open"))
    figure.add_scatter(
        x=[1e3 * value[0] for value, _ in marks],
        y=[plan.plan] * 2,
        mode="lines+markers",
        line={"color": color, "width": 2.5},
        marker={"size": 13, "symbol": [s for _, s in marks], "color": color, "line": {"width": 2}},
        error_x=_reach([[1e3 * v for v in value] for value, _ in marks]),
        showlegend=False,
        hovertemplate="%{y}: %{x:.3g} ms<extra></extra>",
        row=row,
        col=1,
    )


def _reach(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """From (middle, least, most) to plotly's error bars."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [v[2] - v[0] for v in values],
        "arrayminus": [v[0] - v[1] for v in values],
        "color": INK.text,
        "thickness": 1.5,
        "width": 4,
    }


def _plans_title(plans: Sequence[PlanFigures]) -> str:
    parts = []
    for workload in dict.fromkeys(p.workload for p in plans):
        of_row = [p for p in plans if p.workload == workload]
        calm = min(of_row, key=lambda p: p.itl_p99_s[0])
        fast = max(of_row, key=lambda p: p.tokens_per_s[0])
        parts.append(f"{workload}: {calm.plan} is calmest, {fast.plan} makes most tokens")
    return "; ".join(parts)


def overlap_figure(overlaps: Sequence[Overlap], source: str, title: str = "") -> go.Figure:
    """How long the receiver waits once the prompt is computed: as a whole, and layer by layer.

    Args:
        source: what was measured where.

    Raises:
        ValueError: there is none.
    """
    if not overlaps:
        raise ValueError("overlaps is empty: it needs at least 1")
    ways = (
        ("the whole prompt, once computed", "waiting", -0.2, [o.push_wait_s for o in overlaps]),
        ("layer by layer", "transfer", 0.2, [o.stream_wait_s for o in overlaps]),
    )
    most = max(max(o.push_wait_s[2], o.stream_wait_s[2], o.link_s) for o in overlaps)
    figure = go.Figure()
    for name, meaning, shift, waits in ways:
        rows = [i + shift for i in range(len(overlaps))]
        figure.add_bar(
            name=name,
            x=[1e3 * wait[0] for wait in waits],
            y=rows,
            width=0.36,
            orientation="h",
            marker={"color": MEANING[meaning]},
            error_x=_reach([[1e3 * v for v in wait] for wait in waits]),
            hovertemplate=name + ": %{x:.3g} ms<extra></extra>",
        )
        figure.add_scatter(
            x=[
                1e3 * _beside(wait[2], o.link_s, most)
                for wait, o in zip(waits, overlaps, strict=True)
            ],
            y=rows,
            mode="text",
            text=[f"  {milliseconds(wait[0])}" for wait in waits],
            textposition="middle right",
            showlegend=False,
            hoverinfo="skip",
        )
    figure.add_scatter(
        name="the link alone, by its bandwidth",
        x=[x for o in overlaps for x in (1e3 * o.link_s, 1e3 * o.link_s, None)],
        y=[y for i in range(len(overlaps)) for y in (i - 0.44, i + 0.44, None)],
        mode="lines",
        line={"color": INK.text, "width": 2.5},
        hovertemplate="link: %{x:.3g} ms<extra></extra>",
    )
    figure.update_xaxes(range=[0, 1.15e3 * most])
    figure.update_xaxes(title_text="ms waited after the first token")
    figure.update_yaxes(
        range=[len(overlaps) - 0.4, -0.6],
        tickvals=list(range(len(overlaps))),
        ticktext=[f"{o.link} (simulated)<br>{mega(o.num_bytes, 'B')}" for o in overlaps],
    )
    hidden = [o.hidden for o in overlaps]
    span = f"{min(hidden):.0%}" + (f" to {max(hidden):.0%}" if len(hidden) > 1 else "")
    title = title or f"Layer by layer hides {span} of the wait"
    styled(figure, title, source, height=240 + 80 * len(overlaps), horizontal=True)
    figure.update_layout(margin_l=150)
    figure.update_yaxes(showgrid=False, ticks="")
    return figure


def _beside(end: float, mark: float, most: float) -> float:
    """Where a number stands: behind its bar, or behind a mark that it would lie upon."""
    return mark if end < mark < end + 0.15 * most else end


# --- the win map ----------------------------------------------------------------------------------


def win_map(
    ttft_slos_s: Sequence[float],
    tpot_slos_s: Sequence[float],
    goodput: Mapping[str, Sequence[Sequence[float]]],
    source: str,
    *,
    unit: str = "requests/s",
    title: str = "",
) -> go.Figure:
    """Which mode serves most requests within both limits, for each pair of limits, and how many.

    Args:
        ttft_slos_s: limits on the first token, along x.
        tpot_slos_s: limits on the pace, along y.
        goodput: by mode, `[len(tpot_slos_s)][len(ttft_slos_s)]`; all 0 means that no mode meets
            the limits.
        source: what was simulated or measured.

    Raises:
        ValueError: there is no mode, or a grid has another shape.
    """
    if not goodput:
        raise ValueError("goodput is empty: it needs at least 1 mode")
    shape = (len(tpot_slos_s), len(ttft_slos_s))
    for mode, grid in goodput.items():
        found = (len(grid), *{len(row) for row in grid})
        if found != shape:
            raise ValueError(f"goodput of {mode!r} has shape {found}, it must have {shape}")
    modes = list(goodput)
    winner, text, hover = [], [], []
    for y in range(shape[0]):
        values = [{mode: goodput[mode][y][x] for mode in modes} for x in range(shape[1])]
        best = [max(each, key=each.__getitem__) for each in values]
        kept = [each[b] > 0 for each, b in zip(values, best, strict=True)]
        winner.append([modes.index(b) + 1 if k else 0 for b, k in zip(best, kept, strict=True)])
        text.append(
            [f"{e[b]:.2g}" if k else "–" for e, b, k in zip(values, best, kept, strict=True)]
        )
        hover.append(["<br>".join(f"{m}: {v:.3g} {unit}" for m, v in e.items()) for e in values])
    figure = _tiles(modes, winner, text, hover)
    for update, slos in ((figure.update_xaxes, ttft_slos_s), (figure.update_yaxes, tpot_slos_s)):
        update(tickvals=list(range(len(slos))), ticktext=[milliseconds(s) for s in slos])
    figure.update_xaxes(title_text="limit on the first token (TTFT)")
    figure.update_yaxes(title_text="limit on the pace (TPOT)", autorange="reversed")
    counts = {m: sum(row.count(i) for row in winner) for i, m in enumerate(modes, start=1)}
    cells = shape[0] * shape[1]
    said = ", ".join(f"{mode} in {count}" for mode, count in counts.items())
    title = title or f"Of {cells} pairs of limits, the most goodput: {said}"
    styled(
        figure, title, f"{source}; numbers: {unit} within both limits", height=230 + 46 * shape[0]
    )
    figure.update_layout(margin_l=110)
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    return figure


def _tiles(
    modes: Sequence[str],
    winner: Sequence[Sequence[int]],
    text: Sequence[Sequence[str]],
    hover: Sequence[Sequence[str]],
) -> go.Figure:
    """A tile a pair, in its winner's colour; the winner's number says it without colour, too."""
    colors = [MEANING["free"], *(run_color(i) for i in range(len(modes)))]
    names = [NOBODY, *modes]
    figure = go.Figure()
    count = len(colors)
    scale = [(edge / count, color) for i, color in enumerate(colors) for edge in (i, i + 1)]
    figure.add_heatmap(
        z=[list(row) for row in winner],
        zmin=-0.5,
        zmax=count - 0.5,
        colorscale=scale,
        showscale=False,
        xgap=2,
        ygap=2,
        customdata=[list(row) for row in hover],
        hovertemplate="%{customdata}<extra></extra>",
    )
    for i, (name, color) in enumerate(zip(names, colors, strict=True)):
        cells = [(x, y) for y, row in enumerate(winner) for x, w in enumerate(row) if w == i]
        if cells:
            figure.add_scatter(
                name=name,
                x=[x for x, _ in cells],
                y=[y for _, y in cells],
                mode="text",
                text=[text[y][x] for x, y in cells],
                textfont={"color": text_on(color), "size": 15},
                showlegend=False,
                hoverinfo="skip",
            )
        figure.add_scatter(  # for the legend alone
            name=name,
            x=[None],
            y=[None],
            mode="markers",
            marker={"symbol": "square", "size": 14, "color": color},
            showlegend=bool(cells),
        )
    return figure
