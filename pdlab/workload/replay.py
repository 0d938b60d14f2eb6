"""Serves a workload on the real engine, in real time.

A trace tells lengths and shared prefixes, no text, so the prompts are random tokens: what is
measured is time, and a model's speed does not depend on what it reads. Outputs have the length of
the trace, as no end-of-sequence token ends them.

Others may use the engine meanwhile, from `on_step` or from another thread. Their requests are left
alone and are none of the run's. What they have in a step counts as part of that step (its batch,
tokens and blocks), as the step took its time for them too; steps that they make themselves, with
`engine.step` or `generate`, are missing in the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from pdlab.engine import Engine, Prompt, RequestMetrics, RequestOutput, SamplingParams
from pdlab.engine.interrupts import undisturbed
from pdlab.kvcache import blocks_for
from pdlab.models import Model
from pdlab.requirements import LARGEST_INT, LARGEST_SEED, require_int
from pdlab.trace import StepRecord
from pdlab.workload.arrivals import Arrivals, OpenLoop
from pdlab.workload.serving import ServedRequest, ServingRun, StepSpan, span_of
from pdlab.workload.traces import TraceRequest

LONGEST_PAUSE_S = 0.05
"""Between two looks at the clock while nothing runs."""
WARM_UP_TOKENS = 32


class ReplayInterrupted(KeyboardInterrupt):
    """Ctrl-C during a replay.

    Attributes:
        run: what was served until then. Whoever was unfinished ends with reason `abort`.
    """

    def __init__(self, run: ServingRun):
        super().__init__()
        self.run = run


class Progress(NamedTuple):
    """What happened since the last call of `on_step`."""

    now_s: float
    """Since the replay began."""
    step: StepSpan | None
    """None where nothing ran, because the next arrival is yet to come."""
    num_arrived: int
    """Since the replay began, refused ones too."""
    num_tokens: int
    """Output tokens of the step, for requests of the replay."""
    ended: list[ServedRequest]
    """Finished or refused since then."""


def replay(
    engine: Engine,
    arrivals: Arrivals | Sequence[TraceRequest],
    *,
    vocab_size: int | None = None,
    on_step: Callable[[Progress], None] | None = None,
    seed: int = 0,
    warm_up: bool = True,
) -> ServingRun:
    """Submit each request when it is due, and step until all have ended.

    A request that comes during a step is submitted after it, and counts from when it came. One that
    is impossible, or that the engine or its policy refuses, ends with reason `error` and stops no
    other. Ctrl-C aborts the replay's requests and is raised again, as ReplayInterrupted with what
    was served; the engine and its trace stay good.

    Args:
        engine: with nothing to do, on a KV memory of its own. What it did before is no part of the
            run; its trace, if it records one, has both.
        arrivals: requests alone come in an open loop. It is used up by the run.
        vocab_size: prompts are made of token ids below it; None for all the model has.
        on_step: called after each step, and now and then while nothing runs. Its time counts.
        seed: of the prompts. Equal prefix ids of the trace give equal tokens.
        warm_up: run a few steps on the side before the clock starts: the first ones of a process
            are slower.

    Raises:
        ValueError: the engine is at work or shares its memory, no request is left, or a number is
            out of range.
    """
    _require_alone(engine)
    arrivals = unused(arrivals)
    prompts = Prompts(engine.model, seed, vocab_size)
    if warm_up:
        _warm_up(engine)
    session = _EngineSession(engine, arrivals, prompts, engine.now_s())
    try:
        while not session.is_over:
            session.submit_due()
            record = engine.step()
            if record is None:
                session.collect_aborted()
                session.pause()
            else:
                session.book(record)
            if on_step:
                on_step(session.progress(record))
    except KeyboardInterrupt as interrupt:
        session.abort()
        raise ReplayInterrupted(session.run()) from interrupt
    except BaseException:
        session.abort()
        raise
    return session.run()


def unused(arrivals: Arrivals | Sequence[TraceRequest]) -> Arrivals:
    """Arrivals for one run; requests alone come in an open loop.

    Raises:
        ValueError: no request is left.
    """
    if isinstance(arrivals, Sequence):
        arrivals = OpenLoop(arrivals)
    if arrivals.next_s is None:
        raise ValueError("arrivals has no request left: each serves one run")
    return arrivals


def _require_alone(engine: Engine) -> None:
    unfinished = sum(not request.finished for request in engine.requests.values())
    if unfinished:
        raise ValueError(f"engine has {unfinished} unfinished requests: a replay needs it alone")
    if engine.memory is not None and engine.memory.num_engines > 1:
        raise ValueError(
            f"engine shares its KV memory with {engine.memory.num_engines - 1} others: a replay "
            "needs a memory of its own"
        )


def _warm_up(engine: Engine) -> None:
    """A prompt and some decodes on an engine of the same kind, which nobody records."""
    num_tokens = min(WARM_UP_TOKENS, engine.model.config.max_model_len // 2)
    config = replace(
        engine.config,
        num_blocks=2 * blocks_for(2 * num_tokens, engine.config.block_size),
        num_swap_blocks=0,
        preemption="recompute",
        record_trace=False,
    )
    with Engine(engine.model, config) as other:
        prompts = [[0] * num_tokens, [1] * num_tokens]
        other.generate(prompts, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))


class Prompts:
    """Random token ids for the requests of a trace, the same ones for the same seed.

    No special token is among them, so that a prompt begins or ends nothing by chance.

    Args:
        vocab_size: ids stay below it; None for the model's.

    Raises:
        ValueError: a number is out of range, or no token is left.
    """

    def __init__(self, model: Model, seed: int = 0, vocab_size: int | None = None):
        require_int("seed", seed, 0, LARGEST_SEED)
        most = model.config.vocab_size
        if model.tokenizer is not None:
            most = min(most, model.tokenizer.vocab_size)
        if vocab_size is not None:
            require_int("vocab_size", vocab_size, 1)
            most = min(most, vocab_size)
        special = model.tokenizer.special_ids if model.tokenizer is not None else frozenset()
        self._allowed = np.array([i for i in range(most) if i not in special])
        if not self._allowed.size:
            raise ValueError(f"vocab_size={vocab_size}: all tokens below it are special")
        self._seed = seed

    def make(self, request: TraceRequest, number: int) -> list[int]:
        """The prompt of the request that is handed out as the `number`-th, from 0."""
        length, size = request.num_prompt_tokens, request.prefix_block_size
        if size is None:
            return self._draw((0, number), length)
        tokens: list[int] = []
        for prefix_id in request.prefix_ids:  # each names all up to its end: equal ids, equal parts
            tokens += self._draw((1, _natural(prefix_id)), size)
        return tokens[:length]

    def _draw(self, key: tuple[int, int], length: int) -> list[int]:
        draw = np.random.default_rng((self._seed, *key))
        chosen: list[int] = self._allowed[draw.integers(self._allowed.size, size=length)].tolist()
        return chosen


def _natural(number: int) -> int:
    """Another natural number for each integer."""
    return 2 * number if number >= 0 else -2 * number - 1


class Server(Protocol):
    """What a replay needs of an engine, or of several behind one interface."""

    def now_s(self) -> float: ...
    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int,
        arrival_s: float,
    ) -> str: ...
    def abort(self, request_id: str) -> None: ...
    def collect(self, request_id: str) -> RequestOutput: ...


class _Live(NamedTuple):
    number: int
    priority: int


AnyServer = TypeVar("AnyServer", bound=Server)


@dataclass
class ReplaySession(Generic[AnyServer]):
    """A replay under way. Times are on its own clock, `start_s` is on the server's."""

    server: AnyServer
    arrivals: Arrivals
    prompts: Prompts
    start_s: float
    live: dict[str, _Live] = field(default_factory=dict, init=False)
    """Submitted and not yet ended, by request id."""
    ended: dict[int, ServedRequest] = field(default_factory=dict, init=False)
    """By their place in the order of arrival."""
    num_arrived: int = field(default=0, init=False)

    @property
    def now_s(self) -> float:
        return self.server.now_s() - self.start_s

    @property
    def is_over(self) -> bool:
        return not self.live and self.arrivals.next_s is None

    @property
    def requests(self) -> list[ServedRequest]:
        """Those that have ended, in order of arrival."""
        return [self.ended[number] for number in sorted(self.ended)]

    def submit_due(self) -> None:
        """Also what becomes due by a refusal, in a closed loop."""
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
            prompt_ids = self.prompts.make(request, number)
            arrival_s = self.start_s + request.arrival_s
            with undisturbed():
                request_id = self.server.submit(
                    prompt_ids, params, priority=request.priority, arrival_s=arrival_s
                )
                self.live[request_id] = _Live(number, request.priority)
        except ValueError as error:
            self._end(number, refused(request, number, error), self.now_s)

    def collect(self, request_id: str, now_s: float) -> None:
        """Take an ended request out of the server."""
        with undisturbed():
            output = self.server.collect(request_id)
            number, priority = self.live.pop(request_id)
            times, error = metrics_since(output.metrics, self.start_s), output.error
            why = "" if error is None else str(error)
            served = ServedRequest(request_id, times, output.finish_reason, priority, why)
            self._end(number, served, now_s)

    def _end(self, number: int, served: ServedRequest, now_s: float) -> None:
        self.ended[number] = served
        self.arrivals.note_finished(now_s)

    def pause(self) -> None:
        """Sleep till the next arrival, or a little."""
        if self.arrivals.next_s is not None:
            time.sleep(min(max(0.0, self.arrivals.next_s - self.now_s), LONGEST_PAUSE_S))

    def abort(self) -> None:
        """End all that is unfinished."""
        with undisturbed():
            for request_id in list(self.live):
                self.server.abort(request_id)
                self.collect(request_id, self.now_s)


@dataclass
class _EngineSession(ReplaySession[Engine]):
    """On one engine, whose steps are kept."""

    steps: list[StepSpan] = field(default_factory=list, init=False)
    num_tokens: int = field(default=0, init=False)
    """Of the last step."""
    news: list[ServedRequest] = field(default_factory=list, init=False)
    """Ended, and not yet reported."""

    def _end(self, number: int, served: ServedRequest, now_s: float) -> None:
        super()._end(number, served, now_s)
        self.news.append(served)

    def book(self, record: StepRecord) -> None:
        span = span_of(record, self.start_s, self.server.config.num_blocks)
        self.steps.append(span)
        ours = [s for s in record.sequences if s.sequence_id in self.live]
        self.num_tokens = sum(len(sequence.put_out) for sequence in ours)
        for sequence in ours:
            if sequence.finish_reason is not None:
                self.collect(sequence.sequence_id, span.end_s)

    def collect_aborted(self) -> None:
        """Those that somebody else ended, which no step of ours tells of."""
        for request_id in [i for i in self.live if self.server.requests[i].finished]:
            self.collect(request_id, self.now_s)

    def progress(self, record: StepRecord | None) -> Progress:
        news, self.news = self.news, []
        if record is None:
            return Progress(self.now_s, None, self.num_arrived, 0, news)
        return Progress(self.now_s, self.steps[-1], self.num_arrived, self.num_tokens, news)

    def run(self) -> ServingRun:
        return ServingRun(
            provenance="measured",
            basis=basis_of(self.server),
            config=self.server.config.to_dict(),
            requests=self.requests,
            steps=self.steps,
            num_blocks=self.server.config.num_blocks,
        )


def refused(request: TraceRequest, number: int, error: ValueError) -> ServedRequest:
    """What is known of it; what is no number in range counts as 0."""

    def known(value: object) -> int:
        return value if isinstance(value, int) and abs(value) <= LARGEST_INT else 0

    times = RequestMetrics(request.arrival_s, num_prompt_tokens=known(request.num_prompt_tokens))
    return ServedRequest(f"refused-{number}", times, "error", known(request.priority), str(error))


def basis_of(engine: Engine) -> str:
    """What measured times rest on: model, dtype, processor, threads."""
    machine, model = engine.trace.machine, engine.model
    threads = machine["threads"]
    where = f"{machine['processor']}, {threads} thread{'s' * (threads != 1)}"
    if machine["device"] != "cpu":
        where = f"{machine['device']}, {machine['processor']}"
    return f"{model.name} ({model.dtype_name}) on {where}, torch {machine['torch']}"


def metrics_since(metrics: RequestMetrics, start_s: float) -> RequestMetrics:
    """The same times on a clock that begins at `start_s`."""
    first_s = metrics.first_scheduled_s
    return replace(
        metrics,
        arrival_s=metrics.arrival_s - start_s,
        first_scheduled_s=None if first_s is None else first_s - start_s,
        token_times_s=[time_s - start_s for time_s in metrics.token_times_s],
    )
