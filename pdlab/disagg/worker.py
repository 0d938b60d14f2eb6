"""A worker: an engine that a router tells what to do, and that tells what came of it.

It is driven by `turn`: commands in, one step of the engine, events out. Who carries them (a call, a
pipe, an actor, a process group) is the host's concern.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Literal

from pdlab.disagg.decode_worker import DecodeWorker
from pdlab.disagg.messages import (
    Abort,
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
    Release,
    Renew,
    Reserve,
    Send,
    Serve,
    Started,
)
from pdlab.disagg.prefill_worker import PrefillWorker
from pdlab.disagg.transport.interface import Transport
from pdlab.engine import Engine, SequenceState
from pdlab.engine.interrupts import undisturbed
from pdlab.engine.scheduler import Scheduler
from pdlab.link import name_of
from pdlab.trace import StepRecord

Role = Literal["prefill", "decode", "both"]
ROLES = ("prefill", "decode", "both")
"""What a router sends to a worker. Each can do everything: a role may change at any time."""


class Worker:
    """Both halves over one engine, and the requests that are on it.

    Args:
        slowdown: how much longer each step takes than it does: a slower machine, pretended.
        layers_per_parcel, lease_s, transfer_timeout_s, clock: see the halves.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        transport: Transport,
        *,
        slowdown: float = 1.0,
        layers_per_parcel: int = 1,
        lease_s: float = 30.0,
        transfer_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.name = name
        self.engine = engine
        self.transport = transport
        self.slowdown = slowdown
        both = (name, engine, transport)
        self.prefill = PrefillWorker(
            *both, layers_per_parcel=layers_per_parcel, lease_s=lease_s, clock=clock
        )
        self.decode = DecodeWorker(
            *both, transfer_timeout_s=transfer_timeout_s, lease_s=lease_s, clock=clock
        )
        self.clock = clock
        self._told: dict[str, bool] = {}
        """Requests on the engine, and whether it was told that they run."""
        self._told_load: Load | None = None
        self._events: list[Event] = []
        """Not told yet."""

    def hello(self) -> Hello:
        """What others must know of it."""
        return Hello(
            name=self.name,
            address=self.transport.address,
            layout=self.engine.kv_layout,
            num_blocks=self.engine.config.num_blocks,
            max_num_seqs=self.engine.config.max_num_seqs,
            clock_s=(now_s := self.clock()),
            epoch_s=now_s - self.engine.now_s(),
            has_prefix_cache=self.engine.config.enable_prefix_cache,
            link=name_of(self.transport.link),
            lease_s=self.decode.lease_s,
        )

    @property
    def is_idle(self) -> bool:
        """Whether a turn would do nothing, unless commands or parcels come, or time passes."""
        return not self.engine.scheduler.has_work and not self.decode.asked

    @property
    def is_waiting(self) -> bool:
        """Whether parcels or the end of a lease are waited for."""
        return bool(self.decode.incoming or self.prefill.leases)

    def turn(self, commands: list[Command]) -> list[Event]:
        """Do what is asked, run a step, and tell what happened.

        Interrupted (Ctrl-C) in the step, the next turn makes it again, and tells all.
        """
        self.hear(commands)
        self.step()
        return self.take_events()

    def hear(self, commands: list[Command]) -> None:
        """Do what is asked, and what else needs no step: so nobody waits for one to hear of it."""
        with undisturbed():
            for command in commands:
                self._events += self._obey(command)
            self._events += self._noted(self.decode.receive())
            self._events += self.decode.expire()
            self._events += self.prefill.expire()
            self._events += self.decode.reserve()  # last: who finds no room keeps others from it

    def step(self) -> None:
        """Run a step of the engine."""
        record = self.engine.step()
        if record is not None and self.slowdown > 1:
            time.sleep(record.wall_s * (self.slowdown - 1))
        with undisturbed():
            self._events += self._news()
            load = self.load(record)
            if load != self._told_load:
                self._told_load = load
                self._events.append(load)

    def take_events(self) -> list[Event]:
        """What has happened since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Give everything back. The engine's trace stays readable."""
        self.transport.close()
        self.engine.close()

    # --- commands -------------------------------------------------------------------------------

    def _obey(self, command: Command) -> Iterator[Event]:
        match command:
            case Meet(name, layout):
                self.decode.layouts[name] = layout
            case Renew(request_ids):
                for request_id in request_ids:
                    if self.prefill.holds(request_id):
                        self.prefill.renew(request_id)
                    self.decode.renew(request_id)
                self._told_load = None  # to be told again: it is a sign of life
            case Abort(request_id) | Release(request_id):
                self._forget(request_id)
            case _:
                try:
                    yield from self._begin(command)
                except ValueError as error:
                    self._forget(command.request_id)
                    yield Failed(command.request_id, str(error), refused=True)

    def _begin(self, command: Command) -> Iterator[Event]:
        """What may turn out to be impossible.

        Raises:
            ValueError: it is.
        """
        match command:
            case Serve(request_id, state, arrival):
                urgency = self.prefill.urgency(arrival)
                self.engine.resume(state, request_id=request_id, **urgency)
                self._told[request_id] = False
            case Reserve():
                self.decode.ask(command)
            case Prefill(request_id):
                self.prefill.prefill(command)
                self._told[request_id] = False
            case Send(request_id, route):
                self.prefill.send(request_id, route)
            case Publish(request_id, route):
                yield self.prefill.publish(request_id, route)
            case Fetch(request_id, ticket):
                self.decode.fetch(request_id, ticket)
            case Continue(request_id, token_id):
                yield from self._noted(self.decode.go_on(request_id, token_id))

    def _noted(self, events: Iterator[Event]) -> Iterator[Event]:
        """These events; from now on there is news of those who run."""
        for event in events:
            if isinstance(event, Arrived):
                self._told[event.request_id] = True
            yield event

    def _forget(self, request_id: str) -> None:
        """Whatever there is of a request."""
        self.prefill.forget(request_id)
        self.decode.forget(request_id)
        self._told.pop(request_id, None)
        self.engine.discard(request_id)

    # --- events ---------------------------------------------------------------------------------

    def _news(self) -> Iterator[Event]:
        """What became of the requests since the last turn."""
        for request_id, told in list(self._told.items()):
            request = self.engine.requests[request_id]
            sample = request.samples[0]
            if not told and sample.metrics.first_scheduled_s is not None:
                self._told[request_id] = True
                age_s = self.engine.now_s() - sample.metrics.first_scheduled_s
                num_cached = sample.metrics.num_cached_tokens
                yield Started(request_id, self.clock() - age_s, num_cached)
            while request.num_unread:
                yield Produced(request_id, request.read(), self.clock())
            if request.finished:
                yield self._collect(request_id)
            elif sample.sequence.state is SequenceState.HELD:
                del self._told[request_id]
                self.prefill.note_held(request_id)
                num_preemptions = sample.metrics.num_preemptions
                yield Held(request_id, request.prompt_logprobs, num_preemptions)

    def _collect(self, request_id: str) -> Ended:
        """Take a request that is over out of the engine."""
        del self._told[request_id]
        self.prefill.forget(request_id)
        prompt_logprobs = self.engine.requests[request_id].prompt_logprobs
        output = self.engine.collect(request_id)
        return Ended(
            request_id,
            error=str(output.error or ""),
            prompt_logprobs=prompt_logprobs,
            num_preemptions=output.metrics.num_preemptions,
        )

    def load(self, record: StepRecord | None = None) -> Load:
        """How much there is to do, and what the step just made held."""
        step_s = None if record is None else record.wall_s
        prompts, decodes = _num_tokens(record, "prefill"), _num_tokens(record, "decode")
        return load_of(self.engine.scheduler, len(self.decode.asked), step_s, prompts, decodes)


def load_of(
    scheduler: Scheduler, num_asked: int, step_s: float | None, num_prompt_tokens: int, decodes: int
) -> Load:
    """What a worker, real or simulated, tells of how much it has to do.

    Args:
        num_asked: requests that wait for room.
        step_s, num_prompt_tokens, decodes: of the last step.
    """
    return Load(
        num_waiting=len(scheduler.waiting) + num_asked,
        num_running=len(scheduler.running),
        num_held=len(scheduler.held),
        num_reserved=len(scheduler.reserved),
        num_free_blocks=scheduler.kv.pool.num_free,
        step_s=step_s,
        num_prompt_tokens=num_prompt_tokens,
        num_decodes=decodes,
    )


def _num_tokens(record: StepRecord | None, phase: str) -> int:
    return sum(s.num_tokens for s in record.sequences if s.phase == phase) if record else 0
