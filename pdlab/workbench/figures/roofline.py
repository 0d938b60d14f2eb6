"""The roofline of a machine with the steps of a trace under it (Williams et al. 2009)."""

from __future__ import annotations

from statistics import median

import plotly.graph_objects as go

from pdlab.costmodel import Hardware, ridge_point
from pdlab.trace.trace import Trace
from pdlab.workbench.figures.style import INK, mega, milliseconds, recorded_on, styled
from pdlab.workbench.palette import phase_color
from pdlab.workbench.roofline_data import Point, on_hardware, points, trace_dtype

SYMBOLS = {"prefill": "square", "decode": "circle", "mixed": "diamond"}


def roofline(trace: Trace, hardware: Hardware, *, recorded_here: bool = True) -> go.Figure:
    """Log-log roofline with one point a step.

    Args:
        hardware: the ceilings, for the dtype of the trace.
        recorded_here: True when the trace was recorded on this hardware: the points then stand
            where they were recorded. Otherwise they are drawn hollow, where `predict` puts them.
    """
    dtype = trace_dtype(trace)
    steps, machine = points(trace), on_hardware(trace, hardware)
    if not steps:
        raise ValueError("trace holds no step that computed anything")
    kind = "recorded" if recorded_here else "predicted"
    seconds = [p.wall_s for p in steps] if recorded_here else machine["predicted_s"]
    ridge, peak = ridge_point(hardware, dtype), hardware.peak(dtype)
    figure = go.Figure()
    _add_roof(figure, [p.intensity for p in steps], ridge, peak)
    for phase in SYMBOLS:
        own = [(p, s) for p, s in zip(steps, seconds, strict=True) if p.phase == phase]
        if own:
            _add_points(figure, phase, kind, own)
    _add_labels(figure, hardware, ridge, peak)
    figure.update_xaxes(type="log", title_text="arithmetic intensity, FLOP per byte", dtick=1)
    figure.update_yaxes(type="log", title_text="FLOP/s", dtick=1, exponentformat="SI")
    source = f"ceilings {hardware.provenance}, points {kind}; {dtype}; {recorded_on(trace)}"
    styled(figure, _title(steps, ridge, hardware), source, height=520)
    return figure.update_xaxes(showgrid=True)


def _add_roof(figure: go.Figure, intensities: list[float], ridge: float, peak: float) -> None:
    low, high = min([*intensities, ridge]) / 3, max([*intensities, ridge]) * 5
    figure.add_scatter(
        x=[low, ridge, high],
        y=[low * peak / ridge, peak, peak],
        mode="lines",
        line={"color": INK.text, "width": 2.5},
        name="ceiling",
        hoverinfo="skip",
    )


def _add_points(figure: go.Figure, phase: str, kind: str, own: list[tuple[Point, float]]) -> None:
    hollow = "-open" if kind == "predicted" else ""
    figure.add_scatter(
        x=[p.intensity for p, _ in own],
        y=[p.flops / seconds for p, seconds in own],
        mode="markers",
        name=f"{phase} ({kind})",
        marker={
            "color": phase_color(phase),
            "symbol": SYMBOLS[phase] + hollow,
            "size": 13,
            "line": {"width": 2 if hollow else 1, "color": None if hollow else INK.surface},
        },
        customdata=[[p.step, p.num_tokens, milliseconds(seconds)] for p, seconds in own],
        hovertemplate="step %{customdata[0]}, %{customdata[1]} tokens<br>%{x:.3g} FLOP/byte, "
        "%{y:.3s}FLOP/s<br>%{customdata[2]} " + kind + "<extra></extra>",
    )


def _add_labels(figure: go.Figure, hardware: Hardware, ridge: float, peak: float) -> None:
    label = f"ridge point {ridge:.3g} FLOP/byte<br>{mega(peak, 'FLOP/s')}, "
    label += mega(hardware.bandwidth_bytes_s, "B/s")
    figure.add_scatter(
        x=[ridge],
        y=[peak],
        mode="markers+text",
        text=[label],
        textposition="bottom right",
        textfont={"size": 14, "color": INK.muted},
        marker={"color": INK.surface, "size": 10, "line": {"color": INK.text, "width": 2.5}},
        showlegend=False,
        hoverinfo="skip",
    )


def _title(steps: list[Point], ridge: float, hardware: Hardware) -> str:
    """Which roof each phase meets, at its median intensity."""
    found = {}
    for phase in ("prefill", "decode"):
        own = [p.intensity for p in steps if p.phase == phase]
        if own:
            found[phase] = (median(own), "memory" if median(own) < ridge else "compute")
    if not found:
        return f"Mixed steps on {hardware.name}"
    parts = [f"{phase} ({x:.3g} FLOP/byte) the {roof} roof" for phase, (x, roof) in found.items()]
    if len({roof for _, roof in found.values()}) == 1 < len(found):
        (first, _), (second, roof) = found.values()
        return f"Prefill ({first:.3g} FLOP/byte) and decode ({second:.3g}) meet the {roof} roof"
    text = ", ".join(parts).replace(" the", " meets the", 1)
    return text[0].upper() + text[1:]
