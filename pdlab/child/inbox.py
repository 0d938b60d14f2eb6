"""Messages that come on other threads, for who waits for them as for a socket."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from pdlab.child.bell import Bell


@dataclass(frozen=True)
class Ended:
    """The last word of who has ended."""

    reason: str


class Inbox:
    """Messages that other threads put in. It is readable, like a socket, while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._messages: list[Any] = []
        self._reason: str | None = None
        self._bell = Bell()
        self.fileno = self._bell.fileno
        self._is_closed = False

    def put(self, *messages: Any) -> None:
        """Add messages, unless the end was told."""
        with self._lock:
            if self._reason is None and not self._is_closed:
                self._messages += messages
                self._bell.ring()

    def end(self, reason: str) -> None:
        """No more will come, and why; the first reason stays."""
        with self._lock:
            if self._reason is None and not self._is_closed:
                self._reason = reason
                self._bell.ring()

    def receive(self) -> list[Any]:
        """Take out what is there; never waits.

        Raises:
            EOFError: there will be no more; it says why.
        """
        with self._lock:
            messages, self._messages = self._messages, []
            if self._reason is not None and not messages:
                raise EOFError(self._reason)
            if self._reason is None:
                self._bell.silence()
            return messages

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._bell.close()
