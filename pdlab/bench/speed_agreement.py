"""Whether all that were measured generated what pdlab does in fp32; if not, how near a tie it was.

Two programs that compute the same model round differently, and greedy decoding turns a rounding
error into another text wherever two tokens are about as probable. So the place of the first
difference says little; what tells is how far apart the two tokens stand there in fp32. Fewer bits
in the weights make the model another one, which may leave the text where there is no tie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import mean
from typing import Any

from torch import Tensor

from pdlab.bench.prompts import passages
from pdlab.bench.speed import SpeedBench
from pdlab.engine import NaiveGenerator
from pdlab.models import Model

NEAR_TIE = 0.1
"""Logits apart: one token is at most 10% more probable than the other."""
Gap = Callable[[list[int], int, int], float]
"""(text so far, one token, another): how many logits the first is ahead."""


@dataclass(frozen=True)
class Difference:
    """The first token of an answer that is not the reference's."""

    position: int
    """Equal tokens before it."""
    gap: float
    """Logits by which the reference's own token is ahead of it, in fp32."""

    @property
    def is_near_tie(self) -> bool:
        return self.gap <= NEAR_TIE


@dataclass(frozen=True)
class Likeness:
    """All answers of one contestant beside those of the reference."""

    name: str
    num_answers: int
    equal_tokens: float
    """Mean over the answers, before the first difference."""
    differences: list[Difference]

    @property
    def num_equal(self) -> int:
        """Answers that are the same to the end."""
        return self.num_answers - len(self.differences)

    @property
    def is_same_model(self) -> bool:
        """Whether all that differs is a near tie."""
        return all(difference.is_near_tie for difference in self.differences)

    def describe(self) -> str:
        """In words, for a table."""
        same = f"{self.num_equal} of {self.num_answers} answers the same"
        if not self.differences:
            return same
        after = mean(difference.position for difference in self.differences)
        widest = max(difference.gap for difference in self.differences)
        how = f"up to {widest:.2g} logits apart" + (", near ties" if self.is_same_model else "")
        return f"{same}; the others part after {after:.0f} tokens, {how}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """Tokens before the first that differs; None where none does."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((i for i, (a, b) in pairs if a != b), None)


def compare(
    name: str,
    reference: Mapping[str, list[list[int]]],
    answers: Mapping[str, list[list[int]]],
    prompts: Mapping[str, list[list[int]]],
    gap: Gap,
) -> Likeness:
    """One contestant's answers beside the reference's, by case."""
    differences, lengths = [], []
    for case in (case for case in reference if case in answers):
        for prompt, ours, theirs in zip(prompts[case], reference[case], answers[case], strict=True):
            at = first_difference(ours, theirs)
            lengths.append(len(ours) if at is None else at)
            if at is not None:
                ahead = gap([*prompt, *ours[:at]], ours[at], theirs[at])
                differences.append(Difference(at, round(ahead, 4)))
    return Likeness(name, len(lengths), mean(lengths) if lengths else 0.0, differences)


def measure_likeness(found: SpeedBench, model: Model, reference: str) -> list[Likeness]:
    """Every contestant beside one of them.

    Args:
        model: in fp32, computed by torch without a cache.
        reference: name of the contestant that all are held against.
    """
    if reference not in found.token_ids:
        return []
    generator = NaiveGenerator(model)

    @cache  # many part at the same place
    def logits(text: tuple[int, ...]) -> Tensor:
        return generator.logits(list(text), last_only=True)[0]

    def gap(text: list[int], one: int, other: int) -> float:
        row = logits(tuple(text))
        return float(row[one] - row[other])

    prompts = {case.name: passages(model, case.batch, case.context) for case in found.cases}
    base = found.token_ids[reference]
    return [
        compare(name, base, answers, prompts, gap)
        for name, answers in found.token_ids.items()
        if name != reference
    ]
