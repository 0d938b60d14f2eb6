"""The PDLab shows what `simulate_cluster` gives, three ways, and what processes measured."""

import asyncio
import json
import re
from itertools import pairwise

import pytest
import traitlets

import pdlab.workbench.pd_lab_machines as machines
import pdlab.workbench.pd_lab_run as run_module
from pdlab.bench.disaggregation import interrupted_chats
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.processes import ProcessHost
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.disagg.simulated.search import MODES
from pdlab.models import load
from pdlab.workbench import PDLab
from pdlab.workbench.pd_lab_data import MOST_ARROWS, end_of, shown_until_s
from pdlab.workbench.pd_lab_machines import HERE, THERE
from pdlab.workbench.pd_lab_run import real_specs
from pdlab.workbench.pd_lab_settings import AGGREGATED, CHUNKED, DISAGGREGATED
from pdlab.workbench.pd_lab_waits import STAGES, missed, seconds, stages_of, who_waits
from pdlab.workbench.pd_lab_workloads import DESCRIPTIONS, make_requests
from pdlab.workbench.picture import widget_page
from pdlab.workload.report import summarize
from pdlab.workload.serving import SLO
from pdlab.workload.traces import find_trace, read_trace

from .handmade_cluster import story
from .handmade_lab import TIMES, TINY, real_lab, workers_here


@pytest.fixture
def lab() -> PDLab:
    return PDLab(num_requests=40, num_real=5, step_times=TIMES, num_devices=4)


def crowded(lab: PDLab) -> None:
    """So many requests that ways differ."""
    lab.choose(rate_rps=3 * lab.rate_rps)
    assert not lab.message


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[Cluster]:
    return workers_here(monkeypatch)


# --- simulating ----------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", [HERE, THERE])
def test_each_way_shows_what_simulate_cluster_gives(lab: PDLab, machine: str) -> None:
    lab.choose(machine=machine, num_prefill=1, prefill_chunk=128, link="10GbE", transfer="push")
    assert not lab.message
    device, requests = lab._devices[machine], lab.requests
    for mode in MODES:
        plan = lab.settings.plan(mode, device)
        run = simulate_cluster(requests, plan.workers, plan.router)
        assert lab.runs[mode].requests == run.requests
        assert len(plan.workers) == 4


def test_plans_are_those_of_the_search_with_what_the_controls_say(lab: PDLab) -> None:
    lab.choose(num_prefill=3, prefill_chunk=64, decode_chunk=256, local_prefill_tokens=32)
    device = lab._devices[HERE]
    aggregated, chunked, apart = (lab.settings.plan(mode, device) for mode in MODES)
    assert {w.config.batching for w in aggregated.workers.values()} == {"prefill_first"}
    assert {w.config.max_num_batched_tokens for w in chunked.workers.values()} == {256}
    assert aggregated.router.mode == chunked.router.mode == "aggregated"
    assert [w.role for w in apart.workers.values()] == ["prefill"] * 3 + ["decode"]
    assert apart.workers["p0"].config.chunk_size == 64
    assert apart.workers["p0"].config.max_num_batched_tokens == 2048
    assert apart.workers["d0"].config.max_num_batched_tokens == 256
    assert apart.router == RouterConfig(transfer="stream", local_prefill_tokens=32)


@pytest.mark.parametrize("workload", DESCRIPTIONS)
def test_numbers_are_those_of_the_report(lab: PDLab, workload: str) -> None:
    lab.choose(workload=workload)
    for mode, run in lab.runs.items():
        numbers = lab.numbers[mode]
        summary = summarize(run.serving, lab.settings.slo)
        for name in ("ttft", "tpot", "itl"):
            told = getattr(summary, f"{name}_s")
            assert numbers[name] == pytest.approx([told.p50, told.p90, told.p99])
        duration_s = max(step.end_s for step in run.serving.steps) - run.serving.start_s
        assert numbers["goodput"] * 4 * duration_s == pytest.approx(40 * summary.attainment)
        assert numbers["attainment"] == summary.attainment
        tokens = sum(r.num_output_tokens for r in lab.requests)
        assert numbers["throughput"] == pytest.approx(tokens / duration_s)
        assert numbers["kv_bytes"] == sum(t.num_bytes for t in run.transfers)


def test_only_what_is_apart_moves_k_and_v(lab: PDLab) -> None:
    lab.choose(machine=THERE)
    numbers = lab.numbers
    assert numbers[AGGREGATED]["kv_bytes"] == numbers[CHUNKED]["kv_bytes"] == 0
    tokens = sum(r.num_prompt_tokens for r in lab.requests)
    assert numbers[DISAGGREGATED]["kv_bytes"] == 819_200 * tokens
    assert numbers[DISAGGREGATED]["num_transfers"] == 40


def test_a_control_simulates_only_the_ways_that_it_touches(lab: PDLab) -> None:
    def asked(**values) -> int:
        before = lab._simulations.num_made
        lab.choose(**values)
        assert not lab.message
        return lab._simulations.num_made - before

    assert lab._simulations.num_made == 3
    assert asked(num_prefill=1) == 1
    assert asked(prefill_chunk=64) == 1
    assert asked(decode_chunk=512) == 1
    assert asked(local_prefill_tokens=64) == 1
    assert asked(decode_chunk=256) == 2, "also where outputs are made"
    assert asked(ttft_slo_s=0.123) == 0
    assert asked(rate_rps=5.0) == 3
    assert asked(num_prefill=2) == 1
    assert asked(num_prefill=1) == 0, "it was there before"


def test_progress_is_shown_while_ways_are_still_to_come(lab: PDLab) -> None:
    seen = []
    lab.observe(lambda change: seen.append(dict(change["new"])), "progress")
    lab.choose(rate_rps=2.0)
    assert [each.get("done") for each in seen] == [0, 1, 2, None]
    assert [each.get("left") for each in seen[:3]] == [list(MODES), list(MODES[1:]), [MODES[2]]]
    assert lab.progress == {}


def test_each_way_is_there_as_soon_as_it_is_simulated(lab: PDLab) -> None:
    old = lab.results
    kept = []
    lab.observe(
        lambda change: kept.append([m for m in MODES if change["new"][m] == old[m]]), "results"
    )
    lab.choose(rate_rps=2.0)
    assert kept == [[CHUNKED, DISAGGREGATED], [DISAGGREGATED], []]


# --- controls ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_devices", 1, "num_devices=1"),
        ("num_devices", 40, "num_devices=40 must be at most 16"),
        ("num_prefill", 4, "num_prefill=4 must be below num_devices=4"),
        ("prefill_chunk", 0, "prefill_chunk=0"),
        ("decode_chunk", 0, "decode_chunk=0"),
        ("local_prefill_tokens", -1, "local_prefill_tokens=-1"),
        ("transfer", "fax", "stream, push, pull"),
        ("link", "wet string", "1GbE"),
        ("rate_rps", 0.0, "rate_rps=0.0"),
        ("workload", "chats", "is no file and none of short chat"),
        ("seed", -1, "seed=-1"),
        ("machine", "a phone", THERE),
        ("ttft_slo_s", -1.0, "ttft_s=-1.0"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_changes(
    lab: PDLab, name: str, value: object, words: str
) -> None:
    before, shown = lab.settings, lab.results
    with pytest.raises((ValueError, traitlets.TraitError), match=re.escape(words)):
        setattr(lab, name, value)
    lab.choose(**{name: value})
    assert words in lab.message
    assert (lab.settings, lab.results) == (before, shown)
    assert getattr(lab, name) == getattr(before, name)
    lab.choose(seed=1)
    assert lab.message == ""


def test_what_fails_half_way_changes_nothing(lab: PDLab, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, before = lab.results, lab.settings
    simulate = type(before).run

    def run(self, mode, device, num_requests=None):
        if mode == DISAGGREGATED:
            raise ValueError("no luck")
        return simulate(self, mode, device, num_requests)

    monkeypatch.setattr(type(before), "run", run)
    lab.choose(rate_rps=1.0)
    assert lab.message == "no luck"
    assert (lab.results, lab.settings, lab.progress) == (shown, before, {})


def test_an_unknown_setting_is_refused(lab: PDLab) -> None:
    lab.choose(ratio=4)
    assert "ratio is not one of num_devices" in lab.message
    with pytest.raises(ValueError, match="num_blocks is not one of"):
        PDLab(step_times=TIMES, num_blocks=3)


def test_more_devices_are_as_busy_and_as_divided(lab: PDLab) -> None:
    rate = lab.rate_rps
    lab.num_devices = 8
    assert lab.rate_rps == pytest.approx(2 * rate, rel=0.05)
    assert lab.settings.ratio == "4P4D"
    lab.choose(num_devices=2)
    assert lab.settings.ratio == "1P1D"
    assert not lab.message


def test_another_machine_has_its_own_limits_and_chunks(lab: PDLab) -> None:
    here = lab.settings
    lab.machine = THERE
    assert lab.settings.slo != here.slo
    assert lab.decode_chunk in lab.header["decode_chunks"][THERE]
    assert "published for OPT-13B" in lab.about["provenance"]
    lab.machine = HERE
    assert lab.settings.slo == here.slo


def test_the_advice_of_the_cost_model_can_be_taken(lab: PDLab) -> None:
    lab.choose(workload="long documents", num_devices=8, num_prefill=1)
    assert lab.about["advice"] > 1
    lab.take_advice()
    assert lab.num_prefill == lab.about["advice"]
    assert f"cost model: {lab.settings.ratio}" in lab.about["advice_words"]


def test_without_a_model_only_the_published_machine_is_there() -> None:
    lab = PDLab(num_requests=20)
    assert lab.header["machines"] == [THERE]
    lab.run_for_real()
    assert "there is no model" in lab.message


def test_step_times_are_those_of_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(model, config, *, progress):
        asked.append((machines.torch.get_num_threads(), progress))
        return TIMES

    monkeypatch.setattr(machines, "measured_step_times", measured)
    before = machines.torch.get_num_threads()
    lab = PDLab(load(TINY), num_requests=20)
    assert asked == [(1, True)]
    assert machines.torch.get_num_threads() == before
    assert lab.machine == HERE


# --- what is drawn -------------------------------------------------------------------------------


def test_lanes_have_the_steps_of_each_worker(lab: PDLab) -> None:
    crowded(lab)
    lab.view = "whole run"
    for mode, run in lab.runs.items():
        lanes = lab.results[mode]["lanes"]
        assert [lane["name"] for lane in lanes] == list(run.workers)
        for lane in lanes:
            steps = run.workers[lane["name"]].steps
            bars = lane["bars"]
            assert all(a[2] <= b[1] + 1e-4 for a, b in pairwise(bars))
            assert bars[0][1] == pytest.approx(steps[0].start_s, abs=1e-4)
            assert bars[-1][2] == pytest.approx(steps[-1].end_s, abs=1e-4)
            busy_s = sum(step.wall_s for step in steps)
            assert lane["busy"] == pytest.approx(busy_s / end_of(run), abs=1e-3)
            assert lane["busy"] <= 1
            if lane["role"] != "both":
                kinds = {bar[0] for bar in bars}
                assert kinds == ({0} if lane["role"] == "prefill" else {1})


def test_the_beginning_is_the_same_for_all_ways(lab: PDLab) -> None:
    ends = {lab.results[mode]["end_s"] for mode in MODES}
    assert ends == {round(shown_until_s(lab.requests), 6)}
    with pytest.raises(ValueError, match="view='all'"):
        lab.view = "all"
    with pytest.raises(ValueError, match="view='measured' has nothing to show"):
        lab.view = "measured"


def test_arrows_are_the_transfers(lab: PDLab) -> None:
    lab.choose(machine=THERE, link="10GbE")
    lab.view = "whole run"
    picture, run = lab.results[DISAGGREGATED], lab.runs[DISAGGREGATED]
    assert len(picture["arrows"]) == min(MOST_ARROWS, len(run.transfers))
    names = [lane["name"] for lane in picture["lanes"]]
    for source, target, sent_s, ready_s in picture["arrows"]:
        assert names[source].startswith("p")
        assert names[target].startswith("d")
        assert sent_s < ready_s
    assert lab.results[AGGREGATED]["arrows"] == []


def test_parts_of_a_request_add_up_to_its_time(lab: PDLab) -> None:
    crowded(lab)
    for mode, run in lab.runs.items():
        stages = lab.results[mode]["stages"]
        e2e_s = [r.metrics.e2e_s for r in run.requests]
        assert sum(stages.values()) == pytest.approx(sum(e2e_s) / len(e2e_s), rel=1e-3)
        assert list(stages) == [key for key, _, _ in STAGES]
    of = {mode: lab.results[mode]["stages"] for mode in MODES}
    assert of[AGGREGATED]["beside"] > 0 < of[CHUNKED]["beside"]
    assert of[DISAGGREGATED]["beside"] == 0
    assert of[AGGREGATED]["handover"] == 0


def test_an_output_waits_from_its_first_token_until_k_and_v_are_there() -> None:
    """r1 has its first token at 3 s and K and V at 4.5; r0 has no transfer in this story."""
    stages = stages_of(story("push"))
    assert stages["handover"] == pytest.approx(1.5 / 2)


def test_a_slow_link_makes_outputs_wait(lab: PDLab) -> None:
    waits = {}
    for link in ("NVLink4", "1GbE"):
        lab.choose(machine=THERE, link=link)
        waits[link] = lab.results[DISAGGREGATED]["stages"]["handover"]
    assert waits["NVLink4"] < 0.1 * waits["1GbE"]


def test_who_waits_is_said_and_what_is_short() -> None:
    stages = {"queue": 1.25, "prefill": 0.1, "handover": 0.004, "beside": 0.3, "decode": 2.0}
    lanes = [{"role": "prefill", "busy": 0.98}, {"role": "decode", "busy": 1.0}]
    words = who_waits(DISAGGREGATED, stages, lanes, (0.3, 0.1))
    assert "Prompts wait 1.25 s for P, 98% busy; outputs 4 ms for K and V" in words
    assert "30% miss the TTFT limit, 10% that on TPOT: P is what is short" in words
    assert "D is what is short" in who_waits(DISAGGREGATED, stages, lanes, (0.1, 0.3))
    assert "short" not in who_waits(DISAGGREGATED, stages, lanes, (0.01, 0.0))
    lanes = [{"role": "prefill", "busy": 0.2}, {"role": "decode", "busy": 1.0}]
    words = who_waits(DISAGGREGATED, stages, lanes, (0.3, 0.1))
    assert "wait 1.25 s for P, 20% busy" in words
    assert "room on D is what is short" in words
    lanes = [{"role": "both", "busy": 0.5}]
    words = who_waits(AGGREGATED, stages, lanes, (0.0, 0.0))
    assert "workers 50% busy; outputs stand still for prompts 300 ms" in words
    words = who_waits(CHUNKED, stages, lanes, (0.0, 0.0))
    assert "share their steps with prompts 300 ms" in words
    assert seconds(0.0) == "0 s"


def test_misses_are_counted_by_limit() -> None:
    run = story("push")
    ttfts = [r.metrics.ttft_s for r in run.requests]
    tpots = [r.metrics.tpot_s for r in run.requests]
    assert missed(run, SLO(max(ttfts), max(tpots))) == (0, 0)
    assert missed(run, SLO(min(ttfts) * 0.9, max(tpots))) == (1, 0)
    assert missed(run, SLO(max(ttfts), min(tpots) * 0.9)) == (0, 1)


# --- workloads -----------------------------------------------------------------------------------


def test_the_bench_s_workload_comes_as_it_is_measured_there() -> None:
    once = interrupted_chats()
    rate = (len(once) - 1) / once[-1].arrival_s
    made = make_requests("a document among chats", 20, rate, 0, 2048)
    assert made[: len(once)] == tuple(once)
    lengths = [(r.num_prompt_tokens, r.num_output_tokens) for r in made]
    assert lengths[9:18] == lengths[:9]
    assert [r.arrival_s for r in made] == sorted(r.arrival_s for r in made)


def test_many_answers_come_at_once_and_again() -> None:
    made = make_requests("many answers", 40, 8.0, 0, 2048)
    assert [r.arrival_s for r in made] == [0.0] * 16 + [2.0] * 16 + [4.0] * 8


@pytest.mark.parametrize("name", ["azure-conv-like", "mooncake-conv-like"])
def test_a_trace_comes_at_the_rate_with_what_fits(name: str, tmp_path) -> None:
    path = find_trace(name)
    copied = tmp_path / f"own{path.suffix}"
    copied.write_bytes(path.read_bytes())
    trace = read_trace(path)
    lab = PDLab(workload=str(copied), num_requests=40, rate_rps=4.0)
    assert lab.workloads[str(copied)] == f"{len(trace):,} requests of the trace {copied.name}"
    assert len(lab.requests) == 40
    assert lab.requests[-1].arrival_s - lab.requests[0].arrival_s == pytest.approx(39 / 4)
    assert all(r.num_tokens <= 2048 for r in lab.requests)
    too_long = sum(r.num_tokens > 2048 for r in trace[:40])
    assert too_long > 0
    assert f"{too_long} prompts of the trace are cut to 2,048 tokens" in lab.about["cut"]
    lab.choose(seed=1)
    outputs = [r.num_output_tokens for r in trace[40:80]]
    assert [r.num_output_tokens for r in lab.requests] == outputs
    lab.choose(workload="mixed")
    assert lab.about["cut"] == ""
    assert str(copied) in lab.workloads


def test_what_is_no_trace_is_said(lab: PDLab, tmp_path) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("a,b\n1,2\n")
    lab.choose(workload=str(wrong))
    assert "unknown format" in lab.message
    assert lab.workload == "mixed"
    assert str(wrong) not in lab.workloads


# --- what goes to the page -----------------------------------------------------------------------


def test_what_goes_to_the_page_is_small_and_plain() -> None:
    lab = PDLab(num_requests=160, step_times=TIMES, num_devices=8, machine=THERE)
    for workload in DESCRIPTIONS:
        for view in ("beginning", "whole run"):
            lab.choose(workload=workload)
            lab.view = view
            assert len(json.dumps(lab.view_state(), allow_nan=False)) < 160_000
    assert "pd-disagg-lab" in widget_page(lab)
    data, _ = lab._repr_mimebundle_()
    assert "requests/s and device" in data["text/html"]
    assert "4P4D" in data["text/plain"]


# --- the page's questions ------------------------------------------------------------------------


def test_every_question_is_answered(lab: PDLab) -> None:
    def ask(number: int, **content) -> None:
        lab._on_message(lab, {"number": number, **content}, [])
        assert lab.answered == number

    ask(1, type="set", values={"num_prefill": 1, "prefill_chunk": 64})
    assert (lab.num_prefill, lab.prefill_chunk) == (1, 64)
    ask(2, type="set", values={"ttft_slo_s": "soon"})
    assert "ttft_s='soon'" in lab.message
    ask(3, type="view", view="whole run")
    ask(4, type="chosen", chosen=CHUNKED)
    assert lab.chosen == CHUNKED
    ask(5, type="advice")
    assert lab.num_prefill == lab.about["advice"]
    ask(6, type="run")
    assert "no model" in lab.message
    ask(7, type="stop")
    lab._on_message(lab, {"type": "views", "change": 1}, [])


# --- for real ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_measured_stands_beside_the_simulation_of_the_same_requests(here, mode: str) -> None:
    lab = real_lab(chosen=mode)
    lab.run_for_real()
    lab.wait(60)
    assert lab.message == ""
    assert (lab.real["state"], lab.real["num"]) == ("done", 4)
    lengths = [r.num_prompt_tokens for r in lab.requests[:4]]
    for run in (lab.measured, lab.simulated):
        assert [r.metrics.num_prompt_tokens for r in run.requests] == lengths
        assert len(run.workers) == 2
    assert (lab.measured.provenance, lab.simulated.provenance) == ("measured", "simulated")
    [entry] = lab.reals
    rows = {row["key"]: row for row in entry["rows"]}
    slo = lab.settings.slo
    assert rows["ttft_p50"]["measured"] == summarize(lab.measured.serving, slo).ttft_s.p50
    assert rows["ttft_p50"]["simulated"] == summarize(lab.simulated.serving, slo).ttft_s.p50
    moved = rows["kv_bytes"]
    assert moved["measured"] == moved["simulated"]
    assert (moved["measured"] > 0) == (mode == DISAGGREGATED)
    assert lab.view == "measured"
    told = [picture["name"] for picture in entry["pictures"]]
    assert told == [f"{entry['name']}, {kind}" for kind in ("measured", "simulated")]
    for picture, run in zip(entry["pictures"], (lab.measured, lab.simulated), strict=True):
        assert picture["numbers"]["ttft"][0] == summarize(run.serving, slo).ttft_s.p50
        assert [lane["name"] for lane in picture["lanes"]] == list(run.workers)
    assert "measured on" in entry["measured"]
    assert "simulated with step times" in entry["simulated"]
    assert rows["duration"]["measured"] == end_of(lab.measured) - lab.measured.serving.start_s
    assert set(entry["slower"]) == ({"both"} if mode != DISAGGREGATED else {"prefill", "decode"})
    assert [cluster._is_closed for cluster in here] == [True]


def test_ways_that_ran_for_real_stand_beside_each_other(here) -> None:
    lab = real_lab()
    for mode in (DISAGGREGATED, AGGREGATED):
        lab.run_for_real(mode)
        lab.wait(60)
    assert [entry["mode"] for entry in lab.reals] == [DISAGGREGATED, AGGREGATED]
    lab.choose(seed=3)
    assert lab.view == "beginning", "a control shows what it does"
    lab.run_for_real(AGGREGATED)
    lab.wait(60)
    assert [entry["mode"] for entry in lab.reals] == [AGGREGATED], "the others were of another seed"


def test_processes_have_the_plan_and_a_thread_each() -> None:
    lab = real_lab(link="1GbE", prefill_chunk=64)
    specs = real_specs(lab.settings.plan(DISAGGREGATED, lab._devices[HERE]), TINY)
    assert [(s.name, s.role, s.num_threads) for s in specs] == [
        ("p0", "prefill", 1),
        ("d0", "decode", 1),
    ]
    assert specs[0].config.chunk_size == 64
    assert specs[0].transport.link.name == "1GbE"
    assert all(s.config.record_trace and s.model == TINY for s in specs)
    specs = real_specs(lab.settings.plan(CHUNKED, lab._devices[HERE]), TINY)
    assert [(s.name, s.role) for s in specs] == [("w0", "both"), ("w1", "both")]


def test_real_processes_serve_and_end() -> None:
    lab = real_lab()
    stages = []
    lab.observe(lambda change: stages.append(change["new"]["stage"]), "real")
    lab.run_for_real()
    lab.wait(120)
    assert lab.real["state"] == "done", lab.real
    assert list(dict.fromkeys(stages))[1:4] == ["starting", "warming up", "serving"]
    assert lab.measured.transfers[0].transport != "in-process"


@pytest.mark.parametrize("stage", ["starting", "serving"])
def test_stopped_processes_are_gone(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ProcessHost] = []
    begin = ProcessHost.__init__

    def noted(self, *args, **options) -> None:
        begin(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(ProcessHost, "__init__", noted)
    lab = real_lab(rate_rps=0.01)  # the first request is minutes away
    lab.observe(lambda change: change["new"]["stage"] == stage and lab.stop(), "real")
    lab.run_for_real()
    lab.wait(120)
    assert lab.real["state"] == "stopped", lab.real
    assert all(host.process.returncode is not None for host in made)
    assert len(made) == 2


def test_it_can_be_stopped_and_begun_again(here) -> None:
    lab = real_lab(rate_rps=0.01)  # the first request is minutes away
    lab.run_for_real()
    assert lab.real["state"] == "running"
    lab.run_for_real()
    assert "under way" in lab.message
    lab.stop()
    lab.wait(60)
    assert lab.real["state"] == "stopped"
    assert lab.reals == []
    lab.choose(rate_rps=40.0)
    lab.run_for_real()
    lab.wait(60)
    assert lab.real["state"] == "done"
    assert all(cluster._is_closed for cluster in here)


def test_with_the_last_view_it_stops(here) -> None:
    lab = real_lab(rate_rps=0.01)
    lab._on_message(lab, {"type": "views", "change": 1}, [])
    lab.run_for_real()
    lab._on_message(lab, {"type": "views", "change": -1}, [])
    lab.wait(60)
    assert lab.real["state"] == "stopped"


def test_what_goes_wrong_for_real_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_args, **_options):
        raise MemoryError("no room for p0")

    monkeypatch.setattr(run_module, "process_cluster", start)
    lab = real_lab()
    lab.run_for_real()
    lab.wait(60)
    assert lab.real["state"] == "failed"
    assert lab.real["error"] == "MemoryError: no room for p0"


def test_the_loop_goes_on_meanwhile(here) -> None:
    async def use() -> tuple[PDLab, int]:
        lab, ticks = real_lab(rate_rps=10.0), 0
        lab.run_for_real()
        while lab.real["state"] == "running" and ticks < 3000:
            await asyncio.sleep(0.02)
            ticks += 1
            if ticks == 2:
                lab.choose(seed=2)
        return lab, ticks

    lab, ticks = asyncio.run(use())
    assert lab.real["state"] == "done"
    assert ticks > 2
    assert lab.reals[0]["beside"] == 3
    assert "seed 0" in lab.reals[0]["line"]


def test_more_workers_than_cores_are_not_run() -> None:
    lab = real_lab()
    lab._num_cores = 2
    lab.choose(num_devices=4)
    lab.run_for_real()
    assert "num_devices=4 is more than the 2 cores" in lab.message
    lab.choose(machine=THERE)
    lab.run_for_real()
    assert "is not here" in lab.message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_requests": 1}, "num_requests=1"),
        ({"num_real": 0}, "num_real=0"),
        ({"model": "mixed"}, "model='mixed' must be a model that"),
        ({"workload": "poems"}, "workload='poems'"),
        ({"slo": SLO(-1, 1)}, "ttft_s=-1"),
        ({"chosen": "all"}, "chosen='all'"),
        ({"machine": "mine"}, "machine='mine'"),
        ({"num_devices": 1}, "num_devices=1"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PDLab(**{"step_times": TIMES, "num_requests": 20} | arguments)
