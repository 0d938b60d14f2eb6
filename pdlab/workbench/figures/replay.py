"""What many requests would do to memory: results of replays that run no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log

import plotly.graph_objects as go

from pdlab.workbench.figures.style import WIDTH, styled
from pdlab.workbench.palette import MEANING, MEMORY, THEME, UNKNOWN, text_on

FRAGMENTS: dict[str, tuple[str, str]] = {
    "used": ("holds a token", MEMORY["used"]),
    "reserved": ("reserved for tokens to come", MEANING["waiting"]),
    "internal": ("internal: never written", MEMORY["wasted"]),
    "external": ("external: holes too small", MEANING["preempted"]),
    "free": ("free", THEME["light"].free),
}
"""Name and colour of a part of memory; other keys keep their own name, in grey."""
ROW = 62
"""Height of one bar, in pixels."""
REPLAYED = "simulated: request lengths replayed through an allocator, no model was run"


def fragmentation(
    results: Sequence[tuple[str, Mapping[str, float]]], source: str = REPLAYED
) -> go.Figure:
    """One bar for each way to reserve memory: what its slots hold, as fractions of all memory.

    Args:
        results: (label, fractions by part) from top to bottom; each adds up to 1.
        source: where the numbers come from, for the subtitle.

    Raises:
        ValueError: nothing to compare, or fractions that do not add up to 1.
    """
    if not results:
        raise ValueError("results is empty: it needs at least 1 (label, fractions)")
    for label, fractions in results:
        total = sum(fractions.values())
        if abs(total - 1) > 1e-6:
            raise ValueError(f"results: the fractions of {label!r} add up to {total}, not 1")
    present = {key for _, fractions in results for key, value in fractions.items() if value}
    keys = [key for key in FRAGMENTS if key in present]
    keys += sorted(present - set(FRAGMENTS))
    figure = go.Figure()
    for key in keys:
        name, color = FRAGMENTS.get(key, (key, UNKNOWN))
        values = [fractions.get(key, 0.0) for _, fractions in results]
        figure.add_bar(
            name=name,
            y=[label for label, _ in results],
            x=[100 * v for v in values],
            orientation="h",
            marker={"color": color, "line": {"width": 0}},
            text=[_percent(v) if v >= 0.05 else "" for v in values],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"color": text_on(color), "size": 15},
            hovertemplate="%{y}: %{x:.1f} %<extra>" + name + "</extra>",
        )
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_xaxes(title_text="share of KV memory, averaged over time, %", range=[0, 100])
    height = 230 + ROW * len(results)
    return styled(figure, _fragmentation_title(results), source, height=height, horizontal=True)


def _fragmentation_title(results: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Of the memory that is taken, what holds tokens: paged (or else the best), and the worst.

    Growing by copying may be the fullest, and pays in copies that these bars do not show.
    """
    useful = {label: _useful(fractions) for label, fractions in results}
    paged = [label for label in useful if "paged" in label.lower()]
    named, worst = max(paged or useful, key=useful.__getitem__), min(useful, key=useful.__getitem__)
    title = (
        f"{named[:1].upper()}{named[1:]}: {_percent(useful[named])} of the taken memory "
        "holds tokens"
    )
    return title if named == worst else f"{title}; {worst}: {_percent(useful[worst])}"


def _useful(fractions: Mapping[str, float]) -> float:
    """Of the slots that belong to somebody; holes between them belong to nobody."""
    taken = 1 - fractions.get("free", 0.0) - fractions.get("external", 0.0)
    return fractions.get("used", 0.0) / taken if taken > 0 else 0.0


def hit_rate_by_blocks(
    points: Sequence[tuple[int | None, float]], source: str = REPLAYED
) -> go.Figure:
    """Prefix-cache hit rate (fraction of blocks found) against the size of the pool, log x.

    Args:
        points: (blocks, hit rate); None blocks stands for a cache that never evicts, drawn as a
            dashed line that no pool of any size can pass.
        source: where the numbers come from, for the subtitle.

    Raises:
        ValueError: no point at all.
    """
    if not points:
        raise ValueError("points is empty: it needs at least 1 (blocks, hit rate)")
    finite = sorted((n, rate) for n, rate in points if n is not None)
    infinite = next((rate for n, rate in points if n is None), None)
    figure = go.Figure()
    if infinite is not None:
        ends = [finite[0][0], finite[-1][0]] if finite else [1, 10]
        figure.add_scatter(
            x=ends,
            y=[100 * infinite] * 2,
            mode="lines",
            name="infinite cache",
            line={"color": MEANING["waiting"], "width": 2.5, "dash": "dash"},
            hovertemplate="infinite: %{y:.1f} %<extra></extra>",
        )
    if finite:
        figure.add_scatter(
            x=[n for n, _ in finite],
            y=[100 * rate for _, rate in finite],
            mode="lines+markers",
            name="pool of this size, least recently used evicted first",
            line={"color": MEANING["cached"], "width": 2.5},
            marker={"size": 10},
            hovertemplate="%{x:,} blocks: %{y:.1f} %<extra></extra>",
        )
    ticks = _ticks([n for n, _ in finite])
    figure.update_xaxes(
        type="log",
        title_text="blocks in the pool (log)",
        tickvals=ticks,
        ticktext=[f"{n:,}" for n in ticks],
    )
    figure.update_yaxes(title_text="blocks found in the cache, %", rangemode="tozero")
    return styled(figure, _hit_title(finite, infinite), source)


def _ticks(values: list[int]) -> list[int]:
    """Those of some ascending values, the last first, whose labels fit side by side (log x)."""
    ticks: list[int] = []
    for value in reversed(values):
        needed = (9 * len(f"{value:,}") + 16) / (WIDTH - 140)
        if not ticks or log(ticks[-1] / value) >= needed * log(values[-1] / values[0]):
            ticks.append(value)
    return sorted(set(ticks))


def _hit_title(finite: list[tuple[int, float]], infinite: float | None) -> str:
    if not finite:
        return f"An infinite cache finds {_percent(infinite or 0)} of all blocks"
    blocks, rate = finite[-1]
    title = f"A pool of {blocks:,} blocks finds {_percent(rate)} of all blocks"
    return title if infinite is None else f"{title}, an infinite one {_percent(infinite)}"


def _percent(fraction: float) -> str:
    """0.366 -> `36.6%`, 0.97 -> `97%`: three digits at most."""
    return f"{100 * fraction:.3g}%"
