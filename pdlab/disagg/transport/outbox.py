"""Frames that wait to be sent on one connection."""

from __future__ import annotations

import threading
from collections import deque

from pdlab.disagg.transport.frames import Frame


class Outbox:
    """A queue between those who send and the thread that does it."""

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._sending: Frame | None = None
        self._change = threading.Condition()
        self._is_leaving = False
        self._is_over = False

    def put(self, frame: Frame) -> bool:
        """Queue a frame, unless it is over."""
        with self._change:
            if self._is_over or self._is_leaving:
                return False
            self._frames.append(frame)
            self._change.notify()
            return True

    def drop(self, transfer_id: str) -> bool:
        """Drop the parcels of a transfer; whether there were any, or one is being sent."""

        def is_of_it(frame: Frame | None) -> bool:
            return frame is not None and (frame.kind, frame.transfer_id) == ("parcel", transfer_id)

        with self._change:
            before = len(self._frames)
            self._frames = deque(frame for frame in self._frames if not is_of_it(frame))
            return is_of_it(self._sending) or len(self._frames) < before

    def say_goodbye(self) -> None:
        """Drop all, and let a goodbye be the last."""
        with self._change:
            self._frames = deque([Frame("goodbye")])
            self._is_leaving = True
            self._change.notify()

    def take(self) -> Frame | None:
        """The next frame, once there is one, the one before it being sent; None at the end."""
        with self._change:
            self._sending = None
            while not self._frames and not self._is_leaving and not self._is_over:
                self._change.wait()
            if self._is_over or not self._frames:
                return None
            self._sending = self._frames.popleft()
            return self._sending

    def end(self) -> list[str]:
        """Drop all, and end `take`; the transfers of which something was not sent."""
        with self._change:
            frames = [self._sending, *self._frames]
            self._frames.clear()
            self._is_over = True
            self._change.notify()
            return sorted({frame.transfer_id for frame in frames if frame and frame.transfer_id})
