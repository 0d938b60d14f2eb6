"""Stop strings: found across tokens, cut exactly, and never shown in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Releases text up to where a stop string may have begun.

    The text ends where a stop string first stands complete; of several that end there, with the
    longest. So it does not matter how tokens cut the text. What is held back is the longest end
    of the text that begins a stop string, and no more.

    Args:
        stop: texts to look for, none of them empty.
        include_stop: leave the stop string at the end of the text.
    """

    def __init__(self, stop: Sequence[str] = (), include_stop: bool = False):
        self.stop = tuple(stop)
        self.include_stop = include_stop
        self.held = ""
        """Text that may be the beginning of a stop string."""
        self.found: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, searches: bool = True) -> str:
        """Take in new text; returns what may be shown now.

        Args:
            searches: whether a stop string that is complete in this text ends it.
        """
        if not self.stop:
            return text
        if self.found is not None:
            return ""
        text, num_old = self.held + text, len(self.held)
        if searches and (match := self._first_complete(text, num_old)):
            start, end = match
            self.found, self.held = text[start:end], ""
            return text[: end if self.include_stop else start]
        self.held = self._unfinished(text)
        return text[: len(text) - len(self.held)]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        held, self.held = self.held, ""
        return held

    def _first_complete(self, text: str, num_old: int) -> tuple[int, int] | None:
        """Start and end of the stop string that is complete first, and not in the old text."""
        ends = []
        for stop in self.stop:
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start))
        if not ends:
            return None
        end, start = min(ends)
        return start, end

    def _unfinished(self, text: str) -> str:
        """The longest end of the text that a stop string begins with."""
        longest = max(map(len, self.stop), default=1) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self.stop):
                return text[start:]
        return ""
