"""Stored K and V as floats again; `attention_tables` names the words, `PagedKV` says what lies where.

Rows are the tokens of a head; scales belong to a row (token) or to a block.
"""

from . import attention_tables as t
from .compiled import inlined, kernel
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


@inlined
def place_of(kv, side, block):
    """The block's place in the open area; -1 if it has none."""
    if kv[side + t.BLOCKWISE] == 0:
        return -1
    return longs_at(kv[t.AT_PLACES])[block]


@inlined
def _put(values, out, to, step, channel):
    """Eight channels of a row whose panels of 16 channels lie `step` floats apart."""
    store_floats(out, to + (channel >> 4) * step + (channel & 15), values)


@inlined
def _code(codes, at, format, half, channel):
    """Eight channels of a row of codes, without their scale."""
    if format == t.INT8:
        return load_int8(codes, at + channel)
    if format == t.FP8:
        return load_fp8(codes, at + channel)
    if channel < half:
        return load_low_nibbles(codes, at + channel)
    return load_high_nibbles(codes, at + channel - half)


@kernel
def _read_floats(data, at, row_bytes, format, head_dim, count, out, to, row_step, step):
    """`count` rows of a float format, from byte `at` on and `row_bytes` apart."""
    floats = floats_at(data)
    halves = bytes_at(data)
    for i in range(count):
        here, there = at + i * row_bytes, to + i * row_step
        for channel in range(0, head_dim, 8):
            if format == t.FP32:
                values = load_floats(floats, (here >> 2) + channel)
            elif format == t.FP16:
                values = load_halves(halves, here + 2 * channel)
            else:
                values = load_bfloats(halves, here + 2 * channel)
            _put(values, out, there, step, channel)


@kernel
def _spread(halves, at, per, head_dim, out, to):
    """The scale of each channel of a row, as floats."""
    if per == 1:
        for channel in range(0, head_dim, 8):
            store_floats(out, to + channel, load_halves(halves, at + 2 * channel))
        return
    for scale in range(head_dim // per):
        values = repeat_half(halves, at + 2 * scale)
        # the last may reach over the end of the row, for which there is room
        for channel in range(scale * per, (scale + 1) * per, 8):
            store_floats(out, to + channel, values)


@kernel
def _read_codes(
    area, at, code_bytes, scale_at, scale_step, format, per, head_dim, count, out, to, row_step, step,
    spread,
):  # fmt: skip
    """`count` rows of codes, `code_bytes` apart, with scales `scale_step` bytes apart.

    From out[spread] on there is room for 2 (head_dim + 8) floats.
    """
    codes = bytes_at(area[t.AT_CODES])
    scales = bytes_at(area[t.AT_SCALES])
    zeros = bytes_at(area[t.AT_ZEROS])
    half, second = head_dim >> 1, head_dim + 8
    for i in range(count):
        here, there, scaling = at + i * code_bytes, to + i * row_step, scale_at + i * scale_step
        if per & 7 == 0:
            for first in range(0, head_dim, per):
                scale, zero = repeat_half(scales, scaling), repeat_half(scales, scaling)
                if format == t.INT4:
                    zero = repeat_half(zeros, scaling)
                for channel in range(first, first + per, 8):
                    values = _code(codes, here, format, half, channel)
                    if format == t.INT4:
                        values = fma(values, scale, zero)
                    else:
                        values = multiply(values, scale)
                    _put(values, out, there, step, channel)
                scaling += 2
        else:
            if i == 0 or scale_step != 0:
                _spread(scales, scaling, per, head_dim, out, spread)
                if format == t.INT4:
                    _spread(zeros, scaling, per, head_dim, out, spread + second)
            for channel in range(0, head_dim, 8):
                values = _code(codes, here, format, half, channel)
                scale = load_floats(out, spread + channel)
                if format == t.INT4:
                    values = fma(values, scale, load_floats(out, spread + second + channel))
                else:
                    values = multiply(values, scale)
                _put(values, out, there, step, channel)


@kernel
def read_rows(kv, side, layer, head, block, offset, count, out, to, row_step, step, spread):
    """K or V of `head` of `count` tokens of a block, from its token `offset` on.

    Channel c of token i goes to out[to + i * row_step + c // 16 * step + c % 16]. From out[spread]
    on there is room for 2 (head_dim + 8) floats.
    """
    head_dim, heads, size = kv[t.HEAD_DIM], kv[t.HEADS_A_GROUP], kv[t.BLOCK_SIZE]
    pair = 0 if side == t.K_SIDE else 1
    area = kv[t.AREAS + t.AREA_WORDS * (2 * (head // heads) + pair) :]
    head %= heads
    format, row_bytes = kv[side + t.FORMAT], kv[side + t.ROW_BYTES]
    place = place_of(kv, side, block)
    if place >= 0:
        row = (place * size + offset) * heads + head
        at = layer * kv[side + t.OPEN_LAYER] + row * 4 * head_dim
        row_bytes = 4 * head_dim * heads
        _read_floats(
            area[t.AT_OPEN], at, row_bytes, t.FP32, head_dim, count, out, to, row_step, step
        )
        return
    row = (block * size + offset) * heads + head
    at = layer * kv[side + t.CODES_LAYER] + row * row_bytes
    row_bytes *= heads
    if format <= t.BF16:
        _read_floats(
            area[t.AT_CODES], at, row_bytes, format, head_dim, count, out, to, row_step, step
        )
        return
    per = kv[side + t.PER_SCALE]
    scale_bytes = 2 * (head_dim // per)
    scale_step = heads * scale_bytes
    if kv[side + t.BLOCKWISE]:
        row, scale_step = block * heads + head, 0
    scale_at = layer * kv[side + t.SCALES_LAYER] + row * scale_bytes
    _read_codes(
        area, at, row_bytes, scale_at, scale_step, format, per, head_dim, count, out, to, row_step,
        step, spread,
    )  # fmt: skip
