"""Where K and V lie, and what a step reads and writes of them: as tables for compiled code.

    stored  [num_layers, num_blocks, block_size, kv_heads, head_dim], once for K and once for V
    sequence position p  ->  block_table[p // block_size] * block_size + p % block_size = slot

`PagedKV` is made once, `AttentionPlan` for each step. Neither needs Numba.

Attention is cut into **items**, one chunk each. An item is some queries of one sequence and some
tiles of 64 keys. Sequences with few queries (decoding) are cut along their tiles, each item with
all KV heads, so that memory is read as one stream, or with fewer where threads would stand idle;
the others along queries and KV heads. A tile's sums are computed for itself and joined to those
before it, one by one, whether that is done within an item or, for queries whose tiles several items
share, afterwards. So how work is cut leaves no trace in a result: a row has the same bits alone,
among others, as decode and as part of a prefill.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from . import attention_tables as t

FORMATS: Final = ("fp32", "fp16", "bf16", "fp8", "int8", "int4")
_DTYPES: Final = dict(
    zip(
        FORMATS,
        (torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.uint8),
        strict=True,
    )
)
_PARTS: Final = {"fp8": 2, "int8": 2, "int4": 3}

_ROWS_A_WRITE = 16
_FEW_LANES = t.LANES  # queries times heads of a KV head: up to so many count as decoding
_LANES_AN_ITEM = 48
_ITEMS_A_THREAD = 4


def address(memory: np.ndarray | torch.Tensor) -> int:
    """Where an array or a tensor on the CPU begins."""
    if isinstance(memory, torch.Tensor):
        return memory.data_ptr()
    at: int = memory.__array_interface__["data"][0]
    return at


class Stored(NamedTuple):
    """How K, or V, is stored; the tensors of each head group, as `pdlab.kvcache.KVStore` has them.

    parts  by head group: codes [num_layers, num_blocks, block_size, heads, head_dim (int4: half)],
           then scales and for int4 zeros [num_layers, num_blocks, block_size or 1, heads, ...]
    open   by head group, where scales belong to blocks: float32 [num_layers, num_open, block_size,
           heads, head_dim], in which blocks stand that are still filling
    """

    name: str
    """One of FORMATS."""
    scales: str | None
    """None, "token", "head" or "channel": what shares a scale."""
    group: int | None
    """With "token": channels that share a scale; None means all of a head."""
    parts: Sequence[Sequence[torch.Tensor]]
    open: Sequence[torch.Tensor | None] = ()

    @property
    def is_blockwise(self) -> bool:
        return self.scales in ("head", "channel")

    def channels_a_scale(self, head_dim: int) -> int:
        """How many channels beside each other have the same scale."""
        return 1 if self.scales == "channel" else self.group or head_dim


class BlockRows(NamedTuple):
    """Where a step's rows go if scales belong to blocks; int64, see `pdlab.kvcache.BlockPlan`."""

    whole_blocks: torch.Tensor
    """[num_whole]: blocks that start and fill in this step."""
    whole_rows: torch.Tensor
    """[num_whole, block_size]: their rows."""
    open_slots: torch.Tensor
    """[num_open_rows]: slots of the open area."""
    open_rows: torch.Tensor
    """[num_open_rows]: the rows that go there."""


class PagedKV:
    """Where K and V lie. Serves one step at a time.

    Args:
        k, v: how they are stored.
        num_heads: query heads, a multiple of the KV heads.
        place_of: int64 [num_blocks], where scales belong to blocks: the place of each block in the
            open area, -1 for those that have none. It is read in each step.

    Raises:
        ValueError: the tensors do not fit together, or are nothing that the kernels can read.
    """

    def __init__(
        self, k: Stored, v: Stored, num_heads: int, place_of: torch.Tensor | None = None
    ) -> None:
        codes = k.parts[0][0]
        if codes.ndim != 5:
            raise ValueError(f"k: codes have {codes.ndim} dimensions, must be 5")
        self.num_layers, self.num_blocks, self.block_size, heads, width = codes.shape
        self.head_dim = 2 * width if k.name == "int4" else width
        self.head_groups = len(k.parts)
        self.num_kv_heads = heads * self.head_groups
        self.num_heads = num_heads
        self.k, self.v, self.place_of = k, v, place_of
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            raise ValueError(f"head_dim={self.head_dim}, must be a multiple of 16 from 16 to 256")
        if num_heads < 1 or num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={num_heads}, must be a multiple of {self.num_kv_heads}")
        for side, stored in (("k", k), ("v", v)):
            self._check(side, stored, heads)
        self.table: np.ndarray = np.array(
            [
                *(num_heads, self.num_kv_heads, self.head_dim, self.block_size, heads),
                0 if place_of is None else address(place_of),
                *self._side_words(k),
                *self._side_words(v),
                *(word for g in range(self.head_groups) for s in (k, v) for word in _area(s, g)),
            ],
            np.int64,
        )
        self._parts: np.ndarray = np.empty(0, np.float32)

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def row_width(self) -> int:
        """Floats of q, k and v of a row."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def parts(self, count: int) -> np.ndarray:
        """Room for `count` floats, in which a step keeps sums of tiles."""
        if len(self._parts) < count:
            self._parts = np.empty(count, np.float32)
        return self._parts

    def _check(self, side: str, stored: Stored, heads: int) -> None:
        if stored.name not in FORMATS:
            raise ValueError(f"{side}: format {stored.name!r}, must be one of {', '.join(FORMATS)}")
        if (stored.scales is None) != (stored.name not in _PARTS):
            raise ValueError(f"{side}: {stored.name} with scales={stored.scales}")
        per, shared = stored.channels_a_scale(self.head_dim), self.block_size
        if self.head_dim % per:
            raise ValueError(f"{side}: group={per}, must divide head_dim={self.head_dim}")
        if stored.is_blockwise:
            shared = 1
            if self.place_of is None or not stored.open or None in stored.open:
                raise ValueError(f"{side}: scales={stored.scales} needs place_of and open areas")
            _check_tensor("place_of", self.place_of, torch.int64, (self.num_blocks,))
        width = self.head_dim // 2 if stored.name == "int4" else self.head_dim
        codes = (self.num_layers, self.num_blocks, self.block_size, heads, width)
        scales = (self.num_layers, self.num_blocks, shared, heads, self.head_dim // per)
        if len(stored.parts) != self.head_groups:
            raise ValueError(f"{side}: {len(stored.parts)} head groups, must be {self.head_groups}")
        for group, parts in enumerate(stored.parts):
            name = f"{side}.parts[{group}]"
            if len(parts) != _PARTS.get(stored.name, 1):
                raise ValueError(f"{name}: {len(parts)} tensors of {stored.name}")
            _check_tensor(f"{name}[0]", parts[0], _DTYPES[stored.name], codes)
            for i, part in enumerate(parts[1:], start=1):
                _check_tensor(f"{name}[{i}]", part.flatten(4), torch.float16, scales)
                if not part.is_contiguous():  # the flattened one may be a copy
                    raise ValueError(f"{name}[{i}]: must be contiguous, has {part.stride()}")
            if stored.is_blockwise:
                area = stored.open[group]
                assert area is not None
                shape = (self.num_layers, area.shape[1], self.block_size, heads, self.head_dim)
                _check_tensor(f"{side}.open[{group}]", area, torch.float32, shape)

    def _side_words(self, stored: Stored) -> list[int]:
        codes, *scales = stored.parts[0]
        return [
            FORMATS.index(stored.name),
            int(stored.is_blockwise),
            stored.channels_a_scale(self.head_dim),
            codes.shape[-1] * codes.element_size(),
            codes[0].nbytes,
            scales[0][0].nbytes if scales else 0,
            stored.open[0][0].nbytes if stored.is_blockwise else 0,  # type: ignore[index]
        ]


def _area(stored: Stored, group: int) -> list[int]:
    """The addresses of a head group."""
    parts = [address(part) for part in stored.parts[group]]
    area = stored.open[group] if stored.is_blockwise else None
    return [*parts, *[0] * (3 - len(parts)), 0 if area is None else address(area)]


def _check_tensor(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or tensor.device.type != "cpu":
        raise ValueError(
            f"{name}: must be {dtype} {shape} on the CPU, is {tensor.dtype} {tuple(tensor.shape)} "
            f"on {tensor.device}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: must be contiguous, has strides {tensor.stride()}")


class AttentionPlan:
    """What a step writes and reads; good for this step only.

    Sequence i owns the rows `query_starts[i]` to `query_starts[i + 1] - 1`. Its last query is at
    position `context_lens[i] - 1`. Entries of its block table below 0 are not there to be seen.

    Args:
        slots: [num_rows], where K and V of each row go.
        windows: for each kind of layer what it sees: None, or what has `size`, `sinks`, `reach`.
        blocks: where rows go if scales belong to blocks.
        num_threads: that shall share the work.

    Raises:
        ValueError: a block or slot outside of `kv`, or lengths that do not fit together.
    """

    def __init__(
        self,
        kv: PagedKV,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        slots: Sequence[int] | np.ndarray | torch.Tensor,
        *,
        windows: Sequence[Any] = (None,),
        blocks: BlockRows | None = None,
        num_threads: int = 1,
    ) -> None:
        self.kv, self.windows, self.blocks = kv, tuple(windows), blocks
        self.query_starts, self.context_lens = query_starts, context_lens
        self.block_tables = block_tables
        self.slots: np.ndarray = np.asarray(slots, np.int64)
        self._num_threads = num_threads
        self._check()
        self.num_rows = len(self.slots)
        self.write_chunks = -(-self.num_rows // _ROWS_A_WRITE)
        self.attend_chunks: list[int] = []
        self.combine_chunks: list[int] = []
        lengths = [-(-context // kv.block_size) for context in context_lens]
        entries = [table[:n] for table, n in zip(block_tables, lengths, strict=True)]
        self._tables = np.array([block for table in entries for block in table], np.int64)
        if len(self._tables) and not self._tables.max() < kv.num_blocks:
            raise ValueError(f"block_tables: block {self._tables.max()} of {kv.num_blocks}")
        self._table_starts = [0]
        for n in lengths:
            self._table_starts.append(self._table_starts[-1] + n)
        self._kept: list[np.ndarray] = []
        self._part_floats = 0
        kinds = self._keep([self._kind_words(window) for window in self.windows])
        self._parts = kv.parts(self._part_floats)  # kept if the next plan needs more
        at = address
        self.table: np.ndarray = np.array(
            [
                *(self.write_chunks, at(self._tables), at(kinds), at(self._parts)),
                *self._written(self.slots, np.arange(self.num_rows)),
                *(self._written(*blocks[:2]) if blocks else (0, 0, 0)),
                *(self._written(*blocks[2:]) if blocks else (0, 0, 0)),
            ],
            np.int64,
        )

    def _check(self) -> None:
        starts, contexts, tables = self.query_starts, self.context_lens, self.block_tables
        size, num_slots = self.kv.block_size, self.kv.num_blocks * self.kv.block_size
        if len(starts) != len(contexts) + 1 or len(tables) != len(contexts):
            raise ValueError(
                f"query_starts, block_tables: {len(starts)}, {len(tables)} for "
                f"{len(contexts)} sequences"
            )
        if starts[0] != 0 or starts[-1] != len(self.slots):
            raise ValueError(f"query_starts: from {starts[0]} to {starts[-1]}, rows are "
                             f"{len(self.slots)}")  # fmt: skip
        if len(self.slots) and not 0 <= self.slots.min() <= self.slots.max() < num_slots:
            raise ValueError(f"slots: {self.slots.min()} to {self.slots.max()} of {num_slots}")
        for i, (context, table) in enumerate(zip(contexts, tables, strict=True)):
            queries = starts[i + 1] - starts[i]
            if not 0 <= queries <= context or len(table) * size < context:
                raise ValueError(
                    f"sequence {i}: {queries} queries, context_len={context}, "
                    f"{len(table)} blocks of {size}"
                )
        if self.kv.place_of is not None and self.blocks is None:
            raise ValueError("blocks=None: scales of the format belong to blocks")

    def _keep(self, words: list[tuple[int, ...]]) -> np.ndarray:
        """A table that lives as long as the plan."""
        table = np.array(words, np.int64)
        self._kept.append(table)
        return table

    def _written(self, *units_and_rows: np.ndarray | torch.Tensor) -> tuple[int, int, int]:
        units, rows = (np.ascontiguousarray(x, np.int64) for x in units_and_rows)
        self._kept += [units, rows]
        return len(units), address(units), address(rows)

    # --- what is read ----------------------------------------------------------------------------

    def _kind_words(self, window: Any) -> tuple[int, ...]:
        """A kind, with its items and joins."""
        size = t.EVERYTHING if window is None else window.size
        sinks = 0 if window is None else window.sinks
        reach = t.EVERYTHING if window is None or window.reach is None else window.reach
        items: list[tuple[int, ...]] = []
        few: list[tuple[int, tuple[int, int, int]]] = []
        for i, context in enumerate(self.context_lens):
            queries = self.query_starts[i + 1] - self.query_starts[i]
            if 0 < queries * self.kv.group <= _FEW_LANES:
                few.append((i, _tiles(context - queries, context - 1, size, sinks, reach)))
            elif queries:
                items += self._items_of_many(i, size, sinks, reach)
        shared, joins = self._items_of_few(few)
        items += shared
        # the longest first: what is begun last shall not be waited for long
        items.sort(key=lambda item: (item[t.BEGIN] - item[t.END]) * item[t.QUERIES] * item[t.HEADS])
        self.attend_chunks.append(len(items))
        self.combine_chunks.append(len(joins))
        return size, sinks, reach, address(self._keep(items)), address(self._keep(joins))

    def _items_of_many(self, i: int, size: int, sinks: int, reach: int) -> list[tuple[int, ...]]:
        """Items of sequence i, each some queries and one KV head."""
        start, end = self.query_starts[i], self.query_starts[i + 1]
        first = self.context_lens[i] - (end - start)
        each, items = max(1, _LANES_AN_ITEM // self.kv.group), []
        for row in range(start, end, each):
            queries, position = min(each, end - row), first + row - start
            tiles = _tiles(position, position + queries - 1, size, sinks, reach)
            count = _count(tiles, position + queries - 1)
            for head in range(self.kv.num_kv_heads):
                where = (row, queries, position, self._table_starts[i], head, 1)
                items.append((*where, *tiles, 0, count, t.NO_PART))
        return items

    def _items_of_few(
        self, few: list[tuple[int, tuple[int, int, int]]]
    ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Items of sequences with few queries, with all KV heads if there are enough, and joins."""
        kv, items, joins = self.kv, [], []
        counts = [_count(tiles, self.context_lens[i] - 1) for i, tiles in few]
        wanted = _ITEMS_A_THREAD * self._num_threads if self._num_threads > 1 else 1
        each = max(1, -(-sum(counts) // wanted))
        found = sum(-(-count // each) for count in counts)
        heads = -(-kv.num_kv_heads // max(1, wanted // max(1, found)))
        for (i, tiles), count in zip(few, counts, strict=True):
            row, end = self.query_starts[i], self.query_starts[i + 1]
            position = self.context_lens[i] - (end - row)
            where = (row, end - row, position, self._table_starts[i])
            part = t.NO_PART
            if count > each:
                part = self._part_floats
                head_floats = sums_floats((end - row) * kv.group, kv.head_dim)
                self._part_floats += count * kv.num_kv_heads * head_floats
                joins += [(row, end - row, h, count, part) for h in range(kv.num_kv_heads)]
            for begin in range(0, count, each):
                tail = (*tiles, begin, min(begin + each, count), part)
                for head in range(0, kv.num_kv_heads, heads):
                    items.append((*where, head, min(heads, kv.num_kv_heads - head), *tail))
        return items, joins


def sums_floats(queries: int, head_dim: int) -> int:
    """Floats of a tile's sums: rows of head_dim, in fours, and largest and total of each panel."""
    return -(-queries // 4) * 4 * head_dim + -(-queries // t.LANES) * 2 * t.LANES


def _tiles(first: int, last: int, size: int, sinks: int, reach: int) -> tuple[int, int, int]:
    """Tiles that queries from `first` to `last` see: the first of sinks, how many, first recent."""
    recent = max(0, first - size + 1) // t.TILE
    oldest = max(0, first - reach + 1)
    if oldest >= sinks:
        return 0, 0, recent
    sink_tile = oldest // t.TILE
    return sink_tile, max(0, min(-(-sinks // t.TILE), recent) - sink_tile), recent


def _count(tiles: tuple[int, int, int], last: int) -> int:
    return tiles[1] + last // t.TILE + 1 - tiles[2]
