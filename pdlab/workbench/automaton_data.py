"""A byte automaton as a drawing: where its states stand, and what is written on its arrows."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from pdlab.sampling.automaton import DEAD, START, ByteAutomaton

MAX_DRAWN = 30
"""States up to which an automaton can be taken in at a glance."""
MAX_COLUMNS = 6
LANE = 0.3
"""Height of a lane between two bands, in rows."""
MAX_RANGES = 3
"""Ranges written on an arrow; more are in its tooltip."""


def automaton_drawing(automaton: ByteAutomaton) -> dict[str, Any] | None:
    """The states on a grid, in the order in which a text can reach them; None if they are too many.

    A state stands in the column of its distance from the start. Columns that do not fit side by
    side go on in a band below; an edge that leads there runs along a lane between the bands. An
    edge has its ends, a label, and all its bytes in words.
    """
    if automaton.num_states > MAX_DRAWN:
        return None
    edges = _edges(automaton)
    columns = _columns(edges)
    num_bands = -(-len(columns) // MAX_COLUMNS)
    width = -(-len(columns) // num_bands)
    bands = [columns[i : i + width] for i in range(0, len(columns), width)]
    band_of = {s: i for i, band in enumerate(bands) for column in band for s in column}
    places: dict[int, tuple[float, float]] = {}
    lanes: dict[tuple[int, int], float] = {}
    top = 0.0
    for number, band in enumerate(bands):
        for edge in edges:
            if band_of[edge[0]] < number == band_of[edge[1]]:
                lanes[edge] = top + LANE / 2
                top += LANE
        height = max(len(column) for column in band)
        for x, column in enumerate(band):
            for y, state in enumerate(column):
                places[state] = (float(x), top + (height - len(column)) / 2 + y)
        top += height
    return {
        "states": [
            {"x": places[s][0], "y": places[s][1], "accepting": bool(automaton.accepting[s])}
            for s in range(automaton.num_states)
        ],
        "edges": [
            {
                "from": edge[0],
                "to": edge[1],
                "label": label(values),
                "all": label(values, most=None),
                "lane": lanes.get(edge),
            }
            for edge, values in edges.items()
        ],
        "columns": width,
        "rows": top,
    }


def _edges(automaton: ByteAutomaton) -> dict[tuple[int, int], list[int]]:
    """The bytes that lead from a state to another, for each such pair."""
    found: dict[tuple[int, int], list[int]] = {}
    for state, byte in zip(*np.nonzero(automaton.table != DEAD), strict=True):
        target = int(automaton.table[state, byte])
        found.setdefault((int(state), target), []).append(int(byte))
    return found


def _columns(edges: dict[tuple[int, int], list[int]]) -> list[list[int]]:
    """States by their distance from the start, each column in the order of the one before."""
    columns, seen = [[START]], {START}
    while columns[-1]:
        reached = [b for a in columns[-1] for (source, b) in edges if source == a]
        columns.append(list(dict.fromkeys(b for b in reached if b not in seen)))
        seen.update(reached)
    return columns[:-1]


def label(values: list[int], most: int | None = MAX_RANGES) -> str:
    """Some bytes, in rising order, as ranges: `0–9 a–f ‘_’`, hexadecimal beyond ASCII."""
    if len(values) == 256:
        return "any byte"
    runs = [
        [value for _, value in run]
        for _, run in groupby(enumerate(values), key=lambda pair: pair[1] - pair[0])
    ]
    parts = [_run(run[0], run[-1]) for run in runs]
    if most is not None and len(parts) > most:
        parts = [*parts[: most - 1], "…"]
    return " ".join(parts)


def _run(first: int, last: int) -> str:
    if first == last:
        return _byte(first)
    between = "" if last == first + 1 else "–"
    return f"{_byte(first)}{between}{_byte(last)}"


NAMED = {9: "tab", 10: "↵", 13: "CR", 32: "space"}


def _byte(value: int) -> str:
    if value in NAMED:
        return NAMED[value]
    if not 32 < value < 127:
        return f"{value:02X}"
    return chr(value) if chr(value).isalnum() else f"‘{chr(value)}’"


def path_of(automaton: ByteAutomaton, state: int, data: bytes) -> list[int]:
    """The states that some bytes lead through, from `state` to where they no longer fit."""
    states = [state]
    for byte in data:
        state = automaton.run(bytes([byte]), state)
        if state == DEAD:
            break
        states.append(state)
    return states
