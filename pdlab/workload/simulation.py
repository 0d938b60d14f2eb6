"""Serves a workload in simulated time: the engine's scheduler and block pool, and no model.

What runs in which step is decided by the very `Scheduler`, `KVManager` and `BlockPool` of the
engine, with the same configuration; so a policy is written once, and what it does here it does
there. Only how long a step takes comes from somewhere else: from `StepTimes`.

Where a step in which everybody decodes would be followed by the same one many times, those are
booked in one go (`Scheduler.repeat`); the result is the same as one by one.

Left out: text, sampling, stop strings (a request ends when its output has the trace's length), and
the time a copy to host memory takes, so `num_swap_blocks` must be 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Several
from dataclasses import dataclass, replace

from pdlab.costmodel import StepShape, StepTimes
from pdlab.engine.admission import check_fits, longest
from pdlab.engine.config import EngineConfig
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.policies import PolicyError
from pdlab.engine.scheduler import ScheduledBatch, Scheduler
from pdlab.engine.sequence import Sequence
from pdlab.kvcache import BlockPool, KVManager, Retention
from pdlab.sampling import SamplingParams
from pdlab.workload.arrivals import Arrivals, OpenLoop
from pdlab.workload.serving import ServedRequest, ServingRun, StepSpan
from pdlab.workload.step_shapes import shape_of
from pdlab.workload.traces import TraceRequest


def simulate(
    arrivals: Arrivals | Several[TraceRequest],
    config: EngineConfig,
    step_times: StepTimes,
    *,
    max_model_len: int = 10**9,
    leaps: bool = True,
) -> ServingRun:
    """Serve all requests; returns when the last has finished.

    Requests that can never be served are refused, as by the engine, and the others go on.

    Args:
        config: the engine's knobs; those that decide about text, tensors or arithmetic do nothing.
        step_times: the machine and the model.
        max_model_len: of the model, where the configuration does not say.
        leaps: whether equal steps in a row are booked in one go.

    Raises:
        ValueError: a knob that cannot be simulated, a step time that is no time, no request at all.
        PolicyError: the policy has no rank for a request.
    """
    for name in ("num_swap_blocks", "heavy_tokens"):
        if getattr(config, name):
            raise ValueError(f"{name}={getattr(config, name)} cannot be simulated, only 0")
    if config.window is not None:
        raise ValueError(f"window={config.window} cannot be simulated, only None")
    config = replace(config, max_model_len=config.max_model_len or max_model_len)
    if isinstance(arrivals, Several):
        arrivals = OpenLoop(arrivals)
    return Simulation(arrivals, config, step_times, leaps=leaps).run()


@dataclass(slots=True)
class Job:
    """What becomes of a sequence, and how long its output will still be."""

    served: ServedRequest
    num_left: int
    """Tokens to be sampled."""


class Simulation:
    """See `simulate`."""

    def __init__(
        self, arrivals: Arrivals, config: EngineConfig, step_times: StepTimes, *, leaps: bool
    ):
        self.arrivals = arrivals
        self.config = config
        self.step_times = step_times
        self.leaps = leaps
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.kv = KVManager(self.pool, BlockPool(0, config.block_size))
        self.scheduler = Scheduler(self.kv, config)
        self.requests: list[ServedRequest] = []
        self.steps: list[StepSpan] = []
        self.now_s = 0.0
        self._jobs: dict[Sequence, Job] = {}
        self._ended: list[Sequence] = []
        """Those whose last token was sampled."""
        self._params: dict[int, SamplingParams] = {}

    def run(self) -> ServingRun:
        """Serve everything."""
        while self._has_more():
            batch = self.scheduler.schedule(self.now_s)
            self.kv.take_orders()  # there are no bytes to move
            for error in batch.unranked.values():
                raise error
            assert batch.scheduled, "there is work, and nothing of it was scheduled"
            shape = shape_of(batch)
            self._step(batch, shape)
            if self.leaps and not shape.num_prompts and not self._ended:
                self._leap(batch, shape)
            self._let_go()
        assert self.pool.num_free == self.pool.num_blocks, "blocks leaked"
        if not self.requests:
            raise ValueError("arrivals has no request left")
        return ServingRun(
            provenance="simulated",
            basis=self.step_times.basis,
            config=self.config.to_dict(),
            requests=self.requests,
            steps=self.steps,
            num_blocks=self.config.num_blocks,
        )

    def _has_more(self) -> bool:
        """Let in who has come; where nobody runs or waits, go on to the next arrival."""
        while True:
            while due := self.arrivals.take_due(self.now_s):  # one refused may call the next
                for request in due:
                    self._submit(request)
            if self.scheduler.has_work:
                return True
            if self.arrivals.next_s is None:
                return False
            self.now_s = max(self.now_s, self.arrivals.next_s)

    # --- one step -------------------------------------------------------------------------------

    def _step(self, batch: ScheduledBatch, shape: StepShape) -> None:
        start_s, scheduler = self.now_s, self.scheduler
        self._pass_time(shape)
        for sequence in batch.preempted:
            self._jobs[sequence].served.metrics.num_preemptions += 1
        scheduler.update(batch, {p.sequence.sequence_id: [0] for p in batch.scheduled})
        prompts: dict[str, int] = {}
        decodes: list[str] = []
        for part in batch.scheduled:
            job, name = self._jobs[part.sequence], part.sequence.request_id
            metrics = job.served.metrics
            if part.phase == "decode":
                decodes.append(name)
            else:
                prompts[name] = part.num_tokens
                if metrics.first_scheduled_s is None:
                    metrics.first_scheduled_s = start_s
                    metrics.num_cached_tokens = part.num_cached_tokens
            if part.samples:
                metrics.token_times_s.append(self.now_s)
                job.num_left -= 1
                if not job.num_left:
                    self._ended.append(part.sequence)
        self._note(start_s, decodes, prompts, [s.request_id for s in batch.preempted])

    def _pass_time(self, shape: StepShape) -> None:
        step_s = self.step_times.step_s(shape)
        if not 0 <= step_s < math.inf:
            raise ValueError(f"step_times={self.step_times.basis!r:.60}: {step_s} s for {shape}")
        self.now_s += step_s

    def _leap(self, batch: ScheduledBatch, shape: StepShape) -> None:
        """The same decodes again, until somebody ends or comes, or blocks run out."""
        running, next_s = self.scheduler.running, self.arrivals.next_s
        jobs = [self._jobs[sequence] for sequence in running]
        num_steps = self.scheduler.num_repeats(batch, min([job.num_left for job in jobs]))
        start_s, times_s = self.now_s, list[float]()
        while len(times_s) < num_steps and (next_s is None or self.now_s < next_s):
            shape = one_later(shape)
            self._pass_time(shape)
            times_s.append(self.now_s)
        if times_s:
            num_free = self.pool.num_free
            self.scheduler.repeat(batch, len(times_s))
            for job in jobs:
                job.served.metrics.token_times_s += times_s
                job.num_left -= len(times_s)
            self._ended += [s for s, job in zip(running, jobs, strict=True) if not job.num_left]
            self._note(start_s, self.steps[-1].decodes, {}, [])
            self.steps[-1].num_steps = len(times_s)
            self.steps[-1].num_grown_blocks = num_free - self.pool.num_free

    def _note(
        self,
        start_s: float,
        decodes: list[str],
        prompts: dict[str, int],
        preempted: list[str],
    ) -> None:
        self.steps.append(
            StepSpan(
                start_s=start_s,
                wall_s=self.now_s - start_s,
                decodes=decodes,
                prompts=prompts,
                num_waiting=len(self.scheduler.waiting),
                num_running=len(self.scheduler.running),
                num_used_blocks=self.pool.num_blocks - self.pool.num_free,
                preempted=preempted,
            )
        )

    # --- requests -------------------------------------------------------------------------------

    def _submit(self, request: TraceRequest) -> None:
        """Let a request wait, or refuse it."""
        metrics = RequestMetrics(request.arrival_s, num_prompt_tokens=request.num_prompt_tokens)
        name = f"r{len(self.requests)}"
        served = ServedRequest(name, metrics, priority=request.priority)
        self.requests.append(served)
        try:
            sequence = self._sequence(name, request)
            self.scheduler.add(sequence)
        except PolicyError:
            raise
        except ValueError as error:
            served.finish_reason, served.error = "error", str(error)
            self.arrivals.note_finished(self.now_s)
            return
        room = max(1, longest(self.config) - request.num_prompt_tokens)
        self._jobs[sequence] = Job(served, min(request.num_output_tokens, room))

    def _sequence(self, name: str, request: TraceRequest) -> Sequence:
        """What the scheduler sees of a request.

        Raises:
            ValueError: it can never be served.
        """
        request.checked()
        sequence = Sequence(
            name,
            name,
            tokens_of(request, len(self.requests)),
            self._params_for(request.num_output_tokens),
            uses_prefix_cache=self.config.enable_prefix_cache,
            arrival_s=request.arrival_s,
            priority=request.priority,
        )
        check_fits(self.config, Retention(), sequence.prompt_ids, sequence.params)
        return sequence

    def _params_for(self, max_tokens: int) -> SamplingParams:
        if max_tokens not in self._params:
            self._params[max_tokens] = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        return self._params[max_tokens]

    def _let_go(self) -> None:
        for sequence in self._ended:
            self.scheduler.finish(sequence, "length")
            self._jobs.pop(sequence).served.finish_reason = "length"
            self.arrivals.note_finished(self.now_s)
        self._ended = []


def one_later(shape: StepShape) -> StepShape:
    """The step of the same decodes after this one: each reads a token more."""
    prompts, tokens, pairs, decodes, context, longest = shape
    return StepShape(prompts, tokens, pairs, decodes, context + decodes, longest + 1)


def tokens_of(request: TraceRequest, number: int) -> list[int]:
    """Tokens that are equal where the trace says that prefixes are, and nowhere else.

    The trace knows no text. A block's id and the place in it stand for a token; where there are no
    ids, the request's number does.

    Args:
        request: checked.
    """
    size = request.prefix_block_size
    if not size:
        return [-1 - number] * request.num_prompt_tokens
    tokens = [i * size + offset for i in request.prefix_ids for offset in range(size)]
    return tokens[: request.num_prompt_tokens]
