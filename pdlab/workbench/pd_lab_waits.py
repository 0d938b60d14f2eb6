"""Who waits for whom in a cluster, and how long: a request's time in parts, and in a sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pdlab.disagg.serving import ClusterRun
from pdlab.workbench.pd_lab_settings import CHUNKED, DISAGGREGATED
from pdlab.workbench.transfer_data import request_of
from pdlab.workload.serving import SLO, ServedRequest, StepSpan

STAGES = (
    ("queue", "prompt waits", "waiting"),
    ("prefill", "prompt is computed", "prefill"),
    ("handover", "output waits for K and V", "transfer"),
    ("beside", "output, beside prompts", "beside"),
    ("decode", "output", "decode"),
)
"""Parts of a request's time: key, label, colour; `beside` is striped."""
BUSY = 0.9
"""Part of the time from which on a worker is called so."""
FEW = 0.02
"""Part of the requests below which nothing is called short."""


def stages_of(run: ClusterRun) -> dict[str, float]:
    """Mean seconds of a finished request in each of `STAGES`."""
    ready_s = {request_of(t.request_id): t.ready_s for t in run.transfers}
    of_worker = _prompt_clocks(run)
    parts = [
        part
        for request in run.requests
        if (part := _parts(request, ready_s, of_worker)) is not None
    ]
    means = np.mean(parts, axis=0) if parts else np.zeros(len(STAGES))
    return {key: float(mean) for (key, _, _), mean in zip(STAGES, means, strict=True)}


def _parts(
    request: ServedRequest, ready_s: dict[str, float], clocks: dict[str, _PromptClock]
) -> list[float] | None:
    metrics = request.metrics
    if metrics.first_scheduled_s is None or not metrics.token_times_s or request.error:
        return None
    first_s, last_s = metrics.token_times_s[0], metrics.token_times_s[-1]
    begin_s = min(max(first_s, ready_s.get(request.request_id, first_s)), last_s)
    clock = clocks.get(request.request_id)
    beside_s = clock.between(begin_s, last_s) if clock else 0.0
    return [
        metrics.first_scheduled_s - metrics.arrival_s,
        first_s - metrics.first_scheduled_s,
        begin_s - first_s,
        beside_s,
        last_s - begin_s - beside_s,
    ]


class _PromptClock:
    """Seconds that one worker has spent in steps that compute prompts, up to any moment."""

    def __init__(self, steps: Sequence[StepSpan]) -> None:
        spans = [(step.start_s, step.end_s) for step in steps if step.prompts]
        self._times_s = [time_s for span in spans for time_s in span]
        lengths = [length for start_s, end_s in spans for length in (0.0, end_s - start_s)]
        self._spent_s = np.cumsum(lengths)

    def between(self, start_s: float, end_s: float) -> float:
        if not self._times_s:
            return 0.0
        before, after = np.interp([start_s, end_s], self._times_s, self._spent_s)
        return float(after - before)


def _prompt_clocks(run: ClusterRun) -> dict[str, _PromptClock]:
    """By request: of the worker that makes its output."""
    found = {}
    for worker in run.workers.values():
        clock = _PromptClock(worker.steps)
        names = {name for step in worker.steps for name in step.decodes}
        found |= {request_of(name): clock for name in names}
    return found


def missed(run: ClusterRun, slo: SLO) -> tuple[float, float]:
    """Shares of the requests that miss the limit on TTFT, and that on TPOT."""
    count = len(run.requests)
    late = sum((m := r.metrics.ttft_s) is None or m > slo.ttft_s for r in run.requests)
    slow = sum((r.metrics.tpot_s or 0.0) > slo.tpot_s for r in run.requests)
    return late / count, slow / count


def who_waits(
    mode: str,
    stages: Mapping[str, float],
    lanes: Sequence[Mapping[str, Any]],
    misses: tuple[float, float],
) -> str:
    """Who waits for whom, how long on average, and what comes of it, in three sentences."""
    late, slow = misses
    of = f"{late:.0%} miss the TTFT limit, {slow:.0%} that on TPOT"
    queue, beside = seconds(stages["queue"]), seconds(stages["beside"])
    if mode != DISAGGREGATED:
        does = "share their steps with prompts" if mode == CHUNKED else "stand still for prompts"
        busy = _mean_busy(lanes, "both")
        return f"Prompts wait {queue} for workers {busy:.0%} busy; outputs {does} {beside}. {of}."
    busy, handover = _mean_busy(lanes, "prefill"), seconds(stages["handover"])
    text = f"Prompts wait {queue} for P, {busy:.0%} busy; outputs {handover} for K and V. {of}"
    if max(late, slow) < FEW:
        return f"{text}."
    if slow > late:
        return f"{text}: D is what is short."
    return f"{text}: {'P' if busy > BUSY else 'room on D'} is what is short."


def _mean_busy(lanes: Sequence[Mapping[str, Any]], role: str) -> float:
    busy = [lane["busy"] for lane in lanes if lane["role"] == role]
    return sum(busy) / len(busy) if busy else 0.0


def seconds(value: float) -> str:
    """Three digits, in s, ms or µs."""
    for least, scale, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms")):
        if value >= least:
            return f"{value * scale:.3g} {unit}"
    return f"{value * 1e6:.3g} µs" if value > 1e-7 else "0 s"
