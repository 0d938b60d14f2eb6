"""Choosing tokens: where filters cut a distribution, what a mask removes, what sampling costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import plotly.graph_objects as go
from torch import Tensor

from pdlab.workbench.figures.style import INK, milliseconds, styled
from pdlab.workbench.palette import MEANING, STAGE

if TYPE_CHECKING:
    from pdlab.bench.sampling import SamplingCosts
    from pdlab.workbench.sampling_experiments import Cut, Tries

MAX_POINTS = 200
"""Of a curve over a whole vocabulary; they lie evenly on a logarithmic axis."""
CURVE_COLORS = (MEANING["prefill"], MEANING["decode"], MEANING["cached"])
LOWEST_POWER = -6
"""Of ten, for the probability at the foot of the figure."""
CUT_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross")


def filter_cuts(
    chances: Mapping[str, Tensor],
    cuts: Mapping[str, Sequence[Cut]],
    source: str = "measured: the model's own distributions at temperature 1",
) -> go.Figure:
    """Probabilities by rank at several places in a text, and how far each filter goes there.

    Args:
        chances: by place, [vocab_size], in any order.
        cuts: by place, what each filter leaves.
    """
    figure = go.Figure()
    for i, (place, values) in enumerate(chances.items()):
        ranked = values.sort(descending=True).values
        ranks = _ranks(len(ranked))
        color = CURVE_COLORS[i % len(CURVE_COLORS)]
        beside = _positions(cuts[place])
        figure.add_scatter(
            x=ranks,
            y=[float(ranked[rank - 1]) for rank in ranks],
            mode="lines",
            name=place,
            line={"color": color, "width": 2.5},
            hovertemplate="rank %{x}: probability %{y:.2g}<extra></extra>",
        )
        for j, cut in enumerate(cuts[place]):
            figure.add_scatter(
                x=[cut.num_left],
                y=[float(ranked[cut.num_left - 1])],
                mode="markers+text",
                text=[f"{cut.name}: {cut.num_left}"],
                textposition=beside[j] if i else "bottom left",
                textfont={"color": color, "size": 14},
                cliponaxis=False,
                marker={"size": 11, "color": color, "symbol": CUT_SYMBOLS[j % len(CUT_SYMBOLS)]},
                showlegend=False,
                hovertemplate=f"{cut.name} keeps {cut.num_left} tokens, {cut.mass_left:.1%} of the "
                "probability<extra></extra>",
            )
    figure.update_xaxes(
        title_text="rank of the token (log scale)",
        type="log",
        range=[-0.5, math.log10(max(map(len, chances.values())))],
        tickvals=[10**power for power in range(6)],
    )
    figure.update_yaxes(
        title_text="its probability (log scale)",
        type="log",
        range=[LOWEST_POWER, 0.2],
        tickvals=[10.0**power for power in range(LOWEST_POWER, 1)],
        ticktext=[f"{10.0**power:.{max(0, -power - 2)}%}" for power in range(LOWEST_POWER, 1)],
    )
    title = "Where filters cut: a fixed number fits one place and not the other"
    return styled(figure, title, source)


def _positions(cuts: Sequence[Cut]) -> list[str]:
    """Where the labels of a curve's cuts stand: right of it, every other one a little higher."""
    order = sorted(range(len(cuts)), key=lambda j: cuts[j].num_left)
    return ["middle right" if order.index(j) % 2 else "top right" for j in range(len(cuts))]


def _ranks(num: int) -> list[int]:
    """Ranks from 1 to `num`, evenly spread on a logarithmic axis."""
    return sorted({round(num ** (i / (MAX_POINTS - 1))) for i in range(MAX_POINTS)})


def mask_mass(
    steps: Sequence[Tries], source: str = "measured in one run of the engine"
) -> go.Figure:
    """How much of the model's probability a constraint allowed at each step of a text."""
    figure = go.Figure()
    names = [f"{i + 1}: {step.text}" for i, step in enumerate(steps)]
    kept = [100 * step.mass_left for step in steps]
    figure.add_bar(
        x=names,
        y=kept,
        name="allowed",
        marker_color=MEANING["cached"],
        text=[_percent(value) for value in kept],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="%{x} allowed tokens had %{y:.3g} %<extra></extra>",
    )
    figure.update_xaxes(title_text="step: token taken", type="category")
    figure.update_yaxes(title_text="probability allowed, %", range=[0, 109])
    least = kept.index(min(kept))
    title = f"At step {least + 1} the mask leaves {_percent(kept[least])} of the probability"
    return styled(figure, title, source)


def _percent(value: float) -> str:
    return f"{value:.0f}%" if value >= 10 else f"{value:.2g}%"


def sampling_costs(costs: SamplingCosts, source: str | None = None) -> go.Figure:
    """Time from logits to tokens in a decode step, for each mix of parameters."""
    figure = go.Figure()
    ordered = sorted(costs.costs, key=lambda cost: cost.median_sample_s)
    figure.add_bar(
        y=[cost.name for cost in ordered],
        x=[cost.median_sample_s * 1e3 for cost in ordered],
        orientation="h",
        marker_color=STAGE["sample"],
        text=[f"{milliseconds(c.median_sample_s)}, {c.share:.1%} of the step" for c in ordered],
        textposition="outside",
        textfont={"color": INK.text},
        cliponaxis=False,
        hovertemplate="%{y}: %{x:.3g} ms<extra></extra>",
    )
    most = max(cost.median_sample_s for cost in ordered) * 1e3
    figure.update_xaxes(title_text="sampling in a decode step, ms (median)", range=[0, 1.45 * most])
    shares = [cost.share for cost in costs.costs]
    title = f"Sampling takes {min(shares):.0%} to {max(shares):.0%} of a decode step"
    figure = styled(figure, title, source or recorded(costs), height=520, horizontal=True)
    return figure.update_layout(margin={"l": 150})


def recorded(costs: SamplingCosts) -> str:
    """The subtitle: what was measured, where and when."""
    machine, model = costs.machine, costs.model
    return (
        f"recorded: {model['name']} {model['dtype']}, {costs.batch} sequences of "
        f"{costs.context_len} tokens, on {machine['processor']} ({machine['cores']} cores), "
        f"{str(machine['date'])[:10]}"
    )
