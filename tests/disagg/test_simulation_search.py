"""Goodput by search, the win map, and when a slow decoder pays."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pdlab import EngineConfig
from pdlab.costmodel import LinearStepTimes
from pdlab.disagg.simulated import search as searches
from pdlab.disagg.simulated.break_even import Latencies, break_even, exposed_s
from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.disagg.simulated.search import (
    Candidate,
    Machine,
    at_rate,
    attainment,
    candidates,
    counted,
    search,
    simulate_at,
)
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.disagg.simulated.win_map import attainments, p99_gap_s, win_map
from pdlab.engine import RequestMetrics
from pdlab.link import Link
from pdlab.workload.serving import SLO
from pdlab.workload.traces import TraceRequest

TIMES = LinearStepTimes("made up", 0.01, 0.0, 0.0, 0.001, 0.0, 0.0005, 0.0, 0.0)
SLOW = LinearStepTimes("slow", 0.03, 0.0, 0.0, 0.02, 0.0, 0.001, 0.0, 0.0)
CONFIG = EngineConfig(num_blocks=400, max_num_seqs=32, max_num_batched_tokens=256)
ONE = Machine("one", SimulatedSpec("both", CONFIG, TIMES, kv_bytes_per_token=64, num_layers=4))
TWO = Machine("two", replace(ONE.spec, num_devices=2))
REQUESTS = [TraceRequest(i * 0.05, 60 + i * 7 % 50, 10 + i % 11) for i in range(60)]
goodput_per_device = partial(searches.goodput_per_device, least_s=0.0)
"""Of the sixty requests alone: it is about how the rate is found, not about which it is."""
PAIR = Candidate("disaggregated", ONE, 1, ONE, 1)


# --- one candidate -------------------------------------------------------------------------------


def test_the_same_requests_at_another_rate():
    faster = at_rate(REQUESTS, 40.0)
    assert faster[-1].arrival_s == pytest.approx(59 / 40)
    assert [r.num_prompt_tokens for r in faster] == [r.num_prompt_tokens for r in REQUESTS]


def test_they_come_again_where_they_would_be_over_too_soon():
    requests = [replace(r, prefix_ids=(0, 5), prefix_block_size=64) for r in REQUESTS[:3]]
    longer = at_rate(requests, 2.0, least_s=3.5)
    assert [r.arrival_s for r in longer] == pytest.approx([0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
    assert [r.num_prompt_tokens for r in longer[3:6]] == [r.num_prompt_tokens for r in requests]
    assert [r.prefix_ids for r in longer[::3]] == [(0, 5), (6, 11), (12, 17)]


def test_a_short_run_hides_a_queue_that_grows():
    """Half again what one can bear: sixty are through before it shows."""
    alone = Candidate("prefill first", ONE)
    slo = SLO(2.0, 1.0)
    short = attainment(simulate_at(alone, REQUESTS, 15.0), slo)
    assert attainment(simulate_at(alone, REQUESTS, 15.0, least_s=40.0), slo) < 0.5 < 0.9 < short


def test_goodput_is_where_attainment_falls():
    slo = SLO(0.3, 0.03)
    found = goodput_per_device(PAIR, REQUESTS, slo)
    assert found.attainment == attainment(simulate_at(PAIR, REQUESTS, found.rate_rps), slo) >= 0.9
    assert attainment(simulate_at(PAIR, REQUESTS, 1.05 * found.rate_rps), slo) < 0.9
    assert found.per_device_rps == found.rate_rps / 2
    assert found.num_runs < 20


def test_where_it_begins_makes_no_difference():
    rates = [
        goodput_per_device(PAIR, REQUESTS, SLO(0.3, 0.03), start_rps=start).rate_rps
        for start in (0.5, 30.0, 500.0)
    ]
    assert rates == pytest.approx([rates[0]] * 3, rel=0.05)


def test_what_cannot_be_met_has_no_goodput():
    found = goodput_per_device(PAIR, REQUESTS, SLO(0.05, 1.0))
    assert (found.rate_rps, found.per_device_rps, found.attainment) == (0, 0, 0)


def test_devices_are_counted():
    assert Candidate("disaggregated", TWO, 2, ONE, 3).num_devices == 7
    half = goodput_per_device(Candidate("chunked", TWO), REQUESTS, SLO(0.3, 0.03))
    whole = goodput_per_device(Candidate("chunked", ONE), REQUESTS, SLO(0.3, 0.03))
    assert half.per_device_rps == pytest.approx(whole.per_device_rps / 2, rel=0.03)


def test_modes_are_knobs_of_the_engines():
    [first] = Candidate("prefill first", ONE).workers.values()
    assert first.config.batching == "prefill_first"
    [chunked] = Candidate("chunked", ONE, chunk_size=64).workers.values()
    assert (chunked.config.batching, chunked.config.max_num_batched_tokens) == ("mixed", 64)
    pool = Candidate("disaggregated", ONE, 1, TWO, 2, chunk_size=32).workers
    assert [(name, each.role) for name, each in pool.items()] == [
        ("p0", "prefill"),
        ("d0", "decode"),
        ("d1", "decode"),
    ]
    assert pool["p0"].config.chunk_size == 32


# --- many ----------------------------------------------------------------------------------------


def test_every_cluster_of_so_many_devices():
    found = [str(each) for each in candidates([ONE, TWO], 4, chunk_sizes=(64, 128))]
    assert found[:3] == [
        "4 x one, prefill first",
        "4 x one, chunked, chunks of 64",
        "4 x one, chunked, chunks of 128",
    ]
    assert [each for each in found if "P" in each] == [
        "1P3D of one, stream",
        "2P2D of one, stream",
        "3P1D of one, stream",
        "2P1D of one and two, stream",
        "1P2D of two and one, stream",
        "1P1D of two, stream",
    ]
    assert all(each.num_devices == 4 for each in candidates([ONE, TWO], 4))


def test_every_way_of_a_transfer_is_tried():
    found = candidates([ONE], 3, transfers=("stream", "push"), modes=["disaggregated"])
    names = [str(each) for each in found]
    assert names == [
        f"{ratio} of one, {how}" for how in ("stream", "push") for ratio in ("1P2D", "2P1D")
    ]


def test_the_best_comes_first_and_all_are_told():
    told = []
    found = search(
        candidates([ONE], 3),
        REQUESTS,
        SLO(0.3, 0.02),
        on_result=lambda done, of, newest: told.append((done, of, newest)),
        num_bisections=2,
        least_s=0.0,
    )
    assert [(done, of) for done, of, _ in told] == [(i, 4) for i in range(1, 5)]
    assert {newest.candidate for _, _, newest in told} == {each.candidate for each in found}
    rates = [each.per_device_rps for each in found]
    assert rates == sorted(rates, reverse=True)


def test_published_machines_are_known_by_name():
    machine = Machine.published("2xa100-opt-13b", enable_prefix_cache=False)
    spec = machine.spec
    assert (spec.num_devices, spec.num_layers, spec.kv_bytes_per_token) == (2, 40, 819_200)
    assert not spec.config.enable_prefix_cache
    assert Machine.published("a100-opt-13b-vllm").spec.num_devices == 1
    assert Machine.published("4xa100-llama2-70b").spec.kv_bytes_per_token == 320 * 1024


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Candidate("both", ONE), "mode='both'"),
        (lambda: Candidate("chunked", ONE, num_decode=1), "num_decode=1"),
        (lambda: Candidate("disaggregated", ONE), "num_decode=0"),
        (lambda: at_rate(REQUESTS[:1], 1.0), "requests has 1"),
        (lambda: at_rate([REQUESTS[0]] * 2, 1.0), "one moment"),
        (lambda: at_rate(REQUESTS, 0.0), "rate_rps=0"),
        (lambda: search([], REQUESTS, SLO(1, 1)), "tried has no candidate"),
        (lambda: list(candidates([ONE], 0)), "num_devices=0"),
        (lambda: list(candidates([ONE], 1, modes=["x"])), "mode='x'"),
        (lambda: win_map([PAIR], REQUESTS, [], [1], [1]), "ttfts_s is empty"),
        (lambda: win_map([PAIR], REQUESTS, [1], [1], []), "rates_rps is empty"),
    ],
)
def test_what_makes_no_sense_is_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()


# --- the win map ---------------------------------------------------------------------------------


def test_one_run_tells_of_all_pairs():
    run = simulate_at(PAIR, REQUESTS, 10.0)
    ttfts_s, tpots_s = [0.05, 0.1, 0.2, 1.0], [0.012, 0.02, 1.0]
    expected = [[attainment(run, SLO(ttft, tpot)) for ttft in ttfts_s] for tpot in tpots_s]
    by_mean, by_gap = attainments(run, ttfts_s, tpots_s)
    assert by_mean == pytest.approx(np.array(expected))
    assert len(set(np.array(expected).ravel())) > 4
    assert (by_gap <= by_mean).all(), "with so few gaps the p99 is the longest"
    assert by_gap.sum() < by_mean.sum()


def test_a_stall_hides_in_the_mean_and_not_in_the_p99_gap():
    steady = RequestMetrics(0.0, token_times_s=[0.01 * i for i in range(101)])
    assert p99_gap_s(steady) == pytest.approx(0.01)
    once = RequestMetrics(
        0.0, token_times_s=[t + (i > 50) for i, t in enumerate(steady.token_times_s)]
    )
    assert p99_gap_s(once) == pytest.approx(0.01), "1 of 100 gaps is free"
    twice = RequestMetrics(
        0.0, token_times_s=[t + (i > 70) for i, t in enumerate(once.token_times_s)]
    )
    assert p99_gap_s(twice) == pytest.approx(1.01)
    assert twice.tpot_s == pytest.approx(0.03)
    short = RequestMetrics(0.0, token_times_s=[0.0, 0.01, 0.5])
    assert p99_gap_s(short) == pytest.approx(0.49)
    assert p99_gap_s(RequestMetrics(0.0, token_times_s=[1.0])) == 0


def test_what_comes_while_the_queue_is_still_empty_does_not_count():
    run = simulate_at(Candidate("prefill first", ONE), REQUESTS, 15.0, least_s=40.0)
    last_s = run.requests[-1].metrics.arrival_s
    assert counted(run) == [r for r in run.requests if r.metrics.arrival_s >= 0.2 * last_s]
    assert attainment(run, SLO(2.0, 1.0)) < np.mean([r.meets(SLO(2.0, 1.0)) for r in run.requests])


def test_the_map_agrees_with_the_search():
    tried = list(candidates([ONE], 3, chunk_sizes=(64,)))
    ttfts_s, tpots_s = [0.15, 0.4], [0.013, 0.03]
    rates_rps = [2 * 1.25**i for i in range(10)]
    runs = []

    def num_needed(candidate: Candidate) -> int:
        """Rates up to the first that misses the widest limits."""
        for number, rate_rps in enumerate(rates_rps, 1):
            run = simulate_at(candidate, REQUESTS, rate_rps * 3)
            if attainment(run, SLO(0.4, 0.03)) < 0.9:
                return number
        return len(rates_rps)

    found = win_map(
        tried,
        REQUESTS,
        ttfts_s,
        tpots_s,
        rates_rps,
        least_s=0.0,
        on_run=lambda *told: runs.append(told),
    )
    assert runs[-1][:2] == (40, 40)
    assert [(told[2], told[3]) for told in runs] == [
        (each, rate) for each in tried for rate in rates_rps[: num_needed(each)]
    ]
    assert found.num_runs == len(runs) < 40, "where the widest limits are missed, all are"
    assert found.goodput.shape == (3, 2, 2)
    assert found.modes == ["prefill first", "chunked", "disaggregated"]
    for i, candidate in enumerate(tried):
        rate = goodput_per_device(candidate, REQUESTS, SLO(0.4, 0.03)).per_device_rps
        assert found.by_candidate[i, 1, 1] == pytest.approx(min(rate, rates_rps[-1]), rel=0.15)
    assert (np.diff(found.goodput, axis=1) >= 0).all(), "a wider limit never costs goodput"
    assert (np.diff(found.goodput, axis=2) >= 0).all()
    best = found.best("disaggregated", 1, 1)
    assert best.mode == "disaggregated"
    assert str(found).count("*") == (found.winner >= 0).sum()


def test_pace_by_the_p99_gap_is_another_map():
    found = win_map(
        [PAIR, Candidate("prefill first", ONE, 2)], REQUESTS, [1.0], [0.02], [2, 8], least_s=8.0
    )
    by_gap = found.by("itl")
    assert (by_gap.goodput <= found.goodput).all()
    assert by_gap.goodput[1, 0, 0] < found.goodput[1, 0, 0], "prompts make outputs wait"
    assert "ITL" in str(by_gap)
    with pytest.raises(ValueError, match="pace='mean'"):
        found.by("mean")


def test_processes_find_the_same():
    tried = list(candidates([ONE], 2, chunk_sizes=(64,)))
    how = {"requests": REQUESTS[:20], "ttfts_s": [0.2], "tpots_s": [0.02], "rates_rps": [2, 8, 32]}
    alone = win_map(tried, **how, least_s=0.0)
    told = []
    beside = win_map(tried, **how, least_s=0.0, num_processes=2, on_run=lambda *x: told.append(x))
    assert (beside.by_pace == alone.by_pace).all()
    assert (beside.num_runs, told[-1][:2]) == (alone.num_runs, (9, 9))


def test_what_is_told_can_end_it():
    def stop(*_told: object) -> None:
        raise KeyError("enough")

    tried = [PAIR] * 3
    with pytest.raises(KeyError, match="enough"):
        win_map(tried, REQUESTS[:20], [1], [1], [1, 2], least_s=0.0, num_processes=2, on_run=stop)


# --- break-even ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_bytes", [64, 4096])
@pytest.mark.parametrize("bandwidth", [1e4, 1e5, 1e6, 1e9])
def test_the_closed_form_is_what_the_simulator_does(kv_bytes, bandwidth):
    shape = {"num_prompt_tokens": 100, "num_output_tokens": 20, "num_layers": 8}
    found = break_even(
        TIMES,
        SLOW,
        **shape,
        kv_bytes_per_token=[kv_bytes],
        bandwidths_bytes_s=[bandwidth],
        latency_s=0.01,
    )
    config = EngineConfig(num_blocks=20, max_num_batched_tokens=132, preemption="recompute")
    link = Link(bandwidth, 0.01)
    fast = SimulatedSpec("prefill", config, TIMES, kv_bytes, num_layers=8, link=link)
    workers = {"fast": fast, "slow": replace(fast, role="decode", step_times=SLOW)}
    [request] = simulate_cluster([TraceRequest(0.0, 100, 20)], workers).requests
    metrics = request.metrics
    [point] = found.points
    simulated = Latencies(metrics.ttft_s, metrics.tpot_s, metrics.e2e_s)
    assert vars(simulated) == pytest.approx(vars(point.split))


def test_from_the_least_bandwidth_on_the_split_is_sooner_done():
    shape = {"num_prompt_tokens": 400, "num_output_tokens": 20, "num_layers": 8}
    kinds = [100, 1000, 100_000]

    def at(bandwidths: list[float]):
        return break_even(
            TIMES, SLOW, **shape, kv_bytes_per_token=kinds, bandwidths_bytes_s=bandwidths
        )

    least = at([1.0]).least_bandwidth_bytes_s
    assert least[1000] == pytest.approx(10 * least[100])
    for num_bytes, bandwidth in least.items():
        found = at([bandwidth * 0.99, bandwidth * 1.01])
        below, above = [p for p in found.points if p.kv_bytes_per_token == num_bytes]
        assert below.split.e2e_s > found.slow.e2e_s > above.split.e2e_s
        assert above.split.ttft_s == found.fast.ttft_s


def test_a_fast_machine_that_is_not_faster_never_pays():
    found = break_even(
        SLOW,
        TIMES,
        num_prompt_tokens=10,
        num_output_tokens=5,
        num_layers=2,
        kv_bytes_per_token=[8],
        bandwidths_bytes_s=[1e9],
    )
    assert found.least_bandwidth_bytes_s == {8: float("inf")}
    assert found.least_price < 1


def test_layers_hide_behind_the_prefill():
    assert exposed_s(1.0, 10, 1000, Link(1e4)) == pytest.approx(0.01), "one layer is left"
    assert exposed_s(1.0, 10, 1000, Link(100)) == pytest.approx(0.1 + 10 - 1)
