"""Those that wait: who was preempted, in order of turn, and behind them who has never run."""

from __future__ import annotations

import math
from bisect import insort_left
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from numbers import Real
from typing import Any

from pdlab.engine.policies import Policy, QueueView, Rank
from pdlab.engine.sequence import Sequence

Entry = tuple[Rank, int, Sequence]
"""Rank and place in the order of arrival, which is nobody else's; so sequences never compare."""


class WaitingQueue:
    """Says who is next; iterates over the preempted and then over the others as they arrived.

    The wait of those who have never run is bounded. Once `max_overtakes` later ones were admitted
    before the oldest, the oldest is next. Whoever overtook somebody also overtook all who are older
    still, so nobody is ever overtaken more often.

    Args:
        policy: who of those that have never run is next otherwise.
    """

    def __init__(self, policy: Policy, max_overtakes: int):
        self.policy = policy
        self.max_overtakes = max_overtakes
        self._preempted: list[Sequence] = []
        self._new: OrderedDict[Sequence, int] = OrderedDict()
        """By arrival; each with the number of new ones that had left, or were to leave before it,
        when it came."""
        self._num_left = 0
        self._ranked: list[Entry] = []
        """A heap where ranks do not change; those that have left are dropped when they come up."""

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._new

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._new or sequence in self._preempted

    def add(self, sequence: Sequence, view: QueueView) -> None:
        """A new one.

        Raises:
            ValueError: the policy has no rank for it.
        """
        if not self.policy.changes:
            with _naming(self.policy):
                heappush(self._ranked, self._entry(sequence, view))
        self._new[sequence] = self._num_left + len(self._new)

    def put_back(self, sequence: Sequence) -> None:
        """One that was preempted: it has its place before all who were admitted after it."""
        insort_left(self._preempted, sequence, key=lambda s: s.turn)

    def remove(self, sequence: Sequence) -> None:
        """It is admitted, or ends."""
        if sequence in self._new:
            del self._new[sequence]
            self._num_left += 1
        else:
            self._preempted.remove(sequence)

    def next(self, view: QueueView) -> Sequence | None:
        """Who is to be admitted before all others; None if nobody is, or all are paused.

        Raises:
            ValueError: the policy has no rank for one of them.
        """
        for sequence in self._preempted:
            if not sequence.paused:
                return sequence
        oldest, num_overtakes = self._oldest()
        if oldest is None or num_overtakes >= self.max_overtakes:
            return oldest
        if self.policy.changes:
            awake = [self._entry(s, view) for s in self._new if not s.paused]
            return self._first(awake)
        return self._first_ranked()

    def _oldest(self) -> tuple[Sequence | None, int]:
        """The oldest that is awake, and how many overtook it at most."""
        for num_paused, (sequence, num_before) in enumerate(self._new.items()):
            if not sequence.paused:
                return sequence, self._num_left + num_paused - num_before
        return None, 0

    def _first_ranked(self) -> Sequence | None:
        while self._ranked[0][2] not in self._new:
            heappop(self._ranked)
        first = self._ranked[0][2]
        if not first.paused:
            return first
        awake = [e for e in self._ranked if e[2] in self._new and not e[2].paused]
        return self._first(awake)

    def _first(self, entries: list[Entry]) -> Sequence | None:
        with _naming(self.policy):
            return min(entries)[2] if entries else None

    def _entry(self, sequence: Sequence, view: QueueView) -> Entry:
        rank = self.policy.rank(sequence, view)
        parts: tuple[Any, ...] = rank if isinstance(rank, tuple) else (rank,)
        if not all(isinstance(part, Real) and not math.isnan(part) for part in parts):
            raise ValueError(
                f"policy={self.policy}: the rank of {sequence.sequence_id} is {rank!r:.60}, it "
                "must be a number or a tuple of numbers"
            )
        return rank, sequence.arrival, sequence


@contextmanager
def _naming(policy: Policy) -> Iterator[None]:
    """Say whose ranks do not compare."""
    try:
        yield
    except TypeError as error:
        raise ValueError(f"policy={policy} has ranks that do not compare: {error}") from error
