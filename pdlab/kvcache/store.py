"""K, or V, of one group of heads: tensors [num_layers, num_blocks, ...] and an open area."""

from __future__ import annotations

import torch
from torch import Tensor

from pdlab.kvcache.formats import KVFormat
from pdlab.kvcache.open_blocks import WritePlan


class KVStore:
    """Storage of K or V for `num_heads` KV heads, in one format.

    parts  codes [num_layers, num_blocks, block_size, num_heads, head_dim (int4: half)], and for
           quantized formats scales and zeros [num_layers, num_blocks, ...], see KVFormat.parts
    open   fp32 [num_layers, num_open, block_size, num_heads, head_dim], block-wise formats only
    """

    def __init__(
        self,
        kv_format: KVFormat,
        num_layers: int,
        num_blocks: int,
        block: tuple[int, int, int],
        num_open: int,
        device: torch.device | str,
    ):
        """`block` is (block_size, num_heads, head_dim)."""
        self.format = kv_format
        self.parts = [
            torch.zeros((num_layers, num_blocks, *shape), dtype=dtype, device=device)
            for shape, dtype in kv_format.parts(*block)
        ]
        self.open = (
            torch.zeros((num_layers, num_open, *block), device=device)
            if kv_format.is_blockwise
            else None
        )

    def write(self, layer: int, plan: WritePlan, x: Tensor) -> None:
        """Store x, [num_tokens, num_heads, head_dim]."""
        if self.open is None:
            for part, new in zip(self.parts, self.format.encode(x), strict=True):
                part[layer].flatten(0, 1).index_copy_(0, plan.slots, new)
            return
        assert plan.blocks is not None
        where = plan.blocks
        if len(where.whole_blocks):
            whole = self.format.encode(x[where.whole_rows])
            for part, new in zip(self.parts, whole, strict=True):
                part[layer].index_copy_(0, where.whole_blocks, new)
        if len(where.open_slots):
            area = self.open[layer].flatten(0, 1)
            area.index_copy_(0, where.open_slots, x[where.open_rows].float())

    def gather(
        self, layer: int, block_table: Tensor, places: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Values of whole blocks, [..., num_blocks * block_size, num_heads, head_dim].

        Args:
            places: their places in the open area, -1 for blocks that have none.
        """
        numbers = block_table.flatten()  # index_select copies whole blocks, indexing is slower
        stored = tuple(
            part[layer].index_select(0, numbers).view(*block_table.shape, *part.shape[2:])
            for part in self.parts
        )
        x = self.format.decode(stored, dtype)
        if self.open is not None and places is not None:
            is_open = places >= 0
            x[is_open] = self.open[layer][places[is_open]].to(dtype)
        return x.flatten(-4, -3)

    def close(self, blocks: Tensor, places: Tensor) -> None:
        """Quantize full open blocks, in all layers."""
        if self.open is not None:
            for part, new in zip(self.parts, self.format.encode(self.open[:, places]), strict=True):
                part.index_copy_(1, blocks, new)

    def reopen(self, blocks: Tensor, places: Tensor) -> None:
        """Let open copies of quantized blocks start from what is stored of them."""
        if self.open is not None:
            stored = tuple(part[:, blocks] for part in self.parts)
            self.open[:, places] = self.format.decode(stored, torch.float32)

    def raw(self, block_table: Tensor, places: Tensor) -> list[Tensor]:
        """What is stored of these blocks, each tensor [num_layers, tokens or blocks, heads, ...].

        Zeros stand for dropped blocks, in the codes for open ones, in the open area for others.
        """
        kept = (block_table >= 0) & ((places < 0) | (self.open is None))
        tensors = [(part[:, block_table.clamp(min=0)], kept) for part in self.parts]
        if self.open is not None:
            tensors.append((self.open[:, places.clamp(min=0)], places >= 0))
        for tensor, there in tensors:
            tensor[:, ~there] = 0
        return [tensor.flatten(1, 2) for tensor, _ in tensors]

    def rows(self, layers: range) -> list[Tensor]:
        """The parts of some layers as bytes, [layers, rows, num_heads, bytes]; these are views.

        A row is a slot, or a block where a scale belongs to all of it.
        """
        parts = [part[layers.start : layers.stop].flatten(1, 2) for part in self.parts]
        return [part.view(torch.uint8).flatten(3) for part in parts]

    def open_rows(self, layers: range, place: int) -> Tensor:
        """A place of the open area as bytes, [layers, block_size, num_heads, bytes]; a view."""
        assert self.open is not None
        return self.open[layers.start : layers.stop, place].view(torch.uint8)

    def values_of(self, layers: range, block: int, place: int | None) -> Tensor:
        """fp32 values of one block, [layers, block_size, num_heads, head_dim]; `place` if open."""
        span = slice(layers.start, layers.stop)
        if self.open is not None and place is not None:
            return self.open[span, place]
        return self.format.decode(tuple(part[span, block] for part in self.parts), torch.float32)
