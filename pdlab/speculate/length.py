"""How many tokens to draft: a fixed number, or as many as pay.

A drafted token pays if it is accepted often enough for what it costs. `AdaptiveLength` knows both
from measurement: how often each sequence's drafts were accepted, and how long drafting and checking
took. It maximizes tokens a second over the batch (the goodput of Liu et al. 2024, "Optimizing
Speculative Decoding for Serving Large Language Models Using Goodput"):

    tokens    for each sequence 1 + a + a^2 + ... over the tokens of its draft
    seconds   plain step + per checked token x tokens of all drafts + per drafted token x longest

Where nothing is known it drafts, and where nothing pays it tries again now and then.
"""

from __future__ import annotations

import math
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
FIRST_DEPTH = 4
"""Draft length while no cost is known."""


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


class Line:
    """seconds = base + slope x amount, as most of the last measurements say.

    Medians of each amount, and the median slope between amounts (Theil 1950, Sen 1968): steps that
    computed a prompt besides, or waited for the processor, do not count by how long they took, and
    an amount that is seldom tried weighs as much as one that is used all the time.
    """

    AMOUNTS, TIMES = 16, 7
    """Amounts that are remembered, and measurements of each; the last ones."""

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}

    def add(self, amount: int, seconds: float) -> None:
        times = self._times.pop(amount, None) or deque(maxlen=self.TIMES)
        times.append(seconds)
        self._times[amount] = times  # the last of them now
        if len(self._times) > self.AMOUNTS:
            del self._times[next(iter(self._times))]

    def fit(self) -> tuple[float, float] | None:
        """(base, slope), none negative; None without a measurement. With one amount alone, what
        more would cost is not known, and taken for nothing: so it will be tried."""
        if not self._times:
            return None
        points = [(amount, median(times)) for amount, times in self._times.items()]
        slopes = [
            (later[1] - first[1]) / (later[0] - first[0])
            for first, later in combinations(points, 2)
        ]
        slope = max(0.0, median(slopes)) if slopes else 0.0
        return max(0.0, median(y - slope * x for x, y in points)), slope


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
    """Choices after which another length is tried, which shows what lengths cost."""
    RETRY, MOST_RETRY = 16, 256
    """Choices without drafts after which some are tried; twice as many each time that they do not
    pay, up to a limit."""
    TRIES = 3
    """Drafts of such a trial."""

    def __init__(self, most: int = MOST_AUTO):
        self.most = most
        self.depth = FIRST_DEPTH
        """Longest draft of the last choice that was not a trial."""
        self.pooled = Acceptance(self.POOLED)
        self.own: dict[Sequence, Acceptance] = {}
        self.drafting = Line()
        self._steps: dict[int, Line] = {}
        self._rate = 0.0
        """Tokens a second that the last choice promised."""
        self._size = 1
        """Sequences of the last choice."""
        self._num_choices = self._num_idle = 0
        self._patience = self.RETRY

    # --- choosing -------------------------------------------------------------------------------

    def choose(self, sequences: Several[Sequence], limits: Several[int]) -> list[int]:
        if not sequences or not any(limits):
            return [0] * len(sequences)
        self._num_choices += 1
        self._size = _size(len(sequences))
        best = self._best(sequences, limits)
        self.depth = max(best)
        if trial := self._trial():
            return [min(trial, limit) for limit in limits]
        return best

    def _trial(self) -> int:
        """Another length to try now; 0 for none."""
        if not self.depth:
            self._num_idle += 1
            if self._num_idle <= self._patience:
                return 0
            if self._num_idle == self._patience + self.TRIES:
                self._num_idle, self._patience = 0, min(2 * self._patience, self.MOST_RETRY)
            return min(FIRST_DEPTH, self.most)
        self._num_idle, self._patience = 0, self.RETRY
        if self._num_choices % self.EXPLORE:
            return 0
        shorter = self._num_choices % (2 * self.EXPLORE) == 0
        return max(1, self.depth // 2) if shorter else min(2 * self.depth, self.most)

    def _best(self, sequences: Several[Sequence], limits: Several[int]) -> list[int]:
        """The lengths with most tokens a second, so far as is known."""
        step = self._steps.get(self._size, Line()).fit()
        drafting = self.drafting.fit()
        if step is None or drafting is None:
            return [min(FIRST_DEPTH, limit) for limit in limits]
        (plain_s, check_s), (start_s, token_s) = step, drafting
        room = np.minimum(limits, self.most)
        depths = np.arange(1, self.most + 1)
        # [sequences, depths]: how likely the token at each depth is to be reached and accepted
        likely = self._estimates(sequences)[:, None] ** depths
        # a token is checked where it brings more than the seconds would bring otherwise; which
        # rate that is, the last choice knows
        taken = (depths <= room[:, None]) & (likely > check_s * self._rate)
        tokens = len(sequences) + (likely * taken).sum(axis=0).cumsum()
        num_taken = taken.sum(axis=0)
        seconds = plain_s + check_s * num_taken.cumsum() + start_s + token_s * depths
        rates = tokens / seconds
        plain_rate = len(sequences) / plain_s if plain_s else math.inf
        at = int(rates.argmax())
        if rates[at] <= plain_rate or not num_taken[0]:
            self._rate = plain_rate if plain_s else 0.0
            return [0] * len(sequences)
        self._rate = float(rates[at])
        lengths: list[int] = taken[:, : at + 1].sum(axis=1).tolist()
        return lengths

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
        self._steps.setdefault(self._size, Line()).add(sum(lengths), step_s)
        if draft_s is not None and lengths:
            self.drafting.add(max(lengths), draft_s)

    def forget(self, sequence: Sequence) -> None:
        self.own.pop(sequence, None)


def _size(num_sequences: int) -> int:
    """Batches of about one size have one line: 1, 2 to 3, 4 to 7, ..."""
    return num_sequences.bit_length()
