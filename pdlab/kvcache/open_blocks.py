"""Which blocks are still filling: block-wise formats keep those in full precision.

A scale that belongs to a block is known when the block is full. Until then its tokens live in a
small open area in fp32, the counterpart of KIVI's residual (Liu et al. 2024). This file knows which
row of that area a block has, not what stands in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockPlan:
    """Where the tokens of one step go in a block-wise format.

    Blocks that start and fill in the step are quantized at once; the other tokens go to the open
    area. "rows" are rows of the step's K and V here.
    """

    whole_blocks: Tensor
    """[num_whole] block numbers."""
    whole_rows: Tensor
    """[num_whole, block_size], rows of their tokens."""
    open_slots: Tensor
    """[num_open_tokens], slots of the open area."""
    open_rows: Tensor
    """[num_open_tokens], rows of the tokens that go there."""
    filled: dict[int, int]
    """Open blocks that are full after this step, each with its place in the open area."""


@dataclass(frozen=True)
class WritePlan:
    """Where the tokens of one step go, the same in every layer."""

    slots: Tensor
    """int64 [num_tokens], in row order."""
    blocks: BlockPlan | None = None
    """None if no format is block-wise."""


class OpenBlocks:
    """Places in an open area of `capacity` blocks, by block number."""

    def __init__(self, num_blocks: int, block_size: int, capacity: int, device: torch.device | str):
        self.block_size = block_size
        self.capacity = capacity
        self._places: dict[int, int] = {}
        self._free = list(range(capacity))
        self.place_of = torch.full((num_blocks,), -1, dtype=torch.long, device=device)
        """int64 [num_blocks]: the place of each block, -1 for those that have none."""

    def get(self, block: int) -> int | None:
        return self._places.get(block)

    def open(self, block: int) -> int:
        """The block's place: the one it has, or a free one."""
        if block not in self._places:
            assert self._free, f"all {self.capacity} open blocks are taken, block {block} has none"
            self._places[block] = self.place_of[block] = self._free.pop()
        return self._places[block]

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            place = self._places.pop(block, None)
            if place is not None:
                self._free.append(place)
                self.place_of[block] = -1

    def places(self, block_table: Tensor) -> Tensor | None:
        """Places of these blocks, -1 where a block has none; None if no block at all is open."""
        return self.place_of[block_table] if self._places else None

    def plan(self, slots: list[int]) -> tuple[BlockPlan, dict[int, int]]:
        """Open what a step will write to, and say where its tokens go.

        Returns:
            the plan, and the blocks opened that must start from what is stored of them, with their
            places: full blocks that are written from the middle on.
        """
        size = self.block_size
        rows_of: dict[int, dict[int, int]] = {}
        for row, slot in enumerate(slots):
            rows_of.setdefault(slot // size, {})[slot % size] = row
        whole = [block for block, rows in rows_of.items() if len(rows) == size]
        self.forget(whole)
        part = {block: rows for block, rows in rows_of.items() if len(rows) < size}
        again = [b for b, rows in part.items() if 0 not in rows and b not in self._places]
        place = {block: self.open(block) for block in part}

        def numbers(values: list) -> Tensor:
            return torch.tensor(values, dtype=torch.long, device=self.place_of.device)

        plan = BlockPlan(
            whole_blocks=numbers(whole),
            whole_rows=numbers([[rows_of[b][i] for i in range(size)] for b in whole]),
            open_slots=numbers([place[b] * size + offset for b in part for offset in part[b]]),
            open_rows=numbers([row for rows in part.values() for row in rows.values()]),
            filled={b: place[b] for b, rows in part.items() if size - 1 in rows},
        )
        return plan, {block: place[block] for block in again}
