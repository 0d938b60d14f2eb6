"""Every attention backend computes softmax(q K^T / sqrt(d)) V over what a query may see."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdlab.attention import (
    BACKENDS,
    QUERY_TILE,
    AttentionInputs,
    ExactAttention,
    ReferenceAttention,
    visible,
)
from pdlab.attention.exact import KEY_TILE
from pdlab.kvcache import PagedKVCache, blocks_for
from tests.helpers import TINY

HEAD_DIM = TINY.head_dim
STALE = float("nan")
"""What stands in slots that nobody may read."""


def by_hand(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """One query, one head, one key at a time, in float64."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    first, group = len(k) - len(q), q.shape[1] // k.shape[1]
    for row in range(len(q)):
        position = first + row
        oldest = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            seen = slice(oldest, position + 1)
            keys, values = k[seen, head // group].double(), v[seen, head // group].double()
            scores = [float(q[row, head].double() @ key) / math.sqrt(HEAD_DIM) for key in keys]
            weights = [math.exp(score - max(scores)) for score in scores]
            for weight, value in zip(weights, values, strict=True):
                out[row, head] += weight / sum(weights) * value
    return out.float()


@dataclass
class Batch:
    """Sequences in a paged cache whose other slots hold large values."""

    cache: PagedKVCache
    inputs: AttentionInputs
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]


def make_batch(
    lengths: list[int], num_queries: list[int], block_size: int, num_heads: int, num_kv_heads: int
) -> Batch:
    config = replace(TINY, num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads)
    counts = [blocks_for(n, block_size) for n in lengths]
    cache = PagedKVCache(config, sum(counts) + 2, block_size)
    cache.storage.fill_(STALE)
    free = torch.randperm(sum(counts) + 2).tolist()
    tables = [[free.pop() for _ in range(count)] for count in counts]
    k, v = ([torch.randn(n, num_kv_heads, HEAD_DIM) for n in lengths] for _ in range(2))
    for table, keys, values in zip(tables, k, v, strict=True):
        slots = [table[p // block_size] * block_size + p % block_size for p in range(len(keys))]
        cache.write(0, torch.tensor(slots), keys, values)
    starts = [sum(num_queries[:i]) for i in range(len(lengths) + 1)]
    q = torch.randn(starts[-1], num_heads, HEAD_DIM)
    return Batch(cache, AttentionInputs(starts, lengths, tables), q, k, v)


def check(backend: str, batch: Batch, window: int | None) -> None:
    out = BACKENDS[backend]().paged(0, batch.q, batch.cache, batch.inputs, window)
    parts = out.split([batch.inputs.num_queries(i) for i in range(len(batch.k))])
    queries = batch.q.split([len(part) for part in parts])
    for part, q, k, v in zip(parts, queries, batch.k, batch.v, strict=True):
        torch.testing.assert_close(part, by_hand(q, k, v, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=30)
@given(data=st.data())
def test_a_batch_over_the_paged_cache_equals_the_formula(backend, data):
    """Decodes first, then chunks, as the scheduler orders them; any lengths, blocks and window."""
    decodes = data.draw(st.lists(st.integers(1, 20), max_size=3))
    chunks = data.draw(
        st.lists(st.tuples(st.integers(1, 20), st.integers(1, 9)), max_size=2, min_size=not decodes)
    )
    lengths = decodes + [max(chunk) for chunk in chunks]
    num_queries = [1] * len(decodes) + [min(chunk) for chunk in chunks]
    num_heads, num_kv_heads = data.draw(st.sampled_from([(1, 1), (4, 2), (6, 1), (9, 3), (4, 4)]))
    block_size = data.draw(st.sampled_from([1, 3, 4, 16]))
    window = data.draw(st.sampled_from([None, 1, 4, 30]))
    batch = make_batch(lengths, num_queries, block_size, num_heads, num_kv_heads)
    check(backend, batch, window)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("length", [KEY_TILE - 1, KEY_TILE, KEY_TILE + 1, 2 * KEY_TILE])
@pytest.mark.parametrize("num_queries", [1, QUERY_TILE - 1, QUERY_TILE, QUERY_TILE + 1])
@pytest.mark.parametrize("window", [None, 40])
def test_lengths_around_a_tile_are_right(backend, length, num_queries, window):
    check(backend, make_batch([length], [num_queries], 16, 2, 1), window)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_four_heads_over_two_read_kv_heads_0_0_1_1(backend, phase):
    lengths = [3, 9]
    batch = make_batch(lengths, lengths if phase == "prefill" else [1, 1], 4, 4, 2)
    for head in range(2):
        batch.cache.storage[1, :, :, :, head] = float(head)
    out = BACKENDS[backend]().paged(0, batch.q, batch.cache, batch.inputs)
    expected = torch.tensor([0.0, 0.0, 1.0, 1.0])[None, :, None].expand_as(out)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_queries", [[3, 9], [1, 1], [1, 9], [2, 4]])
def test_lengths_3_and_9_in_one_batch_equal_their_solo_runs(backend, num_queries):
    batch = make_batch([3, 9], num_queries, 4, 4, 2)
    attention = BACKENDS[backend]()
    together = attention.paged(0, batch.q, batch.cache, batch.inputs).split(num_queries)
    queries = batch.q.split(num_queries)
    for i, (part, q) in enumerate(zip(together, queries, strict=True)):
        solo = AttentionInputs(
            [0, len(q)], [batch.inputs.context_lens[i]], [batch.inputs.block_tables[i]]
        )
        torch.testing.assert_close(part, attention.paged(0, q, batch.cache, solo))


@pytest.mark.parametrize("window", [None, 1, 5])
def test_weights_sum_to_1_and_give_nothing_to_what_may_not_be_seen(window):
    q, k = torch.randn(7, 6, HEAD_DIM), torch.randn(12, 2, HEAD_DIM)
    weights = ReferenceAttention().weights(q, k, window)
    assert weights.shape == (6, 7, 12)
    torch.testing.assert_close(weights.sum(-1), torch.ones(6, 7))
    assert ((weights > 0) == visible(7, 12, window, q.device)).all()


@pytest.mark.parametrize(
    ("num_queries", "window", "expected"),
    [
        (1, None, ["1111"]),
        (4, None, ["1000", "1100", "1110", "1111"]),
        (2, None, ["1110", "1111"]),
        (3, 2, ["1100", "0110", "0011"]),
        (2, 1, ["0010", "0001"]),
    ],
)
def test_queries_are_the_last_positions(num_queries, window, expected):
    mask = visible(num_queries, 4, window, torch.device("cpu"))
    assert ["".join(str(int(x)) for x in row) for row in mask] == expected


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (9, 3)])
def test_an_exact_row_has_the_same_bits_at_every_place_in_a_tile(num_heads, num_kv_heads, window):
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


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64])
def test_exact_attention_does_not_feel_the_block_size(block_size):
    batch = make_batch([70, 3], [70, 3], block_size, 4, 2)
    out = ExactAttention().paged(0, batch.q, batch.cache, batch.inputs)
    plain = [
        ExactAttention().dense(q, k, v)
        for q, k, v in zip(batch.q.split([70, 3]), batch.k, batch.v, strict=True)
    ]
    assert torch.equal(out, torch.cat(plain))


def test_padded_block_tables_stop_at_the_context():
    """A table may already hold blocks for tokens to come."""
    inputs = AttentionInputs([0, 1, 2], [5, 9], [[7, 3, 8, 9], [2, 4, 6]])
    tables = inputs.padded_block_tables([0, 1], 4, torch.device("cpu"))
    assert tables.tolist() == [[7, 3, 0], [2, 4, 6]]
