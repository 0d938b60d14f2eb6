"""Serves a workload on a cluster in simulated time.

The router is the real one, and so are the engines' schedulers: what is simulated is how long steps,
links and messages take. See `pdlab.disagg.simulated.worker` for the workers.

One heap holds all that will happen. Of one moment everything happens first, then the router is
asked for its commands, and then those workers begin a turn, or have a leap of theirs cut short, for
whom something has come.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from heapq import heappop, heappush
from typing import Any

from pdlab.disagg.control import RoleController
from pdlab.disagg.jobs import Job
from pdlab.disagg.messages import Arrival, Command, Event, Load, Meet, Renew
from pdlab.disagg.router import Router, RouterConfig
from pdlab.disagg.serving import ClusterRun, WorkerRun
from pdlab.disagg.simulated.spec import Shipment, SimulatedSpec
from pdlab.disagg.simulated.worker import SimulatedWorker
from pdlab.engine import RequestMetrics
from pdlab.requirements import require_number
from pdlab.workload.arrivals import Arrivals, OpenLoop
from pdlab.workload.serving import ServedRequest, StepSpan
from pdlab.workload.simulation import state_of, uncollected
from pdlab.workload.traces import TraceRequest

LONG_S = 1e9


def simulate_cluster(
    arrivals: Arrivals | Sequence[TraceRequest],
    workers: Mapping[str, SimulatedSpec],
    router: RouterConfig | None = None,
    *,
    hop_s: float = 0.0,
    kills: Iterable[tuple[float, str]] = (),
    control: Callable[[Router], RoleController] | None = None,
    look_s: float = 1.0,
    leaps: bool = True,
    tells_all: bool = False,
) -> ClusterRun:
    """Serve all requests; returns when the last has finished.

    Args:
        workers: by name.
        hop_s: from router to worker, or from worker to router, for each message.
        kills: workers that end as by a crash, and when. The router hears of it `hop_s` later.
        control: makes what switches roles, and is asked to look every `look_s`.
        leaps, tells_all: see `SimulatedWorker`; what comes of the requests is the same.

    Raises:
        ValueError: there is no worker or no request, or a knob that cannot be simulated.
        PolicyError: the policy has no rank for a request.
    """
    if isinstance(arrivals, Sequence):
        arrivals = OpenLoop(arrivals)
    if not workers:
        raise ValueError("workers has no worker")
    require_number("hop_s", hop_s, 0, 1e6)
    require_number("look_s", look_s, 1e-6, 1e9)
    simulation = _Simulation(arrivals, workers, router, hop_s, leaps, tells_all)
    for time_s, name in kills:
        if name not in workers:
            raise ValueError(f"kills has name={name!r}, no worker: {', '.join(workers)}")
        simulation.at(time_s, simulation.kill, name)
    if control is not None:
        simulation.look_every(look_s, control(simulation.router))
    with uncollected():
        return simulation.run()


class _Router(Router):
    """One that notes who has ended."""

    def __init__(self, config: RouterConfig):
        super().__init__(config)
        self.ended: list[Job] = []

    def _end(self, job: Job) -> None:
        super()._end(job)
        self.ended.append(job)


class _Simulation:
    """The loop: see `simulate_cluster`."""

    def __init__(
        self,
        arrivals: Arrivals,
        specs: Mapping[str, SimulatedSpec],
        config: RouterConfig | None,
        hop_s: float,
        leaps: bool,
        tells_all: bool,
    ):
        self.arrivals = arrivals
        self.specs = specs
        self.config = config or RouterConfig()
        # here nobody forgets and nobody falls silent, so that nothing need be renewed
        self.router = _Router(replace(self.config, lease_s=LONG_S, patience_s=LONG_S))
        self.hop_s = hop_s
        self.workers: dict[str, SimulatedWorker] = {}
        self.steps: dict[str, list[StepSpan]] = {}
        for name, spec in specs.items():
            worker = SimulatedWorker(name, specs, tells_all=tells_all, leaps=leaps)
            self.workers[name], self.steps[name] = worker, []
            self.router.add_worker(worker.hello(), spec.role)
        self.requests: dict[str, ServedRequest] = {}
        self.num_open = 0
        """Requests that have come and not ended."""
        self._now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_planned = 0
        self._next_arrival_s = math.inf
        self._concerned: dict[str, None] = {}
        """Workers for whom something has come."""
        self._has_news = False
        """Whether the router may have something to decide."""

    # --- time -----------------------------------------------------------------------------------

    def at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        """Have something happen."""
        self._num_planned += 1
        heappush(self._heap, (time_s, self._num_planned, action, args))

    def after_hop(self, action: Callable[..., None], *args: Any) -> None:
        """Have a message come."""
        if self.hop_s:
            self.at(self._now_s + self.hop_s, action, *args)
        else:
            action(*args)

    def run(self) -> ClusterRun:
        """Serve everything."""
        heap = self._heap
        self._plan_arrival()
        while heap:
            now_s = self._now_s = heap[0][0]
            while heap and heap[0][0] == now_s:
                _, _, action, args = heappop(heap)
                action(*args)
            while self._has_news or self._concerned:
                self._ask_router()
                self._turn_to_workers()
        self._check()
        return ClusterRun(
            provenance="simulated",
            basis="; ".join(dict.fromkeys(s.step_times.basis for s in self.specs.values())),
            router=asdict(self.config),
            requests=list(self.requests.values()),
            workers={name: self._worker_run(name) for name in self.specs},
            transfers=self.router.transfers,
            failures=self.router.failures,
        )

    @property
    def is_over(self) -> bool:
        return not self.num_open and self.arrivals.next_s is None

    def _check(self) -> None:
        """All have ended, and nothing is left of them."""
        if not self.requests:
            raise ValueError("arrivals has no request left")
        assert not self.num_open, f"{self.num_open} requests stand still"
        for worker in self.workers.values():
            pool = worker.engine.pool
            assert pool.num_free == pool.num_blocks, f"{worker.name} leaks blocks"

    def _worker_run(self, name: str) -> WorkerRun:
        config = self.specs[name].config
        role = self.router.peers[name].role
        return WorkerRun(role, config.to_dict(), config.num_blocks, self.steps[name])

    # --- requests -------------------------------------------------------------------------------

    def _plan_arrival(self) -> None:
        next_s = self.arrivals.next_s
        if next_s is not None and next_s < self._next_arrival_s:
            self._next_arrival_s = next_s
            self.at(max(next_s, self._now_s), self._let_in)

    def _let_in(self) -> None:
        """Submit who has come."""
        while due := self.arrivals.take_due(self._now_s):  # one refused may call the next
            for request in due:
                self._submit(request)
        self._next_arrival_s = math.inf
        self._plan_arrival()

    def _submit(self, request: TraceRequest) -> None:
        name = f"r{len(self.requests)}"
        metrics = RequestMetrics(request.arrival_s, num_prompt_tokens=request.num_prompt_tokens)
        served = self.requests[name] = ServedRequest(name, metrics, priority=request.priority)
        try:
            state = state_of(request, len(self.requests))
        except ValueError as error:
            served.finish_reason, served.error = "error", str(error)
            self.arrivals.note_finished(self._now_s)
            return
        job = self.router.submit(name, state, Arrival(request.arrival_s, request.priority))
        served.metrics = job.metrics
        self.num_open += 1
        self._has_news = True

    def _take_ended(self) -> None:
        """Requests that the router has brought to an end."""
        ended, self.router.ended = self.router.ended, []
        for job in ended:
            served = self.requests[job.request_id]
            served.finish_reason = job.chunks[-1].finish_reason
            served.error = str(job.error or "")
            del self.router.jobs[job.request_id]
            self.num_open -= 1
            self.arrivals.note_finished(self._now_s)
        if ended:
            self._plan_arrival()

    # --- messages -------------------------------------------------------------------------------

    def _ask_router(self) -> None:
        """Have its commands delivered."""
        if not self._has_news:
            return
        self._has_news = False
        for name, commands in self.router.take_commands(self._now_s).items():
            told = [each for each in commands if not isinstance(each, Meet | Renew)]
            if told:
                self.after_hop(self._deliver, name, told)
        self._take_ended()

    def _deliver(self, name: str, commands: list[Command]) -> None:
        if worker := self.workers.get(name):
            worker.commands += commands
            if worker.end_s is None or any(map(worker.is_urgent, commands)):
                self._concerned[name] = None

    def _tell(self, name: str, events: list[Event]) -> None:
        """Let the router hear of what a worker did."""
        for event in events:
            self.router.on_event(name, event, self._now_s)
            self._has_news |= not isinstance(event, Load)
        self._take_ended()

    def _arrive(self, shipment: Shipment) -> None:
        """K and V come; what its sender has not brought to its end, when it dies, is lost."""
        if shipment.source in self.workers and shipment.target in self.workers:
            worker = self.workers[shipment.target]
            worker.arrived.append(shipment)
            if worker.end_s is None or worker.awaits(shipment):
                self._concerned[shipment.target] = None

    # --- workers --------------------------------------------------------------------------------

    def _turn_to_workers(self) -> None:
        """Let those begin for whom something has come; who is busy, will end as soon as it can."""
        concerned, self._concerned = self._concerned, {}
        for name in concerned:
            if worker := self.workers.get(name):
                before_s = worker.end_s
                if before_s is None:
                    end_s = worker.begin(self._now_s)
                    self._ship(worker)
                    if early := worker.take_events():
                        self.at(worker.start_s + self.hop_s, self._tell, name, early)
                else:
                    end_s = worker.interrupt(self._now_s)
                if end_s is not None and end_s != before_s:
                    self.at(end_s, self._end_turn, name, end_s)

    def _end_turn(self, name: str, end_s: float) -> None:
        """The end of a turn, unless another end was planned meanwhile."""
        worker = self.workers.get(name)
        if worker is None or worker.end_s != end_s:
            return
        events, outcome = worker.finish()
        self._ship(worker)
        if outcome is not None:
            self.steps[name].append(outcome.span)
        if outcome is not None or worker.commands or worker.arrived:
            self._concerned[name] = None
        self.after_hop(self._tell, name, events)

    def _ship(self, worker: SimulatedWorker) -> None:
        for shipment in worker.take_sent():
            self.at(shipment.due_s, self._arrive, shipment)

    def kill(self, name: str) -> None:
        """End a worker: what it did up to now is known, and nothing else is left of it."""
        if self.is_over or name not in self.workers:
            return
        worker = self.workers.pop(name)
        self.after_hop(self._tell, name, worker.flush(self._now_s))
        self.after_hop(self._lose, name)

    def _lose(self, name: str) -> None:
        self.router.lose_worker(name, "it was killed", self._now_s)
        self._has_news = True
        self._take_ended()

    def look_every(self, look_s: float, controller: RoleController) -> None:
        """Have the roles looked at, until all is over."""
        if not self.is_over:
            if controller.look(self._now_s):
                self._has_news = True
            self.at(self._now_s + look_s, self.look_every, look_s, controller)
