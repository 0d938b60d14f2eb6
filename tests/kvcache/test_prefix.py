"""A block is known by all tokens up to its end, and a hash is only a hint."""

import pytest

from pdlab.kvcache import Prefix
from pdlab.kvcache.prefix import chain_hash


def chain(*blocks: tuple[int, ...]) -> Prefix:
    prefix = None
    for token_ids in blocks:
        prefix = Prefix(prefix, token_ids)
    assert prefix is not None
    return prefix


class Counted(tuple):
    """Tokens that count how often they are compared."""

    compared = 0

    def __ne__(self, other: object) -> bool:
        Counted.compared += 1
        return super().__ne__(other)


def test_equal_chains_are_equal_and_hash_alike():
    one, other = chain((1, 2), (3, 4)), chain((1, 2), (3, 4))
    assert one == other
    assert hash(one) == hash(other)
    assert {one: "found"}[other] == "found"


@pytest.mark.parametrize(
    "other",
    [
        chain((1, 2), (3, 5)),
        chain((1, 9), (3, 4)),  # the same block behind another one
        chain((3, 4)),
        chain((1, 2), (1, 2), (3, 4)),
        chain((1, 2)),
        chain((1, 2, 3, 4)),  # the same tokens in other blocks
        "no prefix at all",
        None,
    ],
)
def test_other_chains_differ(other):
    assert chain((1, 2), (3, 4)) != other


def test_the_hash_depends_on_the_parent():
    assert hash(chain((1, 2), (3, 4))) != hash(chain((1, 9), (3, 4)))
    assert chain_hash(1, (3, 4)) != chain_hash(2, (3, 4))


def test_a_collision_never_finds_anothers_block(monkeypatch):
    monkeypatch.setattr("pdlab.kvcache.prefix.chain_hash", lambda parent, token_ids: 7)
    known = {chain((i,), (j,)): (i, j) for i in range(6) for j in range(6)}
    assert len({hash(prefix) for prefix in known}) == 1
    assert len(known) == 36
    assert known[chain((2,), (5,))] == (2, 5)
    assert chain((2,), (6,)) not in known
    assert chain((2,)) not in known


def test_comparing_ends_where_the_chains_become_one():
    """A prompt of 100 blocks is looked up in 100 comparisons, not in 5,050."""
    parent = chain(*(Counted((i,)) for i in range(100)))
    one, other = Prefix(parent, Counted((7,))), Prefix(parent, Counted((7,)))
    Counted.compared = 0
    assert one == other
    assert Counted.compared == 1
    assert parent == parent
    assert Counted.compared == 1


def test_a_very_long_chain_needs_no_deep_stack():
    blocks = [(i,) for i in range(100_000)]
    one, other = chain(*blocks), chain(*blocks)
    assert one == other
    del one, other
