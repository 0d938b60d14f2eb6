"""A served workload in numbers: latencies, rates, goodput, and how full the engine was.

Percentiles interpolate linearly between neighbours in the sorted samples (numpy's default; type 7
of Hyndman and Fan 1996).

Each latency is of those requests that got so far: whoever was refused, or aborted before, is in no
percentile, so that beside many of them good percentiles say little. Attainment counts all.

Rates and means over time run from the first arrival to the end of the last step; see
`pdlab.workload.levels`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from pdlab.requirements import require_int
from pdlab.workload.levels import Floats, Level, Signals, per, span_of_run
from pdlab.workload.serving import SLO, ServedRequest, ServingRun, StepSpan

FINISHED = ("stop", "length")
MIXES = ("prefill", "decode", "mixed")
MOST_BINS = 10_000


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
    num_aborted_waiting: int
    """Of the aborted: before any step computed a token of theirs. No latency knows them, nor does
    `queue_depth`."""
    duration_s: float
    """From the first arrival to the end of the last step."""
    queue_s: Distribution
    """Arrival to the first step that computed any of its tokens; of those that got there."""
    ttft_s: Distribution
    """Of those that have a token, whether or not they finished."""
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
    """Without those aborted while waiting."""
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
    requests, span_s = run.requests, span_of_run(run)
    duration_s = span_s[1] - span_s[0]
    metrics = [r.metrics for r in requests]
    begun = [m for m in metrics if m.token_times_s]
    finished = [r for r in requests if r.finish_reason in FINISHED]
    aborted = [r.metrics for r in requests if r.finish_reason == "abort"]
    good = None if slo is None else _num_good(requests, slo.checked())
    signals = Signals.of(run)
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
        num_aborted=len(aborted),
        num_aborted_waiting=sum(m.first_scheduled_s is None for m in aborted),
        duration_s=duration_s,
        **latencies(requests),
        requests_per_s=rate(len(finished)),
        output_tokens_per_s=rate(num_output_tokens),
        prompt_tokens_per_s=rate(num_prompt_tokens),
        goodput_per_s=None if good is None else rate(good),
        attainment=None if good is None or not requests else good / len(requests),
        queue_depth=signals.queue.over(span_s),
        batch_size=signals.batch.over(span_s),
        running=signals.running.over(span_s),
        step_tokens=signals.tokens.over(span_s),
        kv_occupancy=signals.blocks.over(span_s, run.num_blocks),
        steps=_shares(run.steps),
        idle_s=max(0.0, duration_s - _stepping_s(run.steps, span_s[0])),
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

    The spans begin at the first arrival, `run.start_s`.

    Raises:
        ValueError: `num_bins` is no number from 1 to `MOST_BINS`.
    """
    require_int("num_bins", num_bins, 1, MOST_BINS)
    edges_s = np.linspace(*span_of_run(run), num_bins + 1)
    signals = Signals.of(run)
    times = list(chain.from_iterable(r.metrics.token_times_s for r in run.requests))
    tokens = np.histogram(times, edges_s)[0] if run.duration_s else np.zeros(num_bins)
    return OverTime(
        edges_s=edges_s,
        queue_depth=signals.queue.means(edges_s),
        batch_size=signals.batch.means(edges_s),
        kv_occupancy=signals.blocks.means(edges_s) / run.num_blocks,
        output_tokens_per_s=per(tokens, np.diff(edges_s)),
    )


def _num_good(requests: Iterable[ServedRequest], slo: SLO) -> int:
    return sum(request.meets(slo) for request in requests)


def _known(values: Iterable[float | None]) -> Floats:
    return np.array([value for value in values if value is not None], dtype=float)


def _stepping_s(steps: Iterable[StepSpan], start_s: float) -> float:
    """Time in steps since `start_s`; others may have used the engine before the first arrival."""
    return sum(min(step.wall_s, max(0.0, step.end_s - start_s)) for step in steps)


def _shares(steps: Sequence[StepSpan]) -> dict[str, StepShare]:
    shares = {}
    for mix in MIXES:
        same = [step for step in steps if step.mix == mix]
        shares[mix] = StepShare(sum(s.num_steps for s in same), sum(s.wall_s for s in same))
    return shares
