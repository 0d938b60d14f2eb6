"""Stored K and V as floats again; `attention_tables` names the words of the tables.

A row is a token's channels of one head; scales belong to a row (token) or to a block.
"""

from . import attention_tables as t
from .compiled import kernel, pasted
from .memory import bytes_at, floats_at, longs_at
from .simd import fma, load_floats, load_halves, multiply, store_floats
from .simd_codes import (
    load_bfloats,
    load_fp8,
    load_high_nibbles,
    load_int8,
    load_low_nibbles,
    repeat_half,
)


@pasted
def _read_floats(data, at, row_bytes, format, head_dim, count, out, to):
    """`count` rows of a float format, from byte `at` on and `row_bytes` apart."""
    floats, halves = floats_at(data), bytes_at(data)
    if format == t.FP32:
        for i in range(count):
            here, there = at + i * row_bytes >> 2, to + i * head_dim
            for channel in range(0, head_dim, 8):
                store_floats(out, there + channel, load_floats(floats, here + channel))
    elif format == t.FP16:
        for i in range(count):
            here, there = at + i * row_bytes, to + i * head_dim
            for channel in range(0, head_dim, 8):
                store_floats(out, there + channel, load_halves(halves, here + 2 * channel))
    else:
        for i in range(count):
            here, there = at + i * row_bytes, to + i * head_dim
            for channel in range(0, head_dim, 8):
                store_floats(out, there + channel, load_bfloats(halves, here + 2 * channel))


@pasted
def _spread(area, at, parts, per, head_dim, out, to, width):
    """The scale, and of two `parts` the zero, of each channel of a row, as floats."""
    for part in range(parts):
        halves = bytes_at(area[t.AT_SCALES + part] + at)
        for scale in range(head_dim // per):
            values = repeat_half(halves, 2 * scale)
            # eights that begin in this group; what they write beyond it, the next one overwrites
            for channel in range(scale * per, (scale + 1) * per, 8):
                store_floats(out, to + part * width + channel, values)


@pasted
def _read_codes(
    area, at, row_bytes, scale_at, scale_step, format, per, head_dim, count, out, to, spread
):
    """`count` rows of codes, `row_bytes` apart, with scales `scale_step` bytes apart."""
    codes, scales = bytes_at(area[t.AT_CODES]), bytes_at(area[t.AT_SCALES])
    zeros = bytes_at(area[t.AT_ZEROS])
    half, wide, second = head_dim >> 1, per & 7 == 0, head_dim + 8
    for i in range(count):
        here, there, scaling = at + i * row_bytes, to + i * head_dim, scale_at + i * scale_step
        if not wide and (i == 0 or scale_step != 0):
            _spread(area, scaling, 2 if format == t.INT4 else 1, per, head_dim, out, spread, second)
        for first in range(0, head_dim, per if wide else 8):
            if wide:
                scale = zero = repeat_half(scales, scaling)
                if format == t.INT4:
                    zero = repeat_half(zeros, scaling)
                scaling += 2
            else:
                scale = load_floats(out, spread + first)
                zero = load_floats(out, spread + second + first)
            for channel in range(first, first + (per if wide else 8), 8):
                if format == t.INT8:
                    values = multiply(load_int8(codes, here + channel), scale)
                elif format == t.FP8:
                    values = multiply(load_fp8(codes, here + channel), scale)
                elif channel < half:
                    values = fma(load_low_nibbles(codes, here + channel), scale, zero)
                else:
                    values = fma(load_high_nibbles(codes, here + channel - half), scale, zero)
                store_floats(out, there + channel, values)


@kernel
def read_rows(kv, side, layer, head, block, offset, count, out, to, spread):
    """K or V of `head` of `count` tokens of a block, from its token `offset` on.

    They go to out[to], [count, head_dim]. From out[spread] on there is room for 2 (head_dim + 8)
    floats.
    """
    head_dim, heads, size = kv[t.HEAD_DIM], kv[t.HEADS_A_GROUP], kv[t.BLOCK_SIZE]
    area = kv[t.AREAS + t.AREA_WORDS * (head // heads * 2 + (0 if side == t.K_SIDE else 1)) :]
    head %= heads
    format, row_bytes, place = kv[side + t.FORMAT], kv[side + t.ROW_BYTES], -1
    if kv[side + t.BLOCKWISE]:
        place = longs_at(kv[t.AT_PLACES])[block]
    if place >= 0:  # the block is still filling
        row = (place * size + offset) * heads + head
        data, layer_bytes = area[t.AT_OPEN], kv[side + t.OPEN_LAYER]
        format, row_bytes = t.FP32, 4 * head_dim
    else:
        row = (block * size + offset) * heads + head
        data, layer_bytes = area[t.AT_CODES], kv[side + t.CODES_LAYER]
    at = layer * layer_bytes + row * row_bytes
    row_bytes *= heads
    if format <= t.BF16:
        _read_floats(data, at, row_bytes, format, head_dim, count, out, to)
    else:
        per = kv[side + t.PER_SCALE]
        scale_bytes = 2 * (head_dim // per)
        scale_step = heads * scale_bytes
        if kv[side + t.BLOCKWISE]:
            row, scale_step = block * heads + head, 0
        scale_at = layer * kv[side + t.SCALES_LAYER] + row * scale_bytes
        _read_codes(
            area, at, row_bytes, scale_at, scale_step, format, per, head_dim, count, out, to, spread
        )
