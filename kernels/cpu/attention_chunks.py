"""Paged attention as chunks of a step: K and V are written, read in place, and joined.

Three phases: `write_chunk` stores K and V of the step's rows, `attend_chunk` computes an item,
`combine_chunk` joins the tiles of queries that several items shared. All take the tables of
`attention_plan` and flat float32 arrays: qkv [rows, q_size + 2 kv_size], rotated, and out
[rows, q_size]. NaN and infinity of a row are seen by itself and by those that see its K and V.
"""

import numpy as np

from . import attention_tables as t
from .attention_tiles import all_finite, joined, mix, mix_seen, score, weigh
from .compiled import inlined, kernel
from .kv_read import read_rows
from .kv_write import SCRATCH, write_floats, write_unit
from .memory import floats_at, longs_at
from .simd import (
    divide,
    fma,
    lane,
    load_floats,
    multiply,
    repeat_float,
    repeated,
    store_floats,
    zero_floats,
)

_HIDDEN = np.float32(-np.inf)
_ONE = np.float32(1)


# --- writing -------------------------------------------------------------------------------------


@kernel
def write_chunk(kv, plan, layer, qkv, chunk):
    """Store K and V of some of the step's rows."""
    heads, head_dim = kv[t.KV_HEADS], kv[t.HEAD_DIM]
    width = (kv[t.NUM_HEADS] + 2 * heads) * head_dim
    scratch = np.empty(SCRATCH, np.float32)
    for side in (t.K_SIDE, t.V_SIDE):
        at = width - (2 if side == t.K_SIDE else 1) * heads * head_dim
        if kv[side + t.BLOCKWISE]:
            _write_blocks(kv, plan, side, layer, qkv, width, at, chunk, scratch)
            continue
        slots = longs_at(plan[t.AT_SLOTS])
        begin, end = _share(plan, plan[t.NUM_ROWS], chunk)
        for row in range(begin, end):
            for head in range(heads):
                x_at = row * width + at + head * head_dim
                slot = slots[row]
                write_unit(kv, side, layer, head, slot, slot, qkv, 0, x_at, slots, 0, 1, scratch)


@inlined
def _share(plan, count, chunk):
    """Which of `count` things a chunk writes."""
    chunks = plan[t.WRITE_CHUNKS]
    return count * chunk // chunks, count * (chunk + 1) // chunks


@kernel
def _write_blocks(kv, plan, side, layer, qkv, width, at, chunk, scratch):
    """Where scales belong to blocks: whole blocks as codes, others to the open area."""
    heads, head_dim, size = kv[t.KV_HEADS], kv[t.HEAD_DIM], kv[t.BLOCK_SIZE]
    a_group, pair = kv[t.HEADS_A_GROUP], 0 if side == t.K_SIDE else 1
    begin, end = _share(plan, plan[t.NUM_OPEN], chunk)
    slots, rows = longs_at(plan[t.AT_OPEN_SLOTS]), longs_at(plan[t.AT_OPEN_ROWS])
    for i in range(begin, end):
        for head in range(heads):
            area = kv[t.AREAS + t.AREA_WORDS * (2 * (head // a_group) + pair) + t.AT_OPEN]
            to = (slots[i] * a_group + head % a_group) * 4 * head_dim
            to += layer * kv[side + t.OPEN_LAYER]
            write_floats(area, to, t.FP32, qkv, rows[i] * width + at + head * head_dim, head_dim)
    begin, end = _share(plan, plan[t.NUM_WHOLE], chunk)
    blocks, rows = longs_at(plan[t.AT_WHOLE_BLOCKS]), longs_at(plan[t.AT_WHOLE_ROWS])
    for i in range(begin, end):
        for head in range(heads):
            write_unit(
                kv, side, layer, head, blocks[i] * size, blocks[i], qkv, width,
                at + head * head_dim, rows, i * size, size, scratch,
            )  # fmt: skip


# --- attending -----------------------------------------------------------------------------------


@inlined
def _sums_floats(queries, head_dim):
    """See `attention_plan.sums_floats`."""
    panels = -(-queries // t.LANES)
    return -(-queries // 4) * 4 * head_dim + panels * 2 * t.LANES


@kernel
def attend_chunk(kv, plan, layer, kind, qkv, out, chunk):
    """An item: some queries look through some tiles, with some KV heads."""
    window = longs_at(plan[t.AT_KINDS] + 8 * t.KIND_WORDS * kind)
    item = longs_at(window[t.AT_ITEMS] + 8 * t.ITEM_WORDS * chunk)
    head_dim, group = kv[t.HEAD_DIM], kv[t.NUM_HEADS] // kv[t.KV_HEADS]
    queries, heads = item[t.QUERIES] * group, item[t.HEADS]
    panels = -(-queries // t.LANES)
    size = _sums_floats(queries, head_dim)
    asked = np.empty(heads * panels * head_dim * t.LANES, np.float32)
    for head in range(heads):
        at = head * panels * head_dim * t.LANES
        _turn_queries(kv, item, item[t.HEAD] + head, qkv, asked, at)
    alone = item[t.PART] == t.NO_PART
    if alone:
        sums = np.empty(heads * size, np.float32)
    else:
        sums = floats_at(plan[t.AT_PARTS])
    scratch = np.empty(_scratch_floats(head_dim, panels), np.float32)
    for number in range(item[t.BEGIN], item[t.END]):
        tile = number + item[t.SINK_TILE]
        if number >= item[t.SINK_TILES]:
            tile = number - item[t.SINK_TILES] + item[t.RECENT_TILE]
        for head in range(heads):
            to = head * size if alone else item[t.PART] + (number * heads + head) * size
            fresh = not alone or number == item[t.BEGIN]
            at = head * panels * head_dim * t.LANES
            _attend_tile(
                kv, plan, window, item, layer, tile, item[t.HEAD] + head, asked, at, scratch, sums,
                to, fresh,
            )  # fmt: skip
    if alone:
        for head in range(heads):
            _put_out(kv, item, item[t.HEAD] + head, sums, head * size, out)


@kernel
def _turn_queries(kv, item, head, qkv, to, to_at):
    """Queries of a KV head, scaled, as panels [panels, head_dim, 16]; lanes that are over are 0."""
    head_dim, group = kv[t.HEAD_DIM], kv[t.NUM_HEADS] // kv[t.KV_HEADS]
    width = (kv[t.NUM_HEADS] + 2 * kv[t.KV_HEADS]) * head_dim
    queries, scale = item[t.QUERIES] * group, _ONE / np.sqrt(np.float32(head_dim))
    for query in range(-(-queries // t.LANES) * t.LANES):
        there = to_at + query // t.LANES * t.LANES * head_dim + query % t.LANES
        row = item[t.ROW] + query // group
        at = row * width + (head * group + query % group) * head_dim
        for channel in range(head_dim):
            value = qkv[at + channel] * scale if query < queries else np.float32(0)
            to[there + t.LANES * channel] = value


@inlined
def _scratch_floats(head_dim, panels):
    """Keys, values, scores, factors of two kinds, which keys there are, scales spread out."""
    return 2 * t.TILE * head_dim + panels * t.LANES * (t.TILE + 2) + t.TILE + 2 * head_dim + 16


@kernel
def _attend_tile(kv, plan, window, item, layer, tile, head, queries, at, scratch, sums, to, fresh):
    """One tile and one KV head: read, score, weigh, mix."""
    head_dim, group = kv[t.HEAD_DIM], kv[t.NUM_HEADS] // kv[t.KV_HEADS]
    lanes = item[t.QUERIES] * group
    panels = -(-lanes // t.LANES)
    values = t.TILE * head_dim
    scores = 2 * values
    keep = scores + panels * t.LANES * t.TILE
    add = keep + panels * t.LANES
    there = add + panels * t.LANES
    count, gaps = _read_tile(kv, plan, window, item, layer, tile, head, scratch, there)
    largest = to + -(-lanes // 4) * 4 * head_dim
    hides = _hides(window, item, tile, count)
    seen_only = (hides or gaps) and not all_finite(scratch, values, head_dim, count)
    for panel in range(panels):
        some = min(lanes - t.LANES * panel, t.LANES)
        here = scores + panel * t.LANES * t.TILE
        asked = at + panel * t.LANES * head_dim
        score(queries, asked, some, scratch, 0, head_dim, count, scratch, here)
        if gaps:
            _hide_gaps(scratch, there, count, here)
        if hides:
            _hide(window, item, tile * t.TILE, count, t.LANES * panel, some, group, scratch, here)
        factors = t.LANES * panel
        pair = largest + 2 * t.LANES * panel
        weigh(scratch, here, some, count, sums, pair, fresh, scratch, keep + factors, add + factors)
        rows = to + t.LANES * panel * head_dim
        if seen_only:
            mix_seen(
                scratch, here, some, scratch, values, head_dim, count, sums, rows, fresh, scratch,
                keep + factors, add + factors,
            )  # fmt: skip
        else:
            mix(
                scratch, here, some, scratch, values, head_dim, count, sums, rows, fresh, scratch,
                keep + factors, add + factors,
            )  # fmt: skip


@kernel
def _read_tile(kv, plan, window, item, layer, tile, head, scratch, there):
    """Keys and values of a tile that some query of the item sees.

    Returns how many keys of the tile there are up to the last of these, and whether some before it
    are not there: then scratch[there + key] is 0 for those, and their values are 0.
    """
    first, last = item[t.POSITION], item[t.POSITION] + item[t.QUERIES] - 1
    begin, end = tile * t.TILE, (tile + 1) * t.TILE
    recent = max(begin, first - window[t.SIZE] + 1)
    until = min(end, last + 1)
    sink = max(begin, first - window[t.REACH] + 1)
    sinks_until = min(min(end, window[t.SINKS]), max(recent, begin))
    for key in range(0, t.TILE, 8):
        store_floats(scratch, there + key, zero_floats())
    found, count = 0, 0
    if sink < sinks_until:
        found += _read_span(kv, plan, item, layer, head, begin, sink, sinks_until, scratch, there)
        count = sinks_until - begin
    if recent < until:
        found += _read_span(kv, plan, item, layer, head, begin, recent, until, scratch, there)
        count = until - begin
    if found == count:
        return count, False
    head_dim = kv[t.HEAD_DIM]
    for key in range(count):
        if scratch[there + key] == 0:
            for panel in range(0, head_dim, 16):
                at = t.TILE * (head_dim + panel) + t.LANES * key
                store_floats(scratch, at, zero_floats())
                store_floats(scratch, at + 8, zero_floats())
    return count, True


@kernel
def _read_span(kv, plan, item, layer, head, begin, position, until, scratch, there):
    """Read keys and values from `position` on into a tile that begins at `begin`; returns how many.

    Block by block, and none that was dropped.
    """
    tables, size, head_dim = longs_at(plan[t.AT_TABLES]), kv[t.BLOCK_SIZE], kv[t.HEAD_DIM]
    values, found = t.TILE * head_dim, 0
    spread = there + t.TILE
    while position < until:
        block, offset = tables[item[t.TABLE] + position // size], position % size
        some = min(size - offset, until - position)
        if block >= 0:
            key = position - begin
            read_rows(
                kv, t.K_SIDE, layer, head, block, offset, some, scratch, key * head_dim, head_dim,
                t.LANES, spread,
            )  # fmt: skip
            read_rows(
                kv, t.V_SIDE, layer, head, block, offset, some, scratch, values + key * t.LANES,
                t.LANES, t.LANES * t.TILE, spread,
            )  # fmt: skip
            for i in range(key, key + some):
                scratch[there + i] = _ONE
            found += some
        position += some
    return found


# --- what is not seen ----------------------------------------------------------------------------


@inlined
def _hides(window, item, tile, count):
    """Whether some query of the item may not see some key of the tile."""
    begin, last = tile * t.TILE, item[t.POSITION] + item[t.QUERIES] - 1
    return begin + count - 1 > item[t.POSITION] or begin < last - window[t.SIZE] + 1


@kernel
def _hide_gaps(scratch, there, count, scores):
    """Hide keys that are not there from a panel."""
    for key in range(count):
        if scratch[there + key] == 0:
            store_floats(scratch, scores + t.LANES * key, repeated(_HIDDEN))
            store_floats(scratch, scores + t.LANES * key + 8, repeated(_HIDDEN))


@kernel
def _hide(window, item, begin, count, first, lanes, group, scratch, scores):
    """Hide from each query of a panel the keys that it may not see."""
    for query in range(lanes):
        position = item[t.POSITION] + (first + query) // group
        for key in range(position + 1 - begin, count):
            scratch[scores + t.LANES * key + query] = _HIDDEN
        sink, sinks = position - window[t.REACH] + 1 - begin, window[t.SINKS] - begin
        for key in range(min(position - window[t.SIZE] + 1 - begin, count)):
            if not sink <= key < sinks:
                scratch[scores + t.LANES * key + query] = _HIDDEN


# --- results -------------------------------------------------------------------------------------


@kernel
def _put_out(kv, item, head, sums, at, out):
    """Sums over totals: the rows of a KV head's queries."""
    head_dim, group = kv[t.HEAD_DIM], kv[t.NUM_HEADS] // kv[t.KV_HEADS]
    _put_rows(
        kv, item[t.ROW], item[t.QUERIES] * group, head * group, group, head_dim, sums, at, out
    )


@kernel
def _put_rows(kv, row, queries, head, group, head_dim, sums, at, out):
    totals = at + -(-queries // 4) * 4 * head_dim + t.LANES
    for query in range(queries):
        weight = repeat_float(sums, totals + query // t.LANES * 2 * t.LANES + query % t.LANES)
        to = ((row + query // group) * kv[t.NUM_HEADS] + head + query % group) * head_dim
        for channel in range(0, head_dim, 8):
            values = divide(load_floats(sums, at + query * head_dim + channel), weight)
            store_floats(out, to + channel, values)


@kernel
def combine_chunk(kv, plan, kind, out, chunk):
    """Join the tiles of some queries and one KV head that several items shared, in their order."""
    window = longs_at(plan[t.AT_KINDS] + 8 * t.KIND_WORDS * kind)
    join = longs_at(window[t.AT_JOINS] + 8 * t.JOIN_WORDS * chunk)
    head_dim, group = kv[t.HEAD_DIM], kv[t.NUM_HEADS] // kv[t.KV_HEADS]
    queries, head = join[t.JOIN_QUERIES] * group, join[t.JOIN_HEAD]
    size = _sums_floats(queries, head_dim)
    parts, step = floats_at(plan[t.AT_PARTS]), kv[t.KV_HEADS] * size
    first = join[t.JOIN_PART] + head * size
    largest = -(-queries // 4) * 4 * head_dim
    for tile in range(1, join[t.JOIN_TILES]):
        _join_tile(parts, first, first + tile * step, queries, head_dim, largest)
    _put_rows(kv, join[t.JOIN_ROW], queries, head * group, group, head_dim, parts, first, out)


@kernel
def _join_tile(parts, to, at, queries, head_dim, largest):
    """Join a tile's sums to others; `attention_tiles.mix` does the same in the same order."""
    for half in range(0, queries, 8):
        pair = largest + half // t.LANES * 2 * t.LANES + half % t.LANES
        top, weight, keep, add = joined(
            load_floats(parts, to + pair),
            load_floats(parts, to + pair + t.LANES),
            load_floats(parts, at + pair),
            load_floats(parts, at + pair + t.LANES),
        )
        store_floats(parts, to + pair, top)
        store_floats(parts, to + pair + t.LANES, weight)
        for query in range(half, min(half + 8, queries)):
            kept, added = repeated(lane(keep, query - half)), repeated(lane(add, query - half))
            for channel in range(query * head_dim, (query + 1) * head_dim, 8):
                values = multiply(load_floats(parts, to + channel), kept)
                values = fma(load_floats(parts, at + channel), added, values)
                store_floats(parts, to + channel, values)
