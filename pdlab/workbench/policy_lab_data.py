"""What the PolicyLab simulates, and what it shows of a run: plain data of bounded size."""

from __future__ import annotations

import copy
import linecache
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import traitlets

from pdlab.costmodel import StepShape, StepTimes, causal_pairs
from pdlab.engine import EngineConfig
from pdlab.engine.policies import POLICIES, Deadline, Policy, PolicyError
from pdlab.requirements import LARGEST_SEED, require_choice, require_int
from pdlab.workbench.gantt_data import KINDS, Span, lives
from pdlab.workbench.latency_data import curve
from pdlab.workload.report import Distribution, latency_samples, over_time
from pdlab.workload.serving import SLO, ServingRun, StepSpan
from pdlab.workload.simulation import simulate
from pdlab.workload.traces import TraceRequest
from pdlab.workload.traffic import WORKLOADS

# --- workloads -----------------------------------------------------------------------------------

ONE_LONG = "short vs. one long"
LONG_EVERY, LONG_FIRST, LONG_TOKENS, LONG_OUTPUT = 20, 5, 1600, 20
"""Every 20th request, beginning with the 6th, has a long prompt."""
DESCRIPTIONS = {name: workload.description for name, workload in WORKLOADS.items()} | {
    ONE_LONG: f"Short questions; one of {LONG_EVERY} has {LONG_TOKENS} tokens to read."
}
MOST_REQUESTS = 2000


@lru_cache(maxsize=32)
def make_requests(
    workload: str, num_requests: int, rate_rps: float, seed: int
) -> tuple[TraceRequest, ...]:
    """The first requests of a workload of this name.

    Raises:
        ValueError: there is no such workload, or a number is out of range.
    """
    require_choice("workload", workload, tuple(DESCRIPTIONS))
    require_int("seed", seed, 0, LARGEST_SEED // 4)
    if workload != ONE_LONG:
        return tuple(WORKLOADS[workload](num_requests, rate_rps, seed))
    requests = WORKLOADS["short chat"](num_requests, rate_rps, seed)
    for i in range(LONG_FIRST, num_requests, LONG_EVERY):
        requests[i] = TraceRequest(requests[i].arrival_s, LONG_TOKENS, LONG_OUTPUT, priority=1)
    return tuple(requests)


# --- machines ------------------------------------------------------------------------------------

USUAL_BATCH = 8
"""Decodes of one step, to reckon what a machine can do."""
USUAL_LOAD = 0.6
"""Part of that which arrives at first: queues form, and most of the time empty again."""
LONG_PROMPT, LONG_CONTEXT = 1000, 300
"""Of the requests that the limits are made for, in tokens."""


class Machine(NamedTuple):
    """Something to simulate."""

    label: str
    step_times: StepTimes
    config: EngineConfig
    """The knobs that have no control."""
    max_model_len: int

    @property
    def line(self) -> str:
        """What the times rest on."""
        return "with step times " + self.step_times.basis.replace("published: ", "published for ")

    def usual_rate(self, workload: str) -> float:
        """Requests a second of a workload of this name that keep it busy."""
        return self.rate_for(make_requests(workload, 200, 1.0, 0))

    def rate_for(self, requests: Sequence[TraceRequest]) -> float:
        """Requests a second, such as these, that keep it busy, to two digits.

        Prompts one by one, decodes in a batch of `USUAL_BATCH`.
        """
        busy_s = sum(self._work_s(request) for request in requests) / len(requests)
        return float(f"{USUAL_LOAD / busy_s:.2g}")

    def _work_s(self, request: TraceRequest) -> float:
        prompt, output = request.num_prompt_tokens, request.num_output_tokens
        context = prompt + output // 2
        return self._prefill_s(prompt) + output * self._decode_s(context) / USUAL_BATCH

    def _prefill_s(self, num_tokens: int) -> float:
        pairs = causal_pairs(0, num_tokens)
        return self.step_times.step_s(StepShape(1, num_tokens, pairs, 0, 0))

    def _decode_s(self, context: int) -> float:
        shape = StepShape(0, 0, 0, USUAL_BATCH, USUAL_BATCH * context, context)
        return self.step_times.step_s(shape)

    def usual_slo(self) -> SLO:
        """Twice what a long prompt takes alone, four times what a decode takes; to one digit."""
        ttft_s, tpot_s = 2 * self._prefill_s(LONG_PROMPT), 4 * self._decode_s(LONG_CONTEXT)
        return SLO(float(f"{ttft_s:.1g}"), float(f"{tpot_s:.1g}"))


# --- settings ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What the controls say. All else follows from it."""

    batching: str
    policy: str
    """The name of a policy."""
    max_num_batched_tokens: int
    chunk_size: int | None
    max_num_seqs: int
    rate_rps: float
    workload: str
    num_requests: int
    seed: int
    machine: str
    ttft_slo_s: float
    tpot_slo_s: float

    @property
    def slo(self) -> SLO:
        return SLO(self.ttft_slo_s, self.tpot_slo_s).checked()

    @property
    def line(self) -> str:
        """All of them but the machine, in one line."""
        chunk = "whole budget" if self.chunk_size is None else self.chunk_size
        return (
            f"{self.batching}, {self.policy}, budget {self.max_num_batched_tokens}, chunk {chunk}, "
            f"{self.max_num_seqs} seats; {self.workload} at {self.rate_rps:g}/s, seed {self.seed}"
        )

    def requests(self) -> tuple[TraceRequest, ...]:
        """The workload."""
        return make_requests(self.workload, self.num_requests, self.rate_rps, self.seed)

    def config(self, machine: Machine, policies: Mapping[str, Policy]) -> EngineConfig:
        """The engine's knobs.

        The policy is a copy, so that each run finds it as it was registered; `deadline` works
        towards the limit of the lab.

        Raises:
            ValueError: there is no such policy, or knobs do not go together.
        """
        require_choice("policy", self.policy, (*POLICIES, *policies))
        policy: Policy
        if self.policy in policies:
            policy = copy.deepcopy(policies[self.policy])
        elif self.policy == "deadline":
            policy = Deadline(self.ttft_slo_s)
        else:
            policy = POLICIES[self.policy]()
        return replace(
            machine.config,
            batching=self.batching,
            policy=policy,
            max_num_batched_tokens=self.max_num_batched_tokens,
            chunk_size=self.chunk_size,
            max_num_seqs=self.max_num_seqs,
        )

    def run(
        self, machine: Machine, policies: Mapping[str, Policy], num_requests: int | None = None
    ) -> ServingRun:
        """Simulate; only the first requests if a number is given."""
        return simulate(
            self.requests()[:num_requests],
            self.config(machine, policies),
            machine.step_times,
            max_model_len=machine.max_model_len,
        )


def named_policies(policies: Sequence[Policy]) -> dict[str, Policy]:
    """Policies of one's own by the name of their class, or as their own `__str__` calls them.

    Raises:
        ValueError: one is no Policy object, or has the name of a built-in one.
    """
    found = {}
    for policy in policies:
        if isinstance(policy, type) and issubclass(policy, Policy):
            name = policy.__name__
            raise ValueError(f"policy={name} is a class: pass an object, {name}()")
        if not isinstance(policy, Policy):
            raise ValueError(f"policy={policy!r:.60} must be an object derived from pdlab.Policy")
        own = type(policy)
        name = own.__name__ if own.__str__ is Policy.__str__ else str(policy)
        if name in POLICIES:
            raise ValueError(f"policy={name} is the name of a built-in policy: rename your class")
        found[name] = policy
    return found


def in_words(error: BaseException) -> str:
    """What went wrong, in a line; for an error that came out of a policy, with its line of code."""
    cause = error.__cause__ if isinstance(error, PolicyError) else None
    if cause is not None and _place_in_policy(cause):
        error = cause
    text = " ".join(str(error).split()) or type(error).__name__
    place = _place_in_policy(error)
    if not place and isinstance(error, ValueError | traitlets.TraitError):
        return text
    return f"{type(error).__name__}: {text}{place}"


def _place_in_policy(error: BaseException) -> str:
    """Where code of a policy that is not ours raised it, or called what did."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        policy, name = frame.f_locals.get("self"), frame.f_code.co_filename
        if isinstance(policy, Policy) and type(policy) not in POLICIES.values():
            code = linecache.getline(name, number, frame.f_globals).strip()
            where = f"{type(policy).__name__}.{frame.f_code.co_name}"
            return f", in {where}, line {number}" + (f": {code}" if code else "")
    return ""


# --- what is shown -------------------------------------------------------------------------------

NUMBERS = (
    ("ttft_p50", "TTFT p50", "s"),
    ("ttft_p99", "TTFT p99", "s"),
    ("itl_p99", "ITL p99", "s"),
    ("goodput", "goodput", "req/s"),
    ("throughput", "throughput", "tok/s"),
)
"""The big numbers: key, label, unit. Of seconds less is better, of rates more."""
COMPARED = (
    ("ttft_p50", "TTFT p50", "s"),
    ("ttft_p99", "TTFT p99", "s"),
    ("tpot_p50", "TPOT p50", "s"),
    ("itl_p99", "ITL p99", "s"),
    ("goodput", "goodput", "req/s"),
    ("throughput", "throughput", "tok/s"),
    ("duration", "last token after", "s"),
)
"""Rows of the table that sets a real run beside its simulation."""
MINI_ROWS = 30
"""Requests in the timeline."""
FINEST = 1 / 500
"""The shortest stall that is drawn, as part of the time shown."""
BINS = 110
"""Spans of time in the picture of the load."""


def numbers_of(
    run: ServingRun, slo: SLO, samples: Mapping[str, Any] | None = None
) -> dict[str, float | None]:
    """By key; None where nothing was measured. As `summarize` has them, which takes longer.

    Args:
        samples: the run's `latency_samples`, if they are at hand.
    """
    samples = latency_samples(run.requests) if samples is None else samples
    of = {name: Distribution.of(samples[name]) for name in ("ttft_s", "tpot_s", "itl_s")}
    met = sum(request.meets(slo) for request in run.requests)
    tokens = sum(request.metrics.num_output_tokens for request in run.requests)
    return {
        "ttft_p50": of["ttft_s"].p50,
        "ttft_p99": of["ttft_s"].p99,
        "tpot_p50": of["tpot_s"].p50,
        "itl_p99": of["itl_s"].p99,
        "goodput": met / run.duration_s if run.duration_s else 0.0,
        "attainment": met / len(run.requests) if run.requests else None,
        "throughput": tokens / run.duration_s if run.duration_s else 0.0,
        "duration": run.duration_s,
    }


def picture_of(run: ServingRun, slo: SLO, view: str) -> dict[str, Any]:
    """Everything that is drawn of a run.

    Args:
        view: `requests` for the lives of the first ones, `load` for queue and batch over time.
    """
    samples = latency_samples(run.requests)
    seconds, parts = curve(samples["ttft_s"])
    return {
        "numbers": numbers_of(run, slo, samples),
        "num_requests": len(run.requests),
        "num_refused": sum(bool(r.error) for r in run.requests),
        "error": next((r.error for r in run.requests if r.error), ""),
        "num_preemptions": sum(r.metrics.num_preemptions for r in run.requests),
        "cdf": [_digits(seconds), _digits(parts)],
        "timeline": _first_rows(run, slo) if view == "requests" else _load(run),
    }


def _first_rows(run: ServingRun, slo: SLO) -> dict[str, Any]:
    """The lives of the first requests, as in the Gantt chart."""
    first = _only_first(run, MINI_ROWS)
    spans = lives(first)
    end_s = max((s[-1].end_s for s in spans.values() if s), default=0.0)
    rows = [
        {"spans": _drawn(spans[request.request_id], FINEST * end_s), "met": request.meets(slo)}
        for request in first.requests
    ]
    return {"view": "requests", "rows": rows, "end_s": end_s}


def _drawn(spans: Sequence[Span], least_s: float) -> list[list[float]]:
    """Number of the kind, start, end. Neighbours of a kind are one; too short a stall is none."""
    found: list[list[float]] = []
    for kind, start_s, end_s, _ in spans:
        number = KINDS.index(kind)
        too_short = kind == "stalled" and end_s - start_s < least_s
        if found and (found[-1][0] == number or too_short):
            found[-1][2] = round(end_s, 6)
        else:
            found.append([number, round(start_s, 6), round(end_s, 6)])
    return found


def _only_first(run: ServingRun, num: int) -> ServingRun:
    """The run as its first requests saw it: all steps until they end, and nobody else in them."""
    requests = run.requests[:num]
    names = {request.request_id for request in requests}
    end_s = last_token_s(run, num)
    steps = [_only(step, names) for step in run.steps if step.start_s < end_s]
    return replace(run, requests=requests, steps=steps)


def last_token_s(run: ServingRun, num: int) -> float:
    """When the last of its first requests has all its tokens."""
    times = [r.metrics.token_times_s for r in run.requests[:num] if r.metrics.token_times_s]
    return max((each[-1] for each in times), default=0.0)


def _only(step: StepSpan, names: set[str]) -> StepSpan:
    return replace(
        step,
        decodes=[name for name in step.decodes if name in names],
        prompts={name: n for name, n in step.prompts.items() if name in names},
        preempted=[name for name in step.preempted if name in names],
    )


def _load(run: ServingRun) -> dict[str, Any]:
    """Waiting requests and the batch over the whole run."""
    means = over_time(run, BINS)
    return {
        "view": "load",
        "end_s": run.duration_s,
        "queue": _digits(means.queue_depth),
        "batch": _digits(means.batch_size),
    }


def _digits(values: Any) -> list[float]:
    """Four significant digits: enough for a picture."""
    return [float(f"{value:.4g}") for value in np.asarray(values, dtype=float)]


def refused_for_real(measured: ServingRun, simulated: ServingRun) -> str:
    """What the engine refused that the simulation served, and why; "" if nothing."""
    pairs = zip(measured.requests, simulated.requests, strict=True)
    errors = [real.error for real, served in pairs if real.error and not served.error]
    if not errors:
        return ""
    return f"{len(errors)} of {len(measured.requests)} requests were refused: {errors[0]}"


def compared(measured: ServingRun, simulated: ServingRun, slo: SLO) -> list[dict[str, Any]]:
    """A row for each number: what the engine did, and what the simulation says."""
    real, simulation = (numbers_of(run, slo) for run in (measured, simulated))
    return [
        {
            "key": key,
            "label": label,
            "unit": unit,
            "measured": real[key],
            "simulated": simulation[key],
        }
        for key, label, unit in COMPARED
    ]
