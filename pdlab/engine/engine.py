"""The engine: one loop over `step()`, and the requests that go in and come out of it.

step():  batch = scheduler.schedule();  output = runner.run(batch);  scheduler.update(batch, output)

With overlap the next step is planned as soon as the new tokens are known, and a thread computes it:

caller   book 0, plan 1 | tell 0 | what the caller does | wait, book 1, plan 2 | tell 1 | ...
thread                  | compute 1 ......................|                      | compute 2 ....

`book` is what the next plan depends on: tokens, and which sequences they end. `tell` is the rest:
text, chunks, the record. Of text only stop strings end a sequence, so the text of requests that
have some is told while booking; thus no step is computed that would not be without overlap. Tokens
are not guessed, either: the plan waits for them (vLLM and SGLang plan with placeholders, TensorRT-
LLM computes a step too many, which pays where planning takes long and a row costs little).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType

from torch import Tensor
from tqdm.auto import tqdm

from pdlab.costmodel import Hardware
from pdlab.engine import admission
from pdlab.engine.admission import Prompt, PromptList
from pdlab.engine.allocations import AllocationMeter
from pdlab.engine.config import EngineConfig
from pdlab.engine.drafting import Drafter, Outcome, check_draft
from pdlab.engine.exactness import check_rows_are_alike
from pdlab.engine.flight import ComputeThread, Flight
from pdlab.engine.interrupts import undisturbed
from pdlab.engine.moving import RequestState, Reservation
from pdlab.engine.output import Chunk, FinishReason, RequestOutput
from pdlab.engine.preemption import PreemptionPolicy
from pdlab.engine.probe import Probe
from pdlab.engine.recorder import Recorder, Spoken, Stock
from pdlab.engine.request import NO_URGENCY, Request, Sample, Urgency, Word, new_request
from pdlab.engine.runner import (
    EXACT_ROW_TILE,
    KVPort,
    ModelRunner,
    Runner,
    RunnerLost,
    StepOutput,
)
from pdlab.engine.scheduler import ScheduledBatch, ScheduledSequence, Scheduler
from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.engine.timing import StageClock
from pdlab.engine.turns import Handover, Turns
from pdlab.kvcache import (
    KVLayout,
    KVMemory,
    KVWriter,
    PagedKVCache,
    PrefixCacheStats,
    Wire,
)
from pdlab.models import Model
from pdlab.requirements import require_int
from pdlab.sampling import Compiler, SamplingParams
from pdlab.trace import BlockMove, Span, StepRecord, Trace


class Engine:
    """Serves requests on a model with a paged KV cache and continuous batching.

    Use it as a context manager: leaving gives the KV memory back.

    Args:
        model: from `pdlab.load`.
        config: the knobs; the default serves a laptop.
        memory: KV memory to share with other engines, from `Engine.memory_for`; its sequences live
            in one pool with theirs. None makes its own.
        hardware: the ceilings that `preemption="auto"` reckons with; None measures them if needed.

    Raises:
        ValueError: the configuration does not fit the model, or the memory.
    """

    def __init__(
        self,
        model: Model,
        config: EngineConfig | None = None,
        *,
        memory: KVMemory | None = None,
        hardware: Hardware | None = None,
    ):
        config = admission.resolve(model, config or EngineConfig())
        is_parallel = config.num_ranks > 1
        if config.exact and not is_parallel:
            check_rows_are_alike(model, EXACT_ROW_TILE)
        if not isinstance(memory, KVMemory | None):
            raise ValueError(f"memory={memory!r:.60} must be KVMemory, from Engine.memory_for")
        if memory and is_parallel:
            raise ValueError(
                f"memory={memory!r:.40}: ranks keep K and V of their own, tensor_parallel="
                f"{config.tensor_parallel} and pipeline_parallel={config.pipeline_parallel} cannot "
                "share that of others"
            )
        make_memory = parallel().sharded_memory if is_parallel else admission.make_memory
        memory = memory or make_memory(model, config)
        policy = PreemptionPolicy(model, config, memory.cache, hardware)
        self.model = model
        self.config = config
        self.memory: KVMemory | None = memory
        self.pool = memory.manager.pool
        self.scheduler = Scheduler(memory.manager, config, swaps=policy)
        self.compiler = Compiler(
            model.tokenizer, model.config.vocab_size, config.constraint_backend
        )
        self.requests: dict[str, Request] = {}
        self.drafter: Drafter | None = (
            config.speculation.make(model, config) if config.speculation else None
        )
        self._recorder = Recorder(model, memory, config)
        self._num_requests = 0
        self._seeds = random.Random(config.seed)
        self._step = 0
        self._freed: list[int] = []
        self._moves: list[BlockMove] = []
        """Those that `reserve` made, until a step records them."""
        self._wasted: list[ScheduledSequence] = []
        """What was computed for nobody, until a step records it."""
        self._measures_activations = False
        self._thread = ComputeThread(model.device)
        self._flight: Flight | None = None
        """The next step, planned, that is computed or waits to be booked."""
        self._failure: Exception | None = None
        """What kept the next step from being planned while the last one was made."""
        self._untold: list[_Booked] = []
        """What has been booked, and not been told yet."""
        self._refused: list[Request] = []
        """Those that ended because the policy has no rank for them, and do not know yet."""
        memory.join(admission.kind_of_memory(model, config), config.max_num_seqs)
        self._epoch = time.perf_counter()
        self._lock = memory.lock
        self._turns = Turns()
        make_runner = parallel().ParallelRunner if is_parallel else ModelRunner.of
        self._own_runner: ModelRunner = make_runner(model, memory, config)
        self.runner: Runner = self._own_runner

    @staticmethod
    def memory_for(model: Model, config: EngineConfig, num_engines: int = 2) -> KVMemory:
        """One pool for several engines, each with this configuration's `max_num_seqs`.

        They may differ in their batching; what decides about K and V (block size, format, window,
        backend, ...) must be the same, and is checked.
        """
        require_int("num_engines", num_engines, least=1, most=1024)
        if config.num_ranks > 1:
            raise ValueError(f"memory of {config.num_ranks} ranks cannot be shared by engines")
        return admission.make_memory(model, admission.resolve(model, config), num_engines)

    # --- the loop -----------------------------------------------------------------------------

    @property
    def has_flight(self) -> bool:
        """Whether the next step is on its way already, or computed."""
        return self._flight is not None

    def step(self) -> StepRecord | None:
        """Run one batch; None when there is nothing to do.

        With overlap it was mostly run since the call before, and the next one is begun before this
        one returns.

        Interrupted (Ctrl-C) while the model computes, nothing of the batch has been computed, and
        the next step computes it again; sequences preempted for it, and blocks copied, stay so, and
        are missing in the trace. With overlap only the waiting is interrupted, and an error of the
        thread is raised by the step that would have booked its work. Other threads wait. None is
        also returned where nothing *can* be done: all streams are paused, or other engines hold all
        blocks of a shared memory, or requests do that are on their way between engines.
        """
        called_s = self.now_s()
        with self._quiet(), self._mourning():
            memory = self._require_open()
            failure, self._failure = self._failure, None
            if failure:
                raise failure
            if not self._flight:
                self._take_off()
                memory.settle()
            if not self._flight:
                return None
            try:
                with undisturbed():
                    self._book(called_s)
                if self.config.overlap and self._may_run_apart:
                    self._take_off_early()
            finally:
                record = self._tell()
            return record

    @contextmanager
    def _mourning(self) -> Iterator[None]:
        """End all requests with an error if the runner is lost: none of them can go on."""
        try:
            yield
        except RunnerLost as lost:
            with undisturbed():
                self._flight = self._failure = None
                for request in self.requests.values():
                    for sample in request.samples:
                        if not sample.finished:
                            sample.error = lost
                            self._end(request, sample, "error")
            raise

    def _take_off_early(self) -> None:
        """Begin the next step while this one is not over; its errors are its own."""
        try:
            self._take_off()
        except Exception as error:
            self._failure = error

    def _take_off(self) -> None:
        """Plan the next step, if there is work, and compute it, here or in the thread."""
        if not self.scheduler.has_work:
            return
        start_s, clock = self.now_s(), StageClock()
        self.scheduler.rank(start_s)
        apart = self.config.overlap and self._may_run_apart
        with undisturbed():
            flight = self._plan(start_s, apart)
            if not flight:
                return
            clock.lap("schedule")
            if apart and not self.drafter:
                flight.planning_s = clock.stage_s
                self._launch(flight)
                return
        self._draft(flight.batch, clock)
        flight.planning_s = clock.stage_s
        if apart:
            with undisturbed():
                self._launch(flight)
            return
        with self._metered() as flight.activations:
            flight.compute()
        self._flight = flight

    def _plan(self, start_s: float, apart: bool) -> Flight | None:
        """Schedule, and copy blocks or leave that to the thread."""
        memory = self._require_open()
        sequences = [*self.scheduler.running, *self.scheduler.waiting]
        others_hold = memory.num_engines > 1 or self.scheduler.held or self.scheduler.reserved
        may_idle = others_hold or any(s.paused for s in sequences)
        batch = self.scheduler.schedule(start_s)
        orders = memory.manager.take_orders()
        leaves_copies = apart and batch.scheduled and not self.drafter  # who may read the cache
        if not leaves_copies:
            self.runner.carry_out(orders)
        moves = [order for order in orders if isinstance(order, BlockMove)]
        self._note(batch)
        if not batch.scheduled:
            assert may_idle or batch.unranked, "there is work, and nothing of it was scheduled"
            return None
        moves, self._moves = [*self._moves, *moves], []
        return Flight(
            batch,
            self.runner,
            self.model.device,
            self._step,
            start_s,
            moves,
            orders if leaves_copies else [],
        )

    def _launch(self, flight: Flight) -> None:
        """Give a step to the thread. From then on all who touch sequences or blocks `settle`."""
        flight.launch(self._thread)
        self._flight = self._require_open().under_way = flight

    @property
    def _may_run_apart(self) -> bool:
        """Whether nobody looks into the computation from outside, or puts K and V beside it."""
        looked_into = getattr(self.runner, "probe", None) or getattr(self.runner, "on_layer", None)
        return not (looked_into or self._measures_activations or self.scheduler.reserved)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let no other thread at the engine, and at those it shares memory with."""
        if self._thread.is_current:
            raise RuntimeError("a step may not change the engine from inside its own computation")
        with self._lock:
            yield

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Locked, nothing computed on the memory meanwhile, and everything told."""
        with self._locked():
            if self.memory:
                self.memory.settle()
            while self._untold:
                self._tell()
            yield

    def _note(self, batch: ScheduledBatch) -> None:
        """Book what scheduling did for good, whether or not the step comes about."""
        self._freed += batch.blocks_freed
        for sequence in batch.preempted:
            metrics = self._find(sequence)[1].metrics
            metrics.num_preemptions += 1
            metrics.num_swaps += bool(sequence.host_table)
        for sequence, error in batch.unranked.items():
            request, _ = self._find(sequence)
            self._refused.append(request)
            for sample in request.samples:
                sample.error = error
                self._finish(sample.sequence, "error")
            self._recorder.add_abort(request.request_id, self.now_s())
        if not self._untold:
            self._tell_refused()

    def _tell_refused(self) -> None:
        for request in self._refused:
            for sample in request.samples:
                request.release(sample.close())
        self._refused.clear()

    def _book(self, called_s: float) -> None:
        """Make what was computed part of the sequences: all that the next plan depends on.

        Args:
            called_s: since when the caller waits.
        """
        flight, self._flight = self._flight, None
        assert flight
        flight.raise_error()
        flight.commit()
        start_s, batch, output = self.now_s(), flight.batch, flight.output
        assert output
        live = flight.live
        wasted = [*self._wasted, *(part for part in batch.scheduled if part not in live)]
        batch.scheduled, self._wasted = live, []
        if output.block_mass:
            for part in batch.scheduled:
                part.sequence.add_mass(output.block_mass.get(part.sequence.sequence_id, []))
        told = self._take(batch, output, flight.start_s)
        residents = self._recorder.residents(self.scheduler, batch)
        self._freed += self.scheduler.update(batch)
        for each in told:
            if each.reason:
                self._finish(each.sample.sequence, each.reason)
            elif each.holds:
                self.scheduler.hold(each.sample.sequence)
            each.request.pause_if_unread()
        stock = self._recorder.take_stock(
            self.scheduler,
            residents,
            blocks_freed=self._freed,
            shares_memory=self._require_open().num_engines > 1,
        )
        self._freed = []
        self._step += 1
        self._require_open().note_change()
        booked = _Booked(flight, output, told, wasted, stock, called_s, start_s, self.now_s())
        self._untold.append(booked)
        if flight.is_apart:  # who guesses for the next step must have heard of this one
            self._learn(booked, self._wall_s(booked))

    def _wall_s(self, booked: _Booked) -> float:
        """What a step with overlap took: until all was computed, and the booking."""
        computed_s = booked.flight.computed_at[1] - self._epoch
        return computed_s - booked.flight.start_s + booked.end_s - booked.start_s

    def _tell(self) -> StepRecord | None:
        """Tell readers and the trace of the step that was booked first."""
        if not self._untold:
            return None
        with undisturbed():
            booked = self._untold.pop(0)
            clock, start_s = StageClock(), self.now_s()
            texts = [each.release() for each in booked.told]
            spoken = {
                each.sample.sequence.sequence_id: each.conclude(text)
                for each, text in zip(booked.told, texts, strict=True)
            }
            self._tell_refused()
            flight = booked.flight
            clock.lap("deliver")
            stage_s = flight.stage_s
            if flight.is_apart:
                wall_s = self._wall_s(booked)
                stage_s["deliver"] = booked.end_s - booked.start_s
            else:
                wall_s = self.now_s() - flight.start_s
                stage_s["deliver"] = clock.stage_s["deliver"] + booked.end_s - booked.start_s
                self._learn(booked, wall_s)
            return self._recorder.record(
                step=flight.step,
                start_s=flight.start_s,
                wall_s=wall_s,
                stage_s=stage_s,
                batch=flight.batch,
                output=booked.output,
                moves=flight.moves,
                spoken=spoken,
                stock=booked.stock,
                activations=flight.activations,
                wasted=booked.wasted,
                spans=self._spans(booked, start_s) if flight.is_apart else [],
                epoch_s=self._epoch,
            )

    def _spans(self, booked: _Booked, told_s: float) -> list[Span]:
        """What was done when; the telling, from `told_s` until now."""
        flight = booked.flight
        begin_s, end_s = (at - self._epoch for at in flight.computed_at)
        spans, at_s = [], flight.start_s
        for name in ("schedule", "draft"):
            if name in flight.planning_s:
                spans.append(Span("host", name, at_s, flight.planning_s[name]))
                at_s = spans[-1].end_s
        waits_s = max(booked.called_s, at_s)
        return [
            *spans,
            Span("compute", "compute", begin_s, end_s - begin_s),
            Span("host", "wait", waits_s, booked.start_s - waits_s),
            Span("host", "book", booked.start_s, booked.end_s - booked.start_s),
            Span("host", "tell", told_s, self.now_s() - told_s),
        ]

    def _draft(self, batch: ScheduledBatch, clock: StageClock) -> None:
        """Let the drafter guess ahead for those that decode."""
        if self.drafter is None:
            return
        parts, limits = self.scheduler.may_draft(batch)
        if any(limits):
            drafts = self.drafter.propose([part.sequence for part in parts], limits)
            with undisturbed():
                for part, limit, draft in zip(parts, limits, drafts, strict=True):
                    check_draft(draft, limit, self.model.config.vocab_size)
                    if draft:
                        self.scheduler.add_draft(part, draft, batch)
        clock.lap("draft")

    def _take(self, batch: ScheduledBatch, output: StepOutput, start_s: float) -> list[_Told]:
        """Append the new tokens to their sequences, up to that which ends one.

        `output.sampled` keeps what was taken.
        """
        now_s, longest = self.now_s(), admission.longest(self.config)
        told = []
        for part in batch.scheduled:
            for sequence in [part.sequence, *part.forks]:
                request, sample = self._find(sequence)
                name = sequence.sequence_id
                if sample.metrics.first_scheduled_s is None:
                    sample.metrics.first_scheduled_s = start_s
                    sample.metrics.num_cached_tokens = part.num_cached_tokens
                if name in output.prompt_logprobs:
                    request.prompt_logprobs |= output.prompt_logprobs[name]
                told.append(each := _Told(request, sample))
                drawn = output.sampled.get(name, [])
                for i, sampled in enumerate(drawn, start=1):
                    sequence.token_ids.append(sampled.token_id)
                    word = sample.book(sampled, now_s)
                    each.words.append(sample.tell(word) if sample.is_told_at_once else word)
                    request.num_untold += 1
                    limit = longest if not sequence.holds else sequence.num_tokens + 1
                    each.holds = sequence.holds
                    if reason := sample.ending(limit):
                        each.reason = reason
                        del drawn[i:]
                        break
                if error := output.failed.get(name):
                    sample.error, each.reason = error, "error"
        return told

    def _learn(self, booked: _Booked, wall_s: float) -> None:
        """Tell of the drafts: those who made them, and those who asked for the text."""
        outcomes = []
        for part in booked.flight.batch.scheduled:
            if num_drafted := len(part.draft):
                taken = booked.output.sampled.get(part.sequence.sequence_id, [])
                outcomes.append(Outcome(part.sequence, num_drafted, max(0, len(taken) - 1)))
                metrics = self._find(part.sequence)[1].metrics
                metrics.num_draft_tokens += num_drafted
                metrics.num_accepted_tokens += outcomes[-1].num_accepted
        draft_s = booked.flight.stage_s.get("draft", 0.0)
        if self.drafter and (outcomes or draft_s):
            self.drafter.learn(outcomes, draft_s, wall_s - draft_s)

    def _end(self, request: Request, sample: Sample, reason: FinishReason) -> str:
        """Finish one sequence: give its blocks back; returns the last of its text."""
        self._finish(sample.sequence, reason)
        return request.release(sample.close())

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        self._freed += self.scheduler.finish(sequence, reason)
        if self.drafter:
            self.drafter.forget(sequence)

    def _find(self, sequence: Sequence) -> tuple[Request, Sample]:
        """The request and the sample that a sequence works for."""
        request = self.requests[sequence.request_id]
        sample = request.samples[0]  # as a rule the only one
        if sample.sequence is not sequence:
            sample = next(s for s in request.samples if s.sequence is sequence)
        return request, sample

    # --- requests -----------------------------------------------------------------------------

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

        Args:
            priority: what `policy="priority"` goes by: the lower, the sooner.
            ttft_slo_s: what `policy="deadline"` goes by: how long after its arrival the first token
                is due; None for the policy's own.
            arrival_s: when it came, on the clock of `now_s`, from which its latencies are counted;
                None for now.

        Raises:
            ValueError: the prompt is empty, too long, or can never fit into the KV pool; or its
                constraint is impossible.
        """
        urgency = Urgency(priority, ttft_slo_s, arrival_s).checked(self.now_s())
        return self._submit(prompt, params, urgency=urgency).request_id

    def _submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        max_unread: int | None = None,
        urgency: Urgency = NO_URGENCY,
    ) -> Request:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r:.60} must be SamplingParams")
        text, prompt_ids = admission.tokenize(self.model, prompt)
        request = self._new_request(text, prompt_ids, params, params.seed, urgency)
        request.max_unread = max_unread
        self._enter(request, self.scheduler.add)
        return request

    def _new_request(
        self,
        text: str,
        prompt_ids: list[int],
        params: SamplingParams,
        seed: int | None,
        urgency: Urgency,
        request_id: str | None = None,
        draws: int | None = None,
    ) -> Request:
        """A request that the engine can serve; it is not in its queues yet.

        Args:
            draws: output tokens that it has once it leaves for another engine; None if it stays.

        Raises:
            ValueError: it can never be served, or there is another one of this name.
        """
        admission.check_token_ids(self.model, params)
        kept = self._require_open().manager.retention
        here = params if draws is None else replace(params, max_tokens=draws)
        admission.check_fits(self.config, kept, prompt_ids, here)
        if request_id in self.requests:
            raise ValueError(f"request_id={request_id!r} is the name of another request")
        now_s = self.now_s()
        constraint, bad_words = self.compiler.constraint(params), self.compiler.bad_words(params)
        with self._lock, undisturbed():
            if request_id is None:
                request_id = f"r{self._num_requests}"
                self._num_requests += 1
            return new_request(
                request_id,
                text,
                prompt_ids,
                params,
                seed=self._seeds.getrandbits(63) if seed is None else seed,
                uses_prefix_cache=self.config.enable_prefix_cache and params.prefix_cache,
                urgency=urgency,
                now_s=now_s,
                model=self.model,
                constraint=constraint,
                bad_words=bad_words,
            )

    def _enter(self, request: Request, enter: Callable[[Sequence], object]) -> bool:
        """Let a request in, in the way given; False if `enter` said so."""
        entered = False
        try:
            with self._lock, undisturbed():
                self._require_open()
                entered = enter(request.samples[0].sequence) is not False
                if entered:
                    self._recorder.add_request(request, request.samples[0].sequence.params)
                    self.requests[request.request_id] = request
            return entered
        except BaseException:  # a Ctrl-C that was held back: nobody learns the request's id
            if entered:
                self._leave(request)
            raise

    def abort(self, request_id: str) -> None:
        """End a request now and free its blocks; one that has finished or is gone stays so."""
        with self._locked():
            request = self.requests.get(request_id)
            if request is None or request.finished:
                return
            with self._quiet(), undisturbed():
                self._abort(request)

    def _abort(self, request: Request) -> None:
        if request.finished:  # as it turned out when all was told
            return
        for sample in request.samples:
            if not sample.finished:
                self._end(request, sample, "abort")
        self._recorder.add_abort(request.request_id, self.now_s())
        self._require_open().note_change()
        self._drop_empty_flight()

    def _drop_empty_flight(self) -> None:
        """A step in which nobody is left is none. What it did is put down in the next one."""
        flight = self._flight
        if flight and not flight.failed and not flight.live:
            self._wasted += flight.batch.scheduled
            self._moves = [*flight.moves, *self._moves]
            self._flight = None

    # --- from one engine to another -------------------------------------------------------------

    def resume(
        self,
        state: RequestState,
        *,
        request_id: str | None = None,
        holds: bool = False,
        priority: int = 0,
        ttft_slo_s: float | None = None,
        arrival_s: float | None = None,
    ) -> str:
        """Queue a request that another engine may have begun: all its tokens are computed here.

        Args:
            request_id: its name here; None for the engine's next.
            holds: it is for yet another engine: once the next token is drawn, it leaves its seat's
                work to others and keeps its blocks, until `let_go` or `abort`.
            priority, ttft_slo_s, arrival_s: as of `submit`.

        Raises:
            ValueError: as `submit`; or it is to be held, and a window drops some of its blocks.
        """
        urgency = Urgency(priority, ttft_slo_s, arrival_s).checked(self.now_s())
        draws = len(state.output_ids) + 1 if holds else None
        request = self._begun(state, urgency, request_id, draws)
        if holds:
            self._require_whole()
        request.samples[0].sequence.holds = holds
        self._enter(request, self.scheduler.add)
        return request.request_id

    def prepare(
        self,
        state: RequestState,
        *,
        request_id: str | None = None,
        priority: int = 0,
        ttft_slo_s: float | None = None,
        arrival_s: float | None = None,
    ) -> Request:
        """A request whose tokens another engine computes. It has nothing here until `reserve`.

        Args:
            request_id, priority, ttft_slo_s, arrival_s: as of `resume`.

        Raises:
            ValueError: it can never be served, or a window drops some of its blocks.
        """
        urgency = Urgency(priority, ttft_slo_s, arrival_s).checked(self.now_s())
        self._require_whole()
        return self._begun(state, urgency, request_id)

    def reserve(self, request: Request) -> Reservation | None:
        """A seat, and blocks for all tokens of a prepared request; None if there is no room yet.

        Its K and V are put there with `kv_writer`; then `admit` lets it run, or `abort` ends it.
        Who waits here since earlier comes first.
        """
        with self._quiet():
            entered = self._enter(request, self.scheduler.reserve)
        if not entered:
            return None
        with self._quiet(), undisturbed():
            orders = self._require_open().manager.take_orders()
            self.runner.carry_out(orders)
            self._moves += [order for order in orders if isinstance(order, BlockMove)]
        metrics, sequence = request.samples[0].metrics, request.samples[0].sequence
        metrics.first_scheduled_s = self.now_s()
        metrics.num_cached_tokens = sequence.num_cached_tokens
        return Reservation(request.request_id, sequence.num_tokens, sequence.num_cached_tokens)

    def _require_whole(self) -> None:
        """That the memory keeps all K and V of a sequence."""
        window = self._require_open().manager.retention.window
        if window is not None:
            raise ValueError(f"window={window}: K and V that are dropped in part cannot travel")

    def _begun(
        self,
        state: RequestState,
        urgency: Urgency,
        request_id: str | None,
        draws: int | None = None,
    ) -> Request:
        """A request that goes on from a state; `draws` as of `_new_request`."""
        if not isinstance(state, RequestState):
            raise ValueError(f"state={state!r:.60} must be a RequestState")
        admission.check_vocabulary(self.model, state.token_ids)
        if state.num_tokens >= admission.longest(self.config) and state.output_ids:
            raise ValueError(
                f"state has {state.num_tokens} tokens, max_model_len is {self.config.max_model_len}"
            )
        if len(state.output_ids) >= state.params.max_tokens:
            raise ValueError(
                f"output_ids has {len(state.output_ids)} tokens, max_tokens is "
                f"{state.params.max_tokens}"
            )
        seed = state.params.seed if state.seed is None else state.seed
        request = self._new_request(
            state.prompt, state.prompt_ids, state.params, seed, urgency, request_id, draws
        )
        request.samples[0].catch_up(state.output_ids)
        return request

    def admit(self, request_id: str, token_id: int) -> None:
        """Let a reserved request run: its K and V are there.

        Args:
            token_id: what the engine that computed them drew next; its text is released already.

        Raises:
            ValueError: there is no such request, or it has no reservation.
        """
        with self._quiet(), undisturbed():
            sample = self._sample(request_id, SequenceState.RESERVED)
            self.scheduler.admit(sample.sequence)
            sample.catch_up([token_id])
            if reason := sample.ending(admission.longest(self.config)):
                self._end(self.requests[request_id], sample, reason)

    def let_go(self, request_id: str) -> None:
        """Forget a held request, and free its blocks: another engine goes on with it.

        Raises:
            ValueError: there is no such request, or it is not held.
        """
        with self._quiet(), undisturbed():
            sample = self._sample(request_id, SequenceState.HELD)
            self._finish(sample.sequence, "moved")
            del self.requests[request_id]
            self._require_open().note_change()

    def pack_kv(self, request_id: str, layers: range, tokens: range, wire: Wire) -> Tensor:
        """K and V of some layers and tokens of a request, as they travel: uint8 [num_bytes].

        Raises:
            ValueError: there is no such request, or its blocks have no such layers or tokens.
        """
        with self._quiet():
            sequence = self.sequence_of(request_id)
            return self.kv_port.read_kv(sequence.block_table, layers, tokens, wire)

    def kv_writer(self, request_id: str, wire: Wire) -> KVWriter:
        """Puts K and V that have come into the blocks of a reserved request. Not during a step.

        Raises:
            ValueError: there is no such request, or it has no reservation.
        """
        with self._quiet():  # and as long as there are reservations, no step is left in flight
            sequence = self._sample(request_id, SequenceState.RESERVED).sequence
            return self.kv_port.kv_writer(sequence.block_table, wire)

    @property
    def kv_port(self) -> KVPort:
        """Where K and V leave and come, and who may be told of each layer (`on_layer`)."""
        assert isinstance(self.runner, KVPort), "what stands before the runner has no way through"
        return self.runner

    @property
    def kv_layout(self) -> KVLayout:
        """What another engine must know of this one's cache."""
        return KVLayout.of(self.kv_cache)

    def sequence_of(self, request_id: str) -> Sequence:
        """A request's (first) sequence: its tokens, blocks and state.

        Raises:
            ValueError: there is no such request.
        """
        return self._sample(request_id).sequence

    def _sample(self, request_id: str, state: SequenceState | None = None) -> Sample:
        request = self.requests.get(request_id)
        if request is None:
            raise ValueError(f"request_id={request_id!r} is unknown or was collected before")
        sample = request.samples[0]
        if state is not None and sample.sequence.state is not state:
            raise ValueError(
                f"request_id={request_id!r} is {sample.sequence.state.value}, not {state.value}"
            )
        return sample

    # --- what comes out -----------------------------------------------------------------------

    def discard(self, request_id: str) -> None:
        """End a request, wherever it is, and forget it."""
        self.abort(request_id)
        self.requests.pop(request_id, None)

    def collect(self, request_id: str) -> RequestOutput:
        """A finished request's output; the engine forgets the request.

        Raises:
            ValueError: there is no such request, or it has not finished.
        """
        request = self.requests.get(request_id)
        if request is None:
            raise ValueError(f"request_id={request_id!r} is unknown or was collected before")
        if not request.finished:
            raise ValueError(f"request_id={request_id!r} has not finished")
        del self.requests[request_id]
        return request.output()

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
            discard=self.discard,
            collect=self.collect,
        )

    def _run_until_finished(self, request_ids: list[str], progress: bool) -> None:
        pending = [self.requests[i] for i in request_ids]
        with tqdm(total=len(pending), unit="request", disable=not progress) as bar:
            while pending:
                self._step_or_wait()
                still = [r for r in pending if not r.finished]
                bar.update(len(pending) - len(still))
                pending = still

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, max_unread: int = 64
    ) -> Iterator[Chunk]:
        """Yield a request's text as it is made. Closing the iterator aborts the request.

        The request is submitted now; other requests of this engine go on in the same steps.

        Args:
            max_unread: chunks that may wait to be read, while others' reading drives the engine;
                then the request pauses until they are.

        Raises:
            ValueError: as `submit`; or, after the last chunk, what kept a sample from going on.
        """
        admission.check_stream(params, max_unread)
        chunks = self._follow(self._submit(prompt, params, max_unread))
        next(chunks)  # enter its `try`, or closing it unread would not abort
        return chunks

    def _follow(self, request: Request) -> Iterator[Chunk]:
        try:
            yield Chunk("", [])  # taken by `stream`
            while not request.is_drained:
                if request.num_unread:
                    yield request.read()
                else:
                    self._advance(request)
            request.raise_error()
        finally:
            self._leave(request)

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, max_unread: int = 64
    ) -> AsyncIterator[Chunk]:
        """As `stream`, for an event loop: steps run in a thread, one for all who wait.

        The request is submitted when the first chunk is asked for. Closing the iterator, or
        cancelling the task that reads it, aborts the request.
        """
        admission.check_stream(params, max_unread)
        handover = Handover(self._leave)
        request = await handover.wait(lambda: self._submit(prompt, params, max_unread))
        try:
            while not request.is_drained:
                if request.num_unread:
                    yield request.read()
                else:
                    await self._turns.wait(lambda: self._advance(request))
            request.raise_error()
        finally:
            await asyncio.shield(asyncio.to_thread(self._leave, request))

    def _advance(self, request: Request) -> None:
        """Step, unless there is something to read already, from a step that another one made."""
        with self._lock:
            if not request.num_unread and not request.finished:
                request.pause_if_unread()  # its reader may have read while a step delivered
                self._step_or_wait()

    def _leave(self, request: Request) -> None:
        """The reader of a stream is gone."""
        self.discard(request.request_id)

    def _step_or_wait(self) -> None:
        """Step; where other engines hold the blocks, wait for what they do in other threads."""
        with self._lock:
            if self.step() is None and self.scheduler.has_work:
                if self._require_open().wait_for_change():
                    return
                raise RuntimeError(
                    "the blocks are held by sequences of other engines on the same KV memory, and "
                    "none of them gets on: step them, read their streams, or abort them"
                )

    # --- looking in ---------------------------------------------------------------------------

    def now_s(self) -> float:
        """Seconds since the engine was made: the clock of all times that it tells."""
        return time.perf_counter() - self._epoch

    @property
    def trace(self) -> Trace:
        """Everything recorded since the engine was made."""
        return self._recorder.trace

    @contextmanager
    def probe(
        self,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        names: Iterable[str] = ("attention",),
    ) -> Iterator[None]:
        """Keep tensors of every step inside the `with` block in `trace.captures`.

        Steps run without overlap there; one that was computed before is not among them.

        Args:
            layers, heads: numbers of layers and of query heads; None for all.
            names: of `attention`, `q`, `k`, `v`, `attended` (see `Probe`).

        Raises:
            ValueError: there is no such layer, head or tensor.
        """
        self._require_open()
        if not self.config.record_trace:
            raise ValueError("record_trace=False: a probe has no trace to keep its captures in")
        runner = self.runner
        assert isinstance(runner, ModelRunner)
        if self.config.num_ranks > 1:
            raise ValueError(f"a probe cannot look into {self.config.num_ranks} ranks: use one")
        probe, previous = Probe.of(self.model.config, layers, heads, names), runner.probe
        with self._quiet():
            runner.probe = probe
        try:
            yield
        finally:
            runner.probe = previous

    @contextmanager
    def measure_activations(self) -> Iterator[None]:
        """Count the bytes of activations that every step inside the `with` block makes.

        They are put down in the steps' records. Counting slows a step down. Steps run without
        overlap there; one that was computed before is not counted.
        """
        if self.config.num_ranks > 1:
            raise ValueError(f"activations of {self.config.num_ranks} ranks cannot be counted here")
        with self._quiet():
            before, self._measures_activations = self._measures_activations, True
        try:
            yield
        finally:
            self._measures_activations = before

    def _metered(self) -> AbstractContextManager[AllocationMeter | None]:
        return AllocationMeter() if self._measures_activations else nullcontext()

    @property
    def kv_cache(self) -> PagedKVCache:
        """The tensors of the KV memory."""
        return self._require_open().cache

    @property
    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Hits and evictions since the KV memory was made."""
        return self._require_open().manager.stats

    def clear_prefix_cache(self) -> None:
        """Forget all cached prefixes; what running sequences hold stays."""
        with self._quiet():
            self._require_open()
            self.pool.forget_all()

    def read_kv(self, sequence_id: str) -> Tensor:
        """A copy of the K and V of a sequence, also of one that is swapped out.

        Args:
            sequence_id: a request's id stands for its first sample, "r0.1" for the second of "r0".

        Returns [2, num_layers, num_computed_tokens, num_kv_heads, head_dim]; NaN where a block was
        dropped because it fell out of the window.

        Raises:
            ValueError: there is no such sequence.
        """
        with self._quiet():
            memory = self._require_open()
            samples = [sample for request in self.requests.values() for sample in request.samples]
            found = [s.sequence for s in samples if s.sequence.sequence_id == sequence_id]
            if not found:
                raise ValueError(f"sequence_id={sequence_id!r} is unknown or was collected before")
            [sequence] = found
            if sequence.host_table:
                assert memory.host is not None
                return memory.host.read(sequence.host_table, sequence.num_computed_tokens)
            return memory.cache.read(sequence.block_table, sequence.num_computed_tokens)

    # --- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs and give the KV memory back. The trace stays readable.

        Closing a closed engine does nothing.
        """
        with self._quiet():  # a step in another thread ends before
            if self.memory is None:
                return
            for request_id in list(self.requests):
                self.abort(request_id)
            self._flight = self._failure = None
            self._thread.close()
            self.memory.leave(self.config.max_num_seqs)
            self.memory = None
            if self.drafter:
                self.drafter.close()
            self._own_runner.close()
            del self.runner, self._own_runner

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- helpers ------------------------------------------------------------------------------

    def _require_open(self) -> KVMemory:
        if self.memory is None:
            raise RuntimeError("the engine is closed")
        return self.memory


def parallel() -> ModuleType:
    """The room of ranks. It is made of engines' parts, so it is above: entered when needed."""
    from pdlab import parallel

    return parallel


@dataclass(slots=True)
class _Told:
    """What a step has to tell one of a request's samples."""

    request: Request
    sample: Sample
    words: list[Word | Chunk] = field(default_factory=list)
    """Its new tokens; chunks where their text had to be known at once."""
    reason: FinishReason | None = None
    """Why it ends with this step, if it does."""
    holds: bool = False
    """Whether another engine goes on with it."""

    def release(self) -> str:
        """Hand the tokens to the reader; returns their text."""
        text = ""
        for word in self.words:
            chunk = word if isinstance(word, Chunk) else self.sample.tell(word)
            text += self.request.release(chunk)
            self.request.num_untold -= 1
        return text

    def conclude(self, text: str) -> Spoken:
        """What became of the text, after the last of it if it has ended."""
        if self.reason:
            text += self.request.release(self.sample.close())
        return Spoken(text, self.sample.held, self.sample.stop_reason)


@dataclass(slots=True)
class _Booked:
    """A step that is part of the sequences, and still to be told."""

    flight: Flight
    output: StepOutput
    told: list[_Told]
    wasted: list[ScheduledSequence]
    stock: Stock
    called_s: float
    start_s: float
    """When its booking began, on the engine's clock."""
    end_s: float
