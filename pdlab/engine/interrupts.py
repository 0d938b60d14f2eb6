"""Bookkeeping that Ctrl-C must not cut in half."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold a keyboard interrupt back until the body is done; then let it do what it does.

    For moments that last microseconds: between a sequence's new token and its blocks, text and
    times there is nothing to go back to. Signals reach the main thread only; elsewhere, and where
    another program has installed its own handler in C, this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or handler is None:
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held and callable(handler):
        handler(*held[0])
