"""Who prefills, who decodes, and what happens when one of them is gone.

The router holds no model, no bytes and no clock: events and times go in, commands come out. So one
router serves real workers, in one process or in many, and simulated ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pdlab.disagg.jobs import Job, Peer, Stage
from pdlab.disagg.messages import (
    Abort,
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
    Meet,
    Prefill,
    Produced,
    Publish,
    Published,
    Release,
    Renew,
    Reserve,
    Reserved,
    Route,
    Send,
    Serve,
    Started,
)
from pdlab.disagg.placement import Placement
from pdlab.disagg.worker import ROLES, Role
from pdlab.engine import Chunk, RequestMetrics
from pdlab.engine.moving import RequestState
from pdlab.requirements import require_choice, require_int, require_number
from pdlab.trace import FailureRecord, TransferRecord

MODES = ("aggregated", "disaggregated")
TRANSFERS = ("stream", "push", "pull")
ON_FAILURE = ("recompute", "fail")


@dataclass(frozen=True)
class RouterConfig:
    """How a router routes.

    Raises:
        ValueError: a field is out of range.
    """

    mode: str = "disaggregated"
    """`aggregated`: each worker serves whole requests, as its engine's batching says;
    `disaggregated`: prompts on some, outputs on others."""
    transfer: str = "stream"
    """`stream`: room is reserved before the prompt runs, and K and V leave layer by layer as they
    are computed; `push` and `pull`: the whole prompt, once it is computed and there is room."""
    local_prefill_tokens: int = 0
    """Prompts with no more than this many tokens that the decode worker has not cached are computed
    there."""
    max_backlog_tokens: int = 16384
    """Prompt tokens that wait at one worker; further requests wait at the router."""
    on_failure: str = "recompute"
    """`recompute`: what a lost worker had is computed elsewhere, from the tokens that were handed
    on; `fail`: the request ends with an error."""
    max_attempts: int = 4
    """Times that a request is begun."""
    max_transfers: int = 2
    """Times that one attempt's K and V are pushed or pulled."""
    lease_s: float = 30.0
    """How long workers keep what nobody renews; the router renews in a third of it."""
    patience_s: float = 120.0
    """How long a worker that has requests may say nothing, before it is given up. It answers each
    renewal, but not before its step is over."""

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_choice("transfer", self.transfer, TRANSFERS)
        require_choice("on_failure", self.on_failure, ON_FAILURE)
        require_int("local_prefill_tokens", self.local_prefill_tokens, least=0)
        for name in ("max_backlog_tokens", "max_attempts", "max_transfers"):
            require_int(name, getattr(self, name), least=1)
        require_number("lease_s", self.lease_s, 0.001, 1e9)
        require_number("patience_s", self.patience_s, self.lease_s, 1e9)


class Router:
    """Routes requests to workers and follows each to its end."""

    def __init__(self, config: RouterConfig | None = None):
        self.config = config or RouterConfig()
        self.peers: dict[str, Peer] = {}
        self.jobs: dict[str, Job] = {}
        """Not yet collected."""
        self.transfers: list[TransferRecord] = []
        self.failures: list[FailureRecord] = []
        self.placement = Placement()
        self._queue: deque[Job] = deque()
        self._commands: defaultdict[str, list[Command]] = defaultdict(list)
        self._placed_s = 0.0
        self._renewed_s: float | None = None
        self._lost: dict[Job, FailureRecord] = {}
        """Whose output stands still since a failure."""

    # --- workers --------------------------------------------------------------------------------

    def add_worker(self, hello: Hello, role: Role, clock_offset_s: float = 0.0) -> None:
        """There is another worker.

        Args:
            clock_offset_s: what to add to a time of its clock.

        Raises:
            ValueError: there is one of this name, or no such role.
        """
        require_choice("role", role, ROLES)
        if hello.name in self.peers and self.peers[hello.name].is_alive:
            raise ValueError(f"name={hello.name!r} is the name of another worker")
        for peer in self._alive():
            self._post(peer.name, Meet(hello.name, hello.layout))
            self._post(hello.name, Meet(peer.name, peer.hello.layout))
        load = Load(0, 0, 0, 0, hello.num_blocks)
        self.peers[hello.name] = Peer(hello, role, load, clock_offset_s=clock_offset_s)

    def set_role(self, name: str, role: Role) -> None:
        """What a worker is sent from now on; what it has, it brings to its end."""
        require_choice("role", role, ROLES)
        self._peer(name).role = role

    def lose_worker(self, name: str, reason: str, now_s: float) -> None:
        """A worker is gone, with all it had."""
        peer = self._peer(name)
        if not peer.is_alive:
            return
        peer.is_alive = False
        self._commands.pop(name, None)
        self.placement.forget(name)
        jobs = [job for job in peer.jobs.values() if job.stage is not Stage.DONE]
        record = FailureRecord(now_s, name, reason, [job.request_id for job in jobs])
        self.failures.append(record)
        peer.jobs.clear()
        for job in jobs:
            self._lost[job] = record
            if job.decode_on == name:
                job.decode_on = job.num_cached_tokens = None
            if job.prefill_on == name:
                job.prefill_on, job.is_held = None, False
            self._carry_on(job, f"worker {name} is lost: {reason}")

    def _alive(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.is_alive]

    def _peer(self, name: str) -> Peer:
        if name not in self.peers:
            raise ValueError(f"name={name!r} is no worker: {', '.join(self.peers) or 'none'}")
        return self.peers[name]

    # --- requests -------------------------------------------------------------------------------

    def submit(self, request_id: str, state: RequestState, arrival: Arrival) -> Job:
        """A request comes. It is placed at the next `take_commands`."""
        metrics = RequestMetrics(arrival.time_s, num_prompt_tokens=len(state.prompt_ids))
        job = Job(request_id, replace(state, output_ids=list(state.output_ids)), arrival, metrics)
        self.jobs[request_id] = job
        self._queue.append(job)
        return job

    def abort(self, request_id: str) -> None:
        """End a request wherever it is; one that is over stays so."""
        job = self.jobs.get(request_id)
        if job is not None and job.stage is not Stage.DONE:
            self._leave(job)
            self._finish(job)

    def prefill_wait_s(self, peers: Iterable[Peer], now_s: float) -> float:
        """How long the longest-waiting prompt has waited for its first step, here or on these.

        Not those that wait for room where they will decode, nor those that wait here behind them.
        """
        names = {peer.name for peer in peers}
        jobs = [job for peer in self.peers.values() for job in peer.jobs.values()]
        if not any(job.stage is Stage.RESERVING for job in jobs):
            jobs += self._queue
        came_s = [
            job.arrival.time_s
            for job in jobs
            if job.metrics.first_scheduled_s is None
            and job.stage is not Stage.RESERVING
            and (job.prefill_on or "") in {*names, ""}
        ]
        return now_s - min(came_s, default=now_s)

    def decode_fill(self, peers: Sequence[Peer]) -> float:
        """Part of these workers' seats that requests have or ask for."""
        seats = sum(peer.hello.max_num_seqs for peer in peers)
        return sum(len(peer.jobs) for peer in peers) / seats if seats else 0.0

    @property
    def num_queued(self) -> int:
        """Requests that wait at the router."""
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        return any(job.stage is not Stage.DONE for job in self.jobs.values())

    def take_commands(self, now_s: float) -> dict[str, list[Command]]:
        """Place who can be placed; all commands since the last call, by worker, in order."""
        self._placed_s = now_s
        while self._queue:
            job = self._queue.popleft()
            if not self._place(job):
                self._queue.appendleft(job)
                break
        self._renew(now_s)
        commands, self._commands = self._commands, defaultdict(list)
        return commands

    def _post(self, name: str, command: Command) -> None:
        self._commands[name].append(command)

    def _renew(self, now_s: float) -> None:
        """Keep the leases of all that is wanted."""
        if self._renewed_s is not None and now_s - self._renewed_s < self.config.lease_s / 3:
            return
        self._renewed_s = now_s
        for peer in self._alive():
            if peer.jobs and now_s - peer.heard_s > self.config.patience_s:
                self.lose_worker(
                    peer.name, f"it said nothing for {now_s - peer.heard_s:.0f} s", now_s
                )
            elif peer.jobs:
                self._post(peer.name, Renew(list(peer.jobs)))

    # --- placing --------------------------------------------------------------------------------

    def _place(self, job: Job) -> bool:
        """Send a request on its way; False if it has to wait here."""
        alive = self._alive()
        if not alive:
            self._finish(job, "no worker is left")
            return True
        job.num_sent = job.state.num_tokens
        able = [p for p in alive if p.name not in job.refused_by]
        if not able:
            self._finish(job, "no worker is left that could serve it")
            return True
        if self.config.mode == "aggregated":
            return self._serve(job, self.placement.least_loaded(able, job.state))
        decodes = [p for p in able if p.role != "prefill"]
        prefills = [p for p in able if p.role != "decode" and not self._takes(p)]
        givable = [p for p in decodes if not self._gives(p)]
        if not prefills or not givable:
            return self._serve(job, self.placement.least_loaded(decodes or able, job.state))
        there = self.placement.for_decode(givable, job.state)
        if self.placement.num_uncached(there, job.state) <= self.config.local_prefill_tokens:
            return self._serve(job, there)
        here = self.placement.for_prefill(prefills, job.state)
        if here is there:
            return self._serve(job, there)
        if self._is_full(here):
            return False
        self._assign(job, here)
        job.prefill_on = here.name
        if self.config.transfer == "stream":
            self._reserve(job, there)
        else:
            job.stage = Stage.PREFILLING
            self._post(here.name, Prefill(job.name, job.sent_state, job.arrival))
        return True

    def _gives(self, peer: Peer) -> bool:
        """Whether it computes or holds prompts for others.

        Nobody gives and takes at once: two workers whose seats are taken by prompts that wait for
        room at the other one, or by rooms that wait for prompts from there, would wait for ever.
        """
        return any(job.prefill_on == peer.name for job in peer.jobs.values())

    def _takes(self, peer: Peer) -> bool:
        """Whether it has rooms, or shall have some, for prompts from others."""
        return any(job.prefill_on and job.decode_on == peer.name for job in peer.jobs.values())

    def _is_full(self, peer: Peer) -> bool:
        backlog = self.placement.backlog_tokens(peer)
        return backlog > 0 and backlog >= self.config.max_backlog_tokens

    def _serve(self, job: Job, peer: Peer) -> bool:
        if self._is_full(peer):
            return False
        self._assign(job, peer)
        job.decode_on, job.stage = peer.name, Stage.SERVING
        self._post(peer.name, Serve(job.name, job.sent_state, job.arrival))
        return True

    def _assign(self, job: Job, peer: Peer) -> None:
        if not peer.jobs:
            peer.heard_s = self._placed_s
        peer.jobs[job.name] = job

    def _reserve(self, job: Job, peer: Peer) -> None:
        """Ask for room."""
        self._assign(job, peer)
        job.decode_on, job.stage, job.num_cached_tokens = peer.name, Stage.RESERVING, None
        self._post(peer.name, Reserve(job.name, job.sent_state, job.arrival))

    def _find_room(self, job: Job) -> None:
        """Ask for room for a prompt that is computed."""
        others = [
            p
            for p in self._alive()
            if p.name not in {job.prefill_on, *job.refused_by} and not self._gives(p)
        ]
        decodes = [p for p in others if p.role != "prefill"] or others
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
        peer = self._peer(name)
        peer.heard_s = now_s
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
        self._release(job)

    def _release(self, job: Job) -> None:
        """The prompt's worker may forget it."""
        if job.prefill_on is not None:
            self.peers[job.prefill_on].jobs.pop(job.name, None)
            self._post(job.prefill_on, Release(job.name))
            job.prefill_on, job.is_held = None, False

    def _on_ended(self, job: Job, event: Ended) -> None:
        job.prompt_logprobs |= event.prompt_logprobs
        job.metrics.num_preemptions += event.num_preemptions
        job.error = ValueError(event.error) if event.error else None
        for name in job.workers:
            self.placement.note(self.peers[name], job.state)
        self._leave(job)
        self._end(job)

    def _on_failed(self, job: Job, peer: Peer, event: Failed) -> None:
        """A worker gave a request up, and has nothing of it any more."""
        peer.jobs.pop(job.name, None)
        if job.decode_on == peer.name:
            job.decode_on = job.num_cached_tokens = None
        if job.prefill_on == peer.name:
            job.prefill_on, job.is_held = None, False
        if event.refused:
            self._on_refused(job, peer, event.reason)
        else:
            self._carry_on(job, event.reason)

    def _on_refused(self, job: Job, peer: Peer, reason: str) -> None:
        """A worker can never serve a request: others may, unless all who could end it refused."""
        job.refused_by.add(peer.name)
        alive = self._alive()
        is_whole = self.config.mode == "aggregated"
        enders = [p for p in alive if is_whole or p.role != "prefill"] or alive
        if all(p.name in job.refused_by for p in enders):
            self._leave(job)
            self._finish(job, reason)
        elif job.is_held:
            self._find_room(job)
        else:
            self._begin_again(job, reason)

    # --- failure --------------------------------------------------------------------------------

    def _carry_on(self, job: Job, reason: str) -> None:
        """One of a request's workers has lost it: use what the other one has, or begin again."""
        if self.config.on_failure == "fail":
            self._leave(job)
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
        self._leave(job)
        if job.attempt + 1 - len(job.refused_by) >= self.config.max_attempts:
            self._finish(job, f"given up after {job.attempt + 1} attempts: {reason}")
            return
        job.begin_again()
        self._queue.appendleft(job)

    def _leave(self, job: Job) -> None:
        """Have all workers forget a request."""
        for name in job.workers:
            if self.peers[name].jobs.pop(job.name, None):
                self._post(name, Abort(job.name))
        job.prefill_on = job.decode_on = None
        job.is_held = False

    def _finish(self, job: Job, error: str = "") -> None:
        """End a request from here: aborted, or because of an error."""
        if job in self._queue:
            self._queue.remove(job)
        job.error = ValueError(error) if error else None
        job.chunks.append(Chunk("", [], finish_reason="error" if error else "abort"))
        self._end(job)

    def _end(self, job: Job) -> None:
        job.stage = Stage.DONE
        self._lost.pop(job, None)
