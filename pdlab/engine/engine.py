"""The engine: one loop over `step()`, and the requests that go in and come out of it.

step():  batch = scheduler.schedule();  output = runner.run(batch);  scheduler.update(batch, output)
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor
from tqdm.auto import tqdm

from pdlab.costmodel import Hardware
from pdlab.engine import admission
from pdlab.engine.admission import Prompt, PromptList
from pdlab.engine.allocations import AllocationMeter
from pdlab.engine.config import EngineConfig
from pdlab.engine.drafting import Drafter, Outcome, check_draft
from pdlab.engine.exactness import check_rows_are_alike
from pdlab.engine.interrupts import undisturbed
from pdlab.engine.moving import RequestState, Reservation
from pdlab.engine.output import Chunk, FinishReason, RequestOutput
from pdlab.engine.preemption import PreemptionPolicy
from pdlab.engine.probe import Probe
from pdlab.engine.recorder import Recorder, Spoken
from pdlab.engine.request import NO_URGENCY, Request, Sample, Urgency, new_request
from pdlab.engine.runner import EXACT_ROW_TILE, KVPort, ModelRunner, Runner, StepOutput
from pdlab.engine.scheduler import ScheduledBatch, Scheduler
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
from pdlab.trace import BlockMove, StepRecord, Trace


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
        if config.exact:
            check_rows_are_alike(model, EXACT_ROW_TILE)
        if not isinstance(memory, KVMemory | None):
            raise ValueError(f"memory={memory!r:.60} must be KVMemory, from Engine.memory_for")
        memory = memory or admission.make_memory(model, config)
        policy = PreemptionPolicy(model, config, memory.cache, hardware)
        self.model = model
        self.config = config
        self.memory: KVMemory | None = memory
        self.pool = memory.manager.pool
        self.scheduler = Scheduler(memory.manager, config, swaps=policy)
        self.runner: Runner = ModelRunner.of(model, memory, config)
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
        self._measures_activations = False
        memory.join(admission.kind_of_memory(model, config), config.max_num_seqs)
        self._epoch = time.perf_counter()
        self._lock = memory.lock
        self._turns = Turns()

    @staticmethod
    def memory_for(model: Model, config: EngineConfig, num_engines: int = 2) -> KVMemory:
        """One pool for several engines, each with this configuration's `max_num_seqs`.

        They may differ in their batching; what decides about K and V (block size, format, window,
        backend, ...) must be the same, and is checked.
        """
        require_int("num_engines", num_engines, least=1, most=1024)
        return admission.make_memory(model, admission.resolve(model, config), num_engines)

    # --- the loop -----------------------------------------------------------------------------

    def step(self) -> StepRecord | None:
        """Run one batch; None when there is nothing to do.

        Interrupted (Ctrl-C) while the model computes, nothing of the batch has been computed, and
        the next step computes it again; sequences preempted for it, and blocks copied, stay so, and
        are missing in the trace. Other threads wait. None is also returned where nothing *can*
        be done: all streams are paused, or other engines hold all blocks of a shared memory, or
        requests do that are on their way between engines.
        """
        with self._lock:
            memory = self._require_open()
            if not self.scheduler.has_work:
                return None
            start_s = self.now_s()
            clock = StageClock(self.model.decoder.device)
            sequences = [*self.scheduler.running, *self.scheduler.waiting]
            others_hold = memory.num_engines > 1 or self.scheduler.held or self.scheduler.reserved
            may_idle = others_hold or any(s.paused for s in sequences)
            self.scheduler.rank(start_s)
            with undisturbed():
                batch = self.scheduler.schedule(start_s)
                orders = memory.manager.take_orders()
                self.runner.carry_out(orders)
                moves = [order for order in orders if isinstance(order, BlockMove)]
                self._note(batch)
            if not batch.scheduled:
                assert may_idle or batch.unranked, "there is work, and nothing of it was scheduled"
                return None
            moves, self._moves = [*self._moves, *moves], []
            clock.lap("schedule")
            self._draft(batch, clock)
            with self._metered() as activations:
                output = self.runner.run(batch, clock, self._step)
            with undisturbed():
                return self._book(batch, output, moves, activations, clock, start_s)

    def _note(self, batch: ScheduledBatch) -> None:
        """Book what scheduling did for good, whether or not the step comes about."""
        self._freed += batch.blocks_freed
        for sequence in batch.preempted:
            metrics = self._find(sequence)[1].metrics
            metrics.num_preemptions += 1
            metrics.num_swaps += bool(sequence.host_table)
        for sequence, error in batch.unranked.items():
            request, _ = self._find(sequence)
            for sample in request.samples:
                sample.error = error
                self._end(request, sample, "error")
            self._recorder.add_abort(request.request_id, self.now_s())

    def _book(
        self,
        batch: ScheduledBatch,
        output: StepOutput,
        moves: list[BlockMove],
        activations: AllocationMeter | None,
        clock: StageClock,
        start_s: float,
    ) -> StepRecord:
        """Make what the runner computed part of the sequences, the requests and the trace."""
        self.runner.commit()
        if output.block_mass:
            for part in batch.scheduled:
                part.sequence.add_mass(output.block_mass.get(part.sequence.sequence_id, []))
        told = self._take(batch, output, start_s)
        residents = self._recorder.residents(self.scheduler, batch)
        self._freed += self.scheduler.update(batch)
        spoken = {each.sample.sequence.sequence_id: self._deliver(each) for each in told}
        clock.lap("deliver")
        wall_s = self.now_s() - start_s
        self._learn(batch, output, clock.stage_s.get("draft", 0.0), wall_s)
        record = self._recorder.record(
            step=self._step,
            start_s=start_s,
            wall_s=wall_s,
            stage_s=clock.stage_s,
            batch=batch,
            output=output,
            moves=moves,
            spoken=spoken,
            residents=residents,
            waiting=self.scheduler.waiting,
            blocks_freed=self._freed,
            activations=activations,
            shares_memory=self._require_open().num_engines > 1,
        )
        self._freed = []
        self._step += 1
        self._require_open().note_change()
        return record

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
        """Append the new tokens to their sequences, up to that which ends one, and take their text.

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
                    each.text += request.release(sample.take(sampled, now_s))
                    limit = longest if not sequence.holds else sequence.num_tokens + 1
                    each.holds = sequence.holds
                    if reason := sample.ending(limit):
                        each.reason = reason
                        del drawn[i:]
                        break
                if error := output.failed.get(name):
                    sample.error, each.reason = error, "error"
        return told

    def _deliver(self, told: _Told) -> Spoken:
        """End a sequence that is done; what became of its text."""
        request, sample, sequence = told.request, told.sample, told.sample.sequence
        text = told.text
        if told.reason:
            text += self._end(request, sample, told.reason)
        elif told.holds:
            self.scheduler.hold(sequence)
        request.pause_if_unread()
        return Spoken(text, sample.held, sample.stop_reason)

    def _learn(
        self, batch: ScheduledBatch, output: StepOutput, draft_s: float, wall_s: float
    ) -> None:
        """Tell of the drafts: those who made them, and those who asked for the text."""
        outcomes = []
        for part in batch.scheduled:
            if num_drafted := len(part.draft):
                taken = output.sampled.get(part.sequence.sequence_id, [])
                outcomes.append(Outcome(part.sequence, num_drafted, max(0, len(taken) - 1)))
                metrics = self._find(part.sequence)[1].metrics
                metrics.num_draft_tokens += num_drafted
                metrics.num_accepted_tokens += outcomes[-1].num_accepted
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
        first, *others = request.samples
        if first.sequence is sequence:
            return request, first
        return request, next(s for s in others if s.sequence is sequence)

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
        with self._lock, undisturbed():
            request = self.requests.get(request_id)
            if request is None or request.finished:
                return
            for sample in request.samples:
                if not sample.finished:
                    self._end(request, sample, "abort")
            self._recorder.add_abort(request_id, self.now_s())
            self._require_open().note_change()

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
        if not self._enter(request, self.scheduler.reserve):
            return None
        with self._lock, undisturbed():
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
        with self._lock, undisturbed():
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
        with self._lock, undisturbed():
            sample = self._sample(request_id, SequenceState.HELD)
            self._finish(sample.sequence, "moved")
            del self.requests[request_id]
            self._require_open().note_change()

    def pack_kv(self, request_id: str, layers: range, tokens: range, wire: Wire) -> Tensor:
        """K and V of some layers and tokens of a request, as they travel: uint8 [num_bytes].

        Raises:
            ValueError: there is no such request, or its blocks have no such layers or tokens.
        """
        with self._lock:
            sequence = self.sequence_of(request_id)
            return self.kv_port.read_kv(sequence.block_table, layers, tokens, wire)

    def kv_writer(self, request_id: str, wire: Wire) -> KVWriter:
        """Puts K and V that have come into the blocks of a reserved request. Not during a step.

        Raises:
            ValueError: there is no such request, or it has no reservation.
        """
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
        previous = runner.probe
        runner.probe = Probe.of(self.model.config, layers, heads, names)
        try:
            yield
        finally:
            runner.probe = previous

    @contextmanager
    def measure_activations(self) -> Iterator[None]:
        """Count the bytes of activations that every step inside the `with` block makes.

        They are put down in the steps' records. Counting slows a step down.
        """
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
        with self._lock:
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
        with self._lock:
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
        with self._lock:  # a step in another thread ends before
            if self.memory is None:
                return
            for request_id in list(self.requests):
                self.abort(request_id)
            self.memory.leave(self.config.max_num_seqs)
            self.memory = None
            if self.drafter:
                self.drafter.close()
            del self.runner

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- helpers ------------------------------------------------------------------------------

    def _require_open(self) -> KVMemory:
        if self.memory is None:
            raise RuntimeError("the engine is closed")
        return self.memory


@dataclass(slots=True)
class _Told:
    """What a step told one of a request's samples."""

    request: Request
    sample: Sample
    text: str = ""
    """Released to the reader."""
    reason: FinishReason | None = None
    """Why it ends with this step, if it does."""
    holds: bool = False
    """Whether another engine goes on with it."""
