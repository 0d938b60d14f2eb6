"""What a run becomes as JSON and as Prometheus text, read back by a strict parser."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from pdlab.engine import EngineConfig
from pdlab.workload.export import BUCKETS_S, NUM_BINS, SCHEMA, to_json, to_prometheus
from pdlab.workload.report import latency_samples, summarize
from pdlab.workload.serving import SLO, ServingRun
from tests.workload.test_report import request, span

RUN = ServingRun(
    "measured",
    'a "fast" machine \\ with\ntwo lines',
    EngineConfig().to_dict(),
    [
        request("a", 0, 0, (0.5, 0.525, 0.6), num_cached_tokens=3),
        request("b", 0.1, 0.5, (0.7,), reason="stop", num_preemptions=2),
        request("c", 0.2, reason="error"),
        request("d", 0.3, 0.6, (), reason="abort"),
    ],
    [
        span(0, 0.5, prompts={"a": 5}, blocks=2),
        span(0.5, 0.1, "a", {"b": 8}, running=2, blocks=4),
        span(0.6, 0.1, "b", {"d": 1}, running=2, blocks=4),
    ],
    num_blocks=8,
)


class Sample(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"'
LINE = re.compile(rf"({NAME})(?:\{{((?:{LABEL})(?:,{LABEL})*)\}})? (\S+)")
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def parse(text: str) -> tuple[dict[str, str], list[Sample]]:
    """Types by family, and all samples, of Prometheus text 0.0.4.

    Refuses what the format forbids: a family in two places or without HELP and TYPE, a sample of no
    family, a sample twice, an unescaped label, a line without an end.
    """
    assert text.endswith("\n")
    types: dict[str, str] = {}
    samples: list[Sample] = []
    family = helped = ""
    for line in text[:-1].split("\n"):
        if found := re.fullmatch(rf"# HELP ({NAME}) (.+)", line):
            helped = found[1]
            assert helped not in types, f"{helped} twice"
        elif found := re.fullmatch(rf"# TYPE ({NAME}) (counter|gauge|histogram)", line):
            family = found[1]
            assert family == helped
            types[family] = found[2]
        else:
            found = LINE.fullmatch(line)
            assert found, line
            assert found[1] in [family + suffix for suffix in SUFFIXES[types[family]]]
            pairs = re.findall(LABEL, found[2] or "")
            labels = {k: re.sub(r"\\.", lambda m: ESCAPES[m[0]], v) for k, v in pairs}
            assert len(labels) == len(pairs)
            samples.append(Sample(found[1], labels, float(found[7])))
    keys = [(s.name, *sorted(s.labels.items())) for s in samples]
    assert len(set(keys)) == len(keys)
    return types, samples


def prometheus(run: ServingRun = RUN, slo: SLO | None = None) -> list[Sample]:
    return parse(to_prometheus(run, summarize(run, slo), model_name="tiny"))[1]


def values(samples: list[Sample], name: str, label: str | None = None) -> dict[str | None, float]:
    """Values of all samples of a name, by one of its labels."""
    return {s.labels.get(label or ""): s.value for s in samples if s.name == f"pdlab_{name}"}


def test_every_histogram_counts_its_samples() -> None:
    samples = prometheus()
    names = {
        "queue_s": "request_queue_time_seconds",
        "ttft_s": "time_to_first_token_seconds",
        "itl_s": "inter_token_latency_seconds",
        "tpot_s": "request_time_per_output_token_seconds",
        "e2e_s": "e2e_request_latency_seconds",
    }
    for key, latencies in latency_samples(RUN.requests).items():
        name = names[key]
        buckets = values(samples, f"{name}_bucket", "le")
        assert list(buckets)[-1] == "+Inf"
        assert [float(le or "") for le in buckets] == [*BUCKETS_S, float("inf")]
        for le, count in buckets.items():
            assert count == np.sum(latencies <= float(le or "")), (key, le)
        assert values(samples, f"{name}_count") == {None: len(latencies)}
        assert values(samples, f"{name}_sum")[None] == pytest.approx(latencies.sum())


def test_a_sample_at_the_end_of_a_bucket_is_in_it() -> None:
    run = replace(RUN, requests=[request("a", 0, 0, (0.5,))])
    buckets = values(prometheus(run), "time_to_first_token_seconds_bucket", "le")
    assert (buckets["0.4"], buckets["0.5"]) == (0, 1)


def test_counters_and_gauges() -> None:
    samples = prometheus(slo=SLO(0.5, 0.06))
    ended = values(samples, "request_success_total", "finished_reason")
    assert ended == {"stop": 1, "length": 1, "abort": 1, "error": 1}
    assert values(samples, "prompt_tokens_total") == {None: 16}
    assert values(samples, "generation_tokens_total") == {None: 4}
    assert values(samples, "prefix_cache_hits_total") == {None: 3}
    assert values(samples, "num_preemptions_total") == {None: 2}
    assert values(samples, "steps_total", "mix") == {"prefill": 1, "decode": 0, "mixed": 2}
    assert values(samples, "kv_cache_usage_perc", "over_time")["max"] == 0.5
    assert values(samples, "num_requests_running", "over_time")["max"] == 2
    assert values(samples, "slo_attainment_ratio", "tpot_s") == {"0.06": 0.25}
    assert not values(prometheus(), "slo_attainment_ratio")


def test_every_line_says_what_it_rests_on_and_survives_escaping() -> None:
    for sample in prometheus():
        assert sample.labels["provenance"] == "measured"
        assert sample.labels["basis"] == RUN.basis
        assert sample.labels["model_name"] == "tiny"
    simulated = replace(RUN, provenance="simulated")
    assert {s.labels["provenance"] for s in prometheus(simulated)} == {"simulated"}


def test_a_run_without_samples_has_whole_histograms() -> None:
    empty = replace(RUN, requests=[request("c", 0, reason="error")], steps=[])
    types, samples = parse(to_prometheus(empty, summarize(empty)))
    assert types["pdlab_time_to_first_token_seconds"] == "histogram"
    assert values(samples, "time_to_first_token_seconds_count") == {None: 0}
    assert not any("model_name" in sample.labels for sample in samples)


def test_json_holds_the_summary_and_every_request() -> None:
    summary = summarize(RUN, SLO(0.5, 0.06))
    raw = json.loads(to_json(RUN, summary))
    assert list(raw) == [
        *("schema", "provenance", "basis", "interrupted", "config", "summary", "over_time"),
        "requests",
    ]
    assert raw["interrupted"] is False
    assert (raw["schema"], raw["provenance"]) == (SCHEMA, "measured")
    assert raw["basis"] == RUN.basis
    assert raw["summary"] == summary.to_dict()
    assert raw["config"]["max_num_seqs"] == EngineConfig().max_num_seqs
    assert len(raw["over_time"]["edges_s"]) == NUM_BINS + 1
    assert len(raw["over_time"]["kv_occupancy"]) == NUM_BINS
    first, _, refused, _ = raw["requests"]
    assert first["token_times_s"] == [0.5, 0.525, 0.6]
    assert (first["ttft_s"], first["num_cached_tokens"]) == (0.5, 3)
    assert (refused["finish_reason"], refused["error"]) == ("error", "too long")
    assert refused["ttft_s"] is None
