"""How an answer reaches the page while it streams: in pieces, and not too many of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pdlab.engine.conversation import Turn
from pdlab.workbench.chat_data import cached_to, num_forgotten, stats_data

if TYPE_CHECKING:
    from pdlab.workbench.chat import Chat

DELTA_S = 0.05
"""Least time between two pieces."""


class Page:
    """Sends what is new of one answer, at most every DELTA_S.

    Pieces are numbered, so that a view that was opened meanwhile notices what it lacks.
    """

    def __init__(self, widget: Chat):
        self.widget = widget
        self.sent = 0
        """Characters of the answer."""
        self.number = 0
        """Of the last piece."""
        self.last_s = -DELTA_S

    def update(self) -> None:
        """Send what has come since; the rest of an answer comes with its end."""
        now = time.perf_counter()
        if now - self.last_s < DELTA_S:
            return
        if not self.number:
            self._tell_what_was_found()
        turn, self.last_s = self._turn, now
        self._send("delta", turn.answer[self.sent :])
        self.sent = len(turn.answer)

    def send_all(self) -> None:
        """The answer so far, for a view that lacks the beginning."""
        if self.number:
            self.number -= 1  # it stands for the last piece
            self._send("all", self._turn.answer[: self.sent])

    def _tell_what_was_found(self) -> None:
        self.widget.num_forgotten = num_forgotten(self.widget.conversation)
        self.widget.cached_to = list(cached_to(self.widget.conversation) or ())

    def _send(self, kind: str, text: str) -> None:
        stats = stats_data(self._turn)
        self.number += 1
        self.widget.send({"type": kind, "number": self.number, "text": text, "stats": stats})

    @property
    def _turn(self) -> Turn:
        turn = self.widget.conversation.turn
        assert turn is not None
        return turn
