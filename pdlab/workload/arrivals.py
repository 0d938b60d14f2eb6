"""When requests come: at times of their own, or each when a client has its last answer.

Open loop: users do not know how busy the server is, and come at any rate; a queue can grow without
end. Closed loop: a fixed number of clients, so that a slow server is asked less; its numbers look
well where real users would have queued (Schroeder et al. 2006, "Open versus closed: a cautionary
tale", NSDI).

Time is what the caller says it is: seconds since the workload began, real or simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Protocol

from pdlab.requirements import require_int, require_number, shown
from pdlab.workload.traces import TraceRequest

LARGEST_S = 1e9
"""Latest arrival and longest thought: 30 years."""


class Arrivals(Protocol):
    """Hands out requests as time goes on.

    Whoever serves calls `take_due` with a clock that never goes back, and `note_finished` once for
    each request that was handed out.
    """

    def take_due(self, now_s: float) -> list[TraceRequest]:
        """Those that arrived up to `now_s`, each handed out once, in order of arrival."""

    @property
    def next_s(self) -> float | None:
        """The next arrival that is known.

        None when none is: all are handed out, or a closed loop waits for one to finish.
        """

    def note_finished(self, now_s: float) -> None:
        """One of its requests has finished, or was refused."""

    @property
    def num_requests(self) -> int:
        """In all, those to come included."""


class OpenLoop(Arrivals):
    """Each request comes at its own `arrival_s`, whatever the server does.

    Args:
        requests: in any order; those of one moment keep theirs.

    Raises:
        ValueError: there is no request, one is no TraceRequest, or an arrival is no time from 0 to
            `LARGEST_S`.
    """

    def __init__(self, requests: Sequence[TraceRequest]):
        _require_some(requests)
        for request in requests:
            require_number("arrival_s", request.arrival_s, 0, LARGEST_S)
        self._coming = deque(sorted(requests, key=lambda request: request.arrival_s))
        self._num_requests = len(self._coming)

    def take_due(self, now_s: float) -> list[TraceRequest]:
        due = []
        while self._coming and self._coming[0].arrival_s <= now_s:
            due.append(self._coming.popleft())
        return due

    @property
    def next_s(self) -> float | None:
        return self._coming[0].arrival_s if self._coming else None

    def note_finished(self, now_s: float) -> None:
        """Nothing follows from it."""

    @property
    def num_requests(self) -> int:
        return self._num_requests


class ClosedLoop(Arrivals):
    """Clients that each wait for their answer, think, and send the next request of the list.

    At 0 every client sends its first. At most `num_clients` requests are outstanding at any time.

    Args:
        requests: sent in the order of the list. Their own `arrival_s` does not count: what is
            handed out carries the moment it was sent.
        num_clients: at least 1; more than there are requests is allowed, and those have no work.
        think_s: from the end of an answer to the same client's next request.

    Raises:
        ValueError: there is no request, one is no TraceRequest, or a number is out of range.
    """

    def __init__(self, requests: Sequence[TraceRequest], num_clients: int, think_s: float = 0.0):
        _require_some(requests)
        require_int("num_clients", num_clients, 1)
        require_number("think_s", think_s, 0, LARGEST_S)
        self.think_s = think_s
        self._coming = deque(requests)
        self._num_requests = len(self._coming)
        # a heap: when each client that has no request outstanding sends its next
        self._send_s = [0.0] * min(num_clients, len(requests))
        self._num_outstanding = 0

    def take_due(self, now_s: float) -> list[TraceRequest]:
        due = []
        while self._coming and self._send_s and self._send_s[0] <= now_s:
            due.append(replace(self._coming.popleft(), arrival_s=heappop(self._send_s)))
        self._num_outstanding += len(due)
        return due

    @property
    def next_s(self) -> float | None:
        return self._send_s[0] if self._coming and self._send_s else None

    def note_finished(self, now_s: float) -> None:
        """Its client sends the next request after `think_s`, if there is one.

        Raises:
            ValueError: no request is outstanding.
        """
        if self._num_outstanding < 1:
            raise ValueError(f"note_finished({now_s}): no request is outstanding")
        self._num_outstanding -= 1
        heappush(self._send_s, now_s + self.think_s)

    @property
    def num_requests(self) -> int:
        return self._num_requests


def _require_some(requests: Sequence[TraceRequest]) -> None:
    if not requests:
        raise ValueError("requests is empty: at least 1 is needed")
    for number, request in enumerate(requests):
        if not isinstance(request, TraceRequest):
            raise ValueError(f"requests[{number}]={shown(request)} must be a TraceRequest")
