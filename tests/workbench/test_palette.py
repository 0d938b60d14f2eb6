"""Colours stay apart for every reader, and their labels stay readable."""

from itertools import combinations

import numpy as np
import pytest

from pdlab.workbench.palette import (
    HEAT,
    MEANING,
    SEQUENCE,
    STAGE,
    THEME,
    contrast,
    css_variables,
    legend,
    rgb,
    sequence_color,
    text_on,
)

# Machado, Oliveira and Fernandes 2009, table 1, severity 1.0.
VISION = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def lab(color: str, vision: str) -> np.ndarray:
    """CIE L*a*b* of a colour as one kind of vision sees it."""
    srgb = np.array(rgb(color)) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(VISION[vision]) @ linear, 0, 1)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    xyz = to_xyz @ seen / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colors", [list(MEANING.values()), SEQUENCE], ids=["meaning", "sequence"])
def test_colors_stay_apart_for_colour_blind_readers(vision: str, colors: list[str]) -> None:
    """A difference of 10 in CIE L*a*b* is seen at a glance (2.3 is just noticeable)."""
    for first, second in combinations(colors, 2):
        distance = np.linalg.norm(lab(first, vision) - lab(second, vision))
        assert distance >= 10, f"{first} and {second} look alike with {vision}: {distance:.1f}"


@pytest.mark.parametrize("color", [*MEANING.values(), *SEQUENCE, *STAGE.values()])
def test_text_on_a_colour_is_readable(color: str) -> None:
    assert contrast(color, text_on(color)) >= 4.2


@pytest.mark.parametrize("theme", THEME.values(), ids=list(THEME))
def test_page_text_is_readable(theme) -> None:
    for ink in (theme.text, theme.muted):
        assert contrast(ink, theme.surface) >= 4.5
        assert contrast(ink, theme.raised) >= 4.5


@pytest.mark.parametrize("theme", HEAT)
def test_heat_moves_steadily_away_from_the_page(theme: str) -> None:
    contrasts = [contrast(color, THEME[theme].surface) for color in HEAT[theme]]
    assert contrasts == sorted(contrasts)


def test_css_has_every_colour_for_the_widgets() -> None:
    css = css_variables()
    for name, color in [*MEANING.items(), *((f"stage-{n}", c) for n, c in STAGE.items())]:
        assert f"--pd-{name}: {color};" in css
    assert 'data-jp-theme-light="false"' in css


def test_ninth_sequence_takes_the_first_colour_again() -> None:
    assert sequence_color(8) == sequence_color(0)


def test_legend_names_only_what_was_asked() -> None:
    assert "prefill" in legend("prefill")
    assert "decode" not in legend("prefill")
