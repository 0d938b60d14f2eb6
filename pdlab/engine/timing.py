"""Wall time split by stage."""

from __future__ import annotations

import time
from typing import Any

import torch


class StageClock:
    """Adds up the time since the last lap under the name of the stage that just ended.

    On a GPU work is done later than it is asked for, and to wait for it at every lap would leave
    the GPU idle until the next launch. There a lap is an event between two pieces of work; how long
    each took is known when the last is done, for which `stage_s` waits. What the host does alone is
    measured so, too: the GPU then waits for what comes next.
    """

    def __init__(self, device: torch.device | None = None):
        self._device = device if device is not None and device.type == "cuda" else None
        self._stage_s: dict[str, float] = {}
        self._events: list[tuple[str, Any]] = []
        self._last = self._now()

    @property
    def stage_s(self) -> dict[str, float]:
        """Seconds of each stage so far."""
        if self._events:
            self._events[-1][1].synchronize()
        for stage, event in self._events:
            self._add(stage, self._last.elapsed_time(event) / 1e3)
            self._last = event
        self._events.clear()
        return self._stage_s

    def lap(self, stage: str) -> None:
        now = self._now()
        if self._device:
            self._events.append((stage, now))
            return
        self._add(stage, now - self._last)
        self._last = now

    def split(self, stage_s: dict[str, float], rest: str) -> None:
        """The time since the last lap, of which these stages were timed elsewhere."""
        self.lap(rest)
        self._add(rest, -sum(stage_s.values()))
        for stage, seconds in stage_s.items():
            self._add(stage, seconds)

    def _now(self) -> Any:
        """Seconds; or an event, recorded behind all that the GPU was asked for."""
        if self._device is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _add(self, stage: str, seconds: float) -> None:
        self._stage_s[stage] = self._stage_s.get(stage, 0.0) + seconds
