"""Who waits for room on a decode worker, real or simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from pdlab.disagg.messages import Failed, Reserved
from pdlab.engine.moving import Reservation
from pdlab.engine.policies import QueueView
from pdlab.engine.scheduler import Scheduler
from pdlab.engine.sequence import Sequence
from pdlab.engine.waiting import WaitingQueue

Prepared = TypeVar("Prepared")


class RoomQueue(Generic[Prepared]):
    """Prepared requests that wait for room on an engine, whose policy says who is next.

    It has the policy's bound, too: nobody is overtaken more often than `max_overtakes`. While
    somebody waits here, the engine admits nobody who came later than the one who is next.

    Args:
        scheduler: of the engine.
        reserve: the engine's.
    """

    def __init__(
        self, scheduler: Scheduler, reserve: Callable[[Prepared], Reservation | None]
    ) -> None:
        self._scheduler = scheduler
        self._reserve = reserve
        self._queue = WaitingQueue(scheduler.policy, scheduler.waiting.max_overtakes)
        self._asked: dict[str, tuple[Sequence, Prepared]] = {}
        self._num_asked = 0

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, prepared: Prepared, sequence: Sequence) -> None:
        """Let a prepared request wait; `sequence` is its own.

        Raises:
            PolicyError: the policy has no rank for it.
        """
        self._num_asked += 1
        sequence.arrival = self._num_asked
        self._queue.add(sequence, QueueView(sequence.arrival_s, self._scheduler.kv))
        self._asked[sequence.request_id] = sequence, prepared

    def forget(self, request_id: str) -> None:
        """Let a request wait no longer, if it does."""
        if asked := self._asked.pop(request_id, None):
            self._queue.remove(asked[0])

    def give(
        self, now_s: float, enter: Callable[[Reservation], None]
    ) -> Iterator[Reserved | Failed]:
        """Give room to who is next, as long as there is any, and tell of it.

        Args:
            now_s: on the clock of the sequences' `arrival_s`.
            enter: called with each room before it is told of.
        """
        self._scheduler.claimed_s = None
        while self._asked:
            sequence = self._queue.next(QueueView(now_s, self._scheduler.kv))
            for unranked, error in self._queue.take_unranked().items():
                self.forget(unranked.request_id)
                yield Failed(unranked.request_id, str(error), refused=True)
            if sequence is None:
                continue  # those who were asked for had no rank, and are gone
            room = self._reserve(self._asked[sequence.request_id][1])
            if room is None:
                self._scheduler.claimed_s = sequence.arrival_s
                return
            self.forget(sequence.request_id)
            enter(room)
            yield Reserved(room.request_id, room.num_cached_tokens)
