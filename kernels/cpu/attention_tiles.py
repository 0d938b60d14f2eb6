"""Attention of a panel of queries to a tile of keys.

A panel is 16 queries side by side: a vector's lanes are queries, so that scores, largest and total
need no sum across lanes. All is in a chunk's scratch, which stays in the second-level cache:

    queries  [panels, head_dim, 16]      scores  [panels, TILE, 16]
    keys     [TILE, head_dim]            values  [TILE, head_dim], in the same place

Keys and values that are floats already may also stay where they are stored. So each is told in
runs of 16: a run begins at starts[run] (`NOWHERE` if none of it is there), its keys are `row`
floats apart.

A tile's **sums** are, for each query, the largest score, the total of the weights e^(score -
largest) and the values so weighted: [queries in fours, head_dim], then for each panel 16 largest
and 16 totals. Those of two tiles are joined by `joined` (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). Each is a sum in the order of keys (a score: of channels), so no
result depends on how queries are grouped. A key that a query may not see has the score -infinity
and the weight 0, which adds exactly nothing.
"""

import numpy as np

from .attention_tables import LANES, RUN
from .compiled import inlined, kernel, pasted
from .simd import (
    add_floats,
    exponential,
    fma,
    larger,
    load_floats,
    load_turned,
    multiply,
    repeat_float,
    repeated,
    store_floats,
    store_turned,
    subtract,
    total,
    unless_hidden,
    zero_floats,
)

_HIDDEN = np.float32(-np.inf)
NOWHERE = -1


# --- scores --------------------------------------------------------------------------------------


@pasted
def _four_keys(queries, at, keys, key_at, row, head_dim, scores, to):
    """Scores of 16 queries and 4 keys."""
    a0, a1, b0, b1 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    c0, c1, d0, d1 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    b_at, c_at, d_at = key_at + row, key_at + 2 * row, key_at + 3 * row
    for channel in range(head_dim):
        low = load_floats(queries, at + LANES * channel)
        high = load_floats(queries, at + LANES * channel + 8)
        key = repeat_float(keys, key_at + channel)
        a0, a1 = fma(key, low, a0), fma(key, high, a1)
        key = repeat_float(keys, b_at + channel)
        b0, b1 = fma(key, low, b0), fma(key, high, b1)
        key = repeat_float(keys, c_at + channel)
        c0, c1 = fma(key, low, c0), fma(key, high, c1)
        key = repeat_float(keys, d_at + channel)
        d0, d1 = fma(key, low, d0), fma(key, high, d1)
    store_floats(scores, to, a0)
    store_floats(scores, to + 8, a1)
    store_floats(scores, to + LANES, b0)
    store_floats(scores, to + LANES + 8, b1)
    store_floats(scores, to + 2 * LANES, c0)
    store_floats(scores, to + 2 * LANES + 8, c1)
    store_floats(scores, to + 3 * LANES, d0)
    store_floats(scores, to + 3 * LANES + 8, d1)


@inlined
def _add_channel(sums, low, high, queries, at):
    """The sums of four queries and 16 keys with one more channel of these, `low` and `high`."""
    a0, a1, b0, b1, c0, c1, d0, d1 = sums
    query = repeat_float(queries, at)
    a0, a1 = fma(low, query, a0), fma(high, query, a1)
    query = repeat_float(queries, at + 1)
    b0, b1 = fma(low, query, b0), fma(high, query, b1)
    query = repeat_float(queries, at + 2)
    c0, c1 = fma(low, query, c0), fma(high, query, c1)
    query = repeat_float(queries, at + 3)
    d0, d1 = fma(low, query, d0), fma(high, query, d1)
    return a0, a1, b0, b1, c0, c1, d0, d1


@pasted
def _four_queries_of(queries, at, keys, key_at, row, head_dim, scores, to):
    """Scores of four queries and 16 keys, which are turned: few queries would not fill vectors."""
    zero = zero_floats()
    sums = (zero, zero, zero, zero, zero, zero, zero, zero)
    for channel in range(0, head_dim, 4):
        low = load_turned(keys, key_at + channel, row)
        high = load_turned(keys, key_at + 8 * row + channel, row)
        here = at + LANES * channel
        sums = _add_channel(sums, low[0], high[0], queries, here)
        sums = _add_channel(sums, low[1], high[1], queries, here + LANES)
        sums = _add_channel(sums, low[2], high[2], queries, here + 2 * LANES)
        sums = _add_channel(sums, low[3], high[3], queries, here + 3 * LANES)
    store_turned(scores, to, LANES, sums[0], sums[2], sums[4], sums[6])
    store_turned(scores, to + 8 * LANES, LANES, sums[1], sums[3], sums[5], sums[7])


@kernel
def score(queries, at, lanes, keys, starts, row, head_dim, count, scores, to):
    """Scores of a panel's first `lanes` queries and `count` keys, rounded up to runs."""
    for run in range(-(-count // RUN)):
        start, here = starts[run], to + LANES * RUN * run
        if start == NOWHERE:
            continue
        if lanes > 8:
            for key in range(0, RUN, 4):
                _four_keys(
                    queries, at, keys, start + key * row, row, head_dim, scores, here + LANES * key
                )
        else:
            for first in range(0, lanes, 4):
                _four_queries_of(
                    queries, at + first, keys, start, row, head_dim, scores, here + first
                )


# --- weights -------------------------------------------------------------------------------------


@pasted
def joined(largest, weight, tile_largest, tile_weight):
    """The largest score and the total of two tiles, and by what the sums of each are multiplied."""
    new = larger(largest, tile_largest)
    keep = unless_hidden(largest, exponential(subtract(largest, new)))
    add = unless_hidden(tile_largest, exponential(subtract(tile_largest, new)))
    return new, fma(tile_weight, add, multiply(weight, keep)), keep, add


@kernel
def weigh(scores, at, lanes, count, sums, sums_at, fresh, factors, keep, add):
    """Turn a panel's scores into weights; join its largest and total to sums[sums_at].

    If `fresh`, these are set. To factors[keep] and factors[add], 16 each, go those that the values
    before and the new ones are multiplied with.
    """
    for half in range(0, lanes, 8):
        top = repeated(_HIDDEN)
        for key in range(count):
            top = larger(load_floats(scores, at + half + LANES * key), top)
        weight = zero_floats()
        for key in range(count):
            value = load_floats(scores, at + half + LANES * key)
            value = unless_hidden(value, exponential(subtract(value, top)))
            store_floats(scores, at + half + LANES * key, value)
            weight = add_floats(value, weight)
        here = sums_at + half
        if not fresh:
            before, total_before = load_floats(sums, here), load_floats(sums, here + LANES)
            top, weight, kept, added = joined(before, total_before, top, weight)
            store_floats(factors, keep + half, kept)
            store_floats(factors, add + half, added)
        store_floats(sums, here, top)
        store_floats(sums, here + LANES, weight)


# --- values --------------------------------------------------------------------------------------


@pasted
def _join_row(low, high, sums, at, fresh, factors, keep, add):
    if not fresh:
        kept, added = repeat_float(factors, keep), repeat_float(factors, add)
        low = fma(low, added, multiply(load_floats(sums, at), kept))
        high = fma(high, added, multiply(load_floats(sums, at + 8), kept))
    store_floats(sums, at, low)
    store_floats(sums, at + 8, high)


@pasted
def _four_queries(
    weights, at, values, starts, row, channel, count, sums, to, apart, fresh, factors, keep, add
):
    """Sixteen channels of four queries."""
    a0, a1, b0, b1 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    c0, c1, d0, d1 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    for run in range(-(-count // RUN)):
        here, first = starts[run] + channel, RUN * run
        if starts[run] == NOWHERE:
            continue
        for key in range(min(RUN, count - first)):
            low = load_floats(values, here + row * key)
            high = load_floats(values, here + row * key + 8)
            weight_at = at + LANES * (first + key)
            weight = repeat_float(weights, weight_at)
            a0, a1 = fma(weight, low, a0), fma(weight, high, a1)
            weight = repeat_float(weights, weight_at + 1)
            b0, b1 = fma(weight, low, b0), fma(weight, high, b1)
            weight = repeat_float(weights, weight_at + 2)
            c0, c1 = fma(weight, low, c0), fma(weight, high, c1)
            weight = repeat_float(weights, weight_at + 3)
            d0, d1 = fma(weight, low, d0), fma(weight, high, d1)
    _join_row(a0, a1, sums, to, fresh, factors, keep, add)
    _join_row(b0, b1, sums, to + apart, fresh, factors, keep + 1, add + 1)
    _join_row(c0, c1, sums, to + 2 * apart, fresh, factors, keep + 2, add + 2)
    _join_row(d0, d1, sums, to + 3 * apart, fresh, factors, keep + 3, add + 3)


@pasted
def _seen_keys(
    weights, at, values, starts, row, channel, count, sums, to, fresh, factors, keep, add
):
    """Sixteen channels of one query, the same bits: values of weight 0 are not touched."""
    low, high = zero_floats(), zero_floats()
    for key in range(count):
        if weights[at + LANES * key] != 0:
            weight = repeat_float(weights, at + LANES * key)
            here = starts[key // RUN] + row * (key % RUN) + channel
            low = fma(weight, load_floats(values, here), low)
            high = fma(weight, load_floats(values, here + 8), high)
    _join_row(low, high, sums, to, fresh, factors, keep, add)


@kernel
def mix(
    weights, at, lanes, values, starts, row, head_dim, count, sums, to, fresh, factors, keep, add,
    finite,
):  # fmt: skip
    """Join the weighted values of a panel's queries, in fours, to sums[to], [queries, head_dim].

    If values are not `finite`, those of weight 0 must not be touched, be they infinite or NaN.
    """
    for channel in range(0, head_dim, 16):
        there = to + channel
        if finite:
            for query in range(0, lanes, 4):
                _four_queries(
                    weights, at + query, values, starts, row, channel, count, sums,
                    there + query * head_dim, head_dim, fresh, factors, keep + query, add + query,
                )  # fmt: skip
        else:
            for query in range(lanes):
                _seen_keys(
                    weights, at + query, values, starts, row, channel, count, sums,
                    there + query * head_dim, fresh, factors, keep + query, add + query,
                )  # fmt: skip


@kernel
def all_finite(values, starts, row, head_dim, count):
    """Whether the first `count` values of a tile are neither infinite nor NaN."""
    bad = zero_floats()
    for key in range(count):
        here = starts[key // RUN] + row * (key % RUN)
        for channel in range(0, head_dim if starts[key // RUN] != NOWHERE else 0, 8):
            bad = fma(load_floats(values, here + channel), zero_floats(), bad)
    return total(bad) == 0
