"""Rejection sampling over a handful of tokens, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rejection:
    """A target's p and a drafter's q over a few tokens.

    Raises:
        ValueError: they differ in length, or do not add up to 1.
    """

    p: Sequence[float]
    q: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.p) != len(self.q):
            raise ValueError(f"p has {len(self.p)} tokens and q {len(self.q)}")
        for name in ("p", "q"):
            values = getattr(self, name)
            if min(values) < 0 or abs(sum(values) - 1) > 1e-6:
                raise ValueError(f"{name}={list(values)} must be at least 0 and add up to 1")

    @property
    def kept(self) -> list[float]:
        """min(p, q): the chance that a token is drafted, and stands."""
        return [min(pair) for pair in zip(self.p, self.q, strict=True)]

    @property
    def acceptance(self) -> float:
        """The chance that whatever is drafted stands."""
        return sum(self.kept)

    @property
    def missing(self) -> list[float]:
        """max(0, p - q): what is still lacking of p."""
        return [max(0.0, p - q) for p, q in zip(self.p, self.q, strict=True)]

    @property
    def residual(self) -> list[float]:
        """`missing`, normalized: where the token is drawn from when a drafted one is rejected."""
        total = sum(self.missing)
        return [part / total if total else 0.0 for part in self.missing]
