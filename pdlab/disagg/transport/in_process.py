"""Parcels between workers of one process: copied at once, by the call that sends them.

No threads and no queues: the same calls in the same order give the same parcels, which is what
tests and a lesson that steps through a transfer need.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pdlab.disagg.transport.carrier import CarriedTransport, Carrier, Lost, OnFrame, OnLost
from pdlab.disagg.transport.frames import Frame
from pdlab.disagg.transport.interface import Address
from pdlab.link import Link


class Switchboard:
    """Connects the transports of one process. Make one for each cluster."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._carriers: dict[str, _BoardCarrier] = {}
        self._gone: dict[str, str] = {}
        self._num_plugged = 0

    def plug(self, carrier: _BoardCarrier, name: str) -> Address:
        """Give a carrier its address; a name that was used gets a number."""
        with self._lock:
            self._num_plugged += 1
            if name in self._carriers or name in self._gone:
                name = f"{name}-{self._num_plugged}"
            self._carriers[name] = carrier
        return Address("in-process", name, name)

    def unplug(self, address: Address, reason: str) -> list[_BoardCarrier]:
        """Take a carrier out; those that are left."""
        with self._lock:
            self._carriers.pop(address.name, None)
            self._gone.setdefault(address.name, reason)
            return list(self._carriers.values())

    def find(self, address: Address) -> _BoardCarrier | str:
        """Who is at an address, or why nobody is."""
        with self._lock:
            carrier = self._carriers.get(address.name)
            return carrier or self._gone.get(address.name, f"{address} is not on this switchboard")


class _BoardCarrier(Carrier):
    def __init__(self, board: Switchboard, name: str):
        self._board = board
        self.address = board.plug(self, name)
        self.known: dict[str, Address] = {}
        """With whom it has had to do, and who must hear when it is gone."""
        self.missed: set[str] = set()
        """Peers whose loss was told."""

    def start(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        self.on_frame, self.on_lost = on_frame, on_lost

    def post(self, to: Address, frame: Frame) -> str | None:
        if self._board.find(self.address) is not self:
            return "this transport is closed"
        peer = self._board.find(to)
        if isinstance(peer, str):
            return self._miss(to, peer, frame)
        self.known[to.name] = to
        peer.known[self.address.name] = self.address
        payload = None if frame.payload is None else frame.payload.clone()
        peer.on_frame(self.address, Frame(frame.kind, frame.transfer_id, frame.fields, payload))
        return None

    def _miss(self, to: Address, reason: str, frame: Frame) -> str | None:
        if to.name in self.missed:
            return reason
        self.missed.add(to.name)
        self.on_lost(Lost(to, reason, [frame.transfer_id], is_orderly=False))
        return None

    def drop(self, transfer_id: str, to: Address | None = None) -> list[Address]:
        return []

    def close(self) -> None:
        self.leave("closed", is_orderly=True)

    def leave(self, reason: str, is_orderly: bool) -> None:
        """Go, and let those who had to do with it know."""
        for other in self._board.unplug(self.address, reason):
            if other.known.pop(self.address.name, None):
                other.missed.add(self.address.name)
                other.on_lost(Lost(self.address, reason, [], is_orderly))


class InProcess(CarriedTransport):
    """Copies parcels within one process, deterministically.

    Args:
        board: connects it with its peers.
        name: of its address; made unique on the board.
        link: simulates a link for what is sent and fetched here.
        clock: seconds, the same for all on a board.
    """

    def __init__(
        self,
        board: Switchboard,
        name: str = "worker",
        *,
        link: Link | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._on_board = _BoardCarrier(board, name)
        super().__init__(self._on_board, name="in-process", link=link, clock=clock)

    def kill(self) -> None:
        """Be gone as if its process had been killed: peers see a lost one. Close it afterwards."""
        self._on_board.leave("killed", is_orderly=False)
