"""What lay beside what: the two lanes of a run, and how much of the host's time they hide."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from pdlab.trace.records import Span, StepRecord
from pdlab.trace.trace import Trace

HOST_STAGES = ("schedule", "draft")
"""What comes before the model's stages in a step without overlap."""


class Piece(NamedTuple):
    """A piece of a lane. Seconds from the beginning of the part that is shown."""

    lane: str
    name: str
    """As of `Span`; or `launch`, until the thread is at work, or `caller`, between two calls of
    `step`."""
    step: int
    start_s: float
    end_s: float
    hidden: bool = False
    """Whether something was computed meanwhile."""

    @property
    def wall_s(self) -> float:
        return self.end_s - self.start_s


class Lanes(NamedTuple):
    """Some steps of a run in a row."""

    pieces: list[Piece]
    wall_s: float
    num_steps: int

    @property
    def step_s(self) -> float:
        """From step to step."""
        return self.wall_s / self.num_steps

    @property
    def host_s(self) -> float:
        """What the caller's thread did, waiting aside."""
        return sum(p.wall_s for p in self.pieces if _works(p))

    @property
    def hidden_s(self) -> float:
        """That part of it during which the model computed."""
        return sum(p.wall_s for p in self.pieces if _works(p) and p.hidden)

    @property
    def compute_share(self) -> float:
        """Part of the time in which the model computed."""
        computed_s = sum(p.wall_s for p in self.pieces if p.lane == "compute")
        return computed_s / self.wall_s if self.wall_s > 0 else 0.0


def _works(piece: Piece) -> bool:
    return piece.lane == "host" and piece.name != "wait"


def spans_of(record: StepRecord) -> list[Span]:
    """The spans of a step; of one without overlap they follow from its stages."""
    if record.spans:
        return record.spans
    spans, at_s = [], record.start_s
    for name in HOST_STAGES:
        if name in record.stage_s:
            spans.append(Span("host", name, at_s, record.stage_s[name]))
            at_s += record.stage_s[name]
    told_s = record.stage_s.get("deliver", 0.0)
    compute_s = max(0.0, record.start_s + record.wall_s - told_s - at_s)
    return [
        *spans,
        Span("compute", "compute", at_s, compute_s),
        Span("host", "wait", at_s, compute_s),
        Span("host", "tell", at_s + compute_s, told_s),
    ]


def lanes(trace: Trace, first: int = 0, num_steps: int = 6) -> Lanes:
    """Some recorded steps, by their place in the trace, from the first's plan to the last's end.

    Args:
        first: place of the first step, counted from 0.
        num_steps: at most so many; there must be one more behind them, to see where they end.

    Raises:
        ValueError: there are not that many steps.
    """
    if not 0 <= first < len(trace.steps) - 1:
        raise ValueError(f"first={first} must leave two of the {len(trace.steps)} steps")
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1")
    shown = trace.steps[first : first + num_steps + 1]
    start_s, end_s = shown[0].start_s, shown[-1].start_s
    host, computed = [], []
    for record in trace.steps[max(0, first - 1) : first + num_steps + 1]:
        for span in spans_of(record):
            piece = _cut(span, record.step, start_s, end_s)
            if piece.wall_s > 0:
                (computed if span.lane == "compute" else host).append(piece)
    host.sort(key=lambda piece: piece.start_s)
    host += _gaps(host, end_s - start_s)
    split = [part for piece in host for part in _split(piece, computed)]
    pieces = sorted([*computed, *split], key=lambda piece: (piece.lane, piece.start_s))
    return Lanes(pieces, end_s - start_s, len(shown) - 1)


def _cut(span: Span, step: int, start_s: float, end_s: float) -> Piece:
    first = min(max(span.start_s, start_s), end_s) - start_s
    return Piece(span.lane, span.name, step, first, min(span.end_s, end_s) - start_s)


def _gaps(host: Sequence[Piece], wall_s: float) -> list[Piece]:
    """What the host did between the engine's pieces: behind a plan it woke the thread, else the
    caller had it."""
    gaps, at_s, name = [], 0.0, "caller"
    for piece in host:
        if piece.start_s > at_s:
            gaps.append(Piece("host", name, piece.step, at_s, piece.start_s))
        at_s = max(at_s, piece.end_s)
        name = "launch" if piece.name in HOST_STAGES else "caller"
    if host and at_s < wall_s:
        gaps.append(Piece("host", "caller", host[-1].step, at_s, wall_s))
    return gaps


def _split(piece: Piece, computed: Sequence[Piece]) -> list[Piece]:
    """A piece of the host, cut where computations begin and end."""
    edges = {t for c in computed for t in (c.start_s, c.end_s) if piece.start_s < t < piece.end_s}
    times = [piece.start_s, *sorted(edges), piece.end_s]
    parts = []
    for a, b in pairwise(times):
        hidden = any(c.start_s <= a and b <= c.end_s for c in computed)
        parts.append(piece._replace(start_s=a, end_s=b, hidden=hidden))
    return parts
