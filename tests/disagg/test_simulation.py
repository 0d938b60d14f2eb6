"""A cluster in simulated time: the same decisions however it is driven, and times by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab import EngineConfig
from pdlab.disagg.control import RoleController
from pdlab.disagg.router import TRANSFERS, RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.disagg.simulated.spec import PlainWire, SimulatedSpec
from pdlab.link import Link
from pdlab.workload.arrivals import ClosedLoop, OpenLoop
from pdlab.workload.simulation import simulate
from pdlab.workload.traces import TraceRequest
from tests.workload.test_simulation import ONE_S, TIMES, configs, one_by_one, requests

CONFIG = EngineConfig(block_size=4, num_blocks=50, preemption="recompute")
ALONE = RouterConfig(mode="aggregated", max_backlog_tokens=10**9)


def spec(
    role: str = "both", config: EngineConfig = CONFIG, times=ONE_S, **options
) -> SimulatedSpec:
    return SimulatedSpec(
        role, config, times, **{"kv_bytes_per_token": 8, "num_layers": 4} | options
    )


def pair(**options) -> dict[str, SimulatedSpec]:
    return {"p": spec("prefill", **options), "d": spec("decode", **options)}


# --- one engine ----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(requests=requests(), config=configs(), clients=st.sampled_from([None, 1, 3]))
def test_one_worker_alone_is_one_engine(requests, config, clients):
    def arrivals():
        return ClosedLoop(requests, clients, 0.02) if clients else OpenLoop(requests)

    alone = simulate(arrivals(), config, TIMES)
    run = simulate_cluster(arrivals(), {"w": spec(config=config, times=TIMES)}, ALONE)
    assert one_by_one(run.of_worker("w")) == one_by_one(alone)
    for mine, theirs in zip(run.requests, alone.requests, strict=True):
        assert mine.finish_reason == theirs.finish_reason
        if mine.finish_reason == "length":
            assert mine.metrics == theirs.metrics


# --- however it is driven ------------------------------------------------------------------------


def random_run(seed: int, **how) -> ClusterRun:
    """A run that depends on the seed alone."""
    rng = random.Random(seed)

    def worker(role: str) -> SimulatedSpec:
        max_num_seqs = rng.randint(1, 6)
        config = EngineConfig(
            block_size=rng.choice([2, 4]),
            num_blocks=rng.choice([40, 60, 300]),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + rng.choice([0, 5, 60]),
            chunk_size=rng.choice([None, 6]),
            batching=rng.choice(["mixed", "prefill_first", "decode_first"]),
            enable_prefix_cache=rng.random() < 0.8,
            preemption="recompute",
        )
        link = rng.choice([None, Link(rng.choice([1e2, 1e4]), rng.choice([0, 0.01]))])
        costs = rng.choice([0.0, 1e-4]), rng.choice([0.0, 1e-4])
        return spec(
            role, config, TIMES, link=link, pack_s_per_byte=costs[0], unpack_s_per_byte=costs[1]
        )

    roles = ["prefill"] * rng.randint(1, 3) + ["decode"] * rng.randint(1, 3)
    roles += rng.choice([[], ["both"]])
    workers = {f"{role[0]}{i}": worker(role) for i, role in enumerate(roles)}
    stems = [10 * i for i in range(3)]
    coming, now_s = [], 0.0
    for _ in range(rng.randint(2, 25)):
        now_s += rng.choice([0.0, rng.random() * 0.1])
        num_tokens, stem = rng.randint(1, 40), rng.choice(stems)
        ids = tuple(stem + i for i in range(-(-num_tokens // 8)))
        coming.append(TraceRequest(now_s, num_tokens, rng.randint(1, 30), ids, 8))
    router = RouterConfig(
        mode=rng.choice(["disaggregated"] * 4 + ["aggregated"]),
        transfer=rng.choice(TRANSFERS),
        local_prefill_tokens=rng.choice([0, 0, 8]),
        max_backlog_tokens=rng.choice([1, 60, 10_000]),
        on_failure=rng.choice(["recompute", "recompute", "fail"]),
        max_attempts=12,
    )
    kills = [(rng.random() * 2, rng.choice(list(workers))) for _ in range(rng.choice([0, 0, 1, 2]))]
    hop_s = rng.choice([0.0, 0.003])
    return simulate_cluster(coming, workers, router, kills=kills, hop_s=hop_s, **how)


@pytest.mark.parametrize("seed", range(60))
def test_leaps_and_late_news_change_nothing(seed):
    """That all end and that no block leaks, the simulation itself makes sure."""
    run, slow = random_run(seed), random_run(seed, leaps=False, tells_all=True)
    for mine, theirs in zip(run.requests, slow.requests, strict=True):
        assert mine.finish_reason == theirs.finish_reason
        assert mine.metrics.token_times_s == pytest.approx(theirs.metrics.token_times_s)
        assert mine.metrics.num_preemptions == theirs.metrics.num_preemptions
        if mine.finish_reason == "error":
            assert run.failures
    assert [t.request_id for t in run.transfers] == [t.request_id for t in slow.transfers]
    assert [t.num_bytes for t in run.transfers] == [t.num_bytes for t in slow.transfers]
    for mine, theirs in zip(run.failures, slow.failures, strict=True):
        assert mine.request_ids == theirs.request_ids
        assert mine.recovered_s == pytest.approx(theirs.recovered_s)


def test_a_run_is_the_same_again():
    assert random_run(3) == random_run(3)


def test_the_random_runs_hold_what_is_to_be_tested():
    runs = [random_run(seed) for seed in range(60)]
    transfers = [t for run in runs for t in run.transfers]
    failures = [f for run in runs for f in run.failures]
    assert len(transfers) > 100
    assert sum(t.num_cached_tokens > 0 for t in transfers) > 10
    assert sum(len(f.recovered_s) for f in failures) > 20
    assert any(r.metrics.num_preemptions for run in runs for r in run.requests)
    assert any(r.finish_reason == "error" for run in runs for r in run.requests)


# --- by hand -------------------------------------------------------------------------------------


def test_the_last_layer_is_all_that_is_waited_for():
    """A second a step, 4 layers of 8 bytes (4 tokens, 2 bytes each), which leave every 1/4 s."""
    for bandwidth, latency_s, arrived_s in [
        (1e9, 0.0, 1.0),
        (64, 0.0, 1.125),  # 1/8 s a layer: all but the last are hidden
        (16, 0.0, 0.25 + 4 * 0.5),  # 1/2 s a layer: the link is busy from the first one on
        (64, 0.5, 1.625),
    ]:
        workers = pair(link=Link(bandwidth, latency_s))
        run = simulate_cluster([TraceRequest(0, 4, 3)], workers, RouterConfig())
        [transfer] = run.transfers
        assert [p.sent_s for p in transfer.parcels] == pytest.approx([0.25, 0.5, 0.75, 1.0])
        assert transfer.parcels[-1].arrived_s == pytest.approx(arrived_s)
        assert (transfer.num_bytes, transfer.kind) == (32, "stream")
        first_s, second_s, third_s = run.requests[0].metrics.token_times_s
        assert first_s == 1.0
        assert (second_s, third_s) == pytest.approx((transfer.ready_s + 1, transfer.ready_s + 2))
        assert transfer.ready_s == pytest.approx(arrived_s)


@pytest.mark.parametrize("transfer", ["push", "pull"])
def test_a_whole_prompt_leaves_after_its_step(transfer):
    run = simulate_cluster(
        [TraceRequest(0, 4, 3)], pair(link=Link(64, 0.25)), RouterConfig(transfer=transfer)
    )
    [record] = run.transfers
    assert (record.kind, record.num_bytes, record.start_s) == (transfer, 32, 1.0)
    assert record.ready_s == 1 + 32 / 64 + 0.25


def test_messages_take_their_time():
    """Reserve, Reserved and Prefill come before the prompt, and its token is not told twice."""
    run = simulate_cluster([TraceRequest(0, 4, 3)], pair(), RouterConfig(), hop_s=0.1)
    times_s = run.requests[0].metrics.token_times_s
    assert times_s == pytest.approx([1.3, 2.5, 3.5]), "Held and Continue come before the second"


def test_packing_keeps_the_sender_and_unpacking_the_receiver():
    costs = {"pack_s_per_byte": 1 / 32, "unpack_s_per_byte": 1 / 64}
    run = simulate_cluster([TraceRequest(0, 4, 3)], pair(**costs), RouterConfig())
    [transfer] = run.transfers
    assert transfer.parcels[-1].sent_s == pytest.approx(2)
    assert transfer.ready_s == pytest.approx(2.5)
    assert run.requests[0].metrics.token_times_s[1] == pytest.approx(3.5)


def test_only_what_is_missing_travels():
    """The second prompt of 16 tokens begins as the first, of which 3 blocks of 4 stay."""
    ids, other = (1, 2, 3, 4), (1, 2, 3, 5)
    coming = [TraceRequest(0, 16, 2, ids, 4), TraceRequest(50, 16, 2, other, 4)]
    first, second = simulate_cluster(coming, pair(), RouterConfig()).transfers
    assert (first.num_tokens, first.num_cached_tokens, first.num_bytes) == (16, 0, 128)
    assert (second.num_tokens, second.num_cached_tokens, second.num_bytes) == (4, 12, 32)


def test_a_prompt_waits_for_room_where_it_will_decode():
    """Room for one of two: 8 blocks, and each has 5 to begin with."""
    small = replace(CONFIG, num_blocks=8)
    workers = {"p": spec("prefill"), "d": spec("decode", small)}
    run = simulate_cluster([TraceRequest(0, 20, 9), TraceRequest(0, 20, 9)], workers)
    first, second = (r.metrics for r in run.requests)
    assert second.first_scheduled_s >= first.token_times_s[-1]


def test_short_prompts_are_computed_where_they_decode():
    config = RouterConfig(local_prefill_tokens=10)
    run = simulate_cluster([TraceRequest(0, 8, 3), TraceRequest(9, 20, 3)], pair(), config)
    assert [t.request_id for t in run.transfers] == ["r1"]
    assert run.of_worker("d").steps[0].prompts == {"r0": 8}


def test_who_is_lost_is_made_up_for():
    workers = {"p": spec("prefill"), "d0": spec("decode"), "d1": spec("decode")}
    run = simulate_cluster([TraceRequest(0, 4, 9)], workers, kills=[(4.5, "d0")], hop_s=0.25)
    [failure] = run.failures
    [request] = run.requests
    assert (failure.worker, failure.time_s, failure.request_ids) == ("d0", 4.75, ["r0"])
    assert request.metrics.num_output_tokens == 9
    again_s = failure.recovered_s["r0"]
    before = [t for t in request.metrics.token_times_s if t < again_s]
    assert max(before) <= 4.5, "what it had told stays"
    assert [t.target for t in run.transfers] == ["d0", "d1"]
    assert run.transfers[1].num_tokens == 4 + len(before), "its output is computed as a prompt"


@pytest.mark.parametrize("num_tokens", [4, 7, 8, 12])
def test_a_prompt_that_is_cached_but_for_its_last_token_travels_whole(num_tokens):
    """Begun again after one token, it costs the prompt's worker as much as a decode."""
    workers = {"p": spec("prefill"), "d0": spec("decode"), "d1": spec("decode")}
    run = simulate_cluster([TraceRequest(0, num_tokens, 9)], workers, kills=[(1.5, "d0")])
    assert [(t.target, t.num_tokens) for t in run.transfers] == [
        ("d0", num_tokens),
        ("d1", num_tokens + 1),
    ]
    assert run.requests[0].metrics.num_output_tokens == 9


def test_who_waits_for_the_link_waits_behind_others():
    workers = pair(link=Link(8))
    coming = [TraceRequest(0, 4, 2), TraceRequest(0, 4, 2)]
    first, second = simulate_cluster(coming, workers, RouterConfig(transfer="push")).transfers
    assert second.ready_s - first.ready_s >= 32 / 8 - 1e-9


def test_nobody_is_left():
    run = simulate_cluster([TraceRequest(0, 4, 9)], pair(), kills=[(1.5, "p"), (2.5, "d")])
    assert run.requests[0].finish_reason == "error"
    assert "no worker" in run.requests[0].error


def test_roles_follow_the_load():
    """Three prompts a second come, and one worker can compute two."""
    narrow = replace(CONFIG, max_num_seqs=8, max_num_batched_tokens=8)
    workers = {"p0": spec("prefill", narrow)}
    workers |= {f"d{i}": spec("decode", narrow) for i in range(3)}
    coming = [TraceRequest(i / 3, 4, 2) for i in range(60)]
    control = partial(RoleController, most_wait_s=2.0, cool_down_s=5.0)
    fixed = simulate_cluster(coming, workers)
    moved = simulate_cluster(coming, workers, control=control)
    assert [w.role for w in moved.workers.values()].count("prefill") > 1
    last = [run.requests[-1].metrics.ttft_s for run in (fixed, moved)]
    assert last[1] < last[0]


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ({"workers": {}}, "workers has no worker"),
        ({"kills": [(1, "x")]}, "name='x'"),
        ({"hop_s": -1}, "hop_s=-1"),
        ({"look_s": 0}, "look_s=0"),
        ({"arrivals": []}, "requests is empty"),
    ],
)
def test_what_makes_no_sense_is_named(what, match):
    given = {"arrivals": [TraceRequest(0, 4, 2)], "workers": pair()} | what
    with pytest.raises(ValueError, match=match):
        simulate_cluster(given.pop("arrivals"), given.pop("workers"), **given)


def test_nothing_travels_between_models_of_different_shape():
    workers = {"p": spec("prefill", num_layers=3), "d": spec("decode")}
    with pytest.raises(ValueError, match="num_layers=3 of the sender is 4"):
        PlainWire.between(workers["p"], workers["d"])
    assert not simulate_cluster([TraceRequest(0, 4, 2)], workers).transfers


def test_two_hundred_workers_run():
    workers = {f"p{i}": spec("prefill") for i in range(60)}
    workers |= {f"d{i}": spec("decode") for i in range(140)}
    coming = [TraceRequest(i / 100, 8, 6) for i in range(400)]
    run = simulate_cluster(coming, workers)
    assert {r.finish_reason for r in run.requests} == {"length"}
    assert len({t.target for t in run.transfers}) > 100
