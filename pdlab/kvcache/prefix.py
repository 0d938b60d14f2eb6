"""What makes two blocks the same: not their own tokens alone, but all tokens up to their end."""

from __future__ import annotations


class Prefix:
    """The tokens up to the end of a full block, as a chain of blocks.

    K and V of a token depend on every token before it, so a block may stand in for another only if
    the whole chain is equal. `hash()` takes the parent's hash and the block's own tokens, as in
    vLLM's automatic prefix caching. Equal hashes are not enough: `==` compares the tokens, so a
    collision in a dict costs a comparison and never another's KV.
    """

    __slots__ = ("_hash", "parent", "token_ids")

    def __init__(self, parent: Prefix | None, token_ids: tuple[int, ...]):
        self.parent = parent
        self.token_ids = token_ids
        self._hash = chain_hash(hash(parent), token_ids)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Compare from the end to where the chains become one object: mostly one block."""
        if not isinstance(other, Prefix):
            return NotImplemented
        mine: Prefix | None = self
        theirs: Prefix | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.token_ids != theirs.token_ids:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


def chain_hash(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    """Hash of a block behind its parent's chain."""
    return hash((parent_hash, token_ids))
