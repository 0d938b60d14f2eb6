"""Exact attention: a row's bits depend on what it sees, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.attention import QUERY_TILE, ExactAttention, Window, visible, visible_blocks
from pdlab.attention.exact import KEY_TILE
from tests.attention.batches import BLOCK_SIZES, HEAD_DIM, HEADS, batch_of, make_batch, windows


@pytest.mark.parametrize("window", [None, Window(50), Window(30, sinks=5)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (9, 3)])
def test_a_row_has_the_same_bits_at_every_place_in_a_tile(num_heads, num_kv_heads, window):
    """A prompt cut anywhere puts a row elsewhere in its tile, beside other rows."""
    length = KEY_TILE + QUERY_TILE + 9
    q = torch.randn(length, num_heads, HEAD_DIM)
    k, v = torch.randn(2, length, num_kv_heads, HEAD_DIM)
    attention = ExactAttention()
    whole = attention.dense(q, k, v, window)
    for start in range(length):
        for end in {start + 1, min(start + 7, length), min(start + QUERY_TILE, length)}:
            part = attention.dense(q[start:end], k[:end], v[:end], window)
            assert torch.equal(part, whole[start:end]), f"rows {start} to {end}"


@settings(max_examples=150)
@given(
    length=st.integers(1, 4 * KEY_TILE),
    cuts=st.sets(st.integers(1, 4 * KEY_TILE - 1), max_size=5),
    block_size=BLOCK_SIZES,
    window=windows(longest=3 * KEY_TILE),
    heads=HEADS,
)
def test_blocks_cuts_and_dropping_what_is_out_of_sight_change_no_bit(
    length, cuts, block_size, window, heads
):
    """All chunks of one sequence, over a table that loses each block as soon as it may.

    Values of both signs and zeros of both signs: a sum must not even change the sign of a zero.
    """
    q = torch.randn(length, heads[0], HEAD_DIM)
    k, v = torch.randn(2, length, heads[1], HEAD_DIM)
    v[:, :, 0] = -0.0
    v[:, :, 1] = torch.where(v[:, :, 1] > 0, 0.0, -0.0)
    attention = ExactAttention()
    whole = attention.dense(q, k, v, window)
    ends = sorted({cut for cut in cuts if cut < length} | {length})
    for start, end in zip([0, *ends], ends, strict=False):
        batch = batch_of(q[start:end], [k[:end]], [v[:end]], [end - start], block_size)
        full = attention.paged(0, batch.q, batch.cache, batch.inputs, window)
        seen = visible_blocks(start, end, block_size, window)
        less = batch.dropped(0, set(range(len(batch.inputs.block_tables[0]))) - set(seen))
        dropped = attention.paged(0, less.q, less.cache, less.inputs, window)
        for part in (full, dropped):
            assert same_bits(part, whole[start:end]), f"rows {start} to {end}"


@pytest.mark.parametrize("window", [None, Window(33), Window(20, sinks=4)])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64])
def test_neighbours_change_no_bit(block_size, window):
    num_queries = [1, 1, 70, 3]
    batch = make_batch([150, 7, 70, 9], num_queries, block_size, 4, 2)
    out = ExactAttention().paged(0, batch.q, batch.cache, batch.inputs, window)
    plain = [
        ExactAttention().dense(q, k, v, window)
        for q, k, v in zip(batch.queries, batch.k, batch.v, strict=True)
    ]
    assert same_bits(out, torch.cat(plain))


@given(length=st.integers(1, 4 * KEY_TILE), window=windows(longest=3 * KEY_TILE), data=st.data())
def test_any_part_of_the_keys_that_holds_the_visible_ones_gives_the_same_bits(length, window, data):
    num_queries = data.draw(st.integers(1, length))
    q, (k, v) = torch.randn(num_queries, 4, HEAD_DIM), torch.randn(2, length, 2, HEAD_DIM)
    positions = torch.arange(length)
    needed = visible(positions[-num_queries:], positions, window).any(0)
    kept = positions[needed | (torch.rand(length) < data.draw(st.floats(0, 1)))]
    part = ExactAttention().dense(q, k[kept], v[kept], window, kept)
    assert same_bits(part, ExactAttention().dense(q, k, v, window))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Stricter than `torch.equal`, to which 0 and -0 are the same."""
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))
