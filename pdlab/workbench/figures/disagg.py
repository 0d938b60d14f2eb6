"""Prefill and decode in workers of their own: who did what when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from pdlab.disagg.serving import ClusterRun
from pdlab.trace import FailureRecord
from pdlab.workbench.figures.style import INK, mega, milliseconds, styled
from pdlab.workbench.gantt_data import gantt_data
from pdlab.workbench.palette import MEANING
from pdlab.workbench.transfer_data import Cluster, Story, request_of
from pdlab.workload.report import MIXES
from pdlab.workload.serving import ServingRun

if TYPE_CHECKING:
    pass

MAX_STEPS = 1500
"""Steps of all lanes; more are drawn with their neighbours."""
MAX_ARROWS = 300
LANE = 0.34
"""Half of a lane's thickness, where the next lane is 1 away."""
Segment = tuple[float, float, float, float]
"""x and y of both ends."""


# --- a run ----------------------------------------------------------------------------------------


def token_rows(runs: Mapping[str, ClusterRun], labels: Sequence[str], title: str = "") -> go.Figure:
    """A panel a run, a row a request: when its prompt was computed, and each token as a tick.

    Args:
        labels: what to call the requests of each run, in order of arrival.

    Raises:
        ValueError: there is no run, or one has another number of requests.
    """
    if not runs:
        raise ValueError("runs is empty: it needs at least 1")
    for name, run in runs.items():
        if len(run.requests) != len(labels):
            raise ValueError(
                f"labels has {len(labels)} names, run {name!r} has {len(run.requests)} requests"
            )
    names = [f"{name}: done in {run.serving.duration_s:.1f} s" for name, run in runs.items()]
    figure = make_subplots(
        rows=len(runs), shared_xaxes=True, vertical_spacing=0.22 / len(runs), subplot_titles=names
    )
    for row, run in enumerate(runs.values(), start=1):
        _add_run(figure, run, labels, row)
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="seconds", row=len(runs))
    sources = dict.fromkeys(f"{run.provenance}: {run.basis}" for run in runs.values())
    styled(
        figure,
        title or "The same requests; a tick is a token",
        "; ".join(sources),
        height=150 + len(runs) * (62 + 24 * len(labels)),
        horizontal=True,
    )
    figure.update_layout(margin_t=figure.layout.margin.t + 24, margin_l=100)
    for note in figure.layout.annotations:
        note.update(x=0, xanchor="left", font={"size": 15, "color": INK.text, "weight": 600})
    figure.update_yaxes(showgrid=False, ticks="", tickfont={"size": 14})
    return figure


def _add_run(figure: go.Figure, run: ClusterRun, labels: Sequence[str], row: int) -> None:
    label_of = {r.request_id: label for r, label in zip(run.requests, labels, strict=True)}
    steps = [
        (label_of[request_of(name)], step)
        for worker in run.workers.values()
        for step in worker.steps
        for name in step.prompts
    ]
    place = {"row": row, "col": 1}
    figure.add_bar(
        name="its prompt is computed",
        base=[step.start_s for _, step in steps],
        x=[step.wall_s for _, step in steps],
        y=[name for name, _ in steps],
        orientation="h",
        width=0.5,
        marker={"color": MEANING["prefill"]},
        showlegend=row == 1,
        hovertemplate="%{y}: prompt, %{x:.3g} s<extra></extra>",
        **place,
    )
    figure.add_scatter(
        name="a token",
        x=[t for r in run.requests for t in r.metrics.token_times_s],
        y=[label_of[r.request_id] for r in run.requests for _ in r.metrics.token_times_s],
        mode="markers",
        marker={"symbol": "line-ns", "size": 15, "line": {"color": MEANING["decode"], "width": 2}},
        showlegend=row == 1,
        hovertemplate="%{y}: %{x:.4g} s<extra></extra>",
        **place,
    )
    figure.add_scatter(
        name="it comes",
        x=[r.metrics.arrival_s for r in run.requests],
        y=list(labels),
        mode="markers",
        marker={"symbol": "triangle-right-open", "size": 11, "color": MEANING["waiting"]},
        showlegend=row == 1,
        hovertemplate="%{y} comes at %{x:.3g} s<extra></extra>",
        **place,
    )
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=list(labels),
        range=[len(labels) - 0.4, -0.6],
        row=row,
    )


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
