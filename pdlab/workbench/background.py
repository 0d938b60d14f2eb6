"""Work that takes a while, in a thread of its own, beside whatever else the kernel does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

REPORT_S = 0.25
"""Between two reports."""


class Report(NamedTuple):
    """How far it is; with a result, or an error, it is over. Stopped is over with neither."""

    num_finished: int = 0
    now_s: float = 0.0
    over: bool = False
    run: Any = None
    error: BaseException | None = None
    stage: str = ""
    """What it does now, where that is more than one thing."""


class Stopped(Exception):
    """Ends the work from within."""


class Background:
    """Work that can be watched, waited for and stopped. A subclass says in `_serve` what it is.

    `report` is called where it may touch widgets: in the event loop that runs when this is made,
    or in plain Python in the thread itself. The loop can be busy, so `wait` reports too.

    Args:
        report: called with the newest state, now and then and at the end.
    """

    def __init__(self, report: Callable[[Report], None]) -> None:
        self._report = report
        self._newest: Report | None = Report()
        self._stopping = threading.Event()
        self._progress = Report()
        self._reported_s = 0.0
        self._loop = _running_loop()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Begin, and return at once."""
        self._thread.start()

    def stop(self) -> None:
        """End as soon as it looks: after the step under way."""
        self._stopping.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, and report."""
        self._thread.join(timeout_s)
        self._deliver()

    def _serve(self) -> Any:
        """The work itself; calls `_tell` now and then."""
        raise NotImplementedError

    def _tell(self, now_s: float = 0.0, *, ended: int = 0, stage: str = "") -> None:
        """How far it is.

        Args:
            ended: how many more have finished since the last call.
            stage: a new one is reported at once.

        Raises:
            Stopped: somebody wants it to end.
        """
        if self._stopping.is_set():
            raise Stopped
        before = self._progress
        self._progress = Report(before.num_finished + ended, now_s, stage=stage)
        clock_s = time.monotonic()
        if stage != before.stage or clock_s - self._reported_s >= REPORT_S:
            self._reported_s = clock_s
            self._post(self._progress)

    def _work(self) -> None:
        try:
            run = self._serve()  # moves the progress on
            self._post(self._progress._replace(over=True, run=run))
        except Stopped:
            self._post(self._progress._replace(over=True))
        except Exception as error:  # what a policy raises may be anything
            self._post(self._progress._replace(over=True, error=error))

    def _post(self, report: Report) -> None:
        self._newest = report
        if self._loop is None or self._loop.is_closed():
            self._deliver()
        else:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        """The newest report, once."""
        report, self._newest = self._newest, None
        if report is not None:
            self._report(report)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
