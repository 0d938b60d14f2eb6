"""How KV gets from one worker to another: the interface, and the data that crosses it.

A transport knows bytes, not blocks: a parcel's payload is opaque. It moves what it is given and
does not check it; whoever unpacks a parcel compares the checksum.

    push    sender: send(address, parcel) ...              receiver: receive()
    pull    holder: ticket = publish(transfer_id, parcels)
            (the ticket travels with the request)          receiver: fetch(ticket), receive()
            holder: withdraw(transfer_id)

A transport does not raise for a peer that is gone, and waits for none: `failures()` tells.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdlab.link import Link

MAX_ID_BYTES = 256
"""How long a transfer's id may be, in UTF-8."""


def bytes_of(payload: Tensor) -> memoryview:
    """A payload's bytes, not copied if it is on the CPU."""
    return memoryview(payload.cpu().numpy())  # type: ignore[arg-type]


def checksum_of(payload: Tensor) -> int:
    """CRC-32 of a payload's bytes."""
    return zlib.crc32(bytes_of(payload))


@dataclass(frozen=True, eq=False)
class Parcel:
    """K and V of some layers and tokens, packed: what one message carries.

    Args:
        transfer_id: which transfer it belongs to. An id stands for one attempt: it is not used
            again once the transfer has failed or was withdrawn.
        layers, tokens: (first, end) of what is packed.
        payload: uint8 [num_bytes], contiguous. It belongs to the transport once it was sent: the
            bytes are read later. It arrives on the CPU, unless the transport was told a device.
        checksum: CRC-32 of the payload when it was packed.
        is_last: no parcel of this transfer comes after it.
        sent_s: when it left or, for pull, was asked for (`time.perf_counter`).
        due_s: when a simulated link lets it arrive; 0 is at once. The transport sets both.

    Raises:
        ValueError: the payload is no uint8 vector, or the id is empty or too long.
    """

    transfer_id: str
    layers: tuple[int, int]
    tokens: tuple[int, int]
    payload: Tensor
    checksum: int
    is_last: bool
    sent_s: float = 0.0
    due_s: float = 0.0

    def __post_init__(self) -> None:
        payload = self.payload
        if payload.dtype != torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
            raise ValueError(
                f"payload is {payload.dtype} {list(payload.shape)}; it must be a contiguous "
                "torch.uint8 vector"
            )
        num_bytes = len(self.transfer_id.encode())
        if not 1 <= num_bytes <= MAX_ID_BYTES:
            raise ValueError(f"transfer_id has {num_bytes} bytes; it must have 1 to {MAX_ID_BYTES}")

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.payload.numel()


def make_parcel(
    transfer_id: str, layers: range, tokens: range, payload: Tensor, is_last: bool
) -> Parcel:
    """A parcel with the checksum of its payload.

    Raises:
        ValueError: see `Parcel`.
    """
    bounds = (layers.start, layers.stop), (tokens.start, tokens.stop)
    parcel = Parcel(transfer_id, *bounds, payload, 0, is_last)
    return replace(parcel, checksum=checksum_of(payload))


@dataclass(frozen=True)
class Address:
    """What a peer needs to reach a transport: plain data that pickles.

    A transport that is started again has a new name: for its peers it is somebody else.

    Args:
        kind: the transport it is of.
        name: unique in its cluster.
        where: how to reach it, in the transport's own notation.
        metadata: more of it, for transports that need more.
    """

    kind: str
    name: str
    where: str
    metadata: str = ""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Ticket:
    """What a peer needs to fetch published parcels: plain data that pickles.

    Args:
        transfer_id: what was published.
        source: who holds it.
        first: of all that was published under this id, the first parcel that the ticket is for.
        sizes: bytes of each parcel from there on.
        regions: where they stand in the holder's memory, for transports that read it directly.
    """

    transfer_id: str
    source: Address
    first: int
    sizes: tuple[int, ...]
    regions: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes that a fetch moves."""
        return sum(self.sizes)


class Failure(NamedTuple):
    """A peer was lost (`transfer_id` is None), or a transfer to or from it came to nothing."""

    transfer_id: str | None
    peer: Address
    reason: str


class Transport(ABC):
    """Moves parcels between the workers of a cluster, in the order of each transfer.

    All methods but `wait` return at once. None raises for what happens to a peer.
    """

    name: str
    """What it is called in traces and pictures."""
    address: Address
    link: Link | None = None
    """The slower link that is simulated for what is sent and fetched here."""

    @abstractmethod
    def send(self, to: Address, parcel: Parcel) -> None:
        """Push a parcel to a peer."""

    @abstractmethod
    def publish(self, transfer_id: str, parcels: Sequence[Parcel]) -> Ticket:
        """Keep parcels for a peer to fetch, until they are withdrawn.

        Published again, a transfer grows; each ticket is for what was added with it.

        Raises:
            ValueError: a parcel belongs to another transfer.
        """

    @abstractmethod
    def fetch(self, ticket: Ticket) -> None:
        """Start to pull parcels. They arrive as if they were pushed."""

    @abstractmethod
    def withdraw(self, transfer_id: str) -> None:
        """Forget a transfer, on whichever side: what was not sent is not, what comes is dropped.

        A receiver that misses parcels because its peer withdrew them finds that in `failures()`.
        """

    @abstractmethod
    def receive(self) -> list[Parcel]:
        """Parcels that have arrived and are due since the last call."""

    @abstractmethod
    def failures(self) -> list[Failure]:
        """Peers lost and transfers failed since the last call, each told once."""

    @abstractmethod
    def wait(self, timeout_s: float, others: Sequence[Any] = ()) -> None:
        """Block until there may be something to receive or a failure, or `timeout_s` have passed.

        Args:
            others: what else may end the wait by becoming readable: a pipe's connection, a socket.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop: end all threads, free all memory, drop what was not sent. Closing again is nothing.

        Peers are told: to them it is no failure, unless transfers were under way.
        """
