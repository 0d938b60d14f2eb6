"""A trace through one KV memory, without a model: who holds how many slots, step by step.

The same fixed rules for paged and contiguous memories, so that these compare. It is not the serving
simulator: that is `simulation.simulate`, which drives the engine's own scheduler.

Simulated time, and only as good as these rules:

- a step takes `step_s` seconds, whatever runs in it;
- requests are admitted first come, first served, as soon as the memory has room for all their
  known tokens and the step has prompt tokens left;
- a step computes at most `prefill_tokens` prompt tokens, oldest request first; a request whose last
  prompt token is computed samples its first output token in the same step;
- blocks can be found from the moment they are computed, also by a request admitted in the same step
  (in the engine, from the next step on);
- each later output token takes a step and one more slot: that of the token before it;
- if there is no slot for it, the youngest running request gives everything back and waits, first in
  line, to compute its tokens again.

Between events (arrival, growth, end) nothing changes but the tokens in use, which grow by one a
request and step: those steps are summed up in one go.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdlab.workload.memories import Holding, SlotMemory
from pdlab.workload.traces import TraceRequest


@dataclass(slots=True)
class Job:
    """A request on its way. In decode, `num_tokens` is that of the end of step `since_step`."""

    index: int
    request: TraceRequest
    most_tokens: int
    """In the KV memory at its end."""
    num_known: int
    num_sampled: int = 0
    holding: Holding | None = None
    num_tokens: int = 0
    since_step: int = -1
    epoch: int = 0
    """Counts preemptions, so that an event planned before one is known to be stale."""
    admitted_step: int = -1

    @property
    def is_decoding(self) -> bool:
        return self.since_step >= 0

    def tokens_at(self, step: int) -> int:
        """Tokens in the KV memory at the end of a step."""
        return self.num_tokens + (step - self.since_step if self.is_decoding else 0)


@dataclass
class Totals:
    """Sums over simulated steps (slots, requests) and counts."""

    num_steps: int = 0
    taken: int = 0
    unshared: int = 0
    used: int = 0
    lasting: int = 0
    external: int = 0
    running: int = 0
    waiting: int = 0
    max_running: int = 0
    max_waiting: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    num_refused: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    queue_steps: list[float] = field(default_factory=list)


class SlotReplay:
    """See the module's text. `run` once."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        memory: SlotMemory,
        *,
        step_s: float,
        prefill_tokens: int,
    ):
        self.memory = memory
        self.step_s = step_s
        self.prefill_tokens = prefill_tokens
        self.totals = Totals()
        self._arrivals = deque(
            Job(i, request, request.num_kv_tokens, request.num_prompt_tokens)
            for i, request in enumerate(requests)
        )
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # by index, oldest first
        self._prefilling: list[Job] = []
        self._num_decoding = 0
        self._growths: defaultdict[int, list[tuple[int, int, Job]]] = defaultdict(list)
        self._ends: defaultdict[int, list[tuple[int, Job]]] = defaultdict(list)
        self._event_steps: list[int] = []
        # Of all running requests: slots held (shared ones once for each), those that will be used
        # some day, and those in use.
        self._held = self._lasting = self._used = 0
        self._external = 0

    def run(self) -> Totals:
        """Simulate until the last request has ended."""
        step = 0
        while self._arrivals or self._waiting or self._running:
            again = self._step(step)
            following = step + 1 if again else self._next_event(step)
            self._skip(following - step - 1)
            step = following
        assert self.memory.num_taken == self._held == self._used == 0, "slots leaked"
        return self.totals

    def _next_event(self, step: int) -> int:
        """The next step in which something changes."""
        while self._event_steps and self._event_steps[0] <= step:
            heapq.heappop(self._event_steps)
        steps = self._event_steps[:1]
        if self._arrivals:
            steps.append(max(step + 1, self._arrival_step(self._arrivals[0])))
        return min(steps, default=step + 1)

    def _arrival_step(self, job: Job) -> int:
        """The first step that begins after the arrival."""
        return math.ceil(round(job.request.arrival_s / self.step_s, 6))

    # --- one step -------------------------------------------------------------------------------

    def _step(self, step: int) -> bool:
        """Simulate a step; returns whether the next one can differ without an event."""
        while self._arrivals and self._arrival_step(self._arrivals[0]) <= step:
            self._arrive(self._arrivals.popleft())
        preempted = self._grow(step)
        self._used += self._num_decoding
        budget = self.prefill_tokens
        for job in list(self._prefilling):
            budget -= self._prefill(job, budget, step)
        while self._waiting and budget > 0 and not preempted and self._admit(step):
            budget -= self._prefill(next(reversed(self._running.values())), budget, step)
        self._external = self._fragmented_slots()
        self._count(1, self._used)
        ended = self._end(step)
        can_admit = bool(self._waiting) and (budget <= 0 or preempted or ended)
        return bool(self._prefilling) or can_admit

    def _arrive(self, job: Job) -> None:
        if self.memory.fits(job.most_tokens):
            self._waiting.append(job)
        else:
            self.totals.num_refused += 1

    def _admit(self, step: int) -> bool:
        """Let the first in line run, if there is room for all its known tokens."""
        job = self._waiting[0]
        holding = self.memory.admit(job.request, job.num_known)
        if holding is None:
            return False
        self._waiting.popleft()
        self._running[job.index] = job
        self._prefilling.append(job)
        job.holding = holding
        job.num_tokens = holding.num_cached_tokens
        self._used += job.num_tokens
        self._add_capacity(job, 0)
        if job.admitted_step < 0:  # not a second time after a preemption
            job.admitted_step = step
            self.totals.queue_steps.append(step - job.request.arrival_s / self.step_s)
            self.totals.prompt_tokens += job.request.num_prompt_tokens
            self.totals.hit_tokens += holding.num_cached_tokens
        return True

    def _prefill(self, job: Job, budget: int, step: int) -> int:
        """Compute the next chunk of known tokens; returns how many."""
        assert job.holding is not None
        chunk = min(budget, job.num_known - job.num_tokens)
        job.num_tokens += chunk
        self._used += chunk
        self.memory.note_computed(job.request, job.holding, job.num_tokens)
        if job.num_tokens == job.num_known:
            self._prefilling.remove(job)
            self._num_decoding += 1
            job.num_sampled += 1
            job.since_step = step
            self._plan_end(job)
            self._plan_growth(job)
        return chunk

    def _grow(self, step: int) -> bool:
        """Give slots to requests that are full, oldest first; returns whether one was preempted."""
        preempted = False
        for _, epoch, job in sorted(self._growths.pop(step, [])):
            while job.epoch == epoch and job.holding is not None:
                before = job.holding.capacity
                if self.memory.extend(job.holding, job.tokens_at(step)):
                    self._add_capacity(job, before)
                    self._plan_growth(job)
                    break
                self._preempt(next(reversed(self._running.values())), step - 1)
                preempted = True
        return preempted

    def _end(self, step: int) -> bool:
        """Let go the requests whose last token was sampled; returns whether there were any."""
        ended = [job for epoch, job in self._ends.pop(step, []) if job.epoch == epoch]
        for job in ended:
            self._release(job, step)
        self.totals.num_finished += len(ended)
        return bool(ended)

    def _preempt(self, job: Job, last_step: int) -> None:
        """Take everything from a request; what it has sampled is part of its prompt from now on."""
        if job.is_decoding:
            job.num_sampled += last_step - job.since_step
        self._release(job, last_step)
        job.num_known = job.request.num_prompt_tokens + job.num_sampled
        job.epoch += 1
        self._waiting.appendleft(job)
        self.totals.num_preemptions += 1

    def _release(self, job: Job, last_step: int) -> None:
        assert job.holding is not None
        del self._running[job.index]
        if job.is_decoding:
            self._num_decoding -= 1
        else:
            self._prefilling.remove(job)
        self._used -= job.tokens_at(last_step)
        self._held -= job.holding.capacity
        self._lasting -= min(job.holding.capacity, job.most_tokens)
        self.memory.release(job.holding)
        job.holding, job.num_tokens, job.since_step = None, 0, -1

    # --- planning and counting ------------------------------------------------------------------

    def _plan_end(self, job: Job) -> None:
        end = job.since_step + job.request.num_output_tokens - job.num_sampled
        self._plan(end)
        self._ends[end].append((job.epoch, job))

    def _plan_growth(self, job: Job) -> None:
        """Plan the step whose token finds no slot, if the request lives that long."""
        assert job.holding is not None
        if job.holding.capacity < job.most_tokens:
            full = job.since_step + job.holding.capacity - job.num_tokens
            self._plan(full + 1)
            self._growths[full + 1].append((job.index, job.epoch, job))

    def _plan(self, step: int) -> None:
        if step not in self._ends and step not in self._growths:
            heapq.heappush(self._event_steps, step)

    def _add_capacity(self, job: Job, before: int) -> None:
        """Book what a request without slots, or with `before` slots and all of them full, got."""
        assert job.holding is not None
        after = job.holding.capacity
        self._held += after - before
        self._lasting += min(after, job.most_tokens) - before  # a full request will use it all

    def _fragmented_slots(self) -> int:
        """Free slots that do not help the first in line, because they lie apart."""
        if self._waiting and self.memory.is_fragmented(self._waiting[0].num_known):
            return self.memory.num_slots - self.memory.num_taken
        return 0

    def _skip(self, num_steps: int) -> None:
        """Account for steps in which every decoding request gains a token and nothing else."""
        if num_steps > 0:
            grown = self._num_decoding * num_steps * (num_steps + 1) // 2
            self._count(num_steps, self._used * num_steps + grown)
            self._used += self._num_decoding * num_steps

    def _count(self, num_steps: int, used: int) -> None:
        totals = self.totals
        totals.num_steps += num_steps
        totals.used += used
        totals.taken += self.memory.num_taken * num_steps
        totals.unshared += self._held * num_steps
        totals.lasting += self._lasting * num_steps
        totals.external += self._external * num_steps
        totals.running += len(self._running) * num_steps
        totals.waiting += len(self._waiting) * num_steps
        totals.max_running = max(totals.max_running, len(self._running))
        totals.max_waiting = max(totals.max_waiting, len(self._waiting))
