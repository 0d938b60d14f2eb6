"""What a model should take on each grid of devices."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from pdlab.costmodel import PredictedStep
from pdlab.workbench.figures.style import INK, milliseconds, styled
from pdlab.workbench.palette import MEANING, MEMORY, STAGE
from pdlab.workbench.planner_data import Choice, Plans

BUBBLE: dict[str, Any] = {
    "color": MEANING["free"],
    "pattern": {"shape": "/", "size": 6, "fgcolor": INK.muted, "fgopacity": 0.35},
}
"""Of a bar: nothing is computed."""
TIMES: dict[str, tuple[str, dict[str, Any]]] = {
    "compute": ("compute_s", {"color": STAGE["forward"]}),
    "collectives": ("collective_s", {"color": MEANING["transfer"]}),
    "bubbles and sends": ("waiting_s", BUBBLE),
}
"""Parts of a step, of the stage with the most work."""
HELD: dict[str, tuple[str, dict[str, Any]]] = {
    "weights": ("weights", {"color": MEMORY["weights"]}),
    "K and V": ("kv", {"color": MEMORY["used"]}),
    "activations": ("activations", {"color": MEMORY["activations"]}),
}


def parallel_plan(plans: Plans) -> go.Figure:
    """TTFT, TPOT and memory of a device, a row for each grid: tensor x pipeline parallel.

    What does not go has no time, and the reason in its place.

    Args:
        plans: see `pdlab.workbench.plan_choices`.
    """
    figure = make_subplots(
        rows=1,
        cols=3,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        subplot_titles=("TTFT, ms", "TPOT, ms", f"GB{_of_memory(plans)}, fullest rank"),
    )
    rows = [choice.name for choice in plans.choices]
    going = [choice for choice in plans.choices if choice.prediction]
    for col, step in ((1, "prefill"), (2, "decode")):
        for name, (part, marker) in TIMES.items():
            values = [getattr(_step(choice, step), part) * 1e3 for choice in going]
            _add(figure, name, marker, [c.name for c in going], values, col, "ms")
        _add_totals(figure, going, step, col)
    held = [choice for choice in plans.choices if choice.memory]
    for name, (part, marker) in HELD.items():
        values = [getattr(choice.memory, part) / 1e9 for choice in held]
        _add(figure, name, marker, [c.name for c in held], values, 3, "GB")
    _add_refusals(figure, plans)
    has_gb = plans.hardware.memory_bytes / 1e9
    most_gb = 1.4 * max((c.memory.total / 1e9 for c in held if c.memory), default=1.0)
    if has_gb and has_gb < most_gb:
        figure.add_vline(x=has_gb, line={"color": INK.text, "width": 2.5}, row=1, col=3)
    figure.update_xaxes(range=[0, most_gb], row=1, col=3)
    figure.update_layout(barmode="stack")
    figure.update_yaxes(
        type="category", categoryorder="array", categoryarray=rows[::-1], ticks="", automargin=True
    )
    figure.update_yaxes(title_text="tensor x pipeline", col=1)
    figure.update_xaxes(nticks=5)
    source = f"{plans.basis}. {plans.line}"
    styled(figure, _title(plans), source, height=230 + 32 * len(rows), horizontal=True)
    figure.update_layout(margin={"t": figure.layout.margin.t + 24, "b": 40})
    for note in figure.layout.annotations:
        if note.yref == "paper":
            note.update(font={"size": 15, "color": INK.text})
    return figure


def _of_memory(plans: Plans) -> str:
    has = plans.hardware.memory_bytes
    return f" of {has / 1e9:.3g}" if has else ""


def _step(choice: Choice, step: str) -> PredictedStep:
    found: PredictedStep = getattr(choice.prediction, step)
    return found


def _add(
    figure: go.Figure,
    name: str,
    marker: dict[str, Any],
    rows: list[str],
    values: list[float],
    col: int,
    unit: str,
) -> None:
    figure.add_bar(
        name=name, y=rows, x=values, orientation="h", row=1, col=col,
        marker=marker, legendgroup=name, showlegend=col != 2,
        hovertemplate="%{y}: %{x:.3g} " + unit + f"<extra>{name}, predicted</extra>",
    )  # fmt: skip


def _add_totals(figure: go.Figure, going: list[Choice], step: str, col: int) -> None:
    totals = [_step(choice, step).time_s for choice in going]
    figure.add_scatter(
        x=[s * 1e3 for s in totals], y=[choice.name for choice in going], mode="text",
        text=[f" {milliseconds(s)}" for s in totals], textposition="middle right",
        textfont={"size": 14}, showlegend=False, hoverinfo="skip", cliponaxis=False, row=1, col=col,
    )  # fmt: skip
    figure.update_xaxes(range=[0, 1.4e3 * max(totals, default=1e-3)], row=1, col=col)


def _add_refusals(figure: go.Figure, plans: Plans) -> None:
    """In a few words; the whole reason is in the tip."""
    refused = [choice for choice in plans.choices if not choice.prediction]
    figure.add_scatter(
        x=[0] * len(refused), y=[choice.name for choice in refused], mode="text",
        text=[" " + short_reason(choice) for choice in refused], textposition="middle right",
        textfont={"size": 14, "color": INK.muted}, showlegend=False, cliponaxis=False,
        customdata=[choice.refusal for choice in refused],
        hovertemplate="%{customdata}<extra></extra>", row=1, col=1,
    )  # fmt: skip


def short_reason(choice: Choice) -> str:
    """Why a choice does not go: `does not fit`, or `only 3 KV heads`."""
    if choice.memory:
        return "too long" if "max_model_len" in choice.refusal else "does not fit"
    limit = choice.refusal.split(": ")[0].partition(" is more than the model's ")[2]
    return f"only {limit}" if limit else "cannot be cut"


def _title(plans: Plans) -> str:
    first, next_ = plans.soonest("ttft_s"), plans.soonest("tpot_s")
    if not first or not next_ or not first.prediction or not next_.prediction:
        return "Predicted: on none of these grids does the model go"
    return (
        f"Predicted: soonest first token on {first.name}, {milliseconds(first.prediction.ttft_s)}; "
        f"soonest next ones on {next_.name}, {milliseconds(next_.prediction.tpot_s)}"
    )
