"""Who prefills, who decodes, and what happens when one of them is gone.

The router holds no model, no bytes and no clock: events and times go in, commands come out. So one
router serves real workers, in one process or in many, and simulated ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from pdlab.disagg.crew import Crew
from pdlab.disagg.jobs import Job, Peer, Stage
from pdlab.disagg.messages import (
    Arrival,
    Arrived,
    Command,
    Continue,
    Ended,
    Event,
    Failed,
    Fetch,
    Held,
    Hello,
    Load,
    Prefill,
    Produced,
    Publish,
    Published,
    Reserve,
    Reserved,
    Route,
    Send,
    Serve,
    Started,
)
from pdlab.disagg.placement import Placement
from pdlab.disagg.router_config import ON_FAILURE, TRANSFERS, RouterConfig
from pdlab.disagg.worker import ROLES, Role
from pdlab.engine import Chunk, RequestMetrics
from pdlab.engine.moving import RequestState
from pdlab.requirements import require_choice
from pdlab.trace import FailureRecord, TransferRecord

__all__ = ["ON_FAILURE", "TRANSFERS", "Router", "RouterConfig"]


class Router:
    """Routes requests to workers and follows each to its end."""

    def __init__(self, config: RouterConfig | None = None):
        self.config = config or RouterConfig()
        self.crew = Crew()
        self.placement = Placement()
        self.jobs: dict[str, Job] = {}
        """Not yet collected."""
        self.queue: deque[Job] = deque()
        """Those that wait here to be placed."""
        self.transfers: list[TransferRecord] = []
        self.failures: list[FailureRecord] = []
        self._lost: dict[Job, FailureRecord] = {}
        """Whose output stands still since a failure."""

    # --- workers --------------------------------------------------------------------------------

    @property
    def peers(self) -> dict[str, Peer]:
        """All workers that there ever were, by name."""
        return self.crew.peers

    def add_worker(self, hello: Hello, role: Role, clock_offset_s: float = 0.0) -> None:
        """There is another worker.

        Args:
            clock_offset_s: what to add to a time of its clock.

        Raises:
            ValueError: there is one of this name, or no such role.
        """
        self.crew.add(hello, role, clock_offset_s)

    def set_role(self, name: str, role: Role) -> None:
        """What a worker is sent from now on; what it has, it brings to its end."""
        require_choice("role", role, ROLES)
        self.crew.find(name).role = role

    def lose_worker(self, name: str, reason: str, now_s: float) -> None:
        """A worker is gone, with all it had."""
        if not self.crew.find(name).is_alive:
            return
        self.placement.forget(name)
        jobs = self.crew.lose(name)
        record = FailureRecord(now_s, name, reason, [job.request_id for job in jobs])
        self.failures.append(record)
        for job in jobs:
            self._lost[job] = record
            self._carry_on(job, f"worker {name} is lost: {reason}")

    # --- requests -------------------------------------------------------------------------------

    def submit(self, request_id: str, state: RequestState, arrival: Arrival) -> Job:
        """A request comes. It is placed at the next `take_commands`."""
        metrics = RequestMetrics(arrival.time_s, num_prompt_tokens=len(state.prompt_ids))
        job = Job(request_id, replace(state, output_ids=list(state.output_ids)), arrival, metrics)
        self.jobs[request_id] = job
        self.queue.append(job)
        return job

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; one that is over stays so."""
        job = self.jobs.get(request_id)
        if job is not None and job.stage is not Stage.DONE:
            self.crew.abort(job)
            self._finish(job)

    @property
    def has_work(self) -> bool:
        return any(job.stage is not Stage.DONE for job in self.jobs.values())

    def take_commands(self, now_s: float) -> dict[str, list[Command]]:
        """Place who can be placed; all commands since the last call, by worker, in order."""
        self.crew.now_s = now_s
        while self.queue and self._place(self.queue[0]):
            pass
        config = self.config
        for name, silence_s in self.crew.renew(config.lease_s, config.patience_s).items():
            self.lose_worker(name, f"it said nothing for {silence_s:.0f} s", now_s)
        return self.crew.take_commands()

    # --- placing --------------------------------------------------------------------------------

    def _place(self, job: Job) -> bool:
        """Send the first of the queue on its way; False if it has to wait here."""
        alive = self.crew.alive
        able = [peer for peer in alive if peer.name not in job.refused_by]
        if not able:
            could = " that could serve it" if alive else ""
            self._finish(job, f"no worker is left{could}")
            return True
        job.num_sent = job.state.num_tokens
        plan = self.placement.plan(able, job.state, self.config)
        if self.placement.is_full(plan.first, self.config):
            return False
        self.queue.popleft()
        self.crew.assign(job, plan.first)
        if plan.here is None:
            job.decode_on, job.stage = plan.there.name, Stage.SERVING
            self._post(plan.there.name, Serve(job.name, job.sent_state, job.arrival))
            return True
        job.prefill_on = plan.here.name
        if self.config.transfer == "stream":
            self._reserve(job, plan.there)
        else:
            job.stage = Stage.PREFILLING
            self._post(plan.here.name, Prefill(job.name, job.sent_state, job.arrival))
        return True

    def _post(self, name: str, command: Command) -> None:
        self.crew.post(name, command)

    def _reserve(self, job: Job, peer: Peer) -> None:
        """Ask for room."""
        self.crew.assign(job, peer)
        job.decode_on, job.stage, job.num_cached_tokens = peer.name, Stage.RESERVING, None
        self._post(peer.name, Reserve(job.name, job.sent_state, job.arrival))

    def _find_room(self, job: Job) -> None:
        """Ask for room for a prompt that is computed."""
        others = [
            peer
            for peer in self.crew.alive
            if peer.name not in {job.prefill_on, *job.refused_by} and not peer.gives
        ]
        decodes = [peer for peer in others if peer.role != "prefill"] or others
        if not decodes:
            self._begin_again(job, "no worker is left to go on with it")
            return
        self._reserve(job, self.placement.for_decode(decodes, job.state))

    def _move(self, job: Job) -> None:
        """Room and prompt are there: let K and V travel."""
        assert job.prefill_on is not None
        job.num_transfers += 1
        if self.config.transfer == "pull":
            self._post(job.prefill_on, Publish(job.name, self._route(job)))
        else:
            self._post(job.prefill_on, Send(job.name, self._route(job)))
        self._go_on(job)

    def _route(self, job: Job) -> Route:
        assert job.decode_on is not None
        assert job.num_cached_tokens is not None
        hello = self.peers[job.decode_on].hello
        return Route(hello.name, hello.address, hello.layout, job.num_cached_tokens)

    def _go_on(self, job: Job) -> None:
        """Tell the decode worker the token that its room waits for."""
        assert job.decode_on is not None
        assert job.next_id is not None
        job.stage = Stage.MOVING
        self._post(job.decode_on, Continue(job.name, job.next_id))

    # --- what workers tell ----------------------------------------------------------------------

    def on_event(self, name: str, event: Event, now_s: float) -> None:
        """Book what a worker tells, and decide what follows."""
        peer = self.crew.find(name)
        peer.heard_s = self.crew.now_s = now_s
        if isinstance(event, Load):
            peer.load = event
            self.placement.learn(peer, event)
            return
        if isinstance(event, Hello):
            return
        job = peer.jobs.get(event.request_id)
        if job is None or not peer.is_alive:
            return  # of an attempt that was given up
        match event:
            case Started(_, time_s, num_cached):
                if job.metrics.first_scheduled_s is None:
                    job.metrics.first_scheduled_s = time_s + peer.clock_offset_s
                    job.metrics.num_cached_tokens = num_cached
            case Produced():
                self._on_produced(job, event, peer.clock_offset_s)
            case Held():
                self._on_held(job, event)
            case Reserved():
                self._on_reserved(job, event)
            case Published(_, ticket):
                if job.decode_on is not None:
                    self._post(job.decode_on, Fetch(job.name, ticket))
            case Arrived():
                self._on_arrived(job, event, peer)
            case Ended():
                self._on_ended(job, event)
            case Failed():
                self._on_failed(job, peer, event)

    def _on_produced(self, job: Job, event: Produced, clock_offset_s: float) -> None:
        if event.chunk.token_ids and job.stage is Stage.PREFILLING:
            [job.next_id] = event.chunk.token_ids
        times_s = job.take(event, clock_offset_s).times_s
        if record := self._lost.pop(job, None):
            first_s = times_s[0] if times_s else event.time_s + clock_offset_s
            record.recovered_s[job.request_id] = first_s

    def _on_held(self, job: Job, event: Held) -> None:
        job.is_held = True
        job.prompt_logprobs |= event.prompt_logprobs
        job.metrics.num_preemptions += event.num_preemptions
        assert job.prefill_on is not None
        self.placement.note(self.peers[job.prefill_on], job.sent_state)
        if self.config.transfer == "stream":
            self._go_on(job)
        else:
            self._find_room(job)

    def _on_reserved(self, job: Job, event: Reserved) -> None:
        job.num_cached_tokens = event.num_cached_tokens
        if job.is_held:
            self._move(job)
        elif job.stage is Stage.RESERVING and job.prefill_on is not None:
            job.stage = Stage.PREFILLING
            command = Prefill(job.name, job.sent_state, job.arrival, self._route(job))
            self._post(job.prefill_on, command)

    def _on_arrived(self, job: Job, event: Arrived, there: Peer) -> None:
        here = self.peers[job.prefill_on or event.transfer.source]
        asks = there if self.config.transfer == "pull" else here  # its clock, and its link
        offsets_s = asks.clock_offset_s, there.clock_offset_s
        transfer = event.transfer.shifted(*offsets_s) if any(offsets_s) else event.transfer
        transfer.request_id, transfer.source = job.request_id, here.name
        transfer.kind, transfer.link = self.config.transfer, asks.hello.link
        self.transfers.append(transfer)
        self.placement.note(there, job.sent_state)
        job.stage = Stage.DECODING
        self.crew.release(job)

    def _on_ended(self, job: Job, event: Ended) -> None:
        job.prompt_logprobs |= event.prompt_logprobs
        job.metrics.num_preemptions += event.num_preemptions
        job.error = ValueError(event.error) if event.error else None
        for name in job.workers:
            self.placement.note(self.peers[name], job.state)
        self.crew.abort(job)
        self._end(job)

    def _on_failed(self, job: Job, peer: Peer, event: Failed) -> None:
        """A worker gave a request up, and has nothing of it any more."""
        self.crew.drop(job, peer)
        if event.refused:
            self._on_refused(job, peer, event.reason)
        else:
            self._carry_on(job, event.reason)

    def _on_refused(self, job: Job, peer: Peer, reason: str) -> None:
        """A worker can never serve a request: others may, unless all who could end it refused."""
        job.refused_by.add(peer.name)
        alive = self.crew.alive
        is_whole = self.config.mode == "aggregated"
        enders = [p for p in alive if is_whole or p.role != "prefill"] or alive
        if all(p.name in job.refused_by for p in enders):
            self.crew.abort(job)
            self._finish(job, reason)
        elif job.is_held:
            self._find_room(job)
        else:
            self._begin_again(job, reason)

    # --- failure --------------------------------------------------------------------------------

    def _carry_on(self, job: Job, reason: str) -> None:
        """One of a request's workers has lost it: use what the other one has, or begin again."""
        if self.config.on_failure == "fail":
            self.crew.abort(job)
            self._finish(job, reason)
        elif job.decode_on is not None and job.stage is Stage.DECODING:
            pass  # its prompt is where it has to be
        elif job.is_held and self._may_wait_for_room(job):
            self._find_room(job)
        else:
            self._begin_again(job, reason)

    def _may_wait_for_room(self, job: Job) -> bool:
        """Whether a computed prompt may keep its place until there is another room for it.

        Not where rooms are given before prompts run: those who have a room may wait for this place,
        while it waits for a room of theirs. Then it begins again, and finds its prefix cached.
        """
        return self.config.transfer != "stream" and job.num_transfers < self.config.max_transfers

    def _begin_again(self, job: Job, reason: str) -> None:
        """From the tokens that were handed on, on whoever there is."""
        self.crew.abort(job)
        if job.attempt + 1 - len(job.refused_by) >= self.config.max_attempts:
            self._finish(job, f"given up after {job.attempt + 1} attempts: {reason}")
            return
        job.begin_again()
        self.queue.appendleft(job)

    def _finish(self, job: Job, error: str = "") -> None:
        """End a request from here: aborted, or because of an error."""
        if job in self.queue:
            self.queue.remove(job)
        job.error = ValueError(error) if error else None
        job.chunks.append(Chunk("", [], finish_reason="error" if error else "abort"))
        self._end(job)

    def _end(self, job: Job) -> None:
        job.stage = Stage.DONE
        self._lost.pop(job, None)
