"""A window says which keys a query sees, and with that which blocks are read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pdlab.attention import AttentionInputs, Window, narrower, visible, visible_blocks
from pdlab.attention.interface import NOWHERE
from pdlab.trace import DROPPED
from tests.attention.batches import BLOCK_SIZES, sees, windows

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": 0}, "size=0, it must be at least 1"),
        ({"size": 3, "sinks": -1}, "sinks=-1, it must be at least 0"),
        ({"size": 3, "reach": 2}, "reach=2, it must be at least size=3"),
    ],
)
def test_an_impossible_window_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Window(**given)


@pytest.mark.parametrize(
    ("num_queries", "window", "expected"),
    [
        (1, None, ["1111"]),
        (4, None, ["1000", "1100", "1110", "1111"]),
        (2, None, ["1110", "1111"]),
        (3, Window(2), ["1100", "0110", "0011"]),
        (2, Window(1), ["0010", "0001"]),
        (4, Window(1, sinks=1), ["1000", "1100", "1010", "1001"]),
        (3, Window(2, sinks=2), ["1100", "1110", "1111"]),
        (4, Window(1, sinks=1, reach=3), ["1000", "1100", "1010", "0001"]),
        (2, Window(9, sinks=9), ["1110", "1111"]),
    ],
)
def test_queries_are_the_last_positions_and_each_has_its_own_window(num_queries, window, expected):
    keys = torch.arange(4)
    mask = visible(keys[-num_queries:], keys, window)
    assert ["".join(str(int(x)) for x in row) for row in mask] == expected


@given(
    st.none() | st.builds(Window, st.integers(1, 12), st.integers(0, 12)),
    st.none() | st.integers(1, 12),
)
def test_a_layer_with_a_window_of_its_own_shows_what_both_windows_show(window, model_window):
    keys = torch.arange(30)
    own = None if model_window is None else Window(model_window)
    both = visible(keys, keys, window) & visible(keys, keys, own)
    assert torch.equal(visible(keys, keys, narrower(window, model_window)), both)


@settings(max_examples=200)
@example(15, 1, 4, Window(1, sinks=5, reach=10))  # reach ends in the last sink's block, behind it
@given(st.integers(1, 150), st.integers(1, 40), BLOCK_SIZES, windows())
def test_the_blocks_read_are_those_that_hold_a_visible_key(
    context_len, num_queries, block_size, window
):
    first = max(0, context_len - num_queries)
    seen = {
        key // block_size
        for query in range(first, context_len)
        for key in range(context_len)
        if sees(query, key, window)
    }
    read = visible_blocks(first, context_len, block_size, window)
    assert read == sorted(seen)


@given(st.integers(0, 150), BLOCK_SIZES, windows())
def test_a_block_that_a_query_cannot_see_no_later_one_will(position, block_size, window):
    now = set(visible_blocks(position, position + 1, block_size, window))
    later = set(visible_blocks(position + 1, position + 2, block_size, window))
    assert later <= now | {(position + 1) // block_size}


def test_what_is_read_stops_at_the_context():
    """A table may already hold blocks for tokens to come."""
    inputs = AttentionInputs([0, 1, 2], [5, 9], [[7, 3, 8, 9], [2, 4, 6]])
    reads = inputs.reads(range(2), 4, None, CPU)
    assert reads.tables.tolist() == [[7, 3, 0], [2, 4, 6]]
    assert reads.positions[0].tolist() == [0, 1, 2, 3, 4] + [NOWHERE] * 7
    assert reads.positions[1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8] + [NOWHERE] * 3
    assert reads.num_keys == [5, 9]
    assert reads.whole


def test_dropped_blocks_and_those_out_of_the_window_are_not_read():
    inputs = AttentionInputs([0, 2], [11], [[5, DROPPED, 7, 8, 9, 3]])
    window = Window(3, sinks=1)
    reads = inputs.reads(range(1), 2, window, CPU)
    assert reads.tables.tolist() == [[5, 8, 9, 3]]
    assert reads.positions.tolist() == [[0, 1, 6, 7, 8, 9, 10, NOWHERE]]
    assert reads.num_keys == [7]
    assert not reads.whole
    assert inputs.reads(range(1), 2, Window(3, sinks=1), CPU) is reads  # the next layer's


def test_a_query_never_loses_its_own_key():
    inputs = AttentionInputs([0, 3], [6], [[5, DROPPED, 7]])
    with pytest.raises(AssertionError, match="own key"):
        inputs.reads(range(1), 2, None, CPU)
