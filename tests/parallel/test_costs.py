"""What ranks hold and what they send is what the cost model says of the shapes, byte for byte.

The file takes three seconds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pdlab
from pdlab import Engine, EngineConfig, SamplingParams, Trace
from pdlab.costmodel import collectives_of, rank_kv_bytes_per_token, rank_weight_bytes
from pdlab.engine.runner import EXACT_ROW_TILE
from pdlab.models.shard_plan import ShardPlan
from pdlab.models.sharded import ShardedDecoder
from pdlab.parallel import ParallelRunner
from pdlab.workbench.shard_data import ROW_TILE, exchanges, micro_batches_of, plan_of
from tests.helpers import random_model, random_prompt
from tests.parallel.models import GRIDS, ODD, SHAPES, on_threads

PROMPTS = [random_prompt(length, ODD.vocab_size) for length in (3, 21, 8)]
KNOBS: dict[str, dict[str, Any]] = {
    "more pieces": {"micro_batches": 5},
    "chunks": {"chunk_size": 5, "max_num_batched_tokens": 11, "max_num_seqs": 2},
    "drafts": {"speculation": pdlab.PromptLookup(num_tokens=3)},
    "recomputed": {"num_blocks": 12, "preemption": "recompute"},
}


RUNS = {
    f"{tp}x{pp}{', exact' * exact}": ((tp, pp), {"exact": exact})
    for tp, pp in GRIDS
    for exact in (False, True)
} | {name: ((3, 2), knobs) for name, knobs in KNOBS.items()}


def recorded(config: EngineConfig) -> Trace:
    """Three greedy requests."""
    with Engine(random_model(ODD), config) as engine:
        engine.generate(PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True))
        return engine.trace


@pytest.mark.parametrize(("grid", "knobs"), RUNS.values(), ids=RUNS)
def test_counted_bytes_are_the_formulas(grid: tuple[int, int], knobs: dict[str, Any]) -> None:
    config = on_threads(*grid, **knobs)
    trace = recorded(config)
    assert plan_of(trace) == ShardPlan(ODD, *grid)
    for record in trace.steps:
        counted = [tuple(each[:7]) for each in record.collectives]
        pieces = micro_batches_of(record.sequences, config.micro_batches or grid[1])
        tile = EXACT_ROW_TILE if config.exact else None
        assert counted == [tuple(each) for each in collectives_of(ODD, *grid, pieces, 4, tile)]
        assert all(e.wire_bytes == e.formula_bytes for e in exchanges(trace, record))
    assert sum(len(record.collectives) for record in trace.steps) > 0
    assert ROW_TILE == EXACT_ROW_TILE


def test_a_large_sum_of_three_ranks_is_counted_too() -> None:
    """600 rows of 32 fp32 are above what goes in one shot; 32 columns are 11 + 11 + 10."""
    shape, num_rows = replace(ODD, max_model_len=1024), 600
    with Engine(random_model(shape), on_threads(3, 1, num_blocks=160)) as engine:
        engine.generate(random_prompt(num_rows, ODD.vocab_size), SamplingParams(max_tokens=1))
        [record] = engine.trace.steps
    told = collectives_of(ODD, 3, 1, [(num_rows, 1)], 4)
    assert [tuple(each[:7]) for each in record.collectives] == [tuple(each) for each in told]
    embed = [each for each in record.collectives if each.part == "embed"]
    assert [each.wire_bytes for each in embed] == [
        num_rows * 4 * (32 - own + 2 * own) for own in (11, 11, 10)
    ]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
def test_ranks_hold_the_weights_that_the_cost_model_says(grid: tuple[int, int], shape) -> None:
    plan = ShardPlan(shape, *grid)
    held = [ShardedDecoder(shape, shard).weight_bytes for shard in plan.shards]
    assert held == rank_weight_bytes(plan, 4)


def test_ranks_hold_the_kv_that_the_cost_model_says() -> None:
    with Engine(random_model(ODD), on_threads(2, 2)) as engine:
        runner = engine.runner
        assert isinstance(runner, ParallelRunner)
        slots = engine.config.block_size * engine.pool.num_blocks
        by_rank = rank_kv_bytes_per_token(ShardPlan(ODD, 2, 2), 4)
        assert [each.kv_bytes for each in runner.ranks.ready] == [slots * n for n in by_rank]
