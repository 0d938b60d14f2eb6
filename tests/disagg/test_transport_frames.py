"""What a socket transport does with bytes that are not what a peer sends."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict

import pytest

from pdlab.disagg.transport.frames import (
    MAX_HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
    PREFIX,
    BadFrame,
    Frame,
    address_of,
    decode_header,
    decode_prefix,
    encode,
    frame_of,
    parcel_of,
)
from pdlab.disagg.transport.interface import Address
from pdlab.disagg.transport.socket_io import connect, prove
from pdlab.disagg.transport.sockets import SocketTransport, new_token
from tests.disagg.bodies import TOKEN, await_failures, parcels_of, receive, same


def decoded(data: bytes) -> Frame:
    prefix = decode_prefix(data)
    return decode_header(data[PREFIX.size :][: prefix.header_bytes], prefix)


def sealed(header: bytes, payload_bytes: int = 0) -> bytes:
    """A frame with any header and the right checksum."""
    checksum = zlib.crc32(struct.pack("!IQ", len(header), payload_bytes) + header)
    return PREFIX.pack(b"PDKV", len(header), checksum, payload_bytes) + header


def test_frames_survive() -> None:
    (parcel,) = parcels_of('世 "界"', [1000])
    frame = decoded(encode(frame_of(parcel, index=3)))
    assert frame.fields["index"] == 3
    assert same([parcel_of(frame, parcel.payload)], [parcel])


def test_every_damaged_bit_of_a_head_is_noticed() -> None:
    head = encode(frame_of(parcels_of("t", [5])[0]))
    for bit in range(8 * len(head)):
        damaged = bytearray(head)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFrame):
            decoded(bytes(damaged))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"GET " + bytes(16), "begins with b'GET '"),
        (PREFIX.pack(b"PDKV", MAX_HEADER_BYTES + 1, 0, 0), "65537 bytes; the limit is 65536"),
        (PREFIX.pack(b"PDKV", 1, 0, MAX_PAYLOAD_BYTES + 1), "payload has 34359738369"),
        (sealed(b"\x80\x04K\x01."), "not a list of three"),
        (sealed(b"[1, 2]"), "not a list of three"),
        (sealed(b'["parcel", 7, {}]'), "not .kind, transfer_id, fields"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadFrame, match=message):
        decoded(data)


@pytest.mark.parametrize(
    "change",
    [{"layers": [0]}, {"tokens": "ab"}, {"checksum": None}, {"is_last": 1}, {"due_s": "0"}],
)
def test_a_parcel_with_a_wrong_field_is_refused(change: dict) -> None:
    frame = frame_of(parcels_of("t", [5])[0], **change)
    with pytest.raises(BadFrame, match="incomplete"):
        parcel_of(frame)


def test_an_address_with_other_fields_is_refused() -> None:
    with pytest.raises(BadFrame, match="fields"):
        address_of({"kind": "socket", "name": "x"})


# --- who connects -----------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[SocketTransport]:
    transport = SocketTransport(TOKEN)
    yield transport
    transport.close()


def let_in(to: SocketTransport, name: str) -> tuple[socket.socket, Address]:
    """A peer that knows the token, and sends what the test wants."""
    connected = connect(to.address.where)
    prove(connected, TOKEN.encode(), b"connects", b"listens")
    me = Address("socket", name, "unix:@nowhere")
    connected.sendall(encode(Frame("hello", fields=asdict(me))))
    return connected, me


@pytest.mark.parametrize("family", ["unix", "tcp"])
def test_a_transport_with_another_token_is_refused(family) -> None:
    a = SocketTransport(new_token(), family=family)
    b = SocketTransport(new_token(), family=family)
    a.send(b.address, parcels_of("t", [5])[0])
    failures = await_failures(a, None, "t")
    assert all("token" in failure.reason for failure in failures)
    assert b.receive() == []
    assert b.failures() == []
    a.close()
    b.close()


def test_a_stranger_learns_nothing_and_harms_nobody(listener: SocketTransport) -> None:
    with connect(listener.address.where) as stranger:
        stranger.sendall(encode(Frame("hello", fields={})).ljust(200))
        assert len(stranger.recv(1000)) in (32, 64)  # a number, and perhaps a proof of ours
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(1000):
                pass
    assert listener.failures() == []
    peer = SocketTransport(TOKEN)
    sent = parcels_of("t", [5])
    peer.send(listener.address, sent[0])
    assert same(receive(listener, 1), sent)
    peer.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"X" * PREFIX.size, "begins with b'XXXX'"),
        (encode(frame_of(parcels_of("t", [5])[0]))[:-1] + b"!", "checksum"),
        (encode(Frame("surprise")), "'surprise'"),
        (encode(Frame("parcel", "t", {"layers": 1})), "incomplete"),
        (encode(Frame("fetch", "t", {"first": "x"})), "asks for parcels 'x', None"),
        (b"", "without a goodbye"),
    ],
)
def test_a_bad_frame_ends_the_connection(
    listener: SocketTransport, data: bytes, message: str
) -> None:
    connected, me = let_in(listener, "crooked")
    with connected:
        connected.sendall(data)
        connected.shutdown(socket.SHUT_WR)
        (failure,) = await_failures(listener, None)
        assert connected.recv(1) == b""
    assert failure.peer == me
    assert message in failure.reason


def test_a_header_is_json_and_nothing_else() -> None:
    data = encode(Frame("parcel", "t", {"a": [1, None, True, 0.1]}))
    header = json.loads(data[PREFIX.size :])
    assert header == ["parcel", "t", {"a": [1, None, True, 0.1]}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": "short"}, "token has 5 characters.* 16"),
        ({"family": "pigeon"}, "family is 'pigeon'"),
        ({"family": "tcp", "host": "0.0.0.0"}, "host is '0.0.0.0'.*one interface"),
        ({"family": "tcp", "host": ""}, "host is ''.*one interface"),
    ],
)
def test_bad_options_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SocketTransport(**{"token": TOKEN, **options})


def test_a_tcp_transport_listens_on_loopback_only() -> None:
    transport = SocketTransport(TOKEN, family="tcp")
    assert transport.address.where.startswith("tcp:127.0.0.1:")
    transport.close()
