"""The PDLab's workload on real processes of this machine, beside its simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pdlab.bench.disaggregation import warm_up
from pdlab.disagg.hosts.processes import process_cluster
from pdlab.disagg.hosts.spec import WorkerSpec, local_specs
from pdlab.disagg.replay import Session, replay_on_cluster
from pdlab.disagg.serving import ClusterRun
from pdlab.models import Model
from pdlab.workbench.background import Background, Report
from pdlab.workbench.pd_lab_data import compared, end_of, picture_of, slower_by
from pdlab.workbench.pd_lab_machines import Device
from pdlab.workbench.pd_lab_settings import Plan, Settings
from pdlab.workload.traces import TraceRequest

STARTING, WARMING_UP, SERVING = "starting", "warming up", "serving"


class RealClusterRun(Background):
    """Starts a process for each worker of a plan, replays requests on them, and ends them.

    Whatever becomes of it, no process is left. Stopped while they begin, it ends when they have.
    """

    def __init__(
        self,
        model: Model,
        plan: Plan,
        requests: Sequence[TraceRequest],
        report: Callable[[Report], None],
    ) -> None:
        super().__init__(report)
        self._model, self._plan, self._requests = model, plan, requests
        self._num_ended = 0

    def _serve(self) -> ClusterRun:
        self._tell(stage=STARTING)
        specs = real_specs(self._plan, self._model.name)
        with process_cluster(self._model, specs, self._plan.router, seed=0) as cluster:
            self._tell(stage=WARMING_UP)
            for _ in self._plan.workers:  # one prompt each, so that none is left out
                warm_up(cluster)
            self._tell(stage=SERVING)
            return replay_on_cluster(cluster, self._requests, on_step=self._on_step)

    def _on_step(self, session: Session) -> None:
        ended = len(session.ended) - self._num_ended
        self._num_ended += ended
        self._tell(session.now_s, ended=ended, stage=SERVING)


def real_specs(plan: Plan, model: str) -> list[WorkerSpec]:
    """The workers of a plan as processes of this machine, with a thread each.

    They have the names and the engines' knobs of the plan, and its simulated link.
    """
    workers = plan.workers
    num_prefill = sum(spec.role == "prefill" for spec in workers.values())
    link = next(iter(workers.values())).link
    specs = local_specs(
        num_prefill, len(workers) - num_prefill, model=model, link=link, num_threads=1
    )
    return [
        replace(spec, name=name, role=told.role, config=replace(told.config, record_trace=True))
        for spec, (name, told) in zip(specs, workers.items(), strict=True)
    ]


@dataclass
class RealSide:
    """A run for real, and the simulation of exactly its requests."""

    mode: str
    settings: Settings
    device: Device
    simulated: ClusterRun
    work: RealClusterRun
    num_simulations: int
    """Made by the lab when it began: those made beside it slow it."""

    @property
    def name(self) -> str:
        return self.settings.name_of(self.mode)

    def state(self, state: str, **values: Any) -> dict[str, Any]:
        """How far it is, for the page."""
        shown: dict[str, Any] = {
            "state": state,
            "finished": 0,
            "now_s": 0.0,
            "stage": "",
            "num": len(self.simulated.requests),
            "workers": len(self.simulated.workers),
            "mode": self.mode,
            "name": self.name,
            "takes_s": end_of(self.simulated),
        }
        return shown | values

    def entry(self, measured: ClusterRun, num_simulations: int) -> dict[str, Any]:
        """Both, for the page. Entries with the same `key` differ in their mode alone."""
        settings, slo = self.settings, self.settings.slo
        until_s = max(end_of(measured), end_of(self.simulated))
        pictures = [
            picture_of(run, self.mode, f"{self.name}, {run.provenance}", slo, until_s)
            for run in (measured, self.simulated)
        ]
        return {
            "key": repr(replace(settings, ttft_slo_s=0.0, tpot_slo_s=0.0)),
            "mode": self.mode,
            "name": self.name,
            "line": settings.line(self.mode),
            "pictures": pictures,
            "rows": compared(measured, self.simulated, slo),
            "slower": slower_by(measured, self.device),
            "measured": f"measured on {measured.basis}",
            "simulated": f"simulated {self.device.machine.line}",
            "beside": num_simulations - self.num_simulations,
        }
