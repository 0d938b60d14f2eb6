"""Push and pull over whatever moves frames: what the transports have in common.

A carrier moves frames to peers in order and tells which peers are lost. It does not know what they
mean. `CarriedTransport` gives them meaning:

    parcel      here is a parcel; with an index, it is one that was fetched
    fetch       send me these of your published parcels
    stop        I no longer want any of this transfer
    withdrawn   no more will come of this transfer

What is queued here is bounded by who sends: see `pdlab.disagg.prefill_worker`.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pdlab.disagg.transport.frames import BadFrame, Frame, frame_of, parcel_of, span_of
from pdlab.disagg.transport.interface import Address, Failure, Parcel, Ticket, Transport
from pdlab.disagg.transport.mailbox import Mailbox
from pdlab.link import Bookings, Link


class Lost(NamedTuple):
    """A peer is gone.

    Args:
        unsent: transfers of which something was still to be sent to it.
        is_orderly: it said so.
    """

    peer: Address
    reason: str
    unsent: list[str]
    is_orderly: bool


OnFrame = Callable[[Address, Frame], None]
OnLost = Callable[[Lost], None]


class Carrier(ABC):
    """Moves frames. It calls back from threads of its own, and holds no lock then."""

    address: Address

    @abstractmethod
    def start(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        """Begin to receive. A callback that raises `BadFrame` ends the connection."""

    @abstractmethod
    def post(self, to: Address, frame: Frame) -> str | None:
        """Queue a frame; or, if the peer is lost, why."""

    @abstractmethod
    def drop(self, transfer_id: str, to: Address | None = None) -> list[Address]:
        """Drop the queued parcels of a transfer to one peer, or all; to whom there were any."""

    @abstractmethod
    def close(self) -> None:
        """Tell the peers, end all threads, free everything."""


@dataclass
class _Fetch:
    """What is being pulled: for each parcel by its index, when it was asked for and is due."""

    source: Address
    asked: dict[int, tuple[float, float]] = field(default_factory=dict)


class CarriedTransport(Transport):
    """Moves parcels as frames.

    Args:
        carrier: moves the frames; closed with this.
        link: simulates a slower link for what is sent and fetched here.
        clock: seconds; the same for all peers if there is a link.
    """

    def __init__(
        self,
        carrier: Carrier,
        *,
        name: str,
        link: Link | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.name = name
        self.address = carrier.address
        self._carrier = carrier
        self._clock = clock
        self.link = link
        self._bookings = Bookings(link)
        self._mailbox = Mailbox(clock)
        self._lock = threading.Lock()
        self._published: dict[str, list[Parcel]] = {}
        # Transfers under way, that is begun and without their last parcel: to whom, from whom.
        self._outgoing: dict[str, Address] = {}
        self._incoming: dict[str, Address] = {}
        self._fetches: dict[str, _Fetch] = {}
        self._is_closed = False
        carrier.start(self._on_frame, self._on_lost)

    def send(self, to: Address, parcel: Parcel) -> None:
        now_s = self._clock()
        with self._lock:
            due_s = self._bookings.book(parcel.num_bytes, now_s)
            if parcel.is_last:
                self._outgoing.pop(parcel.transfer_id, None)
            else:
                self._outgoing[parcel.transfer_id] = to
        self._post_parcel(to, replace(parcel, sent_s=now_s, due_s=due_s))

    def publish(self, transfer_id: str, parcels: Sequence[Parcel]) -> Ticket:
        for parcel in parcels:
            if parcel.transfer_id != transfer_id:
                raise ValueError(
                    f"parcels: one is of {parcel.transfer_id!r}; all must be of {transfer_id!r}"
                )
        first, regions = self._keep(transfer_id, parcels)
        sizes = tuple(parcel.num_bytes for parcel in parcels)
        return Ticket(transfer_id, self.address, first, sizes, regions)

    def _keep(self, transfer_id: str, parcels: Sequence[Parcel]) -> tuple[int, tuple[str, ...]]:
        """Keep what is published: the index of the first, and for each where it stands."""
        with self._lock:
            known = self._published.setdefault(transfer_id, [])
            known.extend(parcels)
            return len(known) - len(parcels), ()

    def fetch(self, ticket: Ticket) -> None:
        self._book_fetch(ticket)
        if ticket.sizes:
            fields = {"first": ticket.first, "count": len(ticket.sizes)}
            self._post(ticket.source, Frame("fetch", ticket.transfer_id, fields))

    def withdraw(self, transfer_id: str) -> None:
        with self._lock:
            self._published.pop(transfer_id, None)
            source = self._incoming.pop(transfer_id, None)
            if fetch := self._fetches.pop(transfer_id, None):
                source = fetch.source
            receiver = self._outgoing.pop(transfer_id, None)
        self._mailbox.withdraw(transfer_id)
        receivers = set(self._carrier.drop(transfer_id))
        if receiver is not None:
            receivers.add(receiver)
        if source is not None:
            receivers.discard(source)
            self._carrier.post(source, Frame("stop", transfer_id))
        for peer in receivers:
            self._carrier.post(peer, Frame("withdrawn", transfer_id))

    def receive(self) -> list[Parcel]:
        return self._mailbox.receive()

    def failures(self) -> list[Failure]:
        return self._mailbox.failures()

    def wait(self, timeout_s: float, others: Sequence[Any] = ()) -> None:
        self._mailbox.wait(timeout_s, others)

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._carrier.close()
            self._mailbox.close()
            self._published.clear()

    # --- sending ---------------------------------------------------------------------------------

    def _post(self, to: Address, frame: Frame) -> bool:
        """Queue a frame; if the peer is lost, its transfer has failed."""
        reason = self._carrier.post(to, frame)
        if reason is None:
            return True
        with self._lock:
            self._outgoing.pop(frame.transfer_id, None)
            self._fetches.pop(frame.transfer_id, None)
        self._mailbox.fail(frame.transfer_id, to, reason)
        return False

    def _post_parcel(self, to: Address, parcel: Parcel, **fields: Any) -> None:
        self._post(to, frame_of(parcel, **fields))

    def _serve(self, peer: Address, frame: Frame) -> None:
        """Send what a peer fetches."""
        first, count = span_of(frame)
        with self._lock:
            parcels = self._published.get(frame.transfer_id, [])[first : first + count]
        if len(parcels) != count:
            self._carrier.post(peer, Frame("withdrawn", frame.transfer_id))
        for index, parcel in enumerate(parcels, first):
            self._post_parcel(peer, parcel, index=index)

    def _book_fetch(self, ticket: Ticket) -> None:
        now_s = self._clock()
        with self._lock:
            fetch = self._fetches.setdefault(ticket.transfer_id, _Fetch(ticket.source))
            for index, num_bytes in enumerate(ticket.sizes, ticket.first):
                fetch.asked[index] = (now_s, self._bookings.book(num_bytes, now_s))
            if not fetch.asked:
                del self._fetches[ticket.transfer_id]

    # --- receiving, on the carrier's threads -----------------------------------------------------

    def _on_frame(self, peer: Address, frame: Frame) -> None:
        match frame.kind:
            case "parcel":
                self._arrived(peer, parcel_of(frame), frame.fields.get("index"))
            case "fetch":
                self._serve(peer, frame)
            case "stop":
                self._carrier.drop(frame.transfer_id, peer)
            case "withdrawn":
                with self._lock:
                    self._incoming.pop(frame.transfer_id, None)
                    self._fetches.pop(frame.transfer_id, None)
                self._mailbox.fail(frame.transfer_id, peer, "withdrawn by the peer")
            case _:
                raise BadFrame(f"a frame of kind {frame.kind!r}")

    def _arrived(self, peer: Address, parcel: Parcel, index: int | None) -> None:
        with self._lock:
            if index is not None:
                fetch = self._fetches.get(parcel.transfer_id)
                asked = fetch.asked.pop(index, None) if fetch else None
                if fetch is None or asked is None:
                    return
                if not fetch.asked:
                    del self._fetches[parcel.transfer_id]
                parcel = replace(parcel, sent_s=asked[0], due_s=asked[1])
            elif parcel.is_last:
                self._incoming.pop(parcel.transfer_id, None)
            else:
                self._incoming[parcel.transfer_id] = peer
        self._mailbox.deliver(parcel)

    def _on_lost(self, lost: Lost) -> None:
        with self._lock:
            over = set(lost.unsent)
            for transfers in (self._incoming, self._outgoing):
                over |= {t for t, peer in transfers.items() if peer == lost.peer}
            over |= {t for t, fetch in self._fetches.items() if fetch.source == lost.peer}
            for transfer_id in over:
                self._incoming.pop(transfer_id, None)
                self._outgoing.pop(transfer_id, None)
                self._fetches.pop(transfer_id, None)
        if not lost.is_orderly:
            self._mailbox.fail(None, lost.peer, lost.reason)
        for transfer_id in sorted(over):
            self._mailbox.fail(transfer_id, lost.peer, lost.reason)
