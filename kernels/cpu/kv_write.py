"""K and V as they are stored, bit for bit as `pdlab.kvcache.KVFormat.encode` makes them.

A *unit* is what shares scales: one row (token and head), or a head of all rows of a block. Its
channels' least and largest values are found first, then scales are made of them, then codes.
"""

import numpy as np

from . import attention_tables as t
from .compiled import kernel, pasted
from .memory import bytes_at, floats_at
from .simd import (
    add_floats,
    divide,
    largest_or_nan,
    least,
    load_floats,
    magnitude,
    most,
    multiply,
    repeated,
    smallest_or_nan,
    store_as_bytes,
    store_floats,
    subtract,
    to_ints,
)
from .simd_codes import (
    clamped,
    join_nibbles,
    store_bfloats,
    store_first_half,
    store_halves,
    to_fp8,
    to_half,
)

_FP16_MAX = np.float32(65504)
_FP16_TINIEST = np.float32(2.0**-24)
_HALF_OF_TINIEST = np.float32(2.0**-25)
_INFINITE = np.float32(np.inf)
_NOTHING, _INT4_MAX, _INT8_MAX, _FP8_MAX = (np.float32(x) for x in (0, 15, 127, 448))
LOW, HIGH = 0, 256  # where in a unit's scratch its zeros and its scales lie
SCRATCH = 512 + 8


@pasted
def _put_floats(data, at, format, x, x_at, head_dim):
    """A row of a float format to byte `at`."""
    floats, halves = floats_at(data), bytes_at(data)
    for channel in range(0, head_dim, 8):
        values = load_floats(x, x_at + channel)
        if format == t.FP32:
            store_floats(floats, (at >> 2) + channel, values)
        elif format == t.FP16:
            store_halves(halves, at + 2 * channel, values)
        else:
            store_bfloats(halves, at + 2 * channel, values)


@pasted
def _begin_unit(scratch, head_dim):
    for channel in range(0, head_dim, 8):
        store_floats(scratch, LOW + channel, repeated(_INFINITE))
        store_floats(scratch, HIGH + channel, repeated(-_INFINITE))


@pasted
def _see_row(scratch, format, x, x_at, head_dim):
    """Widen each channel's range by a row; a symmetric format's by how large it is."""
    for channel in range(0, head_dim, 8):
        values = load_floats(x, x_at + channel)
        if format != t.INT4:
            values = magnitude(values)
        low, high = load_floats(scratch, LOW + channel), load_floats(scratch, HIGH + channel)
        store_floats(scratch, LOW + channel, smallest_or_nan(values, low))
        store_floats(scratch, HIGH + channel, largest_or_nan(values, high))


@pasted
def _join_channels(scratch, per, head_dim):
    """Give all channels that share a scale the range of them all."""
    for first in range(0, head_dim, per):
        low, high = scratch[LOW + first], scratch[HIGH + first]
        if per & 7 == 0:
            lows, highs = load_floats(scratch, LOW + first), load_floats(scratch, HIGH + first)
            for channel in range(first + 8, first + per, 8):
                lows = smallest_or_nan(load_floats(scratch, LOW + channel), lows)
                highs = largest_or_nan(load_floats(scratch, HIGH + channel), highs)
            low, high = least(lows), most(highs)
        else:
            for channel in range(first + 1, first + per):
                here, there = scratch[LOW + channel], scratch[HIGH + channel]
                # NaN is kept, wherever it stands
                low = here if here < low or here != here else low
                high = there if there > high or there != there else high
        for channel in range(first, first + per):
            scratch[LOW + channel] = low
            scratch[HIGH + channel] = high


@pasted
def _make_scales(scratch, format, head_dim):
    """Zeros and scales of ranges, as the fp16 that they are stored as."""
    for channel in range(0, head_dim, 8):
        low, high = load_floats(scratch, LOW + channel), load_floats(scratch, HIGH + channel)
        if format == t.INT4:
            below = subtract(low, multiply(magnitude(low), repeated(np.float32(2.0**-11))))
            below = subtract(below, repeated(_HALF_OF_TINIEST))
            zero = to_half(clamped(below, -_FP16_MAX, _FP16_MAX))
            store_floats(scratch, LOW + channel, zero)
            step = divide(subtract(high, zero), repeated(_INT4_MAX))
        elif format == t.INT8:
            step = divide(high, repeated(_INT8_MAX))
        else:
            step = divide(high, repeated(_FP8_MAX))
        step = clamped(add_floats(step, repeated(_HALF_OF_TINIEST)), _FP16_TINIEST, _FP16_MAX)
        store_floats(scratch, HIGH + channel, to_half(step))


@pasted
def _put_scales(scratch, first, per, head_dim, halves, at):
    """One of each `per` of the scratch's numbers, as fp16."""
    if per == 1:
        for channel in range(0, head_dim, 8):
            store_halves(halves, at + 2 * channel, load_floats(scratch, first + channel))
    else:
        for scale in range(head_dim // per):
            store_first_half(halves, at + 2 * scale, load_floats(scratch, first + scale * per))


@pasted
def _put_codes(scratch, format, x, x_at, head_dim, codes, at):
    """A row's codes."""
    half = head_dim >> 1
    for channel in range(0, half if format == t.INT4 else head_dim, 8):
        values, scale = load_floats(x, x_at + channel), load_floats(scratch, HIGH + channel)
        if format == t.INT8:
            steps = clamped(divide(values, scale), -_INT8_MAX, _INT8_MAX)
            store_as_bytes(codes, at + channel, to_ints(steps))
        elif format == t.FP8:
            steps = clamped(divide(values, scale), -_FP8_MAX, _FP8_MAX)
            store_as_bytes(codes, at + channel, to_fp8(steps))
        else:
            steps = divide(subtract(values, load_floats(scratch, LOW + channel)), scale)
            low = to_ints(clamped(steps, _NOTHING, _INT4_MAX))
            values = load_floats(x, x_at + half + channel)
            scale = load_floats(scratch, HIGH + half + channel)
            steps = divide(subtract(values, load_floats(scratch, LOW + half + channel)), scale)
            high = to_ints(clamped(steps, _NOTHING, _INT4_MAX))
            store_as_bytes(codes, at + channel, join_nibbles(low, high))


@kernel
def write_unit(kv, side, layer, head, unit, count, x, x_row, x_at, rows, rows_at, scratch):
    """Codes and scales of `head` of unit number `unit`, of `count` rows: a block, or a slot.

    Row i is x[x_at + x_row * rows[rows_at + i]] and what follows.
    """
    head_dim, heads = kv[t.HEAD_DIM], kv[t.HEADS_A_GROUP]
    area = kv[t.AREAS + t.AREA_WORDS * (head // heads * 2 + (0 if side == t.K_SIDE else 1)) :]
    head %= heads
    format, row_bytes = kv[side + t.FORMAT], kv[side + t.ROW_BYTES]
    at = layer * kv[side + t.CODES_LAYER] + (unit * count * heads + head) * row_bytes
    if format <= t.BF16:
        from_ = x_at + x_row * rows[rows_at]
        _put_floats(area[t.AT_CODES], at, format, x, from_, head_dim)
    else:
        per = kv[side + t.PER_SCALE]
        _begin_unit(scratch, head_dim)
        for i in range(count):
            _see_row(scratch, format, x, x_at + x_row * rows[rows_at + i], head_dim)
        if per > 1:
            _join_channels(scratch, per, head_dim)
        _make_scales(scratch, format, head_dim)
        scale_at = layer * kv[side + t.SCALES_LAYER]
        scale_at += (unit * heads + head) * 2 * (head_dim // per)
        _put_scales(scratch, HIGH, per, head_dim, bytes_at(area[t.AT_SCALES]), scale_at)
        if format == t.INT4:
            _put_scales(scratch, LOW, per, head_dim, bytes_at(area[t.AT_ZEROS]), scale_at)
        codes = bytes_at(area[t.AT_CODES])
        for i in range(count):
            from_, to = x_at + x_row * rows[rows_at + i], at + i * heads * row_bytes
            _put_codes(scratch, format, x, from_, head_dim, codes, to)


@kernel
def write_open(kv, side, layer, head, slot, x, x_at):
    """A row of `head` to a slot of the open area."""
    head_dim, heads = kv[t.HEAD_DIM], kv[t.HEADS_A_GROUP]
    area = kv[t.AREAS + t.AREA_WORDS * (head // heads * 2 + (0 if side == t.K_SIDE else 1)) :]
    at = layer * kv[side + t.OPEN_LAYER] + 4 * head_dim * (slot * heads + head % heads)
    floats = floats_at(area[t.AT_OPEN] + at)
    for channel in range(0, head_dim, 8):
        store_floats(floats, channel, load_floats(x, x_at + channel))
