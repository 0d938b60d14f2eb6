"""What has arrived for one transport: parcels until they are due, failures until they are read."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from pdlab.child.bell import Bell
from pdlab.disagg.transport.interface import Address, Failure, Parcel

REMEMBERED = 4096
"""Transfers that are over, by which what comes late is known; the oldest are forgotten."""


class Mailbox:
    """Any thread may put in; the transport's owner takes out.

    Parcels of one transfer are handed out in the order in which they came, even if a later one is
    due before. A bell rings while something new is in the box: that is what wakes `wait`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._lock = threading.Lock()
        self._parcels: list[Parcel] = []
        self._failures: list[Failure] = []
        self._over: OrderedDict[str, None] = OrderedDict()
        self._bell = Bell()
        self._is_closed = False

    def deliver(self, parcel: Parcel) -> None:
        """Put a parcel in, unless its transfer is over; the last one ends it."""
        with self._lock:
            if not self._is_closed and parcel.transfer_id not in self._over:
                self._parcels.append(parcel)
                if parcel.is_last:
                    self._end(parcel.transfer_id)
                self._bell.ring()

    def fail(self, transfer_id: str | None, peer: Address, reason: str) -> None:
        """Note that a peer was lost (None), or that a transfer fails, unless it is over."""
        with self._lock:
            if self._is_closed:
                return
            if transfer_id is not None:
                if transfer_id in self._over:
                    return
                self._end(transfer_id)
            self._failures.append(Failure(transfer_id, peer, reason))
            self._bell.ring()

    def withdraw(self, transfer_id: str) -> None:
        """Forget a transfer, and whatever is still to come of it."""
        with self._lock:
            self._end(transfer_id)
            self._parcels = [p for p in self._parcels if p.transfer_id != transfer_id]
            self._failures = [f for f in self._failures if f.transfer_id != transfer_id]

    def is_over(self, transfer_id: str) -> bool:
        """Whether it is complete, has failed or was withdrawn: nothing of it is wanted any more."""
        with self._lock:
            return transfer_id in self._over

    def receive(self) -> list[Parcel]:
        """Take out the parcels that are due."""
        with self._lock:
            self._bell.silence()
            now_s = self._clock()
            ready: list[Parcel] = []
            held: list[Parcel] = []
            waiting: set[str] = set()
            for parcel in self._parcels:
                if parcel.due_s > now_s or parcel.transfer_id in waiting:
                    waiting.add(parcel.transfer_id)
                    held.append(parcel)
                else:
                    ready.append(parcel)
            self._parcels = held
            return ready

    def failures(self) -> list[Failure]:
        """Take out the failures."""
        with self._lock:
            self._bell.silence()
            failures, self._failures = self._failures, []
            return failures

    def wait(self, timeout_s: float, others: Sequence[Any] = ()) -> None:
        """Block until something comes or falls due, or one of `others` is readable."""
        with self._lock:
            if self._failures or self._is_closed:
                return
            if self._parcels:
                next_s = min(parcel.due_s for parcel in self._parcels)
                timeout_s = min(timeout_s, next_s - self._clock())
        wait([self._bell.fileno(), *others], max(0.0, timeout_s))

    def close(self) -> None:
        """Throw all away, and all that may still be put in."""
        with self._lock:
            self._parcels.clear()
            self._failures.clear()
            self._is_closed = True
            self._bell.close()

    def _end(self, transfer_id: str) -> None:
        self._over[transfer_id] = None
        if len(self._over) > REMEMBERED:
            self._over.popitem(last=False)
