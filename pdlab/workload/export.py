"""A served workload for other programs: as JSON, and as Prometheus text.

JSON, schema `pdlab.serving/1`, times in seconds since the workload began (rates and `over_time`
start at the first arrival):

    schema       "pdlab.serving/1"
    provenance   "measured" or "simulated"
    basis        what the times rest on
    interrupted  whether it was ended before all had come and finished
    config       the engine's knobs
    summary      `Summary.to_dict`
    over_time    `edges_s`, and for each span between two: `queue_depth`, `batch_size`,
                 `kv_occupancy`, `output_tokens_per_s`
    requests     for each: `request_id`, `priority`, `finish_reason`, `error`, `arrival_s`,
                 `first_scheduled_s`, `token_times_s`, and what `RequestMetrics.to_dict` has,
                 but for `itl_s`, the differences of `token_times_s`

Prometheus text follows version 0.0.4 of the exposition format. Its names are those that vLLM's
server exports, with our prefix, so that a dashboard needs little change. One difference: a server's
gauges tell the present; a run that is over has none, so ours tell its mean and maximum.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pdlab.workload.levels import Floats, Level
from pdlab.workload.report import Summary, latency_samples, over_time
from pdlab.workload.serving import ServedRequest, ServingRun

SCHEMA = "pdlab.serving/1"
NUM_BINS = 100
PREFIX = "pdlab_"
REASONS = ("stop", "length", "abort", "error")
BUCKETS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
"""Upper ends of the buckets of every latency, in seconds; vLLM's, and finer below 10 ms."""
HISTOGRAMS = {
    "queue_s": ("request_queue_time_seconds", "From arrival to the first step with the request."),
    "ttft_s": ("time_to_first_token_seconds", "From arrival to the first token."),
    "itl_s": ("inter_token_latency_seconds", "Between two tokens of a request."),
    "tpot_s": (
        "request_time_per_output_token_seconds",
        "Mean time between tokens of each request with two or more.",
    ),
    "e2e_s": ("e2e_request_latency_seconds", "From arrival to the last token, of the finished."),
}

Labels = Mapping[str, str]
Sample = tuple[str, Labels, float]
"""The suffix of its name, the labels that are its own, and its value."""


def to_json(run: ServingRun, summary: Summary, *, interrupted: bool = False) -> str:
    """The run as JSON text, see the module."""
    bins = over_time(run, NUM_BINS)._asdict()
    document = {
        "schema": SCHEMA,
        "provenance": run.provenance,
        "basis": run.basis,
        "interrupted": interrupted,
        "config": run.config,
        "summary": summary.to_dict(),
        "over_time": {name: values.tolist() for name, values in bins.items()},
        "requests": [_request(request) for request in run.requests],
    }
    return json.dumps(document, allow_nan=False, ensure_ascii=False) + "\n"


def _request(request: ServedRequest) -> dict[str, Any]:
    metrics = request.metrics
    figures = metrics.to_dict()
    del figures["itl_s"]
    return {
        "request_id": request.request_id,
        "priority": request.priority,
        "finish_reason": request.finish_reason,
        "error": request.error,
        "arrival_s": metrics.arrival_s,
        "first_scheduled_s": metrics.first_scheduled_s,
        "token_times_s": metrics.token_times_s,
    } | figures


def to_prometheus(
    run: ServingRun,
    summary: Summary,
    *,
    model_name: str | None = None,
    interrupted: bool = False,
) -> str:
    """The run as Prometheus text; every line says whether it was measured or simulated, on what.

    Args:
        model_name: a label more, as vLLM has it.
        interrupted: whether it was ended before all had come and finished.
    """
    labels = {"provenance": run.provenance, "basis": run.basis}
    if model_name is not None:
        labels = {"model_name": model_name} | labels
    families = [*_histograms(run), *_counters(run, summary), *_gauges(summary, interrupted)]
    return "".join(line for family in families for line in family.lines(labels))


# --- families ------------------------------------------------------------------------------------


class _Family(NamedTuple):
    """All samples of one name."""

    name: str
    kind: str
    help: str
    samples: Sequence[Sample]

    def lines(self, labels: Labels) -> Iterator[str]:
        name = PREFIX + self.name
        yield f"# HELP {name} {_escaped(self.help)}\n"
        yield f"# TYPE {name} {self.kind}\n"
        for suffix, own, value in self.samples:
            pairs = (f'{k}="{_quoted(v)}"' for k, v in {**labels, **own}.items())
            yield f"{name}{suffix}{{{','.join(pairs)}}} {_number(value)}\n"


def _histograms(run: ServingRun) -> Iterable[_Family]:
    for key, samples in latency_samples(run.requests).items():
        name, meaning = HISTOGRAMS[key]
        yield _Family(name, "histogram", meaning, [*_buckets(samples)])


def _buckets(samples: Floats) -> Iterator[Sample]:
    """Counts of the samples up to each bucket's end, that included; then their sum and number."""
    counts = np.searchsorted(np.sort(samples), BUCKETS_S, side="right")
    for end_s, count in zip(BUCKETS_S, counts.tolist(), strict=True):
        yield "_bucket", {"le": _number(end_s)}, count
    yield "_bucket", {"le": "+Inf"}, len(samples)
    yield "_sum", {}, float(samples.sum())
    yield "_count", {}, len(samples)


def _counters(run: ServingRun, summary: Summary) -> Iterable[_Family]:
    def total(name: str, meaning: str, value: float) -> _Family:
        return _Family(name, "counter", meaning, [("", {}, value)])

    ended = [request.finish_reason for request in run.requests]
    by_reason = [("", {"finished_reason": r}, float(ended.count(r))) for r in REASONS]
    yield _Family("request_success_total", "counter", "Requests by how they ended.", by_reason)
    yield total("prompt_tokens_total", "Prompt tokens, cached ones too.", summary.num_prompt_tokens)
    yield total("generation_tokens_total", "Tokens generated.", summary.num_output_tokens)
    cached = summary.num_cached_tokens
    yield total("prefix_cache_hits_total", "Prompt tokens that were in the prefix cache.", cached)
    yield total(
        "num_preemptions_total", "Sequences that lost their blocks.", summary.num_preemptions
    )
    steps = summary.steps.items()
    numbers = [("", {"mix": mix}, share.num_steps) for mix, share in steps]
    seconds = [("", {"mix": mix}, share.wall_s) for mix, share in steps]
    yield _Family("steps_total", "counter", "Steps of the engine, by what they held.", numbers)
    yield _Family("step_seconds_total", "counter", "Time in these steps.", seconds)


def _gauges(summary: Summary, interrupted: bool) -> Iterable[_Family]:
    def level(name: str, meaning: str, value: Level) -> _Family:
        samples = [("", {"over_time": kind}, part) for kind, part in value._asdict().items()]
        return _Family(name, "gauge", f"{meaning}: mean over time, and maximum.", samples)

    yield level("num_requests_running", "Requests admitted", summary.running)
    yield level(
        "num_requests_waiting",
        "Requests in the queue, without those aborted there",
        summary.queue_depth,
    )
    yield level("kv_cache_usage_perc", "Used part of the KV blocks, 0 to 1", summary.kv_occupancy)
    yield level("batch_size", "Sequences computed in a step", summary.batch_size)
    yield _Family(
        "run_duration_seconds",
        "gauge",
        "From the first arrival to the end of the last step.",
        [("", {}, summary.duration_s)],
    )
    yield _Family(
        "run_interrupted",
        "gauge",
        "1 where the run was ended before all had come and finished.",
        [("", {}, float(interrupted))],
    )
    if summary.slo is None or summary.goodput_per_s is None or summary.attainment is None:
        return
    slo = {name: _number(limit) for name, limit in summary.slo._asdict().items()}
    yield _Family(
        "goodput_requests_per_second",
        "gauge",
        "Finished requests a second that meet the TTFT and the TPOT limit.",
        [("", slo, summary.goodput_per_s)],
    )
    yield _Family(
        "slo_attainment_ratio",
        "gauge",
        "Part of all requests that meet both limits.",
        [("", slo, summary.attainment)],
    )


# --- text ----------------------------------------------------------------------------------------


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', '\\"')


def _number(value: float) -> str:
    """As Go reads it: whole numbers without a point, others with as many digits as tell them."""
    return str(int(value)) if value == int(value) else repr(float(value))
