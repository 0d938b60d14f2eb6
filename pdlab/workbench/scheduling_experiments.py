"""What the lesson on scheduling runs: a scene on the real engine, and many simulated users."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from pdlab.costmodel import LinearStepTimes, StepShape, StepTimes, fit_step_times
from pdlab.costmodel.cost import causal_pairs
from pdlab.engine import Engine, EngineConfig
from pdlab.engine.policies import Policy, PolicyError, QueueView, Rank
from pdlab.engine.sequence import Sequence as EngineSequence
from pdlab.models import Model
from pdlab.requirements import require_int, require_number
from pdlab.workbench.lesson import progress
from pdlab.workload import (
    WORKLOADS,
    ClosedLoop,
    Fixed,
    Lengths,
    TraceRequest,
    make_traffic,
    poisson,
)
from pdlab.workload.replay import replay
from pdlab.workload.report import Distribution, Summary, latencies, latency_samples, summarize
from pdlab.workload.serving import SLO, ServedRequest, ServingRun
from pdlab.workload.simulation import simulate
from pdlab.workload.step_shapes import Sample, samples_of

RECORDED = LinearStepTimes(
    basis="recorded: smollm2-135m, float32, on 2 threads of an AMD EPYC, 2026-11-30",
    base_s=0.05465,
    rows_s=0.03936,
    prompt_s=0.000758,
    prompt_token_s=0.001607,
    prompt_pair_s=6.655e-07,
    decode_s=0.002689,
    context_s=0.0,
    padded_context_s=1.736e-05,
    median_error=0.074,
    worst_error=0.29,
    num_samples=70,
)
"""Step times that are the same wherever the lesson runs, for exercises that are checked."""

# --- the scene -----------------------------------------------------------------------------------

CHAT, DOCUMENT, QUESTION = "chat", "document", "question"
CHATS = 4
CHAT_TOKENS = 22
"""To be written for each chat, so many that they last: see `PHASE_STEPS`."""
DOCUMENT_AFTER = 4
"""Decode steps from the beginning to the long document."""
QUESTIONS_AFTER = (6.0, 6.5, 7.0)
"""To the short questions: later than a step that is under way when the document comes, and sooner
than the document's own step is over, if it is computed in one."""
PHASE_STEPS = 4
"""Of decodes in a row, for `decode_first`: so few that they are over long before the chats are,
even where decode steps are only half as long as the scene takes them to be."""
WARM_UP_STEPS = 4
PACE_TOKENS = (8, 10, 12, 14)
"""To be written for each chat where they are alone."""


class Scene(NamedTuple):
    """Requests in order of arrival, and what each of them is."""

    requests: list[TraceRequest]
    roles: list[str]

    @property
    def labels(self) -> list[str]:
        """`chat 1`, `chat 2`, ...; just the role where there is only one of them."""
        alone = {role for role in self.roles if self.roles.count(role) == 1}
        return [
            role if role in alone else f"{role} {self.roles[: i + 1].count(role)}"
            for i, role in enumerate(self.roles)
        ]


def scene(step_s: float) -> Scene:
    """Four chats that are being answered, one long document, and behind it three short questions.

    Args:
        step_s: seconds of a decode step of the four chats; all arrivals are multiples of it, so
            that the story is the same on a slow machine and on a fast one.
    """
    require_number("step_s", step_s, 1e-6, 1e6)
    chats = [TraceRequest(0.0, 40, CHAT_TOKENS) for _ in range(CHATS)]
    document = TraceRequest(DOCUMENT_AFTER * step_s, 520, 4)
    questions = [
        TraceRequest(after * step_s, 24, num_output)
        for after, num_output in zip(QUESTIONS_AFTER, (4, 5, 6), strict=True)
    ]
    return Scene([*chats, document, *questions], [CHAT] * CHATS + [DOCUMENT] + [QUESTION] * 3)


def scene_for(times: StepTimes) -> Scene:
    """The scene on a machine that is known by its step times alone."""
    return scene(times.step_s(StepShape(0, 0, 0, CHATS, CHATS * 50, 50)))


def without_document(the_scene: Scene) -> Scene:
    """The chats and the questions alone."""
    kept = [pair for pair in zip(*the_scene, strict=True) if pair[1] != DOCUMENT]
    return Scene([request for request, _ in kept], [role for _, role in kept])


def named(run: ServingRun, labels: Sequence[str]) -> ServingRun:
    """The run with its requests called by these names, in order of arrival."""
    new = {r.request_id: name for r, name in zip(run.requests, labels, strict=True)}
    return replace(
        run,
        requests=[replace(r, request_id=new[r.request_id]) for r in run.requests],
        steps=[
            replace(
                step,
                decodes=[new[i] for i in step.decodes],
                prompts={new[i]: n for i, n in step.prompts.items()},
                preempted=[new[i] for i in step.preempted],
            )
            for step in run.steps
        ],
    )


def num_chunks(run: ServingRun, request_id: str) -> int:
    """Steps that computed a part of a request's prompt."""
    return sum(request_id in step.prompts for step in run.steps)


class Played(NamedTuple):
    """A run of the real engine, and how long each of its steps took."""

    run: ServingRun
    samples: list[Sample]

    def decode_step_s(self, num_decodes: int) -> float:
        """Median seconds of the steps in which so many decode, and nothing else happens.

        Raises:
            ValueError: there is no such step.
        """
        found = [s for shape, s in self.samples if shape[:4] == (0, 0, 0, num_decodes)]
        if not found:
            raise ValueError(f"num_decodes={num_decodes}: no step of the run has so many")
        return median(found)


def serve(model: Model, requests: Sequence[TraceRequest], config: EngineConfig) -> Played:
    """Real time on the real engine, with random tokens for prompts."""
    with Engine(model, config) as engine:
        run = replay(engine, requests)
        return Played(run, samples_of(engine.trace))


def pace(model: Model) -> Played:
    """The four chats alone; they end one after the other, so that smaller batches are seen, too.

    A few of their steps are served before: they are for a machine that has just woken up, and are
    thrown away.
    """
    config = EngineConfig(num_blocks=128)
    serve(model, [TraceRequest(0.0, 40, WARM_UP_STEPS)] * CHATS, config)
    return serve(model, [TraceRequest(0.0, 40, num_output) for num_output in PACE_TOKENS], config)


def play(
    model: Model, requests: Sequence[TraceRequest], plans: Mapping[str, EngineConfig]
) -> dict[str, Played]:
    """The same requests under each plan, one after the other, on the real engine."""
    return {name: serve(model, requests, plans[name]) for name in progress(list(plans), "plan")}


class Outcome(NamedTuple):
    """What the people in the scene notice, in seconds, and how many steps it took."""

    question_ttft_s: float
    """Of the question that waited longest."""
    chat_gap_s: float
    """The longest gap between two tokens of a chat."""
    document_ttft_s: float | None
    """None where there is no document."""
    done_s: float
    num_steps: int

    @classmethod
    def of(cls, run: ServingRun, roles: Sequence[str]) -> Outcome:
        """Read off a run of the scene."""
        by_role: dict[str, list[ServedRequest]] = {}
        for role, request in zip(roles, run.requests, strict=True):
            by_role.setdefault(role, []).append(request)
        return cls(
            question_ttft_s=max(_ttft_s(r) for r in by_role[QUESTION]),
            chat_gap_s=max(max(r.metrics.itl_s) for r in by_role[CHAT]),
            document_ttft_s=_ttft_s(by_role[DOCUMENT][0]) if DOCUMENT in by_role else None,
            done_s=run.duration_s,
            num_steps=sum(step.num_steps for step in run.steps),
        )


def _ttft_s(request: ServedRequest) -> float:
    ttft_s = request.metrics.ttft_s
    if ttft_s is None:
        raise ValueError(f"request {request.request_id} has no token: {request.error}")
    return ttft_s


# --- the simulator beside it ---------------------------------------------------------------------


def fitted(played: Mapping[str, Played], but: str | None = None) -> LinearStepTimes:
    """Step times fitted to the steps of recorded runs.

    Args:
        but: name of a run to leave out, so that it can be predicted without having been seen.
    """
    samples = [s for name, each in played.items() if name != but for s in each.samples]
    machine = next(iter(played.values())).run.basis
    return fit_step_times(samples, f"measured in {len(samples)} steps: {machine}")


class Prediction(NamedTuple):
    """A plan as it went, and as simulated from the steps of the other runs alone."""

    measured: Outcome
    simulated: Outcome
    run: ServingRun
    """The simulated one."""

    def ratios(self) -> dict[str, float]:
        """Simulated over measured, of each time."""
        names = ("question_ttft_s", "chat_gap_s", "document_ttft_s", "done_s")
        return {
            name: getattr(self.simulated, name) / getattr(self.measured, name) for name in names
        }


def predict_each(
    played: Mapping[str, Played], the_scene: Scene, plans: Mapping[str, EngineConfig]
) -> dict[str, Prediction]:
    """Each plan's run, simulated with step times that were fitted without it."""
    found = {}
    for name, config in plans.items():
        run = simulate(the_scene.requests, config, fitted(played, but=name))
        roles = the_scene.roles
        found[name] = Prediction(Outcome.of(played[name].run, roles), Outcome.of(run, roles), run)
    return found


MEDIAN_ERROR, TOTAL_ERROR = 0.15, 0.2
"""Most that a fit to this machine may be off to be used: a step, and a whole run."""


class Ground(NamedTuple):
    """The step times that the simulations rest on."""

    times: LinearStepTimes
    line: str
    """How good the fit to this machine is, and so whether it is used."""
    is_own: bool
    """Whether they are of this machine."""


def ground(played: Mapping[str, Played], predicted: Mapping[str, Prediction]) -> Ground:
    """Step times fitted to all runs, if they are good enough; else `RECORDED`.

    Good enough: half of all steps are within `MEDIAN_ERROR` of the fit, and each whole run was
    predicted from the steps of the others to within `TOTAL_ERROR`.
    """
    fit = fitted(played)
    total = max(abs(each.ratios()["done_s"] - 1) for each in predicted.values())
    line = (
        f"fit to {fit.num_samples} steps of this machine: half of them within"
        f" {fit.median_error:.0%}, all within {fit.worst_error:.0%}; whole runs within {total:.0%}"
    )
    if fit.median_error <= MEDIAN_ERROR and total <= TOTAL_ERROR:
        return Ground(fit, f"{line}. Good enough: used from here on.", True)
    line += f". Too poor (limits {MEDIAN_ERROR:.0%} and {TOTAL_ERROR:.0%}): from here on"
    return Ground(RECORDED, f"{line} step times {RECORDED.basis}, another machine.", False)


# --- many users ----------------------------------------------------------------------------------

Traffic = Callable[[float], list[TraceRequest]]
"""Requests at a rate, in requests a second."""


def limits(times: StepTimes) -> SLO:
    """Limits that suit a machine: thrice a document of 800 tokens alone, thrice a step of 8 chats.

    A promise to users should come from users; this one makes a lesson tell the same story on a slow
    machine and on a fast one.
    """
    document_s = times.step_s(StepShape(1, 800, causal_pairs(0, 800), 0, 0))
    step_s = times.step_s(StepShape(0, 0, 0, 8, 8 * 100, 100))
    return SLO(*(float(f"{3 * seconds:.2g}") for seconds in (document_s, step_s)))


def all_at_once(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests, all of which come at 0."""
    return [replace(request, arrival_s=0.0) for request in requests]


def saturation_rps(
    requests: Sequence[TraceRequest], config: EngineConfig, times: StepTimes
) -> float:
    """Requests a second when there is always somebody who waits."""
    return len(requests) / simulate(all_at_once(requests), config, times).duration_s


def _require_some(name: str, values: Sequence[object] | Mapping[str, object]) -> None:
    if not values:
        raise ValueError(f"{name} is empty: it needs at least 1")


class Load(NamedTuple):
    """What came of a workload at one rate."""

    rate_rps: float
    summary: Summary


def load_sweep(
    traffic: Traffic,
    rates_rps: Sequence[float],
    plans: Mapping[str, EngineConfig],
    times: StepTimes,
    slo: SLO,
) -> dict[str, list[Load]]:
    """Every plan at every rate, with the same requests.

    Raises:
        ValueError: there is no rate, or no plan.
    """
    _require_some("rates_rps", rates_rps)
    _require_some("plans", plans)
    workloads = {rate: traffic(rate) for rate in rates_rps}
    return {
        name: [
            Load(rate, summarize(simulate(requests, config, times), slo))
            for rate, requests in workloads.items()
        ]
        for name, config in plans.items()
    }


def best_rate(loads: Sequence[Load], attainment: float = 0.9) -> float:
    """The highest rate at which so many of the requests, and at each lower rate too, meet the SLO.

    0 where even the lowest rate is too much.
    """
    best = 0.0
    for load in sorted(loads):
        if (load.summary.attainment or 0.0) < attainment:
            break
        best = load.rate_rps
    return best


def knee(
    traffic: Traffic,
    rates_rps: Sequence[float],
    config: EngineConfig,
    times: StepTimes,
    slo: SLO,
    attainment: float = 0.9,
) -> float:
    """What `best_rate` is of such a sweep, without the rates behind the first miss."""
    best = 0.0
    for rate in sorted(rates_rps):
        summary = summarize(simulate(traffic(rate), config, times), slo)
        if (summary.attainment or 0.0) < attainment:
            break
        best = rate
    return best


def share_near_mean(run: ServingRun, within: float = 0.25) -> float:
    """Share of requests whose TTFT is that near the mean."""
    ttfts_s = latency_samples(run.requests)["ttft_s"]
    mean_s = float(ttfts_s.mean())
    return float(np.mean(np.abs(ttfts_s - mean_s) <= within * mean_s))


@dataclass(frozen=True)
class Little:
    """Both sides of Little's law: L = lambda W."""

    rate_rps: float
    """Requests that came, over the duration."""
    mean_s: float
    """A request's stay, from arrival to last token: read off the requests."""
    counted: float
    """Requests inside, waiting or running, on average over time: read off the steps."""

    @classmethod
    def of(cls, run: ServingRun) -> Little:
        stays = [r.metrics.e2e_s for r in run.requests if r.metrics.e2e_s is not None]
        inside = sum((step.num_waiting + step.num_running) * step.wall_s for step in run.steps)
        return cls(len(stays) / run.duration_s, float(np.mean(stays)), inside / run.duration_s)

    @property
    def product(self) -> float:
        """Rate times stay: what the law says that `counted` must be."""
        return self.rate_rps * self.mean_s


def closed_loop(
    requests: Sequence[TraceRequest],
    num_clients: int,
    config: EngineConfig,
    times: StepTimes,
    slo: SLO,
) -> Summary:
    """The requests from clients that send the next one when they have the answer to the last."""
    return summarize(simulate(ClosedLoop(requests, num_clients), config, times), slo)


# --- who is next ---------------------------------------------------------------------------------


class OwnPolicy(Policy):
    """A Policy made of a function, for those who do not want to write a class.

    Args:
        rank: called with a sequence and a `QueueView`; the lowest goes first.
        changes: whether a sequence's rank may change while it waits.
    """

    def __init__(
        self,
        name: str,
        rank: Callable[[EngineSequence, QueueView], Rank],
        *,
        changes: bool = True,
    ):
        self.name = name
        self.changes = changes
        self._rank = rank

    def rank(self, sequence: EngineSequence, view: QueueView) -> Rank:
        return self._rank(sequence, view)

    def __str__(self) -> str:
        return self.name


class Served(NamedTuple):
    """A workload under one policy: those that go first where priority counts, and the others."""

    chats: Distribution
    """Of their TTFT."""
    documents: Distribution
    attainment: float
    cached_share: float
    """Of the prompt tokens, what the prefix cache spared."""
    provenance: str

    @classmethod
    def of(cls, run: ServingRun, slo: SLO) -> Served:
        """Chats have priority 0, documents 1, as in the workload `mixed`."""
        chats, documents = (
            latencies(r for r in run.requests if (r.priority > 0) is is_document)["ttft_s"]
            for is_document in (False, True)
        )
        summary = summarize(run, slo)
        cached = summary.num_cached_tokens / max(1, summary.num_prompt_tokens)
        line = f"{summary.provenance}: {summary.basis}"
        return cls(chats, documents, summary.attainment or 0.0, cached, line)


def under_policies(
    requests: Sequence[TraceRequest],
    policies: Mapping[str, str | Policy],
    config: EngineConfig,
    times: StepTimes,
    slo: SLO,
) -> dict[str, Served]:
    """The same requests, with another policy each time."""
    return {
        name: Served.of(simulate(requests, replace(config, policy=policy), times), slo)
        for name, policy in policies.items()
    }


# --- claims --------------------------------------------------------------------------------------


class Speedup(NamedTuple):
    """Static batches against continuous batching, all requests there from the beginning."""

    static: ServingRun
    continuous: ServingRun

    @property
    def ratio(self) -> float:
        """Of their throughputs."""
        return self.static.duration_s / self.continuous.duration_s

    @property
    def step_ratio(self) -> float:
        """Of their numbers of steps."""
        static, continuous = (sum(s.num_steps for s in run.steps) for run in self)
        return static / continuous


def burst(num_outputs: Sequence[int], num_prompt_tokens: int = 32) -> list[TraceRequest]:
    """Requests that all come at 0, with outputs of these lengths."""
    return [TraceRequest(0.0, num_prompt_tokens, n) for n in num_outputs]


def simulated_speedup(
    outputs: Lengths, config: EngineConfig, times: StepTimes, num_requests: int = 200
) -> Speedup:
    """For short prompts and outputs drawn from a distribution."""
    require_int("num_requests", num_requests, 1)
    drawn = make_traffic(poisson(1), Fixed(32), outputs, num_requests)
    runs = (
        simulate(all_at_once(drawn), replace(config, batching=batching), times)
        for batching in ("static", "mixed")
    )
    return Speedup(*runs)


class Kept(NamedTuple):
    """Shares of all requests that keep a promise which knows no mean."""

    first_token: float
    """First token in time."""
    gaps: float
    """No gap between two tokens over the limit."""
    both: float

    @classmethod
    def of(cls, run: ServingRun, ttft_s: float, gap_s: float) -> Kept:
        soon = [(r.metrics.ttft_s or 0.0) <= ttft_s and not r.error for r in run.requests]
        even = [max(r.metrics.itl_s, default=0.0) <= gap_s and not r.error for r in run.requests]
        both = [a and b for a, b in zip(soon, even, strict=True)]
        return cls(*(float(np.mean(each)) for each in (soon, even, both)))


class Budget(NamedTuple):
    """A workload under one token budget."""

    budget: int
    summary: Summary
    kept: Kept
    all_at_once_s: float
    """How long the same requests take when all are there from the beginning: 1 / throughput."""


def budget_sweep(
    requests: Sequence[TraceRequest],
    budgets: Sequence[int],
    config: EngineConfig,
    times: StepTimes,
    slo: SLO,
    gap_s: float,
) -> list[Budget]:
    """The same requests, with another token budget each time.

    Args:
        slo: its limit on pace is on a request's mean gap.
        gap_s: limit for each single gap.
    """
    _require_some("budgets", budgets)
    found = []
    for budget in budgets:
        own = replace(config, max_num_batched_tokens=budget)
        run = simulate(requests, own, times)
        whole = simulate(all_at_once(requests), own, times)
        kept = Kept.of(run, slo.ttft_s, gap_s)
        found.append(Budget(budget, summarize(run, slo), kept, whole.duration_s))
    return found


# --- exercises -----------------------------------------------------------------------------------

RECORDED_SEATS = EngineConfig(num_blocks=1024, max_num_seqs=8, max_num_batched_tokens=256)


def recorded_crowd(num_requests: int = 300) -> list[TraceRequest]:
    """The workload `mixed` at 90% of what the recorded machine gets through."""
    mixed = WORKLOADS["mixed"]
    most = saturation_rps(mixed(num_requests, 1.0), RECORDED_SEATS, RECORDED)
    return mixed(num_requests, 0.9 * most)


def under_recorded(requests: Sequence[TraceRequest], policy: str | Policy) -> Served:
    """Requests under a policy on the recorded machine.

    Raises:
        Exception: whatever the policy raised, as it was.
    """
    slo = limits(RECORDED)
    try:
        return under_policies(requests, {"": policy}, RECORDED_SEATS, RECORDED, slo)[""]
    except PolicyError as error:
        raise (error.__cause__ or error) from None


def recorded_outcome(budget: int, chunk_size: int | None) -> Outcome:
    """The scene on the recorded machine, in mixed steps."""
    config = EngineConfig(num_blocks=128, max_num_batched_tokens=budget, chunk_size=chunk_size)
    the_scene = scene_for(RECORDED)
    return Outcome.of(simulate(the_scene.requests, config, RECORDED), the_scene.roles)


class Saturation(NamedTuple):
    """Short chats, all at once, on the recorded machine."""

    mean_prompt_tokens: float
    mean_output_tokens: float
    requests_per_s: float


def recorded_saturation(seats: int, num_requests: int = 400) -> Saturation:
    """What `short chat` comes to with so many seats."""
    requests = WORKLOADS["short chat"](num_requests)
    config = replace(RECORDED_SEATS, max_num_seqs=seats)
    return Saturation(
        float(np.mean([r.num_prompt_tokens for r in requests])),
        float(np.mean([r.num_output_tokens for r in requests])),
        saturation_rps(requests, config, RECORDED),
    )
