"""Messages between a process and one that it has started."""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
import struct
from typing import Any

LENGTH = struct.Struct("!Q")
READ_BYTES = 1 << 18


class SocketChannel:
    """Messages over a socket, pickled. Both ends trust each other: one has started the other."""

    def __init__(self, connected: socket.socket):
        connected.setblocking(False)
        self._socket = connected
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._has_ended = False

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`: readable when something came, or the end did."""
        return self._socket.fileno()

    def send(self, message: Any) -> None:
        """Queue a message. If nobody is there any more, `receive` says so."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        self._outgoing += LENGTH.pack(len(data)) + data
        with contextlib.suppress(OSError):
            self.flush()

    def flush(self) -> bool:
        """Send what the other end has room for; whether that was all.

        Raises:
            OSError: the other end is gone.
        """
        while self._outgoing:
            try:
                num_sent = self._socket.send(self._outgoing[:READ_BYTES])
            except BlockingIOError:
                return False
            del self._outgoing[:num_sent]
        return True

    def drain(self) -> None:
        """Send all there is, and wait for room as long as it takes.

        Raises:
            OSError: the other end is gone.
        """
        while not self.flush():
            select.select([], [self._socket], [])

    def wait(self, timeout_s: float) -> None:
        """Until something has come or, where something is still to be sent, there is room."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
        poll.poll(1000 * timeout_s)

    def receive(self) -> list[Any]:
        """The messages that have come; never waits. Sends what can be sent now.

        Raises:
            EOFError: there will be no more.
        """
        with contextlib.suppress(OSError):
            self.flush()
        while not self._has_ended:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self._has_ended = not data
            self._incoming += data
        messages = list(iter(self._next, None))
        if self._has_ended and not messages:
            raise EOFError("the other end is gone")
        return messages

    def _next(self) -> Any:
        """The next message; None if it has not come, or not wholly."""
        if len(self._incoming) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        message = pickle.loads(self._incoming[LENGTH.size : end])
        del self._incoming[:end]
        return message

    def close(self) -> None:
        self._socket.close()
