"""What every attention backend is given and returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pdlab.attention.window import Window, visible_blocks
from pdlab.kvcache import PagedKVCache
from pdlab.trace import DROPPED

NOWHERE = 1 << 62
"""Position of a slot that holds no key: after every query, so that none can see it."""


@dataclass(frozen=True)
class BlockReads:
    """The blocks that some sequences read in a layer, and the positions of what is in them."""

    tables: Tensor
    """Block numbers, int64 [num_rows, width], filled up with block 0."""
    positions: Tensor
    """int64 [num_rows, width * block_size], NOWHERE for slots without a key of that sequence."""
    num_keys: list[int]
    """Keys in the blocks of each row; they come first in it."""
    whole: bool
    """No block is left out: the keys of every row stand at 0, 1, 2, ..."""


@dataclass(frozen=True)
class AttentionInputs:
    """Where the queries of a batch stand, and where the KV they may see is kept.

    Sequence i owns the query rows `query_starts[i]` to `query_starts[i + 1] - 1`. Its last query is
    at position `context_lens[i] - 1`, and its KV, these tokens included, is already written.
    Entries of its block table that are DROPPED are not there to be seen. Good for one step: the
    tables must not change meanwhile.
    """

    query_starts: list[int]
    context_lens: list[int]
    block_tables: list[list[int]]
    _reads: dict[tuple, BlockReads] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_sequences(self) -> int:
        return len(self.context_lens)

    def rows(self, i: int) -> slice:
        """The query rows of sequence i."""
        return slice(self.query_starts[i], self.query_starts[i + 1])

    def num_queries(self, i: int) -> int:
        return self.query_starts[i + 1] - self.query_starts[i]

    def reads(
        self, sequences: range, block_size: int, window: Window | None, device: torch.device
    ) -> BlockReads:
        """What these sequences read: laid out once a step, not once a layer."""
        key = sequences, block_size, window, device
        if key not in self._reads:
            self._reads[key] = self._lay_out(sequences, block_size, window, device)
        return self._reads[key]

    def _lay_out(
        self, sequences: range, block_size: int, window: Window | None, device: torch.device
    ) -> BlockReads:
        entries = [self._entries(i, block_size, window) for i in sequences]
        width = max(map(len, entries))
        blocks, firsts = [], []
        for i, kept in zip(sequences, entries, strict=True):
            padding = width - len(kept)
            blocks.append([self.block_tables[i][entry] for entry in kept] + [0] * padding)
            firsts.append([entry * block_size for entry in kept] + [NOWHERE] * padding)
        lengths = torch.tensor([self.context_lens[i] for i in sequences], device=device)[:, None]
        offsets = torch.arange(block_size, device=device)
        positions = (torch.tensor(firsts, device=device)[..., None] + offsets).flatten(1)
        return BlockReads(
            tables=torch.tensor(blocks, device=device),
            positions=positions.masked_fill_(positions >= lengths, NOWHERE),
            num_keys=[
                self.context_lens[i] - (kept[-1] + 1 - len(kept)) * block_size
                for i, kept in zip(sequences, entries, strict=True)
            ],
            whole=all(kept[-1] + 1 == len(kept) for kept in entries),
        )

    def _entries(self, i: int, block_size: int, window: Window | None) -> list[int]:
        """Which entries of sequence i's block table are read, ascending."""
        table, end = self.block_tables[i], self.context_lens[i]
        start = end - self.num_queries(i)
        entries = visible_blocks(start, end, block_size, window)
        kept = [entry for entry in entries if table[entry] != DROPPED]
        own = (end - 1) // block_size - start // block_size + 1
        assert kept[-own:] == entries[-own:], "a query's own key was dropped"
        return kept


class AttentionBackend(ABC):
    """Causal attention with grouped KV heads (GQA) and an optional window."""

    name: str

    @abstractmethod
    def dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: Window | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Attention of one sequence whose K and V stand in one piece.

        Args:
            q: [num_queries, num_heads, head_dim]; the queries are those of the last keys.
            k, v: [num_keys, num_kv_heads, head_dim].
            positions: int64 [num_keys], ascending: where the keys stand in the sequence, if some
                are missing. None: at 0 to num_keys - 1.

        Returns:
            [num_queries, num_heads, head_dim].
        """

    def paged(
        self,
        layer: int,
        q: Tensor,
        kv_cache: PagedKVCache,
        inputs: AttentionInputs,
        window: Window | None = None,
    ) -> Tensor:
        """Attention of a batch over the paged cache, [num_tokens, num_heads, head_dim].

        Blocks that no query of a sequence can see are not read.
        """
        return self._one_by_one(layer, q, kv_cache, inputs, window, range(inputs.num_sequences))

    def _one_by_one(
        self,
        layer: int,
        q: Tensor,
        kv_cache: PagedKVCache,
        inputs: AttentionInputs,
        window: Window | None,
        sequences: range,
    ) -> Tensor:
        """Some sequences of a batch, each gathered from its blocks first; q is of all of them."""
        parts = []
        for i in sequences:
            # What hides nothing yet is no window: without a mask it is quicker.
            hides = window is not None and window.size < inputs.context_lens[i]
            shown = window if hides else None
            k, v, positions = gather_visible(layer, q, kv_cache, inputs, i, shown)
            parts.append(self.dense(q[inputs.rows(i)], k, v, shown, positions))
        return torch.cat(parts)


def gather_visible(
    layer: int,
    like: Tensor,
    kv_cache: PagedKVCache,
    inputs: AttentionInputs,
    i: int,
    window: Window | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """K and V that sequence i of a batch may see, and their positions, as `dense` takes them.

    Args:
        like: of the dtype and on the device that k and v shall have.
    """
    reads = inputs.reads(range(i, i + 1), kv_cache.block_size, window, like.device)
    k, v = kv_cache.gather(layer, reads.tables[0], like.dtype)
    num_keys = reads.num_keys[0]
    positions = None if reads.whole else reads.positions[0, :num_keys]
    return k[:num_keys], v[:num_keys], positions


def positions_of(k: Tensor, positions: Tensor | None) -> Tensor:
    """Where the keys stand: as given, or at 0 to len(k) - 1."""
    return torch.arange(len(k), device=k.device) if positions is None else positions
