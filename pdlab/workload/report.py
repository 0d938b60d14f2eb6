"""A served workload in numbers: latencies, rates, goodput, and how full the engine was.

Percentiles interpolate linearly between neighbours in the sorted samples (numpy's default; type 7
of Hyndman and Fan 1996).

Means over time run from 0, when the workload began, to the end of the last step. Between steps
nothing is computed, so batch size and tokens are 0 there. Who was admitted stays so, and holds his
blocks, through a pause between two steps of his; when all are done, nobody does. The queue is
reckoned from the requests and not from the steps, as a request may come in the middle of one: it
waits from its arrival, and again after each preemption, until a step computes any of its tokens. So
without preemption the mean queue depth is the arrival rate times the mean time in the queue
(Little 1961).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdlab.requirements import require_int
from pdlab.workload.serving import SLO, ServedRequest, ServingRun, StepSpan

FINISHED = ("stop", "length")
MIXES = ("prefill", "decode", "mixed")
MOST_BINS = 10_000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Distribution:
    """Samples of a latency in seconds; all None where there is no sample."""

    num_samples: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, samples: ArrayLike) -> Distribution:
        values = np.asarray(samples, dtype=float)
        if not values.size:
            return cls(0, None, None, None, None, None, None)
        p50, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
        return cls(values.size, float(values.mean()), p50, p90, p95, p99, float(values.max()))


class Level(NamedTuple):
    """Something that changes over time: its mean, weighted with time, and its maximum."""

    mean: float
    max: float


class StepShare(NamedTuple):
    """Steps of one mix."""

    num_steps: int
    wall_s: float


@dataclass(frozen=True)
class Summary:
    """What came of a workload. See the module for how things are counted."""

    provenance: str
    basis: str
    slo: SLO | None
    num_requests: int
    """All: the finished, refused, aborted, and those still unfinished at the end."""
    num_finished: int
    num_refused: int
    num_aborted: int
    duration_s: float
    queue_s: Distribution
    """Arrival to the first step that computed any of its tokens."""
    ttft_s: Distribution
    itl_s: Distribution
    """All gaps between tokens, of all requests."""
    tpot_s: Distribution
    """The mean gap of each request; those with one token have none."""
    e2e_s: Distribution
    """Of the finished only."""
    requests_per_s: float
    """Finished."""
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    """Prompts that have led to a token, what the prefix cache spared included."""
    goodput_per_s: float | None
    """Finished requests a second that meet both limits of the SLO; None without one."""
    attainment: float | None
    """Share of all requests that do, the refused and aborted being among all."""
    queue_depth: Level
    batch_size: Level
    """Sequences computed in a step."""
    running: Level
    """Sequences admitted, computed in this step or not."""
    step_tokens: Level
    kv_occupancy: Level
    """Blocks that somebody holds, of those in the pool."""
    steps: dict[str, StepShare]
    """By mix: prefill, decode, mixed."""
    idle_s: float
    """Time in no step."""
    num_preemptions: int
    num_prompt_tokens: int
    """As in `prompt_tokens_per_s`."""
    num_cached_tokens: int
    """Prompt tokens that the prefix cache spared."""
    num_output_tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON knows it."""
        raw = asdict(self)
        for name, value in raw.items():
            if isinstance(value, tuple):
                raw[name] = value._asdict()  # type: ignore[attr-defined]
        raw["steps"] = {mix: share._asdict() for mix, share in self.steps.items()}
        return raw


class OverTime(NamedTuple):
    """A run cut into equal spans of time; all arrays but the first have one value a span."""

    edges_s: Floats
    """[num_bins + 1]"""
    queue_depth: Floats
    batch_size: Floats
    kv_occupancy: Floats
    output_tokens_per_s: Floats


def summarize(run: ServingRun, slo: SLO | None = None) -> Summary:
    """The run in numbers; goodput and attainment where there is an SLO to meet.

    Raises:
        ValueError: a limit of the SLO is no time.
    """
    requests, duration_s = run.requests, run.duration_s
    metrics = [r.metrics for r in requests]
    begun = [m for m in metrics if m.token_times_s]
    finished = [r for r in requests if r.finish_reason in FINISHED]
    good = None if slo is None else _num_good(requests, slo.checked())
    signals = _Signals.of(run)
    num_prompt_tokens = sum(m.num_prompt_tokens for m in begun)
    num_output_tokens = sum(m.num_output_tokens for m in begun)

    def rate(count: int) -> float:
        return count / duration_s if duration_s else 0.0

    return Summary(
        provenance=run.provenance,
        basis=run.basis,
        slo=slo,
        num_requests=len(requests),
        num_finished=len(finished),
        num_refused=sum(r.finish_reason == "error" for r in requests),
        num_aborted=sum(r.finish_reason == "abort" for r in requests),
        duration_s=duration_s,
        **latencies(requests),
        requests_per_s=rate(len(finished)),
        output_tokens_per_s=rate(num_output_tokens),
        prompt_tokens_per_s=rate(num_prompt_tokens),
        goodput_per_s=None if good is None else rate(good),
        attainment=None if good is None or not requests else good / len(requests),
        queue_depth=signals.queue.over(duration_s),
        batch_size=signals.batch.over(duration_s),
        running=signals.running.over(duration_s),
        step_tokens=signals.tokens.over(duration_s),
        kv_occupancy=signals.blocks.over(duration_s, run.num_blocks),
        steps=_shares(run.steps),
        idle_s=max(0.0, duration_s - sum(step.wall_s for step in run.steps)),
        num_preemptions=sum(m.num_preemptions for m in metrics),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=sum(m.num_cached_tokens for m in begun),
        num_output_tokens=num_output_tokens,
    )


def latencies(requests: Iterable[ServedRequest]) -> dict[str, Distribution]:
    """`queue_s`, `ttft_s`, `itl_s`, `tpot_s` and `e2e_s` of these requests."""
    return {name: Distribution.of(samples) for name, samples in latency_samples(requests).items()}


def latency_samples(requests: Iterable[ServedRequest]) -> dict[str, Floats]:
    """The samples behind `latencies`: for `itl_s` one for each gap, else one for each request."""
    requests = list(requests)
    gaps = [np.diff(r.metrics.token_times_s) for r in requests if r.metrics.num_output_tokens > 1]
    return {
        "queue_s": _known(r.metrics.queue_s for r in requests),
        "ttft_s": _known(r.metrics.ttft_s for r in requests),
        "itl_s": np.concatenate(gaps) if gaps else np.empty(0),
        "tpot_s": np.array([each.mean() for each in gaps]),
        "e2e_s": _known(r.metrics.e2e_s for r in requests if r.finish_reason in FINISHED),
    }


def attainment_by(run: ServingRun, ttfts_s: ArrayLike, tpot_s: float) -> Floats:
    """Share of all requests that meet each TTFT limit, and this TPOT limit: a goodput curve.

    Times requests over `run.duration_s` it is the goodput. Returns one value for each limit.
    """
    in_pace = [r for r in run.requests if r.meets(SLO(np.inf, tpot_s))]
    met = np.sort(_known(r.metrics.ttft_s for r in in_pace))
    counts = np.searchsorted(met, np.asarray(ttfts_s, dtype=float), side="right")
    return counts / max(1, len(run.requests))


def over_time(run: ServingRun, num_bins: int = 100) -> OverTime:
    """Means over each of `num_bins` equal spans of the run, for charts.

    Raises:
        ValueError: `num_bins` is no number from 1 to `MOST_BINS`.
    """
    require_int("num_bins", num_bins, 1, MOST_BINS)
    edges_s = np.linspace(0, run.duration_s, num_bins + 1)
    signals = _Signals.of(run)
    times = list(chain.from_iterable(r.metrics.token_times_s for r in run.requests))
    tokens = np.histogram(times, edges_s)[0] if run.duration_s else np.zeros(num_bins)
    return OverTime(
        edges_s=edges_s,
        queue_depth=signals.queue.means(edges_s),
        batch_size=signals.batch.means(edges_s),
        kv_occupancy=signals.blocks.means(edges_s) / run.num_blocks,
        output_tokens_per_s=_per(tokens, np.diff(edges_s)),
    )


def _num_good(requests: Iterable[ServedRequest], slo: SLO) -> int:
    return sum(request.meets(slo) for request in requests)


def _known(values: Iterable[float | None]) -> Floats:
    return np.array([value for value in values if value is not None], dtype=float)


def _shares(steps: Sequence[StepSpan]) -> dict[str, StepShare]:
    shares = {}
    for mix in MIXES:
        same = [step for step in steps if step.mix == mix]
        shares[mix] = StepShare(sum(s.num_steps for s in same), sum(s.wall_s for s in same))
    return shares


# --- levels over time ----------------------------------------------------------------------------


class _Signal(NamedTuple):
    """A level that changes at `times` and is constant between them; 0 before and after."""

    times: Floats
    levels: Floats

    @classmethod
    def of(cls, starts: ArrayLike, ends: ArrayLike, heights: ArrayLike = 1.0) -> _Signal:
        """The sum of intervals, each of its height from its start to its end."""
        starts, ends = np.asarray(starts, dtype=float), np.asarray(ends, dtype=float)
        heights = np.broadcast_to(np.asarray(heights, dtype=float), starts.shape)
        times, places = np.unique(np.concatenate((starts, ends)), return_inverse=True)
        changes = np.bincount(places, np.concatenate((heights, -heights)), minlength=len(times))
        return cls(times, np.cumsum(changes))

    def means(self, edges: Floats) -> Floats:
        """Mean level between neighbouring edges."""
        if not self.times.size:
            return np.zeros(len(edges) - 1)
        areas = np.concatenate(([0.0], np.cumsum(self.levels[:-1] * np.diff(self.times))))
        return _per(np.diff(np.interp(edges, self.times, areas)), np.diff(edges))

    def over(self, duration_s: float, whole: float = 1.0) -> Level:
        """Mean and maximum from 0 to `duration_s`, as parts of `whole`."""
        [mean] = self.means(np.array([0.0, duration_s]))
        return Level(float(mean) / whole, float(self.levels.max(initial=0.0)) / whole)


class _Signals(NamedTuple):
    queue: _Signal
    batch: _Signal
    tokens: _Signal
    running: _Signal
    blocks: _Signal

    @classmethod
    def of(cls, run: ServingRun) -> _Signals:
        steps = run.steps
        starts = np.array([step.start_s for step in steps])
        ends = np.array([step.end_s for step in steps])
        next_starts = np.append(starts[1:], run.duration_s)[: len(steps)]
        ends = np.minimum(ends, next_starts)  # rounding must not make two steps overlap
        held = np.where(_busy_after(run.requests, ends, next_starts), next_starts, ends)
        return cls(
            queue=_Signal.of(*_waits(run)),
            batch=_Signal.of(starts, ends, [len(s.decodes) + len(s.prompts) for s in steps]),
            tokens=_Signal.of(starts, ends, [step.num_tokens for step in steps]),
            running=_Signal.of(starts, held, [step.num_running for step in steps]),
            blocks=_Signal.of(starts, held, [step.num_used_blocks for step in steps]),
        )


def _busy_after(
    requests: Iterable[ServedRequest], ends: Floats, next_starts: Floats
) -> NDArray[np.bool_]:
    """Whether a request that began before the next step was still unfinished at a step's end."""
    begun = [r for r in requests if r.metrics.first_scheduled_s is not None]
    begun_s = np.sort([r.metrics.first_scheduled_s for r in begun])
    over_s = np.sort([_last_s(r) for r in begun if r.finish_reason is not None])
    num_begun = np.searchsorted(begun_s, next_starts, side="left")
    return num_begun > np.searchsorted(over_s, ends, side="right")


def _last_s(request: ServedRequest) -> float:
    """The last that is known of an ended request."""
    metrics = request.metrics
    assert metrics.first_scheduled_s is not None
    return max([metrics.first_scheduled_s, *metrics.token_times_s[-1:]])


def _waits(run: ServingRun) -> tuple[list[float], list[float]]:
    """When each wait began and ended. When someone gave up waiting is not known: left out."""
    waits = list(_waits_of_preempted(run))
    for request in run.requests:
        metrics = request.metrics
        if metrics.first_scheduled_s is not None:
            waits.append((metrics.arrival_s, metrics.first_scheduled_s))
        elif request.finish_reason is None:
            waits.append((metrics.arrival_s, max(metrics.arrival_s, run.duration_s)))
    return [start for start, _ in waits], [end for _, end in waits]


def _waits_of_preempted(run: ServingRun) -> Iterable[tuple[float, float]]:
    """From the step that a sequence had to make room for to its next one."""
    out: dict[str, float] = {}
    for step in run.steps:
        for name in [n for n in out if n in step.prompts or n in step.decodes]:
            yield out.pop(name), step.start_s
        out |= dict.fromkeys(step.preempted, step.start_s)
    aborted = {r.request_id for r in run.requests if r.finish_reason is not None}
    for name in out.keys() - aborted:
        yield out[name], run.duration_s


def _per(amounts: ArrayLike, lengths: Floats) -> Floats:
    """Quotients; 0 where the length is 0."""
    return np.divide(amounts, lengths, out=np.zeros(len(lengths)), where=lengths > 0)
