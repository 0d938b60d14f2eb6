"""The half of a simulated worker that goes on with prompts which others computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pdlab.disagg.messages import Arrived, Continue, Event, Reserve
from pdlab.disagg.rooms import RoomQueue
from pdlab.disagg.simulated.spec import Shipment
from pdlab.engine.moving import Reservation
from pdlab.trace import TransferRecord
from pdlab.workload.simulated_engine import Job, SimulatedEngine


@dataclass(slots=True)
class _Room:
    """A request that waits for its K and V."""

    num_tokens: int
    num_cached_tokens: int
    has_token: bool = False
    shipment: Shipment | None = None


class SimulatedReceiver:
    """Keeps room for requests on an engine, and lets them run once K and V have come."""

    def __init__(self, name: str, engine: SimulatedEngine):
        self.name = name
        self.engine = engine
        self.asked: RoomQueue[Job] = RoomQueue(engine.scheduler, engine.reserve)
        self._rooms: dict[str, _Room] = {}

    def ask(self, command: Reserve) -> None:
        """Queue for room.

        Raises:
            ValueError: it can never be served here.
        """
        arrival = command.arrival
        job = self.engine.prepare(
            command.state,
            request_id=command.request_id,
            priority=arrival.priority,
            ttft_slo_s=arrival.ttft_slo_s,
            arrival_s=arrival.time_s,
        )
        self.asked.add(job, job.sequence)

    def forget(self, request_id: str) -> None:
        """Give up a room, or a place in the queue for one; the engine forgets it, too, then."""
        self.asked.forget(request_id)
        self._rooms.pop(request_id, None)

    def reserve(self, now_s: float) -> Iterator[Event]:
        """Give room to those who are next in the queue, as far as there is any."""
        yield from self.asked.give(now_s, self._expect)

    def _expect(self, room: Reservation) -> None:
        self._rooms[room.request_id] = _Room(room.num_tokens, room.num_cached_tokens)

    def missing(self, request_id: str) -> range:
        """Tokens whose K and V are waited for; none if there is no such room."""
        room = self._rooms.get(request_id)
        return range(room.num_cached_tokens, room.num_tokens) if room else range(0)

    def waits_for(self, shipment: Shipment) -> bool:
        return shipment.request_id in self._rooms

    # --- what lets a request run ----------------------------------------------------------------

    def go_on(self, request_id: str, now_s: float) -> Iterator[Event]:
        """The token after the prompt is known."""
        if room := self._rooms.get(request_id):
            room.has_token = True
            yield from self._admit_if_complete(request_id, room, now_s)

    def take(self, shipment: Shipment, now_s: float) -> Iterator[Event]:
        """Put K and V into their blocks."""
        room = self._rooms[shipment.request_id]
        room.shipment = shipment
        yield from self._admit_if_complete(shipment.request_id, room, now_s)

    def runs_with_token(self, request_id: str, arrived: Iterable[Shipment]) -> bool:
        """Whether all K and V of a request are there, those that wait to be taken included."""
        if request_id not in self._rooms:
            return False
        coming = [shipment.request_id for shipment in arrived]
        return not self.missing(request_id) or request_id in coming

    def runs_with(self, shipment: Shipment, commands: Iterable[object]) -> bool:
        """Whether the token of a request is known, from what waits to be obeyed if not before."""
        room = self._rooms.get(shipment.request_id)
        if room is None or room.has_token:
            return room is not None
        coming = [c.request_id for c in commands if isinstance(c, Continue)]
        return shipment.request_id in coming

    def _admit_if_complete(self, request_id: str, room: _Room, now_s: float) -> Iterator[Event]:
        shipment, num_tokens = room.shipment, room.num_tokens - room.num_cached_tokens
        if not room.has_token or (num_tokens and shipment is None):
            return
        del self._rooms[request_id]
        self.engine.admit(request_id)
        transfer = TransferRecord(
            request_id=request_id,
            source=shipment.source if shipment else "",
            target=self.name,
            kind=shipment.kind if shipment else "",
            transport="simulated",
            wire=shipment.wire if shipment else "",
            num_tokens=num_tokens,
            num_cached_tokens=room.num_cached_tokens,
            parcels=shipment.parcels if shipment else [],
            ready_s=now_s,
        )
        yield Arrived(request_id, transfer)
