"""Workers in processes that stay, and the four plans for the same cores.

The plans are those of `pdlab.bench.disaggregation`, which takes its time and its turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter

from pdlab.bench.disaggregation import plans, warm_up
from pdlab.costmodel import LinearStepTimes, fit_step_times
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.processes import ProcessHost, start_processes
from pdlab.disagg.hosts.spec import WorkerSpec, local_specs
from pdlab.disagg.replay import replay_on_cluster
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.worker import Role
from pdlab.engine import EngineConfig
from pdlab.models import Model
from pdlab.requirements import require_choice
from pdlab.workbench.lesson import progress
from pdlab.workload import ClosedLoop, TraceRequest
from pdlab.workload.step_shapes import Sample, samples_of

ENGINE = EngineConfig(
    num_blocks=128, max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=2048
)
"""128 blocks are room for 2,048 tokens: 94 MB of this model's K and V in each process."""


class Processes:
    """Workers in processes of their own, and clusters made of them, one after the other.

    To start a process takes seconds, and to make another cluster of those that are there takes
    none. Close it when they are no longer needed.

    Args:
        model: of the router; the workers load their own.
        specs: of the workers of each group, by name; all begin at the same time.
    """

    def __init__(self, model: Model, specs: Mapping[str, Sequence[WorkerSpec]]):
        self.model = model
        hosts = iter(start_processes([spec for group in specs.values() for spec in group]))
        self.groups: dict[str, list[ProcessHost]] = {
            name: [next(hosts) for _ in group] for name, group in specs.items()
        }
        self._num_runs = 0

    def cluster(self, group: str, router: RouterConfig, role: Role | None = None) -> Cluster:
        """A cluster of a group's workers that are alive.

        Args:
            role: of all of them; None for what their specs say.
        """
        hosts = [host for host in self.groups[group] if host.process.poll() is None]
        return Cluster(self.model, [(h, role or h.spec.role) for h in hosts], router, seed=0)

    def serve(self, cluster: Cluster, requests: Sequence[TraceRequest] | ClosedLoop) -> ClusterRun:
        """In real time, with prompts of random tokens that no run before had: none is cached."""
        self._num_runs += 1
        return replay_on_cluster(cluster, requests, seed=self._num_runs)

    def close(self) -> None:
        """End all processes. Closing again does nothing."""
        for hosts in self.groups.values():
            for host in hosts:
                host.close()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- four plans for the same cores ----------------------------------------------------------------

Runs = dict[str, ClusterRun]
ONE, CHUNKS, TWO, APART = "one engine", "one engine, chunks", "two engines", "disaggregated"
PLANS = (ONE, CHUNKS, TWO, APART)


class Plans(Processes):
    """What the same cores can be used for; see `pdlab.bench.disaggregation`, which takes its time.

    `two engines` and `disaggregated` are the same two processes, each on its own half of the cores:
    only the router treats them in another way.
    """

    def __init__(self, model: Model, config: EngineConfig = ENGINE):
        self.config = config
        known = plans(model.name, config)
        specs = {name: known[name][0] for name in (ONE, CHUNKS)}
        specs[APART] = local_specs(1, 1, model=model.name, config=config)
        super().__init__(model, specs)
        self._num_noted: dict[str, int] = {}
        """Steps of each of the pair that were looked at."""
        self.traced: dict[str, list[Sample]] = {"p0": [], "d0": []}
        """Steps of the pair, but those of the runs that shall be predicted."""
        for name in PLANS:
            warm_up(self.plan(name))
        self._note_steps()

    def plan(self, name: str) -> Cluster:
        """A fresh cluster of a plan.

        Raises:
            ValueError: there is no such plan.
        """
        require_choice("plan", name, PLANS)
        if name == APART:
            return self.cluster(APART, RouterConfig())
        group = APART if name == TWO else name
        return self.cluster(group, RouterConfig(mode="aggregated"), role="both")

    def play(
        self,
        requests: Sequence[TraceRequest],
        names: Sequence[str] = PLANS,
        *,
        for_fit: bool = False,
    ) -> Runs:
        """The same requests under each plan, one after the other.

        Args:
            for_fit: whether step times may be fitted to the pair's steps; not if these runs shall
                be predicted.
        """
        runs = {}
        for name in progress(list(names), "plan"):
            runs[name] = self.serve(self.plan(name), requests)
            self._note_steps(for_fit=for_fit)
        return runs

    def decode_step_s(self, num_chats: int = 4) -> float:
        """Median time between two tokens of so many chats that one engine serves alone."""
        requests = [TraceRequest(0.0, 24, 10) for _ in range(num_chats)]
        run = self.serve(self.plan(ONE), requests)
        return median(gap for r in run.requests for gap in r.metrics.itl_s)

    def rehearse(self) -> ClusterRun:
        """Other requests on the pair, from four clients, so that prompts come one by one."""
        lengths = zip(REHEARSED_PROMPTS, REHEARSED_OUTPUTS, strict=True)
        requests = [TraceRequest(0.0, *each) for each in lengths]
        run = self.serve(self.plan(APART), ClosedLoop(requests, 4))
        self._note_steps()
        return run

    def times(self) -> dict[str, LinearStepTimes]:
        """Step times of both sides, fitted to all steps but those that shall be predicted."""
        return {
            name: fit_step_times(samples, f"fitted to {len(samples)} steps of {name}, measured")
            for name, samples in self.traced.items()
        }

    def hop_s(self) -> float:
        """Half of the time that an idle worker takes to answer."""
        took_s = []
        for host in self.groups[APART]:
            for _ in range(20):
                start_s = perf_counter()
                host.load()
                took_s.append(perf_counter() - start_s)
        return median(took_s) / 2

    def _note_steps(self, *, for_fit: bool = True) -> None:
        """Keep the steps since the last call, or leave them out."""
        for host in self.groups[APART]:
            trace = host.trace()
            done = self._num_noted.get(host.name, 0)
            if for_fit and trace.steps[done:]:
                self.traced[host.name] += samples_of(replace(trace, steps=trace.steps[done:]))
            self._num_noted[host.name] = len(trace.steps)


REHEARSED_PROMPTS = (20, 256, 48, 12, 128, 96, 560, 32, 64, 192)
REHEARSED_OUTPUTS = (12, 5, 9, 14, 7, 10, 4, 12, 8, 6)
