"""Attention of a panel of queries to a tile of keys.

A panel is 16 queries side by side: a vector's lanes are queries, so that scores, largest and total
need no sum across lanes. All is in a chunk's scratch, which stays in the second-level cache:

    queries  [panels, head_dim, 16]      scores  [panels, TILE, 16]
    keys     [TILE, head_dim]            values  [head_dim / 16, TILE, 16], in the same place

A tile's **sums** are, for each query, the largest score, the total of the weights e^(score -
largest) and the values so weighted: [queries in fours, head_dim], then for each panel 16 largest
and 16 totals. Those of two tiles are joined by `joined` (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018). Each is a sum in the order of keys (a score: of channels), so no
result depends on how queries are grouped. A key that a query may not see has the score -infinity
and the weight 0, which adds exactly nothing.
"""

import numpy as np

from .attention_tables import LANES, TILE
from .compiled import kernel, pasted
from .simd import (
    add_floats,
    exponential,
    fma,
    larger,
    load_floats,
    multiply,
    repeat_float,
    repeated,
    store_floats,
    subtract,
    total,
    unless_hidden,
    zero_floats,
)

_HIDDEN = np.float32(-np.inf)


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


@pasted
def _eight_keys(queries, at, keys, key_at, row, head_dim, scores, to):
    """Scores of the first 8 queries of a panel and 8 keys."""
    a, b, c, d = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    e, f, g, h = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    b_at, c_at, d_at = key_at + row, key_at + 2 * row, key_at + 3 * row
    e_at, f_at = key_at + 4 * row, key_at + 5 * row
    g_at, h_at = key_at + 6 * row, key_at + 7 * row
    for channel in range(head_dim):
        query = load_floats(queries, at + LANES * channel)
        a = fma(repeat_float(keys, key_at + channel), query, a)
        b = fma(repeat_float(keys, b_at + channel), query, b)
        c = fma(repeat_float(keys, c_at + channel), query, c)
        d = fma(repeat_float(keys, d_at + channel), query, d)
        e = fma(repeat_float(keys, e_at + channel), query, e)
        f = fma(repeat_float(keys, f_at + channel), query, f)
        g = fma(repeat_float(keys, g_at + channel), query, g)
        h = fma(repeat_float(keys, h_at + channel), query, h)
    store_floats(scores, to, a)
    store_floats(scores, to + LANES, b)
    store_floats(scores, to + 2 * LANES, c)
    store_floats(scores, to + 3 * LANES, d)
    store_floats(scores, to + 4 * LANES, e)
    store_floats(scores, to + 5 * LANES, f)
    store_floats(scores, to + 6 * LANES, g)
    store_floats(scores, to + 7 * LANES, h)


@kernel
def score(queries, at, lanes, keys, keys_at, row, head_dim, count, scores, to):
    """Scores of a panel's first `lanes` queries and `count` keys, rounded up to eights.

    Keys lie `row` floats apart.
    """
    if lanes > 8:
        for key in range(0, count, 4):
            _four_keys(
                queries, at, keys, keys_at + key * row, row, head_dim, scores, to + LANES * key
            )
    else:
        for key in range(0, count, 8):
            _eight_keys(
                queries, at, keys, keys_at + key * row, row, head_dim, scores, to + LANES * key
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
def _four_queries(weights, at, values, values_at, count, sums, to, row, fresh, factors, keep, add):
    """Sixteen channels of four queries."""
    a0, a1, b0, b1 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    c0, c1, d0, d1 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    for key in range(count):
        low = load_floats(values, values_at + LANES * key)
        high = load_floats(values, values_at + LANES * key + 8)
        weight = repeat_float(weights, at + LANES * key)
        a0, a1 = fma(weight, low, a0), fma(weight, high, a1)
        weight = repeat_float(weights, at + LANES * key + 1)
        b0, b1 = fma(weight, low, b0), fma(weight, high, b1)
        weight = repeat_float(weights, at + LANES * key + 2)
        c0, c1 = fma(weight, low, c0), fma(weight, high, c1)
        weight = repeat_float(weights, at + LANES * key + 3)
        d0, d1 = fma(weight, low, d0), fma(weight, high, d1)
    _join_row(a0, a1, sums, to, fresh, factors, keep, add)
    _join_row(b0, b1, sums, to + row, fresh, factors, keep + 1, add + 1)
    _join_row(c0, c1, sums, to + 2 * row, fresh, factors, keep + 2, add + 2)
    _join_row(d0, d1, sums, to + 3 * row, fresh, factors, keep + 3, add + 3)


@pasted
def _seen_keys(weights, at, values, values_at, count, sums, to, fresh, factors, keep, add):
    """Sixteen channels of one query, the same bits: values of weight 0 are not touched."""
    low, high = zero_floats(), zero_floats()
    for key in range(count):
        if weights[at + LANES * key] != 0:
            weight = repeat_float(weights, at + LANES * key)
            low = fma(weight, load_floats(values, values_at + LANES * key), low)
            high = fma(weight, load_floats(values, values_at + LANES * key + 8), high)
    _join_row(low, high, sums, to, fresh, factors, keep, add)


@kernel
def mix(
    weights, at, lanes, values, values_at, head_dim, count, sums, to, fresh, factors, keep, add,
    finite,
):  # fmt: skip
    """Join the weighted values of a panel's queries, in fours, to sums[to], [queries, head_dim].

    If values are not `finite`, those of weight 0 must not be touched, be they infinite or NaN.
    """
    for panel in range(0, head_dim, 16):
        here, there = values_at + panel * TILE, to + panel
        if finite:
            for query in range(0, lanes, 4):
                _four_queries(
                    weights, at + query, values, here, count, sums, there + query * head_dim,
                    head_dim, fresh, factors, keep + query, add + query,
                )  # fmt: skip
        else:
            for query in range(lanes):
                _seen_keys(
                    weights, at + query, values, here, count, sums, there + query * head_dim,
                    fresh, factors, keep + query, add + query,
                )  # fmt: skip


@kernel
def all_finite(values, at, head_dim, count):
    """Whether the first `count` values of a tile are neither infinite nor NaN."""
    bad = zero_floats()
    for panel in range(0, head_dim, 16):
        for i in range(0, LANES * count, 8):
            bad = fma(load_floats(values, at + panel * TILE + i), zero_floats(), bad)
    return total(bad) == 0
