"""What a lossy KV cache costs: bytes against perplexity, and errors by layer and head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import plotly.graph_objects as go

from pdlab.machine import describe_machine
from pdlab.workbench.figures.style import INK, mega, styled
from pdlab.workbench.palette import HEAT, MEANING

if TYPE_CHECKING:
    from pdlab.workbench.kv_costs import KVCost

CHAR, LINE = 8.2, 19
"""Pixels of a label's character, and of its line."""
OFFSETS = [(dx, dy) for dy in range(-22, -232, -14) for dx in range(-120, 181, 20)]
OFFSETS += [(dx, 24) for dx in (-60, 0, 60)]
"""Where a label may stand beside its point, in pixels: above it, or just below."""
PLOT = 660, 330
"""Pixels of the plot inside its axes."""
KILOBYTES = (1, 2, 3, 4, 6, 8, 10, 15, 20, 30, 40, 60, 80, 100, 150, 200, 300, 400)
WHICH = {
    "k": ("K", "of K as the cache returns it"),
    "v": ("V", "of V as the cache returns it"),
    "attended": ("attention output", "of attention over the cache"),
}


def kv_costs(
    costs: Sequence[KVCost], reference: str = "fp32", source: str | None = None
) -> go.Figure:
    """Bytes of KV per token against the change of perplexity, one labelled point a configuration.

    Args:
        reference: label of the configuration that the changes are against.
        source: subtitle; None says that it was measured here and now.

    Raises:
        ValueError: there is no such reference among the costs.
    """
    right = find_cost(costs, reference)
    x = [cost.bytes_per_token / 1e3 for cost in costs]
    y = [change_percent(cost, right) for cost in costs]
    high = max(max(y), 1) - min(min(y), 0)
    y_range = [min(min(y), 0) - 0.15 * high, max(max(y), 1) + 0.15 * high]
    x_range = [math.log10(min(x) * 0.85), math.log10(max(x) * 1.15)]
    figure = go.Figure(
        go.Scatter(
            x=x,
            y=y,
            mode="markers",
            showlegend=False,
            marker={"size": 11, "color": [_color(cost, right) for cost in costs]},
            customdata=[[c.label, c.perplexity, c.kl, c.agreement, _open(c)] for c in costs],
            hovertemplate="%{customdata[0]}: %{x:.1f} kB a token, %{y:+.2f}% perplexity"
            "<br>perplexity %{customdata[1]:.3f}, KL %{customdata[2]:.2g} nats, same first choice "
            "%{customdata[3]:.1%}%{customdata[4]}<extra></extra>",
        )
    )
    figure.add_hline(y=0, line={"color": INK.muted, "width": 1})
    at = [
        (_along(math.log10(a), x_range) * PLOT[0], (1 - _along(b, y_range)) * PLOT[1])
        for a, b in zip(x, y, strict=True)
    ]
    labels = [cost.label.split("/") for cost in costs]
    for label, place, offset in zip(
        labels, zip(x, y, strict=True), _places(labels, at), strict=True
    ):
        figure.add_annotation(_annotation(label, place, offset))
    figure.update_xaxes(
        title_text="KV bytes per token, kB, scales included (log scale)",
        type="log",
        range=x_range,
        tickvals=[k for k in KILOBYTES if x_range[0] < math.log10(k) < x_range[1]],
    )
    figure.update_yaxes(title_text=f"perplexity against {reference}", range=y_range)
    figure.update_yaxes(ticksuffix="%")
    return styled(figure, _title(costs, right), source or measured_here(costs), height=500)


def error_heatmap(
    cost: KVCost,
    which: Literal["k", "v", "attended"] = "k",
    source: str | None = None,
    *,
    zmax: float | None = None,
) -> go.Figure:
    """Relative L2 error of K, V or the attention output, by layer and head; the worst is named.

    Args:
        zmax: error, as a part of 1, that has the darkest colour, to compare heatmaps; by default
            the largest.

    Raises:
        ValueError: `which` is none of these.
    """
    if which not in WHICH:
        raise ValueError(f"which={which!r} must be one of {', '.join(WHICH)}")
    errors = getattr(cost, f"{which}_error")
    layer, head = np.unravel_index(int(errors.argmax()), errors.shape)
    num_layers, num_heads = errors.shape
    figure = go.Figure(
        go.Heatmap(
            z=errors.T * 100,
            xgap=1,
            ygap=1,
            colorscale=[[i / (len(HEAT["light"]) - 1), c] for i, c in enumerate(HEAT["light"])],
            zmin=0,
            zmax=max((errors.max() if zmax is None else zmax) * 100, 1e-9),
            hovertemplate="layer %{x}, head %{y}: %{z:.3g}%<extra></extra>",
            colorbar={"ticksuffix": "%", "thickness": 16, "tickfont": {"size": 14}},
        )
    )
    kind = "query head" if which == "attended" else "KV head"
    figure.update_xaxes(title_text="layer", dtick=1 if num_layers <= 12 else 5)
    figure.update_yaxes(title_text=kind, dtick=1, autorange="reversed")
    name, what = WHICH[which]
    title = f"{cost.label}: {name} is {percent(_mean(errors))} off on average"
    if errors.max() > 0:
        title += f", worst in layer {layer}, head {head}: {percent(errors.max())}"
        frame = {"x0": layer - 0.5, "x1": layer + 0.5, "y0": head - 0.5, "y1": head + 0.5}
        figure.add_shape(**frame, line={"color": MEANING["decode"], "width": 3})
    source = source or measured_here([cost])
    styled(figure, title, f"relative L2 error {what}; {source}", height=170 + 30 * num_heads + 90)
    return figure.update_xaxes(showgrid=False).update_yaxes(showgrid=False)


def _open(cost: KVCost) -> str:
    """A line for what block-wise formats keep beside their blocks."""
    if not cost.open_bytes:
        return ""
    return f"<br>and {cost.open_bytes / 1e3:,.0f} kB for each block that still fills"


def change_percent(cost: KVCost, reference: KVCost) -> float:
    """How much larger a perplexity is than the reference's, in percent."""
    return (cost.perplexity / reference.perplexity - 1) * 100


def measured_here(costs: Sequence[KVCost]) -> str:
    """The subtitle of a figure of something measured in this very session."""
    machine = describe_machine()
    return f"measured on {costs[0].num_tokens:,} tokens of text, {machine['processor']}"


def percent(part: float) -> str:
    """0.01234 -> `1.23%`."""
    return f"{part * 100:.3g}%"


def find_cost(costs: Sequence[KVCost], label: str) -> KVCost:
    """The cost with this label, or a ValueError that names those there are."""
    for cost in costs:
        if cost.label == label:
            return cost
    raise ValueError(f"reference={label!r} is not one of {[cost.label for cost in costs]}")


def _color(cost: KVCost, reference: KVCost) -> str:
    """Quantized formats have the colour of quantized; what is as large as a float has none."""
    floats = {"fp32", "fp16", "bf16", "auto"}
    plain = set(cost.config.kv_format.split("/")) <= floats
    return MEANING["waiting"] if plain or cost is reference else MEANING["quantized"]


def _title(costs: Sequence[KVCost], right: KVCost) -> str:
    """The best bargain: the fewest bytes that stay within 1%, else within 5%."""
    for limit in (1, 5):
        near = [c for c in costs if c is not right and abs(change_percent(c, right)) <= limit]
        best = min(near, key=lambda c: c.bytes_per_token, default=None)
        if best and best.bytes_per_token < right.bytes_per_token:
            saved = 1 - best.bytes_per_token / right.bytes_per_token
            return (
                f"{best.label} takes {saved:.0%} fewer bytes than {right.label} "
                f"({mega(best.bytes_per_token, 'B')} a token) and stays within {limit}% of its "
                "perplexity"
            )
    return "What each KV format saves, and what it costs"


def _mean(errors: np.ndarray) -> float:
    return float(errors.mean())


def _along(value: float, ends: list[float]) -> float:
    return (value - ends[0]) / (ends[1] - ends[0])


def _annotation(
    label: list[str], place: tuple[float, float], offset: tuple[int, int]
) -> dict[str, Any]:
    """A label beside its point, tied to it where it stands apart."""
    apart = abs(offset[0]) > 30 or abs(offset[1]) > 40
    return {
        "x": math.log10(place[0]),
        "y": place[1],
        "ax": offset[0],
        "ay": offset[1],
        "text": "/<br>".join(label),
        "showarrow": True,
        "arrowhead": 0,
        "arrowwidth": 1,
        "arrowcolor": INK.muted if apart else "rgba(0,0,0,0)",
        "font": {"size": 14},
        "standoff": 7,
    }


def _places(labels: list[list[str]], points: list[tuple[float, float]]) -> list[tuple[int, int]]:
    """An offset for each label, near its point, such that it covers no other label and no point."""
    points_at = [(x - 7, y - 7, x + 7, y + 7) for x, y in points]
    taken: list[tuple[float, ...]] = []
    places = []
    for i, (lines, (x, y)) in enumerate(zip(labels, points, strict=True)):
        others = taken + points_at[:i] + points_at[i + 1 :]
        wide, high = CHAR * max(map(len, lines)) / 2, LINE * len(lines) / 2
        best: tuple[float, tuple[int, int], list[tuple[float, ...]]] | None = None
        for dx, dy in OFFSETS:
            down = dy - high + LINE / 2 if dy < 0 else dy + high - LINE / 2
            box = (x + dx - wide, y + down - high, x + dx + wide, y + down + high)
            outside = box[0] < 0 or box[2] > PLOT[0] + 20 or box[1] < 0 or box[3] > PLOT[1]
            boxes = [box, *_tie((x, y), (x + dx, y + down))]
            covered = sum(_overlap(mine, other) for mine in boxes for other in others)
            price = 1e6 * outside + 100 * covered + abs(dx) + 1.5 * abs(dy)
            if best is None or price < best[0]:
                best = price, (dx, round(down)), boxes
        assert best is not None
        taken += best[2]
        places.append(best[1])
    return places


def _tie(point: tuple[float, float], label: tuple[float, float]) -> list[tuple[float, ...]]:
    """The line from a point to its label, as small boxes; without what lies in the label."""
    steps = [point[0] + (label[0] - point[0]) * t / 16 for t in range(2, 13)]
    downs = [point[1] + (label[1] - point[1]) * t / 16 for t in range(2, 13)]
    return [(x - 2, y - 2, x + 2, y + 2) for x, y in zip(steps, downs, strict=True)]


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """Area that two boxes (left, top, right, bottom) share."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    return max(0.0, width) * max(0.0, height)
