"""An engine in simulated time: the engine's scheduler and block pool, and no model.

What runs in which step is decided by the very `Scheduler`, `KVManager` and `BlockPool` of the
engine, with the same configuration; so a policy is written once, and what it does here it does
there. Only how long a step takes comes from somewhere else: from `StepTimes`.

It has no clock and no loop. Whoever has them, for one engine or for hundreds, says when a step
begins and is told when it ends; requests come and go between the steps:

    end_s = engine.begin(now_s)        plan what comes next
    end_s = engine.interrupt(now_s)    somebody wants in: the end comes sooner, perhaps
    outcome = engine.finish(end_s)     book it

Where a step in which everybody decodes would be followed by the same one many times, those are one
plan, a leap (`Scheduler.num_repeats`), and booked in one go (`Scheduler.repeat`); the result is the
same as one by one. A leap that is interrupted ends with the step that runs then, and of those after
it nothing has happened: nothing is booked before `finish`.

Left out: text, sampling, stop strings (a request ends when it has `max_tokens`), and the time a
copy to host memory takes, so `num_swap_blocks` must be 0.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field, replace

from pdlab.costmodel import StepShape, StepTimes
from pdlab.engine.admission import check_fits, longest
from pdlab.engine.config import EngineConfig
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.moving import RequestState, Reservation
from pdlab.engine.scheduler import ScheduledBatch, Scheduler
from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.kvcache import BlockPool, KVManager, Retention
from pdlab.workload.serving import StepSpan
from pdlab.workload.step_shapes import shape_of

NO_LIMIT = 10**9
"""`max_model_len` where the configuration does not say: there is no model that does."""
TOKEN = 0
"""What each step samples."""


@dataclass(slots=True)
class Outcome:
    """What a step brought, or several alike in a row."""

    span: StepSpan
    sampled: list[str]
    """Requests that each got a token at each of `times_s`."""
    times_s: list[float]
    """When each of its steps ended."""
    ended: list[str] = field(default_factory=list)
    """Requests that have all their tokens; the engine has forgotten them."""
    held: list[str] = field(default_factory=list)
    """Requests that keep their blocks, for another engine to go on with, until `let_go`."""


@dataclass(slots=True)
class Job:
    """A request here. What every step asks for is at hand: it is asked millions of times."""

    sequence: Sequence
    metrics: RequestMetrics
    num_left: int
    """Tokens to be sampled."""
    holds: bool
    token_times_s: list[float]
    """Of the metrics."""


@dataclass(slots=True)
class _Plan:
    """A step that is under way, or the steps of a leap."""

    batch: ScheduledBatch
    shape: StepShape
    """Of the batch."""
    start_s: float
    ends_s: list[float]
    decodes: list[str]
    sampled: list[str]
    is_leap: bool


class SimulatedEngine:
    """The part of `pdlab.Engine` that decides, driven from outside.

    Args:
        config: the engine's knobs; those that decide about text, tensors or arithmetic do nothing.
        step_times: the machine and the model.
        leaps: whether equal steps in a row are planned as one.

    Raises:
        ValueError: a knob that cannot be simulated.
    """

    def __init__(self, config: EngineConfig, step_times: StepTimes, *, leaps: bool = True):
        for name in ("num_swap_blocks", "heavy_tokens"):
            if getattr(config, name):
                raise ValueError(f"{name}={getattr(config, name)} cannot be simulated, only 0")
        if config.window is not None:
            raise ValueError(f"window={config.window} cannot be simulated, only None")
        self.config = replace(config, max_model_len=config.max_model_len or NO_LIMIT)
        self.step_times = step_times
        self.leaps = leaps
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.kv = KVManager(self.pool, BlockPool(0, config.block_size))
        self.scheduler = Scheduler(self.kv, self.config)
        self._jobs: dict[str, Job] = {}
        self._num_requests = 0
        self._plan: _Plan | None = None
        self._last: _Plan | None = None
        """The step before, as long as it might come again just so."""

    # --- steps ----------------------------------------------------------------------------------

    def begin(self, now_s: float, until_s: float = math.inf) -> float | None:
        """Plan the next step, or a leap; returns when it will end.

        None if there is nothing to do, or if nothing can be done as long as others hold the blocks:
        requests that are held or reserved.

        Args:
            until_s: when somebody is known to come: a leap goes no further than its first step that
                ends then or later, as if it were interrupted.

        Raises:
            RuntimeError: a step is under way.
            ValueError: `step_times` gives no time.
            PolicyError: the policy has no rank for a request.
        """
        last = self._last
        self._come_between()
        if last and now_s < until_s:
            self._plan = self._plan_leap(last, now_s, until_s)
        if not self._plan and self.scheduler.has_work:
            self._plan = self._plan_step(now_s)
        return self.end_s

    def interrupt(self, now_s: float) -> float | None:
        """Somebody comes at `now_s`: a leap ends with the step that runs then.

        Returns when what is under way ends now; None if nothing is.
        """
        if self._plan:
            ends_s = self._plan.ends_s
            del ends_s[bisect_left(ends_s, now_s) + 1 :]
        return self.end_s

    def finish(self, now_s: float) -> Outcome:
        """Book the step that is under way, or the leap.

        Raises:
            ValueError: `now_s` is not when it ends, or nothing is under way.
        """
        plan = self._plan
        if plan is None or now_s != plan.ends_s[-1]:
            raise ValueError(f"now_s={now_s}: what is under way ends at {self.end_s}")
        self._plan, num_free = None, self.pool.num_free
        if plan.is_leap:
            self.scheduler.repeat(plan.batch, len(plan.ends_s), TOKEN)
        else:
            for part in plan.batch.scheduled:
                if part.samples:  # there are no forks
                    part.sequence.token_ids.append(TOKEN)
            self.scheduler.update(plan.batch)
        outcome = Outcome(self._span(plan, num_free), plan.sampled, plan.ends_s)
        self._hand_out(outcome)
        changes = plan.is_leap or plan.shape.num_prompts or outcome.ended or outcome.held
        if self.leaps and not changes:
            self._last = plan
        return outcome

    @property
    def end_s(self) -> float | None:
        """When what is under way ends; None if nothing is."""
        return self._plan.ends_s[-1] if self._plan else None

    def _plan_step(self, now_s: float) -> _Plan | None:
        scheduler, jobs = self.scheduler, self._jobs
        batch = scheduler.schedule(now_s)
        self.kv.take_orders()  # there are no bytes to move
        for error in batch.unranked.values():
            raise error
        for sequence in batch.preempted:
            jobs[sequence.request_id].metrics.num_preemptions += 1
        if not batch.scheduled:
            others_hold = scheduler.held or scheduler.reserved
            assert others_hold, "there is work, and nothing of it was scheduled"
            return None
        shape = shape_of(batch)
        names = [part.sequence.request_id for part in batch.scheduled]
        decodes, sampled = names[: shape.num_decodes], names
        if shape.num_prompts:
            sampled = [n for n, part in zip(names, batch.scheduled, strict=True) if part.samples]
        for part in batch.scheduled[shape.num_decodes :]:
            metrics = jobs[part.sequence.request_id].metrics
            if metrics.first_scheduled_s is None:
                metrics.first_scheduled_s = now_s
                metrics.num_cached_tokens = part.num_cached_tokens
        end_s = now_s + self._step_s(shape)
        return _Plan(batch, shape, now_s, [end_s], decodes, sampled, is_leap=False)

    def _plan_leap(self, last: _Plan, now_s: float, until_s: float) -> _Plan | None:
        """The same decodes again, until somebody ends, blocks run out, or it is `until_s`."""
        most = min([self._jobs[name].num_left for name in last.decodes])
        num_steps = self.scheduler.num_repeats(last.batch, most)
        shape, end_s, ends_s = last.shape, now_s, list[float]()
        while len(ends_s) < num_steps and end_s < until_s:
            shape = one_later(shape)
            end_s += self._step_s(shape)
            ends_s.append(end_s)
        if not ends_s:
            return None
        decodes = last.decodes
        return _Plan(last.batch, last.shape, now_s, ends_s, decodes, decodes, is_leap=True)

    def _step_s(self, shape: StepShape) -> float:
        step_s = self.step_times.step_s(shape)
        if not 0 <= step_s < math.inf:
            raise ValueError(f"step_times={self.step_times.basis!r:.60}: {step_s} s for {shape}")
        return step_s

    def _span(self, plan: _Plan, num_free: int) -> StepSpan:
        """As it stands now: those that end have their blocks still.

        Args:
            num_free: blocks that were free before it was booked.
        """
        batch = plan.batch
        chunks = batch.scheduled[len(plan.decodes) :]
        return StepSpan(
            start_s=plan.start_s,
            wall_s=plan.ends_s[-1] - plan.start_s,
            decodes=plan.decodes,
            prompts={part.sequence.request_id: part.num_tokens for part in chunks},
            num_waiting=len(self.scheduler.waiting),
            num_running=len(self.scheduler.running),
            num_used_blocks=self.pool.num_blocks - self.pool.num_free,
            preempted=[sequence.request_id for sequence in batch.preempted],
            num_steps=len(plan.ends_s),
            num_grown_blocks=num_free - self.pool.num_free,
        )

    def _hand_out(self, outcome: Outcome) -> None:
        """Give the new tokens to their requests; who has all ends, who is to be held is."""
        jobs, times_s, num_steps = self._jobs, outcome.times_s, len(outcome.times_s)
        for name in outcome.sampled:
            job = jobs[name]
            job.token_times_s += times_s
            job.num_left -= num_steps
            if not job.num_left:
                outcome.ended.append(name)
            elif job.holds:
                outcome.held.append(name)
        for name in outcome.ended:
            self.scheduler.finish(jobs.pop(name).sequence, "length")
        for name in outcome.held:
            self.scheduler.hold(jobs[name].sequence)

    # --- requests, between the steps ------------------------------------------------------------

    def resume(
        self,
        state: RequestState,
        *,
        arrival_s: float,
        request_id: str | None = None,
        holds: bool = False,
        priority: int = 0,
        ttft_slo_s: float | None = None,
        metrics: RequestMetrics | None = None,
    ) -> str:
        """Queue a request, which another engine may have begun: all its tokens are computed here.

        Args:
            arrival_s: when it came, for policies.
            request_id: its name here; None for the engine's next.
            holds: once its next token is there, it is held for another engine.
            metrics: where its times are put down, those that it has from other engines included;
                None for new ones.

        Raises:
            ValueError: it can never be served, or there is another one of this name.
            PolicyError: the policy has no rank for it.
        """
        job = self._job(state, request_id, arrival_s, priority, ttft_slo_s, metrics)
        job.holds = job.sequence.holds = holds
        self.scheduler.add(job.sequence)
        return self._enter(job)

    def prepare(
        self,
        state: RequestState,
        *,
        arrival_s: float,
        request_id: str | None = None,
        priority: int = 0,
        ttft_slo_s: float | None = None,
        metrics: RequestMetrics | None = None,
    ) -> Job:
        """A request whose tokens are computed by another engine. It has nothing here until
        `reserve`.

        Args:
            arrival_s, request_id, metrics: as of `resume`.

        Raises:
            ValueError: it can never be served, or there is another one of this name.
        """
        return self._job(state, request_id, arrival_s, priority, ttft_slo_s, metrics)

    def reserve(self, job: Job) -> Reservation | None:
        """Room for a prepared request; None if there is none yet."""
        self._come_between()
        if not self.scheduler.reserve(job.sequence):
            return None
        sequence = job.sequence
        return Reservation(self._enter(job), sequence.num_tokens, sequence.num_cached_tokens)

    def admit(self, request_id: str, token_id: int = TOKEN) -> None:
        """Let a reserved request run: its K and V are there, and the token drawn from them.

        Raises:
            ValueError: there is no such request, or it has no reservation.
        """
        job = self._find(request_id, SequenceState.RESERVED)
        self.scheduler.admit(job.sequence)
        job.sequence.token_ids.append(token_id)
        job.num_left -= 1
        assert job.num_left, "who drew its last token has ended it"

    def let_go(self, request_id: str) -> None:
        """Forget a held request, and free its blocks: another engine goes on with it.

        Raises:
            ValueError: there is no such request, or it is not held.
        """
        self.scheduler.finish(self._find(request_id, SequenceState.HELD).sequence, "moved")
        del self._jobs[request_id]

    def abort(self, request_id: str) -> None:
        """End a request and free its blocks, wherever it is; one that is gone stays so."""
        self._come_between()
        if job := self._jobs.pop(request_id, None):
            self.scheduler.finish(job.sequence, "abort")

    def _job(
        self,
        state: RequestState,
        request_id: str | None,
        arrival_s: float,
        priority: int,
        ttft_slo_s: float | None,
        metrics: RequestMetrics | None,
    ) -> Job:
        """A request that the engine can serve; it is in no queue yet."""
        self._come_between()
        prompt_ids, params = state.prompt_ids, state.params
        check_fits(self.config, Retention(), prompt_ids, params)
        room = max(1, longest(self.config) - len(prompt_ids))
        num_left = min(params.max_tokens, room) - len(state.output_ids)
        if num_left < 1:
            raise ValueError(
                f"output_ids has {len(state.output_ids)} tokens, the limit is "
                f"{min(params.max_tokens, room) - 1}"
            )
        name = f"r{self._num_requests}" if request_id is None else request_id
        if name in self._jobs:
            raise ValueError(f"request_id={name!r} is the name of another request")
        sequence = Sequence(
            name,
            name,
            prompt_ids,
            params,
            uses_prefix_cache=self.config.enable_prefix_cache and params.prefix_cache,
            arrival_s=arrival_s,
            priority=priority,
            ttft_slo_s=ttft_slo_s,
        )
        sequence.token_ids += state.output_ids
        metrics = metrics or RequestMetrics(arrival_s, num_prompt_tokens=len(prompt_ids))
        return Job(sequence, metrics, num_left, False, metrics.token_times_s)

    def _enter(self, job: Job) -> str:
        name = job.sequence.request_id
        self._jobs[name] = job
        self._num_requests += 1
        return name

    def _find(self, request_id: str, state: SequenceState) -> Job:
        self._come_between()
        job = self._jobs.get(request_id)
        if job is None:
            raise ValueError(f"request_id={request_id!r} is unknown or is gone")
        if job.sequence.state is not state:
            raise ValueError(
                f"request_id={request_id!r} is {job.sequence.state.value}, not {state.value}"
            )
        return job

    def _come_between(self) -> None:
        """Whoever comes between two steps: then the second may not be like the first."""
        if self._plan:
            raise RuntimeError(
                f"a step is under way until {self.end_s} s: interrupt it, and wait for its end"
            )
        self._last = None


def one_later(shape: StepShape) -> StepShape:
    """The step of the same decodes after this one: each reads a token more."""
    prompts, tokens, pairs, decodes, context, longest = shape
    return StepShape(prompts, tokens, pairs, decodes, context + decodes, longest + 1)
