"""Sockets as transports use them: listening, connecting, proving who one is, carrying frames."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import sys
import tempfile
from pathlib import Path

from pdlab.disagg.transport.frames import PREFIX, Frame, decode_header, decode_prefix, encode
from pdlab.disagg.transport.interface import bytes_of

NONCE_BYTES = 32
HANDSHAKE_S = 10.0
"""How long a stranger may take to prove itself, and a peer to answer."""
SILENCE_S = 10
"""After which a TCP peer that does not even acknowledge is lost."""


def listen(family: str, host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket, and where peers find it."""
    if family == "unix":
        # Linux has names that are no files: nothing is left behind by a process that is killed.
        name = f"pdlab-{os.getpid()}-{secrets.token_hex(8)}"
        is_abstract = sys.platform == "linux"
        path = f"\0{name}" if is_abstract else str(Path(tempfile.gettempdir()) / name)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        where = f"unix:@{name}" if is_abstract else f"unix:{path}"
    elif family == "tcp":
        if host in ("", "0.0.0.0", "::"):
            raise ValueError(f"host is {host!r}; it must be the address of one interface")
        listener = socket.create_server((host, port))
        where = f"tcp:{host}:{listener.getsockname()[1]}"
    else:
        raise ValueError(f"family is {family!r}; it must be 'unix' or 'tcp'")
    listener.listen()
    listener.setblocking(False)
    return listener, where


def connect(where: str) -> socket.socket:
    """A connection to where a peer listens."""
    family, _, rest = where.partition(":")
    if family == "unix":
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(HANDSHAKE_S)
        try:
            connected.connect(f"\0{rest[1:]}" if rest.startswith("@") else rest)
        except OSError:
            connected.close()
            raise
        return connected
    host, _, port = rest.rpartition(":")
    connected = socket.create_connection((host, int(port)), timeout=HANDSHAKE_S)
    notice_silence(connected)
    return connected


def notice_silence(connected: socket.socket) -> None:
    """Send small frames at once, and notice a machine that is gone without closing."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", SILENCE_S // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", SILENCE_S // 2),
        ("TCP_USER_TIMEOUT", SILENCE_S * 1000),
    ):
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def prove(connected: socket.socket, token: bytes, me: bytes, peer: bytes) -> None:
    """Show that we know the token, and see that the peer does.

    Raises:
        PermissionError: it does not.
    """
    mine = secrets.token_bytes(NONCE_BYTES)
    connected.sendall(mine)
    theirs = read(connected, NONCE_BYTES)
    connected.sendall(hmac.digest(token, me + theirs, hashlib.sha256))
    answer = read(connected, hashlib.sha256().digest_size)
    if not hmac.compare_digest(answer, hmac.digest(token, peer + mine, hashlib.sha256)):
        raise PermissionError("it does not know the cluster's token")


def read_into(connected: socket.socket, view: memoryview) -> None:
    """Fill a buffer from a socket."""
    while view:
        num_bytes = connected.recv_into(view, 0, socket.MSG_WAITALL)
        if num_bytes == 0:
            raise EOFError("the connection was closed without a goodbye")
        view = view[num_bytes:]


def read(connected: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    read_into(connected, memoryview(buffer))
    return bytes(buffer)


def read_frame(connected: socket.socket) -> Frame:
    prefix = decode_prefix(read(connected, PREFIX.size))
    frame = decode_header(read(connected, prefix.header_bytes), prefix)
    if frame.payload is not None:
        read_into(connected, bytes_of(frame.payload))
    return frame


def write_frame(connected: socket.socket, frame: Frame) -> None:
    connected.sendall(encode(frame))
    if frame.payload is not None and frame.payload.numel():
        connected.sendall(bytes_of(frame.payload))
