"""Products of a panel or a row of a packed weight with rows of activations; see `weights`.

Each function computes y[row, i] for a range of rows and a range of panels (`fp32`: of outputs), and
nothing else, so that a team can share a product by chunks and a larger kernel can call it inline.

One row reads the weight as fast as memory gives it. More rows go in fours, for which a code is
unpacked once; a tile of 16 outputs x 4 rows keeps its sums in registers. Both add in the same
order: a row's result has the same bits alone and among others, whoever computes it.
"""

import numpy as np

from .compiled import inlined, kernel
from .simd import (
    add_floats,
    add_ints,
    add_shorts,
    fma,
    high_nibbles,
    lane,
    load_bytes,
    load_floats,
    load_halves,
    load_widened,
    low_nibbles,
    madd_bytes,
    madd_shorts,
    multiply,
    opaque,
    prefetch,
    repeat_2_shorts,
    repeat_4_bytes,
    repeat_float,
    repeated,
    store_floats,
    sum_pairs,
    to_floats,
    total,
    zero_floats,
    zero_ints,
    zero_shorts,
)
from .weights import GROUP, INT4_BYTES, INT8_BYTES, PANEL, Q8_0_BYTES

_BLOCK = 64  # rows whose codes stay in the second-level cache while panels pass
_AHEAD = 2048  # bytes
_SPAN = 8  # groups whose products with int16 fit an int32: 256 * 127 * 32767 < 2**31


@inlined
def _approach(data, at, item_bytes):
    """Ask for the first bytes of a range, before those that its loop asks for."""
    for line in range(0, _AHEAD // item_bytes, 64 // item_bytes):
        prefetch(data, at + line)


@inlined
def _put(y, at, low, high, outputs, accumulate):
    """Write sixteen outputs, or the first `outputs` of them; add them if `accumulate`."""
    if outputs >= PANEL:
        if accumulate:
            low = add_floats(load_floats(y, at), low)
            high = add_floats(load_floats(y, at + 8), high)
        store_floats(y, at, low)
        store_floats(y, at + 8, high)
    else:
        for i in range(outputs):
            value = lane(low, i) if i < 8 else lane(high, i - 8)
            y[at + i] = y[at + i] + value if accumulate else value


# --- int4 ----------------------------------------------------------------------------------------


@inlined
def _add_nibbles(low, high, w0, w1, w2, w3, codes, at):
    """low, high + the products of 8 inputs of 16 rows.

    Four such fit an int16, in which 2 of the 8 meet each time: 16 * 15 * 127 < 2**15.
    """
    x = repeat_4_bytes(codes, at)
    low = add_shorts(low, madd_bytes(w0, x))
    high = add_shorts(high, madd_bytes(w2, x))
    x = repeat_4_bytes(codes, at + 16)
    return add_shorts(low, madd_bytes(w1, x)), add_shorts(high, madd_bytes(w3, x))


@inlined
def _scale_dot(sums, dot, x_scale):
    """sums + x_scale * dot: the product of a group with one plane, in the weight's steps."""
    return fma(to_floats(sum_pairs(dot)), x_scale, sums)


@inlined
def _add_group(result, data, at, half, steps, x_sum):
    """result + scale * steps + minimum * x_sum, for half a panel (0 or 1) that begins at `at`."""
    result = fma(load_halves(data, at + 16 * half), steps, result)
    return fma(load_halves(data, at + 32 + 16 * half), x_sum, result)


@kernel
def int4_one(
    data, at, groups, codes, scales, sums, planes, plane_groups, row, y, y_at, outputs, accumulate
):
    """One panel times one row."""
    low, high = zero_floats(), zero_floats()
    for here in range(row * groups, (row + 1) * groups):
        for line in range(0, INT4_BYTES, 64):
            prefetch(data, at + _AHEAD + line)
        second = here + plane_groups if planes == 2 else here
        a_low, a_high, b_low, b_high = zero_shorts(), zero_shorts(), zero_shorts(), zero_shorts()
        for j in range(4):
            packed = load_bytes(data, at + 64 + 32 * j)
            w0, w1 = low_nibbles(packed), high_nibbles(packed)
            packed = load_bytes(data, at + 192 + 32 * j)
            w2, w3 = low_nibbles(packed), high_nibbles(packed)
            a_low, a_high = _add_nibbles(a_low, a_high, w0, w1, w2, w3, codes, GROUP * here + 4 * j)
            if planes == 2:
                k = GROUP * second + 4 * j
                b_low, b_high = _add_nibbles(b_low, b_high, w0, w1, w2, w3, codes, k)
        x_scale = repeat_float(scales, here)
        low_steps = _scale_dot(zero_floats(), a_low, x_scale)
        high_steps = _scale_dot(zero_floats(), a_high, x_scale)
        if planes == 2:
            x_scale = repeat_float(scales, second)
            low_steps = _scale_dot(low_steps, b_low, x_scale)
            high_steps = _scale_dot(high_steps, b_high, x_scale)
        x_sum = repeat_float(sums, here)
        low = _add_group(low, data, at, 0, low_steps, x_sum)
        high = _add_group(high, data, at, 1, high_steps, x_sum)
        at += INT4_BYTES
    _put(y, y_at, low, high, outputs, accumulate)


@kernel
def int4_four(
    data, at, groups, codes, scales, sums, planes, plane_groups, row, rows, y, y_at, y_row, outputs,
    accumulate,
):  # fmt: skip
    """One panel times up to four rows; for rows that are missing the last is computed again."""
    r0, r1 = row * groups, (row + min(1, rows - 1)) * groups
    r2, r3 = (row + min(2, rows - 1)) * groups, (row + min(3, rows - 1)) * groups
    a_low, a_high, b_low, b_high = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    c_low, c_high, d_low, d_high = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    for group in range(groups):
        for line in range(0, INT4_BYTES, 64):
            prefetch(data, at + _AHEAD + line)
        a_steps, b_steps, c_steps, d_steps = (
            zero_floats(),
            zero_floats(),
            zero_floats(),
            zero_floats(),
        )
        e_steps, f_steps, g_steps, h_steps = (
            zero_floats(),
            zero_floats(),
            zero_floats(),
            zero_floats(),
        )
        for plane in range(planes):
            first = plane * plane_groups + group
            a, b, c, d = first + r0, first + r1, first + r2, first + r3
            a_dot, b_dot, c_dot, d_dot = zero_shorts(), zero_shorts(), zero_shorts(), zero_shorts()
            e_dot, f_dot, g_dot, h_dot = zero_shorts(), zero_shorts(), zero_shorts(), zero_shorts()
            for j in range(opaque(4)):
                packed = load_bytes(data, at + 64 + 32 * j)
                w0, w1 = low_nibbles(packed), high_nibbles(packed)
                packed = load_bytes(data, at + 192 + 32 * j)
                w2, w3 = low_nibbles(packed), high_nibbles(packed)
                a_dot, e_dot = _add_nibbles(a_dot, e_dot, w0, w1, w2, w3, codes, GROUP * a + 4 * j)
                b_dot, f_dot = _add_nibbles(b_dot, f_dot, w0, w1, w2, w3, codes, GROUP * b + 4 * j)
                c_dot, g_dot = _add_nibbles(c_dot, g_dot, w0, w1, w2, w3, codes, GROUP * c + 4 * j)
                d_dot, h_dot = _add_nibbles(d_dot, h_dot, w0, w1, w2, w3, codes, GROUP * d + 4 * j)
            x_scale = repeat_float(scales, a)
            a_steps = _scale_dot(a_steps, a_dot, x_scale)
            e_steps = _scale_dot(e_steps, e_dot, x_scale)
            x_scale = repeat_float(scales, b)
            b_steps = _scale_dot(b_steps, b_dot, x_scale)
            f_steps = _scale_dot(f_steps, f_dot, x_scale)
            x_scale = repeat_float(scales, c)
            c_steps = _scale_dot(c_steps, c_dot, x_scale)
            g_steps = _scale_dot(g_steps, g_dot, x_scale)
            x_scale = repeat_float(scales, d)
            d_steps = _scale_dot(d_steps, d_dot, x_scale)
            h_steps = _scale_dot(h_steps, h_dot, x_scale)
        x_sum = repeat_float(sums, r0 + group)
        a_low = _add_group(a_low, data, at, 0, a_steps, x_sum)
        a_high = _add_group(a_high, data, at, 1, e_steps, x_sum)
        x_sum = repeat_float(sums, r1 + group)
        b_low = _add_group(b_low, data, at, 0, b_steps, x_sum)
        b_high = _add_group(b_high, data, at, 1, f_steps, x_sum)
        x_sum = repeat_float(sums, r2 + group)
        c_low = _add_group(c_low, data, at, 0, c_steps, x_sum)
        c_high = _add_group(c_high, data, at, 1, g_steps, x_sum)
        x_sum = repeat_float(sums, r3 + group)
        d_low = _add_group(d_low, data, at, 0, d_steps, x_sum)
        d_high = _add_group(d_high, data, at, 1, h_steps, x_sum)
        at += INT4_BYTES
    _put(y, y_at, a_low, a_high, outputs, accumulate)
    if rows > 1:
        _put(y, y_at + y_row, b_low, b_high, outputs, accumulate)
    if rows > 2:
        _put(y, y_at + 2 * y_row, c_low, c_high, outputs, accumulate)
    if rows > 3:
        _put(y, y_at + 3 * y_row, d_low, d_high, outputs, accumulate)


@kernel
def int4_rows(
    data, at, out, width, codes, scales, sums, planes, plane_groups, row, rows, y, y_at, y_row,
    panel, panels, accumulate,
):  # fmt: skip
    """y[r, i] for `rows` rows from `row` on and `panels` panels from `panel` on.

    `data[at]` begins the weight [out, width]; codes int8 [planes, rows, width], scales
    [planes, rows, width / 32], of which a plane has `plane_groups`, and sums [rows, width / 32].
    Result r, i goes to y[y_at + r * y_row + i].
    """
    groups = width // GROUP
    _approach(data, at + panel * groups * INT4_BYTES, 1)
    for block in range(row, row + rows, _BLOCK):
        for p in range(panel, panel + panels):
            first = at + p * groups * INT4_BYTES
            outputs = out - PANEL * p
            for r in range(block, min(block + _BLOCK, row + rows), 4):
                left = row + rows - r
                to = y_at + r * y_row + PANEL * p
                if left == 1:
                    int4_one(
                        data, first, groups, codes, scales, sums, planes, plane_groups, r, y, to,
                        outputs, accumulate,
                    )  # fmt: skip
                else:
                    int4_four(
                        data, first, groups, codes, scales, sums, planes, plane_groups, r, left, y,
                        to, y_row, outputs, accumulate,
                    )  # fmt: skip


# --- int8 and q8_0 -------------------------------------------------------------------------------


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
                prefetch(data, at + _AHEAD + line)
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
    _put(y, y_at, low, high, outputs, accumulate)


@kernel
def q8_0_one(data, at, width, codes, scales, row, y, y_at, outputs, accumulate):
    """One panel times one row."""
    low, high = zero_floats(), zero_floats()
    for k in range(row * width, (row + 1) * width, GROUP):
        for line in range(0, Q8_0_BYTES, 64):
            prefetch(data, at + _AHEAD + line)
        dot_low, dot_high = zero_ints(), zero_ints()
        for pair in range(0, GROUP, 2):
            w0 = load_widened(data, at + 32 + 16 * pair)
            w1 = load_widened(data, at + 48 + 16 * pair)
            dot_low, dot_high = _add_pairs(dot_low, dot_high, w0, w1, codes, k + pair)
        low = fma(load_halves(data, at), to_floats(dot_low), low)
        high = fma(load_halves(data, at + 16), to_floats(dot_high), high)
        at += Q8_0_BYTES
    scale = repeat_float(scales, row)
    _put(y, y_at, multiply(low, scale), multiply(high, scale), outputs, accumulate)


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
            prefetch(data, at + _AHEAD)
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
    _put(y, y_at, low, high, outputs, accumulate)
    if rows > 1:
        low, high = _scaled(b_low, b_high, repeat_float(scales, r1), low_scale, high_scale)
        _put(y, y_at + y_row, low, high, outputs, accumulate)
    if rows > 2:
        low, high = _scaled(c_low, c_high, repeat_float(scales, r2), low_scale, high_scale)
        _put(y, y_at + 2 * y_row, low, high, outputs, accumulate)
    if rows > 3:
        low, high = _scaled(d_low, d_high, repeat_float(scales, r3), low_scale, high_scale)
        _put(y, y_at + 3 * y_row, low, high, outputs, accumulate)


@kernel
def int8_rows(
    data, at, row_scales, grouped, out, width, codes, scales, row, rows, y, y_at, y_row, panel,
    panels, accumulate,
):  # fmt: skip
    """The same as `int4_rows` for `q8_0` (`grouped`) and `int8`, which has `row_scales`.

    Codes int16 [rows, width], scales float32 [rows].
    """
    panel_bytes = width // GROUP * (Q8_0_BYTES if grouped else INT8_BYTES)
    _approach(data, at + panel * panel_bytes, 1)
    for block in range(row, row + rows, _BLOCK):
        for p in range(panel, panel + panels):
            first = at + p * panel_bytes
            outputs = out - PANEL * p
            for r in range(block, min(block + _BLOCK, row + rows), 4):
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


# --- fp32 ----------------------------------------------------------------------------------------


@inlined
def _set(y, at, value, accumulate):
    y[at] = y[at] + value if accumulate else value


@inlined
def _fp32_one(weight, at, width, x, x_at):
    """One output of one row."""
    result = zero_floats()
    for k in range(0, width, 16):
        prefetch(weight, at + k + _AHEAD // 4)
        result = fma(load_floats(weight, at + k), load_floats(x, x_at + k), result)
        result = fma(load_floats(weight, at + k + 8), load_floats(x, x_at + k + 8), result)
    return total(result)


@inlined
def _fma_both(first, second, w0, w1, x, at):
    values = load_floats(x, at)
    return fma(w0, values, first), fma(w1, values, second)


@inlined
def _fp32_two_times_four(weight, at, width, x, x_at, y, y_at, y_row, accumulate):
    """Two outputs of four rows."""
    a0, b0, c0, d0 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    a1, b1, c1, d1 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    for k in range(0, width, 8):
        prefetch(weight, at + k + 2 * width)  # of the next two outputs
        prefetch(weight, at + k + 3 * width)
        w0, w1 = load_floats(weight, at + k), load_floats(weight, at + width + k)
        a0, a1 = _fma_both(a0, a1, w0, w1, x, x_at + k)
        b0, b1 = _fma_both(b0, b1, w0, w1, x, x_at + width + k)
        c0, c1 = _fma_both(c0, c1, w0, w1, x, x_at + 2 * width + k)
        d0, d1 = _fma_both(d0, d1, w0, w1, x, x_at + 3 * width + k)
    _set(y, y_at, total(a0), accumulate)
    _set(y, y_at + 1, total(a1), accumulate)
    _set(y, y_at + y_row, total(b0), accumulate)
    _set(y, y_at + y_row + 1, total(b1), accumulate)
    _set(y, y_at + 2 * y_row, total(c0), accumulate)
    _set(y, y_at + 2 * y_row + 1, total(c1), accumulate)
    _set(y, y_at + 3 * y_row, total(d0), accumulate)
    _set(y, y_at + 3 * y_row + 1, total(d1), accumulate)


@kernel
def fp32_rows(weight, at, width, x, x_at, row, rows, y, y_at, y_row, output, outputs, accumulate):
    """y[r, i] for `rows` rows from `row` on and `outputs` outputs from `output` on.

    `weight[at]` begins the weight [out, width], `x[x_at]` the activations [rows, width]; result
    r, i goes to y[y_at + r * y_row + i].
    """
    _approach(weight, at + output * width, 4)
    for block in range(row, row + rows, _BLOCK):
        end = min(block + _BLOCK, row + rows)
        fours = block + (end - block) // 4 * 4
        for pair in range(output, output + outputs, 2):
            first = at + pair * width
            whole = pair + 1 < output + outputs
            if whole:
                for r in range(block, fours, 4):
                    from_, to = x_at + r * width, y_at + r * y_row + pair
                    _fp32_two_times_four(weight, first, width, x, from_, y, to, y_row, accumulate)
            for i in range(2 if whole else 1):
                for r in range(fours if whole else block, end):
                    value = _fp32_one(weight, first + i * width, width, x, x_at + r * width)
                    _set(y, y_at + r * y_row + pair + i, value, accumulate)
