"""Every attention backend computes softmax(q K^T / sqrt(d)) V over what a query may see."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab.attention import (
    BACKENDS,
    QUERY_TILE,
    AttentionInputs,
    ReferenceAttention,
    Window,
    visible,
    visible_blocks,
)
from pdlab.attention.exact import KEY_TILE
from tests.attention.batches import HEAD_DIM, HEADS, Batch, by_hand, make_batch, windows


def check(
    backend: str, batch: Batch, window: Window | None, present: list[list[int]] | None = None
) -> None:
    """Against the formula, to within rounding; `present` are the keys left of each sequence."""
    out = BACKENDS[backend]().paged(0, batch.q, batch.cache, batch.inputs, window)
    for i, (q, k, v) in enumerate(zip(batch.queries, batch.k, batch.v, strict=True)):
        expected = by_hand(q, k, v, window, present[i] if present else None)
        torch.testing.assert_close(out[batch.inputs.rows(i)], expected, rtol=1e-5, atol=1e-5)


@st.composite
def batches(draw) -> Batch:
    """Decodes first, then chunks, as the scheduler orders them."""
    decodes = draw(st.lists(st.integers(1, 20), max_size=3))
    chunk = st.tuples(st.integers(1, 20), st.integers(1, 9))
    chunks = draw(st.lists(chunk, max_size=2, min_size=not decodes))
    lengths = decodes + [max(chunk) for chunk in chunks]
    num_queries = [1] * len(decodes) + [min(chunk) for chunk in chunks]
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    return make_batch(lengths, num_queries, block_size, *draw(HEADS))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(batch=batches(), window=windows(longest=20))
def test_a_batch_over_the_paged_cache_equals_the_formula(backend, batch, window):
    """Whether blocks out of the window are there or not; any lengths, blocks and window."""
    check(backend, batch, window)
    inputs, block_size = batch.inputs, batch.cache.block_size
    for i, end in enumerate(inputs.context_lens):
        seen = visible_blocks(end - inputs.num_queries(i), end, block_size, window)
        batch = batch.dropped(i, set(range(len(inputs.block_tables[i]))) - set(seen))
    check(backend, batch, window)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(batch=batches(), window=windows(longest=20), data=st.data())
def test_dropped_blocks_that_a_window_would_show_are_not_seen(backend, batch, window, data):
    """Eviction of light hitters (H2O, Zhang et al. 2023) leaves gaps anywhere before the chunk."""
    inputs, block_size = batch.inputs, batch.cache.block_size
    present = []
    for i, end in enumerate(inputs.context_lens):
        older = (end - inputs.num_queries(i)) // block_size
        gone = {entry for entry in range(older) if data.draw(st.booleans())}
        batch = batch.dropped(i, gone)
        present.append([p for p in range(end) if p // block_size not in gone])
    check(backend, batch, window, present)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 2 * KEY_TILE])
@pytest.mark.parametrize("num_queries", [1, QUERY_TILE - 1, QUERY_TILE, QUERY_TILE + 1])
@pytest.mark.parametrize("window", [None, Window(40), Window(20, sinks=4)])
def test_lengths_around_a_tile_are_right(backend, length, num_queries, window):
    check(backend, make_batch([length], [num_queries], 16, 2, 1), window)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_queries", [[3, 9], [1, 1]], ids=["prefill", "decode"])
@pytest.mark.parametrize("window", [None, Window(2, sinks=1)])
def test_four_heads_over_two_read_kv_heads_0_0_1_1(backend, num_queries, window):
    batch = make_batch([3, 9], num_queries, 4, 4, 2)
    for keys, values, table in zip(batch.k, batch.v, batch.inputs.block_tables, strict=True):
        values[:] = torch.tensor([0.0, 1.0])[:, None]
        slots = [table[p // 4] * 4 + p % 4 for p in range(len(keys))]
        batch.cache.write(0, batch.cache.write_plan(slots), keys, values)
    out = BACKENDS[backend]().paged(0, batch.q, batch.cache, batch.inputs, window)
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0])[None, :, None].expand_as(out)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_queries", [[3, 9], [1, 1], [1, 9], [2, 4]])
@pytest.mark.parametrize("window", [None, Window(4), Window(2, sinks=1)])
def test_lengths_3_and_9_in_one_batch_equal_their_solo_runs(backend, num_queries, window):
    batch = make_batch([3, 9], num_queries, 4, 4, 2)
    attention = BACKENDS[backend]()
    together = attention.paged(0, batch.q, batch.cache, batch.inputs, window)
    for i, q in enumerate(batch.queries):
        solo = AttentionInputs(
            [0, len(q)], [batch.inputs.context_lens[i]], [batch.inputs.block_tables[i]]
        )
        alone = attention.paged(0, q, batch.cache, solo, window)
        torch.testing.assert_close(together[batch.inputs.rows(i)], alone)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("window", [None, Window(7), Window(3, sinks=2)])
@pytest.mark.parametrize("num_queries", [1, 6])
def test_keys_that_are_missing_give_the_same_as_keys_out_of_sight(backend, window, num_queries):
    """Without positions, the keys are all there; with them, only those that some query sees."""
    q, (k, v) = torch.randn(num_queries, 4, HEAD_DIM), torch.randn(2, 90, 2, HEAD_DIM)
    positions = torch.arange(90)
    positions = positions[visible(positions[-num_queries:], positions, window).any(0)]
    attention = BACKENDS[backend]()
    part = attention.dense(q, k[positions], v[positions], window, positions)
    torch.testing.assert_close(part, attention.dense(q, k, v, window))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_queries", [[40, 70], [1, 1], [1, 9]])
def test_a_window_as_long_as_the_context_changes_no_bit(backend, num_queries):
    batch = make_batch([40, 70], num_queries, 16, 4, 2)
    attention = BACKENDS[backend]()
    plain = attention.paged(0, batch.q, batch.cache, batch.inputs)
    for window in (Window(70), Window(71, sinks=3)):
        assert torch.equal(attention.paged(0, batch.q, batch.cache, batch.inputs, window), plain)


def test_only_visible_blocks_are_read(monkeypatch):
    batch = make_batch([400, 300], [1, 1], 16, 4, 2)
    gather, read = batch.cache.gather, []
    monkeypatch.setattr(
        batch.cache, "gather", lambda *args: read.append(args[1].numel()) or gather(*args)
    )
    for attention in (backend() for backend in BACKENDS.values()):
        read.clear()
        attention.paged(0, batch.q, batch.cache, batch.inputs, Window(32, sinks=4))
        assert sum(read) <= 2 * 4  # 1 block of sinks, 3 that meet the window


@pytest.mark.parametrize("window", [None, Window(1), Window(5), Window(3, sinks=2)])
def test_weights_sum_to_1_and_give_nothing_to_what_may_not_be_seen(window):
    q, k = torch.randn(7, 6, HEAD_DIM), torch.randn(12, 2, HEAD_DIM)
    keys = torch.arange(12)
    weights = ReferenceAttention().weights(q, k, window)
    assert weights.shape == (6, 7, 12)
    torch.testing.assert_close(weights.sum(-1), torch.ones(6, 7))
    assert ((weights > 0) == visible(keys[-7:], keys, window)).all()
    later = ReferenceAttention().weights(q, k, window, keys + 100)
    assert ((later > 0) == visible(keys[-7:] + 100, keys + 100, window)).all()
