"""What a StepRecord says is what happened: tokens, blocks, bytes, FLOPs and time."""

from __future__ import annotations

from collections import Counter

import pytest

from pdlab import Engine, EngineConfig, SamplingParams, Trace
from pdlab.costmodel import Chunk, step_cost
from pdlab.trace import DROPPED
from tests.helpers import SHAPES, random_model, random_prompt

SLACK_S = 1e-3
ENGINE_STAGES = {"schedule", "prepare", "sample", "deliver"}
MODEL_STAGES = {"embed", "qkv", "attention", "output", "mlp", "logits"}
STAGES = ENGINE_STAGES | MODEL_STAGES


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def run(request) -> tuple[Engine, list]:
    """A crowded run: chunks, decodes beside them, waiting, preemption, an abort."""
    config = EngineConfig(
        block_size=4,
        num_blocks=12,
        chunk_size=6,
        max_num_seqs=3,
        kv_format=request.param,
        enable_prefix_cache=False,
    )
    with Engine(random_model(SHAPES["windowed"]), config) as engine:
        engine.abort(engine.submit(random_prompt(5), SamplingParams(max_tokens=4)))
        aborted = engine.submit(random_prompt(5), SamplingParams(max_tokens=4))
        engine.step()
        engine.abort(aborted)
        prompts = [random_prompt(length) for length in (15, 9, 13, 7)]
        outputs = engine.generate(prompts, SamplingParams(max_tokens=12))
    assert any(record.preempted for record in engine.trace.steps)
    return engine, outputs


def test_cost_is_that_of_the_chunks_that_ran(run):
    engine, _ = run
    kinds = set()
    for record in engine.trace.steps:
        cost = step_cost(
            engine.model.config,
            [Chunk(part.start, part.num_tokens) for part in record.sequences],
            num_sampled=sum(part.sampled is not None for part in record.sequences),
            weight_element_bytes=4,
            kv_element_bytes={"fp32": 4, "bf16": 2}[engine.config.kv_format],
        )
        assert record.flops == cost.flops
        assert record.bytes_moved == cost.bytes
        kinds.add(record.phase)
    assert kinds == {"prefill", "decode", "mixed"}


def test_kv_bytes_are_slots_times_the_bytes_of_a_token(run):
    engine, _ = run
    config = engine.config
    token_bytes = engine.model.config.kv_bytes_per_token({"fp32": 4, "bf16": 2}[config.kv_format])
    assert engine.trace.engine["kv_bytes_per_token"] == token_bytes
    for record in engine.trace.steps:
        held = [
            (min(config.block_size, r.num_computed_tokens - i * config.block_size))
            for r in record.residents
            for i, block in enumerate(r.block_table)
            if block != DROPPED
        ]
        used, slots = sum(held), config.block_size * len(held)
        assert record.kv_used_bytes == used * token_bytes
        assert record.kv_wasted_bytes == (slots - used) * token_bytes
        assert 0 <= slots - used < config.block_size * len(record.residents)
        assert record.kv_shared_bytes == record.kv_swapped_bytes == 0


def test_blocks_add_up_from_step_to_step(run):
    """Taken and freed blocks alone tell which blocks are free at any time."""
    engine, _ = run
    free = Counter(range(engine.config.num_blocks))
    for record in engine.trace.steps:
        taken = [block for part in record.sequences for block in part.blocks_taken]
        assert len(taken) == len(set(taken))
        held = {block for resident in record.residents for block in resident.block_table}
        assert set(taken) <= held
        free.update(record.blocks_freed)
        free.subtract(taken)
        assert set(free.values()) <= {0, 1}
        assert record.num_free_blocks == free.total()
    assert free.total() == engine.config.num_blocks


def test_sequences_tell_each_request_s_story(run):
    engine, outputs = run
    for output in outputs:
        steps = engine.trace.sequence_steps(output.request_id)
        assert engine.trace.output_ids(output.request_id) == output.token_ids
        assert [part.finish_reason for _, part in steps[:-1]] == [None] * (len(steps) - 1)
        assert steps[-1][1].finish_reason == output.finish_reason == "length"
        record = engine.trace.requests[output.request_id]
        assert record.prompt_ids == output.prompt_ids
        tokens = output.prompt_ids + output.token_ids
        for _, part in steps:
            assert part.token_ids == tokens[part.start : part.end]
            assert part.phase == ("decode" if is_decode(part, record) else "prefill")


def is_decode(part, request) -> bool:
    return part.num_tokens == 1 and part.start >= len(request.prompt_ids) and bool(part.sampled)


def test_stage_times_are_parts_of_the_wall_time(run):
    engine, _ = run
    for record in engine.trace.steps:
        assert set(record.stage_s) <= STAGES
        assert all(seconds >= 0 for seconds in record.stage_s.values())
        assert sum(record.stage_s.values()) <= record.wall_s + SLACK_S
    starts = [record.start_s for record in engine.trace.steps]
    ends = [record.start_s + record.wall_s for record in engine.trace.steps]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert [record.step for record in engine.trace.steps] == list(range(len(starts)))


def test_a_step_that_samples_has_every_stage_and_one_that_does_not_has_no_sampling():
    with Engine(random_model(), EngineConfig(chunk_size=3)) as engine:
        engine.submit(random_prompt(5))
        chunk, last = engine.step(), engine.step()
    assert set(last.stage_s) == STAGES
    assert set(chunk.stage_s) == STAGES - {"logits", "sample"}


def test_recorded_candidates_hold_the_greedy_token_first(run):
    engine, _ = run
    for record in engine.trace.steps:
        for part in record.sequences:
            if part.sampled is None:
                assert part.top == []
                continue
            assert part.top[0].token_id == part.sampled
            assert len(part.top) == engine.config.top_k_recorded
            probabilities = [candidate.probability for candidate in part.top]
            assert probabilities == sorted(probabilities, reverse=True)
            assert set(engine.trace.tokens) >= {candidate.token_id for candidate in part.top}


def test_the_header_says_what_was_measured_on_what(run):
    engine, _ = run
    trace = engine.trace
    assert trace.model["weight_bytes"] == engine.model.weight_bytes
    assert trace.model["dtype"] == "float32"
    assert trace.engine["kv_format"] == engine.config.kv_format
    assert {"processor", "cores", "threads", "torch", "device", "date"} <= set(trace.machine)


def test_without_a_trace_steps_are_returned_but_not_kept():
    with Engine(random_model(), EngineConfig(record_trace=False)) as engine:
        request_id = engine.submit(random_prompt(5), SamplingParams(max_tokens=2))
        assert engine.step().num_tokens == 5
        engine.step()
        assert len(engine.collect(request_id).token_ids) == 2
        empty = Trace()
        assert (engine.trace.steps, engine.trace.requests) == (empty.steps, empty.requests)
        assert not engine.trace.tokens
