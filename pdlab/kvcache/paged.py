"""Where K and V live: cut into blocks of `block_size` token slots, for all layers.

stored  [num_layers, num_blocks, block_size, num_kv_heads, head_dim], once for K and once for V

sequence position p  ->  block_table[p // block_size] * block_size + p % block_size = slot

In which numbers is `formats.py`'s concern. Quantized values become floats again when they are
gathered for attention, only those and never the whole cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from pdlab.kvcache.block_pool import blocks_for
from pdlab.kvcache.formats import parse_kv_format
from pdlab.kvcache.open_blocks import OpenBlocks, WritePlan
from pdlab.kvcache.store import KVStore
from pdlab.models.config import ModelConfig


class PagedKVCache:
    """K and V of every cached token, addressed by slot.

    A step is `write_plan`, `write` in every layer, `commit`. A step that failed half-way may be
    planned and written again.

    Tokens of a block are written in the order of their positions, so a block is full when its last
    slot is written. Block-wise formats quantize a block then; while it fills, and in the step in
    which it becomes full, it is read in full precision.

    Args:
        kv_format: see `formats.py`.
        head_groups: tensors that the KV heads are split over, as tensor parallelism does. The
            blocks, and every bit that is read, are the same: paging cuts along tokens, this along
            heads.
        max_open_blocks: room for blocks still filling, if the format is block-wise. A sequence has
            one between steps and up to two in a step: the one it fills, and the next.
        name: what an error calls `num_blocks`.

    Raises:
        ValueError: the format or `head_groups` does not fit, or there is not enough memory.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        kv_format: str = "fp32",
        device: torch.device | str = "cpu",
        *,
        head_groups: int = 1,
        max_open_blocks: int = 64,
        name: str = "num_blocks",
    ):
        if head_groups < 1 or config.num_kv_heads % head_groups:
            raise ValueError(
                f"kv_head_groups={head_groups} must divide num_kv_heads={config.num_kv_heads}"
            )
        self.config, self.num_blocks, self.block_size = config, num_blocks, block_size
        self.k_format, self.v_format = parse_kv_format(kv_format, config.head_dim)
        self.device = torch.device(device)
        self.head_groups = head_groups
        self.stores = self._allocate(max_open_blocks, name)
        self.open_blocks: OpenBlocks | None = None
        if self.k_format.is_blockwise or self.v_format.is_blockwise:
            self.open_blocks = OpenBlocks(num_blocks, block_size, max_open_blocks, device)

    def _allocate(self, num_open: int, name: str) -> tuple[list[KVStore], list[KVStore]]:
        """The stores of K and of V, one for each head group."""
        c = self.config
        block = (self.block_size, c.num_kv_heads // self.head_groups, c.head_dim)
        needed = opened = 0
        for kv_format in (self.k_format, self.v_format):
            one = sum(math.prod(s) * dtype.itemsize for s, dtype in kv_format.parts(*block))
            opened = math.prod(block) * 4 * num_open if kv_format.is_blockwise else 0
            needed += (one * self.num_blocks + opened) * c.num_layers * self.head_groups
        try:
            # Asked for in one piece first: a system may grant each part and then not the whole.
            torch.empty(needed, dtype=torch.uint8, device=self.device)
            k, v = (
                [
                    KVStore(kv_format, c.num_layers, self.num_blocks, block, num_open, self.device)
                    for _ in range(self.head_groups)
                ]
                for kv_format in (self.k_format, self.v_format)
            )
        except (RuntimeError, TypeError, MemoryError) as error:
            beside = f" and {num_open} open blocks (for max_num_seqs)" if opened else ""
            raise ValueError(
                f"{name}={self.num_blocks} of block_size={self.block_size} tokens{beside} need "
                f"{needed / 2**30:,.1f} GiB of KV memory, which {self.device} does not have"
            ) from error
        return k, v

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that blocks are stored in; the open area is not among them."""
        return [part for store in self._each_store() for part in store.parts]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V, scales included, read off the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors) // self.num_blocks

    @property
    def open_bytes(self) -> int:
        """Bytes of the area for blocks still filling; 0 for formats that need none."""
        return sum(store.open.nbytes for store in self._each_store() if store.open is not None)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes + self.open_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one slot takes, with its share of the block's scales."""
        return self.block_bytes / self.block_size

    @property
    def element_bytes(self) -> float:
        """Bytes that one number of K or V takes, with its share of scales."""
        return self.bytes_per_token / self.config.kv_bytes_per_token(1)

    def write_plan(self, slots: list[int]) -> WritePlan:
        """Where a step's tokens go, in row order. `slots` are all different.

        The copy of a block still filling is begun anew with its first slot. A block that is full
        already and is written from the middle on is opened again, as what is stored of it.
        """
        where = self._tensor(slots)
        if self.open_blocks is None:
            return WritePlan(where)
        plan, again = self.open_blocks.plan(slots)
        if again:
            blocks, places = self._tensor(list(again)), self._tensor(list(again.values()))
            for store in self._each_store():
                store.reopen(blocks, places)
        return WritePlan(where, plan)

    def write(self, layer: int, plan: WritePlan, k: Tensor, v: Tensor) -> None:
        """Store k and v, [num_tokens, num_kv_heads, head_dim], of the plan's tokens."""
        for stores, x in zip(self.stores, (k, v), strict=True):
            for store, heads in zip(stores, x.chunk(self.head_groups, dim=1), strict=True):
                store.write(layer, plan, heads)

    def commit(self, plan: WritePlan) -> None:
        """Book the step: quantize the open blocks that it filled. Before any of them is freed."""
        filled = plan.blocks.filled if plan.blocks else {}
        if self.open_blocks is None or not filled:
            return
        blocks, places = self._tensor(list(filled)), self._tensor(list(filled.values()))
        for store in self._each_store():
            store.close(blocks, places)
        self.open_blocks.forget(filled)

    def release(self, blocks: Iterable[int]) -> None:
        """Forget what is open of blocks that were freed."""
        if self.open_blocks is not None:
            self.open_blocks.forget(blocks)

    def gather(self, layer: int, block_table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of whole blocks in table order, dequantized.

        Args:
            block_table: [..., num_blocks] of block numbers, none of them DROPPED.

        Returns:
            two tensors [..., num_blocks * block_size, num_kv_heads, head_dim]; the slots behind a
            sequence's last token hold zeros or what an earlier owner left.
        """
        places = None if self.open_blocks is None else self.open_blocks.places(block_table)
        k, v = (
            [store.gather(layer, block_table, places, dtype) for store in stores]
            for stores in self.stores
        )
        return (k[0], v[0]) if self.head_groups == 1 else (torch.cat(k, -2), torch.cat(v, -2))

    def read(self, block_table: list[int], num_tokens: int) -> Tensor:
        """A copy of one sequence's K and V: [2, num_layers, num_tokens, num_kv_heads, head_dim].

        In the format's own dtype if that is a float, else in fp32. NaN where a block is DROPPED.
        """
        table = self._tensor(block_table[: blocks_for(num_tokens, self.block_size)])
        dtype = torch.promote_types(self.k_format.dtype, self.v_format.dtype)
        layers = [
            torch.stack(self.gather(layer, table.clamp(min=0), dtype))
            for layer in range(self.config.num_layers)
        ]
        out = torch.stack(layers, dim=1)[:, :, :num_tokens]
        out[:, :, (table < 0).repeat_interleave(self.block_size)[:num_tokens]] = math.nan
        return out

    def raw(self, block_table: list[int], num_tokens: int) -> list[Tensor]:
        """A copy of what is stored of one sequence: codes, scales, zeros, open area; of K, of V.

        Two sequences whose raw tensors are equal are stored in the same bytes. Heads stand in
        dimension 2 of each tensor. Zeros stand for what is DROPPED.
        """
        table = self._tensor(block_table[: blocks_for(num_tokens, self.block_size)])
        places = None if self.open_blocks is None else self.open_blocks.places(table.clamp(min=0))
        places = torch.full_like(table, -1) if places is None else places.where(table >= 0, -1)
        raw = []
        for stores in self.stores:
            groups = zip(*(store.raw(table, places) for store in stores), strict=True)
            # There are no more blocks than tokens, so this cut leaves scales of blocks whole.
            raw += [torch.cat(parts, dim=2)[:, :num_tokens] for parts in groups]
        return raw

    def _each_store(self) -> list[KVStore]:
        return [store for stores in self.stores for store in stores]

    def _tensor(self, numbers: list) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)


def copy_blocks(
    source: PagedKVCache, source_blocks: list[int], target: PagedKVCache, target_blocks: list[int]
) -> None:
    """Copy whole blocks: codes, scales and what is open of them.

    Within one cache (copy-on-write) or to another of the same shape and format (swap). All sources
    are read before a target is written.
    """
    assert (source.k_format, source.v_format) == (target.k_format, target.v_format)
    assert source.block_size == target.block_size
    assert source.head_groups == target.head_groups
    if not source_blocks:
        return
    pairs = list(zip(source._each_store(), target._each_store(), strict=True))
    blocks, to_blocks = source._tensor(source_blocks), target._tensor(target_blocks)
    for ours, theirs in pairs:
        for part, to_part in zip(ours.parts, theirs.parts, strict=True):
            to_part.index_copy_(1, to_blocks, part[:, blocks].to(target.device))
    if source.open_blocks is None or target.open_blocks is None:
        return
    places = zip(target_blocks, map(source.open_blocks.get, source_blocks), strict=True)
    opened = {block: place for block, place in places if place is not None}
    taken = source._tensor(list(opened.values()))
    copies = [None if ours.open is None else ours.open[:, taken] for ours, _ in pairs]
    target.open_blocks.forget(target_blocks)
    to_places = target._tensor([target.open_blocks.open(block) for block in opened])
    for (_, theirs), copy in zip(pairs, copies, strict=True):
        if theirs.open is not None and copy is not None:
            theirs.open[:, to_places] = copy.to(target.device)
