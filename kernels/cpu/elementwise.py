"""What lies between the products: norm, gate and choice of the largest, one row at a time.

As parts of a larger kernel, with their row in the first-level cache, they cost a thousandth of what
they cost as operators of their own.
"""

import numpy as np

from .compiled import kernel
from .simd import (
    add_floats,
    divide,
    exponential,
    fma,
    larger,
    largest,
    load_floats,
    multiply,
    negated,
    repeated,
    store_floats,
    total,
    zero_floats,
)

_ONE = np.float32(1)


@kernel
def rms_norm(x, x_at, weight, weight_at, epsilon, width, out, out_at):
    """out = x / sqrt(mean(x^2) + epsilon) * weight, `width` (a multiple of 8) floats each.

    `out` may be `x`. Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    squares = zero_floats()
    for k in range(0, width, 8):
        values = load_floats(x, x_at + k)
        squares = fma(values, values, squares)
    mean = total(squares) / np.float32(width)
    scale = repeated(_ONE / np.sqrt(mean + np.float32(epsilon)))
    for k in range(0, width, 8):
        values = multiply(load_floats(x, x_at + k), scale)
        store_floats(out, out_at + k, multiply(values, load_floats(weight, weight_at + k)))


@kernel
def silu_multiply(gate, gate_at, up, up_at, width, out, out_at):
    """out = gate / (1 + e^-gate) * up, `width` (a multiple of 8) floats each.

    `out` may be `gate` or `up`. Shazeer, "GLU Variants Improve Transformer", 2020.
    """
    one = repeated(_ONE)
    for k in range(0, width, 8):
        values = load_floats(gate, gate_at + k)
        gated = divide(values, add_floats(exponential(negated(values)), one))
        store_floats(out, out_at + k, multiply(gated, load_floats(up, up_at + k)))


@kernel
def argmax(values, at, count):
    """Index, from `at` on, of the first of the largest of `count` >= 1 floats.

    NaN counts as larger than all, as in torch: the first one wins.
    """
    top, bad = repeated(np.float32(-np.inf)), zero_floats()
    whole = count // 8 * 8
    for k in range(0, whole, 8):
        here = load_floats(values, at + k)
        top = larger(here, top)
        bad = add_floats(bad, multiply(here, zero_floats()))
    best = largest(top)
    nan = total(bad)  # of NaN and infinity
    for k in range(whole, count):
        best = max(best, values[at + k])
        nan += values[at + k] * np.float32(0)
    if nan != nan:
        for k in range(count):
            if values[at + k] != values[at + k]:
                return k
    for k in range(count):
        if values[at + k] == best:
            return k
    return 0
