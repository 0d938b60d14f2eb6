"""Prompt lookup: what followed the last tokens when they stood in the text before.

Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference". It needs no
model and no memory but an index, and pays where the output repeats the prompt or itself: edits of a
text or of code, answers that quote, loops.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass

from pdlab.engine.config import EngineConfig
from pdlab.engine.drafting import Outcome
from pdlab.engine.sequence import Sequence
from pdlab.models import Model
from pdlab.requirements import require_int
from pdlab.sampling import NO_DRAFT, Draft
from pdlab.speculate.length import Length, check_num_tokens, length_of


@dataclass(frozen=True)
class PromptLookup:
    """Draft what followed the last few tokens when they stood in prompt or output before.

    The longest match counts, and of several the most recent one: what was written last is the
    likeliest to go on as before. (vLLM and transformers take the first, llama.cpp the last.)

    Raises:
        ValueError: a field is out of range.
    """

    num_tokens: int | str = 5
    """Tokens of a draft; or `auto`, as many as measurements say are worth it."""
    longest: int = 4
    """Most last tokens that are looked for."""
    shortest: int = 2
    """Fewest."""

    def __post_init__(self) -> None:
        check_num_tokens(self.num_tokens)
        require_int("longest", self.longest, least=1, most=32)
        require_int("shortest", self.shortest, least=1)
        if self.shortest > self.longest:
            raise ValueError(f"shortest={self.shortest} is more than longest={self.longest}")

    def make(self, model: Model, config: EngineConfig) -> LookupDrafter:
        return LookupDrafter(self)


class LookupDrafter:
    """Keeps an index of every sequence that decodes."""

    def __init__(self, knobs: PromptLookup):
        self.knobs = knobs
        self.length: Length = length_of(knobs.num_tokens)
        self.indexes: dict[Sequence, NgramIndex] = {}

    def propose(self, sequences: Several[Sequence], limits: Several[int]) -> list[Draft]:
        wanted = self.length.choose(sequences, limits)
        return [
            Draft(self._look_up(sequence, num_tokens)) if num_tokens else NO_DRAFT
            for sequence, num_tokens in zip(sequences, wanted, strict=True)
        ]

    def _look_up(self, sequence: Sequence, num_tokens: int) -> list[int]:
        index = self.indexes.get(sequence)
        if index is None:
            index = NgramIndex(self.knobs.longest, self.knobs.shortest)
            self.indexes[sequence] = index
        return index.continuation(sequence.token_ids, num_tokens)

    def learn(self, outcomes: Several[Outcome], draft_s: float, step_s: float) -> None:
        self.length.learn(outcomes, draft_s, step_s)

    def forget(self, sequence: Sequence) -> None:
        self.indexes.pop(sequence, None)
        self.length.forget(sequence)

    def close(self) -> None:
        self.indexes.clear()


class NgramIndex:
    """Where each n-gram of a growing text ended last, for n from `shortest` to `longest`.

    A new token costs `longest - shortest + 1` entries, a question as many look-ups; neither grows
    with the text. Entering a token again changes nothing, so an interrupt does no harm.
    """

    def __init__(self, longest: int, shortest: int):
        self.sizes = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        """The position behind the last occurrence, for all n: tuples differ in length."""
        self._num_indexed = 0
        """Tokens that something is known to follow, and that are in the index."""

    def continuation(self, token_ids: Several[int], num_tokens: int) -> list[int]:
        """What followed the longest suffix that stands in the text before; [] if none does.

        A match may overlap the end of the text: in a loop, the draft goes on with its own tokens,
        as copies do in LZ77 (Ziv and Lempel 1977).
        """
        self._extend(token_ids)
        end = len(token_ids)
        for size in self.sizes:
            if size < end and (at := self._ends.get(tuple(token_ids[end - size :]))):
                followed = list(token_ids[at : at + num_tokens])
                while len(followed) < num_tokens:
                    followed += followed[: num_tokens - len(followed)]
                return followed
        return []

    def _extend(self, token_ids: Several[int]) -> None:
        """Enter the n-grams of those tokens that are new; the last token has no successor yet."""
        for end in range(self._num_indexed + 1, len(token_ids)):
            for size in self.sizes:
                if size <= end:
                    self._ends[tuple(token_ids[end - size : end])] = end
            self._num_indexed = end
