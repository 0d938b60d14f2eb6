"""What lets a thread wait for news as it waits for sockets."""

from __future__ import annotations

import socket


class Bell:
    """Readable from `ring` to `silence`. Those who use it hold a lock of theirs meanwhile."""

    def __init__(self) -> None:
        self._ear, self._button = socket.socketpair()
        self._is_ringing = self._is_closed = False

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`."""
        return self._ear.fileno()

    def ring(self) -> None:
        if not self._is_ringing and not self._is_closed:
            self._is_ringing = True
            self._button.send(b"!")

    def silence(self) -> None:
        if self._is_ringing and not self._is_closed:
            self._ear.recv(1)
            self._is_ringing = False

    def close(self) -> None:
        self._is_closed = True
        self._ear.close()
        self._button.close()
