"""What made other clusters lose a request, hang, leak, or tell a wrong number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import Engine, SamplingParams
from pdlab.disagg.cluster import Cluster
from pdlab.disagg.hosts.host import LocalHost
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.transport.in_process import InProcess
from pdlab.disagg.worker import Worker
from pdlab.engine import Deadline, Priority
from tests.disagg.clusters import TurnClock, check_idle, engine_of, local_cluster
from tests.disagg.faults import Faults, FaultyTransport
from tests.disagg.test_cluster import EXACT, MODEL, TRANSFERS, pair
from tests.helpers import random_prompt

GREEDY = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)


def alone(prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """The tokens that one engine puts out."""
    with Engine(MODEL, EXACT) as engine:
        return [output.token_ids for output in engine.generate(prompts, params)]


def run(cluster: Cluster, most_steps: int = 400) -> None:
    """Step until there is nothing to do.

    Raises:
        AssertionError: that never comes.
    """
    for _ in range(most_steps):
        if not cluster.step(0):
            return
    raise AssertionError("the cluster does not come to an end")


def check_all_idle(cluster: Cluster) -> None:
    """Nothing is left on any worker, nor in its transport."""
    cluster._settle()
    for name, host in cluster.hosts.items():
        check_idle(engine_of(cluster, name))
        worker = host.worker  # type: ignore[attr-defined]
        assert not worker.is_waiting
        assert not worker.prefill.outgoing
        assert not worker.prefill._transfers
        assert not worker.transport._outgoing
        assert not worker.transport._published
        assert not worker.transport._fetches
        assert not cluster.router.peers[name].jobs


def test_a_receiver_may_have_cached_more_than_the_first_chunk():
    """The sender computes tokens in chunks that the receiver has: none of them travels."""
    chunked = replace(EXACT, chunk_size=8, enable_prefix_cache=False)
    stem = random_prompt(32)
    prompts = [stem + random_prompt(5, seed=1), stem + random_prompt(9, seed=2)]
    with pair(chunked, EXACT, "stream") as cluster:
        outputs = [cluster.generate([prompt], GREEDY)[0] for prompt in prompts]
        assert [output.token_ids for output in outputs] == alone(prompts)
        assert [t.num_tokens for t in cluster.transfers] == [37, 9]
        assert len(cluster.router.jobs) == 0
        check_all_idle(cluster)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_two_workers_that_prefill_for_each_other_do_not_wait_for_ever(transfer):
    """Each has one seat; a room for a prompt from the other, or a prompt for it, takes it."""
    config = replace(EXACT, max_num_seqs=1, max_num_batched_tokens=8)
    workers = {"a": ("prefill", config), "b": ("decode", config)}
    prompts = [random_prompt(20, seed=i) for i in range(6)]
    with local_cluster(
        MODEL, workers, RouterConfig(transfer=transfer), clock=TurnClock()
    ) as cluster:
        ids = []
        for i, prompt in enumerate(prompts):
            ids.append(cluster.submit(prompt, GREEDY))
            cluster.step(0)
            cluster.set_role("ab"[i % 2], "decode")
            cluster.set_role("ab"[1 - i % 2], "prefill")
        run(cluster)
        outputs = [cluster.collect(request_id) for request_id in ids]
        assert [output.token_ids for output in outputs] == alone(prompts)
        check_all_idle(cluster)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_prompts_that_lost_their_decode_worker_do_not_wait_for_each_other(transfer):
    config = replace(EXACT, max_num_seqs=1)
    workers = {"p0": ("prefill", config), "p1": ("prefill", config), "d0": ("decode", config)}
    prompts = [random_prompt(20, seed=i) for i in range(4)]
    router = RouterConfig(transfer=transfer)
    with local_cluster(MODEL, workers, router, clock=TurnClock()) as cluster:
        ids = [cluster.submit(prompt, GREEDY) for prompt in prompts]
        for _ in range(3):
            cluster.step(0)
        cluster.kill("d0")
        run(cluster)
        outputs = [cluster.collect(request_id) for request_id in ids]
        assert [output.token_ids for output in outputs] == alone(prompts)
        check_all_idle(cluster)


@pytest.mark.parametrize("worker", ["p0", "d0"])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_an_interrupted_step_loses_no_request(transfer, worker):
    """Whoever pressed Ctrl-C goes on stepping, and the requests of before are still there."""
    config = replace(EXACT, max_num_batched_tokens=16)
    prompts = [random_prompt(20, seed=i) for i in range(4)]
    with pair(config, config, transfer, clock=TurnClock()) as cluster:
        runner = engine_of(cluster, worker).runner
        inner, calls = runner.run, [0]

        def interrupted(*args):
            calls[0] += 1
            if calls[0] % 2:
                if calls[0] % 4 == 1:
                    inner(*args)  # what it has sent is sent again
                raise KeyboardInterrupt
            return inner(*args)

        runner.run = interrupted
        ids = [cluster.submit(prompt, GREEDY) for prompt in prompts]
        for _ in range(400):
            try:
                if not cluster.step(0):
                    break
            except KeyboardInterrupt:
                ids += [cluster.submit(prompts[0], GREEDY)] if len(ids) < 8 else []
        outputs = [cluster.collect(request_id) for request_id in ids]
        expected = alone(prompts)
        assert [output.token_ids for output in outputs[:4]] == expected
        assert all(output.token_ids == expected[0] for output in outputs[4:])
        token_bytes = MODEL.config.kv_bytes_per_token(4)
        for record in cluster.transfers:  # what came of a step that failed does not count
            assert record.num_bytes == record.num_tokens * token_bytes
        runner.run = inner
        check_all_idle(cluster)


def test_a_stream_that_is_closed_unread_is_aborted():
    with pair(EXACT, EXACT, "stream") as cluster:
        stream = cluster.stream(random_prompt(10), GREEDY)
        stream.close()
        assert not cluster.router.jobs
        assert not cluster._samples
        check_all_idle(cluster)


def test_a_stream_refuses_what_it_has_no_place_for():
    with pair(EXACT, EXACT, "stream") as cluster:
        with pytest.raises(ValueError, match="prompt_logprobs=1"):
            cluster.stream([1, 2], SamplingParams(prompt_logprobs=1))
        with pytest.raises(ValueError, match="params="):
            cluster.stream([1, 2], "greedy")  # type: ignore[arg-type]
        assert not cluster.router.jobs


def test_a_closed_cluster_says_so():
    cluster = pair(EXACT, EXACT, "stream")
    chunks = cluster.stream(random_prompt(10), GREEDY)
    next(chunks)
    cluster.close()
    cluster.close()
    with pytest.raises(RuntimeError, match="closed"):
        cluster.generate([random_prompt(10)], GREEDY)
    with pytest.raises(RuntimeError, match="closed"):
        list(chunks)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_transfer_is_called_what_it_is(transfer):
    stem = random_prompt(16)
    with pair(EXACT, EXACT, transfer) as cluster:
        cluster.generate([stem, random_prompt(9)], GREEDY)
        cluster.router.placement.forget("d0")
        cluster.generate([stem], GREEDY)  # nothing of it has to travel
        assert [t.kind for t in cluster.transfers] == [transfer] * 3
        assert cluster.transfers[-1].num_bytes == 0


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_a_prefill_worker_needs_room_for_the_prompt_alone(transfer):
    small = replace(EXACT, num_blocks=3)
    params = replace(GREEDY, max_tokens=20)
    prompts = [random_prompt(20, seed=i) for i in range(3)]
    with pair(small, EXACT, transfer) as cluster:
        outputs = cluster.generate(prompts, params)
        assert [output.token_ids for output in outputs] == alone(prompts, params)
        assert len(cluster.transfers) == 3
        check_all_idle(cluster)


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize("small", ["p0", "d0"])
def test_a_request_goes_to_who_can_serve_it(transfer, small):
    """A worker that is too small for one is passed over, and the others get it."""
    sizes = {name: replace(EXACT, num_blocks=2 if name == small else 48) for name in ("p0", "d0")}
    workers = {
        "p0": ("prefill", sizes["p0"]),
        "p1": ("prefill", EXACT),
        "d0": ("decode", sizes["d0"]),
        "d1": ("decode", EXACT),
    }
    prompts = [random_prompt(length) for length in (20, 9, 30)]
    with local_cluster(MODEL, workers, RouterConfig(transfer=transfer)) as cluster:
        outputs = cluster.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == alone(prompts)
        cluster.kill("p1")
        cluster.kill("d1")
        [output] = cluster.generate([random_prompt(60)], GREEDY)
        if small == "d0":
            assert output.finish_reason == "error"
            assert "num_blocks is 2" in str(output.error)
        else:
            assert len(output.token_ids) == 5
        check_all_idle(cluster)


@pytest.mark.parametrize("shorter", ["p0", "d0"])
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_the_length_limit_is_that_of_who_decodes(transfer, shorter):
    """A prefill worker with a lower one does not end what another one goes on with. A decode worker
    with a lower one, and no block more, ends at once what comes with all the tokens it may have."""
    params = replace(GREEDY, max_tokens=18)
    prompts = [random_prompt(length) for length in (20, 31, 32, 33)]
    short = replace(EXACT, max_model_len=32, num_blocks=4)
    configs = {name: short if name == shorter else EXACT for name in ("p0", "d0")}
    with pair(configs["p0"], configs["d0"], transfer) as cluster:
        outputs = cluster.generate(prompts, params)
        for output, tokens in zip(outputs, alone(prompts, params), strict=True):
            num_prompt = len(output.prompt_ids)
            if shorter == "d0" and num_prompt > 32:
                assert "max_model_len is 32" in str(output.error)
                continue
            most = max(1, 32 - num_prompt) if shorter == "d0" else 18
            assert output.token_ids == tokens[:most]
            assert output.finish_reason == "length"
        check_all_idle(cluster)


def test_small_requests_do_not_starve_a_large_one_that_waits_for_room():
    """Short prompts are served where they decode, and there always is room for one of them."""
    decode = replace(EXACT, num_blocks=8, max_num_seqs=4, enable_prefix_cache=False)
    workers = {"p0": ("prefill", EXACT), "d0": ("decode", decode)}
    router = RouterConfig(local_prefill_tokens=8)
    clock = TurnClock()
    with local_cluster(MODEL, workers, router, clock=clock) as cluster:
        small = replace(GREEDY, max_tokens=6)
        for i in range(2):
            cluster.submit(random_prompt(8, seed=i), small)
        cluster.step(0)
        large = cluster.submit(random_prompt(56), GREEDY)
        for i in range(60):
            clock.now_s += 0.1
            if i % 2 == 0:
                cluster.submit(random_prompt(8, seed=i), small)
            cluster.step(0)
            if cluster.is_finished(large):
                break
        assert cluster.is_finished(large)
        run(cluster)
        check_all_idle(cluster)


@pytest.mark.parametrize("num_steps", range(1, 7))
def test_an_aborted_stream_of_parcels_leaves_nothing_in_the_transport(num_steps):
    config = replace(EXACT, max_num_batched_tokens=8)
    with pair(config, config, "stream") as cluster:
        request_id = cluster.submit(random_prompt(40), GREEDY)
        for _ in range(num_steps):
            cluster.step(0)
        cluster.abort(request_id)
        run(cluster)
        check_all_idle(cluster)


def test_a_worker_may_come_back_under_its_name_and_nothing_stays_of_the_old_one():
    workers = {"p0": ("prefill", EXACT), "d0": ("decode", EXACT)}
    prompts = [random_prompt(20, seed=i) for i in range(3)]
    with local_cluster(MODEL, workers) as cluster:
        board = cluster.hosts["p0"].worker.transport._on_board._board  # type: ignore[attr-defined]
        assert [o.token_ids for o in cluster.generate(prompts, GREEDY)] == alone(prompts)
        for name in ("p0", "d0"):
            cluster.kill(name)
        [output] = cluster.generate(prompts[:1], GREEDY)
        assert "no worker is left" in str(output.error)
        with pytest.raises(ValueError, match="no worker"):
            cluster.generate(prompts[0], GREEDY)
        for name, (role, config) in workers.items():
            transport = InProcess(board, name)
            cluster.add_worker(LocalHost(Worker(name, Engine(MODEL, config), transport)), role)
        assert [o.token_ids for o in cluster.generate(prompts, GREEDY)] == alone(prompts)
        assert [t.num_cached_tokens for t in cluster.transfers] == [0] * 6
        check_all_idle(cluster)


def test_the_time_of_a_recovery_is_that_of_the_next_token():
    clock = TurnClock()
    workers = {"p0": ("prefill", EXACT), "d0": ("decode", EXACT), "d1": ("decode", EXACT)}
    with local_cluster(MODEL, workers, clock=clock) as cluster:
        clock.now_s = 100.0  # the cluster's own clock began at 0
        request_id = cluster.submit(random_prompt(20), GREEDY)
        while not cluster.transfers:
            clock.now_s += 1
            cluster.step(0)
        cluster.kill(cluster.transfers[0].target)
        while cluster.step(0):
            clock.now_s += 1
        output = cluster.collect(request_id)
        [failure] = cluster.failures
        [first_s] = [t for t in output.metrics.token_times_s if t > failure.time_s][:1]
        assert failure.recovered_s == {request_id: first_s}
        assert output.metrics.token_times_s == sorted(output.metrics.token_times_s)
        assert output.metrics.first_scheduled_s < failure.time_s  # its first attempt's
        assert all(t >= 100 for t in output.metrics.token_times_s)


def test_a_request_that_always_fails_ends_after_so_many_attempts():
    """Each parcel comes damaged."""
    with local_cluster(
        MODEL,
        {"p0": ("prefill", EXACT), "d0": ("decode", EXACT)},
        RouterConfig(max_attempts=3),
        wrap=lambda transport: FaultyTransport(transport, Faults(0, corrupt=1.0)),
    ) as cluster:
        [output] = cluster.generate([random_prompt(20)], GREEDY)
        assert "given up after 3 attempts: the checksum" in str(output.error)
        cluster._settle()
        check_idle(engine_of(cluster, "p0"))
        check_idle(engine_of(cluster, "d0"))


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_what_is_wanted_outlives_its_lease_and_what_is_not_ends_with_it(transfer):
    """A long prompt holds its room, and a room that is waited for holds a prompt, while the router
    renews; once nobody does, both go."""
    clock = TurnClock()
    config = replace(EXACT, max_num_batched_tokens=2, max_num_seqs=1)
    router = RouterConfig(transfer=transfer, lease_s=3.0)
    with pair(config, config, transfer, clock=clock, lease_s=3.0) as cluster:
        cluster.router.config = router
        prompts = [random_prompt(40, seed=i) for i in range(2)]
        params = replace(GREEDY, max_tokens=50)
        ids = [cluster.submit(prompt, params) for prompt in prompts]
        for _ in range(1000):
            clock.now_s += 0.5
            if not cluster.step(0):
                break
        assert not any(job.attempt or job.num_transfers > 1 for job in cluster.router.jobs.values())
        assert [cluster.collect(i).token_ids for i in ids] == alone(prompts, params)
        assert len(cluster.transfers) == 2
        cluster.submit(random_prompt(40, seed=5), params)
        hosts = list(cluster.hosts.values())
        while not any(host.worker.is_waiting for host in hosts):  # type: ignore[attr-defined]
            assert cluster.step(0)
        cluster.router.jobs.clear()  # the router forgets
        for _ in range(60):
            for host in hosts:
                host.poll()
            clock.now_s += 4
        assert not any(host.worker.is_waiting for host in hosts)  # type: ignore[attr-defined]
        assert not engine_of(cluster, "p0").scheduler.held
        assert not engine_of(cluster, "d0").scheduler.reserved


@pytest.mark.parametrize("asks", ["priority", "deadline"])
@pytest.mark.parametrize("mode", ["disaggregated", "aggregated"])
def test_urgent_requests_go_first_wherever_they_run(mode, asks):
    policy = Priority(ageing_s=1e9) if asks == "priority" else Deadline()
    config = replace(EXACT, policy=policy, max_num_seqs=1, max_num_batched_tokens=8)
    workers = {"p0": ("prefill", config), "d0": ("decode", replace(config, max_num_seqs=4))}
    if mode == "aggregated":
        del workers["d0"]
    with local_cluster(MODEL, workers, RouterConfig(mode=mode)) as cluster:
        ids = []
        for i in range(3):
            urgency = {"priority": -i} if asks == "priority" else {"ttft_slo_s": 1000.0 - 100 * i}
            ids.append(cluster.submit(random_prompt(20, seed=i), GREEDY, **urgency))
        run(cluster)
        first_s = [cluster.collect(i).metrics.token_times_s[0] for i in ids]
        assert first_s == sorted(first_s, reverse=True)


def test_arrivals_are_told_on_the_clock_of_each_engine():
    """A request that came a while ago is that old on every worker."""
    with pair(EXACT, EXACT, "stream") as cluster:
        arrival_s = cluster.now_s() - 50
        cluster.submit(random_prompt(20), replace(GREEDY, max_tokens=9), arrival_s=arrival_s)
        while not cluster.transfers:
            cluster.step(0)
            for name in cluster.hosts:
                engine = engine_of(cluster, name)
                for request in engine.requests.values():
                    age_s = engine.now_s() - request.samples[0].sequence.arrival_s
                    assert 50 <= age_s < 60
        run(cluster)


def test_parcels_hold_as_many_layers_as_they_shall():
    for at_once, layers in ((1, [(0, 1), (1, 2)]), (2, [(0, 2)])):
        with pair(EXACT, EXACT, "stream", layers_per_parcel=at_once) as cluster:
            cluster.generate([random_prompt(20)], GREEDY)
            [transfer] = cluster.transfers
            assert [(p.first_layer, p.end_layer) for p in transfer.parcels] == layers


def test_what_has_come_is_in_the_prefix_cache_and_in_its_statistics():
    stem = random_prompt(32)
    with pair(EXACT, EXACT, "stream") as cluster:
        cluster.generate([[*stem, 1, 2]], GREEDY)
        cluster.generate([[*stem, 3, 4]], GREEDY)
        stats = engine_of(cluster, "d0").prefix_cache_stats
        assert (stats.num_queries, stats.num_query_tokens, stats.num_hit_tokens) == (2, 68, 32)


def test_preemptions_are_counted_where_they_happen():
    tiny = replace(EXACT, num_blocks=8, enable_prefix_cache=False)
    prompts = [random_prompt(15, seed=i) for i in range(3)]
    params = replace(GREEDY, max_tokens=30)
    with pair(EXACT, tiny, "stream") as cluster:
        outputs = cluster.generate(prompts, params)
        assert [output.token_ids for output in outputs] == alone(prompts, params)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        check_all_idle(cluster)


def test_two_clusters_in_one_process_do_not_meet():
    prompts = [random_prompt(20, seed=i) for i in range(2)]
    with pair(EXACT, EXACT, "pull") as one, pair(EXACT, EXACT, "pull") as two:
        ids = [(cluster, cluster.submit(p, GREEDY)) for p in prompts for cluster in (one, two)]
        while one.step(0) | two.step(0):
            pass
        outputs = [cluster.collect(request_id).token_ids for cluster, request_id in ids]
        assert outputs == [tokens for tokens in alone(prompts) for _ in range(2)]
        check_all_idle(one)
        check_all_idle(two)


def test_what_is_not_fetched_in_time_is_withdrawn_on_both_sides():
    clock = TurnClock()
    options = {"clock": clock, "transfer_timeout_s": 2.0}
    with pair(EXACT, EXACT, "pull", **options) as cluster:
        cluster.router.config = RouterConfig(transfer="pull", max_attempts=2)
        there, here = (cluster.hosts[name].worker.transport for name in ("d0", "p0"))
        fetched, withdrawn = [], []
        there.fetch = lambda ticket: fetched.append(ticket.transfer_id)
        withdraw, there.withdraw = there.withdraw, withdrawn.append
        request_id = cluster.submit(random_prompt(20), GREEDY)
        while cluster.step(0):
            clock.now_s += 0.5
            assert len(here._published) <= 1
        assert "did not come within 2 s" in str(cluster.collect(request_id).error)
        assert len(fetched) == 4  # twice for each attempt
        assert fetched == withdrawn
        there.withdraw = withdraw
        check_all_idle(cluster)
