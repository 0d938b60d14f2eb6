"""The half of a worker that computes prompts for others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdlab.disagg.half import Half
from pdlab.disagg.messages import (
    Event,
    Failed,
    Prefill,
    Published,
    Route,
    request_of,
    transfer_name,
)
from pdlab.disagg.transport.interface import Parcel, make_parcel
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.kvcache import Wire

PARCEL_BYTES = 16 * 2**20
"""Whole prompts travel in parcels of some layers, of no more than about this."""


def whole_parcels(layer_bytes: int, num_layers: int) -> Iterator[range]:
    """The layers of each parcel of a prompt that travels at once."""
    at_once = max(1, PARCEL_BYTES // max(1, layer_bytes))
    for first in range(0, num_layers, at_once):
        yield range(first, min(first + at_once, num_layers))


@dataclass
class Outgoing:
    """A request whose K and V leave while they are computed."""

    route: Route
    wire: Wire
    transfer_id: str
    num_sent: int
    """Tokens of which every layer has left."""
    num_packed_layers: int = 0
    """Layers of the step under way that have left."""
    is_broken: bool = False
    """Whether the step under way has sent some of its layers and not all."""


@dataclass(eq=False)
class PrefillWorker(Half):
    """Computes prompts on an engine, keeps their K and V under a lease, and sends them.

    It queues K and V only for who has promised room for them, those of each request at most once,
    and takes them back as it forgets the request: so what waits to be sent is never more than what
    its requests have in its cache.
    """

    layers_per_parcel: int = field(default=1, kw_only=True)
    """Layers that leave together, of those that leave as they are computed."""
    outgoing: dict[str, Outgoing] = field(default_factory=dict, init=False)
    leases: dict[str, float] = field(default_factory=dict, init=False)
    """When the lease of each held request ends, on `clock`."""
    _transfers: dict[str, list[str]] = field(default_factory=dict, init=False)
    """Those of each request that were not withdrawn, the newest last."""
    _num_transfers: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.num_layers = self.engine.kv_layout.num_layers
        self.engine.kv_port.on_layer = self._on_layer

    def prefill(self, command: Prefill) -> None:
        """Queue a request; its route, if it has one, is taken as soon as it runs.

        Raises:
            ValueError: it can never be served here, or the layouts do not go together.
        """
        route, wire = command.route, None
        if route is not None:
            wire = Wire.between(self.engine.kv_layout, route.layout)
        self.engine.resume(
            command.state,
            request_id=command.request_id,
            holds=True,
            **self.urgency(command.arrival),
        )
        if route is not None and wire is not None:
            self.outgoing[command.request_id] = Outgoing(
                route, wire, self._new_transfer(command.request_id), route.num_cached_tokens
            )

    def _new_transfer(self, request_id: str) -> str:
        self._num_transfers += 1
        transfer_id = transfer_name(request_id, self.name, self._num_transfers)
        self._transfers.setdefault(request_id, []).append(transfer_id)
        return transfer_id

    def _withdraw_old(self, request_id: str) -> None:
        """Give up all transfers of a request but the newest.

        Of pushes: once something of the newest has left, by which the receiver can tell that the
        others are late, and that nothing is missing.
        """
        *old, newest = self._transfers[request_id]
        self._transfers[request_id] = [newest]
        for transfer_id in old:
            self.transport.withdraw(transfer_id)

    # --- sending --------------------------------------------------------------------------------

    def _on_layer(self, batch: ScheduledBatch, layer: int) -> None:
        """Send what the step under way has computed, for those with a route."""
        if not self.outgoing:
            return
        is_last_layer = layer == self.num_layers - 1
        for part in batch.scheduled:
            out = self.outgoing.get(part.sequence.request_id)
            if out is None or not out.wire.can_stream:
                continue
            if layer == 0:
                self._begin_step(out, part.start)
            if not is_last_layer and layer + 1 - out.num_packed_layers < self.layers_per_parcel:
                continue
            tokens = range(out.num_sent, part.end)
            layers = range(out.num_packed_layers, layer + 1)
            out.num_packed_layers = layer + 1
            if is_last_layer:
                out.num_sent, out.is_broken = max(out.num_sent, part.end), False
            if tokens:
                self._send(out, layers, tokens, is_last=part.samples and is_last_layer)

    def _begin_step(self, out: Outgoing, start: int) -> None:
        """What was sent before is computed again after a preemption, or a step that failed."""
        out.num_packed_layers = 0
        if out.num_sent > max(start, out.route.num_cached_tokens) or out.is_broken:
            out.transfer_id = self._new_transfer(request_of(out.transfer_id))
            out.num_sent = out.route.num_cached_tokens
        out.is_broken = True

    def _send(self, out: Outgoing, layers: range, tokens: range, is_last: bool) -> None:
        request_id = request_of(out.transfer_id)
        payload = self.engine.pack_kv(request_id, layers, tokens, out.wire)
        parcel = make_parcel(out.transfer_id, layers, tokens, payload, is_last=is_last)
        self.transport.send(out.route.address, parcel)
        self._withdraw_old(request_id)

    def send(self, request_id: str, route: Route) -> None:
        """Push all of a held request's K and V that the receiver lacks.

        Raises:
            ValueError: the layouts do not go together.
        """
        for parcel in self._parcels(request_id, route, self._new_transfer(request_id)):
            self.transport.send(route.address, parcel)
            self._withdraw_old(request_id)

    def publish(self, request_id: str, route: Route) -> Published:
        """Let the receiver fetch them.

        Raises:
            ValueError: the layouts do not go together.
        """
        transfer_id = self._new_transfer(request_id)
        self._withdraw_old(request_id)
        parcels = list(self._parcels(request_id, route, transfer_id))
        return Published(request_id, self.transport.publish(transfer_id, parcels))

    def _parcels(self, request_id: str, route: Route, transfer_id: str) -> Iterator[Parcel]:
        wire = Wire.between(self.engine.kv_layout, route.layout)
        num_tokens = self.engine.sequence_of(request_id).num_computed_tokens
        tokens = range(route.num_cached_tokens, num_tokens)
        if not tokens:
            return
        for layers in whole_parcels(wire.num_bytes(len(tokens), 1), self.num_layers):
            payload = self.engine.pack_kv(request_id, layers, tokens, wire)
            is_last = layers.stop == self.num_layers
            yield make_parcel(transfer_id, layers, tokens, payload, is_last=is_last)

    # --- leases ---------------------------------------------------------------------------------

    def note_held(self, request_id: str) -> None:
        """A request's prompt is computed: its lease begins, and what could not stream leaves."""
        self.renew(request_id)
        out = self.outgoing.pop(request_id, None)
        if out is not None and not out.wire.can_stream:
            self.send(request_id, out.route)

    def renew(self, request_id: str) -> None:
        self.leases[request_id] = self.clock() + self.lease_s

    def holds(self, request_id: str) -> bool:
        return request_id in self.leases

    def forget(self, request_id: str) -> None:
        """Give up what this half keeps of a request; one that is held, gives its blocks back."""
        self.outgoing.pop(request_id, None)
        for transfer_id in self._transfers.pop(request_id, []):
            self.transport.withdraw(transfer_id)
        if self.leases.pop(request_id, None) is not None:
            self.engine.let_go(request_id)

    def expire(self) -> Iterator[Event]:
        """Free what nobody wanted in time."""
        now_s = self.clock()
        for request_id in [r for r, end_s in self.leases.items() if end_s <= now_s]:
            self.forget(request_id)
            yield Failed(request_id, f"its lease of {self.lease_s:g} s ended")
