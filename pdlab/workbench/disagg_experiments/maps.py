"""Reads a map of who wins where, as a `WinMap` shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

CORNERS = {
    (False, True): "the first token must come soon, and the pace may be slow",
    (True, False): "the pace must be quick, and the first token may take its time",
    (False, False): "both must be quick",
    (True, True): "neither is urgent",
}
"""By whether the limit on the first token is wide, and that on the pace."""


def corner(shown: Mapping[str, Any], mode: str) -> str:
    """In which part of a map a mode wins most; `everywhere`, or `nowhere`."""
    place, cells = shown["modes"].index(mode), shown["best_modes"]
    wins = np.array([[bool(best) and best[0] == place for best in row] for row in cells])
    if not wins.any():
        return "nowhere"
    if all(place in best for row in cells for best in row if best):
        return "everywhere"
    y, x = (n // 2 for n in wins.shape)
    parts = {
        (False, False): wins[:y, :x],
        (True, False): wins[:y, x:],
        (False, True): wins[y:, :x],
        (True, True): wins[y:, x:],
    }
    return CORNERS[max(parts, key=lambda place: float(parts[place].mean()))]


def goodput_at(shown: Mapping[str, Any], mode: str, ttft_s: float, tpot_s: float) -> float:
    """Requests a second and device of a mode, at the pair of limits of the map that is nearest."""
    y, x = _nearest(shown["tpots_s"], tpot_s), _nearest(shown["ttfts_s"], ttft_s)
    return float(shown["goodput"][shown["modes"].index(mode)][y][x])


def _nearest(values: Sequence[float], wanted: float) -> int:
    return int(np.argmin(np.abs(np.log(np.array(values) / wanted))))
