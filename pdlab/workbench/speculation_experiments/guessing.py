"""Drafters for learning: one that is always wrong, and one that calls the learner's function."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

from pdlab.engine.config import EngineConfig
from pdlab.engine.drafting import Outcome
from pdlab.engine.sequence import Sequence
from pdlab.models import Model
from pdlab.sampling import Draft

Guess = Callable[[list[int], int], list[int]]
"""(token ids of prompt and output so far, how many to guess) -> those that may follow."""


@dataclass(frozen=True)
class Guessing:
    """Speculation with a function: `EngineConfig(speculation=Guessing(guess))`.

    What it returns beyond the number asked for is cut off. Errors in it end the engine's step.
    """

    guess: Guess
    num_tokens: int = 5

    def make(self, model: Model, config: EngineConfig) -> _Calling:
        return _Calling(self)


class _Calling:
    """A `pdlab.engine.drafting.Drafter` with nothing to remember."""

    def __init__(self, knobs: Guessing):
        self._knobs = knobs

    def propose(self, sequences: Several[Sequence], limits: Several[int]) -> list[Draft]:
        drafts = []
        for sequence, limit in zip(sequences, limits, strict=True):
            num_tokens = min(self._knobs.num_tokens, limit)
            guessed = self._knobs.guess(list(sequence.token_ids), num_tokens) if num_tokens else []
            drafts.append(Draft([int(token) for token in guessed[:num_tokens]]))
        return drafts

    def learn(self, outcomes: Several[Outcome], draft_s: float, step_s: float) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass

    def close(self) -> None:
        pass


class Blind(_Calling):
    """Guesses one token over and over, as often as it is told: what checking costs, whatever is
    guessed. It is its own `Speculation`."""

    def __init__(self, num_tokens: int = 0, token_id: int = 1):
        super().__init__(Guessing(lambda _ids, n: [token_id] * n, num_tokens))

    def make(self, model: Model, config: EngineConfig) -> Blind:
        return self

    def set(self, num_tokens: int) -> None:
        """From the next step on."""
        self._knobs = Guessing(self._knobs.guess, num_tokens)
