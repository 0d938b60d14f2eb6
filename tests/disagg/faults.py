"""A transport that loses, damages, delays, doubles and swaps parcels, by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pdlab.disagg.transport.interface import Address, Failure, Parcel, Ticket, Transport

Fault = Literal["drop", "delay", "corrupt", "duplicate", "reorder", "stall"]


@dataclass(frozen=True)
class Faults:
    """How likely each fault is, for each parcel that arrives; together at most 1.

    Args:
        seed: the same seed and the same parcels give the same faults.
        drop: the parcel never arrives.
        delay: it comes up to `max_delay` calls of `receive` later, and those after it before it.
        corrupt: one byte of it is another (a parcel without bytes is dropped).
        duplicate: it comes twice.
        reorder: it comes after the next parcel, or with the next call.
        stall: neither it nor any later parcel of its transfer arrives.
        max_delay: calls of `receive`.
    """

    seed: int
    drop: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    stall: float = 0.0
    max_delay: int = 5

    def draw(self, rng: random.Random) -> Fault | None:
        """What befalls the next parcel."""
        kinds: tuple[Fault, ...] = ("drop", "delay", "corrupt", "duplicate", "reorder", "stall")
        point = rng.random()
        for kind in kinds:
            point -= getattr(self, kind)
            if point < 0:
                return kind
        return None


class FaultyTransport(Transport):
    """Passes everything on to a transport, and meddles with what that receives.

    Nothing depends on time: a delay counts calls of `receive`.
    """

    def __init__(self, inner: Transport, faults: Faults):
        self.inner = inner
        self.name = inner.name
        self.address = inner.address
        self.faults = faults
        self.done: list[tuple[str, Fault]] = []
        """The transfers that faults befell, and which."""
        self._rng = random.Random(faults.seed)
        self._num_calls = 0
        self._delayed: list[tuple[int, Parcel]] = []
        self._stalled: set[str] = set()

    def send(self, to: Address, parcel: Parcel) -> None:
        self.inner.send(to, parcel)

    def publish(self, transfer_id: str, parcels: Sequence[Parcel]) -> Ticket:
        return self.inner.publish(transfer_id, parcels)

    def fetch(self, ticket: Ticket) -> None:
        self.inner.fetch(ticket)

    def withdraw(self, transfer_id: str) -> None:
        self._delayed = [d for d in self._delayed if d[1].transfer_id != transfer_id]
        self.inner.withdraw(transfer_id)

    def failures(self) -> list[Failure]:
        return self.inner.failures()

    def wait(self, timeout_s: float, others: Sequence[Any] = ()) -> None:
        self.inner.wait(0.0 if self._delayed else timeout_s, others)

    def close(self) -> None:
        self.inner.close()

    def receive(self) -> list[Parcel]:
        self._num_calls += 1
        out = [parcel for call, parcel in self._delayed if call <= self._num_calls]
        self._delayed = [d for d in self._delayed if d[0] > self._num_calls]
        swapped: list[Parcel] = []
        for parcel in self.inner.receive():
            fault = self._fault(parcel)
            match fault:
                case None:
                    out.append(parcel)
                case "duplicate":
                    out += [parcel, parcel]
                case "corrupt" if parcel.num_bytes:
                    out.append(self._damaged(parcel))
                case "delay":
                    late = self._num_calls + self._rng.randint(1, self.faults.max_delay)
                    self._delayed.append((late, parcel))
                case "reorder":
                    swapped.append(parcel)
                    continue
                case "stall":
                    self._stalled.add(parcel.transfer_id)
            out += swapped
            swapped = []
        self._delayed += [(self._num_calls + 1, parcel) for parcel in swapped]
        return out

    def _fault(self, parcel: Parcel) -> Fault | None:
        if parcel.transfer_id in self._stalled:
            return "stall"
        fault = self.faults.draw(self._rng)
        if fault is not None:
            self.done.append((parcel.transfer_id, fault))
        return fault

    def _damaged(self, parcel: Parcel) -> Parcel:
        payload = parcel.payload.clone()
        payload[self._rng.randrange(parcel.num_bytes)] ^= 1 << self._rng.randrange(8)
        return replace(parcel, payload=payload)
