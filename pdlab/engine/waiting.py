"""Those that wait: who was preempted, in order of turn, and behind them who has never run."""

from __future__ import annotations

import math
from bisect import bisect_left, insort_left
from collections import OrderedDict
from collections.abc import Container, Iterator
from itertools import islice
from numbers import Real
from typing import Any

from pdlab.engine.policies import Policy, PolicyError, QueueView, Rank
from pdlab.engine.sequence import Sequence

Entry = tuple[Rank, int, Sequence]
"""Rank and place in the order of arrival, which is nobody else's; so sequences never compare."""


class WaitingQueue:
    """Says who is next; iterates over the preempted and then over the new, as they arrived.

    The wait of the new, who have never run, is bounded. Once `max_overtakes` later ones were
    admitted before the oldest, the oldest is next. Whoever overtook somebody also overtook all who
    are older still, so nobody is ever overtaken more often.

    Args:
        policy: who of the new is next otherwise.
    """

    def __init__(self, policy: Policy, max_overtakes: int):
        self.policy = policy
        self.max_overtakes = max_overtakes
        self._preempted: list[Sequence] = []
        self._new: OrderedDict[Sequence, int] = OrderedDict()
        """By arrival; each with how many new ones would have been admitted by its turn, if nobody
        overtook it."""
        self._num_admitted = 0
        self._ranked: list[Entry] = []
        """The new in order of rank; where ranks change, as it was in `_view`."""
        self._entries: dict[Sequence, Entry] = {}
        self._view: QueueView | None = None
        self._unranked: dict[Sequence, PolicyError] = {}

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._preempted
        yield from self._new

    @property
    def eldest(self) -> Sequence | None:
        """Whose turn, or else whose arrival, was first."""
        return next(iter(self), None)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._new or sequence in self._preempted

    def add(self, sequence: Sequence, view: QueueView) -> None:
        """A new one.

        Raises:
            PolicyError: the policy has no rank for it.
        """
        if not self.policy.changes:
            self._rank_one(sequence, view)
        self._new[sequence] = self._num_admitted + len(self._new)

    def put_back(self, sequence: Sequence) -> None:
        """One that was preempted: it has its place before all who were admitted after it."""
        insort_left(self._preempted, sequence, key=lambda s: s.turn)

    def remove(self, sequence: Sequence) -> None:
        """It is admitted, and has its turn; or it ends."""
        if sequence not in self._new:
            self._preempted.remove(sequence)
            return
        del self._new[sequence]
        if sequence.turn:
            self._num_admitted += 1
        else:
            for later in self._new:
                self._new[later] -= later.arrival > sequence.arrival
        if entry := self._entries.pop(sequence, None):
            del self._ranked[bisect_left(self._ranked, entry)]

    # --- who is next ----------------------------------------------------------------------------

    def rank(self, view: QueueView) -> None:
        """Ask the policy about all the new, where ranks change; see `take_unranked`."""
        if not self.policy.changes or view is self._view:
            return
        self._view, self._ranked, self._entries, self._unranked = None, [], {}, {}
        for sequence in islice(self._new, self.policy.most_ranked):
            try:
                self._rank_one(sequence, view)
            except PolicyError as error:
                self._unranked[sequence] = error
        self._view = view

    def take_unranked(self) -> dict[Sequence, PolicyError]:
        """Those for whom the policy had no rank when it was last asked, and what it did instead.

        They are never next.
        """
        unranked, self._unranked = self._unranked, {}
        return {s: error for s, error in unranked.items() if s in self._new}

    def next(self, view: QueueView, among: Container[Sequence] | None = None) -> Sequence | None:
        """Who is to be admitted before all others; None if nobody is, or all are paused.

        Args:
            among: if given, those from whom to choose.
        """

        def may(sequence: Sequence) -> bool:
            return not sequence.paused and (among is None or sequence in among)

        for sequence in self._preempted:
            if may(sequence):
                return sequence
        self.rank(view)
        for num_passed, (sequence, num_before) in enumerate(self._new.items()):
            if may(sequence) and sequence in self._entries:
                if self._num_admitted + num_passed - num_before >= self.max_overtakes:
                    return sequence
                break
        return next((sequence for _, _, sequence in self._ranked if may(sequence)), None)

    def _rank_one(self, sequence: Sequence, view: QueueView) -> None:
        try:
            entry = (_checked(self.policy.rank(sequence, view)), sequence.arrival, sequence)
            insort_left(self._ranked, entry)
        except Exception as error:
            raise PolicyError(
                f"policy={self.policy} has no rank for {sequence.sequence_id}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._entries[sequence] = entry


def _checked(rank: Any) -> Rank:
    parts = rank if isinstance(rank, tuple) else (rank,)
    for part in parts:
        if not isinstance(part, Real) or math.isnan(part):
            raise ValueError(f"{rank!r:.60} is no number and no tuple of numbers")
    return rank
