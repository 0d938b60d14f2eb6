"""Serves a workload on a cluster, in real time; see `pdlab.workload.replay` for one engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from pdlab.disagg.cluster import Cluster
from pdlab.disagg.serving import ClusterRun, WorkerRun
from pdlab.trace import WorkerTrace
from pdlab.workload.arrivals import Arrivals
from pdlab.workload.replay import Prompts, ReplaySession, unused
from pdlab.workload.serving import StepSpan, span_of
from pdlab.workload.traces import TraceRequest


def replay_on_cluster(
    cluster: Cluster,
    arrivals: Arrivals | Sequence[TraceRequest],
    *,
    vocab_size: int | None = None,
    on_step: Callable[[Session], None] | None = None,
    seed: int = 0,
) -> ClusterRun:
    """Submit each request when it is due, and step until all have ended.

    Requests that are refused end with reason `error` and stop no other. Ctrl-C aborts the run's
    requests and is raised again.

    Args:
        cluster: with nothing to do; what it did before is no part of the run.
        vocab_size: prompts are made of token ids below it; None for all the model has.
        on_step: called after each step of the cluster. Its time counts.
        seed: of the prompts.

    Raises:
        ValueError: the cluster is at work, or no request is left.
    """
    if cluster.router.has_work:
        raise ValueError("cluster has unfinished requests: a replay needs it alone")
    prompts = Prompts(cluster.model, seed, vocab_size)
    session = Session(cluster, unused(arrivals), prompts, cluster.now_s())
    try:
        while not session.is_over:
            session.submit_due()
            if not cluster.step():
                session.pause()
            session.collect_finished()
            if on_step:
                on_step(session)
    except BaseException:
        session.abort()
        raise
    return session.run()


@dataclass
class Session(ReplaySession[Cluster]):
    """A replay under way: what the cluster records from now on is the run's."""

    def __post_init__(self) -> None:
        self.num_transfers = len(self.server.transfers)
        self.num_failures = len(self.server.failures)

    def collect_finished(self) -> None:
        for request_id in [i for i in self.live if self.server.is_finished(i)]:
            self.collect(request_id, self.now_s)

    def abort(self) -> None:
        super().abort()
        self.server.step(0)

    def run(self) -> ClusterRun:
        cluster = self.server
        traces = cluster.trace().workers
        workers = {name: self._worker(each) for name, each in traces.items()}
        transfers = [
            t.shifted(-self.start_s, -self.start_s) for t in cluster.transfers[self.num_transfers :]
        ]
        failures = cluster.failures[self.num_failures :]
        return ClusterRun(
            provenance="measured",
            basis=_basis(cluster, traces),
            router=asdict(cluster.router.config),
            requests=self.requests,
            workers=workers,
            transfers=transfers,
            failures=[f.shifted(-self.start_s) for f in failures],
        )

    def _worker(self, worker: WorkerTrace) -> WorkerRun:
        """The steps of a worker since the replay began, on its clock."""
        trace = worker.trace
        num_blocks = trace.engine["num_blocks"]
        start_s = self.start_s - worker.epoch_s
        steps = [step for step in trace.steps if step.start_s >= start_s]
        spans: list[StepSpan] = [span_of(step, start_s, num_blocks) for step in steps]
        return WorkerRun(worker.role, dict(trace.engine), num_blocks, spans)


def _basis(cluster: Cluster, workers: dict[str, WorkerTrace]) -> str:
    threads = {name: each.trace.machine["threads"] for name, each in workers.items()}
    shown = [f"{name}: {n} thread{'s' * (n != 1)}" for name, n in threads.items()]
    first = next(iter(workers.values()), None)
    machine = first.trace.machine["processor"] if first else "no worker left"
    return f"{cluster.model.name} on {machine}, {', '.join(shown)}"
