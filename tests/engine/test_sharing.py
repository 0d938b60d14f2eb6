"""Shared blocks: prefix hits, twins, forks, engines on one memory; each exact, to the last bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import pytest
import torch

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.sampling import mix
from tests.helpers import TINY, random_model, random_prompt, run_watched, watch

EXACT = EngineConfig(exact=True, block_size=4, num_blocks=32)
FEW = SamplingParams(max_tokens=5, ignore_eos=True)


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams = FEW) -> list[int]:
    """Tokens of a request that shares nothing with anybody."""
    config = EngineConfig(exact=True, enable_prefix_cache=False)
    return run_watched(random_model(), config, [list(prompt)], params)[0][0]


def drain(engine: Engine) -> None:
    while engine.step():
        pass


# --- the prefix cache ---------------------------------------------------------------------------


def test_a_runs_is_freed_b_reuses_its_blocks_and_a_runs_again():
    """In a pool of four blocks, B overwrites what A left; A then finds nothing, or its own."""
    a, b = random_prompt(9, seed=1), random_prompt(11, seed=2)
    config = replace(EXACT, num_blocks=4)
    with Engine(random_model(), config) as engine:
        seen = watch(engine)
        outputs = [engine.generate(prompt, FEW)[0] for prompt in (a, b, a, a)]
        first, _, again, warm = (seen[output.request_id] for output in outputs)
    assert [o.token_ids for o in outputs] == [alone(tuple(p)) for p in (a, b, a, a)]
    assert [o.metrics.num_cached_tokens for o in outputs] == [0, 0, 0, 8]
    for later in (again, warm):
        assert torch.equal(torch.stack(later.logits), torch.stack(first.logits))
        assert torch.equal(later.kv[-1], first.kv[-1])


def test_the_same_prompt_of_two_whole_blocks_twice():
    prompt = random_prompt(8)
    with Engine(random_model(), EXACT) as engine:
        seen = watch(engine)
        outputs = [engine.generate(prompt, FEW)[0] for _ in range(2)]
        parts = [record.sequences[0] for record in engine.trace.steps]
        one, two = (seen[output.request_id] for output in outputs)
    assert [o.token_ids for o in outputs] == [alone(tuple(prompt))] * 2
    [again] = [p for p in parts if p.sequence_id == "r1" and p.phase == "prefill"]
    assert (again.num_cached_tokens, again.start, again.num_tokens) == (7, 7, 1)
    assert torch.equal(torch.stack(one.logits), torch.stack(two.logits))
    assert torch.equal(one.kv[-1], two.kv[-1])


def test_the_same_prompt_of_two_whole_blocks_while_the_first_runs():
    """The last block is copied, for the first request still reads it."""
    prompt = random_prompt(8)
    with Engine(random_model(), EXACT) as engine:
        for _ in range(2):
            engine.submit(prompt, FEW)
            record = engine.step()
        assert record is not None
        assert [move.kind for move in record.moves] == ["copy"]
        first, second = (r.block_table for r in record.residents)
        assert first[0] == second[0]
        assert first[1] != second[1]
        drain(engine)
        assert [engine.collect(i).token_ids for i in ("r0", "r1")] == [alone(tuple(prompt))] * 2
        assert engine.pool.num_free == 32


def test_two_identical_prompts_in_one_step_both_compute():
    """Same-step twins: a block can be found once its step is booked, so nothing is shared yet."""
    prompt = random_prompt(9)
    with Engine(random_model(), EXACT) as engine:
        for _ in range(2):
            engine.submit(prompt, FEW)
        record = engine.step()
        assert record is not None
        assert [part.num_tokens for part in record.sequences] == [9, 9]
        tables = [resident.block_table for resident in record.residents]
        assert not set(tables[0]) & set(tables[1])
        assert [engine.pool.ref_count(b) for table in tables for b in table] == [1] * 6
        assert [engine.pool.is_known(b) for b in tables[0]] == [True, True, False]
        assert not any(engine.pool.is_known(b) for b in tables[1])
        engine.submit(prompt, FEW)  # a third finds the first's
        record = engine.step()
        assert record is not None
        assert record.sequences[-1].num_cached_tokens == 8
        assert record.residents[-1].block_table[:2] == tables[0][:2]
        assert [engine.pool.ref_count(b) for b in tables[0][:2]] == [2, 2]
        drain(engine)
        assert [engine.collect(f"r{i}").token_ids for i in range(3)] == [alone(tuple(prompt))] * 3


def test_a_next_turn_finds_the_last_one_and_its_answer():
    with Engine(random_model(), EXACT) as engine:
        turn, cached = random_prompt(7), []
        for _ in range(3):
            [output] = engine.generate([turn], FEW)
            assert output.token_ids == alone(tuple(turn))
            cached.append(output.metrics.num_cached_tokens)
            turn = [*turn, *output.token_ids, 3, 1]
        stats = engine.prefix_cache_stats
    assert cached == [0, 8, 16]  # of 7 + 4 and 14 + 4 computed tokens, in whole blocks
    assert (stats.num_hit_tokens, stats.num_query_tokens) == (24, 7 + 14 + 21)


@pytest.mark.parametrize("off", ["engine", "request"])
def test_the_prefix_cache_can_be_off(off):
    config = replace(EXACT, enable_prefix_cache=off != "engine")
    params = replace(FEW, prefix_cache=off != "request")
    with Engine(random_model(), config) as engine:
        for _ in range(2):
            [output] = engine.generate([random_prompt(9)], params)
            assert output.metrics.num_cached_tokens == 0
            assert engine.pool.cached_blocks == []
        assert engine.prefix_cache_stats.num_queries == 0


def test_a_cleared_cache_finds_nothing_and_running_requests_go_on():
    prompt = random_prompt(9)
    with Engine(random_model(), EXACT) as engine:
        engine.submit(prompt, FEW)
        engine.step()
        engine.clear_prefix_cache()
        drain(engine)
        assert engine.collect("r0").token_ids == alone(tuple(prompt))
        [output] = engine.generate([prompt], FEW)
        assert output.metrics.num_cached_tokens == 0


# --- samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [7, 8, 9])
@pytest.mark.parametrize("pressure", [{}, {"num_blocks": 6}, {"num_blocks": 6, "swap": True}])
def test_samples_equal_single_requests_with_their_seeds(length, pressure):
    """Sample 0 has the request's seed, sample i the one that `mix(seed, -i)` gives."""
    swap = {"num_swap_blocks": 20, "preemption": "swap"} if pressure.get("swap") else {}
    config = replace(EXACT, num_blocks=pressure.get("num_blocks", 32), **swap)
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=8, ignore_eos=True, n=3)
    prompt = random_prompt(length)
    with Engine(random_model(), config) as engine:
        [output] = engine.generate([prompt], params)
        preempted = [i for record in engine.trace.steps for i in record.preempted]
        assert engine.pool.num_free == config.num_blocks
    assert bool(preempted) == bool(pressure)
    for index, completion in enumerate(output.completions):
        seed = mix(11, -index) if index else 11
        assert completion.token_ids == alone(tuple(prompt), replace(params, n=1, seed=seed))
    assert len({tuple(c.token_ids) for c in output.completions}) == 3


def test_samples_share_their_prompt_until_they_write():
    with Engine(random_model(), EXACT) as engine:
        engine.submit(random_prompt(10), replace(FEW, n=3))
        engine.step()
        assert engine.pool.num_free == 32 - 3
        record = engine.step()
        assert record is not None
        assert [move.kind for move in record.moves] == ["copy", "copy"]
        assert engine.pool.num_free == 32 - 5
        per_slot = engine.kv_cache.block_bytes // 4
        assert record.kv_shared_bytes == 2 * 8 * per_slot
        assert record.kv_used_bytes == (8 + 3 * 3) * per_slot
        a, b, c = (engine.read_kv(name) for name in ("r0", "r0.1", "r0.2"))
        assert torch.equal(a[:, :, :10], b[:, :, :10])
        assert torch.equal(a[:, :, :10], c[:, :, :10])
        engine.abort("r0")
        assert engine.pool.num_free == 32


def test_more_samples_than_seats_are_refused():
    with (
        Engine(random_model(), replace(EXACT, max_num_seqs=2)) as engine,
        pytest.raises(ValueError, match="n=3 samples, max_num_seqs is 2"),
    ):
        engine.submit(random_prompt(3), replace(FEW, n=3))


# --- engines ------------------------------------------------------------------------------------


def test_a_second_engine_finds_the_firsts_prefixes():
    memory = Engine.memory_for(random_model(), EXACT)
    one, other = (Engine(random_model(), EXACT, memory=memory) for _ in range(2))
    prompt = random_prompt(9)
    [first] = one.generate([prompt], FEW)
    [second] = other.generate([prompt], FEW)
    assert first.token_ids == second.token_ids == alone(tuple(prompt))
    assert second.metrics.num_cached_tokens == 8
    assert one.pool is other.pool
    one.close()
    [third] = other.generate([prompt], FEW)
    assert third.metrics.num_cached_tokens == 8
    other.close()
    assert memory.num_engines == 0
    assert memory.manager.pool.num_free == 32


def test_closing_one_engine_leaves_the_others_requests_alone():
    memory = Engine.memory_for(random_model(), EXACT)
    one, other = (Engine(random_model(), EXACT, memory=memory) for _ in range(2))
    prompt = random_prompt(9)
    for engine in (one, other):
        engine.submit(prompt, FEW)
        engine.step()
    one.close()
    drain(other)
    assert other.collect("r0").token_ids == alone(tuple(prompt))


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("block_size", 8),
        ("num_blocks", 16),
        ("kv_format", "fp16"),
        ("kv_head_groups", 2),
        ("window", 8),
        ("num_swap_blocks", 4),
        ("exact", False),
    ],
)
def test_engines_on_one_memory_must_store_the_same(knob, value):
    memory = Engine.memory_for(random_model(), EXACT)
    Engine(random_model(), EXACT, memory=memory)
    with pytest.raises(ValueError, match=f"{knob}=.* differs from .* of the KV memory"):
        Engine(random_model(), replace(EXACT, **{knob: value}), memory=memory)
    assert memory.num_engines == 1


def test_engines_on_one_memory_must_run_the_same_model():
    memory = Engine.memory_for(random_model(), EXACT)
    Engine(random_model(), EXACT, memory=memory)
    with pytest.raises(ValueError, match=r"model=.* differs from .* of the KV memory"):
        Engine(random_model(seed=1), EXACT, memory=memory)


def test_a_memory_seats_no_more_sequences_than_it_was_made_for():
    config = replace(EXACT, max_num_seqs=4)
    memory = Engine.memory_for(random_model(), config)
    first = Engine(random_model(), replace(config, max_num_seqs=7), memory=memory)
    with pytest.raises(ValueError, match="max_num_seqs=4 is more than the 1 sequences"):
        Engine(random_model(), config, memory=memory)
    first.close()
    Engine(random_model(), config, memory=memory).close()


# --- block-wise formats -------------------------------------------------------------------------

BLOCKWISE = ("int8:channel", "int8:channel/int4:token", "int8:head", "int4:channel")


@pytest.mark.parametrize("kv_format", BLOCKWISE)
@pytest.mark.parametrize("pressure", [{}, {"num_swap_blocks": 30, "preemption": "swap"}])
def test_blockwise_formats_never_run_out_of_open_blocks(kv_format, pressure):
    """Forks, hits, preemption, aborts and failing steps, in a pool of hardly two sequences."""
    config = EngineConfig(
        block_size=4, num_blocks=9, kv_format=kv_format, max_num_seqs=3, chunk_size=3, **pressure
    )
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, seed=3)
    prompts = [random_prompt(n, seed=s) for s in (0, 1) for n in (8, 13, 8, 5)]
    with Engine(random_model(), config) as engine:
        ids = [
            engine.submit(p, replace(params, n=n))
            for p, n in zip(prompts, (1, 2, 3, 1) * 2, strict=True)
        ]
        run = engine.runner.run
        for number in range(400):
            if number % 17 == 5:  # interrupted when the model has computed
                engine.runner.run = lambda *args: run(*args) and 1 / 0
                with pytest.raises(ZeroDivisionError):
                    engine.step()
                engine.runner.run = run
            if number in (9, 23):
                engine.abort(ids[number % 3])
            if engine.step() is None:
                break
        assert not engine.scheduler.has_work
        assert engine.pool.num_free == 9
        assert engine.memory is not None
        engine.memory.carry_out(engine.memory.manager.take_orders())
        for kv_cache in (engine.memory.cache, engine.memory.host):
            assert kv_cache is None or kv_cache.open_blocks is None or not _open(kv_cache)


def _open(kv_cache) -> dict[int, int]:
    return kv_cache.open_blocks._places


@pytest.mark.parametrize("kv_format", BLOCKWISE)
def test_a_prefix_hit_reads_the_bytes_that_were_stored(kv_format):
    config = EngineConfig(block_size=4, kv_format=kv_format, attention_backend="reference")
    prompt = random_prompt(11, vocab_size=TINY.vocab_size)
    with Engine(random_model(), config) as engine:
        first = engine.submit(prompt, FEW)
        engine.step()
        cache, table = engine.kv_cache, engine.scheduler.running[0].block_table[:2]
        stored = cache.raw(table, 8)
        engine.abort(first)
        engine.submit(prompt, FEW)
        record = engine.step()
        assert record is not None
        assert record.sequences[0].num_cached_tokens == 8
        assert record.residents[0].block_table[:2] == table
        for before, after in zip(stored, cache.raw(table, 8), strict=True):
            assert torch.equal(before, after)


@pytest.mark.parametrize("kv_format", BLOCKWISE)
def test_swapped_blocks_come_back_with_scales_and_open_tokens(kv_format):
    config = EngineConfig(
        block_size=4, num_blocks=8, kv_format=kv_format, num_swap_blocks=8, preemption="swap"
    )
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine(random_model(), config) as engine:
        engine.submit(random_prompt(13), params)
        engine.submit(random_prompt(10), params)
        young = list(engine.scheduler.waiting)[1]
        stored: list[torch.Tensor] = []
        checked = False
        while record := engine.step():
            if "r1" in record.swapped:
                assert engine.memory is not None
                assert engine.memory.host is not None
                host = engine.memory.host.raw(young.host_table, young.num_computed_tokens)
                for ours, theirs in zip(host, stored, strict=True):
                    assert torch.equal(ours, theirs)
                checked = True
            elif young.block_table:
                stored = engine.kv_cache.raw(young.block_table, young.num_computed_tokens)
        assert checked


@pytest.mark.parametrize("kv_format", ["int4:channel", "int4:head", "int8:channel", "int4", "int8"])
def test_a_prompt_of_full_blocks_asked_for_again_and_again_keeps_its_bytes(kv_format):
    """Rewriting the last token of a block that shares a scale would round the others once more."""
    config = EngineConfig(block_size=4, num_blocks=16, kv_format=kv_format)
    with Engine(random_model(), config) as engine:
        seen = []
        for _ in range(20):
            request_id = engine.submit(
                random_prompt(8), SamplingParams(max_tokens=2, ignore_eos=True)
            )
            engine.step()
            [sample] = engine.requests[request_id].samples
            seen.append(engine.kv_cache.raw(sample.sequence.block_table, 8))
            engine.abort(request_id)
        spared = sample.metrics.num_cached_tokens
    assert spared == (4 if kv_format.endswith(("channel", "head")) else 7)
    for again in seen[1:]:
        assert all(torch.equal(a, b) for a, b in zip(seen[0], again, strict=True))


def test_engines_in_two_threads_wait_for_each_other_s_blocks():
    """A pool too small for both: each waits while the other gets on, and both finish."""
    model = random_model()
    config = EngineConfig(block_size=4, num_blocks=12, max_num_seqs=4, max_num_batched_tokens=64)
    memory = Engine.memory_for(model, config, 2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [random_prompt(n) for n in (5, 9, 13)]
    with Engine(model, config, memory=memory) as a, Engine(model, config, memory=memory) as b:
        alone = [o.token_ids for o in a.generate(prompts, params)]
        with ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(e.generate, prompts, params) for e in (a, b) for _ in range(3)]
            for run in runs:
                assert [output.token_ids for output in run.result(timeout=120)] == alone
        memory.manager.pool.check([])


@pytest.mark.parametrize("num_engines", [0, -1, "a", 1.5, True, None, 10**12])
def test_a_bad_number_of_engines_is_named(num_engines):
    with pytest.raises(ValueError, match="num_engines"):
        Engine.memory_for(random_model(), EngineConfig(), num_engines)


def test_what_is_no_memory_is_refused():
    with pytest.raises(ValueError, match="memory=5 must be KVMemory"):
        Engine(random_model(), memory=5)


def test_statistics_are_a_copy():
    with Engine(random_model()) as engine:
        before = engine.prefix_cache_stats
        engine.generate(random_prompt(9), SamplingParams(max_tokens=2))
        assert (before.num_queries, engine.prefix_cache_stats.num_queries) == (0, 1)
