"""The lives of requests as spans of time, and the steps below them: the data of the Gantt chart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pdlab.requirements import require_int, shown
from pdlab.workbench.latency_data import provenance_line
from pdlab.workload.levels import span_of_run
from pdlab.workload.report import MIXES, summarize
from pdlab.workload.serving import SLO, ServedRequest, ServingRun, StepSpan

Kind = Literal["waiting", "prefill", "decode", "stalled", "preempted"]
KINDS: tuple[Kind, ...] = ("waiting", "prefill", "decode", "stalled", "preempted")
MAX_RUNS = 8
"""Runs that one widget holds."""
MAX_ROWS = 80
"""Requests that one chart shows at once."""
MAX_SEGMENTS = 4000
"""Spans, and steps, that one widget sends to the browser, over all its runs."""
MAX_HELD = 4
"""Prompts that are named for one step; of the others only the number."""
FINEST = 1 / 4000
"""The shortest span that is drawn alone once there are too many, as part of the time shown."""


class Span(NamedTuple):
    """What one request did, or why it did nothing, for a while."""

    kind: Kind
    start_s: float
    end_s: float
    tokens: int = 0
    """Prompt tokens computed, or tokens decoded."""

    @property
    def wall_s(self) -> float:
        return self.end_s - self.start_s


def lives(run: ServingRun, requests: Iterable[ServedRequest] = ()) -> dict[str, list[Span]]:
    """Spans of these requests, or of all, in order of time, read off the steps.

    `waiting` lasts from the arrival to the first step that runs it, `preempted` until it runs
    again. `stalled`: it holds its KV and steps of others pass without it. Between two steps that
    both run it there is nothing but the engine's own work, and no span. Whoever is neither finished
    nor refused waits until the run ends; of an abort the moment is not known, so the last step is
    the end.
    """
    chosen = list(requests) or run.requests
    found = {r.request_id: _Life(r.metrics.arrival_s) for r in chosen}
    forks = _first_steps(chosen)
    for index, step in enumerate(run.steps):
        for name in found.keys() & step.preempted:
            found[name].lose(step.start_s, index)
        for name in found.keys() & step.prompts:
            found[name].work("prefill", step, index, step.prompts[name])
        for name in found.keys() & step.decodes:
            found[name].work("decode", step, index, step.num_steps)
        for name in forks.get(step.start_s, ()):
            if name not in step.prompts and name not in step.decodes:
                found[name].work("prefill", step, index, 0)  # its sibling computed its prompt
    for request in chosen:
        if request.finish_reason is None and not request.error:
            found[request.request_id].idle(span_of_run(run)[1], len(run.steps))
    return {name: life.spans for name, life in found.items()}


class _Life:
    """The spans of one request so far, and what the time since the last of them is."""

    def __init__(self, arrival_s: float) -> None:
        self.spans: list[Span] = []
        self.until_s = arrival_s
        self.state: Kind = "waiting"
        self.last_index = -1

    def idle(self, now_s: float, index: int) -> None:
        """Book the time until `now_s`, when step `index` begins."""
        only_the_engine = self.state == "stalled" and index == self.last_index + 1
        if now_s > self.until_s and not only_the_engine:
            self.spans.append(Span(self.state, self.until_s, now_s))
        self.until_s = max(self.until_s, now_s)

    def lose(self, now_s: float, index: int) -> None:
        """It is preempted as step `index` begins."""
        self.idle(now_s, index)
        self.state = "preempted"

    def work(self, kind: Kind, step: StepSpan, index: int, tokens: int) -> None:
        self.idle(step.start_s, index)
        self.spans.append(Span(kind, step.start_s, step.end_s, tokens))
        self.until_s, self.state, self.last_index = step.end_s, "stalled", index


def _first_steps(requests: Iterable[ServedRequest]) -> dict[float, list[str]]:
    """Requests by the moment their first step began."""
    found: dict[float, list[str]] = defaultdict(list)
    for request in requests:
        if request.metrics.first_scheduled_s is not None:
            found[request.metrics.first_scheduled_s].append(request.request_id)
    return found


# --- what goes to the browser ---------------------------------------------------------------------


def gantt_data(
    run: ServingRun,
    *,
    name: str = "",
    slo: SLO | None = None,
    first: int = 0,
    max_rows: int = MAX_ROWS,
    max_segments: int = MAX_SEGMENTS,
    facts: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A run as plain data of bounded size: rows of spans, steps, and what the picture says of them.

    Where there is more than fits, short spans are drawn with their neighbours, as what most of
    their time was; `joined_s` says how short, 0 that none was.

    Args:
        first: number of the request in the topmost row, in order of arrival.
        max_segments: spans at most, and as many steps.
        facts: those of `run_facts` that are known already.

    Raises:
        ValueError: a number is out of its range, or the limits in `slo` are.
    """
    require_int("first", first, 0)
    require_int("max_rows", max_rows, 1)
    if max_rows > MAX_ROWS:
        raise ValueError(f"max_rows={max_rows} must be at most {MAX_ROWS}")
    require_int("max_segments", max_segments, max_rows)
    requests = run.requests[first : first + max_rows]
    all_spans = lives(run, requests) if requests else {}
    spans = [_joined_decodes(all_spans[r.request_id]) for r in requests]
    start_s = min((r.metrics.arrival_s for r in requests), default=0.0)
    end_s = max((s[-1].end_s for s in spans if s), default=span_of_run(run)[1])
    steps = [s for s in run.steps if s.end_s >= start_s and s.start_s <= end_s]
    spans, joined_s = _thinned(spans, end_s - start_s, max_segments)
    packed_steps, joined_steps_s = _packed_steps(steps, end_s - start_s, max_segments)
    return {
        "name": name,
        "provenance": run.provenance,
        "line": provenance_line(run),
        "batching": str(run.config.get("batching", "")),
        "budget": run.config.get("max_num_batched_tokens"),
        "num_blocks": run.num_blocks,
        "num_requests": len(run.requests),
        "first": first,
        "rows": [_row(r, s, slo) for r, s in zip(requests, spans, strict=True)],
        "steps": packed_steps,
        "most_tokens": max((s.num_tokens for s in steps), default=0),
        "start_s": _micro(start_s),
        "end_s": _micro(end_s),
        "duration_s": _micro(run.duration_s),
        "joined_s": max(joined_s, joined_steps_s),
        "facts": run_facts(run, slo) if facts is None else facts,
    }


def run_facts(run: ServingRun, slo: SLO | None) -> dict[str, Any]:
    """The few numbers that stand above the picture."""
    summary = summarize(run, slo)
    return {
        "finished": summary.num_finished,
        "refused": summary.num_refused,
        "ttft_p50": summary.ttft_s.p50,
        "ttft_p99": summary.ttft_s.p99,
        "tpot_p50": summary.tpot_s.p50,
        "tpot_p99": summary.tpot_s.p99,
        "preemptions": summary.num_preemptions,
        "met": None if slo is None else sum(r.meets(slo) for r in run.requests),
    }


def named_runs(runs: ServingRun | Mapping[str, ServingRun]) -> dict[str, ServingRun]:
    """Runs by name; a single one is named after its way of batching.

    Raises:
        ValueError: there is none, there are too many, or one is no ServingRun.
    """
    if isinstance(runs, ServingRun):
        runs = {str(runs.config.get("batching", "run")): runs}
    if not isinstance(runs, Mapping) or not all(isinstance(r, ServingRun) for r in runs.values()):
        raise ValueError(f"runs={shown(runs)} must be a ServingRun, or a dict of them by name")
    if not 1 <= len(runs) <= MAX_RUNS:
        raise ValueError(f"runs has {len(runs)} runs, it must have from 1 to {MAX_RUNS}")
    return {str(name): run for name, run in runs.items()}


def _row(request: ServedRequest, spans: Sequence[Span], slo: SLO | None) -> dict[str, Any]:
    m = request.metrics
    return {
        "id": request.request_id,
        "arrival_s": _micro(m.arrival_s),
        "spans": [
            [KINDS.index(s.kind), _micro(s.start_s), _micro(s.end_s), s.tokens] for s in spans
        ],
        "end": "refused" if request.error else request.finish_reason or "running",
        "met": None if slo is None else request.meets(slo),
        "priority": request.priority,
        "queue_s": m.queue_s,
        "ttft_s": m.ttft_s,
        "tpot_s": m.tpot_s,
        "e2e_s": m.e2e_s,
        "prompt": m.num_prompt_tokens,
        "cached": m.num_cached_tokens,
        "output": m.num_output_tokens,
        "preemptions": m.num_preemptions,
        "error": request.error,
    }


def _micro(seconds: float) -> float:
    """To the microsecond: more digits would only make a notebook heavy."""
    return round(seconds, 6)


def _joined_decodes(spans: Sequence[Span]) -> list[Span]:
    """Decodes in a row as one span; the steps below tell them apart."""
    found: list[Span] = []
    for span in spans:
        if found and span.kind == found[-1].kind == "decode":
            tokens = found[-1].tokens + span.tokens
            found[-1] = found[-1]._replace(end_s=span.end_s, tokens=tokens)
        else:
            found.append(span)
    return found


def _thinned(rows: list[list[Span]], shown_s: float, most: int) -> tuple[list[list[Span]], float]:
    """Rows with `most` spans at most, and how short a span must be to be drawn with others."""
    least_s = 0.0
    thin = rows
    while sum(map(len, thin)) > most:
        least_s = 2 * least_s or shown_s * FINEST
        thin = [_joined_decodes([_dominant(g) for g in _groups(row, least_s)]) for row in rows]
    return thin, least_s


def _groups(spans: Sequence[Any], least_s: float) -> list[list[Any]]:
    """Neighbours together until each group lasts `least_s`; works for spans and for steps."""
    groups: list[list[Any]] = []
    for span in spans:
        if groups and span.end_s - groups[-1][0].start_s <= least_s:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _dominant(group: Sequence[Span]) -> Span:
    """Several spans as one, of the kind that took most of their time, with its tokens."""
    if len(group) == 1:
        return group[0]
    kind = max(KINDS, key=lambda k: sum(s.wall_s for s in group if s.kind == k))
    tokens = sum(s.tokens for s in group if s.kind == kind)
    return Span(kind, group[0].start_s, group[-1].end_s, tokens)


def _packed_steps(
    steps: Sequence[StepSpan], shown_s: float, most: int
) -> tuple[list[dict[str, Any]], float]:
    """At most `most` entries, and how short steps must be to share one with their neighbours."""
    least_s = 0.0
    groups = [[step] for step in steps]
    while len(groups) > most:
        least_s = 2 * least_s or shown_s * FINEST
        groups = _groups(steps, least_s)
    return [_packed(group) for group in groups], least_s


def _packed(group: Sequence[StepSpan]) -> dict[str, Any]:
    """One or several steps; token counts are means over the steps."""
    count = sum(s.num_steps for s in group)
    held = list(group[0].prompts.items()) if len(group) == 1 else []
    mix = max(MIXES, key=lambda m: sum(s.wall_s for s in group if s.mix == m))
    entry = {
        "at": [_micro(group[0].start_s), _micro(group[-1].end_s)],
        "mix": MIXES.index(mix),
        "prompt": _mean([s.num_prompt_tokens for s in group], group, count),
        "decodes": _mean([len(s.decodes) for s in group], group, count),
        "waiting": group[-1].num_waiting,
        "running": group[-1].num_running,
        "blocks": group[-1].num_used_blocks,
    }
    grows = any(s.num_grown_blocks for s in group)
    optional = {
        "blocks_before": group[0].num_used_blocks - group[0].num_grown_blocks if grows else 0,
        "steps": count if count > 1 else 0,
        "parts": len(group) if len(group) > 1 else 0,
        "held": held[:MAX_HELD],
        "more": max(0, len(held) - MAX_HELD),
        "preempted": [name for s in group for name in s.preempted][:MAX_HELD],
    }
    return entry | {key: value for key, value in optional.items() if value}


def _mean(values: Sequence[int], group: Sequence[StepSpan], count: int) -> float:
    total = sum(v * s.num_steps for v, s in zip(values, group, strict=True))
    return total if count == 1 else round(total / count, 1)
