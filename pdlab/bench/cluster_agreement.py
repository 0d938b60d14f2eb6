"""Whether the cluster's simulator says what two real processes then do: as `agreement`, for 1P1D.

Each side's step times are fitted to a rehearsal on the very cluster, other requests in quick
succession, so that what one core's work costs the other is in them. The simulator never sees a time
of the runs it is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol

from tqdm.auto import tqdm

from pdlab.costmodel import LinearStepTimes, fit_step_times
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.processes import process_cluster
from pdlab.disagg.hosts.spec import WorkerSpec, local_specs
from pdlab.disagg.replay import replay_on_cluster
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.engine import EngineConfig
from pdlab.models import Model
from pdlab.requirements import require_choice, require_int
from pdlab.trace import Trace
from pdlab.workload import WORKLOADS, TraceRequest
from pdlab.workload.step_shapes import Sample, samples_of

ENGINE = EngineConfig(
    num_blocks=512, max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=2048
)
REHEARSAL, NUM_REHEARSED, HASTE = "mixed", 24, 2.0
"""What a rehearsal serves: of which workload, how many requests, how many times as fast."""
TOLERANCE = 0.15
METRICS = ("ttft_s", "tpot_s")


class StartCluster(Protocol):
    """Starts the workers of some specs: `process_cluster`."""

    def __call__(
        self,
        model: Model,
        specs: Iterable[WorkerSpec],
        router: RouterConfig | None = None,
        *,
        seed: int | None = None,
    ) -> Cluster: ...


@dataclass(frozen=True)
class ClusterAgreement:
    """One workload on 1P1D, served and simulated: medians over the requests."""

    workload: str
    num_requests: int
    rate_rps: float
    measured: list[dict[str, float]]
    """`ttft_s` and `tpot_s` of each time it was served."""
    simulated: dict[str, float]
    hop_s: float
    """Half a round trip to an idle worker, measured."""
    fit_errors: dict[str, float]
    """Median error of each side's step times."""

    def spread(self, metric: str) -> tuple[float, float, float]:
        """Median, lowest and highest of the times it was served."""
        values = [each[metric] for each in self.measured]
        return median(values), min(values), max(values)

    def ratio(self, metric: str) -> float:
        """Simulated over the median of what was measured."""
        return self.simulated[metric] / self.spread(metric)[0]

    @property
    def agrees(self) -> bool:
        return all(abs(self.ratio(metric) - 1) <= TOLERANCE for metric in METRICS)


def measure_cluster_agreement(
    model: Model,
    *,
    workload: str = "mixed",
    num_requests: int = 20,
    repeats: int = 3,
    rate: float = 1.0,
    router: RouterConfig | None = None,
    config: EngineConfig = ENGINE,
    seed: int = 0,
    start: StartCluster = process_cluster,
    progress: bool = False,
) -> ClusterAgreement:
    """Serve a workload on a process for prompts and one for outputs, and simulate the same.

    Real time: about `num_requests` over the rate, each time.

    Args:
        rate: of arrivals, as a multiple of the workload's own.
        start: starts the workers.

    Raises:
        ValueError: a number is out of range, or there is no such workload.
    """
    for name, value in {"num_requests": num_requests, "repeats": repeats}.items():
        require_int(name, value, least=1, most=10_000)
    require_choice("workload", workload, tuple(WORKLOADS))
    router = router or RouterConfig()
    rate_rps = WORKLOADS[workload].rate_rps * rate
    requests = WORKLOADS[workload](num_requests, rate_rps, seed)
    runs: list[ClusterRun] = []
    samples: dict[str, list[Sample]] = {"p0": [], "d0": []}
    specs = local_specs(1, 1, model=model.name, config=config)
    with start(model, specs, router, seed=0) as cluster:
        hop_s = _hop_s(cluster)
        for turn in tqdm(range(repeats), disable=not progress):
            # no two runs have the seed of their prompts in common, or the later finds them cached
            for name, steps in _rehearse(cluster, seed + 1 + 2 * turn).items():
                samples[name] += steps
            runs.append(replay_on_cluster(cluster, requests, seed=seed + 2 * turn))
        layouts = {name: host.hello.layout for name, host in cluster.hosts.items()}
    times = {name: _fit(name, steps) for name, steps in samples.items()}
    simulated = simulate_cluster(
        requests,
        {
            spec.name: SimulatedSpec(spec.role, config, times[spec.name], layout=layouts[spec.name])
            for spec in specs
        },
        router,
        hop_s=hop_s,
    )
    return ClusterAgreement(
        workload=workload,
        num_requests=num_requests,
        rate_rps=rate_rps,
        measured=[_medians(run) for run in runs],
        simulated=_medians(simulated),
        hop_s=hop_s,
        fit_errors={name: each.median_error for name, each in times.items()},
    )


def _hop_s(cluster: Cluster) -> float:
    """Half of the time that an idle worker takes to answer."""
    took_s = []
    for host in cluster.hosts.values():
        for _ in range(20):
            start_s = time.perf_counter()
            host.load()
            took_s.append(time.perf_counter() - start_s)
    return median(took_s) / 2


def _rehearse(cluster: Cluster, seed: int) -> dict[str, list[Sample]]:
    """Steps of other requests, by worker."""
    before = {name: len(each.trace.steps) for name, each in cluster.trace().workers.items()}
    workload = WORKLOADS[REHEARSAL]
    requests: Sequence[TraceRequest] = workload(NUM_REHEARSED, HASTE * workload.rate_rps, seed)
    replay_on_cluster(cluster, requests, seed=seed)
    traces = {name: each.trace for name, each in cluster.trace().workers.items()}
    return {name: samples_of(_from(trace, before[name])) for name, trace in traces.items()}


def _from(trace: Trace, first: int) -> Trace:
    return replace(trace, steps=trace.steps[first:])


def _fit(name: str, samples: Sequence[Sample]) -> LinearStepTimes:
    return fit_step_times(samples, f"{name}, fitted to a rehearsal")


def _medians(run: ClusterRun) -> dict[str, float]:
    values = {name: [getattr(r.metrics, name) for r in run.requests] for name in METRICS}
    return {name: median(v for v in each if v is not None) for name, each in values.items()}
