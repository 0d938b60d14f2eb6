"""A step's batch as kernels on a GPU take it: rows by kind, and tables of 32-bit integers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pdlab.engine.batch import BatchInputs
from pdlab.kvcache import blocks_for
from pdlab.trace import DROPPED


class Rows(NamedTuple):
    """All tokens of a step on the device, int32: sequences with one token first, then chunks.

    The first `num_decodes` rows are those of the first `num_decodes` sequences. A row whose slot
    is < 0 stores nothing, one whose context is empty sees nothing: padding is both.
    """

    token_ids: Tensor
    """[num_rows]; likewise positions and slots."""
    positions: Tensor
    slots: Tensor
    context_lens: Tensor
    """[num_sequences], in tokens, those of this step included."""
    block_tables: Tensor
    """[num_sequences, width], < 0 for blocks that are dropped or not there."""
    chunk_starts: Tensor
    """[num_chunks + 1], counted from the first row of the first chunk."""
    num_decodes: int


class Layout(NamedTuple):
    """`Rows` that are still on the host, and where the batch's own rows went."""

    numbers: np.ndarray
    """int32 [3, num_rows]: token ids, positions, slots."""
    context_lens: np.ndarray
    block_tables: np.ndarray
    chunk_starts: np.ndarray
    num_decodes: int
    places: np.ndarray
    """int64 [num_rows]: where each row of the batch stands now."""

    @property
    def is_sorted(self) -> bool:
        """Whether every row stands where it stood in the batch."""
        return bool((self.places[1:] > self.places[:-1]).all())

    @property
    def num_chunks(self) -> int:
        return len(self.chunk_starts) - 1

    def to(self, device: torch.device) -> Rows:
        tensors = [
            torch.from_numpy(x).to(device)
            for x in (self.numbers, self.context_lens, self.block_tables, self.chunk_starts)
        ]
        numbers, lens, tables, starts = tensors
        return Rows(numbers[0], numbers[1], numbers[2], lens, tables, starts, self.num_decodes)


def table_width(num_blocks: int) -> int:
    """Columns of a table for so many blocks: a power of two.

    The number of programs that share a long context, for which a kernel is compiled, follows the
    width: this way a context that grows meets few variants.
    """
    return 1 << max(0, num_blocks - 1).bit_length()


def lay_out(inputs: BatchInputs, block_size: int) -> Layout:
    """Sort a batch's sequences into decodes and chunks, each in batch order."""
    reads = inputs.attention
    starts = np.array(reads.query_starts)
    lengths = np.diff(starts)
    order = np.argsort(lengths > 1, kind="stable")
    rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in order])
    places = np.empty_like(rows)
    places[rows] = np.arange(len(rows))
    used = [blocks_for(length, block_size) for length in reads.context_lens]
    tables = np.full((len(order), table_width(max(used))), DROPPED, np.int32)
    for table, i in zip(tables, order, strict=True):
        table[: used[i]] = reads.block_tables[i][: used[i]]
    num_decodes = int((lengths == 1).sum())
    chunks = lengths[order[num_decodes:]]
    numbers = np.array((inputs.token_ids, inputs.positions, inputs.slot_mapping), np.int32)
    return Layout(
        numbers=numbers.take(rows, axis=1),  # in C order, as kernels take rows of it
        context_lens=np.array(reads.context_lens, np.int32)[order],
        block_tables=tables,
        chunk_starts=np.cumsum([0, *chunks]).astype(np.int32),
        num_decodes=num_decodes,
        places=places,
    )
