"""A cluster puts out what one engine does, bit for bit in exact mode, whatever it is made of."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from pdlab import Engine, EngineConfig, SamplingParams, disagg
from pdlab.disagg.control import RoleController
from pdlab.disagg.router import RouterConfig
from pdlab.trace import ClusterTrace
from tests.disagg.clusters import TurnClock, check_idle, engine_of, local_cluster
from tests.helpers import plain_kv, random_model, random_prompt, run_watched, watch

MODEL = random_model()
EXACT = EngineConfig(
    exact=True,
    block_size=8,
    num_blocks=48,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_model_len=96,
    seed=0,
)
TRANSFERS = ("stream", "push", "pull")
LENGTHS = (1, 7, 8, 9, 15, 16, 17, 33)


def pair(prefill: EngineConfig, decode: EngineConfig, transfer: str, **options):
    return local_cluster(
        MODEL,
        {"p0": ("prefill", prefill), "d0": ("decode", decode)},
        RouterConfig(transfer=transfer),
        **options,
    )


@pytest.mark.parametrize("transfer", TRANSFERS)
@pytest.mark.parametrize(("block_p", "block_d"), [(8, 8), (8, 16), (16, 8), (4, 16)])
def test_tokens_logits_and_kv_bytes_are_those_of_one_engine(transfer, block_p, block_d):
    prompts = [random_prompt(length) for length in LENGTHS]
    params = [
        SamplingParams(max_tokens=6, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    alone, seen_alone, _ = run_watched(MODEL, EXACT, prompts, params)
    here, there = replace(EXACT, block_size=block_p), replace(EXACT, block_size=block_d)
    with pair(here, there, transfer) as cluster:
        seen = watch(engine_of(cluster, "d0"))
        outputs = cluster.generate(prompts, params)
        for name in ("p0", "d0"):
            check_idle(engine_of(cluster, name))
    assert [output.token_ids for output in outputs] == alone
    for output, one in zip(outputs, seen_alone, strict=True):
        mine = seen[output.request_id]
        assert torch.equal(torch.stack(mine.logits), torch.stack(one.logits[1:]))
        known = output.prompt_ids + output.token_ids[:-1]
        assert torch.equal(mine.kv[-1], plain_kv(MODEL, known))
    assert len(cluster.transfers) == len(prompts)
    for record in cluster.transfers:
        assert record.num_bytes == record.num_tokens * MODEL.config.kv_bytes_per_token(4)


@pytest.mark.parametrize("transfer", TRANSFERS)
def test_only_blocks_that_are_missing_travel(transfer):
    stem, params = random_prompt(32), SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    first, second = stem + random_prompt(5, seed=1), stem + random_prompt(9, seed=2)
    with Engine(MODEL, EXACT) as engine:
        alone = [engine.generate(prompt, params)[0].token_ids for prompt in (first, second, stem)]
    with pair(EXACT, EXACT, transfer) as cluster:
        outputs = [cluster.generate(prompt, params)[0].token_ids for prompt in (first, second)]
        # Whole blocks that are all there: none travels. A router that knew would not ask for it.
        cluster.router.placement.forget("d0")
        outputs.append(cluster.generate(stem, params)[0].token_ids)
        assert outputs == alone
        assert cluster.generate(stem, params)[0].token_ids == alone[2]
        assert [t.num_cached_tokens for t in cluster.transfers] == [0, 32, 32]
        assert [t.num_tokens for t in cluster.transfers] == [37, 9, 0]
        engine_of(cluster, "p0").clear_prefix_cache()  # the other side's hit alone
        assert cluster.generate(second, params)[0].token_ids == alone[1]
        engine_of(cluster, "d0").clear_prefix_cache()
        assert cluster.generate(second, params)[0].token_ids == alone[1]
        assert cluster.transfers[-1].num_tokens == 41


def test_text_metrics_and_logprobs_are_whole():
    prompts = [random_prompt(9), random_prompt(20)]
    params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, seed=3, ignore_eos=True)
    with Engine(MODEL, EXACT) as engine:
        alone = engine.generate(prompts, params)
    with pair(EXACT, EXACT, "push") as cluster:
        outputs = cluster.generate(prompts, params)
    for output, one in zip(outputs, alone, strict=True):
        assert output.token_ids == one.token_ids
        assert output.logprobs == one.logprobs
        assert output.prompt_logprobs == one.prompt_logprobs
        assert output.finish_reason == "length"
        assert len(output.metrics.token_times_s) == 5
        assert output.metrics.token_times_s == sorted(output.metrics.token_times_s)
        assert output.metrics.queue_s is not None


def test_samples_of_one_request_are_those_of_one_engine():
    params = SamplingParams(max_tokens=6, n=3, temperature=1, seed=11, ignore_eos=True)
    with Engine(MODEL, EXACT) as engine:
        [alone] = engine.generate([random_prompt(13)], params)
    assert len({tuple(completion.token_ids) for completion in alone.completions}) == 3
    with pair(EXACT, EXACT, "stream") as cluster:
        [output] = cluster.generate([random_prompt(13)], params)
    assert [c.token_ids for c in output.completions] == [c.token_ids for c in alone.completions]


def test_a_request_that_ends_with_its_first_token_does_not_travel():
    with pair(EXACT, EXACT, "stream") as cluster:
        [output] = cluster.generate([random_prompt(13)], SamplingParams(max_tokens=1))
        assert len(output.token_ids) == 1
        assert not cluster.transfers
        check_idle(engine_of(cluster, "d0"))
        check_idle(engine_of(cluster, "p0"))


def test_decode_memory_that_is_full_holds_prompts_back():
    small = replace(EXACT, num_blocks=6)  # two of the requests below
    prompts = [random_prompt(15, seed=i) for i in range(9)]
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with Engine(MODEL, EXACT) as engine:
        alone = [output.token_ids for output in engine.generate(prompts, params)]
    for transfer in TRANSFERS:
        with pair(EXACT, small, transfer) as cluster:
            assert [o.token_ids for o in cluster.generate(prompts, params)] == alone
            check_idle(engine_of(cluster, "p0"))
            check_idle(engine_of(cluster, "d0"))


def test_what_no_decode_worker_can_hold_is_refused_and_stops_no_other():
    small = replace(EXACT, num_blocks=3)
    prompts = [random_prompt(9), random_prompt(60), random_prompt(10)]
    with pair(EXACT, small, "push") as cluster:
        outputs = cluster.generate(prompts, SamplingParams(max_tokens=5, ignore_eos=True))
        assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
        assert "num_blocks is 3" in str(outputs[1].error)
        check_idle(engine_of(cluster, "p0"))
        check_idle(engine_of(cluster, "d0"))


def test_short_prompts_can_be_computed_where_they_decode():
    prompts = [random_prompt(6), random_prompt(30)]
    with local_cluster(
        MODEL,
        {"p0": ("prefill", EXACT), "d0": ("decode", EXACT)},
        RouterConfig(local_prefill_tokens=10),
    ) as cluster:
        cluster.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
        assert [transfer.request_id for transfer in cluster.transfers] == ["r1"]


def test_without_a_prefix_cache_every_prompt_travels():
    config = replace(EXACT, enable_prefix_cache=False)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    with pair(config, config, "stream") as cluster:
        for _ in range(2):
            cluster.generate([random_prompt(16)], params)
        assert [transfer.num_tokens for transfer in cluster.transfers] == [16, 16]


@pytest.mark.parametrize("num_steps", range(9))
@pytest.mark.parametrize("transfer", TRANSFERS)
def test_abort_at_any_stage_frees_both_sides(transfer, num_steps):
    config = replace(EXACT, max_num_batched_tokens=12)
    with pair(config, config, transfer) as cluster:
        other = cluster.submit(random_prompt(9), SamplingParams(max_tokens=4, ignore_eos=True))
        request_id = cluster.submit(random_prompt(20), SamplingParams(max_tokens=9))
        for _ in range(num_steps):
            cluster.step()
        cluster.abort(request_id)
        cluster.abort(request_id)
        while cluster.step():
            pass
        cluster.step()
        assert cluster.collect(request_id).finish_reason in ("abort", "stop", "length")
        assert len(cluster.collect(other).token_ids) == 4
        cluster.generate([random_prompt(4)], SamplingParams(max_tokens=2))  # orders are carried out
        check_idle(engine_of(cluster, "p0"))
        check_idle(engine_of(cluster, "d0"))


def test_streams_give_tokens_as_they_come_and_closing_one_aborts_it():
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with Engine(MODEL, EXACT) as engine:
        [alone] = engine.generate([random_prompt(10)], params)
    with pair(EXACT, EXACT, "stream") as cluster:
        chunks = list(cluster.stream(random_prompt(10), params))
        assert [t for chunk in chunks for t in chunk.token_ids] == alone.token_ids
        stream = cluster.stream(random_prompt(10), params)
        next(stream)
        stream.close()
        cluster.generate([random_prompt(4)], SamplingParams(max_tokens=2))
        check_idle(engine_of(cluster, "d0"))


def test_a_worker_that_says_nothing_is_given_up():
    clock = TurnClock()
    router = RouterConfig(lease_s=3, patience_s=9)
    workers = {"p0": ("prefill", EXACT), "d0": ("decode", EXACT), "d1": ("decode", EXACT)}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    with Engine(MODEL, EXACT) as engine:
        [alone] = engine.generate([random_prompt(10)], params)
    with local_cluster(MODEL, workers, router, clock=clock) as cluster:
        request_id = cluster.submit(random_prompt(10), params)
        while not cluster.transfers:
            cluster.step(0)
        stuck = cluster.hosts["d0"]
        stuck.poll = list  # type: ignore[method-assign]
        while cluster.step(0):
            clock.now_s += 0.5
        assert cluster.collect(request_id).token_ids == alone.token_ids
        [failure] = cluster.failures
        assert failure.worker == "d0"
        assert "said nothing" in failure.reason
        assert list(cluster.hosts) == ["p0", "d1"]


def test_a_worker_of_the_idle_side_is_given_to_the_other_while_they_serve(tmp_path):
    slow = replace(EXACT, max_num_batched_tokens=8)
    prompts = [random_prompt(40, seed=i) for i in range(8)]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with Engine(MODEL, EXACT) as engine:
        alone = [output.token_ids for output in engine.generate(prompts, params)]
    with disagg.local_cluster(
        MODEL,
        1,
        3,
        RouterConfig(max_backlog_tokens=1),
        config=slow,
        control=partial(RoleController, most_wait_s=0.001, most_fill=1.0, cool_down_s=0.0),
    ) as cluster:
        assert [output.token_ids for output in cluster.generate(prompts, params)] == alone
        trace = cluster.trace()
    assert trace.switches
    assert {switch.role for switch in trace.switches} >= {"prefill"}
    assert len({transfer.source for transfer in trace.transfers}) > 1
    trace.save(tmp_path / "run.json.gz")
    assert ClusterTrace.load(tmp_path / "run.json.gz") == trace
