"""Several engines behind one interface: that of `Engine`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from dataclasses import asdict, replace
from multiprocessing.connection import wait

from tqdm.auto import tqdm

from pdlab.disagg.control import RoleController
from pdlab.disagg.hosts.host import Host, WorkerDied
from pdlab.disagg.jobs import Job, Stage
from pdlab.disagg.messages import Arrival, Command, Prefill, Reserve, Serve
from pdlab.disagg.router import Router, RouterConfig
from pdlab.disagg.worker import Role
from pdlab.engine import Chunk, Prompt, RequestOutput, SamplingParams, admission
from pdlab.engine.admission import PromptList
from pdlab.engine.interrupts import undisturbed
from pdlab.engine.moving import RequestState
from pdlab.engine.request import Urgency
from pdlab.models import Model
from pdlab.sampling import mix
from pdlab.trace import ClusterTrace, FailureRecord, TransferRecord, WorkerTrace

LONGEST_WAIT_S = 0.02
"""Between two looks at what only time can change."""


class Cluster:
    """Serves requests on several workers.

    Use it as a context manager: leaving ends the workers.

    Args:
        model: for its tokenizer and its limits; the workers have their own, of the same name.
        hosts: where the workers live, each with its role.
        config: of the router.
        control: makes what gives workers other roles as the load changes, say
            `functools.partial(RoleController, most_wait_s=2)`; None leaves them as they are.
        seed: seeds the requests that bring no seed of their own; None draws from the system.
        clock: seconds.

    Raises:
        ValueError: there is no worker, or two have one name.
        WorkerDied: one never began.
    """

    def __init__(
        self,
        model: Model,
        hosts: Iterable[tuple[Host, Role]],
        config: RouterConfig | None = None,
        *,
        control: Callable[[Router], RoleController] | None = None,
        seed: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.model = model
        self.router = Router(config)
        self.controller = control(self.router) if control else None
        self.hosts: dict[str, Host] = {}
        self._clock = clock
        self._epoch_s = clock()
        self._seeds = random.Random(seed)
        self._num_requests = 0
        self._is_closed = False
        self._samples: dict[str, list[Job]] = {}
        """The jobs of a request: one for each of its samples."""
        for host, role in hosts:
            self.add_worker(host, role)
        if not self.hosts:
            raise ValueError("hosts has no worker")

    def now_s(self) -> float:
        """Seconds since the cluster was made: the clock of all times that it tells."""
        return self._clock() - self._epoch_s

    # --- workers --------------------------------------------------------------------------------

    def add_worker(self, host: Host, role: Role) -> None:
        """Another worker joins.

        Raises:
            ValueError: there is one of this name.
        """
        self.router.add_worker(host.hello, role, self._offset_of(host))
        self.hosts[host.hello.name] = host

    def set_role(self, name: str, role: Role) -> None:
        """What a worker is sent from now on."""
        self.router.set_role(name, role)

    def kill(self, name: str) -> None:
        """End a worker as a crash would.

        Raises:
            ValueError: there is no such worker.
        """
        if name not in self.hosts:
            raise ValueError(f"name={name!r} is no worker: {', '.join(self.hosts) or 'none'}")
        self.hosts[name].kill()

    # --- the loop -------------------------------------------------------------------------------

    def step(self, timeout_s: float = LONGEST_WAIT_S) -> bool:
        """Carry commands out and events in; False when there was nothing to do.

        Args:
            timeout_s: how long to wait for news of workers in other processes.
        """
        if self._is_closed:
            raise RuntimeError("the cluster is closed")
        if self.controller is not None:
            self.controller.look(self.now_s())
        had_work = self.router.has_work
        if not self._post() and not had_work:
            return False
        if not self._poll() and had_work:
            self._wait(timeout_s)
        return True

    def _post(self) -> bool:
        """Whether there was anything to post."""
        with undisturbed():
            commands_for = self.router.take_commands(self.now_s())
            for name, commands in commands_for.items():
                if host := self.hosts.get(name):
                    offset_s = -self._offset_of(host)
                    host.post([_on_clock(command, offset_s) for command in commands])
        return bool(commands_for)

    def _poll(self) -> bool:
        """Whether there was any news."""
        heard = False
        for name, host in list(self.hosts.items()):
            try:
                events = host.poll()
            except WorkerDied as death:
                self.router.lose_worker(name, death.reason, self.now_s())
                self._lose(name, host)
                heard = True
                continue
            if not self.router.peers[name].is_alive:  # given up: nothing it does may count
                self._lose(name, host)
                continue
            with undisturbed():
                for event in events:
                    heard = True
                    self.router.on_event(name, event, self.now_s())
        return heard

    def _lose(self, name: str, host: Host) -> None:
        host.kill()
        host.close()
        del self.hosts[name]

    def _settle(self) -> None:
        """Carry out what is left to tell."""
        if self._post():
            self._poll()

    def _wait(self, timeout_s: float) -> None:
        things = [thing for host in self.hosts.values() if (thing := host.waitable()) is not None]
        if things and len(things) == len(self.hosts):
            wait(things, timeout_s)  # type: ignore[arg-type]

    # --- requests -------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        ttft_slo_s: float | None = None,
        arrival_s: float | None = None,
    ) -> str:
        """Queue a request; it runs as `step()` is called. Returns its id.

        The samples of one request (`n` > 1) run as requests of their own, which share the prompt's
        prefix where it is cached.

        Args:
            priority, ttft_slo_s: for the policies of the workers' engines.
            arrival_s: when it came, on the clock of `now_s`; None for now.

        Raises:
            ValueError: it is malformed. What no worker can serve ends with an error.
        """
        if self._is_closed:
            raise RuntimeError("the cluster is closed")
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r:.60} must be SamplingParams")
        admission.check_token_ids(self.model, params)
        text, prompt_ids = admission.tokenize(self.model, prompt)
        if not prompt_ids:
            raise ValueError("prompt is empty: it needs at least 1 token")
        now_s = self.now_s()
        Urgency(priority, ttft_slo_s, arrival_s).checked(now_s)
        arrival = Arrival(now_s if arrival_s is None else arrival_s, priority, ttft_slo_s)
        request_id = f"r{self._num_requests}"
        self._num_requests += 1
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        self._samples[request_id] = [
            self.router.submit(
                f"{request_id}.{index}" if index else request_id,
                RequestState(
                    prompt_ids,
                    replace(params, n=1),
                    seed=mix(seed, -index) if index else seed,
                    prompt=text,
                ),
                arrival,
            )
            for index in range(params.n)
        ]
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request now, wherever it is; one that has finished or is gone stays so."""
        for job in self._samples.get(request_id, []):
            self.router.abort(job.request_id)

    def is_finished(self, request_id: str) -> bool:
        """Whether all of its samples are over.

        Raises:
            ValueError: there is no such request.
        """
        return all(job.stage is Stage.DONE for job in self._jobs(request_id))

    def _jobs(self, request_id: str) -> list[Job]:
        if request_id not in self._samples:
            raise ValueError(f"request_id={request_id!r} is unknown or was collected before")
        return self._samples[request_id]

    def collect(self, request_id: str) -> RequestOutput:
        """A finished request's output; the cluster forgets the request.

        Raises:
            ValueError: there is no such request, or it has not finished.
        """
        if not self.is_finished(request_id):
            raise ValueError(f"request_id={request_id!r} has not finished")
        jobs = self._samples.pop(request_id)
        for job in jobs:
            del self.router.jobs[job.request_id]
        first, *others = [job.output() for job in jobs]
        completions = [
            replace(other.completions[0], index=i) for i, other in enumerate(others, start=1)
        ]
        return replace(first, completions=[*first.completions, *completions])

    def generate(
        self,
        prompts: Prompt | PromptList,
        params: SamplingParams | Several[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Run prompts to their end, all of them together, and return outputs in their order.

        A prompt that is refused does not stop the others: its output has `finish_reason` "error"
        and the ValueError under `error`. A prompt given alone, not in a list, raises it instead.
        """
        return admission.serve_all(
            prompts,
            params,
            submit=self.submit,
            finish=lambda request_ids: self._run_until_finished(request_ids, progress),
            discard=self._drop,
            collect=self.collect,
        )

    def _run_until_finished(self, request_ids: list[str], progress: bool) -> None:
        with tqdm(total=len(request_ids), unit="request", disable=not progress) as bar:
            while request_ids:
                self.step()
                still = [i for i in request_ids if not self.is_finished(i)]
                bar.update(len(request_ids) - len(still))
                request_ids = still
        self._settle()

    def _drop(self, request_id: str) -> None:
        """Abort and forget."""
        self.abort(request_id)
        self._settle()
        if request_id in self._samples:
            self.collect(request_id)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Yield a request's text as it is made. Closing the iterator aborts the request.

        Raises:
            ValueError: as `submit`; or, after the last chunk, what kept it from going on.
        """
        if isinstance(params, SamplingParams):
            admission.check_stream(params, max_unread=1)
            if params.n != 1:
                raise ValueError(f"n={params.n}: a stream of a cluster has one sample")
        chunks = self._follow(self.submit(prompt, params))
        next(chunks)  # enter its `try`, or closing it unread would not abort
        return chunks

    def _follow(self, request_id: str) -> Iterator[Chunk]:
        try:
            yield Chunk("", [])  # taken by `stream`
            [job] = self._jobs(request_id)
            while job.num_read < len(job.chunks) or job.stage is not Stage.DONE:
                if job.num_read < len(job.chunks):
                    job.num_read += 1
                    yield job.chunks[job.num_read - 1]
                else:
                    self.step()
            if job.error is not None:
                raise job.error
        finally:
            self._drop(request_id)

    # --- looking in -----------------------------------------------------------------------------

    @property
    def transfers(self) -> list[TransferRecord]:
        """K and V that have arrived, in order."""
        return self.router.transfers

    @property
    def failures(self) -> list[FailureRecord]:
        """Workers that were lost."""
        return self.router.failures

    def trace(self) -> ClusterTrace:
        """Everything recorded since the cluster was made, but what lost workers had recorded."""
        return ClusterTrace(
            router=asdict(self.router.config),
            workers={
                name: WorkerTrace(self.router.peers[name].role, self._epoch_of(host), host.trace())
                for name, host in self.hosts.items()
            },
            transfers=list(self.transfers),
            failures=list(self.failures),
            switches=list(self.controller.switches) if self.controller else [],
        )

    def _epoch_of(self, host: Host) -> float:
        """When the clock of a worker's engine began, on the cluster's."""
        return host.hello.epoch_s + self._offset_of(host)

    def _offset_of(self, host: Host) -> float:
        """What to add to a time of a worker's clock for one of the cluster's."""
        return host.clock_offset_s - self._epoch_s

    def close(self) -> None:
        """End all workers. Closing a closed cluster does nothing."""
        self._is_closed = True
        hosts, self.hosts = self.hosts, {}
        for host in hosts.values():
            host.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _on_clock(command: Command, offset_s: float) -> Command:
    """A command whose arrival is told on the worker's clock."""
    if isinstance(command, Serve | Prefill | Reserve):
        time_s = command.arrival.time_s + offset_s
        return replace(command, arrival=command.arrival._replace(time_s=time_s))
    return command
