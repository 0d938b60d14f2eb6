"""One colour for one meaning, in every figure and every widget.

Meanings start from the Okabe-Ito colours (Okabe and Ito 2008), sequences from the muted scheme of
Paul Tol (2021), which stay apart for colour-blind readers; the darkest are lightened so that they
show on a dark page too. Plotly figures read the constants; widgets receive them as CSS variables.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Theme = Literal["light", "dark"]

MEANING: dict[str, str] = {
    "prefill": "#0072B2",
    "decode": "#E07B00",
    "cached": "#009E73",
    "quantized": "#CC79A7",
    "transfer": "#56B4E9",
    "preempted": "#8C3B00",
    "wasted": "#F0E442",
    "waiting": "#5F6670",
    "draft": "#8638FA",
    "free": "#E3E6EA",
}
"""What a colour says. `free` is the light-theme value; the dark theme darkens it (see `THEME`)."""

SEQUENCE: tuple[str, ...] = (
    "#5A4FCF",
    "#88CCEE",
    "#DDCC77",
    "#1F8A3E",
    "#CC6677",
    "#AA4499",
    "#44AA99",
    "#9C2F62",
)
"""Colours of requests, in order of arrival; the ninth request takes the first again."""

RUN: tuple[str, ...] = tuple(SEQUENCE[i] for i in (0, 4, 3, 7, 6, 5, 1, 2))
"""Colours of whole runs that are compared; lines have a dash pattern each, too."""

STAGE: dict[str, str] = {
    "schedule": "#C3C8CF",
    "draft": MEANING["draft"],
    "prepare": "#A6ADB7",
    "embed": "#94CBEC",
    "qkv": "#5DA899",
    "attention": "#5A4FCF",
    "output": "#B39DDB",
    "mlp": "#DCCD7D",
    "logits": "#C26A77",
    "forward": "#587AA4",
    "probe": "#D9D2E4",
    "sample": "#7E8894",
    "deliver": "#59626E",
}
"""Stages of a step: the model's layers and a drafter's guesses in colour, the engine's own work in
greys. `forward` is all layers at once, where a CUDA graph replays them."""

MOVED: dict[str, str] = {
    "weights": "#7E8894",
    "kv_read": MEANING["cached"],
    "kv_write": MEANING["transfer"],
}
"""Bytes moved in a step, by part."""

MEMORY: dict[str, str] = {
    "weights": MOVED["weights"],
    "used": MEANING["cached"],
    "wasted": MEANING["wasted"],
    "swapped": MEANING["transfer"],
    "open": MEANING["quantized"],
    "activations": STAGE["output"],
}
"""Where bytes are. Free memory has the colour of `free`; free blocks that keep a prefix are hatched
with the colour of `used`."""

UNKNOWN = "#9AA1AB"
"""For a stage or a part that this palette has no colour for yet."""


class ThemeColors(NamedTuple):
    """Colours that depend on the page behind them."""

    surface: str
    raised: str
    text: str
    muted: str
    grid: str
    free: str


THEME: dict[Theme, ThemeColors] = {
    "light": ThemeColors("#FFFFFF", "#F6F7F9", "#1B1F24", "#59626E", "#DDE1E6", MEANING["free"]),
    "dark": ThemeColors("#111316", "#1C2025", "#E8EAED", "#A3ABB6", "#363C44", "#343A42"),
}

HEAT: dict[Theme, tuple[str, ...]] = {
    "light": ("#F7FBFF", "#C6DBEF", "#6BAED6", "#2171B5", "#08306B"),
    "dark": ("#1A222B", "#14486F", "#2F86C9", "#8CC4EA", "#F2F9FF"),
}
"""Attention weights from 0 to 1: one hue that moves away from the page, so more is stronger."""


def phase_color(phase: str) -> str:
    """Colour of a step's or a sequence's phase; a mixed step takes the transfer blue."""
    return {"mixed": MEANING["transfer"], "idle": MEANING["waiting"]}.get(
        phase, MEANING.get(phase, UNKNOWN)
    )


def sequence_color(index: int) -> str:
    """Colour of the request that arrived as number `index`, counted from 0."""
    return SEQUENCE[index % len(SEQUENCE)]


def run_color(index: int) -> str:
    """Colour of run number `index` of those compared, counted from 0."""
    return RUN[index % len(RUN)]


def all_colors() -> list[str]:
    """Every colour of the palette once, for pictures that must keep them exactly."""
    themed = [color for theme in THEME for color in _themed(theme).values()]
    return list(dict.fromkeys([*MEANING.values(), *SEQUENCE, *STAGE.values(), *themed]))


def stage_color(stage: str) -> str:
    return STAGE.get(stage, UNKNOWN)


OVERLAP: dict[str, str] = {
    "schedule": STAGE["schedule"],
    "draft": MEANING["draft"],
    "launch": STAGE["deliver"],
    "compute": MEANING["decode"],
    "wait": MEANING["free"],
    "book": MEANING["prefill"],
    "tell": MEANING["cached"],
    "caller": MEANING["transfer"],
}
"""What the host does, and the model, in a step with overlap."""


def overlap_color(kind: str) -> str:
    return OVERLAP.get(kind, UNKNOWN)


def text_on(color: str) -> str:
    """Black or white, whichever reads better on `color` (relative luminance, WCAG 2.2)."""
    return "#FFFFFF" if contrast(color, "#FFFFFF") >= contrast(color, "#1B1F24") else "#1B1F24"


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2, 1.4.3)."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def rgb(color: str) -> tuple[int, int, int]:
    """`#RRGGBB` as three numbers from 0 to 255."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def legend(*meanings: str) -> str:
    """An HTML legend for some meanings, for a Markdown or HTML cell; all of them by default."""
    swatch = (
        '<span style="white-space:nowrap;margin-right:1.2em"><span style="display:inline-block;'
        "width:.85em;height:.85em;border-radius:3px;margin-right:.4em;vertical-align:-.05em;"
        'background:{color}"></span>{name}</span>'
    )
    names = meanings or tuple(MEANING)
    return "".join(swatch.format(color=MEANING[name], name=name) for name in names)


def css_variables() -> str:
    """The palette as CSS: `--pd-prefill`, `--pd-seq-0`, `--pd-stage-mlp`, and both themes."""
    fixed = {name: color for name, color in MEANING.items() if name != "free"}
    fixed |= {f"on-{name}": text_on(color) for name, color in fixed.items()}
    fixed |= {f"seq-{i}": color for i, color in enumerate(SEQUENCE)}
    fixed |= {f"seq-on-{i}": text_on(color) for i, color in enumerate(SEQUENCE)}
    fixed |= {f"run-{i}": color for i, color in enumerate(RUN)}
    fixed |= {f"stage-{name}": color for name, color in STAGE.items()}
    fixed |= {f"stage-on-{name}": text_on(color) for name, color in STAGE.items()}
    fixed |= {f"moved-{name}": color for name, color in MOVED.items()}
    fixed |= {f"mem-{name}": color for name, color in MEMORY.items()}
    fixed |= {"unknown": UNKNOWN}
    light = _css_rule(".pdlab", fixed | _themed("light"))
    return light + _css_rule('body[data-jp-theme-light="false"] .pdlab', _themed("dark"))


def _themed(theme: Theme) -> dict[str, str]:
    """The colours that depend on the page behind them, by CSS name."""
    heat = {f"heat-{i}": color for i, color in enumerate(HEAT[theme])}
    return THEME[theme]._asdict() | heat


def _css_rule(selector: str, colors: dict[str, str]) -> str:
    lines = "".join(f"  --pd-{name}: {color};\n" for name, color in colors.items())
    return f"{selector} {{\n{lines}}}"


def _luminance(color: str) -> float:
    def linear(channel: int) -> float:
        c = channel / 255
        return c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4

    red, green, blue = map(linear, rgb(color))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
