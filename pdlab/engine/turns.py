"""Steps for readers on an event loop: run in a thread, one at a time, shared by all who wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns:
    """Lets the tasks of an event loop wait for work that one of them starts in a thread.

    Ten readers that wait for the same step need one thread, not ten.
    """

    def __init__(self) -> None:
        self._current: asyncio.Future[None] | None = None

    async def wait(self, work: Callable[[], None]) -> None:
        """Wait for the work in progress; where there is none, do this.

        A task that is cancelled while it waits leaves the work, which others wait for, alone.
        """
        if self._current is None or self._current.done() or not self._is_of_this_loop():
            self._current = asyncio.ensure_future(asyncio.to_thread(work))
        await asyncio.shield(self._current)

    def _is_of_this_loop(self) -> bool:
        assert self._current is not None
        return self._current.get_loop() is asyncio.get_running_loop()


class Handover(Generic[T]):
    """What a thread makes for a task that may be cancelled meanwhile: one of the two has it.

    Args:
        leave: what to do with it when its task is gone.
    """

    def __init__(self, leave: Callable[[T], None]):
        self._leave = leave
        self._lock = threading.Lock()
        self._made: list[T] = []
        self._is_gone = False

    async def wait(self, make: Callable[[], T]) -> T:
        """What `make` returns, made in a thread."""
        try:
            return await asyncio.to_thread(self._work, make)
        except asyncio.CancelledError:
            with self._lock:
                self._is_gone = True
            for made in self._made:
                self._leave(made)
            raise

    def _work(self, make: Callable[[], T]) -> T:
        made = make()
        with self._lock:
            if not self._is_gone:
                self._made.append(made)
                return made
        self._leave(made)
        return made
