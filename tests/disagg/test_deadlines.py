"""How long a worker waits for whom, and what becomes of who waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import SamplingParams
from pdlab.disagg.messages import Arrival, Serve, request_of
from pdlab.disagg.router import RouterConfig
from pdlab.engine.moving import RequestState
from tests.disagg.clusters import TurnClock, engine_of
from tests.disagg.test_attacks import GREEDY, alone, check_all_idle, run
from tests.disagg.test_cluster import EXACT, MODEL, TRANSFERS, pair
from tests.helpers import random_prompt

PARAMS = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_who_has_much_to_do_and_says_so_is_not_given_up(transfer):
    """Each worker has requests for longer than the router's patience, but not one silent turn."""
    clock = TurnClock()
    prompts = [random_prompt(20, seed=i) for i in range(2)]
    with pair(EXACT, EXACT, transfer, clock=clock, lease_s=3.0) as cluster:
        cluster.router.config = RouterConfig(transfer=transfer, lease_s=3.0, patience_s=6.0)
        ids = []
        for prompt in prompts:  # so that the workers are never without one
            ids.append(cluster.submit(prompt, PARAMS))
            for _ in range(30):
                cluster.step(0)
                clock.now_s += 0.5
        run(cluster)
        assert not cluster.failures
        assert [cluster.collect(i).token_ids for i in ids] == alone(prompts, PARAMS)


@pytest.mark.parametrize("num_parcels", [0, 2, 6])
def test_the_next_parcel_has_so_much_time_once_the_prompt_is_computed(num_parcels):
    """Six come slowly, or only the first of them: the receiver waits as long for each one."""
    clock = TurnClock()
    chunked = replace(EXACT, max_num_batched_tokens=8)
    options = {"clock": clock, "lease_s": 30.0, "transfer_timeout_s": 2.0}
    with pair(chunked, EXACT, "stream", **options) as cluster:
        cluster.router.config = RouterConfig(transfer="stream", max_attempts=1)
        there = cluster.hosts["d0"].worker.transport
        receive, here = there.receive, []
        is_open = False

        def slowly():
            here.extend(receive())
            return [here.pop(0)] if is_open and here and clock.now_s % 1.5 == 0 else []

        there.receive = slowly
        request_id = cluster.submit(random_prompt(20), PARAMS)
        while not cluster.router.jobs[request_id].chunks:
            cluster.step(0)
        assert len(here) == 6
        del here[num_parcels:]
        is_open = True
        while cluster.step(0) and not cluster.transfers:
            clock.now_s += 0.5
        if num_parcels == 6:
            assert clock.now_s == 7.5
            run(cluster)
            assert [cluster.collect(request_id).token_ids] == alone([random_prompt(20)], PARAMS)
        else:
            last_s = 1.5 * max(0, num_parcels - 1)
            assert last_s + 2 <= clock.now_s <= last_s + 3
            assert "did not come within 2 s" in str(cluster.collect(request_id).error)
        check_all_idle(cluster)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_who_waits_for_room_and_is_aborted_gets_none(transfer):
    small = replace(EXACT, max_num_seqs=1)
    prompts = [random_prompt(20, seed=i) for i in range(3)]
    with pair(EXACT, small, transfer, clock=TurnClock()) as cluster:
        ids = [cluster.submit(prompt, PARAMS) for prompt in prompts]
        while not len(cluster.hosts["d0"].worker.decode.asked):
            cluster.step(0)
        cluster.abort(ids[1])
        run(cluster)
        outputs = [cluster.collect(request_id) for request_id in ids]
        assert [output.finish_reason for output in outputs] == ["length", "abort", "length"]
        check_all_idle(cluster)


@pytest.mark.parametrize("layers_per_parcel", [1, 2])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_step_that_broke_off_between_layers_is_sent_again(layer, layers_per_parcel):
    """As another transfer, so that the receiver begins anew, and takes nothing for missing."""
    stem = random_prompt(8)
    prompts = [stem + random_prompt(12, seed=i) for i in range(3)]
    chunked = replace(EXACT, max_num_batched_tokens=16, enable_prefix_cache=False)
    options = {"clock": TurnClock(), "layers_per_parcel": layers_per_parcel}
    with pair(chunked, EXACT, "stream", **options) as cluster:
        cluster.generate([stem], GREEDY)  # which the receiver has cached
        port, calls = engine_of(cluster, "p0").kv_port, []
        inner = port.on_layer

        def breaks_off(batch, at):
            inner(batch, at)
            calls.append(at)
            if at == layer and calls.count(at) in (1, 3, 4):
                raise KeyboardInterrupt

        port.on_layer = breaks_off
        ids = [cluster.submit(prompt, GREEDY) for prompt in prompts]
        for _ in range(400):
            try:
                if not cluster.step(0):
                    break
            except KeyboardInterrupt:
                pass
        assert calls.count(layer) > 4
        jobs = [cluster.router.jobs[request_id] for request_id in ids]
        assert [job.attempt for job in jobs] == [0, 0, 0]
        assert [cluster.collect(i).token_ids for i in ids] == alone(prompts, GREEDY)
        token_bytes = MODEL.config.kv_bytes_per_token(4)
        for record in cluster.transfers[1:]:
            assert record.num_cached_tokens == 8
            assert record.num_bytes == 12 * token_bytes
        check_all_idle(cluster)


def test_a_prompt_that_was_preempted_arrives_whole():
    """One that decodes beside it takes its blocks, after a part of it has left."""
    tiny = replace(EXACT, num_blocks=4, chunk_size=2, watermark=0.0, enable_prefix_cache=False)
    with pair(tiny, EXACT, "stream", clock=TurnClock()) as cluster:
        beside = RequestState(random_prompt(7), replace(GREEDY, max_tokens=20), seed=0)
        cluster.hosts["p0"].worker.hear([Serve("beside", beside, Arrival(0.0))])
        request_id = cluster.submit(random_prompt(22), GREEDY)
        run(cluster)
        assert cluster.router.jobs[request_id].attempt == 0
        output = cluster.collect(request_id)
        assert output.metrics.num_preemptions > 0
        assert [output.token_ids] == alone([random_prompt(22)])
        [transfer] = cluster.transfers
        assert transfer.num_bytes == 22 * MODEL.config.kv_bytes_per_token(4)


def test_who_has_its_room_for_longest_keeps_it_though_its_kv_comes_last():
    """The youngest gives way: it is the order of the rooms that counts."""
    small = replace(EXACT, num_blocks=7, watermark=0.0, enable_prefix_cache=False)
    prompts = [random_prompt(20, seed=i) for i in range(2)]
    with pair(EXACT, small, "stream", clock=TurnClock()) as cluster:
        there = cluster.hosts["d0"].worker.transport
        receive, early = there.receive, []

        def second_first():
            early.extend(receive())
            late = [p for p in early if not cluster.transfers and request_of(p.transfer_id) == "r0"]
            come, early[:] = [p for p in early if p not in late], late
            return come

        there.receive = second_first
        ids = [cluster.submit(prompt, PARAMS) for prompt in prompts]
        run(cluster)
        outputs = [cluster.collect(request_id) for request_id in ids]
        assert [transfer.request_id for transfer in cluster.transfers] == ids[::-1]
        assert [output.token_ids for output in outputs] == alone(prompts, PARAMS)
        assert outputs[0].metrics.num_preemptions == 0 < outputs[1].metrics.num_preemptions
        check_all_idle(cluster)
