"""What came of serving a workload: when each request's tokens came, and what each step held.

The same whether the engine did it or the simulator: tables, charts and exports are made from this,
and `provenance` says which of the two it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pdlab.engine.metrics import RequestMetrics
from pdlab.requirements import require_number
from pdlab.trace import StepRecord, Trace, sample_ids


class SLO(NamedTuple):
    """Service level objective of a request: the latest first token, the slowest pace after it."""

    ttft_s: float
    tpot_s: float

    def checked(self) -> SLO:
        """Itself.

        Raises:
            ValueError: a limit is negative or no number.
        """
        require_number("ttft_s", self.ttft_s, 0, 1e9)
        require_number("tpot_s", self.tpot_s, 0, 1e9)
        return self


@dataclass
class ServedRequest:
    """One request and its times, in seconds since the workload began."""

    request_id: str
    metrics: RequestMetrics
    """`arrival_s` is when the request came, whether or not the engine was busy then."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort` or `error`; None if it was still running at the end."""
    priority: int = 0
    error: str = ""
    """Why it was refused; then it has no tokens."""

    def meets(self, slo: SLO) -> bool:
        """Whether it finished in both limits; with one token only the first limit counts."""
        ttft_s, tpot_s = self.metrics.ttft_s, self.metrics.tpot_s
        if ttft_s is None or self.finish_reason not in ("stop", "length"):
            return False
        return ttft_s <= slo.ttft_s and (tpot_s is None or tpot_s <= slo.tpot_s)


@dataclass(slots=True)
class StepSpan:
    """A step, or several alike in a row: the same decodes, nothing else."""

    start_s: float
    wall_s: float
    """Of all its steps together."""
    decodes: list[str]
    """Requests that decode, one token in each step."""
    prompts: dict[str, int]
    """Prompt tokens computed, by request."""
    num_waiting: int
    num_running: int
    num_used_blocks: int
    """KV blocks that somebody holds, at its end."""
    preempted: list[str] = field(default_factory=list)
    num_steps: int = 1
    num_grown_blocks: int = 0
    """How many of the used blocks were taken in the course of several steps: evenly, nearly."""

    @property
    def end_s(self) -> float:
        return self.start_s + self.wall_s

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompts.values())

    @property
    def num_tokens(self) -> int:
        """Tokens computed in one of its steps."""
        return len(self.decodes) + self.num_prompt_tokens

    @property
    def mix(self) -> Literal["prefill", "decode", "mixed"]:
        if self.prompts and self.decodes:
            return "mixed"
        return "prefill" if self.prompts else "decode"


@dataclass(frozen=True)
class ServingRun:
    """A workload, served."""

    provenance: Literal["measured", "simulated"]
    basis: str
    """What the times rest on: the machine and model, or the step times of the simulation."""
    config: dict[str, Any]
    """The engine's knobs, as `EngineConfig.to_dict` gives them."""
    requests: list[ServedRequest]
    """In order of arrival."""
    steps: list[StepSpan]
    num_blocks: int
    """KV blocks of the pool."""

    @property
    def start_s(self) -> float:
        """The first arrival; before it there is nothing to serve."""
        return self.requests[0].metrics.arrival_s if self.requests else 0.0

    @property
    def duration_s(self) -> float:
        """From the first arrival to the end of the last step, which need not begin last."""
        return max(0.0, max((s.end_s for s in self.steps), default=0.0) - self.start_s)

    @classmethod
    def of_trace(cls, trace: Trace) -> ServingRun:
        """A recorded run of the engine; samples of one request (`n` > 1) count as requests."""
        start_s = min((r.arrival_s for r in trace.requests.values()), default=0.0)
        requests = _requests_of(trace, start_s)
        return cls(
            provenance="measured",
            basis=f"{trace.model['name']} on {trace.machine['processor']}",
            config=dict(trace.engine),
            requests=sorted(requests.values(), key=lambda r: r.metrics.arrival_s),
            steps=[span_of(step, start_s, trace.engine["num_blocks"]) for step in trace.steps],
            num_blocks=trace.engine["num_blocks"],
        )


def span_of(step: StepRecord, start_s: float, num_blocks: int) -> StepSpan:
    """A recorded step on a clock that begins at `start_s`."""
    computed = [s for s in step.sequences if s.num_tokens]
    return StepSpan(
        start_s=step.start_s - start_s,
        wall_s=step.wall_s,
        decodes=[s.sequence_id for s in computed if s.phase == "decode"],
        prompts={s.sequence_id: s.num_tokens for s in computed if s.phase == "prefill"},
        num_waiting=len(step.waiting),
        num_running=len(step.residents),
        num_used_blocks=len(_held(step)),
        preempted=list(step.preempted),
    )


def _held(step: StepRecord) -> set[int]:
    return {b for resident in step.residents for b in resident.block_table if b >= 0}


def _requests_of(trace: Trace, start_s: float) -> dict[str, ServedRequest]:
    """Times read off the records: a token is there when its step ends."""
    requests = {
        name: ServedRequest(
            name,
            RequestMetrics(r.arrival_s - start_s, num_prompt_tokens=len(r.prompt_ids)),
            priority=r.priority,
        )
        for r in trace.requests.values()
        for name in sample_ids(r.request_id, r.params.get("n", 1))
    }
    for step in trace.steps:
        _book(step, requests, start_s)
    for request_id in trace.aborted:
        for name in _samples(trace, request_id):
            requests[name].finish_reason = requests[name].finish_reason or "abort"
    return requests


def _book(step: StepRecord, requests: dict[str, ServedRequest], start_s: float) -> None:
    for record in step.sequences:
        request = requests[record.sequence_id]
        metrics = request.metrics
        if metrics.first_scheduled_s is None:
            metrics.first_scheduled_s = step.start_s - start_s
            metrics.num_cached_tokens = record.num_cached_tokens
        end_s = step.start_s + step.wall_s - start_s
        metrics.token_times_s += [end_s] * len(record.put_out)
        request.finish_reason = record.finish_reason or request.finish_reason
    for name in step.preempted:
        requests[name].metrics.num_preemptions += 1
        requests[name].metrics.num_swaps += name in step.swapped


def _samples(trace: Trace, request_id: str) -> Iterable[str]:
    return sample_ids(request_id, trace.requests[request_id].params.get("n", 1))
