"""Products of packed `int8` and `q8_0` weights; see `product_parts`."""

import numpy as np

from .compiled import inlined, kernel, pasted
from .product_parts import AHEAD, BLOCK, approach, put
from .simd import (
    add_floats,
    add_ints,
    fma,
    load_floats,
    load_halves,
    load_widened,
    madd_shorts,
    multiply,
    prefetch,
    repeat_2_shorts,
    repeat_float,
    repeated,
    to_floats,
    zero_floats,
    zero_ints,
)
from .weights import GROUP, INT8_BYTES, PANEL, Q8_0_BYTES

_SPAN = 8  # groups whose products with int16 fit an int32: 256 * 127 * 32767 < 2**31


@inlined
def _add_pairs(low, high, w0, w1, codes, at):
    """low, high + the products of two inputs of 16 rows."""
    x = repeat_2_shorts(codes, at)
    return add_ints(low, madd_shorts(w0, x)), add_ints(high, madd_shorts(w1, x))


@inlined
def _scaled(low, high, x_scale, low_scale, high_scale):
    return (
        multiply(multiply(low, x_scale), low_scale),
        multiply(multiply(high, x_scale), high_scale),
    )


@kernel
def int8_one(data, at, width, row_scales, panel, codes, scales, row, y, y_at, outputs, accumulate):
    """One panel times one row."""
    low, high = zero_floats(), zero_floats()
    k, end = row * width, (row + 1) * width
    while k < end:
        stop = min(k + _SPAN * GROUP, end)
        dot_low, dot_high = zero_ints(), zero_ints()
        while k < stop:
            for line in range(0, INT8_BYTES, 64):
                prefetch(data, at + AHEAD + line)
            for pair in range(0, GROUP, 2):
                w0 = load_widened(data, at + 16 * pair)
                w1 = load_widened(data, at + 16 * pair + 16)
                dot_low, dot_high = _add_pairs(dot_low, dot_high, w0, w1, codes, k + pair)
            at += INT8_BYTES
            k += GROUP
        low = add_floats(low, to_floats(dot_low))
        high = add_floats(high, to_floats(dot_high))
    low_scale = load_floats(row_scales, PANEL * panel)
    high_scale = load_floats(row_scales, PANEL * panel + 8)
    low, high = _scaled(low, high, repeat_float(scales, row), low_scale, high_scale)
    put(y, y_at, low, high, outputs, accumulate)


@kernel
def q8_0_one(data, at, width, codes, scales, row, y, y_at, outputs, accumulate):
    """One panel times one row."""
    low, high = zero_floats(), zero_floats()
    for k in range(row * width, (row + 1) * width, GROUP):
        for line in range(0, Q8_0_BYTES, 64):
            prefetch(data, at + AHEAD + line)
        dot_low, dot_high = zero_ints(), zero_ints()
        for pair in range(0, GROUP, 2):
            w0 = load_widened(data, at + 32 + 16 * pair)
            w1 = load_widened(data, at + 48 + 16 * pair)
            dot_low, dot_high = _add_pairs(dot_low, dot_high, w0, w1, codes, k + pair)
        low = fma(load_halves(data, at), to_floats(dot_low), low)
        high = fma(load_halves(data, at + 16), to_floats(dot_high), high)
        at += Q8_0_BYTES
    scale = repeat_float(scales, row)
    put(y, y_at, multiply(low, scale), multiply(high, scale), outputs, accumulate)


@kernel
def int8_four(
    data, at, width, grouped, row_scales, panel, codes, scales, row, rows, y, y_at, y_row, outputs,
    accumulate,
):  # fmt: skip
    """One panel times up to four rows; for rows that are missing the last is computed again.

    `grouped`: the panel is `q8_0`, else `int8`.
    """
    r0, r1, r2, r3 = row, row + min(1, rows - 1), row + min(2, rows - 1), row + min(3, rows - 1)
    a, b, c, d = r0 * width, r1 * width, r2 * width, r3 * width
    a_low, a_high, b_low, b_high = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    c_low, c_high, d_low, d_high = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    low_scale, high_scale = repeated(np.float32(1)), repeated(np.float32(1))
    span = GROUP if grouped else _SPAN * GROUP
    for start in range(0, width, span):
        if grouped:
            low_scale, high_scale = load_halves(data, at), load_halves(data, at + 16)
            at += Q8_0_BYTES - INT8_BYTES
        a_dot, b_dot, c_dot, d_dot = zero_ints(), zero_ints(), zero_ints(), zero_ints()
        e_dot, f_dot, g_dot, h_dot = zero_ints(), zero_ints(), zero_ints(), zero_ints()
        for k in range(start, min(start + span, width), 2):
            prefetch(data, at + AHEAD)
            w0, w1 = load_widened(data, at), load_widened(data, at + 16)
            a_dot, e_dot = _add_pairs(a_dot, e_dot, w0, w1, codes, a + k)
            b_dot, f_dot = _add_pairs(b_dot, f_dot, w0, w1, codes, b + k)
            c_dot, g_dot = _add_pairs(c_dot, g_dot, w0, w1, codes, c + k)
            d_dot, h_dot = _add_pairs(d_dot, h_dot, w0, w1, codes, d + k)
            at += 32
        a_low = fma(low_scale, to_floats(a_dot), a_low)
        b_low = fma(low_scale, to_floats(b_dot), b_low)
        c_low = fma(low_scale, to_floats(c_dot), c_low)
        d_low = fma(low_scale, to_floats(d_dot), d_low)
        a_high = fma(high_scale, to_floats(e_dot), a_high)
        b_high = fma(high_scale, to_floats(f_dot), b_high)
        c_high = fma(high_scale, to_floats(g_dot), c_high)
        d_high = fma(high_scale, to_floats(h_dot), d_high)
    low_scale, high_scale = repeated(np.float32(1)), repeated(np.float32(1))
    if not grouped:
        low_scale = load_floats(row_scales, PANEL * panel)
        high_scale = load_floats(row_scales, PANEL * panel + 8)
    low, high = _scaled(a_low, a_high, repeat_float(scales, r0), low_scale, high_scale)
    put(y, y_at, low, high, outputs, accumulate)
    if rows > 1:
        low, high = _scaled(b_low, b_high, repeat_float(scales, r1), low_scale, high_scale)
        put(y, y_at + y_row, low, high, outputs, accumulate)
    if rows > 2:
        low, high = _scaled(c_low, c_high, repeat_float(scales, r2), low_scale, high_scale)
        put(y, y_at + 2 * y_row, low, high, outputs, accumulate)
    if rows > 3:
        low, high = _scaled(d_low, d_high, repeat_float(scales, r3), low_scale, high_scale)
        put(y, y_at + 3 * y_row, low, high, outputs, accumulate)


@pasted
def int8_rows(
    data, at, row_scales, grouped, out, width, codes, scales, row, rows, y, y_at, y_row, panel,
    panels, accumulate,
):  # fmt: skip
    """The same as `int4_rows` for `q8_0` (`grouped`) and `int8`, which has `row_scales`.

    Codes int16 [rows, width], scales float32 [rows].
    """
    panel_bytes = width // GROUP * (Q8_0_BYTES if grouped else INT8_BYTES)
    approach(data, at + panel * panel_bytes, 1)
    for block in range(row, row + rows, BLOCK):
        for p in range(panel, panel + panels):
            first = at + p * panel_bytes
            outputs = out - PANEL * p
            for r in range(block, min(block + BLOCK, row + rows), 4):
                left = row + rows - r
                to = y_at + r * y_row + PANEL * p
                if left > 1:
                    int8_four(
                        data, first, width, grouped, row_scales, p, codes, scales, r, left, y, to,
                        y_row, outputs, accumulate,
                    )  # fmt: skip
                elif grouped:
                    q8_0_one(data, first, width, codes, scales, r, y, to, outputs, accumulate)
                else:
                    int8_one(
                        data, first, width, row_scales, p, codes, scales, r, y, to, outputs,
                        accumulate,
                    )  # fmt: skip
