"""How many tokens to draft: a fixed number, or as many as pay.

A drafted token pays if it is accepted often enough for what it costs. `AdaptiveLength` knows both
from measurement: how often each sequence's drafts were accepted, and how long drafting and checking
took. It maximizes tokens a second over the batch (the goodput of Liu et al. 2024, "Optimizing
Speculative Decoding for Serving Large Language Models Using Goodput"):

    tokens    for each sequence 1 + a + a^2 + ... over the tokens of its draft
    seconds   a step that checks so many tokens + drafting as many as the longest draft has

Where nothing is known it drafts, longer and longer as long as that pays; where nothing pays it
tries again now and then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Protocol

import numpy as np

from pdlab.engine.drafting import Outcome
from pdlab.engine.sequence import Sequence
from pdlab.requirements import require_int, shown
from pdlab.speculate.formula import LONGEST_DRAFT

AUTO = "auto"
"""The value of `num_tokens` that asks for an adaptive length."""
MOST_AUTO = 16
"""Longest adaptive draft."""


def check_num_tokens(num_tokens: int | str) -> None:
    """Raise a ValueError unless it is a draft length."""
    if num_tokens != AUTO:
        if isinstance(num_tokens, str):
            raise ValueError(f"num_tokens={shown(num_tokens)} must be a number of tokens or {AUTO}")
        require_int("num_tokens", num_tokens, least=0, most=LONGEST_DRAFT)


def length_of(num_tokens: int | str) -> Length:
    """What decides about lengths, for a number of tokens or `auto`."""
    return FixedLength(num_tokens) if isinstance(num_tokens, int) else AdaptiveLength()


class Length(Protocol):
    """Decides how many tokens to draft for each sequence."""

    def choose(self, sequences: Several[Sequence], limits: Several[int]) -> list[int]:
        """Draft lengths for the next step, each at most its limit."""
        ...

    def learn(self, outcomes: Several[Outcome], draft_s: float | None, step_s: float) -> None:
        """What came of a step's drafts, and what it took; `draft_s` is None where drafting did
        other work besides."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """It has ended."""
        ...


@dataclass(frozen=True)
class FixedLength:
    """Always as many, where there is room."""

    num_tokens: int

    def choose(self, sequences: Several[Sequence], limits: Several[int]) -> list[int]:
        return [min(self.num_tokens, limit) for limit in limits]

    def learn(self, outcomes: Several[Outcome], draft_s: float | None, step_s: float) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass


@dataclass
class Acceptance:
    """How often drafted tokens were accepted, the last ones counting most."""

    memory: float
    """What is left of a draft's weight when the next one comes."""
    accepted: float = 0.0
    looked_at: float = 0.0

    def add(self, num_accepted: int, num_drafted: int) -> None:
        """Tokens behind the first rejected one were not looked at."""
        self.accepted = self.memory * self.accepted + num_accepted
        self.looked_at = self.memory * self.looked_at + min(num_accepted + 1, num_drafted)

    def estimate(self, prior: float, weight: float) -> float:
        """Acceptance, where `weight` tokens more would have been accepted as `prior` says."""
        return (self.accepted + weight * prior) / (self.looked_at + weight)


class Times:
    """Seconds by amount, as the last measurements say.

    Of each amount the median counts: steps that computed a prompt besides, or waited for the
    processor, do not count by how long they took. Between amounts lies a straight line, and beyond
    them goes the median slope between any two (Theil 1950, Sen 1968). More never takes less.
    """

    AMOUNTS, REPEATS = 16, 7
    """Amounts that are remembered, and measurements of each; the last ones."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def add(self, amount: int, seconds: float) -> None:
        measured = self._seconds.pop(amount, None) or deque(maxlen=self.REPEATS)
        measured.append(seconds)
        self._seconds[amount] = measured  # the last of them now
        if len(self._seconds) > self.AMOUNTS:
            del self._seconds[next(iter(self._seconds))]

    @property
    def largest(self) -> int:
        """The largest amount that is remembered; -1 for none."""
        return max(self._seconds, default=-1)

    @property
    def _medians(self) -> list[tuple[int, float]]:
        return sorted((amount, median(each)) for amount, each in self._seconds.items())

    @property
    def slope(self) -> float:
        """Seconds that one more takes; 0 while one amount alone is known."""
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(self._medians, 2)]
        return max(0.0, median(slopes)) if slopes else 0.0

    def at(self, amounts: np.ndarray) -> np.ndarray:
        """Seconds of these amounts; something must have been measured."""
        known, seconds = np.array(self._medians).T
        seconds = np.maximum.accumulate(seconds)
        beyond = np.maximum(amounts - known[-1], 0) - np.maximum(known[0] - amounts, 0)
        return np.maximum(np.interp(amounts, known, seconds) + self.slope * beyond, 0.0)


class AdaptiveLength:
    """As many tokens as are worth it; see the module."""

    PRIOR = 0.8
    """Acceptance that is believed of drafts nobody has seen yet."""
    OWN, POOLED = 0.95, 0.98
    """How long a sequence's own acceptance, and that of all, are remembered, draft by draft."""
    PRIOR_WEIGHT = 4.0
    """Tokens that the acceptance of all counts for in that of one."""
    CERTAIN = 0.98
    """Believed acceptance stays below: no draft is worth any length."""
    EXPLORE = 16
    """Choices after which another length is tried, which shows what lengths cost now."""
    RETRY, MOST_RETRY = 16, 256
    """Choices without drafts after which some are tried; twice as many each time that they do not
    pay, up to a limit."""
    TRIES = 3
    """Choices of such a trial."""

    def __init__(self, most: int = MOST_AUTO):
        self.most = most
        self.depth = 0
        """Longest draft of the last choice that was not a trial."""
        self.pooled = Acceptance(self.POOLED)
        self.own: dict[Sequence, Acceptance] = {}
        self.drafting = Times()
        """By the length of the longest draft."""
        self.steps: dict[int, Times] = {}
        """By the tokens of all drafts; for each size of batch."""
        self.tried: dict[int, int] = {}
        """The longest drafts tried in batches of a size."""
        self._size = 1
        """Sequences of the last choice."""
        self._rate = 0.0
        """Tokens a second that it promised."""
        self._num_choices = self._num_idle = 0
        self._patience = self.RETRY

    # --- choosing -------------------------------------------------------------------------------

    def choose(self, sequences: Several[Sequence], limits: Several[int]) -> list[int]:
        if not sequences or not any(limits):
            return [0] * len(sequences)
        self._num_choices += 1
        self._size = _size(len(sequences))
        if self._size not in self.tried:  # what a plain step takes here
            self.tried[self._size] = 0
            return [0] * len(sequences)
        best = self._best(sequences, limits)
        self.depth = max(best)
        trial = self._trial()
        if trial is not None:
            best = [min(trial, limit) for limit in limits]
        self.tried[self._size] = max(self.tried[self._size], *best)
        return best

    def _trial(self) -> int | None:
        """Another length to try now; None for none."""
        if self.depth:
            self._num_idle, self._patience = 0, self.RETRY
            if self._num_choices % self.EXPLORE:
                return None
            longer = self._num_choices % (2 * self.EXPLORE)
            return min(2 * self.depth, self.most) if longer else 0
        self._num_idle += 1
        if self._num_idle <= self._patience:
            return None
        if self._num_idle >= self._patience + self.TRIES:
            self._num_idle, self._patience = 0, min(2 * self._patience, self.MOST_RETRY)
        return 1

    def _best(self, sequences: Several[Sequence], limits: Several[int]) -> list[int]:
        """The lengths with most tokens a second, so far as is known.

        Lengths grow step by step, at most to twice what was tried in such a batch: what comes
        beyond may cost more than it looks, where a processor has no more to spare.
        """
        steps = self.steps.get(self._size)
        cap = min(self.most, max(1, 2 * self.tried[self._size]))
        if steps is None or not self.tried[self._size]:
            return [min(1, limit) for limit in limits]
        depths = np.arange(1, cap + 1)
        # [sequences, depths]: how likely the token at each depth is to be reached and accepted
        likely = self._estimates(sequences)[:, None] ** depths
        # a token is checked where it brings more than its seconds would bring otherwise; at which
        # rate that is, the last choice knows
        taken = (depths <= np.array(limits)[:, None]) & (likely > steps.slope * self._rate)
        tokens = len(sequences) + (likely * taken).sum(axis=0).cumsum()
        seconds = steps.at(taken.sum(axis=0).cumsum()) + self._drafting_s(depths)
        rates = np.append(len(sequences) / steps.at(np.zeros(1)), tokens / seconds)
        depth = int(rates.argmax())  # the shortest of equals
        self._rate = float(rates[depth])
        lengths: list[int] = taken[:, :depth].sum(axis=1).tolist()
        return lengths

    def _drafting_s(self, depths: np.ndarray) -> np.ndarray:
        return self.drafting.at(depths) if self.drafting.largest >= 0 else np.zeros(len(depths))

    def _estimates(self, sequences: Several[Sequence]) -> np.ndarray:
        pooled = self.pooled.estimate(self.PRIOR, self.PRIOR_WEIGHT)
        unknown = Acceptance(self.OWN)
        estimates = [
            self.own.get(sequence, unknown).estimate(pooled, self.PRIOR_WEIGHT)
            for sequence in sequences
        ]
        return np.minimum(estimates, self.CERTAIN)

    # --- learning -------------------------------------------------------------------------------

    def learn(self, outcomes: Several[Outcome], draft_s: float | None, step_s: float) -> None:
        drafted = [outcome for outcome in outcomes if outcome.num_drafted]
        for outcome in drafted:
            own = self.own.setdefault(outcome.sequence, Acceptance(self.OWN))
            for acceptance in (own, self.pooled):
                acceptance.add(outcome.num_accepted, outcome.num_drafted)
        lengths = [outcome.num_drafted for outcome in drafted]
        self.steps.setdefault(self._size, Times()).add(sum(lengths), step_s)
        if draft_s is not None and lengths:
            self.drafting.add(max(lengths), draft_s)

    def forget(self, sequence: Sequence) -> None:
        self.own.pop(sequence, None)


def _size(num_sequences: int) -> int:
    """Batches of about one size have their times in common: 1, 2 to 3, 4 to 7, ..."""
    return num_sequences.bit_length()
