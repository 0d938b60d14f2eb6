"""Speculation: what rows cost, how rejection keeps p, where drafts stand, and what they gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from pdlab.workbench.figures.style import milliseconds, styled
from pdlab.workbench.palette import MEANING, STAGE, run_color
from pdlab.workbench.speculation_data import Drafting

if TYPE_CHECKING:
    from pdlab.workbench.speculation_experiments import Rejection, StepCosts

PALE = "#C9B2F5"
"""The colour of drafts, for what is only predicted."""
DASHES = ("solid", "dash", "dot", "dashdot")


def step_rows(costs: StepCosts, source: str) -> go.Figure:
    """A step of one sequence by the tokens it computes, in plain steps.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not costs.seconds:
        raise ValueError("costs is empty: it needs at least 1 model")
    figure = go.Figure()
    for index, (name, times) in enumerate(costs.seconds.items()):
        rows = sorted(times)
        figure.add_scatter(
            name=f"{name}: a plain step {milliseconds(costs.plain_s(name))}",
            x=rows,
            y=[costs.ratio(name, n) for n in rows],
            mode="lines+markers",
            line={"color": run_color(index), "width": 2.5, "dash": DASHES[index % len(DASHES)]},
            marker={"size": 9},
            customdata=[times[n] * 1e3 for n in rows],
            hovertemplate="%{x} tokens: %{customdata:.1f} ms<extra></extra>",
        )
    longest = max(max(times) for times in costs.seconds.values())
    figure.add_scatter(
        name="as many plain steps", x=[1, longest], y=[1, longest], mode="lines",
        line={"color": MEANING["waiting"], "width": 1.5, "dash": "dot"}, hoverinfo="skip",
    )  # fmt: skip
    figure.update_xaxes(title_text="tokens computed in the step (1 + draft)", rangemode="tozero")
    figure.update_yaxes(title_text="time, in plain steps", range=[0, 1.1 * _tallest(costs)])
    name, six = next(iter(costs.seconds)), 6
    title = "A step that checks a draft takes longer, and not by as many times as it has tokens"
    if six in costs.seconds[name]:
        title = f"{name}: {six} tokens in one step take {costs.ratio(name, six):.1f} plain steps"
    return styled(figure, title, source)


def _tallest(costs: StepCosts) -> float:
    return max(costs.ratio(name, n) for name, times in costs.seconds.items() for n in times)


def rejection_figure(
    rejection: Rejection, names: Sequence[str], counts: Sequence[int] | None = None
) -> go.Figure:
    """p of each token in two parts, drafted and kept, or drawn from what was missing; q beside it.

    Args:
        counts: how often each token came, in real draws.
    """
    places = list(range(len(names)))
    figure = go.Figure()
    figure.add_bar(
        name="q: what the drafter draws", x=[i - 0.21 for i in places], y=list(rejection.q),
        width=0.36, marker={
            "color": "rgba(0,0,0,0)", "line": {"color": MEANING["draft"], "width": 2},
            "pattern": {"shape": "/", "fgcolor": MEANING["draft"]},
        },
    )  # fmt: skip
    figure.add_bar(
        name="min(p, q): drafted, and stands", x=[i + 0.21 for i in places], y=rejection.kept,
        width=0.36, marker_color=MEANING["draft"],
    )  # fmt: skip
    figure.add_bar(
        name="max(0, p − q): drawn after a rejection", x=[i + 0.21 for i in places],
        y=rejection.missing, base=rejection.kept, width=0.36, marker_color=MEANING["decode"],
    )  # fmt: skip
    if counts is not None:
        total = sum(counts)
        figure.add_scatter(
            name=f"share of {total:,} draws, measured", x=[i + 0.21 for i in places],
            y=[n / total for n in counts], mode="markers",
            marker={"symbol": "line-ew", "size": 30, "line": {"width": 3, "color": "#1B1F24"}},
        )  # fmt: skip
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(tickvals=places, ticktext=list(names), title_text="token")
    figure.update_yaxes(title_text="probability", rangemode="tozero")
    title = (
        f"Violet and orange together are p: {rejection.acceptance:.0%} of the drafts stand, "
        "and nothing of p is lost"
    )
    return styled(figure, title, "computed from p and q" + ("; marks: counted" if counts else ""))


def acceptance_by_position(runs: Mapping[str, Drafting], source: str) -> go.Figure:
    """The part that stood of the tokens looked at, by place in the draft.

    Raises:
        ValueError: nothing was drafted.
    """
    figure = go.Figure()
    for index, (name, told) in enumerate(runs.items()):
        if not told.positions:
            continue
        parts = [stood / looked if looked else None for looked, stood in told.positions]
        figure.add_scatter(
            name=name,
            x=list(range(1, len(parts) + 1)),
            y=parts,
            mode="lines+markers",
            line={"color": run_color(index), "width": 2.5, "dash": DASHES[index % len(DASHES)]},
            marker={"size": 9},
            customdata=[f"{stood} of {looked}" for looked, stood in told.positions],
            hovertemplate="place %{x}: %{customdata} stood<extra>" + name + "</extra>",
        )
    if not figure.data:
        raise ValueError("runs has no draft: nothing to show")
    figure.update_xaxes(title_text="place in the draft", dtick=1)
    figure.update_yaxes(title_text="part that stands, of those looked at", range=[0, 1.05])
    best = max(runs, key=lambda name: runs[name].acceptance)
    title = f"Drafts stand most often with {best}: {runs[best].acceptance:.0%} of what is looked at"
    return styled(figure, title, source)


def predicted_speedups(runs: Mapping[str, Drafting], source: str) -> go.Figure:
    """Speed-ups as the formula has them, with and without the time that checking takes, and as
    they were measured."""
    names = [name for name, told in runs.items() if told.speedup is not None and told.num_drafts]
    if not names:
        raise ValueError("runs has no measured speed-up: nothing to show")
    figure = go.Figure()
    measured = {name: runs[name].speedup or 0.0 for name in names}
    rows: list[tuple[str, list[float], str]] = [
        ("predicted, checking free", [_predicted(runs[n], 0.0) for n in names], "rgba(0,0,0,0)"),
        ("predicted, with checking", [_predicted(runs[n], None) for n in names], PALE),
        ("measured", list(measured.values()), MEANING["draft"]),
    ]
    for label, values, color in rows:
        figure.add_bar(
            name=label, x=names, y=values, text=[f"{v:.2f}" for v in values],
            textposition="outside", cliponaxis=False,
            marker={"color": color, "line": {"width": 1.5, "color": MEANING["draft"]}},
        )  # fmt: skip
    figure.add_hline(y=1, line_width=1.5, line_dash="dot", line_color=MEANING["waiting"])
    most = max(value for _, values, _ in rows for value in values)
    figure.update_yaxes(title_text="tokens a second, times plain decoding", range=[0, 1.15 * most])
    gains = [name for name in names if measured[name] > 1]
    title = f"Faster than plain decoding here: {', '.join(gains) or 'none of them'}"
    return styled(figure, title, source)


def _predicted(told: Drafting, slope: float | None) -> float:
    return told.predicted(round(told.mean_length), check_slope=slope)


def draft_length_figure(runs: Mapping[str, Sequence[tuple[int, int]]], source: str) -> go.Figure:
    """Step by step, how many tokens were drafted, and how many of them stood."""
    figure = go.Figure()
    for index, (name, steps) in enumerate(runs.items()):
        color, places = run_color(index), list(range(1, len(steps) + 1))
        figure.add_scatter(
            name=f"{name}: drafted", x=places, y=[drafted for drafted, _ in steps],
            mode="lines", line={"color": color, "width": 2, "shape": "hvh"},
        )  # fmt: skip
        figure.add_scatter(
            name=f"{name}: stood", x=places, y=[stood for _, stood in steps], mode="markers",
            marker={"color": color, "size": 7, "symbol": ("circle", "diamond")[index % 2]},
        )  # fmt: skip
    figure.update_xaxes(title_text="step")
    figure.update_yaxes(title_text="tokens", rangemode="tozero")
    means = {name: sum(d for d, _ in steps) / max(1, len(steps)) for name, steps in runs.items()}
    told = ", ".join(f"{mean:.1f} tokens a step on {name}" for name, mean in means.items())
    return styled(figure, f"The length goes where it pays: {told}", source)


def batch_figure(
    predicted: Mapping[int, float], measured: Mapping[int, float], source: str
) -> go.Figure:
    """Speed-up by the sequences that decode together."""
    figure = go.Figure()
    for name, values, dash in (("predicted", predicted, "dash"), ("measured", measured, "solid")):
        figure.add_scatter(
            name=name, x=list(values), y=list(values.values()), mode="lines+markers",
            line={"color": MEANING["draft"], "width": 2.5, "dash": dash},
            marker={"size": 10, "symbol": "circle" if name == "measured" else "circle-open"},
        )  # fmt: skip
    figure.add_hline(y=1, line_width=1.5, line_dash="dot", line_color=MEANING["waiting"])
    figure.update_xaxes(title_text="sequences in the batch", tickvals=list(measured))
    figure.update_yaxes(title_text="tokens a second, times plain decoding", rangemode="tozero")
    first, *_, last = measured
    title = (
        f"The same drafts gain {measured[first]:.2f} times alone, and {measured[last]:.2f} times "
        f"with {last} sequences"
    )
    return styled(figure, title, source)


def own_work_figure(runs: Mapping[str, Mapping[str, float]], source: str) -> go.Figure:
    """A decode step: the model, and what the engine does itself."""
    figure = go.Figure()
    stages = list(dict.fromkeys(stage for parts in runs.values() for stage in parts))
    for stage in stages:
        color = MEANING["decode"] if stage == "model" else STAGE[stage]
        figure.add_bar(
            name=stage, y=list(runs), x=[parts.get(stage, 0) * 1e3 for parts in runs.values()],
            orientation="h", marker_color=color,
            hovertemplate="%{y}, " + stage + ": %{x:.2f} ms<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed", automargin=True, ticks="")
    figure.update_xaxes(title_text="ms of a decode step")
    shares = [1 - parts["model"] / sum(parts.values()) for parts in runs.values()]
    title = f"What is not the model, and might be hidden: {max(shares):.1%} of a step at most"
    return styled(figure, title, source, height=320, horizontal=True)
