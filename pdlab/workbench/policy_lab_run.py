"""A workload on the real engine, in a thread of its own, beside whatever else the kernel does."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdlab.engine import Engine, EngineConfig
from pdlab.models import Model
from pdlab.workload.replay import Progress, replay
from pdlab.workload.serving import ServingRun
from pdlab.workload.traces import TraceRequest

REPORT_S = 0.25
"""Between two reports."""


class Report(NamedTuple):
    """How far it is; with a run, or an error, it is over. Stopped is over with neither."""

    num_finished: int = 0
    now_s: float = 0.0
    over: bool = False
    run: ServingRun | None = None
    error: BaseException | None = None


class Stopped(Exception):
    """Ends a replay from within."""


class RealRun:
    """Replays requests on an engine that is made and closed in the same thread.

    `report` is called where it may touch widgets: in the event loop that runs when this is made,
    or in plain Python in the thread itself. The loop can be busy, so `wait` reports too.

    Args:
        report: called with the newest state, now and then and at the end.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        requests: Sequence[TraceRequest],
        report: Callable[[Report], None],
    ) -> None:
        self._model, self._config, self._requests = model, config, requests
        self._report = report
        self._newest: Report | None = Report()
        self._stopping = threading.Event()
        self._num_finished, self._reported_s = 0, 0.0
        self._loop = _running_loop()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        """Begin, and return at once."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step under way."""
        self._stopping.set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is over, and report."""
        self._thread.join(timeout_s)
        self._deliver()

    def _work(self) -> None:
        try:
            with Engine(self._model, self._config) as engine:
                run = replay(engine, self._requests, on_step=self._on_step)
            self._post(Report(len(run.requests), run.duration_s, True, run))
        except Stopped:
            self._post(Report(self._num_finished, over=True))
        except Exception as error:  # what a policy raises may be anything
            self._post(Report(self._num_finished, over=True, error=error))

    def _on_step(self, progress: Progress) -> None:
        if self._stopping.is_set():
            raise Stopped
        self._num_finished += len(progress.ended)
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            self._post(Report(self._num_finished, progress.now_s))

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
