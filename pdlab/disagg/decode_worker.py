"""The half of a worker that goes on with prompts which others computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdlab.disagg.half import Half
from pdlab.disagg.messages import (
    Arrived,
    Event,
    Failed,
    Reserve,
    request_of,
    source_of,
    transfer_number,
)
from pdlab.disagg.rooms import RoomQueue
from pdlab.disagg.transport.interface import Parcel, Ticket, checksum_of
from pdlab.engine.moving import Reservation
from pdlab.engine.request import Request
from pdlab.kvcache import KVLayout, KVWriter, Wire
from pdlab.trace import ParcelRecord, TransferRecord


@dataclass
class Incoming:
    """A request that has its room, and whose K and V are on their way."""

    num_tokens: int
    num_cached_tokens: int
    covered: list[int]
    """Tokens that have come, by layer, those of the prefix cache among them."""
    lease_end_s: float
    token_id: int | None = None
    """Drawn by whoever computed the prompt; None until it is known."""
    transfer_id: str = ""
    """Of the parcels that are being taken; parcels of another one begin anew."""
    fetched_id: str = ""
    """Of what is being pulled."""
    wire: Wire | None = None
    writer: KVWriter | None = None
    parcels: list[ParcelRecord] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return min(self.covered) >= self.num_tokens


@dataclass(eq=False)
class DecodeWorker(Half):
    """Keeps room for requests on an engine, receives their K and V, and lets them run."""

    transfer_timeout_s: float = field(default=60.0, kw_only=True)
    """How long the next parcel may take once the prompt is computed."""
    layouts: dict[str, KVLayout] = field(default_factory=dict, init=False)
    """Of other workers, by name."""
    incoming: dict[str, Incoming] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.asked: RoomQueue[Request] = RoomQueue(self.engine.scheduler, self.engine.reserve)

    def ask(self, command: Reserve) -> None:
        """Queue for room.

        Raises:
            ValueError: it can never be served here.
        """
        urgency = self.urgency(command.arrival)
        request = self.engine.prepare(command.state, request_id=command.request_id, **urgency)
        self.asked.add(request, request.samples[0].sequence)

    def reserve(self) -> Iterator[Event]:
        """Give room to those who are next in the queue, as far as there is any."""
        yield from self.asked.give(self.engine.now_s(), self._expect)

    def _expect(self, room: Reservation) -> None:
        covered = [room.num_cached_tokens] * self.engine.kv_layout.num_layers
        self.incoming[room.request_id] = Incoming(
            room.num_tokens, room.num_cached_tokens, covered, self.clock() + self.lease_s
        )

    def fetch(self, request_id: str, ticket: Ticket) -> None:
        """Start to pull what another worker has published."""
        if request_id in self.incoming:
            self.incoming[request_id].fetched_id = ticket.transfer_id
            self.transport.fetch(ticket)

    def go_on(self, request_id: str, token_id: int) -> Iterator[Event]:
        """The token after the prompt is known."""
        if request_id in self.incoming:
            self.incoming[request_id].token_id = token_id
            self._wait_for_next(self.incoming[request_id])
            yield from self._admit_if_complete(request_id)

    def _wait_for_next(self, incoming: Incoming) -> None:
        if incoming.token_id is not None:
            incoming.lease_end_s = self.clock() + self.transfer_timeout_s

    # --- receiving ------------------------------------------------------------------------------

    def receive(self) -> Iterator[Event]:
        """Put what has come into its blocks."""
        for parcel in self.transport.receive():
            request_id = request_of(parcel.transfer_id)
            if incoming := self.incoming.get(request_id):
                try:
                    self._take(request_id, incoming, parcel)
                except ValueError as error:
                    yield self._fail(request_id, str(error))
                    continue
                yield from self._admit_if_complete(request_id)
        for transfer_id, peer, reason in self.transport.failures():
            request_id = request_of(transfer_id or "")
            if request_id in self.incoming and not self._is_late(request_id, transfer_id or ""):
                yield self._fail(request_id, f"{reason} ({peer})")

    def _is_late(self, request_id: str, transfer_id: str) -> bool:
        """Whether a transfer was begun anew, under another id."""
        return transfer_number(transfer_id) < transfer_number(self.incoming[request_id].transfer_id)

    def _take(self, request_id: str, incoming: Incoming, parcel: Parcel) -> None:
        """Put a parcel into its blocks.

        Raises:
            ValueError: it is damaged, or one before it is missing.
        """
        layers, tokens = range(*parcel.layers), range(*parcel.tokens)
        if self._is_late(request_id, parcel.transfer_id):
            return
        if checksum_of(parcel.payload) != parcel.checksum:
            raise ValueError(f"the checksum of layers {layers} of {request_id} is wrong")
        if parcel.transfer_id != incoming.transfer_id:
            self._begin(request_id, incoming, parcel.transfer_id)
        assert incoming.writer is not None
        for layer in layers:
            if tokens.start != incoming.covered[layer]:
                raise ValueError(
                    f"layer {layer} of {request_id} has tokens from {tokens.start} on behind "
                    f"{incoming.covered[layer]}: a parcel is missing, or came twice"
                )
        incoming.writer.write(layers, tokens, parcel.payload)
        for layer in layers:
            incoming.covered[layer] = tokens.stop
        incoming.parcels.append(
            ParcelRecord(
                *parcel.layers,
                *parcel.tokens,
                num_bytes=parcel.payload.numel(),
                sent_s=parcel.sent_s,
                arrived_s=self.clock(),
            )
        )
        self._wait_for_next(incoming)

    def _begin(self, request_id: str, incoming: Incoming, transfer_id: str) -> None:
        """The first parcel of a transfer, perhaps after one that came to nothing."""
        source = source_of(transfer_id)
        if source not in self.layouts:
            raise ValueError(f"{transfer_id} comes from {source!r}, which is unknown here")
        incoming.transfer_id = transfer_id
        incoming.wire = Wire.between(self.layouts[source], self.engine.kv_layout)
        incoming.writer = self.engine.kv_writer(request_id, incoming.wire)
        incoming.covered = [incoming.num_cached_tokens] * len(incoming.covered)
        incoming.parcels.clear()

    def _admit_if_complete(self, request_id: str) -> Iterator[Event]:
        incoming = self.incoming[request_id]
        if incoming.token_id is None or not incoming.is_complete:
            return
        del self.incoming[request_id]
        self.engine.admit(request_id, incoming.token_id)
        yield Arrived(
            request_id,
            TransferRecord(
                request_id=request_id,
                source=source_of(incoming.transfer_id),
                target=self.name,
                kind="pull" if incoming.fetched_id else "push",
                transport=self.transport.name,
                wire=str(incoming.wire) if incoming.wire else "",
                num_tokens=incoming.num_tokens - incoming.num_cached_tokens,
                num_cached_tokens=incoming.num_cached_tokens,
                parcels=incoming.parcels,
                ready_s=self.clock(),
            ),
        )

    # --- giving up ------------------------------------------------------------------------------

    def renew(self, request_id: str) -> None:
        """A request is still wanted. Once its prompt is computed, only parcels count."""
        incoming = self.incoming.get(request_id)
        if incoming is not None and incoming.token_id is None:
            incoming.lease_end_s = self.clock() + self.lease_s

    def forget(self, request_id: str) -> None:
        """Give up the room of a request, or its place in the queue for one."""
        self.asked.forget(request_id)
        incoming = self.incoming.pop(request_id, None)
        if incoming is not None:
            for transfer_id in {incoming.transfer_id, incoming.fetched_id} - {""}:
                self.transport.withdraw(transfer_id)
            self.engine.discard(request_id)

    def _fail(self, request_id: str, reason: str) -> Failed:
        self.forget(request_id)
        return Failed(request_id, reason)

    def expire(self) -> Iterator[Event]:
        """Free the rooms whose K and V did not come in time."""
        now_s = self.clock()
        for request_id, incoming in list(self.incoming.items()):
            if incoming.lease_end_s <= now_s:
                limit_s = self.lease_s if incoming.token_id is None else self.transfer_timeout_s
                yield self._fail(request_id, f"K and V did not come within {limit_s:g} s")
