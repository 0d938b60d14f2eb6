"""A drafter that knows what comes, and is wrong as often as it is told to be."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from pdlab.engine.drafting import Outcome
from pdlab.engine.sequence import Sequence
from pdlab.sampling import Draft


@dataclass(eq=False)
class Guess:
    """Drafts of any length, the empty one among them.

    Args:
        truth: the next tokens of a sequence, given how many.
        right: how probable it is that a token is the true one.
    """

    truth: Callable[[Sequence, int], list[int]]
    vocab_size: int
    rng: random.Random
    right: float = 0.8
    longest: int = 6
    seen: set[Sequence] = field(default_factory=set)
    """Those it was asked about and has not heard the end of."""
    outcomes: list[Outcome] = field(default_factory=list)
    closed: bool = False

    def make(self, model, config) -> Guess:
        return self

    def propose(self, sequences: list[Sequence], limits: list[int]) -> list[Draft]:
        assert len(sequences) == len(limits)
        self.seen |= set(sequences)
        return [self._guess(*each) for each in zip(sequences, limits, strict=True)]

    def _guess(self, sequence: Sequence, limit: int) -> Draft:
        assert sequence.num_uncomputed_tokens == 1
        tokens = self.truth(sequence, self.rng.randint(0, min(limit, self.longest)))
        return Draft(
            [
                token if self.rng.random() < self.right else self.rng.randrange(self.vocab_size)
                for token in tokens
            ]
        )

    def learn(self, outcomes: list[Outcome], draft_s: float, step_s: float) -> None:
        assert draft_s > 0
        assert step_s > 0
        self.outcomes += outcomes

    def forget(self, sequence: Sequence) -> None:
        self.seen.discard(sequence)

    def close(self) -> None:
        self.closed = True
