"""Products of an `fp32` weight; see `product_parts`."""

from .compiled import inlined, pasted
from .product_parts import AHEAD, BLOCK, approach
from .simd import fma, load_floats, prefetch, total, zero_floats


@inlined
def _set(y, at, value, accumulate):
    y[at] = y[at] + value if accumulate else value


@inlined
def _fp32_one(weight, at, width, x, x_at):
    """One output of one row."""
    result = zero_floats()
    for k in range(0, width, 16):
        prefetch(weight, at + k + AHEAD // 4)
        result = fma(load_floats(weight, at + k), load_floats(x, x_at + k), result)
        result = fma(load_floats(weight, at + k + 8), load_floats(x, x_at + k + 8), result)
    return total(result)


@inlined
def _fma_four(a, b, c, d, weight, at, width, x, x_at):
    """The sums of four outputs with eight more inputs."""
    values = load_floats(x, x_at)
    return (
        fma(load_floats(weight, at), values, a),
        fma(load_floats(weight, at + width), values, b),
        fma(load_floats(weight, at + 2 * width), values, c),
        fma(load_floats(weight, at + 3 * width), values, d),
    )


@inlined
def _fp32_four(weight, at, width, x, x_at, y, y_at, accumulate):
    """Four outputs of one row: four sums, none of which waits for another."""
    a, b, c, d = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    for k in range(0, width, 16):
        for i in range(4, 8):  # of the next four outputs
            prefetch(weight, at + i * width + k)
        a, b, c, d = _fma_four(a, b, c, d, weight, at + k, width, x, x_at + k)
        a, b, c, d = _fma_four(a, b, c, d, weight, at + k + 8, width, x, x_at + k + 8)
    _set(y, y_at, total(a), accumulate)
    _set(y, y_at + 1, total(b), accumulate)
    _set(y, y_at + 2, total(c), accumulate)
    _set(y, y_at + 3, total(d), accumulate)


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


@pasted
def fp32_rows(weight, at, width, x, x_at, row, rows, y, y_at, y_row, output, outputs, accumulate):
    """y[r, i] for `rows` rows from `row` on and `outputs` outputs from `output` on.

    `weight[at]` begins the weight [out, width], `x[x_at]` the activations [rows, width]; result
    r, i goes to y[y_at + r * y_row + i].
    """
    approach(weight, at + output * width, 4)
    fours = outputs // 4 * 4 if rows == 1 else 0
    for i in range(output, output + fours, 4):
        to = y_at + row * y_row + i
        _fp32_four(weight, at + i * width, width, x, x_at + row * width, y, to, accumulate)
    output, outputs = output + fours, outputs - fours
    for block in range(row, row + rows, BLOCK):
        end = min(block + BLOCK, row + rows)
        whole_rows = block + (end - block) // 4 * 4
        for pair in range(output, output + outputs, 2):
            first = at + pair * width
            whole = pair + 1 < output + outputs
            if whole:
                for r in range(block, whole_rows, 4):
                    from_, to = x_at + r * width, y_at + r * y_row + pair
                    _fp32_two_times_four(weight, first, width, x, from_, y, to, y_row, accumulate)
            for i in range(2 if whole else 1):
                for r in range(whole_rows if whole else block, end):
                    value = _fp32_one(weight, first + i * width, width, x, x_at + r * width)
                    _set(y, y_at + r * y_row + pair + i, value, accumulate)
