"""The working end of a line, whatever carries the messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from typing import Any, Protocol


class Pipe(Protocol):
    """What a loop needs of it. `drain` sends all, however long it takes."""

    def fileno(self) -> int: ...
    def receive(self) -> list[Any]: ...
    def send(self, message: Any) -> None: ...
    def drain(self) -> None: ...


def messages_of(pipe: Pipe, first: Iterable[Any] = ()) -> Iterator[Any]:
    """What is said, until the other end is gone; before it, `first`."""
    yield from first
    try:
        while True:
            yield from pipe.receive()
            wait([pipe.fileno()])
    except EOFError:
        return
