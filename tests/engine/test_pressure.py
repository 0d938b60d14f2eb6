"""Too little memory: requests are refused or finish, whatever the pool, and nobody starves."""

from __future__ import annotations

import pytest
import torch

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.costmodel import Hardware
from pdlab.engine.preemption import PreemptionPolicy
from pdlab.engine.sequence import Sequence
from tests.helpers import random_model, random_prompt, run_watched

SWAP = {"num_swap_blocks": 64, "preemption": "swap"}
RECOMPUTE = {"preemption": "recompute"}


def machine(flops: float, copy_bytes_s: float) -> Hardware:
    details = {"copy_bytes_s": copy_bytes_s}
    return Hardware("imagined", "cpu", {"fp32": flops}, 1e15, 0, "a test", details=details)


FAST_LINK, SLOW_LINK = machine(1e6, 1e15), machine(1e15, 1e3)


@pytest.mark.parametrize("num_blocks", range(1, 9))
@pytest.mark.parametrize("pressure", [RECOMPUTE, SWAP], ids=["recompute", "swap"])
def test_a_pool_of_any_size_serves_or_refuses(num_blocks, pressure):
    model, params = random_model(), SamplingParams(max_tokens=4, ignore_eos=True)
    prompts = [random_prompt(length) for length in (8, 3, 20, 1, 9, 5)]
    config = EngineConfig(exact=True, block_size=4, num_blocks=num_blocks, **pressure)
    with Engine(model, EngineConfig(exact=True)) as engine:
        plain = [output.token_ids for output in engine.generate(prompts, params)]
    with Engine(model, config) as engine:
        outputs = engine.generate(prompts, params)
        assert engine.pool.num_free == num_blocks
    for prompt, output, tokens in zip(prompts, outputs, plain, strict=True):
        if len(prompt) + 3 > 4 * num_blocks:
            assert output.finish_reason == "error"
            assert f"num_blocks is {num_blocks}" in str(output.error)
        else:
            assert output.token_ids == tokens


def test_two_blocks_of_four_refuse_what_needs_three_and_serve_the_others():
    config = EngineConfig(block_size=4, num_blocks=2)
    with Engine(random_model(), config) as engine:
        big, small = random_prompt(8), random_prompt(4)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        refused, served = engine.generate([big, small], params)
    assert "needs 3 KV blocks of 4 tokens, num_blocks is 2" in str(refused.error)
    assert len(served.token_ids) == 4


@pytest.mark.parametrize("pressure", [RECOMPUTE, SWAP], ids=["recompute", "swap"])
def test_preemption_while_streaming_shows_each_token_once(pressure):
    """The stream is the youngest, so it is the one that is preempted."""
    model, params = random_model(), SamplingParams(max_tokens=12, ignore_eos=True)
    old, young = random_prompt(13), random_prompt(10)
    [alone], _, _ = run_watched(model, EngineConfig(exact=True), [young], params)
    with Engine(model, EngineConfig(exact=True, block_size=4, num_blocks=8, **pressure)) as engine:
        engine.submit(old, params)
        chunks = list(engine.stream(young, params))
        preempted = [i for record in engine.trace.steps for i in record.preempted]
        swapped = [i for record in engine.trace.steps for i in record.swapped]
    assert "r1" in preempted
    assert ("r1" in swapped) == (pressure is SWAP)
    assert [t for chunk in chunks for t in chunk.token_ids] == alone
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]


def test_a_swapped_sequence_computes_nothing_twice():
    prompts, params = [random_prompt(n) for n in (13, 8, 10)], SamplingParams(max_tokens=12)
    config = EngineConfig(exact=True, block_size=4, num_blocks=9, enable_prefix_cache=False, **SWAP)
    outputs, _, engine = run_watched(random_model(), config, prompts, params)
    parts = [part for record in engine.trace.steps for part in record.sequences]
    assert any(record.swapped for record in engine.trace.steps)
    for i, (prompt, tokens) in enumerate(zip(prompts, outputs, strict=True)):
        computed = [p for part in parts if part.sequence_id == f"r{i}" for p in part.token_ids]
        assert computed == prompt + tokens[:-1]


@pytest.mark.parametrize(
    ("preemption", "hardware", "swaps"),
    [
        ("auto", FAST_LINK, True),
        ("auto", SLOW_LINK, False),
        ("swap", SLOW_LINK, True),
        ("recompute", FAST_LINK, False),
    ],
)
def test_auto_swaps_where_the_link_is_fast(preemption, hardware, swaps):
    prompts, params = [random_prompt(n) for n in (13, 8, 10)], SamplingParams(max_tokens=12)
    config = EngineConfig(block_size=4, num_blocks=9, num_swap_blocks=64, preemption=preemption)
    with Engine(random_model(), config, hardware=hardware) as engine:
        outputs = engine.generate(prompts, params)
        records = engine.trace.steps
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    kinds = {move.kind for record in records for move in record.moves}
    assert ("swap_out" in kinds) == ("swap_in" in kinds) == swaps
    assert any(output.metrics.num_swaps for output in outputs) == swaps


def test_auto_without_host_memory_needs_no_measurements(monkeypatch):
    def never(*_):
        raise AssertionError("calibrated for nothing")

    monkeypatch.setattr("pdlab.engine.preemption.calibrate", never)
    model = random_model()
    cache = Engine(model).kv_cache
    policy = PreemptionPolicy(model, EngineConfig(), cache)
    assert not policy(Sequence("r0", "r0", [1], SamplingParams(), 0))
    with pytest.raises(AssertionError, match="calibrated"):
        PreemptionPolicy(model, EngineConfig(num_swap_blocks=1), cache)


@pytest.mark.parametrize(("watermark", "together"), [(0, 2), (0.25, 2), (0.375, 1), (1, 1)])
def test_the_watermark_keeps_blocks_for_those_who_run(watermark, together):
    """Prompts of 3 of 8 blocks: the second leaves 2 of them, a quarter of the pool."""
    config = EngineConfig(
        block_size=4, num_blocks=8, watermark=watermark, enable_prefix_cache=False
    )
    with Engine(random_model(), config) as engine:
        for seed in (1, 2):
            engine.submit(random_prompt(11, seed=seed), SamplingParams(max_tokens=3))
        record = engine.step()
        assert record is not None
        assert len(record.sequences) == together
        while engine.step():
            pass
        assert engine.pool.num_free == 8


def test_a_sequence_larger_than_the_pool_runs_in_a_window():
    config = EngineConfig(
        exact=True, block_size=4, num_blocks=6, window=8, sink_tokens=2, chunk_size=4
    )
    prompts = [random_prompt(60), random_prompt(50)]
    outputs, _, engine = run_watched(
        random_model(), config, prompts, SamplingParams(max_tokens=20, ignore_eos=True), kv=False
    )
    assert [len(tokens) for tokens in outputs] == [20, 20]
    tables = [r.block_table for record in engine.trace.steps for r in record.residents]
    assert max(len(table) for table in tables) == 20


# --- several engines ----------------------------------------------------------------------------


def two_engines(num_blocks: int, **knobs) -> list[Engine]:
    config = EngineConfig(exact=True, block_size=4, num_blocks=num_blocks, **knobs)
    memory = Engine.memory_for(random_model(), config)
    return [Engine(random_model(), config, memory=memory) for _ in range(2)]


def test_generate_complains_when_another_engine_holds_all_blocks():
    one, other = two_engines(4)
    one.submit(random_prompt(13), SamplingParams(max_tokens=3, ignore_eos=True))
    one.step()
    with pytest.raises(RuntimeError, match="held by sequences of other engines"):
        other.generate(random_prompt(5), SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="held by sequences of other engines"):
        list(other.stream(random_prompt(5), SamplingParams(max_tokens=2)))
    assert not other.requests
    while one.step():
        pass
    outputs = other.generate([random_prompt(5)], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(outputs[0].token_ids) == 2
    for engine in (one, other):
        engine.close()


@pytest.mark.parametrize("pressure", [RECOMPUTE, SWAP], ids=["recompute", "swap"])
def test_two_engines_do_not_wait_for_each_other_for_ever(pressure):
    """Regression: two half-computed prompts filled the pool, and neither engine gave way."""
    engines = two_engines(8, chunk_size=4, **pressure)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for i, engine in enumerate(engines):
        engine.submit(random_prompt(24, seed=i), params)
    for _ in range(60):
        for engine in engines:
            engine.step()
    for i, engine in enumerate(engines):
        [alone], _, _ = run_watched(
            random_model(), EngineConfig(exact=True), [random_prompt(24, seed=i)], params
        )
        assert engine.collect("r0").token_ids == alone
        engine.close()


def test_swapping_keeps_the_kv_bytes():
    """Read while the sequence waits in host memory, and again when it is back."""
    config = EngineConfig(exact=True, block_size=4, num_blocks=8, **SWAP)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with Engine(random_model(), config) as engine:
        engine.submit(random_prompt(13), params)
        engine.submit(random_prompt(10), params)
        before = torch.empty(0)
        checked = False
        while record := engine.step():
            if "r1" in record.swapped:
                now = engine.read_kv("r1")
                assert torch.equal(now, before[:, :, : now.shape[2]])
                checked = True
            else:
                before = engine.read_kv("r1")
        assert checked


def test_hardware_that_cannot_be_reckoned_with_is_refused_at_once():
    lacking = Hardware("x", "gpu", {"bf16": 1e15}, 1e12, 10**10, "made up")
    config = EngineConfig(num_swap_blocks=4)
    with pytest.raises(ValueError, match="dtype='fp32' has no peak on x"):
        Engine(random_model(), config, hardware=lacking)
    with pytest.raises(ValueError, match="hardware=5 must be Hardware"):
        Engine(random_model(), config, hardware=5)


@pytest.mark.parametrize("settings", [{"window": 10**14}, {"window": 4, "sink_tokens": 10**14}])
def test_a_window_longer_than_any_text_changes_nothing(settings):
    prompts = [random_prompt(20), random_prompt(9)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    tokens = []
    for more in ({}, settings):
        with Engine(random_model(), EngineConfig(**more)) as engine:
            tokens.append([o.token_ids for o in engine.generate(prompts, params)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("name", ["num_blocks", "block_size", "num_swap_blocks", "window"])
def test_numbers_beyond_all_reason_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} has .* hex digits, it must be from"):
        EngineConfig(**{name: 10**5000})


def test_too_much_host_memory_is_called_by_its_own_name():
    with pytest.raises(ValueError, match="num_swap_blocks=1000000000000 of block_size=16"):
        Engine(random_model(), EngineConfig(num_swap_blocks=10**12, preemption="swap"))
