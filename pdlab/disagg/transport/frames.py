"""What travels between two transports: a header that says what it is, and perhaps a payload.

    magic 4 | header bytes 4 | CRC-32 4 | payload bytes 8 | header (JSON) | payload

The header is read with `json`, never unpickled, and what is not as it should be is refused. The
checksum covers both lengths and the header, so that a damaged one is noticed before memory is taken
for the payload; a damaged payload is not noticed here.
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pdlab.disagg.transport.interface import Address, Parcel

MAGIC = b"PDKV"
PREFIX = struct.Struct("!4sIIQ")
LENGTHS = struct.Struct("!IQ")
MAX_HEADER_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 35


class BadFrame(ValueError):
    """Bytes came that no transport of this version sends."""


@dataclass(eq=False)
class Frame:
    """A message of one transport to another.

    Args:
        kind: what it is; each carrier's user defines its own.
        transfer_id: which transfer it is about, or "".
        fields: what else it says: JSON.
        payload: uint8 [num_bytes], or None.
    """

    kind: str
    transfer_id: str = ""
    fields: dict[str, Any] = field(default_factory=dict)
    payload: Tensor | None = None


def encode(frame: Frame) -> bytes:
    """All of a frame but its payload."""
    header = json.dumps([frame.kind, frame.transfer_id, frame.fields]).encode()
    num_bytes = 0 if frame.payload is None else frame.payload.numel()
    checksum = zlib.crc32(LENGTHS.pack(len(header), num_bytes) + header)
    return PREFIX.pack(MAGIC, len(header), checksum, num_bytes) + header


class Prefix(NamedTuple):
    """What stands before a header: its bytes, its checksum, and the bytes of the payload."""

    header_bytes: int
    checksum: int
    payload_bytes: int


def decode_prefix(data: bytes) -> Prefix:
    """The prefix that some bytes begin with.

    Raises:
        BadFrame: this is no frame.
    """
    magic, *rest = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise BadFrame(f"a frame begins with {magic!r}; it must begin with {MAGIC!r}")
    prefix = Prefix(*rest)
    if prefix.header_bytes > MAX_HEADER_BYTES:
        raise BadFrame(f"a header has {prefix.header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
    if prefix.payload_bytes > MAX_PAYLOAD_BYTES:
        raise BadFrame(
            f"a payload has {prefix.payload_bytes} bytes; the limit is {MAX_PAYLOAD_BYTES}"
        )
    return prefix


def decode_header(header: bytes, prefix: Prefix) -> Frame:
    """A frame, its payload allocated but not filled (None if it has no bytes).

    Raises:
        BadFrame: the header is damaged, or not of this version.
    """
    lengths = LENGTHS.pack(prefix.header_bytes, prefix.payload_bytes)
    if zlib.crc32(lengths + header) != prefix.checksum:
        raise BadFrame("the checksum of a header is wrong")
    try:
        kind, transfer_id, fields = json.loads(header)
    except ValueError as error:
        raise BadFrame(f"a header is not a list of three: {error}") from error
    if not (isinstance(kind, str) and isinstance(transfer_id, str) and isinstance(fields, dict)):
        raise BadFrame("a header is not [kind, transfer_id, fields]")
    num_bytes = prefix.payload_bytes
    payload = torch.empty(num_bytes, dtype=torch.uint8) if num_bytes else None
    return Frame(kind, transfer_id, fields, payload)


# --- what frames carry ------------------------------------------------------------------------


def frame_of(parcel: Parcel, **fields: Any) -> Frame:
    """A parcel as a frame."""
    described = {
        "layers": parcel.layers,
        "tokens": parcel.tokens,
        "checksum": parcel.checksum,
        "is_last": parcel.is_last,
        "sent_s": parcel.sent_s,
        "due_s": parcel.due_s,
    }
    return Frame("parcel", parcel.transfer_id, described | fields, parcel.payload)


def parcel_of(frame: Frame, payload: Tensor | None = None) -> Parcel:
    """The parcel that a frame carries, its payload that of the frame if none is given.

    Raises:
        BadFrame: it carries none.
    """
    if payload is None:
        payload = frame.payload
    if payload is None:
        payload = torch.empty(0, dtype=torch.uint8)
    match frame.fields:
        case {
            "layers": [int() as layer, int() as layer_end],
            "tokens": [int() as token, int() as token_end],
            "checksum": int() as checksum,
            "is_last": bool() as is_last,
            "sent_s": int() | float() as sent_s,
            "due_s": int() | float() as due_s,
        }:
            bounds = (layer, layer_end), (token, token_end)
            return Parcel(frame.transfer_id, *bounds, payload, checksum, is_last, sent_s, due_s)
    raise BadFrame(f"a parcel's header is incomplete: {frame.fields}")


def span_of(frame: Frame) -> tuple[int, int]:
    """The first of the parcels that a peer wants, and how many.

    Raises:
        BadFrame: it does not say.
    """
    first, count = frame.fields.get("first"), frame.fields.get("count")
    if not (isinstance(first, int) and isinstance(count, int) and first >= 0 and count >= 0):
        raise BadFrame(f"a frame of kind {frame.kind!r} asks for parcels {first!r}, {count!r}")
    return first, count


def address_of(fields: dict[str, Any]) -> Address:
    """An address that was sent as its fields.

    Raises:
        BadFrame: it is none.
    """
    names = ("kind", "name", "where", "metadata")
    if set(fields) != set(names) or not all(isinstance(fields[name], str) for name in names):
        raise BadFrame(
            f"an address has the fields {sorted(fields)}; they must be {names}, all text"
        )
    return Address(**fields)
