"""Pictures of a cluster's run for the PDLab: plain data of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pdlab.disagg.ratio import measured_over_predicted
from pdlab.disagg.serving import ClusterRun, WorkerRun
from pdlab.workbench.gantt_data import gantt_data
from pdlab.workbench.pd_lab_machines import Device
from pdlab.workbench.pd_lab_waits import missed, stages_of, who_waits
from pdlab.workbench.policy_lab_data import compared as compared_runs
from pdlab.workload.report import MIXES, latency_samples
from pdlab.workload.serving import SLO, ServingRun, StepSpan
from pdlab.workload.traces import TraceRequest

FIRST_REQUESTS = 24
"""Requests that have come when the timeline's beginning ends."""
MOST_STEPS = 240
"""Bars of one lane; shorter ones are drawn with their neighbours."""
MOST_ARROWS = 160
FINEST = 1 / 900
"""Between two bars of a kind, as part of the time shown: shorter pauses are not drawn."""


def shown_until_s(requests: Sequence[TraceRequest]) -> float | None:
    """The end of the timeline's beginning, the same for all modes; None if all come at once."""
    return requests[min(FIRST_REQUESTS, len(requests)) - 1].arrival_s or None


def end_of(run: ClusterRun) -> float:
    """When the last step of any worker ends."""
    return max((step.end_s for w in run.workers.values() for step in w.steps), default=0.0)


def picture_of(
    run: ClusterRun, mode: str, name: str, slo: SLO, until_s: float | None = None
) -> dict[str, Any]:
    """Everything that is drawn of a run.

    Args:
        name: of the column or row.
        until_s: where the timeline ends; None for the end of the run.
    """
    until_s = end_of(run) if until_s is None else until_s
    lanes = [_lane(name, worker, run, until_s) for name, worker in run.workers.items()]
    stages = stages_of(run)
    return {
        "name": name,
        "numbers": numbers_of(run, slo),
        "lanes": lanes,
        "arrows": _arrows(run, until_s),
        "end_s": round(until_s, 6),
        "stages": {key: round(value, 6) for key, value in stages.items()},
        "words": who_waits(mode, stages, lanes, missed(run, slo)),
        "num_refused": sum(bool(r.error) for r in run.requests),
        "error": next((r.error for r in run.requests if r.error), ""),
    }


def numbers_of(run: ClusterRun, slo: SLO) -> dict[str, Any]:
    """By key; latencies as their 50th, 90th and 99th percentile. None where nothing was measured.

    `goodput` is requests a second and device within both limits, at the rate that there is.
    """
    samples, duration_s = latency_samples(run.requests), end_of(run) - run.serving.start_s
    met = sum(request.meets(slo) for request in run.requests)
    tokens = sum(request.metrics.num_output_tokens for request in run.requests)
    num_bytes = sum(transfer.num_bytes for transfer in run.transfers)
    return {
        **{name: _percentiles(samples[f"{name}_s"]) for name in ("ttft", "tpot", "itl")},
        "met": met,
        "attainment": met / len(run.requests),
        "goodput": met / duration_s / len(run.workers) if duration_s else 0.0,
        "throughput": tokens / duration_s if duration_s else 0.0,
        "kv_bytes": num_bytes,
        "num_transfers": len(run.transfers),
        "duration": duration_s,
    }


def _percentiles(samples: Any) -> list[float] | None:
    return [float(each) for each in np.percentile(samples, (50, 90, 99))] if len(samples) else None


# --- the timeline --------------------------------------------------------------------------------


def _lane(name: str, worker: WorkerRun, run: ClusterRun, until_s: float) -> dict[str, Any]:
    busy_s, duration_s = sum(step.wall_s for step in worker.steps), end_of(run)
    return {
        "name": name,
        "role": worker.role,
        "busy": round(busy_s / duration_s, 4) if duration_s else 0.0,
        "bars": _bars([s for s in worker.steps if s.start_s < until_s], until_s),
    }


def _bars(steps: list[StepSpan], until_s: float) -> list[list[float]]:
    """Number of the mix, start, end. Neighbours of a kind are one."""
    if not steps:
        return []
    alone = ServingRun("simulated", "", {}, [], steps, 1)
    packed = gantt_data(alone, max_rows=1, max_segments=MOST_STEPS, facts={})["steps"]
    found: list[list[float]] = []
    for step in packed:
        start_s, end_s = step["at"]
        if found and found[-1][0] == step["mix"] and start_s - found[-1][2] < FINEST * until_s:
            found[-1][2] = round(end_s, 5)
        else:
            found.append([step["mix"], round(start_s, 5), round(end_s, 5)])
    return found


def _arrows(run: ClusterRun, until_s: float) -> list[list[float]]:
    """Numbers of the two lanes, when the first of K and V left, and when all were there."""
    lanes = {name: i for i, name in enumerate(run.workers)}
    seen = [t for t in run.transfers if t.num_bytes and t.start_s < until_s]
    seen = sorted(seen, key=lambda t: -t.num_bytes)[:MOST_ARROWS]
    return [
        [lanes[t.source], lanes[t.target], round(t.start_s, 5), round(t.ready_s, 5)]
        for t in seen
        if t.source in lanes and t.target in lanes
    ]


# --- for real ------------------------------------------------------------------------------------


def compared(measured: ClusterRun, simulated: ClusterRun, slo: SLO) -> list[dict[str, Any]]:
    """A row for each number: what the processes did, and what the simulation says."""
    moved = [sum(t.num_bytes for t in run.transfers) for run in (measured, simulated)]
    bytes_moved = {
        "key": "kv_bytes",
        "label": "K and V moved",
        "unit": "B",
        "measured": moved[0],
        "simulated": moved[1],
    }
    return [*compared_runs(_by_end(measured), _by_end(simulated), slo), bytes_moved]


def _by_end(run: ClusterRun) -> ServingRun:
    """As one run that is over with the last step to end, which need not be the last to begin."""
    serving = run.serving
    return replace(serving, steps=sorted(serving.steps, key=lambda step: step.end_s))


def slower_by(run: ClusterRun, device: Device) -> dict[str, float]:
    """By role: how many times as long as simulated the steps of a real run took."""
    times = device.machine.step_times
    return {
        role: round(measured_over_predicted(list(_steps_of(run, role)), run.requests, times), 3)
        for role in dict.fromkeys(worker.role for worker in run.workers.values())
    }


def _steps_of(run: ClusterRun, role: str) -> Iterator[StepSpan]:
    for worker in run.workers.values():
        if worker.role == role:
            yield from worker.steps


MIX_NAMES = list(MIXES)
"""What the numbers of the bars mean."""
