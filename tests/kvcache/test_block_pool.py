"""The pool hands out each block once, takes it back once, and notices when somebody cheats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.kvcache import BlockPool, blocks_for


@given(num_tokens=st.integers(0, 1000), block_size=st.integers(1, 100))
def test_blocks_for_is_the_least_number_that_holds_the_tokens(num_tokens, block_size):
    blocks = blocks_for(num_tokens, block_size)
    assert blocks * block_size >= num_tokens
    assert blocks == 0 or (blocks - 1) * block_size < num_tokens


@given(st.lists(st.integers(0, 6), max_size=30), st.randoms(use_true_random=False))
def test_a_block_has_one_owner_and_none_gets_lost(counts, rng):
    pool, tables = BlockPool(10, 4), []
    for count in counts:
        if count <= pool.num_free and rng.random() < 0.6:
            tables.append(pool.allocate(count))
        elif tables:
            table = tables.pop(rng.randrange(len(tables)))
            assert pool.free(table) == table
        held = [block for table in tables for block in table]
        assert len(held) == len(set(held)) == 10 - pool.num_free
        pool.check(tables)
    for table in tables:
        pool.free(table)
    assert pool.num_free == 10


def test_a_freed_block_rests_as_long_as_possible():
    pool = BlockPool(3, 4)
    first, second = pool.allocate(2)
    pool.free([first])
    assert pool.allocate(2) == [2, first]
    pool.free([second])
    assert pool.allocate(1) == [second]


def test_more_than_is_free_is_never_handed_out():
    pool = BlockPool(3, 4)
    with pytest.raises(AssertionError, match="4 blocks asked, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_freeing_twice_is_noticed():
    pool = BlockPool(3, 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="block 0 freed twice"):
        pool.free(blocks)


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ([], "reference counts"),  # two blocks leaked
        ([[0]], "reference counts"),  # one leaked
        ([[0, 1], [1]], "reference counts"),  # one shared without a reference
        ([[0, 1, 2]], "reference counts"),  # one in use though free
    ],
)
def test_check_notices_tables_that_do_not_account_for_every_block(tables, complaint):
    pool = BlockPool(4, 4)
    pool.allocate(2)
    pool.check([[0, 1]])
    with pytest.raises(AssertionError, match=complaint):
        pool.check(tables)
