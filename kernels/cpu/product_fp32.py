"""Products of an `fp32` weight; see `product_parts`."""

from .compiled import inlined, pasted
from .product_parts import BLOCK
from .simd import fma, load_floats, total, zero_floats


@inlined
def _set(y, at, value, accumulate):
    y[at] = y[at] + value if accumulate else value


@inlined
def _fp32_one(weight, at, width, x, x_at):
    """One output of one row."""
    result = zero_floats()
    for k in range(0, width, 8):
        result = fma(load_floats(weight, at + k), load_floats(x, x_at + k), result)
    return total(result)


@inlined
def _fma_four(a, b, c, d, weight, at, apart, x, x_at):
    """The sums of four outputs with eight more inputs."""
    values = load_floats(x, x_at)
    return (
        fma(load_floats(weight, at), values, a),
        fma(load_floats(weight, at + apart), values, b),
        fma(load_floats(weight, at + 2 * apart), values, c),
        fma(load_floats(weight, at + 3 * apart), values, d),
    )


@inlined
def _four_streams(weight, at, width, x, x_at, y, y_at, each, accumulate):
    """Four times `each` outputs of one row.

    Four streams through memory, which go on from output to output, are read a third faster than
    one; to ask for lines ahead would cost more than it gains.
    """
    apart = each * width
    for i in range(each):
        here, to = at + i * width, y_at + i
        a, b, c, d = zero_floats(), zero_floats(), zero_floats(), zero_floats()
        for k in range(0, width, 16):
            a, b, c, d = _fma_four(a, b, c, d, weight, here + k, apart, x, x_at + k)
            a, b, c, d = _fma_four(a, b, c, d, weight, here + k + 8, apart, x, x_at + k + 8)
        _set(y, to, total(a), accumulate)
        _set(y, to + each, total(b), accumulate)
        _set(y, to + 2 * each, total(c), accumulate)
        _set(y, to + 3 * each, total(d), accumulate)


@inlined
def _fma_both(first, second, w0, w1, x, at):
    values = load_floats(x, at)
    return fma(w0, values, first), fma(w1, values, second)


@inlined
def _two_outputs(weight, at, apart, width, x, x_at, y, y_at, each, accumulate):
    """Two outputs of one row."""
    a, b = zero_floats(), zero_floats()
    for k in range(0, width, 8):
        w0, w1 = load_floats(weight, at + k), load_floats(weight, at + apart + k)
        a, b = _fma_both(a, b, w0, w1, x, x_at + k)
    _set(y, y_at, total(a), accumulate)
    _set(y, y_at + each, total(b), accumulate)


@inlined
def _two_outputs_of_four(weight, at, apart, width, x, x_at, y, y_at, y_row, each, accumulate):
    """Two outputs of four rows."""
    a0, b0, c0, d0 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    a1, b1, c1, d1 = zero_floats(), zero_floats(), zero_floats(), zero_floats()
    for k in range(0, width, 8):
        w0, w1 = load_floats(weight, at + k), load_floats(weight, at + apart + k)
        a0, a1 = _fma_both(a0, a1, w0, w1, x, x_at + k)
        b0, b1 = _fma_both(b0, b1, w0, w1, x, x_at + width + k)
        c0, c1 = _fma_both(c0, c1, w0, w1, x, x_at + 2 * width + k)
        d0, d1 = _fma_both(d0, d1, w0, w1, x, x_at + 3 * width + k)
    _set(y, y_at, total(a0), accumulate)
    _set(y, y_at + each, total(a1), accumulate)
    _set(y, y_at + y_row, total(b0), accumulate)
    _set(y, y_at + y_row + each, total(b1), accumulate)
    _set(y, y_at + 2 * y_row, total(c0), accumulate)
    _set(y, y_at + 2 * y_row + each, total(c1), accumulate)
    _set(y, y_at + 3 * y_row, total(d0), accumulate)
    _set(y, y_at + 3 * y_row + each, total(d1), accumulate)


@inlined
def _two_streams(weight, at, width, x, x_at, rows, y, y_at, y_row, each, accumulate):
    """Twice `each` outputs of some rows."""
    apart = each * width
    for i in range(each):
        here, to = at + i * width, y_at + i
        whole = rows // 4 * 4
        for r in range(0, whole, 4):
            _two_outputs_of_four(
                weight, here, apart, width, x, x_at + r * width, y, to + r * y_row, y_row, each,
                accumulate,
            )  # fmt: skip
        for r in range(whole, rows):
            from_, there = x_at + r * width, to + r * y_row
            _two_outputs(weight, here, apart, width, x, from_, y, there, each, accumulate)


@pasted
def fp32_rows(weight, at, width, x, x_at, row, rows, y, y_at, y_row, output, outputs, accumulate):
    """y[r, i] for `rows` rows from `row` on and `outputs` outputs from `output` on.

    `weight[at]` begins the weight [out, width], `x[x_at]` the activations [rows, width]; result
    r, i goes to y[y_at + r * y_row + i].
    """
    streams = 4 if rows == 1 else 2
    each, from_ = outputs // streams, at + output * width
    for block in range(row, row + rows, BLOCK):
        here, to = x_at + block * width, y_at + block * y_row + output
        if rows == 1:
            _four_streams(weight, from_, width, x, here, y, to, each, accumulate)
        else:
            count = min(BLOCK, row + rows - block)
            _two_streams(weight, from_, width, x, here, count, y, to, y_row, each, accumulate)
    for r in range(row, row + rows):
        for i in range(output + streams * each, output + outputs):
            value = _fp32_one(weight, at + i * width, width, x, x_at + r * width)
            _set(y, y_at + r * y_row + i, value, accumulate)
