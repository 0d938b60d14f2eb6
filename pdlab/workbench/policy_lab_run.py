"""A workload on the real engine, in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pdlab.engine import Engine, EngineConfig
from pdlab.models import Model
from pdlab.workbench.background import Background, Report
from pdlab.workload.replay import Progress, replay
from pdlab.workload.serving import ServingRun
from pdlab.workload.traces import TraceRequest


class RealRun(Background):
    """Replays requests on an engine that is made and closed in the same thread."""

    def __init__(
        self,
        model: Model,
        config: EngineConfig,
        requests: Sequence[TraceRequest],
        report: Callable[[Report], None],
    ) -> None:
        super().__init__(report)
        self._model, self._config, self._requests = model, config, requests

    def _serve(self) -> ServingRun:
        with Engine(self._model, self._config) as engine:
            return replay(engine, self._requests, on_step=self._on_step)

    def _on_step(self, progress: Progress) -> None:
        self._tell(progress.now_s, ended=len(progress.ended))
