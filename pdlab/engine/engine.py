"""The engine: one loop over `step()`, and the requests that go in and come out of it.

step():  batch = scheduler.schedule();  output = runner.run(batch);  scheduler.update(batch, output)
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Several
from contextlib import contextmanager

from torch import Tensor
from tqdm.auto import tqdm

from pdlab.attention import BACKENDS
from pdlab.engine import admission
from pdlab.engine.admission import Prompt, PromptList
from pdlab.engine.config import EngineConfig, SamplingParams
from pdlab.engine.exactness import check_rows_are_alike
from pdlab.engine.interrupts import undisturbed
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.output import Chunk, Detokenizer, RequestOutput
from pdlab.engine.probe import Probe
from pdlab.engine.recorder import Recorder
from pdlab.engine.request import Request
from pdlab.engine.runner import EXACT_ROW_TILE, ModelRunner, Runner, StepOutput
from pdlab.engine.sampler import Sampler
from pdlab.engine.scheduler import ScheduledBatch, Scheduler
from pdlab.engine.sequence import Sequence
from pdlab.engine.timing import StageClock
from pdlab.kvcache import BlockPool, PagedKVCache
from pdlab.models import Model
from pdlab.trace import StepRecord, Trace


class Engine:
    """Serves requests on a model with a paged KV cache and continuous batching.

    Use it as a context manager: leaving gives the KV memory back.

    Args:
        model: from `pdlab.load`.
        config: the knobs; the default serves a laptop.

    Raises:
        ValueError: the configuration does not fit the model.
    """

    def __init__(self, model: Model, config: EngineConfig | None = None):
        config = admission.resolve(model, config or EngineConfig())
        if config.exact:
            check_rows_are_alike(model, EXACT_ROW_TILE)
        self.model = model
        self.config = config
        kv_cache = PagedKVCache(
            model.config,
            config.num_blocks,
            config.block_size,
            config.kv_format,
            model.decoder.device,
        )
        self.kv_cache: PagedKVCache | None = kv_cache
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.scheduler = Scheduler(
            self.pool,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            chunk_size=config.chunk_size,
        )
        self.runner: Runner = ModelRunner(
            model,
            kv_cache,
            BACKENDS[config.attention_backend](),
            Sampler(config.top_k_recorded),
            exact=config.exact,
        )
        self.requests: dict[str, Request] = {}
        self._recorder = Recorder(model, kv_cache, config)
        self._names = itertools.count()
        self._seeds = random.Random(config.seed)
        self._step = 0
        self._freed_by_abort: list[int] = []
        self._epoch = time.perf_counter()
        self._lock = threading.RLock()

    # --- the loop -----------------------------------------------------------------------------

    def step(self) -> StepRecord | None:
        """Run one batch; None when there is nothing to do.

        Interrupted (Ctrl-C) while the model computes, nothing of the batch has happened, and the
        next step computes it again. Other threads wait.
        """
        with self._lock:
            self._require_open()
            if not self.scheduler.has_work:
                return None
            start_s = self._now()
            clock = StageClock(self.model.decoder.device)
            with undisturbed():
                batch = self.scheduler.schedule()
            assert batch.scheduled, "there is work, and nothing of it was scheduled"
            clock.lap("schedule")
            output = self.runner.run(batch, clock, self._step)
            with undisturbed():
                return self._book(batch, output, clock, start_s)

    def _book(
        self, batch: ScheduledBatch, output: StepOutput, clock: StageClock, start_s: float
    ) -> StepRecord:
        """Make what the runner computed part of the sequences, the requests and the trace."""
        self.scheduler.update(batch, [s.token_id if s else None for s in output.sampled])
        residents = self._recorder.residents(self.scheduler)
        texts, freed = self._deliver(batch, output, start_s)
        clock.lap("deliver")
        record = self._recorder.record(
            step=self._step,
            start_s=start_s,
            wall_s=self._now() - start_s,
            stage_s=clock.stage_s,
            batch=batch,
            output=output,
            texts=texts,
            residents=residents,
            waiting=self.scheduler.waiting,
            blocks_freed=self._freed_by_abort + batch.blocks_freed + freed,
            num_free_blocks=self.pool.num_free,
        )
        self._freed_by_abort = []
        self._step += 1
        return record

    def _deliver(
        self, batch: ScheduledBatch, output: StepOutput, start_s: float
    ) -> tuple[list[str], list[int]]:
        """Hand the new tokens to their requests and end those that are done.

        Returns the text released for each scheduled sequence, and the blocks this freed.
        """
        now_s = self._now()
        texts, freed = [], []
        for sequence in batch.preempted:
            self.requests[sequence.request_id].metrics.num_preemptions += 1
        for part, sampled in zip(batch.scheduled, output.sampled, strict=True):
            request = self.requests[part.sequence.request_id]
            if request.metrics.first_scheduled_s is None:
                request.metrics.first_scheduled_s = start_s
            text = ""
            if sampled:
                text = request.add_token(sampled.token_id, now_s)
                if reason := self._finish_reason(part.sequence):
                    freed += self.scheduler.finish(part.sequence, reason)
                    text += request.close()
            texts.append(text)
        return texts, freed

    def _finish_reason(self, sequence: Sequence) -> str | None:
        params = sequence.params
        if sequence.token_ids[-1] in self.model.config.eos_token_ids and not params.ignore_eos:
            return "stop"
        if sequence.num_output_tokens >= params.max_tokens:
            return "length"
        return "length" if sequence.num_tokens >= admission.longest(self.config) else None

    # --- requests -----------------------------------------------------------------------------

    def submit(self, prompt: Prompt, params: SamplingParams | None = None) -> str:
        """Queue a request; it runs as `step()` is called. Returns its id.

        Raises:
            ValueError: the prompt is empty, too long, or can never fit into the KV pool.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params={params!r:.60} must be SamplingParams")
        text, prompt_ids = admission.tokenize(self.model, prompt)
        admission.check_fits(self.config, prompt_ids, params)
        with self._lock, undisturbed():
            return self._queue(text, prompt_ids, params)

    def _queue(self, text: str, prompt_ids: list[int], params: SamplingParams) -> str:
        self._require_open()
        sequence = Sequence(
            request_id=f"r{next(self._names)}",
            prompt_ids=prompt_ids,
            params=params,
            seed=self._seeds.getrandbits(63) if params.seed is None else params.seed,
        )
        metrics = RequestMetrics(arrival_s=self._now(), num_prompt_tokens=len(prompt_ids))
        request = Request(text, sequence, metrics, Detokenizer(self.model.tokenizer))
        self.requests[sequence.request_id] = request
        self._recorder.add_request(request)
        self.scheduler.add(sequence)
        return sequence.request_id

    def abort(self, request_id: str) -> None:
        """End a request now and free its blocks; one that has finished or is gone stays so."""
        with self._lock, undisturbed():
            request = self.requests.get(request_id)
            if request is None or request.finished:
                return
            self._freed_by_abort += self.scheduler.finish(request.sequence, "abort")
            request.close()
            self._recorder.add_abort(request_id, self._now())

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
        batch, alone = admission.as_prompts(prompts)
        all_params = params if isinstance(params, list | tuple) else [params] * len(batch)
        if len(all_params) != len(batch):
            raise ValueError(f"params has {len(all_params)} entries for {len(batch)} prompts")
        ids: list[str | RequestOutput] = []
        try:
            for prompt, each in zip(batch, all_params, strict=True):
                try:
                    ids.append(self.submit(prompt, each))
                except ValueError as error:
                    if alone:
                        raise
                    ids.append(admission.refused(prompt, error))
            self._run_until_finished([i for i in ids if isinstance(i, str)], progress)
        except BaseException:
            for request_id in ids:
                if isinstance(request_id, str):
                    self.abort(request_id)
                    self.requests.pop(request_id, None)
            raise
        return [self.collect(i) if isinstance(i, str) else i for i in ids]

    def _run_until_finished(self, request_ids: list[str], progress: bool) -> None:
        pending = [self.requests[i] for i in request_ids]
        with tqdm(total=len(pending), unit="request", disable=not progress) as bar:
            while pending:
                self.step()
                still = [r for r in pending if not r.finished]
                bar.update(len(pending) - len(still))
                pending = still

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Yield a request's text as it is made. Closing the iterator aborts the request.

        The request is submitted now; other requests of this engine go on in the same steps.
        """
        chunks = self._follow(self.submit(prompt, params))
        next(chunks)  # enter its `try`, or closing it unread would not abort
        return chunks

    def _follow(self, request_id: str) -> Iterator[Chunk]:
        request = self.requests[request_id]
        seen = 0
        try:
            yield Chunk("", [])  # taken by `stream`
            while True:
                while seen < len(request.chunks):
                    seen += 1
                    yield request.chunks[seen - 1]
                if request.finished:
                    return
                self.step()
        finally:
            self.abort(request_id)
            self.requests.pop(request_id, None)

    # --- looking in ---------------------------------------------------------------------------

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

    def read_kv(self, request_id: str) -> Tensor:
        """A copy of the K and V of a request that holds blocks.

        Returns [2, num_layers, num_computed_tokens, num_kv_heads, head_dim].
        """
        self._require_open()
        if request_id not in self.requests:
            raise ValueError(f"request_id={request_id!r} is unknown or was collected before")
        sequence = self.requests[request_id].sequence
        assert self.kv_cache is not None
        return self.kv_cache.read(sequence.block_table, sequence.num_computed_tokens)

    # --- end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Abort what runs and give the KV memory back. The trace stays readable.

        Closing a closed engine does nothing.
        """
        if self.kv_cache is None:
            return
        for request_id in list(self.requests):
            self.abort(request_id)
        self.kv_cache = None
        del self.runner

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- helpers ------------------------------------------------------------------------------

    def _now(self) -> float:
        """Seconds since the engine was made."""
        return time.perf_counter() - self._epoch

    def _require_open(self) -> None:
        if self.kv_cache is None:
            raise RuntimeError("the engine is closed")
