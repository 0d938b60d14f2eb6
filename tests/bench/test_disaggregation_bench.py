"""What `pdlab bench disaggregation` measures, on a tiny model with workers in this process."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

import pdlab
from pdlab.bench import disaggregation as bench
from pdlab.bench.cluster_agreement import ClusterAgreement, measure_cluster_agreement
from pdlab.cli.bench_disaggregation import _report
from pdlab.disagg import replay_on_cluster
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.host import LocalHost
from pdlab.disagg.hosts.spec import TransportSpec, make_worker
from pdlab.disagg.transport.in_process import Switchboard
from pdlab.link import Link
from pdlab.workload import TraceRequest

CONFIG = replace(bench.ENGINE, num_blocks=128, max_model_len=256)


@pytest.fixture(scope="module")
def model():
    return pdlab.load("random:tiny-llama")


def start(model, specs, router=None, *, seed=None):
    """The workers of these specs, in this process."""
    board = Switchboard()
    hosts = []
    for spec in specs:
        here = replace(spec, transport=TransportSpec("in-process", link=spec.transport.link))
        hosts.append((LocalHost(make_worker(here, model=model, board=board)), spec.role))
    return Cluster(model, hosts, router, seed=seed)


def test_every_plan_serves_every_workload(model, monkeypatch):
    few = {
        "interrupted chats": lambda: [TraceRequest(0.0, 8, 20), TraceRequest(0.01, 40, 2)],
        "many answers": lambda: [TraceRequest(0.0, 4, 18) for _ in range(3)],
    }
    monkeypatch.setattr(bench, "WORKLOADS", few)
    found = bench.measure_plans(model, repeats=2, config=CONFIG, start=start)
    assert {(each.plan, each.workload) for each in found} == {
        (plan, workload) for plan in bench.plans("any") for workload in few
    }
    for each in found:
        for middle, low, high in (each.itl_p50_s, each.itl_p99_s, each.ttft_p50_s):
            assert 0 < low <= middle <= high
        assert each.itl_p50_s[0] <= each.itl_p99_s[0]


def test_a_slow_link_makes_a_whole_prompt_wait_and_bytes_are_the_formula(model):
    link = Link(bandwidth_bytes_s=1e6, name="slow")
    found = bench.measure_overlap(
        model, link=link, num_tokens=100, repeats=2, config=CONFIG, start=start
    )
    assert found.num_bytes == 100 * model.config.kv_bytes_per_token(4)
    assert found.link_s == pytest.approx(found.num_bytes / 1e6)
    assert found.push_wait_s[1] >= found.link_s  # the link holds it back at least so long
    assert found.stream_wait_s[1] > 0
    assert found.hidden == pytest.approx(1 - found.stream_wait_s[0] / found.push_wait_s[0])


def test_unknown_names_are_refused(model):
    with pytest.raises(ValueError, match="plan='three engines'"):
        bench.measure_plans(model, names=["three engines"])
    with pytest.raises(ValueError, match="workload='none'"):
        bench.measure_plans(model, workloads=["none"])


PLAN = bench.PlanFigures("one engine", "many answers", *[(0.1, 0.05, 0.2)] * 4)
OVERLAP = bench.Overlap("1GbE", 512, 10_000_000, 0.1, (0.2, 0.2, 0.2), (0.05, 0.0, 0.1))
AGREEMENT = ClusterAgreement(
    "mixed",
    4,
    1.0,
    [{"ttft_s": 1.0, "tpot_s": 0.1}, {"ttft_s": 3.0, "tpot_s": 0.3}],
    {"ttft_s": 2.2, "tpot_s": 0.1},
    0.001,
    {"p0": 0.1},
)
FOUND = bench.DisaggregationBench("m", {"processor": "p"}, 2, [PLAN], [OVERLAP], [AGREEMENT])


def test_what_was_measured_is_kept(tmp_path):
    FOUND.save(tmp_path / "found.json")
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept["overlaps"][0]["link"] == "1GbE"
    assert kept["agreements"][0]["simulated"]["ttft_s"] == 2.2
    assert OVERLAP.hidden == pytest.approx(0.75)


def test_agreement_is_with_the_median_of_the_turns():
    assert AGREEMENT.spread("ttft_s") == (2.0, 1.0, 3.0)
    assert AGREEMENT.ratio("ttft_s") == pytest.approx(1.1)
    assert not AGREEMENT.agrees, "the pace is half of what was measured"


def test_the_report_says_what_is_measured_and_what_simulated():
    console = Console(record=True, width=100)
    for part in _report(FOUND):
        console.print(part)
    text = console.export_text()
    for said in (
        "many answers, measured",
        "100 ms",
        "50.0 ms–200 ms",
        "10.0 MB, over 1GbE, simulated: 100 ms by its bandwidth",
        "so layer by layer hides 75% of it",
        "mixed, TTFT",
    ):
        assert said in text, text
    assert [line.split()[-1] for line in text.splitlines() if "mixed, T" in line] == ["yes", "no"]


def test_the_simulated_cluster_serves_what_the_real_one_does(model, monkeypatch):
    monkeypatch.setattr("pdlab.bench.cluster_agreement.HASTE", 50.0)
    found = measure_cluster_agreement(
        model, workload="short chat", num_requests=4, repeats=1, rate=40.0,
        config=replace(bench.ENGINE, max_model_len=512), start=start,
    )  # fmt: skip
    assert found.num_requests == 4
    assert len(found.measured) == 1
    assert all(value > 0 for value in [*found.measured[0].values(), *found.simulated.values()])
    assert found.ratio("ttft_s") == pytest.approx(
        found.simulated["ttft_s"] / found.measured[0]["ttft_s"]
    )


@pytest.fixture
def served(monkeypatch):
    """Every run that the bench makes."""
    runs = []

    def replay(*args, **kwargs):
        runs.append(replay_on_cluster(*args, **kwargs))
        return runs[-1]

    for module in ("cluster_agreement", "disaggregation"):
        monkeypatch.setattr(f"pdlab.bench.{module}.replay_on_cluster", replay)
    return runs


def num_cached(runs) -> set[int]:
    return {r.metrics.num_cached_tokens for run in runs for r in run.requests}


def test_no_run_finds_prompts_of_its_rehearsal_in_the_cache(model, served, monkeypatch):
    monkeypatch.setattr("pdlab.bench.cluster_agreement.HASTE", 50.0)
    measure_cluster_agreement(
        model, workload="short chat", num_requests=4, repeats=2, rate=40.0,
        config=replace(bench.ENGINE, max_model_len=512), start=start,
    )  # fmt: skip
    assert len(served) == 4
    assert num_cached(served) == {0}


def test_no_workload_finds_prompts_of_another_in_the_cache(model, served, monkeypatch):
    several = [TraceRequest(0.0, 40, 17)] * 3
    monkeypatch.setattr(bench, "WORKLOADS", {"a": lambda: several, "b": lambda: several})
    bench.measure_plans(
        model, names=["disaggregated"], workloads=["a", "b"], repeats=2, start=start,
        config=replace(bench.ENGINE, max_model_len=512),
    )  # fmt: skip
    assert len(served) == 4
    assert num_cached(served) == {0}
