"""Products of a packed `int4` weight; see `product_parts`."""

from .compiled import inlined, kernel, pasted
from .product_parts import AHEAD, BLOCK, approach, put
from .simd import (
    add_shorts,
    fma,
    high_nibbles,
    load_bytes,
    load_halves,
    low_nibbles,
    madd_bytes,
    opaque,
    prefetch,
    repeat_4_bytes,
    repeat_float,
    sum_pairs,
    to_floats,
    zero_floats,
    zero_shorts,
)
from .weights import GROUP, INT4_BYTES, PANEL


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
            prefetch(data, at + AHEAD + line)
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
    put(y, y_at, low, high, outputs, accumulate)


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
            prefetch(data, at + AHEAD + line)
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
    put(y, y_at, a_low, a_high, outputs, accumulate)
    if rows > 1:
        put(y, y_at + y_row, b_low, b_high, outputs, accumulate)
    if rows > 2:
        put(y, y_at + 2 * y_row, c_low, c_high, outputs, accumulate)
    if rows > 3:
        put(y, y_at + 3 * y_row, d_low, d_high, outputs, accumulate)


@pasted
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
    approach(data, at + panel * groups * INT4_BYTES, 1)
    for block in range(row, row + rows, BLOCK):
        for p in range(panel, panel + panels):
            first = at + p * groups * INT4_BYTES
            outputs = out - PANEL * p
            for r in range(block, min(block + BLOCK, row + rows), 4):
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
