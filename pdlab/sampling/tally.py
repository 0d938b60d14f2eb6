"""Which tokens a sequence has seen, kept up from step to step: what penalties look at."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Tally:
    """The distinct tokens of a prompt and its output, and how often each stands in the output.

    A step costs what is new in it, not what the text is long.
    """

    def __init__(self, num_prompt_tokens: int):
        self._num_prompt = num_prompt_tokens
        self._num_synced = 0
        self._places: dict[int, int] = {}
        self._token_ids = torch.zeros(16, dtype=torch.long)
        self._counts = torch.zeros(16)

    def sync(self, token_ids: Sequence[int]) -> None:
        """Take in those tokens, of prompt and output, that are new."""
        for position in range(self._num_synced, len(token_ids)):
            place = self._place(token_ids[position])
            if position >= self._num_prompt:
                self._counts[place] += 1
        self._num_synced = len(token_ids)

    def fork(self) -> Tally:
        """An independent copy, to go on from here."""
        copy = Tally(self._num_prompt)
        copy._num_synced, copy._places = self._num_synced, dict(self._places)
        copy._token_ids, copy._counts = self._token_ids.clone(), self._counts.clone()
        return copy

    @property
    def token_ids(self) -> Tensor:
        """The distinct tokens, in order of appearance, [num_distinct]."""
        return self._token_ids[: len(self._places)]

    @property
    def counts(self) -> Tensor:
        """How often each stands in the output, float32 [num_distinct]."""
        return self._counts[: len(self._places)]

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            grown = torch.zeros(2 * place, dtype=torch.long), torch.zeros(2 * place)
            grown[0][:place], grown[1][:place] = self._token_ids, self._counts
            self._token_ids, self._counts = grown
        self._token_ids[place] = token_id
        return place
