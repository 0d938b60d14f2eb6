"""What leaves a simulated worker, and when: layer by layer, or whole prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pdlab.disagg.messages import Route
from pdlab.disagg.prefill_worker import whole_parcels
from pdlab.disagg.simulated.spec import (
    AnyWire,
    PlainWire,
    Shipment,
    SimulatedSpec,
    booked,
)
from pdlab.link import Bookings
from pdlab.trace import ParcelRecord


@dataclass(slots=True)
class _Outgoing:
    """A request whose layers leave as they are computed."""

    route: Route
    wire: AnyWire
    num_tokens: int
    num_sent: int
    parcels: list[ParcelRecord] = field(default_factory=list)


class SimulatedSender:
    """One end of a link: what is sent, and what is fetched, is booked on it one after the other.

    Args:
        specs: of all workers, by name.
    """

    def __init__(self, name: str, specs: Mapping[str, SimulatedSpec]):
        self.name = name
        self.spec = specs[name]
        self.outbox: list[Shipment] = []
        """What has left, and is not yet taken by whoever carries it."""
        self._specs = specs
        self._wires: dict[tuple[str, str], AnyWire] = {}
        self._bookings = Bookings(self.spec.link)
        self._outgoing: dict[str, _Outgoing] = {}

    def wire(self, source: str, target: str) -> AnyWire:
        """How K and V travel between two workers.

        Raises:
            ValueError: they are not of one model's shape.
        """
        key = source, target
        if key not in self._wires:
            self._wires[key] = PlainWire.between(self._specs[source], self._specs[target])
        return self._wires[key]

    def forget(self, request_id: str) -> None:
        self._outgoing.pop(request_id, None)

    # --- whole prompts --------------------------------------------------------------------------

    def push(self, request_id: str, route: Route, num_tokens: int, now_s: float) -> float:
        """Send what the receiver lacks; returns when it is packed."""
        tokens = range(route.num_cached_tokens, num_tokens)
        wire, parcels = self.wire(self.name, route.worker), []
        for layers in self._parcels(wire, tokens):
            now_s += self.spec.pack_s_per_byte * wire.num_bytes(len(tokens), len(layers))
            parcels.append(booked(self._bookings, wire, layers, tokens, now_s))
        self._ship(request_id, self.name, route.worker, "push", parcels)
        return now_s

    def fetch(self, request_id: str, source: str, tokens: range, now_s: float) -> None:
        """Pull what is missing here."""
        wire = self.wire(source, self.name)
        parcels = [
            booked(self._bookings, wire, layers, tokens, now_s)
            for layers in self._parcels(wire, tokens)
        ]
        self._ship(request_id, source, self.name, "pull", parcels)

    def _parcels(self, wire: AnyWire, tokens: range) -> Iterable[range]:
        layer_bytes = wire.num_bytes(len(tokens), 1)
        return whole_parcels(layer_bytes, self.spec.total_layers) if tokens else ()

    def _ship(
        self, request_id: str, source: str, target: str, kind: str, parcels: list[ParcelRecord]
    ) -> None:
        if parcels:
            wire = str(self.wire(source, target))
            self.outbox.append(Shipment(target, source, request_id, kind, wire, parcels))

    # --- layer by layer -------------------------------------------------------------------------

    @property
    def is_streaming(self) -> bool:
        """Whether there is a request whose layers leave as they are computed."""
        return bool(self._outgoing)

    def stream(self, request_id: str, route: Route, num_tokens: int) -> None:
        """From now on, a request's layers leave as they are computed.

        Raises:
            ValueError: they cannot travel there.
        """
        wire = self.wire(self.name, route.worker)
        self._outgoing[request_id] = _Outgoing(route, wire, num_tokens, route.num_cached_tokens)

    def send_layers(
        self, computed: Iterable[tuple[str, int, int]], start_s: float, end_s: float
    ) -> float:
        """Book what leaves in the course of a step: its layers take equally long.

        Args:
            computed: requests, and of which tokens the step computes K and V: from, to.

        Returns:
            how much longer the step takes, because of the packing.
        """
        sends = []
        for request_id, start, end in computed:
            out = self._outgoing.get(request_id)
            if out is None or not out.wire.can_stream:
                continue
            if out.num_sent > max(start, out.route.num_cached_tokens):  # computed once more
                out.num_sent = out.route.num_cached_tokens
                out.parcels = []
            tokens, out.num_sent = range(out.num_sent, end), max(out.num_sent, end)
            if tokens:
                sends.append((request_id, out, tokens))
        pack_s = self._book_layers(sends, start_s, end_s) if sends else 0.0
        for request_id, out, tokens in sends:
            if tokens.stop == out.num_tokens:
                self._ship(request_id, self.name, out.route.worker, "stream", out.parcels)
        return pack_s

    def _book_layers(
        self, sends: list[tuple[str, _Outgoing, range]], start_s: float, end_s: float
    ) -> float:
        """Layer by layer, and in each layer one request after the other, as the real worker."""
        num_layers, at_once = self.spec.total_layers, self.spec.layers_per_parcel
        layer_s, pack_s, bookings = (end_s - start_s) / num_layers, 0.0, self._bookings
        for first in range(0, num_layers, at_once):
            end = min(first + at_once, num_layers)
            for _, out, tokens in sends:
                num_bytes = out.wire.num_bytes(len(tokens), end - first)
                pack_s += self.spec.pack_s_per_byte * num_bytes
                sent_s = start_s + end * layer_s + pack_s
                due_s = bookings.book(num_bytes, sent_s) if bookings.link else sent_s
                span = first, end, tokens.start, tokens.stop
                out.parcels.append(ParcelRecord(*span, num_bytes, sent_s, due_s))
        return pack_s

    def note_held(self, request_id: str, now_s: float) -> float:
        """A request's prompt is computed: what could not leave by layers leaves now.

        Returns:
            when it is packed.
        """
        out = self._outgoing.pop(request_id, None)
        if out is None or out.wire.can_stream:
            return now_s
        return self.push(request_id, out.route, out.num_tokens, now_s)
