"""Wall time split by stage."""

from __future__ import annotations

import time

import torch


class StageClock:
    """Adds up the time since the last lap under the name of the stage that just ended.

    On a GPU each lap waits for the work to finish, or the time would be that of the launch.
    """

    def __init__(self, device: torch.device | None = None):
        self._wait = device is not None and device.type == "cuda"
        self.stage_s: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        if self._wait:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.stage_s[stage] = self.stage_s.get(stage, 0.0) + now - self._last
        self._last = now

    def split(self, stage_s: dict[str, float], rest: str) -> None:
        """The time since the last lap, of which these stages were timed elsewhere."""
        self.lap(rest)
        self.stage_s[rest] -= sum(stage_s.values())
        for stage, seconds in stage_s.items():
            self.stage_s[stage] = self.stage_s.get(stage, 0.0) + seconds
