"""Paged attention as chunks of a step: K and V are written, read in place, and joined.

Three phases: `write_chunk` stores K and V of the step's rows, `attend_chunk` computes an item,
`combine_chunk` joins the tiles of queries that several items shared. All take the tables of
`attention_plan` and flat float32 arrays: qkv [rows, q_size + 2 kv_size], rotated, and out
[rows, q_size]. NaN and infinity of a row are seen by itself and by those that see its K and V.
"""

import numpy as np

from . import attention_tables as t
from .attention_tiles import NOWHERE, all_finite, joined, mix, score, weigh
from .compiled import inlined, kernel, pasted
from .kv_read import read_rows
from .kv_write import SCRATCH, write_open, write_unit
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
    store_turned,
    zero_floats,
)

_HIDDEN = np.float32(-np.inf)
_ONE = np.float32(1)


# --- writing -------------------------------------------------------------------------------------


@pasted
def write_chunk(kv, plan, layer, qkv, chunk):
    """Store K and V of some of the step's rows.

    Where scales belong to blocks, only whole blocks become codes; other rows go to the open area.
    """
    heads, head_dim, chunks = kv[t.KV_HEADS], kv[t.HEAD_DIM], plan[t.WRITE_CHUNKS]
    width = (kv[t.NUM_HEADS] + 2 * heads) * head_dim
    scratch = np.empty(SCRATCH, np.float32)
    for side in (t.K_SIDE, t.V_SIDE):
        at = width - (2 if side == t.K_SIDE else 1) * heads * head_dim
        blockwise = kv[side + t.BLOCKWISE]
        words = plan[t.BLOCK_UNITS if blockwise else t.ROW_UNITS :]
        size = kv[t.BLOCK_SIZE] if blockwise else 1
        units, rows = longs_at(words[t.AT_UNITS]), longs_at(words[t.AT_ROWS])
        count = words[t.NUM_UNITS]
        for i in range(count * chunk // chunks, count * (chunk + 1) // chunks):
            for head in range(heads):
                write_unit(
                    kv, side, layer, head, units[i], size, qkv, width, at + head * head_dim, rows,
                    i * size, scratch,
                )  # fmt: skip
        if blockwise:
            words = plan[t.OPEN_UNITS :]
            units, rows = longs_at(words[t.AT_UNITS]), longs_at(words[t.AT_ROWS])
            count = words[t.NUM_UNITS]
            for i in range(count * chunk // chunks, count * (chunk + 1) // chunks):
                for head in range(heads):
                    x_at = rows[i] * width + at + head * head_dim
                    write_open(kv, side, layer, head, units[i], qkv, x_at)


# --- attending -----------------------------------------------------------------------------------


@pasted
def _sums_floats(queries, head_dim):
    """See `attention_plan.sums_floats`."""
    panels = -(-queries // t.LANES)
    return -(-queries // 4) * 4 * head_dim + panels * 2 * t.LANES


@pasted
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
    sums = np.empty(heads * size, np.float32) if alone else floats_at(plan[t.AT_PARTS])
    scratch = np.empty(_scratch_floats(head_dim, panels), np.float32)
    starts = np.empty(t.TILE // t.RUN, np.int64)
    for number in range(item[t.BEGIN], item[t.END]):
        tile = number + item[t.SINK_TILE]
        if number >= item[t.SINK_TILES]:
            tile = number - item[t.SINK_TILES] + item[t.RECENT_TILE]
        for head in range(heads):
            share = number * kv[t.KV_HEADS] + item[t.HEAD] + head
            to = head * size if alone else item[t.PART] + share * size
            fresh = not alone or number == item[t.BEGIN]
            at = head * panels * head_dim * t.LANES
            _attend_tile(
                kv, plan, window, item, layer, tile, item[t.HEAD] + head, asked, at, scratch,
                starts, sums, to, fresh,
            )  # fmt: skip
    if alone:
        for head in range(heads):
            _put_out(kv, item, item[t.HEAD] + head, sums, head * size, out)


@pasted
def _turn_queries(kv, item, head, qkv, to, to_at):
    """Queries of a KV head, scaled, as panels [panels, head_dim, 16]; lanes that are over are 0."""
    head_dim, group = kv[t.HEAD_DIM], kv[t.NUM_HEADS] // kv[t.KV_HEADS]
    width = (kv[t.NUM_HEADS] + 2 * kv[t.KV_HEADS]) * head_dim
    queries, scale = item[t.QUERIES] * group, repeated(_ONE / np.sqrt(np.float32(head_dim)))
    for first in range(0, -(-queries // t.LANES) * t.LANES, 4):
        there = to_at + first // t.LANES * t.LANES * head_dim + first % t.LANES
        for channel in range(0, head_dim, 8):
            at = item[t.ROW] * width + head * group * head_dim + channel
            a = _query(first, queries, group, width, head_dim, scale, qkv, at)
            b = _query(first + 1, queries, group, width, head_dim, scale, qkv, at)
            c = _query(first + 2, queries, group, width, head_dim, scale, qkv, at)
            d = _query(first + 3, queries, group, width, head_dim, scale, qkv, at)
            store_turned(to, there + t.LANES * channel, t.LANES, a, b, c, d)


@inlined
def _query(query, queries, group, width, head_dim, scale, qkv, at):
    """Eight channels of one query of a KV head, whose first lies at `at`; 0 if there is none."""
    here = at + query // group * width + query % group * head_dim
    return multiply(load_floats(qkv, here), scale) if query < queries else zero_floats()


@pasted
def _scratch_floats(head_dim, panels):
    """Keys or values, scores, factors of two kinds, which keys there are, scales spread out."""
    return t.TILE * head_dim + panels * t.LANES * (t.TILE + 2) + t.TILE + 2 * head_dim + 16


@pasted
def _attend_tile(
    kv, plan, window, item, layer, tile, head, queries, at, scratch, starts, sums, to, fresh
):
    """One tile and one KV head: read keys, score, weigh, read values in their place, mix."""
    head_dim, group = kv[t.HEAD_DIM], kv[t.NUM_HEADS] // kv[t.KV_HEADS]
    lanes = item[t.QUERIES] * group
    panels = -(-lanes // t.LANES)
    scores = t.TILE * head_dim
    keep = scores + panels * t.LANES * t.TILE
    add = keep + panels * t.LANES
    there = add + panels * t.LANES
    largest = to + -(-lanes // 4) * 4 * head_dim
    for side in (t.K_SIDE, t.V_SIDE):
        in_place = _is_in_place(kv, side, lanes)
        data, row = _stored(kv, side, layer, head) if in_place else (scratch, head_dim)
        count, gaps = _read_tile(
            kv, plan, window, item, side, layer, tile, head, in_place, scratch, there, starts
        )
        hides = _hides(window, item, tile, count)
        finite = side == t.K_SIDE or not (hides or gaps)
        finite = finite or all_finite(data, starts, row, head_dim, count)
        for panel in range(panels):
            some, part = min(lanes - t.LANES * panel, t.LANES), t.LANES * panel
            here, pair = scores + part * t.TILE, largest + 2 * part
            if side == t.K_SIDE:
                score(
                    queries, at + part * head_dim, some, data, starts, row, head_dim, count,
                    scratch, here,
                )  # fmt: skip
                if gaps:
                    _hide_gaps(scratch, there, count, here)
                if hides:
                    _hide(window, item, tile * t.TILE, count, part, some, group, scratch, here)
                weigh(
                    scratch, here, some, count, sums, pair, fresh, scratch, keep + part, add + part
                )
            else:
                mix(
                    scratch, here, some, data, starts, row, head_dim, count, sums,
                    to + part * head_dim, fresh, scratch, keep + part, add + part, finite,
                )  # fmt: skip


@inlined
def _is_in_place(kv, side, lanes):
    """Whether keys or values are used where they are stored.

    Floats can be if they lie there in whole runs; for many queries a copy pays.
    """
    return lanes <= t.LANES and kv[side + t.FORMAT] == t.FP32 and kv[t.BLOCK_SIZE] % t.RUN == 0


@inlined
def _stored(kv, side, layer, head):
    """Stored floats of a layer from the first one of `head` on, and how far its rows are apart."""
    heads, head_dim = kv[t.HEADS_A_GROUP], kv[t.HEAD_DIM]
    area = t.AREAS + t.AREA_WORDS * (head // heads * 2 + (0 if side == t.K_SIDE else 1))
    begin = kv[area + t.AT_CODES] + layer * kv[side + t.CODES_LAYER] + 4 * (head % heads * head_dim)
    return floats_at(begin), heads * head_dim


@pasted
def _read_tile(kv, plan, window, item, side, layer, tile, head, in_place, scratch, there, starts):
    """Keys or values of a tile that some query of the item sees, block by block.

    Fills `starts`, and the scratch unless they are used in place. Returns how many keys of the tile
    there are up to the last of these, and whether some before it are not there: then
    scratch[there + key] is 0 for those.
    """
    tables, size, head_dim = longs_at(plan[t.AT_TABLES]), kv[t.BLOCK_SIZE], kv[t.HEAD_DIM]
    first, last = item[t.POSITION], item[t.POSITION] + item[t.QUERIES] - 1
    begin, end = tile * t.TILE, (tile + 1) * t.TILE
    recent, spread = max(begin, first - window[t.SIZE] + 1), there + t.TILE
    for key in range(0, t.TILE, 8):
        store_floats(scratch, there + key, zero_floats())
    for run in range(len(starts)):
        starts[run] = NOWHERE if in_place else run * t.RUN * head_dim
    found, count = end - end, end - end  # no literal 0, for which callees are compiled once more
    for sinks in (True, False):
        if sinks:
            position = max(begin, first - window[t.REACH] + 1)
            until = min(min(end, window[t.SINKS]), recent)
        else:
            position, until = recent, min(end, last + 1)
        count = max(count, until - begin) if position < until else count
        while position < until:
            block, offset = tables[item[t.TABLE] + position // size], position % size
            some, key = min(size - offset, until - position), position - begin
            position += some
            if block >= 0:  # it was not dropped
                if in_place:
                    row = kv[t.HEADS_A_GROUP] * head_dim
                    for run in range(key // t.RUN, (key + some - 1) // t.RUN + 1):
                        starts[run] = (block * size + offset + run * t.RUN - key) * row
                else:
                    to = key * head_dim
                    read_rows(kv, side, layer, head, block, offset, some, scratch, to, spread)
                for i in range(key, key + some):
                    scratch[there + i] = _ONE
                found += some
    return count, found < count


# --- what is not seen ----------------------------------------------------------------------------


@pasted
def _hides(window, item, tile, count):
    """Whether some query of the item may not see some key of the tile."""
    begin, last = tile * t.TILE, item[t.POSITION] + item[t.QUERIES] - 1
    return begin + count - 1 > item[t.POSITION] or begin < last - window[t.SIZE] + 1


@pasted
def _hide_gaps(scratch, there, count, scores):
    """Hide keys that are not there from a panel."""
    for key in range(count):
        if scratch[there + key] == 0:
            store_floats(scratch, scores + t.LANES * key, repeated(_HIDDEN))
            store_floats(scratch, scores + t.LANES * key + 8, repeated(_HIDDEN))


@pasted
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


@pasted
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


@pasted
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


@pasted
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
