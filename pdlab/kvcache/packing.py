"""K and V of one cache as bytes, and those bytes into another: see `wire.py` for what travels.

No bytes move between processes here, and no sums of them are checked; see `pdlab.disagg`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdlab.kvcache.block_pool import blocks_for
from pdlab.kvcache.formats import KVFormat
from pdlab.kvcache.open_blocks import WritePlan
from pdlab.kvcache.paged import PagedKVCache
from pdlab.kvcache.store import KVStore
from pdlab.kvcache.wire import KVLayout, Route, Wire


class KVWriter(Protocol):
    """Takes the payloads of one sequence, see `Unpacker`."""

    def write(self, layers: range, tokens: range, payload: Tensor) -> None: ...


def pack(
    cache: PagedKVCache, block_table: list[int], layers: range, tokens: range, wire: Wire
) -> Tensor:
    """K and V of some layers and tokens of one sequence: uint8 [num_bytes] on the cache's device.

    Raises:
        ValueError: the cache is not the wire's sender, a range is not within the cache's layers or
            the table's slots, a window dropped some of the blocks, a full one is not quantized yet,
            or blocks travel and the range begins within one.
    """
    span = _Span(cache, block_table, layers, tokens)
    span.check(wire, wire.sender)
    span.check_quantized()
    num_bytes = wire.num_bytes(len(tokens), len(layers))
    payload = torch.empty(num_bytes, dtype=torch.uint8, device=cache.device)
    for store, route, parts in span.lanes(wire, payload):
        if route.wire == route.sender:
            span.take_stored(store, parts)
        else:
            span.take_values(store, route.wire, parts)
    return payload


def unpack(
    cache: PagedKVCache,
    block_table: list[int],
    layers: range,
    tokens: range,
    wire: Wire,
    payload: Tensor,
) -> None:
    """Store what `pack` gave; all layers of it at once, if the cache is block-wise.

    Raises:
        ValueError: as `Unpacker.write`, but for the order; or some layers of a block-wise cache.
    """
    num_layers = cache.config.num_layers
    if cache.open_blocks is not None and layers != range(num_layers):
        raise ValueError(
            f"layers={_said(layers)} are not all {num_layers}: a block-wise cache needs an Unpacker"
        )
    span = _Span(cache, block_table, layers, tokens)
    span.check_received(wire, payload)
    plan = span.plan()
    span.put(wire, payload, plan)
    cache.commit(plan)


class Unpacker:
    """Stores the payloads of one sequence as they come, layer by layer or all at once.

    The layers of a range of tokens come in order, then those of the next range. Blocks are
    quantized when the last layer is there. Whoever gives up in between releases the blocks
    (`PagedKVCache.release`), and nothing is left of it.

    Raises:
        ValueError: the cache is not the wire's receiver.
    """

    def __init__(self, cache: PagedKVCache, block_table: list[int], wire: Wire):
        _check_layout(cache, wire.receiver)
        self.cache, self.block_table, self.wire = cache, list(block_table), wire
        self.end: int | None = None
        """Tokens before this one are there in all layers; None before a first range is."""
        self._plan: WritePlan | None = None
        self._tokens = range(0)
        self._next_layer = 0

    def write(self, layers: range, tokens: range, payload: Tensor) -> None:
        """Store these layers of these tokens. Nothing is changed if it raises.

        Raises:
            ValueError: they are not next in order; a range is not within the cache's layers or the
                table's slots; the payload is not uint8 of the wire's size; or a block-wise format
                gets the middle of a block without its beginning.
        """
        self._check_order(layers, tokens)
        span = _Span(self.cache, self.block_table, layers, tokens)
        span.check_received(self.wire, payload)
        if self._plan is None:
            self._plan = span.plan()
        span.put(self.wire, payload, self._plan)
        self._tokens, self._next_layer = tokens, layers.stop
        if self._next_layer == self.cache.config.num_layers:
            self.cache.commit(self._plan)
            self._plan, self._next_layer, self.end = None, 0, tokens.stop

    def _check_order(self, layers: range, tokens: range) -> None:
        if layers.start != self._next_layer or not layers:
            raise ValueError(f"layers={_said(layers)} must begin with layer {self._next_layer}")
        if self._next_layer and tokens != self._tokens:
            raise ValueError(
                f"tokens={_said(tokens)} come before layer {self._next_layer} of tokens "
                f"{_said(self._tokens)}"
            )
        if not self._next_layer and self.end is not None and tokens.start != self.end:
            raise ValueError(f"tokens={_said(tokens)} must begin with token {self.end}")


@dataclass(frozen=True)
class _Span:
    """Some layers and tokens of a sequence in a cache. `parts` are those of `Wire.views`."""

    cache: PagedKVCache
    block_table: list[int]
    layers: range
    tokens: range

    @property
    def first_block(self) -> int:
        return self.tokens.start // self.cache.block_size

    @property
    def blocks(self) -> list[int]:
        """Blocks of which any token is meant."""
        end = blocks_for(self.tokens.stop, self.cache.block_size)
        return self.block_table[self.first_block : end] if self.tokens else []

    def lanes(self, wire: Wire, payload: Tensor) -> Iterator[tuple[KVStore, Route, list[Tensor]]]:
        """Each store of K and of V, and the parts of the payload that are its heads'."""
        if not len(payload):
            return
        views = wire.views(payload, len(self.tokens))
        for stores, route, parts in zip(self.cache.stores, wire.routes, views, strict=True):
            groups = zip(*(part.chunk(len(stores), dim=2) for part in parts), strict=True)
            for store, group in zip(stores, groups, strict=True):
                yield store, route, list(group)

    def plan(self) -> WritePlan:
        size, table = self.cache.block_size, self.block_table
        return self.cache.write_plan([table[p // size] * size + p % size for p in self.tokens])

    def put(self, wire: Wire, payload: Tensor, plan: WritePlan) -> None:
        """Store a payload."""
        for store, route, parts in self.lanes(wire, payload.to(self.cache.device).contiguous()):
            if route.wire == route.receiver:
                self.put_stored(store, parts)
            else:
                self.put_values(store, route.wire, parts, plan)

    def take_stored(self, store: KVStore, parts: list[Tensor]) -> None:
        """Copy what is stored to the payload."""
        for rows, part, row, at, n in self._runs_of_rows(store, parts):
            part[:, at : at + n] = rows[:, row : row + n]
        if num_tail := self._num_tail(store):
            block, place = self._last_block
            values = store.values_of(self.layers, block, place)[:, :num_tail]
            parts[-1].copy_(values.view(torch.uint8))

    def put_stored(self, store: KVStore, parts: list[Tensor]) -> None:
        """Copy from the payload what is to be stored."""
        for rows, part, row, at, n in self._runs_of_rows(store, parts):
            rows[:, row : row + n] = part[:, at : at + n]
        if num_tail := self._num_tail(store):
            _, place = self._last_block
            assert place is not None
            store.open_rows(self.layers, place)[:, :num_tail] = parts[-1]

    def take_values(self, store: KVStore, kv_format: KVFormat, parts: list[Tensor]) -> None:
        """Encode the values that are stored, in the format that they travel in."""
        blocks = torch.tensor(self.blocks, dtype=torch.long, device=self.cache.device)
        opened = self.cache.open_blocks
        places = None if opened is None else opened.places(blocks)
        begin = self.tokens.start - self.first_block * self.cache.block_size
        for i, layer in enumerate(self.layers):
            values = store.gather(layer, blocks, places, torch.float32)
            encoded = kv_format.encode(values[begin : begin + len(self.tokens)])
            for part, new in zip(parts, encoded, strict=True):
                part[i] = new.view(torch.uint8).flatten(2)

    def put_values(
        self, store: KVStore, kv_format: KVFormat, parts: list[Tensor], plan: WritePlan
    ) -> None:
        """Store the values that travelled in this format."""
        shapes = kv_format.parts(len(self.tokens), parts[0].shape[2], self.cache.config.head_dim)
        for i, layer in enumerate(self.layers):
            # Cloned, since what stands before a part may leave it at an odd byte.
            stored = tuple(
                part[i].clone(memory_format=torch.contiguous_format).view(dtype).view(shape)
                for part, (shape, dtype) in zip(parts, shapes, strict=True)
            )
            store.write(layer, plan, kv_format.decode(stored, torch.float32))

    def _num_tail(self, store: KVStore) -> int:
        """Tokens of the block still filling, if the format is block-wise: ranges begin with one."""
        return 0 if store.open is None else len(self.tokens) % self.cache.block_size

    @property
    def _last_block(self) -> tuple[int, int | None]:
        """The last block, and its place in the open area if it has one."""
        opened, block = self.cache.open_blocks, self.blocks[-1]
        return block, None if opened is None else opened.get(block)

    def _runs_of_rows(
        self, store: KVStore, parts: list[Tensor]
    ) -> Iterator[tuple[Tensor, Tensor, int, int, int]]:
        """(rows of the store, part of the payload, first row in each, number of rows)."""
        runs = list(self._runs(len(self.tokens) - self._num_tail(store)))
        for rows, part, stored in zip(store.rows(self.layers), parts, store.parts, strict=False):
            slots = self.cache.block_size // stored.shape[2]  # that share a row
            for slot, at, n in runs:
                yield rows, part, slot // slots, at // slots, n // slots

    def _runs(self, num_tokens: int) -> list[tuple[int, int, int]]:
        """Neighbouring slots of the first tokens: (first slot, first token, number)."""
        size = self.cache.block_size
        runs: list[tuple[int, int, int]] = []
        at = 0
        while at < num_tokens:
            block, offset = divmod(self.tokens.start + at, size)
            slot, n = self.block_table[block] * size + offset, min(size - offset, num_tokens - at)
            if runs and slot == runs[-1][0] + runs[-1][2]:
                first, begin, so_far = runs.pop()
                runs.append((first, begin, so_far + n))
            else:
                runs.append((slot, at, n))
            at += n
        return runs

    def check(self, wire: Wire, layout: KVLayout) -> None:
        """What both sides refuse."""
        _check_layout(self.cache, layout)
        size, slots = self.cache.block_size, len(self.block_table) * self.cache.block_size
        _check_within("layers", self.layers, layout.num_layers, "layers of the cache")
        _check_within("tokens", self.tokens, slots, f"slots of {len(self.block_table)} blocks")
        for block in self.blocks:
            if not 0 <= block < self.cache.num_blocks:
                raise ValueError(
                    f"block_table has block {block} for tokens {_said(self.tokens)}, not one of "
                    f"0:{self.cache.num_blocks}: blocks that a window dropped cannot travel"
                )
        blockwise = any(route.wire.is_blockwise for route in wire.routes)
        if blockwise and self.tokens and self.tokens.start % size:
            raise ValueError(
                f"tokens={_said(self.tokens)} must begin at a multiple of block_size={size}: "
                "whole blocks travel"
            )

    def check_quantized(self) -> None:
        if self.cache.open_blocks is None:
            return
        num_full = self.tokens.stop // self.cache.block_size - self.first_block
        for block in self.blocks[:num_full]:
            if self.cache.open_blocks.get(block) is not None:
                raise ValueError(
                    f"tokens={_said(self.tokens)} fill block {block}, which is not quantized before"
                    " the step is committed"
                )

    def check_received(self, wire: Wire, payload: Tensor) -> None:
        self.check(wire, wire.receiver)
        if payload.dtype != torch.uint8 or payload.dim() != 1:
            raise ValueError(
                f"payload must be uint8 with 1 dimension, not {payload.dtype} with {payload.dim()}"
            )
        expected = wire.num_bytes(len(self.tokens), len(self.layers))
        if len(payload) != expected:
            raise ValueError(
                f"payload has {len(payload)} bytes, not {expected} as layers {_said(self.layers)} "
                f"of tokens {_said(self.tokens)} have"
            )
        opened, offset = self.cache.open_blocks, self.tokens.start % self.cache.block_size
        if self.tokens and opened is not None and offset and opened.get(self.blocks[0]) is None:
            raise ValueError(
                f"tokens={_said(self.tokens)} begin within block {self.blocks[0]} of block_size="
                f"{self.cache.block_size}, and none of its tokens came before"
            )


def _check_within(name: str, asked: range, limit: int, what: str) -> None:
    if asked.step != 1 or not 0 <= asked.start <= asked.stop <= limit:
        raise ValueError(f"{name}={_said(asked)} must lie within 0:{limit}, the {what}")


def _check_layout(cache: PagedKVCache, layout: KVLayout) -> None:
    if (own := KVLayout.of(cache)) != layout:
        raise ValueError(f"the cache has {own}, the wire is for {layout}")


def _said(numbers: range) -> str:
    return f"{numbers.start}:{numbers.stop}" + (f":{numbers.step}" if numbers.step != 1 else "")
