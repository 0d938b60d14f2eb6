"""Which rank holds what: everything once, in order, as even as it can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdlab.attention import AttentionInputs
from pdlab.engine.batch import BatchInputs
from pdlab.models import catalog
from pdlab.models.shard_plan import ShardPlan, cut
from pdlab.models.sharded import ShardedDecoder, shard_weights
from pdlab.parallel.micro_batches import cut_batch
from tests.helpers import random_model
from tests.parallel.models import GRIDS, SHAPES


@given(st.integers(0, 200), st.integers(1, 40))
def test_a_cut_leaves_nothing_out_and_is_even(total: int, parts: int) -> None:
    ranges = cut(total, parts)
    assert [i for part in ranges for i in part] == list(range(total))
    sizes = [len(part) for part in ranges]
    assert len(sizes) == parts
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_smollm2_over_two_and_three_ranks() -> None:
    shape = catalog.shape("smollm2-135m")
    two, three = (ShardPlan(shape, n).shards for n in (2, 3))
    assert [(len(s.kv_heads), len(s.heads), len(s.mlp)) for s in two] == [(2, 6, 768), (1, 3, 768)]
    assert [len(s.vocabulary) for s in two] == [24576, 24576]
    assert [(len(s.kv_heads), len(s.heads), len(s.mlp)) for s in three] == [(1, 3, 512)] * 3
    stages = ShardPlan(shape, 1, 4).shards
    assert [s.layers for s in stages] == [range(8), range(8, 16), range(16, 23), range(23, 30)]
    assert [s.has_embedding for s in stages] == [True, False, False, False]
    assert [s.has_head for s in stages] == [False, False, False, True]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid[0]}x{grid[1]}")
def test_the_shards_hold_every_weight_as_often_as_they_must(grid: tuple[int, int], shape) -> None:
    """Matrices once; what every rank of a stage needs whole (norms) on each; and no bias twice."""
    plan, whole = ShardPlan(shape, *grid), random_model(shape).decoder
    numbers = 0
    for shard in plan.shards:
        decoder = ShardedDecoder(shape, shard)
        decoder.load_weights(shard_weights(shape, shard, whole.named_weights().items()))
        numbers += sum(
            int((w != 0).sum())
            for name, w in decoder.named_weights().items()
            if "norm" not in name and "embed" not in name
        )
    held = sum(
        int((w != 0).sum())
        for name, w in whole.named_weights().items()
        if "norm" not in name and "embed" not in name
    )
    assert numbers == held
    rows = [len(shard.vocabulary) for shard in plan.shards if shard.has_embedding]
    assert sum(rows) == shape.vocab_size


@st.composite
def batches(draw: st.DrawFn) -> BatchInputs:
    """Sequences of a step, each with some tokens computed before."""
    parts = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=6))
    starts, positions, lens, samples = [0], [], [], []
    for start, count in parts:
        positions += range(start, start + count)
        starts.append(starts[-1] + count)
        lens.append(start + count)
        if draw(st.booleans()):
            samples.append(starts[-1] - 1)
    rows = list(range(len(positions)))
    tables = [[i] for i in range(len(parts))]
    return BatchInputs(rows, positions, rows, AttentionInputs(starts, lens, tables), samples)


@given(batches(), st.integers(1, 12))
def test_micro_batches_are_the_batch_in_pieces(inputs: BatchInputs, most: int) -> None:
    pieces = cut_batch(inputs, most)
    assert len(pieces) == min(most, len(inputs.token_ids))
    assert [t for piece in pieces for t in piece.token_ids] == inputs.token_ids
    sampled, offset, seen = [], 0, {}
    for piece in pieces:
        sampled += [row + offset for row in piece.sample_rows]
        attention = piece.attention
        assert attention.query_starts[-1] == len(piece.token_ids)
        for i, [sequence] in enumerate(attention.block_tables):
            rows = attention.rows(i)
            assert rows.stop > rows.start
            assert piece.positions[rows.stop - 1] == attention.context_lens[i] - 1
            assert seen.get(sequence, piece.positions[rows.start]) == piece.positions[rows.start]
            seen[sequence] = attention.context_lens[i]
        offset += len(piece.token_ids)
    assert sampled == inputs.sample_rows
    assert list(seen.values()) == inputs.attention.context_lens


def test_a_share_of_a_bias_is_added_once() -> None:
    shape = SHAPES["untied, biased"]
    first, second = ShardPlan(shape, 2).shards
    bias = torch.ones(shape.hidden_size)
    name = "model.layers.3.self_attn.o_proj.bias"
    assert dict(shard_weights(shape, first, [(name, bias)]))[name].sum() == shape.hidden_size
    assert dict(shard_weights(shape, second, [(name, bias)]))[name].sum() == 0
    with pytest.raises(ValueError, match="weights are missing"):
        ShardedDecoder(replace(shape), first).load_weights([])
