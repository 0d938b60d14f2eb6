"""Where the time of a step goes."""

from __future__ import annotations

from statistics import median

import plotly.graph_objects as go

from pdlab.costmodel import Hardware
from pdlab.trace.records import StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.figures.style import INK, milliseconds, recorded_on, styled
from pdlab.workbench.palette import phase_color, stage_color
from pdlab.workbench.roofline_data import stage_floors_s


def step_timeline(trace: Trace) -> go.Figure:
    """One bar a step, as high as its wall time in milliseconds, coloured by phase."""
    figure = go.Figure()
    for phase in ("prefill", "mixed", "decode"):
        steps = [r for r in trace.steps if r.phase == phase]
        if steps:
            figure.add_bar(
                name=phase,
                x=[r.step for r in steps],
                y=[r.wall_s * 1e3 for r in steps],
                customdata=[[r.num_tokens, len(r.sequences)] for r in steps],
                hovertemplate="step %{x}: %{y:.1f} ms<br>%{customdata[0]} tokens, "
                "%{customdata[1]} requests<extra>" + phase + "</extra>",
                marker_color=phase_color(phase),
            )
    figure.update_xaxes(title_text="engine step")
    figure.update_yaxes(title_text="wall time of the step, ms", tickformat=",")
    return styled(figure, _cost_of_a_token(trace), recorded_on(trace))


def stage_breakdown(trace: Trace, step: int, hardware: Hardware | None = None) -> go.Figure:
    """One bar a stage of one step, in milliseconds.

    Args:
        hardware: the machine's ceilings; marks what they predict for each of the model's stages.

    Raises:
        ValueError: the trace has no such step.
    """
    record = find_step(trace, step)
    stages = {name: s for name, s in record.stage_s.items() if s > 0}
    values = [s * 1e3 for s in stages.values()]
    figure = go.Figure(
        go.Bar(
            name="recorded",
            y=list(stages),
            x=values,
            orientation="h",
            marker_color=[stage_color(name) for name in stages],
            text=[milliseconds(s) for s in stages.values()],
            textposition="outside",
            cliponaxis=False,
            hovertemplate="%{y}: %{x:.2f} ms<extra></extra>",
        )
    )
    if hardware:
        floors = stage_floors_s(trace, record, hardware)
        figure.add_scatter(
            name="predicted: its bytes or FLOPs at the machine's ceilings",
            x=[floors[name] * 1e3 for name in stages if name in floors],
            y=[name for name in stages if name in floors],
            mode="markers",
            marker={"symbol": "line-ns", "size": 22, "line": {"width": 4, "color": INK.text}},
            hovertemplate="%{y}, at least: %{x:.2f} ms<extra></extra>",
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="wall time, ms", range=[0, max(values, default=1) * 1.15])
    largest = max(stages, key=stages.__getitem__, default="nothing")
    share = stages.get(largest, 0) / record.wall_s
    title = (
        f"Step {step} ({record.phase}, {milliseconds(record.wall_s)}): "
        f"{largest} takes {share:.0%} of the time"
    )
    return styled(figure, title, recorded_on(trace), horizontal=True)


def find_step(trace: Trace, step: int) -> StepRecord:
    """The record of a step by its number; ValueError if the trace has none."""
    for record in trace.steps:
        if record.step == step:
            return record
    first, last = (trace.steps[0].step, trace.steps[-1].step) if trace.steps else (None, None)
    raise ValueError(f"step={step} is not in this trace; it holds steps {first} to {last}")


def time_per_token(trace: Trace, phase: str) -> float | None:
    """Median wall seconds for each token computed, over the steps of one phase; None if none."""
    return median(times) if (times := _times_per_token(trace, phase)) else None


def _times_per_token(trace: Trace, phase: str) -> list[float]:
    return [r.wall_s / r.num_tokens for r in trace.steps if r.phase == phase and r.num_tokens]


def _cost_of_a_token(trace: Trace) -> str:
    prefill, decode = time_per_token(trace, "prefill"), time_per_token(trace, "decode")
    if prefill is None or decode is None:
        return f"{len(trace.steps)} engine steps"
    return (
        f"A prompt token costs {milliseconds(prefill)}, a generated token {milliseconds(decode)} "
        "(medians)"
    )
