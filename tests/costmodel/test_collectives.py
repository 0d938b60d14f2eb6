"""What ranks tell each other, counted by hand. The file runs in under a second."""

from dataclasses import replace

import pytest

from pdlab.costmodel import (
    ONE_SHOT_BYTES,
    all_reduce_bytes,
    collectives_of,
    is_one_shot,
    wire_bytes_by,
)

from .shapes import TINY

WIDE = replace(TINY, num_heads=3, num_kv_heads=3)
"""TINY with three KV heads: it can be cut in three."""


def parts(collectives, rank):
    return [(c.part, c.layer, c.micro_batch) for c in collectives if c.rank == rank]


def test_one_rank_alone_tells_nobody() -> None:
    assert collectives_of(TINY, 1, 1, [(5, 1)], 4) == []


def test_two_ranks_sum_after_embedding_attention_and_mlp() -> None:
    """5 rows of 24 fp32 elements are 480 bytes; each rank sends its own to the other."""
    found = collectives_of(TINY, 2, 1, [(5, 2)], 4)
    layers = [(part, layer, 0) for layer in range(3) for part in ("output", "mlp")]
    for rank in (0, 1):
        assert parts(found, rank) == [("embed", None, 0), *layers, ("logits", None, 0)]
    reduced = [c for c in found if c.kind == "all_reduce"]
    assert {(c.num_bytes, c.wire_bytes) for c in reduced} == {(480, 480)}
    assert wire_bytes_by(found, "kind") == {"all_reduce": 2 * 7 * 480, "gather": 2 * 48 * 4}


def test_the_logits_of_an_odd_vocabulary_go_to_the_first_rank() -> None:
    """97 tokens are 49 + 48; the logits are fp32 where the rest is bf16."""
    gathered = [c for c in collectives_of(TINY, 2, 1, [(5, 2)], 2) if c.kind == "gather"]
    assert [(c.rank, c.num_bytes, c.wire_bytes) for c in gathered] == [
        (0, 2 * 49 * 4, 0),
        (1, 2 * 48 * 4, 2 * 48 * 4),
    ]


def test_no_logits_are_gathered_where_nothing_is_sampled() -> None:
    assert not [c for c in collectives_of(TINY, 2, 1, [(5, 0)], 4) if c.kind == "gather"]


def test_a_small_sum_of_three_ranks_goes_in_one_shot() -> None:
    assert all_reduce_bytes(5, 24, 4, 3) == [2 * 480] * 3


def test_a_large_sum_goes_in_two_shots_with_uneven_columns() -> None:
    """25 columns are 9 + 8 + 8. A rank sends all but its own, then its own sum to two others."""
    rows = 1000
    whole = rows * 25 * 4
    assert not is_one_shot(3, whole)
    sent = all_reduce_bytes(rows, 25, 4, 3)
    assert sent == [
        rows * 4 * (16 + 2 * 9),
        rows * 4 * (17 + 2 * 8),
        rows * 4 * (17 + 2 * 8),
    ]
    assert sum(sent) == 2 * (3 - 1) * whole  # what a ring sends


def test_where_one_shot_ends() -> None:
    assert is_one_shot(3, ONE_SHOT_BYTES)
    assert not is_one_shot(3, ONE_SHOT_BYTES + 1)
    assert is_one_shot(2, 10**9)


def test_exact_mode_sums_padded_tiles_but_the_embedding_at_once() -> None:
    """17 rows are two tiles of 16."""
    found = [c for c in collectives_of(TINY, 2, 1, [(17, 1)], 4, row_tile=16) if c.rank == 1]
    assert [(c.part, c.num_bytes) for c in found if c.layer is None] == [
        ("embed", 17 * 24 * 4),
        ("logits", 48 * 4),
    ]
    of_layer = [(c.part, c.num_bytes) for c in found if c.layer == 2]
    assert of_layer == [("output", 16 * 24 * 4)] * 2 + [("mlp", 16 * 24 * 4)] * 2


def test_stages_send_hidden_states_and_only_the_last_ones_logits() -> None:
    """Three stages of one rank: a layer each. Micro-batches of 3 and 2 rows."""
    found = collectives_of(TINY, 1, 3, [(3, 0), (2, 2)], 4)
    assert [(c.rank, c.kind, c.micro_batch, c.wire_bytes) for c in found] == [
        (rank, "send", i, rows * 24 * 4) for rank in (0, 1) for i, rows in ((0, 3), (1, 2))
    ]


def test_a_grid_has_both() -> None:
    """2 stages of 3 ranks: layers 0, 1 and layer 2."""
    found = collectives_of(WIDE, 3, 2, [(4, 1)], 4)
    first = [("embed", None), ("output", 0), ("mlp", 0), ("output", 1), ("mlp", 1)]
    for rank in (0, 1, 2):
        assert [(c.part, c.layer) for c in found if c.rank == rank] == [*first, ("hidden", None)]
    for rank in (3, 4, 5):
        last = [("output", 2), ("mlp", 2), ("logits", None)]
        assert [(c.part, c.layer) for c in found if c.rank == rank] == last
    size = 4 * 24 * 4
    assert wire_bytes_by(found, "part") == {
        "embed": 3 * 2 * size,
        "output": 3 * 3 * 2 * size,
        "mlp": 3 * 3 * 2 * size,
        "hidden": 3 * size,
        "logits": (32 + 32) * 4,  # 97 tokens are 33 + 32 + 32
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TINY, 3, 1, [(5, 1)], 4), "tensor_parallel=3"),
        ((TINY, 1, 4, [(5, 1)], 4), "pipeline_parallel=4"),
        ((TINY, 1, 1, [(5, 6)], 4), "num_sampled=6"),
        ((TINY, 1, 1, [(0, 0)], 4), "num_tokens=0"),
        ((TINY, 1, 1, [(5, 1)], 0), "element_bytes=0"),
        ((TINY, 1, 1, [(5, 1)], 4, 0), "row_tile=0"),
    ],
)
def test_refusals_name_the_parameter(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        collectives_of(*arguments)
