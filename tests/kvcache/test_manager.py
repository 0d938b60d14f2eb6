"""Who holds which blocks: found, copied, forked, dropped, swapped, given back; each exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlab.kvcache import BlockPool, KVManager, Prefix, Release, Retention, blocks_for
from pdlab.trace import DROPPED, BlockMove


@dataclass
class Text:
    """A sequence, as far as the manager knows it."""

    token_ids: list[int]
    sequence_id: str = "r0"
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    host_table: list[int] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    block_mass: list[float] = field(default_factory=list)
    uses_prefix_cache: bool = True


def manager_of(
    num_blocks: int = 8,
    block_size: int = 4,
    num_host: int = 0,
    retention: Retention | None = None,
    max_swapped: int | None = None,
) -> KVManager:
    pool, host = BlockPool(num_blocks, block_size), BlockPool(num_host, block_size)
    return KVManager(pool, host, retention or Retention(), max_swapped)


def compute(kv: KVManager, text: Text, num_tokens: int) -> list[int]:
    """What a step does for a sequence; returns the blocks taken."""
    taken = kv.grow(text, num_tokens)
    text.num_computed_tokens += num_tokens
    text.block_mass += [0.0] * (len(text.block_table) - len(text.block_mass))
    kv.register(text)
    kv.drop_unseen(text)
    return taken


def begin(kv: KVManager, text: Text, num_tokens: int | None = None) -> int:
    """Admit a sequence and compute it, or its next tokens; returns its cached tokens."""
    hits = kv.look_up(text)
    kv.count(text, hits)
    cached = kv.start(text, hits)
    left = len(text.token_ids) - text.num_computed_tokens
    compute(kv, text, left if num_tokens is None else num_tokens)
    return cached


# --- finding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "cached"),
    [
        (range(10), 8),
        (range(8), 7),  # all of it: the last token is computed again
        (range(7), 4),  # the second block is not full
        ([0, 1, 2, 3, 9, 9, 9, 9, 9], 4),
        ([9, *range(1, 10)], 0),
        ([*range(4, 8), *range(4)], 0),  # the same blocks in another order
        ([0], 0),
    ],
)
def test_the_longest_cached_prefix_is_found(second, cached):
    kv, first = manager_of(), Text(list(range(9)))
    begin(kv, first)
    kv.release(first)
    text = Text(list(second))
    assert begin(kv, text) == cached
    kv.pool.check([text.block_table])
    assert (kv.stats.num_hit_tokens, kv.stats.num_queries) == (cached, 2)
    assert kv.stats.num_query_tokens == 9 + len(text.token_ids)
    assert kv.stats.hit_rate == cached / (9 + len(text.token_ids))


def test_a_sequence_without_the_prefix_cache_neither_reads_nor_leaves_anything():
    kv = manager_of()
    hermit = Text(list(range(9)), uses_prefix_cache=False)
    begin(kv, hermit)
    kv.release(hermit)
    assert kv.pool.cached_blocks == []
    begin(kv, open_one := Text(list(range(9))))
    kv.release(open_one)
    assert begin(kv, hermit) == 0
    assert kv.stats.num_queries == 1


def test_no_query_is_no_hit_rate():
    assert manager_of().stats.hit_rate == 0


def test_a_block_found_behind_a_gap_is_not_used():
    """The first block of a chain is evicted: the second cannot be reached any more."""
    kv, first = manager_of(num_blocks=3), Text(list(range(8)))
    begin(kv, first)
    kv.pool.forget(first.block_table[0])
    assert kv.look_up(Text(list(range(9)))).num_tokens == 0


def test_the_end_of_a_prefix_is_evicted_before_its_beginning():
    kv, first = manager_of(num_blocks=3), Text(list(range(12)))
    begin(kv, first)
    kv.release(first)
    for left in (2, 1, 0):
        kv.pool.allocate(1)
        assert len(kv.look_up(Text(list(range(13)))).prefixes) == left


# --- writing what is shared ---------------------------------------------------------------------


def test_a_whole_hit_is_written_in_place_where_nobody_holds_it():
    kv, first = manager_of(), Text(list(range(8)))
    begin(kv, first)
    table = list(first.block_table)
    kv.release(first)
    again = Text(list(range(8)))
    kv.start(again, kv.look_up(again))
    assert kv.grow(again, 1) == []
    assert again.block_table == table
    assert not kv.pool.is_known(table[1])  # until the step is booked
    again.num_computed_tokens = 8
    kv.register(again)
    assert kv.pool.is_known(table[1])
    assert [order for order in kv.take_orders() if isinstance(order, BlockMove)] == []


def test_a_whole_hit_is_copied_where_somebody_holds_it():
    kv, first, again = manager_of(), Text(list(range(8))), Text(list(range(8)), "r1")
    begin(kv, first)
    kv.start(again, kv.look_up(again))
    shared = first.block_table[1]
    [own] = kv.grow(again, 1)
    assert again.block_table == [first.block_table[0], own]
    assert [kv.pool.ref_count(b) for b in (first.block_table[0], shared, own)] == [2, 1, 1]
    assert kv.take_orders() == [BlockMove("copy", shared, own, "r1")]
    assert kv.pool.is_known(shared)
    kv.pool.check([first.block_table, again.block_table])


def test_forks_share_all_blocks_and_the_last_to_write_keeps_the_block():
    kv, parent = manager_of(), Text([5] * 6)
    begin(kv, parent)
    children = [Text([5] * 6, f"r0.{i}") for i in (1, 2)]
    for child in children:
        kv.fork(parent, child)
    first, last = parent.block_table
    assert [kv.pool.ref_count(b) for b in (first, last)] == [3, 3]
    assert [kv.blocks_missing(t, 1) for t in (parent, *children)] == [1, 1, 1]
    kv.take_orders()
    for text in (parent, *children):
        text.token_ids.append(1)
        compute(kv, text, 1)
    assert kv.pool.ref_count(first) == 3
    assert children[1].block_table[1] == last
    moves = kv.take_orders()
    assert [(m.kind, m.source) for m in moves] == [("copy", last)] * 2
    kv.pool.check(t.block_table for t in (parent, *children))
    for text in (parent, *children):
        kv.release(text)
    assert kv.pool.num_free == 8


@given(
    block_size=st.integers(1, 4),
    stem=st.integers(0, 9),
    ends=st.lists(st.lists(st.integers(0, 1), max_size=4), min_size=1, max_size=5),
    chunk=st.integers(1, 20),
    rng=st.randoms(use_true_random=False),
)
def test_what_admission_asks_for_is_enough(block_size, stem, ends, chunk, rng):
    """Regression: with blocks of one token, the copy of the last block was not reckoned with."""
    kv = manager_of(num_blocks=60, block_size=block_size)
    texts = []
    for end in ends:
        text = Text([7] * stem + end or [7])
        hits = kv.look_up(text)
        asked, free = kv.blocks_to_start(text, hits, chunk), kv.pool.num_free
        kv.start(text, hits)
        while text.num_computed_tokens < len(text.token_ids):
            compute(kv, text, min(chunk, len(text.token_ids) - text.num_computed_tokens))
        assert asked == free - kv.pool.num_free
        texts.append(text)
        if rng.random() < 0.5:
            kv.release(texts.pop(rng.randrange(len(texts))))
    kv.pool.check(text.block_table for text in texts)


# --- windows ------------------------------------------------------------------------------------


@given(
    window=st.integers(1, 12),
    sinks=st.integers(0, 6),
    heavy=st.integers(0, 6),
    chunk=st.integers(1, 9),
    block_size=st.integers(1, 5),
    num_tokens=st.integers(1, 50),
    rng=st.randoms(use_true_random=False),
)
def test_no_sequence_ever_holds_more_than_peak_blocks(
    window, sinks, heavy, chunk, block_size, num_tokens, rng
):
    retention = Retention(window, sinks, heavy)
    peak = retention.peak_blocks(num_tokens, chunk, block_size)
    kv, text = manager_of(100, block_size, retention=retention), Text(list(range(num_tokens)))
    while text.num_computed_tokens < num_tokens:
        step = min(rng.randint(1, chunk), num_tokens - text.num_computed_tokens)
        kv.grow(text, step)
        assert 100 - kv.pool.num_free <= peak
        text.num_computed_tokens += step
        text.block_mass = [rng.random() for _ in text.block_table]
        kv.register(text)
        kv.drop_unseen(text)
        oldest = text.num_computed_tokens - window + 1
        for position in range(text.num_computed_tokens):
            if position >= oldest or position < sinks:
                assert text.block_table[position // block_size] != DROPPED
    assert peak <= blocks_for(num_tokens, block_size)


@given(
    window=st.integers(1, 12),
    sinks=st.integers(0, 6),
    chunk=st.integers(1, 9),
    block_size=st.integers(1, 5),
)
def test_peak_blocks_is_reached_by_a_long_sequence(window, sinks, chunk, block_size):
    """Counted from the positions that must be there while a chunk from `start` on is computed."""
    most = 0
    for start in range(40, 40 + block_size):
        seen = [*range(sinks), *range(start - window + 1, start + chunk)]
        most = max(most, len({position // block_size for position in seen}))
    assert Retention(window, sinks).peak_blocks(100, chunk, block_size) == most


def test_the_heaviest_old_blocks_stay():
    kv = manager_of(8, 2, retention=Retention(window=2, heavy=4))
    text = Text(list(range(12)))
    kv.grow(text, 12)
    text.num_computed_tokens, text.block_mass = 12, [3.0, 1.0, 9.0, 2.0, 0.0, 5.0]
    a, _, c, _, _, f = text.block_table
    kv.drop_unseen(text)
    assert text.block_table == [a, DROPPED, c, DROPPED, DROPPED, f]
    kv.pool.check([text.block_table])


def test_blocks_out_of_the_window_are_not_held_when_found():
    kv = manager_of(8, 2, retention=Retention(window=3, sinks=1))
    first = Text(list(range(10)))
    begin(kv, first)
    assert len(kv.pool.cached_blocks) == 3  # dropped, and still known
    kv.release(first)
    hits = kv.look_up(Text(list(range(11))))
    assert hits.num_tokens == 10
    assert [block == DROPPED for block in hits.table] == [False, True, True, True, False]


def test_blocks_found_behind_what_host_memory_holds_are_not_taken():
    """Regression: a swapped sequence held the window of where the cache ends, and its own too."""
    kv = manager_of(8, 2, num_host=4, retention=Retention(window=4))
    text = Text(list(range(12)))
    begin(kv, text, 10)
    kv.pool.forget(text.block_table[4])
    kv.swap_out(text)
    hits = kv.look_up(text)
    assert hits.num_tokens == 8
    assert text.num_computed_tokens == 10
    held = [block for block in hits.table if block != DROPPED]
    brought = [b for b in text.host_table[len(hits.table) :] if b != DROPPED]
    assert len(held) + len(brought) + 1 <= kv.retention.peak_blocks(12, 2, 2)
    asked, free = kv.blocks_to_start(text, hits, 2), kv.pool.num_free
    begin(kv, text)
    assert free - kv.pool.num_free <= asked
    kv.pool.check([text.block_table])


# --- swapping -----------------------------------------------------------------------------------


def test_a_swapped_sequence_comes_back_as_it_was():
    kv = manager_of(num_host=3)
    text = Text(list(range(10)), uses_prefix_cache=False)
    begin(kv, text, 9)
    table = list(text.block_table)
    assert kv.can_swap_out(text)
    assert kv.swap_out(text) == table[::-1]
    assert (text.block_table, text.host_table, text.num_computed_tokens) == ([], [0, 1, 2], 9)
    assert (kv.host.num_free, kv.num_swapped) == (0, 1)
    out = [BlockMove("swap_out", d, h, "r0") for d, h in zip(table, range(3), strict=True)]
    assert kv.take_orders() == out + [Release(d, on_host=False) for d in table[::-1]]
    kv.pool.allocate(2)
    assert kv.start(text, kv.look_up(text)) == 0
    assert text.num_computed_tokens == 9
    back = [BlockMove("swap_in", h, d, "r0") for h, d in enumerate(text.block_table)]
    assert kv.take_orders() == back + [Release(h, on_host=True) for h in range(3)]
    assert (kv.host.num_free, kv.num_swapped, text.host_table) == (3, 0, [])


def test_only_what_the_prefix_cache_lost_comes_back_from_the_host():
    kv = manager_of(num_host=3)
    text = Text(list(range(10)))
    begin(kv, text, 9)
    first, second, _ = text.block_table
    kv.swap_out(text)
    kv.pool.forget(second)
    kv.take_orders()
    kv.start(text, kv.look_up(text))
    assert text.block_table[0] == first
    moves = [order for order in kv.take_orders() if isinstance(order, BlockMove)]
    assert [move.source for move in moves] == [1, 2]
    assert text.num_computed_tokens == 9


def test_what_the_prefix_cache_has_beyond_the_host_wins():
    """While a prompt waited in host memory, a twin computed more of it."""
    kv = manager_of(num_host=3)
    text, twin = Text(list(range(14))), Text(list(range(14)), "r1")
    begin(kv, text, 5)
    kv.swap_out(text)
    begin(kv, twin)
    assert kv.start(text, kv.look_up(text)) == 12
    assert (kv.num_swapped, kv.host.num_free, text.num_computed_tokens) == (0, 3, 12)


def test_host_memory_takes_no_more_than_it_can():
    kv = manager_of(num_host=3, max_swapped=1)
    texts = [Text([i] * 5, f"r{i}") for i in range(3)]
    assert not kv.can_swap_out(texts[0])  # nothing is computed
    for text in texts:
        begin(kv, text, 4)
    kv.swap_out(texts[0])
    assert kv.host.num_free == 2
    assert not kv.can_swap_out(texts[1])  # another one waits there
    kv.release(texts[0])
    assert (kv.host.num_free, kv.num_swapped) == (3, 0)
    assert kv.can_swap_out(texts[1])
    long = Text(list(range(16)), "long")
    begin(kv, long)
    assert not kv.can_swap_out(long)  # four blocks


def test_taken_but_empty_blocks_are_not_moved():
    """A step that failed took blocks for tokens that were not computed."""
    kv, text = manager_of(num_host=4), Text(list(range(16)))
    begin(kv, text, 4)
    kv.grow(text, 12)
    assert len(text.block_table) == 4
    kv.swap_out(text)
    assert text.host_table == [0]
    assert kv.pool.num_free == 8


@given(st.randoms(use_true_random=False), st.integers(1, 4), st.sampled_from([None, 3, 6]))
def test_any_order_of_operations_keeps_the_books(rng: random.Random, size: int, window: int | None):
    kv = manager_of(24, size, num_host=6, retention=Retention(window))
    texts: list[Text] = []
    for step in range(40):
        move = rng.choice(["new", "grow", "fork", "swap", "back", "end"])
        running = [t for t in texts if t.block_table]
        waiting = [t for t in texts if t.host_table]
        if move == "new":
            text = Text([rng.randrange(2) for _ in range(rng.randint(1, 9))], f"r{step}")
            hits = kv.look_up(text)
            if kv.blocks_to_start(text, hits, 9) <= kv.pool.num_free:
                begin(kv, text)
                texts.append(text)
        elif move == "grow" and running:
            text = rng.choice(running)
            if kv.blocks_missing(text, 1) <= kv.pool.num_free:
                text.token_ids.append(rng.randrange(2))
                compute(kv, text, 1)
        elif move == "fork" and running:
            parent = rng.choice(running)
            texts.append(Text(list(parent.token_ids), f"r{step}"))
            kv.fork(parent, texts[-1])
        elif move == "swap" and running and kv.can_swap_out(text := rng.choice(running)):
            kv.swap_out(text)
        elif move == "back" and waiting:
            text = rng.choice(waiting)
            text.token_ids.append(1)
            hits = kv.look_up(text)
            if kv.blocks_to_start(text, hits, 1) <= kv.pool.num_free:
                kv.start(text, hits)
                compute(kv, text, len(text.token_ids) - text.num_computed_tokens)
            else:
                text.token_ids.pop()
        elif move == "end" and texts:
            kv.release(texts.pop(rng.randrange(len(texts))))
        kv.pool.check(t.block_table for t in texts)
        kv.host.check(t.host_table for t in texts)
        assert kv.num_swapped == sum(bool(t.host_table) for t in texts)
    for text in texts:
        kv.release(text)
    assert (kv.pool.num_free, kv.host.num_free) == (24, 6)
