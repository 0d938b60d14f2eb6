"""What ranks send each other: tensors, point to point, in order.

Everything that ranks exchange is made of these two calls (see `collectives.py`), so that what is
counted is what travels.
"""

from __future__ import annotations

import queue
import time
from typing import Protocol

import torch
from torch import Tensor

from pdlab.link import Bookings, Link

PATIENCE_S = 120.0
"""How long a rank waits for another one: a step of it, at most."""
DUE = torch.float64
"""How a time is sent."""
SLEEPS_LATE_S = 2e-4
"""By how much a sleep may take longer than it was to."""


class Wires(Protocol):
    """One rank's connections to all others."""

    def send(self, target: int, x: Tensor) -> None:
        """Send a tensor; may return before it has left. It must not be changed until `flush`."""
        ...

    def receive(self, source: int, into: Tensor) -> None:
        """Wait for the next tensor of a rank; `into` has its shape and dtype, and is contiguous.

        Raises:
            ConnectionError: the other rank is gone, or says nothing for too long.
        """
        ...

    def flush(self) -> None:
        """Wait until all has left."""
        ...

    def close(self) -> None: ...


class Mail:
    """Wires between threads of one process: a queue for each pair of ranks."""

    def __init__(self, num_ranks: int):
        self._queues = {
            (source, target): queue.SimpleQueue[Tensor | None]()
            for source in range(num_ranks)
            for target in range(num_ranks)
        }

    def wires(self, rank: int) -> ThreadWires:
        return ThreadWires(self, rank)

    def put(self, source: int, target: int, x: Tensor | None) -> None:
        self._queues[source, target].put(x)

    def get(self, source: int, target: int) -> Tensor:
        try:
            x = self._queues[source, target].get(timeout=PATIENCE_S)
        except queue.Empty:
            raise ConnectionError(f"rank {source} said nothing for {PATIENCE_S:.0f} s") from None
        if x is None:
            raise ConnectionError(f"rank {source} is gone")
        return x

    def hang_up(self, rank: int | None = None) -> None:
        """Let all who wait for this rank, or for any, know that it is gone."""
        for source, target in self._queues:
            if rank in (None, source):
                self.put(source, target, None)


class ThreadWires:
    """See `Mail`."""

    def __init__(self, mail: Mail, rank: int):
        self._mail = mail
        self._rank = rank

    def send(self, target: int, x: Tensor) -> None:
        self._mail.put(self._rank, target, x.clone())

    def receive(self, source: int, into: Tensor) -> None:
        into.copy_(self._mail.get(source, self._rank))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._mail.hang_up(self._rank)


class SlowWires:
    """Wires as slow as a link, simulated: each tensor is held back until it is due.

    When it is due travels with it; all that a rank sends goes over its one link, one after the
    other. Between processes of one machine only: they share a clock.
    """

    def __init__(self, wires: Wires, link: Link):
        self._wires = wires
        self._bookings = Bookings(link)

    def send(self, target: int, x: Tensor) -> None:
        due_s = self._bookings.book(x.nbytes, time.perf_counter())
        parts = torch.tensor([due_s], dtype=DUE), x.cpu().view(-1)
        self._wires.send(target, torch.cat([part.view(torch.uint8) for part in parts]))

    def receive(self, source: int, into: Tensor) -> None:
        message = torch.empty(DUE.itemsize + into.nbytes, dtype=torch.uint8)
        self._wires.receive(source, message)
        into.copy_(message[DUE.itemsize :].view(into.dtype).view(into.shape))
        _wait_until(message[: DUE.itemsize].view(DUE).item())

    def flush(self) -> None:
        self._wires.flush()

    def close(self) -> None:
        self._wires.close()


def _wait_until(due_s: float) -> None:
    """To the microsecond: what sleeps is woken late, by more than a fast link takes."""
    while (left_s := due_s - time.perf_counter()) > 0:
        if left_s > SLEEPS_LATE_S:
            time.sleep(left_s - SLEEPS_LATE_S)
