"""A worker in simulated time: it obeys the commands of a real one, and tells the same events.

It stands on `SimulatedEngine` and has no clock: whoever has one, says when a turn begins and ends.

    end_s = worker.begin(now_s)        take what has come, and plan a step
    end_s = worker.interrupt(now_s)    something else has come: a leap ends sooner
    events = worker.take_events()      tell what needed no step, at `start_s`
    events = worker.finish()           tell what the step brought, at `end_s`

What it sends is told by `take_sent`, with the time at which it is due. As with a real worker, what
comes while a turn is under way waits for the next. What nobody goes by is told late: the tokens of
a request that decodes, at its end.

Left out: leases and timeouts, for the router forgets nothing here and no parcel is lost but with
its sender.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
    Prefill,
    Produced,
    Publish,
    Published,
    Release,
    Reserve,
    Send,
    Serve,
    Started,
    transfer_name,
)
from pdlab.disagg.simulated.receiver import SimulatedReceiver
from pdlab.disagg.simulated.sender import SimulatedSender
from pdlab.disagg.simulated.spec import Shipment, SimulatedSpec
from pdlab.disagg.transport.interface import Address, Ticket
from pdlab.disagg.worker import load_of
from pdlab.engine import Chunk, RequestMetrics
from pdlab.link import name_of
from pdlab.workload.simulated_engine import TOKEN, Outcome, SimulatedEngine


@dataclass(slots=True)
class _Task:
    """A request on the engine, and how much of it the router was told."""

    number: int
    """In the order of their coming."""
    metrics: RequestMetrics
    is_started: bool = False
    num_told: int = 0


class _Engine(SimulatedEngine):
    """One that may be asked what it is doing."""

    def computed(self) -> list[tuple[str, int, int]]:
        """Known tokens that the step under way computes: of which request, from, to.

        Decodes are among them: a prompt that is cached but for its last token costs as much as one.
        """
        parts = self._plan.batch.scheduled if self._plan else []
        return [(part.sequence.request_id, part.start, part.end) for part in parts]

    def drawn(self, now_s: float) -> tuple[list[str], list[float]]:
        """Who has drawn tokens up to now in the leap under way, and when."""
        if self._plan is None:
            return [], []
        return self._plan.sampled, [end_s for end_s in self._plan.ends_s if end_s <= now_s]

    def metrics_of(self, request_id: str) -> RequestMetrics:
        return self._jobs[request_id].metrics


class SimulatedWorker:
    """A worker that computes nothing.

    Args:
        specs: of all workers, by name.
        tells_all: every token as soon as its step ends, and every load; for comparisons.
        leaps: whether equal steps in a row are planned as one.

    Raises:
        ValueError: a knob of the engine that cannot be simulated.
    """

    def __init__(
        self,
        name: str,
        specs: Mapping[str, SimulatedSpec],
        *,
        tells_all: bool = False,
        leaps: bool = True,
    ):
        self.name = name
        self.spec = specs[name]
        self.engine = _Engine(self.spec.config, self.spec.step_times, leaps=leaps)
        self.sender = SimulatedSender(name, specs)
        self.receiver = SimulatedReceiver(name, self.engine)
        self.tells_all = tells_all
        self.commands: list[Command] = []
        """To be obeyed in the next turn."""
        self.arrived: list[Shipment] = []
        """To be taken in the next turn."""
        self.end_s: float | None = None
        """When the turn under way ends."""
        self._tasks: dict[str, _Task] = {}
        self._held: dict[str, int] = {}
        """Requests whose K and V others get, and of how many tokens."""
        self._num_tasks = self._num_transfers = 0
        self._events: list[Event] = []
        self._load: Load | None = None
        self.start_s = 0.0
        """When the step of the turn begins: after what was packed and unpacked before it."""
        self._pack_s = 0.0
        """How much longer the turn takes than its step."""

    def hello(self) -> Hello:
        """What others must know of it."""
        config = self.engine.config
        return Hello(
            name=self.name,
            address=_address(self.name),
            layout=self.spec.told_layout(),
            num_blocks=config.num_blocks,
            max_num_seqs=config.max_num_seqs,
            clock_s=0.0,
            epoch_s=0.0,
            has_prefix_cache=config.enable_prefix_cache,
            link=name_of(self.spec.link),
        )

    def take_sent(self) -> list[Shipment]:
        """What has left since the last call."""
        shipments, self.sender.outbox = self.sender.outbox, []
        return shipments

    # --- turns ----------------------------------------------------------------------------------

    def begin(self, now_s: float) -> float | None:
        """Do what is asked and plan a step; returns when the turn ends, None if it does nothing."""
        self.start_s, self._pack_s = now_s, 0.0
        commands, self.commands = self.commands, []
        for command in commands:
            self._obey(command)
        self._receive()
        step_end_s = self.engine.begin(self.start_s)
        if step_end_s is None:
            tells = self._events or self.start_s > now_s
            self.end_s = self.start_s if tells else None
            return self.end_s
        if self.sender.is_streaming:
            computed = self.engine.computed()
            self._pack_s = self.sender.send_layers(computed, self.start_s, step_end_s)
        self.end_s = step_end_s + self._pack_s
        return self.end_s

    def take_events(self) -> list[Event]:
        """What is told before the step: room that was given, K and V that have arrived."""
        events, self._events = self._events, []
        return events

    def is_urgent(self, command: Command) -> bool:
        """Whether it may change the steps to come; the token for K and V still on their way cannot.

        Whatever comes waits for the end of the turn; what is urgent makes the turn end sooner.
        """
        if isinstance(command, Continue):
            return self.receiver.runs_with_token(command.request_id, self.arrived)
        return True

    def awaits(self, shipment: Shipment) -> bool:
        """Whether a request can run with it: one whose token is known."""
        return self.receiver.runs_with(shipment, self.commands)

    def interrupt(self, now_s: float) -> float | None:
        """Somebody wants in: returns when the turn ends now."""
        step_end_s = self.engine.interrupt(now_s)
        if step_end_s is not None:
            self.end_s = step_end_s + self._pack_s
        return self.end_s

    def finish(self) -> tuple[list[Event], Outcome | None]:
        """The end of a turn: what to tell the router, and what the engine did."""
        events = self.take_events()
        outcome = None
        self.end_s = None
        if self.engine.end_s is not None:
            outcome = self.engine.finish(self.engine.end_s)
            self._tell(outcome, events)
        load = self._load_of(outcome)
        if load != self._load:
            self._load = load
            events.append(load)
        return events, outcome

    def flush(self, now_s: float) -> list[Event]:
        """The tokens that were told late, for a worker that dies now."""
        names, times_s = self.engine.drawn(now_s)
        drawn = dict.fromkeys(names, times_s)
        events: list[Event] = []
        for name, task in self._tasks.items():
            new_s = task.metrics.token_times_s[task.num_told :] + drawn.get(name, [])
            if new_s:
                events.append(_produced(name, new_s, is_last=False))
        return events

    # --- commands -------------------------------------------------------------------------------

    def _obey(self, command: Command) -> None:
        match command:
            case Abort(request_id) | Release(request_id):
                self._forget(request_id)
            case Continue(request_id):
                self._note(self.receiver.go_on(request_id, self.start_s))
            case Serve(request_id) | Prefill(request_id) | Reserve(request_id):
                try:
                    if isinstance(command, Reserve):
                        self.receiver.ask(command)
                    else:
                        self._queue(command)
                except ValueError as error:
                    self._forget(request_id)
                    self._events.append(Failed(request_id, str(error), refused=True))
            case Send(request_id, route):
                num_tokens = self._held[request_id]
                self.start_s = self.sender.push(request_id, route, num_tokens, self.start_s)
            case Publish(request_id):
                self._num_transfers += 1
                name = transfer_name(request_id, self.name, self._num_transfers)
                self._events.append(Published(request_id, Ticket(name, _address(self.name), 0, ())))
            case Fetch(request_id, ticket):
                missing = self.receiver.missing(request_id)
                self.sender.fetch(request_id, ticket.source.name, missing, self.start_s)

    def _queue(self, command: Serve | Prefill) -> None:
        """Let a request wait for its first step.

        Raises:
            ValueError: it can never be served, or K and V could not travel.
        """
        request_id, state, arrival = command.request_id, command.state, command.arrival
        holds = isinstance(command, Prefill)
        if isinstance(command, Prefill) and command.route is not None:
            self.sender.stream(request_id, command.route, state.num_tokens)
        task = self._new_task(RequestMetrics(arrival.time_s))
        self.engine.resume(
            state,
            arrival_s=arrival.time_s,
            request_id=request_id,
            holds=holds,
            priority=arrival.priority,
            ttft_slo_s=arrival.ttft_slo_s,
            metrics=task.metrics,
        )
        self._tasks[request_id] = task
        if holds:
            self._held[request_id] = state.num_tokens

    def _new_task(self, metrics: RequestMetrics, *, is_started: bool = False) -> _Task:
        self._num_tasks += 1
        return _Task(self._num_tasks, metrics, is_started)

    def _forget(self, request_id: str) -> None:
        """Whatever there is of a request."""
        self.receiver.forget(request_id)
        self._tasks.pop(request_id, None)
        self._held.pop(request_id, None)
        self.sender.forget(request_id)
        self.engine.abort(request_id)

    def _receive(self) -> None:
        """Take what has come, and give room to those who ask."""
        arrived, self.arrived = self.arrived, []
        for shipment in arrived:
            if self.receiver.waits_for(shipment):
                self.start_s += self.spec.unpack_s_per_byte * shipment.num_bytes
                self._note(self.receiver.take(shipment, self.start_s))
        self._note(self.receiver.reserve(self.start_s))

    def _note(self, events: Iterable[Event]) -> None:
        """Tell these; from now on there is news of those who run."""
        for event in events:
            if isinstance(event, Arrived):
                metrics = self.engine.metrics_of(event.request_id)
                self._tasks[event.request_id] = self._new_task(metrics, is_started=True)
            self._events.append(event)

    # --- events ---------------------------------------------------------------------------------

    def _tell(self, outcome: Outcome, events: list[Event]) -> None:
        """What became of the requests in a step, as far as somebody goes by it."""
        ended, held = set(outcome.ended), set(outcome.held)
        names = {*outcome.span.prompts, *ended, *held}
        if self.tells_all:
            names.update(outcome.sampled)
        tasks = self._tasks
        for name in sorted(names, key=lambda name: tasks[name].number):
            task = tasks[name]
            metrics = task.metrics
            if not task.is_started and metrics.first_scheduled_s is not None:
                task.is_started = True
                cached = metrics.num_cached_tokens
                events.append(Started(name, metrics.first_scheduled_s, cached))
            is_over = name in ended or name in held
            new_s = metrics.token_times_s[task.num_told :] if is_over or self.tells_all else []
            if new_s:
                task.num_told += len(new_s)
                events.append(_produced(name, new_s, is_last=name in ended))
            if name in ended:
                events.append(Ended(name, num_preemptions=metrics.num_preemptions))
                self._held.pop(name, None)
                self.sender.forget(name)
                del tasks[name]
            elif name in held:
                events.append(Held(name, num_preemptions=metrics.num_preemptions))
                self.start_s = self.sender.note_held(name, outcome.span.end_s)
                del tasks[name]

    def _load_of(self, outcome: Outcome | None) -> Load:
        num_asked = len(self.receiver.asked)
        if outcome is None:
            return load_of(self.engine.scheduler, num_asked, None, 0, 0)
        span = outcome.span
        step_s, decodes = span.wall_s / span.num_steps, len(span.decodes)
        return load_of(self.engine.scheduler, num_asked, step_s, span.num_prompt_tokens, decodes)


def _produced(request_id: str, times_s: list[float], *, is_last: bool) -> Produced:
    chunk = Chunk("", [TOKEN] * len(times_s), "length" if is_last else None)
    return Produced(request_id, chunk, times_s[-1], tuple(times_s))


def _address(name: str) -> Address:
    return Address("simulated", name, "")
