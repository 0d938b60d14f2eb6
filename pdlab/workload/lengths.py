"""Distributions of lengths: how many tokens a prompt has, or an answer.

A draw takes exactly one number from the random stream, and a greater number gives a greater length:
with one seed, the lengths of two distributions are in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from statistics import NormalDist
from typing import Protocol

from pdlab.requirements import require_int, require_number
from pdlab.workload.synthetic import PERCENTILES, draw
from pdlab.workload.traces import LONGEST_PROMPT

P90_Z = NormalDist().inv_cdf(0.9)
SMALLEST_CHANCE = 2.0**-53
"""Stands for the 0 that `Random.random` may return, where the normal quantile is infinite."""


class Lengths(Protocol):
    """A distribution of tokens."""

    def draw(self, random: Random) -> int:
        """Tokens, at least 1."""


@dataclass(frozen=True)
class Fixed(Lengths):
    """Always the same."""

    num_tokens: int

    def __post_init__(self) -> None:
        require_int("num_tokens", self.num_tokens, 1, LONGEST_PROMPT)

    def draw(self, random: Random) -> int:
        random.random()  # as every draw
        return self.num_tokens


@dataclass(frozen=True)
class Between(Lengths):
    """Uniform from `least` to `most`, both included."""

    least: int
    most: int

    def __post_init__(self) -> None:
        require_int("least", self.least, 1, LONGEST_PROMPT)
        require_int("most", self.most, self.least, LONGEST_PROMPT)

    def draw(self, random: Random) -> int:
        return self.least + int(random.random() * (self.most - self.least + 1))


@dataclass(frozen=True)
class LogNormal(Lengths):
    """Many short and a long tail: half are at most `median`, nine in ten at most `p90`.

    What would be longer than `most` is `most`; with `most` >= `p90` both quantiles hold.
    """

    median: float
    p90: float
    most: int = LONGEST_PROMPT

    def __post_init__(self) -> None:
        require_number("median", self.median, 1, LONGEST_PROMPT)
        require_number("p90", self.p90, self.median, LONGEST_PROMPT)
        require_int("most", self.most, math.ceil(self.p90), LONGEST_PROMPT)

    def draw(self, random: Random) -> int:
        z = NormalDist().inv_cdf(random.random() or SMALLEST_CHANCE)
        length = self.median * (self.p90 / self.median) ** (z / P90_Z)
        return min(max(1, round(length)), self.most)


@dataclass(frozen=True)
class Empirical(Lengths):
    """As in a trace of which the quantiles are known.

    Args:
        quantiles: at `synthetic.PERCENTILES`, for example `AZURE_CODE.prompt_tokens`.
    """

    quantiles: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.quantiles) != len(PERCENTILES):
            raise ValueError(
                f"quantiles has {len(self.quantiles)} values, it must have {len(PERCENTILES)}: "
                "those at synthetic.PERCENTILES"
            )
        for value in self.quantiles:
            require_number("quantiles", value, 1, LONGEST_PROMPT)
        if any(low > high for low, high in pairwise(self.quantiles)):
            raise ValueError("quantiles must not fall")

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Empirical:
        """The distribution of some lengths, for example of all prompts of a trace."""
        if not lengths:
            raise ValueError("lengths is empty: at least 1 is needed")
        ordered = sorted(lengths)
        return cls(tuple(ordered[round((len(ordered) - 1) * p / 100)] for p in PERCENTILES))

    def draw(self, random: Random) -> int:
        return round(draw(random, self.quantiles))
