"""What a user waits for: TTFT against the prompt, TPOT against context and batch."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import numpy as np
import plotly.graph_objects as go

from pdlab.costmodel import Hardware, fit_linear_quadratic
from pdlab.trace.records import StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.figures.style import INK, milliseconds, recorded_on, styled
from pdlab.workbench.palette import MEANING
from pdlab.workbench.roofline_data import predicted_s

TRUSTED_FIT = 0.95
"""R² below which a fit's parts say nothing."""
NEAR = 16
"""Tokens of context by which steps may differ and still count as of the same length."""


class TtftPoint(NamedTuple):
    """One request: its prompt and the time to its first token, queueing included."""

    request_id: str
    prompt_tokens: int
    ttft_s: float


def ttft_points(trace: Trace) -> list[TtftPoint]:
    """TTFT of every request that got a first token: end of that step minus arrival, in seconds."""
    found = []
    for name, request in trace.requests.items():
        first = next((r for r, s in trace.sequence_steps(name) if s.sampled is not None), None)
        if first is not None:
            ttft_s = first.start_s + first.wall_s - request.arrival_s
            found.append(TtftPoint(name, len(request.prompt_ids), ttft_s))
    return found


def ttft_by_prompt(trace: Trace, hardware: Hardware | None = None) -> go.Figure:
    """TTFT in ms against prompt length in tokens, with a fit a + b n + c n^2.

    Run the requests one after another: TTFT counts the time in the queue too. The fit needs three
    different lengths; with fewer, only the points are drawn.

    Args:
        hardware: the machine's ceilings; draws what they predict for each request's own steps.

    Raises:
        ValueError: no request of the trace got a token.
    """
    found = ttft_points(trace)
    if not found:
        raise ValueError("trace holds no request with a first token")
    figure = go.Figure()
    lengths, seconds = [p.prompt_tokens for p in found], [p.ttft_s for p in found]
    title = f"TTFT of {len(found)} requests"
    if len(set(lengths)) >= 3:
        title = _add_fit(figure, lengths, seconds)
    figure.add_scatter(
        x=lengths,
        y=[s * 1e3 for s in seconds],
        mode="markers",
        name="recorded",
        marker={"color": MEANING["prefill"], "size": 12, "line": {"width": 1, "color": "white"}},
        customdata=[p.request_id for p in found],
        hovertemplate="request %{customdata}: %{x} tokens, %{y:.1f} ms<extra></extra>",
    )
    if hardware:
        predicted = {p.prompt_tokens: _predicted_ttft_s(trace, p, hardware) for p in found}
        _add_prediction(figure, predicted)
    figure.update_xaxes(title_text="prompt length, tokens", rangemode="tozero")
    figure.update_yaxes(title_text="time to first token, ms", rangemode="tozero", tickformat=",")
    return styled(figure, title, recorded_on(trace))


def _predicted_ttft_s(trace: Trace, point: TtftPoint, hardware: Hardware) -> float:
    """The steps up to the first token, each at the machine's ceilings."""
    steps = [r for r, s in trace.sequence_steps(point.request_id) if s.phase == "prefill"]
    return sum(predicted_s(trace, step, hardware) for step in steps)


def _add_prediction(figure: go.Figure, seconds: dict[int, float]) -> None:
    """A dashed line of times that the ceilings predict, by what stands on the x axis."""
    xs = sorted(seconds)
    figure.add_scatter(
        x=xs,
        y=[seconds[x] * 1e3 for x in xs],
        mode="lines",
        name="predicted, at the machine's ceilings",
        line={"color": MEANING["transfer"], "width": 2, "dash": "dash"},
        hovertemplate="predicted: %{y:.1f} ms at %{x}<extra></extra>",
    )


def _add_fit(figure: go.Figure, lengths: list[int], seconds: list[float]) -> str:
    """Draw the fit and its linear part; returns the figure's message."""
    fit = fit_linear_quadratic(lengths, seconds)
    longest = max(lengths)
    line = np.linspace(0, longest, 80)
    curves = {
        "fit a + b n + c n²": ([fit.seconds(n) * 1e3 for n in line], "solid"),
        "its linear part": ([(fit.constant_s + fit.linear_s * n) * 1e3 for n in line], "dot"),
    }
    for name, (values, dash) in curves.items():
        figure.add_scatter(
            x=line,
            y=values,
            mode="lines",
            name=name,
            line={"color": INK.muted, "width": 2, "dash": dash},
            hoverinfo="skip",
        )
    if fit.r_squared < TRUSTED_FIT:
        return (
            f"TTFT up to {longest} tokens; too noisy to split (R² {fit.r_squared:.2f}): run again"
        )
    return (
        f"At {longest} tokens, {fit.quadratic_share(longest):.0%} of the TTFT is quadratic: "
        f"{fit.linear_s * 1e3:.3g} ms a token, R² {fit.r_squared:.3f}"
    )


def tpot_by_context(trace: Trace, hardware: Hardware | None = None) -> go.Figure:
    """Wall time in ms of each decode-only step against the tokens of context it reads.

    Args:
        hardware: the machine's ceilings; draws what they predict for the same steps.
    """
    figure, steps = _decode_scatter(trace, hardware, _context)
    figure.update_xaxes(title_text="context read by the step, tokens (all requests)")
    groups = _clusters(steps)
    (short, short_s), (long, long_s) = (
        (median(map(_context, part)), median(r.wall_s for r in part))
        for part in (groups[0], groups[-1])
    )
    title = (
        f"Decode steps take {milliseconds(short_s)} at {short:.0f} tokens of context, "
        f"{milliseconds(long_s)} at {long:.0f} (medians)"
    )
    return styled(figure, title, recorded_on(trace))


def _context(record: StepRecord) -> int:
    """Tokens of context that a step reads, over all of its requests."""
    return sum(s.end for s in record.sequences)


def _clusters(steps: list[StepRecord]) -> list[list[StepRecord]]:
    """Steps of nearly the same context together, from the shortest to the longest."""
    ordered = sorted(steps, key=_context)
    groups = [[ordered[0]]]
    for step in ordered[1:]:
        if _context(step) - _context(groups[-1][0]) <= NEAR:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def tpot_by_batch(trace: Trace, hardware: Hardware | None = None) -> go.Figure:
    """Wall time in ms of each decode-only step against the number of requests in it.

    Args:
        hardware: the machine's ceilings; draws what they predict for the same steps.
    """
    figure, steps = _decode_scatter(trace, hardware, lambda r: len(r.sequences))
    figure.update_xaxes(title_text="requests decoded in the step", dtick=1)
    times = {
        size: median(r.wall_s for r in steps if len(r.sequences) == size)
        for size in sorted({len(r.sequences) for r in steps})
    }
    (small, small_s), (large, large_s) = next(iter(times.items())), list(times.items())[-1]
    title = f"A decode step of {small} takes {milliseconds(small_s)}"
    if large > small:
        title += f", one of {large} takes {large_s / small_s:.2g} times that (medians)"
    return styled(figure, title, recorded_on(trace))


def _decode_scatter(
    trace: Trace, hardware: Hardware | None, x: Callable[[StepRecord], int]
) -> tuple[go.Figure, list[StepRecord]]:
    steps = [r for r in trace.steps if r.phase == "decode"]
    if not steps:
        raise ValueError("trace holds no step that only decodes")
    figure = go.Figure(
        go.Scatter(
            x=[x(r) for r in steps],
            y=[r.wall_s * 1e3 for r in steps],
            mode="markers",
            name="recorded",
            marker={"color": MEANING["decode"], "size": 10, "opacity": 0.75},
            customdata=[r.step for r in steps],
            hovertemplate="step %{customdata}: %{y:.1f} ms at %{x}<extra></extra>",
        )
    )
    if hardware:
        _add_prediction(figure, {x(r): predicted_s(trace, r, hardware) for r in steps})
    figure.update_yaxes(title_text="wall time of the step, ms", rangemode="tozero", tickformat=",")
    return figure, steps
