"""Parcels between the actors of a Ray cluster, through Ray's object store.

    push    P  deliver.remote(parcel) ---- the store copies the payload ---->  D  deliver(parcel)
    pull    P  put(parcel) -> reference, in the ticket -> D  get(reference): P has no part in it

On one machine both sides map the same memory, so the receiver reads a payload where the sender has
put it; between machines the object stores copy it. What is small enough travels within the call. An
actor that dies takes its objects with it: who waits for them is told by Ray.

Ray's direct transport (`tensor_transport="nixl"` or "gloo") would leave the store out, and is not
used: it is in alpha; a consumer whose class is not declared for it too hangs, and its peer with it;
it moves what actor methods return, which a step that is still computing its next layers cannot; and
between CPUs it was not surely faster: 50 MB took the store 325-389 ms, gloo 143-530, NIXL 396-460.
Actors that shall move bytes directly take the sockets or NIXL (`pdlab.disagg.transport.sockets`,
`pdlab.disagg.transport.nixl_transport`), which need nothing of Ray.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.exceptions import RayError
from torch import Tensor

from pdlab.child.ray_actor import brief
from pdlab.disagg.transport.carrier import CarriedTransport, Carrier, Lost, OnFrame, OnLost
from pdlab.disagg.transport.frames import BadFrame, Frame, frame_of, parcel_of
from pdlab.disagg.transport.interface import Address, Parcel, Ticket
from pdlab.link import Link

PING_S = 1.0
"""Between two questions to an idle peer whether it lives."""
GOODBYE_S = 1.0


@dataclass(frozen=True)
class RayTicket(Ticket):
    """A ticket with which parcels can be taken out of the object store."""

    objects: tuple[ObjectRef, ...] = ()
    """For each parcel its frame and payload. Whoever holds the ticket keeps them in the store."""


class RayTransport(CarriedTransport):
    """Moves parcels between named actors.

    The actor that makes it must have two methods for its peers, in a concurrency group of one
    thread: `deliver`, which hands its arguments to `take_delivery`, and `ping`, which does nothing.

    Args:
        link: simulates a link for what is sent and fetched here.

    Raises:
        RuntimeError: this is no actor with a name.
    """

    def __init__(self, *, link: Link | None = None, clock: Callable[[], float] = time.perf_counter):
        self._objects: dict[str, list[ObjectRef]] = {}
        self._calls = _RayCarrier()
        super().__init__(self._calls, name="Ray object store", link=link, clock=clock)

    def take_delivery(
        self, sender: Address, number: int, frame: Frame, payload: np.ndarray | None
    ) -> None:
        """What a peer's call of `deliver` brings."""
        self._calls.arrived(sender, number, frame, payload)

    def publish(self, transfer_id: str, parcels: Sequence[Parcel]) -> Ticket:
        ticket = super().publish(transfer_id, parcels)
        with self._lock:
            objects = self._objects.get(transfer_id, [])[ticket.first :]
        return RayTicket(
            ticket.transfer_id, ticket.source, ticket.first, ticket.sizes, (), tuple(objects)
        )

    def _keep(self, transfer_id: str, parcels: Sequence[Parcel]) -> tuple[int, tuple[str, ...]]:
        objects = [_put(parcel) for parcel in parcels]
        with self._lock:
            known = self._objects.setdefault(transfer_id, [])
            known.extend(objects)
            return len(known) - len(objects), ()

    def fetch(self, ticket: Ticket) -> None:
        if not isinstance(ticket, RayTicket):
            self._mailbox.fail(ticket.transfer_id, ticket.source, "its ticket is none of Ray's")
            return
        self._book_fetch(ticket)
        self._calls.watch(ticket.source)
        order = _InOrder(partial(self._fetched, ticket))
        for index, each in enumerate(ticket.objects):
            each.future().add_done_callback(partial(order.put, index))

    def _fetched(self, ticket: RayTicket, index: int, future: Future) -> None:
        """A parcel was taken out of the store, or could not be."""
        if (error := future.exception()) is not None:
            with self._lock:
                self._fetches.pop(ticket.transfer_id, None)
            self._mailbox.fail(ticket.transfer_id, ticket.source, brief(error))
            return
        frame, payload = future.result()
        self._arrived(ticket.source, parcel_of(frame, _tensor_of(payload)), ticket.first + index)

    def withdraw(self, transfer_id: str) -> None:
        super().withdraw(transfer_id)
        with self._lock:
            self._objects.pop(transfer_id, None)

    def close(self) -> None:
        super().close()
        self._objects.clear()


def _put(parcel: Parcel) -> ObjectRef:
    frame = frame_of(parcel)
    return ray.put((Frame(frame.kind, frame.transfer_id, frame.fields), _array_of(parcel.payload)))


def _array_of(payload: Tensor) -> np.ndarray:
    return payload.cpu().numpy()


def _tensor_of(array: np.ndarray) -> Tensor:
    """A payload where it stands, in shared memory: it is read and never written."""
    if array.size == 0:
        return torch.empty(0, dtype=torch.uint8)
    # Torch knows no tensors that are only read, and warns of each. The buffer keeps the array.
    buffer = (ctypes.c_uint8 * array.size).from_address(array.ctypes.data)
    buffer.array = array  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)


class _InOrder:
    """Hands results on in the order in which they were asked for.

    Args:
        take: called with an index and its result, one after the other.
    """

    def __init__(self, take: Callable[[int, Future], None]):
        self._take = take
        self._lock = threading.Lock()
        self._early: dict[int, Future] = {}
        self._next = 0

    def put(self, index: int, result: Future) -> None:
        with self._lock:
            self._early[index] = result
            while (ready := self._early.pop(self._next, None)) is not None:
                self._take(self._next, ready)
                self._next += 1


@dataclass(eq=False)
class _Peer:
    """Another actor."""

    address: Address
    handle: Any = None
    """Looked up when it is first called."""
    num_sent: int = 0
    under_way: dict[int, str] = field(default_factory=dict)
    """Transfer ids of the calls that have not returned."""
    num_received: int = 0
    early: dict[int, tuple[Frame, np.ndarray | None]] = field(default_factory=dict)
    """Calls that came before those that were made before: Ray does not keep their order."""
    is_asked: bool = False
    """Whether a ping is under way."""
    lost: str = ""


class _RayCarrier(Carrier):
    """Moves frames as calls of other actors. A thread of its own makes them."""

    def __init__(self) -> None:
        context = ray.get_runtime_context()
        name = context.get_actor_name()
        if not name:
            raise RuntimeError("a RayTransport is made by an actor that has a name")
        self.address = Address("ray", name, f"{context.namespace}/{name}")
        self._change = threading.Condition()
        self._peers: dict[str, _Peer] = {}
        self._frames: deque[tuple[_Peer, Frame]] = deque()
        self._is_closing = False
        self._asked_s = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"{name} calls", daemon=True)

    def start(self, on_frame: OnFrame, on_lost: OnLost) -> None:
        self.on_frame, self.on_lost = on_frame, on_lost
        self._thread.start()

    def post(self, to: Address, frame: Frame) -> str | None:
        with self._change:
            if self._is_closing:
                return "this transport is closed"
            peer = self._met(to)
            if peer.lost:
                return peer.lost
            self._frames.append((peer, frame))
            self._change.notify()
        return None

    def watch(self, address: Address) -> None:
        """Tell when this peer is lost, though nothing is sent to it."""
        with self._change:
            self._met(address)

    def drop(self, transfer_id: str, to: Address | None = None) -> list[Address]:
        with self._change:
            mine = [each for each in self._frames if _is_of(each, transfer_id, to)]
            self._frames = deque(each for each in self._frames if each not in mine)
            calling = [
                peer
                for peer in self._peers.values()
                if to in (None, peer.address) and transfer_id in peer.under_way.values()
            ]
            return [peer.address for peer in {*calling, *(peer for peer, _ in mine)}]

    def close(self) -> None:
        with self._change:
            self._is_closing = True
            alive = [peer for peer in self._peers.values() if not peer.lost]
            self._frames = deque((peer, Frame("goodbye")) for peer in alive)
            self._change.notify()
        self._thread.join(GOODBYE_S)

    def _met(self, address: Address) -> _Peer:
        return self._peers.setdefault(address.name, _Peer(address))

    # --- the calling thread ----------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._change:
                if not self._frames and not self._is_closing:
                    self._change.wait(PING_S)
                ready = self._frames.popleft() if self._frames else None
                if ready is None and self._is_closing:
                    return
            if ready is not None:
                self._call(*ready)
            if time.monotonic() - self._asked_s >= PING_S:
                self._asked_s = time.monotonic()
                self._ask()

    def _call(self, peer: _Peer, frame: Frame) -> None:
        """Deliver a frame, unless its peer was lost meanwhile."""
        with self._change:
            if peer.lost:
                return
            number = peer.num_sent
            peer.num_sent += 1
            peer.under_way[number] = frame.transfer_id
        bare = Frame(frame.kind, frame.transfer_id, frame.fields)
        payload = None if frame.payload is None else _array_of(frame.payload)
        try:
            call = self._handle(peer).deliver.remote(self.address, number, bare, payload)
        except (ValueError, RayError) as error:  # the name is unknown, the store is full
            self._lose(peer, brief(error))
            return
        call.future().add_done_callback(partial(self._delivered, peer, number))

    def _handle(self, peer: _Peer) -> Any:
        if peer.handle is None:
            namespace, _, name = peer.address.where.partition("/")
            peer.handle = ray.get_actor(name, namespace)
        return peer.handle

    def _delivered(self, peer: _Peer, number: int, future: Future) -> None:
        if (error := future.exception()) is not None:
            self._lose(peer, brief(error))
        with self._change:
            peer.under_way.pop(number, None)

    def _ask(self) -> None:
        """Ask all peers from whom no answer is due whether they live."""
        with self._change:
            quiet = [p for p in self._peers.values() if not (p.lost or p.is_asked or p.under_way)]
        for peer in quiet:
            peer.is_asked = True
            try:
                self._handle(peer).ping.remote().future().add_done_callback(
                    partial(self._answered, peer)
                )
            except (ValueError, RayError) as error:
                self._lose(peer, brief(error))

    def _answered(self, peer: _Peer, future: Future) -> None:
        peer.is_asked = False
        if (error := future.exception()) is not None:
            self._lose(peer, brief(error))

    def _lose(self, peer: _Peer, reason: str, is_orderly: bool = False) -> None:
        with self._change:
            if peer.lost or self._is_closing:
                return
            peer.lost = reason
            queued = {frame.transfer_id for other, frame in self._frames if other is peer}
            self._frames = deque(each for each in self._frames if each[0] is not peer)
            unsent = {*queued, *peer.under_way.values()} - {""}
            peer.early.clear()
        self.on_lost(Lost(peer.address, reason, sorted(unsent), is_orderly))

    # --- the thread that peers call on -----------------------------------------------------------

    def arrived(
        self, sender: Address, number: int, frame: Frame, payload: np.ndarray | None
    ) -> None:
        """A peer has called, perhaps earlier than with what it sent before."""
        with self._change:
            peer = self._met(sender)
            if self._is_closing or peer.lost:
                return
            peer.early[number] = (frame, payload)
        while (ready := peer.early.pop(peer.num_received, None)) is not None:
            peer.num_received += 1
            self._take(peer, *ready)

    def _take(self, peer: _Peer, frame: Frame, payload: np.ndarray | None) -> None:
        if frame.kind == "goodbye":
            self._lose(peer, "it closed", is_orderly=True)
            return
        frame.payload = None if payload is None else _tensor_of(payload)
        try:
            self.on_frame(peer.address, frame)
        except BadFrame as error:
            self._lose(peer, brief(error))


def _is_of(queued: tuple[_Peer, Frame], transfer_id: str, to: Address | None) -> bool:
    peer, frame = queued
    return frame.transfer_id == transfer_id and to in (None, peer.address)
