"""Rounding of activations to integers, as the integer products read them.

- For `int8` and `q8_0` weights: int16 codes with one scale a row. Sixteen products of 16 bits cost
  what sixteen of 8 bits would, and the rounding is then a hundred times finer than the weights'.
- For `int4` weights: int8 codes with a scale for each group of 32, whose products are twice as many
  in an instruction. Beside the scale stands the sum that a group's minimum is multiplied with:
  scale x sum of the codes, so that a weight's minimum and its code see the same rounded value.

Codes are rounded to the nearest, ties to even. NaN or infinity makes a NaN of the scale, and so of
every output of the row.
"""

import numpy as np

from .compiled import kernel
from .simd import (
    add_floats,
    add_ints,
    larger,
    largest,
    load_floats,
    magnitude,
    multiply,
    repeated,
    store_as_bytes,
    store_as_shorts,
    to_ints,
    total,
    total_ints,
    zero_floats,
    zero_ints,
)
from .weights import GROUP

_LARGEST_BYTE = np.float32(127)
_LARGEST_SHORT = np.float32(32767)
_SMALLEST = np.float32(1e-30)  # below, a scale would be no normal number; the codes are zero


@kernel
def quantize_groups(x, x_at, codes, scales, sums, group_at, groups):
    """Round `groups` groups of 32 floats from x[x_at] on to int8.

    The first is number `group_at` in `codes` [groups of 32], `scales` and `sums` (one a group).
    """
    for i in range(groups):
        here = x_at + GROUP * i
        top, bad = zero_floats(), zero_floats()
        for k in range(0, GROUP, 8):
            values = load_floats(x, here + k)
            top = larger(magnitude(values), top)
            bad = add_floats(multiply(values, zero_floats()), bad)
        most = largest(top)
        inverse = repeated(_LARGEST_BYTE / most if most > _SMALLEST else np.float32(0))
        code_sum = zero_ints()
        for k in range(0, GROUP, 8):
            rounded = to_ints(multiply(load_floats(x, here + k), inverse))
            code_sum = add_ints(rounded, code_sum)
            store_as_bytes(codes, GROUP * (group_at + i) + k, rounded)
        scale = most / _LARGEST_BYTE + total(bad)
        scales[group_at + i] = scale
        sums[group_at + i] = scale * np.float32(total_ints(code_sum))


@kernel
def quantize_row(x, x_at, codes, scales, row, width):
    """Round `width` floats from x[x_at] on to int16: row `row` of `codes` [rows, width]."""
    top, bad = zero_floats(), zero_floats()
    for k in range(0, width, 8):
        values = load_floats(x, x_at + k)
        top = larger(magnitude(values), top)
        bad = add_floats(multiply(values, zero_floats()), bad)
    most = largest(top)
    inverse = repeated(_LARGEST_SHORT / most if most > _SMALLEST else np.float32(0))
    for k in range(0, width, 8):
        rounded = to_ints(multiply(load_floats(x, x_at + k), inverse))
        store_as_shorts(codes, row * width + k, rounded)
    scales[row] = most / _LARGEST_SHORT + total(bad)
