"""Serves a workload on a cluster, in real time; see `pdlab.workload.replay` for one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from pdlab.disagg.cluster import Cluster
from pdlab.disagg.serving import ClusterRun, WorkerRun
from pdlab.engine import SamplingParams
from pdlab.trace import WorkerTrace
from pdlab.workload.arrivals import Arrivals, OpenLoop
from pdlab.workload.replay import LONGEST_PAUSE_S, Prompts, metrics_since, refused
from pdlab.workload.serving import ServedRequest, StepSpan, span_of
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
    if isinstance(arrivals, Sequence):
        arrivals = OpenLoop(arrivals)
    if arrivals.next_s is None:
        raise ValueError("arrivals has no request left: each serves one run")
    session = Session(cluster, arrivals, Prompts(cluster.model, seed, vocab_size), cluster.now_s())
    try:
        while not session.is_over:
            session.submit_due()
            if not cluster.step():
                session.pause()
            session.collect()
            if on_step:
                on_step(session)
    except BaseException:
        session.abort()
        raise
    return session.run()


@dataclass
class Session:
    """A replay under way. Times are on its own clock, `start_s` is on the cluster's."""

    cluster: Cluster
    arrivals: Arrivals
    prompts: Prompts
    start_s: float
    live: dict[str, int] = field(default_factory=dict)
    """Places in the order of arrival, by request id."""
    ended: dict[int, ServedRequest] = field(default_factory=dict)
    num_arrived: int = 0
    num_transfers: int = 0
    num_failures: int = 0

    def __post_init__(self) -> None:
        self.num_transfers = len(self.cluster.transfers)
        self.num_failures = len(self.cluster.failures)

    @property
    def now_s(self) -> float:
        return self.cluster.now_s() - self.start_s

    @property
    def is_over(self) -> bool:
        return not self.live and self.arrivals.next_s is None

    def submit_due(self) -> None:
        while due := self.arrivals.take_due(self.now_s):
            for request in due:
                self._submit(request)

    def _submit(self, request: TraceRequest) -> None:
        number = self.num_arrived
        self.num_arrived += 1
        try:
            request.checked()
            params = SamplingParams(
                max_tokens=request.num_output_tokens, temperature=0, ignore_eos=True
            )
            request_id = self.cluster.submit(
                self.prompts.make(request, number),
                params,
                priority=request.priority,
                arrival_s=self.start_s + request.arrival_s,
            )
            self.live[request_id] = number
        except ValueError as error:
            self._end(number, refused(request, number, error))

    def collect(self) -> None:
        """Take out what has finished."""
        for request_id in [i for i in self.live if self.cluster.is_finished(i)]:
            output = self.cluster.collect(request_id)
            times = metrics_since(output.metrics, self.start_s)
            why = "" if output.error is None else str(output.error)
            served = ServedRequest(request_id, times, output.finish_reason, error=why)
            self._end(self.live.pop(request_id), served)

    def _end(self, number: int, served: ServedRequest) -> None:
        self.ended[number] = served
        self.arrivals.note_finished(self.now_s)

    def pause(self) -> None:
        """Sleep till the next arrival, or a little."""
        if self.arrivals.next_s is not None:
            time.sleep(min(max(0.0, self.arrivals.next_s - self.now_s), LONGEST_PAUSE_S))

    def abort(self) -> None:
        for request_id in self.live:
            self.cluster.abort(request_id)
        self.collect()
        self.cluster.step(0)

    def run(self) -> ClusterRun:
        cluster = self.cluster
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
            requests=[self.ended[number] for number in sorted(self.ended)],
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
