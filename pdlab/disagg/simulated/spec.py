"""A worker to simulate: what it is like, and what travels between two of them."""

from __future__ import annotations

from dataclasses import dataclass

from pdlab.costmodel import StepTimes
from pdlab.disagg.worker import Role
from pdlab.engine import EngineConfig
from pdlab.kvcache import KVLayout, Wire
from pdlab.link import Bookings, Link
from pdlab.requirements import require_int, require_number
from pdlab.trace import ParcelRecord


@dataclass(frozen=True)
class SimulatedSpec:
    """A worker to simulate.

    Raises:
        ValueError: a number is out of range.
    """

    role: Role
    config: EngineConfig
    step_times: StepTimes
    kv_bytes_per_token: int = 0
    """Of all layers; where two sides differ, the smaller one travels. `layout` says it better."""
    num_layers: int = 1
    layout: KVLayout | None = None
    """Of the cache: then bytes, and whether layers may leave one by one, are those of the real
    payloads; the two numbers above do nothing. All workers have one, or none has."""
    link: Link | None = None
    """Of what it pushes, and of what it fetches; None for one that takes no time."""
    layers_per_parcel: int = 1
    pack_s_per_byte: float = 0.0
    """What the sender is kept from its next step; its layers leave that much later."""
    unpack_s_per_byte: float = 0.0
    """What the receiver is kept from its next step."""
    num_devices: int = 1
    """For numbers per device."""

    def __post_init__(self) -> None:
        require_int("kv_bytes_per_token", self.kv_bytes_per_token, least=0)
        for name in ("num_layers", "layers_per_parcel", "num_devices"):
            require_int(name, getattr(self, name), least=1)
        for name in ("pack_s_per_byte", "unpack_s_per_byte"):
            require_number(name, getattr(self, name), 0, 1.0)

    @property
    def total_layers(self) -> int:
        return self.layout.num_layers if self.layout else self.num_layers

    def told_layout(self) -> KVLayout:
        """What other workers are told."""
        return self.layout or KVLayout(self.num_layers, 1, 1, self.config.block_size)


@dataclass(frozen=True)
class PlainWire:
    """K and V of which only the bytes are known."""

    bytes_per_token: int
    total_layers: int
    can_stream: bool = True

    @classmethod
    def between(cls, sender: SimulatedSpec, receiver: SimulatedSpec) -> AnyWire:
        """What travels between two workers.

        Raises:
            ValueError: they are not of one model's shape.
        """
        if sender.layout is not None and receiver.layout is not None:
            return Wire.between(sender.layout, receiver.layout)
        ours, theirs = sender.total_layers, receiver.total_layers
        if ours != theirs:
            raise ValueError(f"num_layers={ours} of the sender is {theirs} at the receiver")
        return cls(min(sender.kv_bytes_per_token, receiver.kv_bytes_per_token), ours)

    def num_bytes(self, num_tokens: int, num_layers: int) -> int:
        return self.bytes_per_token * num_tokens * num_layers // self.total_layers

    def __str__(self) -> str:
        return f"{self.bytes_per_token} bytes a token"


AnyWire = PlainWire | Wire


@dataclass(slots=True)
class Shipment:
    """All parcels of a transfer, which is complete at `due_s`."""

    target: str
    source: str
    request_id: str
    kind: str
    wire: str
    parcels: list[ParcelRecord]

    @property
    def due_s(self) -> float:
        return self.parcels[-1].arrived_s

    @property
    def num_bytes(self) -> int:
        return sum([parcel.num_bytes for parcel in self.parcels])


def booked(
    bookings: Bookings, wire: AnyWire, layers: range, tokens: range, sent_s: float
) -> ParcelRecord:
    """A parcel that leaves at `sent_s`, behind what the link has to carry before it."""
    num_bytes = wire.num_bytes(len(tokens), len(layers))
    due_s = bookings.book(num_bytes, sent_s) if bookings.link else sent_s
    return ParcelRecord(
        layers.start, layers.stop, tokens.start, tokens.stop, num_bytes, sent_s, due_s
    )
