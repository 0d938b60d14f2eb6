"""The pool hands out each block once, takes it back once, and notices when somebody cheats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.kvcache import BlockPool, Prefix, blocks_for
from pdlab.trace import DROPPED


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


# --- cached blocks ------------------------------------------------------------------------------


def named(pool: BlockPool, *blocks: int) -> list[Prefix]:
    return [pool.remember(block, Prefix(None, (block,))) for block in blocks]


def test_a_freed_block_that_is_known_can_be_taken_up_again():
    pool = BlockPool(3, 1)
    [block] = pool.allocate(1)
    [prefix] = named(pool, block)
    assert pool.free([block]) == [block]
    assert (pool.cached_blocks, pool.num_free) == ([block], 3)
    assert pool.find(Prefix(None, (block,))) == (prefix, block)
    pool.share([block])
    assert (pool.cached_blocks, pool.num_free, pool.ref_count(block)) == ([], 2, 1)
    pool.share([block])
    assert pool.free([block]) == []
    assert pool.free([block]) == [block]


def test_empty_blocks_go_first_then_the_least_recently_used():
    pool = BlockPool(4, 1)
    blocks = pool.allocate(4)
    named(pool, 0, 1, 2)
    pool.free([2, 0, 3, 1])
    assert pool.cached_blocks == [2, 0, 1]
    pool.share([2])  # used again
    pool.free([2])
    assert pool.allocate(4) == [3, 0, 1, 2]
    assert pool.num_evictions == 3
    assert not any(pool.is_known(block) for block in blocks)
    pool.check([blocks])


def test_what_two_blocks_hold_is_known_of_the_first():
    pool = BlockPool(2, 1)
    one, other = pool.allocate(2)
    first = pool.remember(one, Prefix(None, (5,)))
    assert pool.remember(other, Prefix(None, (5,))) is first
    assert (pool.is_known(one), pool.is_known(other)) == (True, False)
    pool.free([other, one])
    assert pool.cached_blocks == [one]


def test_a_forgotten_block_is_not_found_and_stays_held():
    pool = BlockPool(2, 1)
    [block] = pool.allocate(1)
    [prefix] = named(pool, block)
    pool.forget(block)
    assert pool.find(prefix) is None
    assert pool.free([block]) == [block]
    assert pool.cached_blocks == []


def test_forget_all_leaves_blocks_to_their_holders():
    pool = BlockPool(3, 1)
    held, cached = pool.allocate(2)
    prefixes = named(pool, held, cached)
    pool.free([cached])
    pool.forget_all()
    assert (pool.cached_blocks, pool.num_free, pool.ref_count(held)) == ([], 2, 1)
    assert [pool.find(prefix) for prefix in prefixes] == [None, None]
    pool.check([[held]])


def test_a_block_that_is_neither_held_nor_cached_cannot_be_shared():
    with pytest.raises(KeyError):
        BlockPool(2, 1).share([0])


def test_dropped_entries_of_a_table_are_no_blocks():
    pool = BlockPool(4, 1)
    pool.check([[DROPPED, *pool.allocate(2), DROPPED]])


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda pool: pool._known.clear(), "prefix table"),
        (lambda pool: pool._prefixes.__setitem__(3, Prefix(None, (9,))), "an empty block has"),
        (lambda pool: pool._empty.append(3), "free twice"),
        (lambda pool: pool._cached.clear(), "free lists"),
        (lambda pool: pool._cached.update({0: None}), "free lists"),
    ],
)
def test_check_notices_a_prefix_cache_that_lies(spoil, complaint):
    pool = BlockPool(4, 4)
    held, cached = pool.allocate(2)
    named(pool, held, cached)
    pool.free([cached])
    pool.check([[held]])
    spoil(pool)
    with pytest.raises(AssertionError, match=complaint):
        pool.check([[held]])
