"""Rounding of activations to integers, as the integer products read them.

- For `int8` and `q8_0` weights: int16 codes with one scale a row. Sixteen products of 16 bits cost
  what sixteen of 8 bits would, and the rounding is then a hundred times finer than the weights'.
- For `int4` weights: int8 codes with a scale for each group of 32, whose products are twice as many
  in an instruction. Beside the scale stands the sum that a group's minimum is multiplied with:
  scale x sum of the codes, so that a weight's minimum and its code see the same rounded value.
  A second **plane** of such codes, of what the first left over, makes it as fine as 16 bits, for
  twice the arithmetic: as good as free where memory is the limit, with a single row.

Codes are rounded to the nearest, ties to even. NaN or infinity makes a NaN of the scale, and so of
every output of the row.
"""

import numpy as np

from .compiled import inlined, kernel
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
    to_floats,
    to_ints,
    total,
    total_ints,
    zero_floats,
)
from .weights import GROUP

_LARGEST_BYTE = np.float32(127)
_LARGEST_SHORT = np.float32(32767)
_SMALLEST = np.float32(1e-30)  # below, a scale would be no normal number; the codes are zero


@inlined
def _round_group(v0, v1, v2, v3, codes, scales, group):
    """Round 32 floats to group `group` of a plane; returns scale x sum of the codes, and the rest.

    The rest is what is left over of the 32 floats.
    """
    top = larger(larger(magnitude(v0), magnitude(v1)), larger(magnitude(v2), magnitude(v3)))
    most = largest(top)
    inverse = repeated(_LARGEST_BYTE / most if most > _SMALLEST else np.float32(0))
    c0, c1 = to_ints(multiply(v0, inverse)), to_ints(multiply(v1, inverse))
    c2, c3 = to_ints(multiply(v2, inverse)), to_ints(multiply(v3, inverse))
    store_as_bytes(codes, GROUP * group, c0)
    store_as_bytes(codes, GROUP * group + 8, c1)
    store_as_bytes(codes, GROUP * group + 16, c2)
    store_as_bytes(codes, GROUP * group + 24, c3)
    bad = multiply(add_floats(add_floats(v0, v1), add_floats(v2, v3)), zero_floats())
    scale = most / _LARGEST_BYTE + total(bad)
    scales[group] = scale
    code_sum = total_ints(add_ints(add_ints(c0, c1), add_ints(c2, c3)))
    each = repeated(-scale)
    return (
        scale * np.float32(code_sum),
        add_floats(v0, multiply(each, to_floats(c0))),
        add_floats(v1, multiply(each, to_floats(c1))),
        add_floats(v2, multiply(each, to_floats(c2))),
        add_floats(v3, multiply(each, to_floats(c3))),
    )


@kernel
def quantize_groups(x, x_at, codes, scales, sums, group_at, groups, planes, plane_groups):
    """Round `groups` groups of 32 floats from x[x_at] on to `planes` (1 or 2) planes of int8.

    In each plane the first is number `group_at` of the `plane_groups` groups of `codes` and
    `scales`; `sums` has one value a group, for both planes.
    """
    for i in range(groups):
        here, to = x_at + GROUP * i, group_at + i
        v0, v1 = load_floats(x, here), load_floats(x, here + 8)
        v2, v3 = load_floats(x, here + 16), load_floats(x, here + 24)
        x_sum, v0, v1, v2, v3 = _round_group(v0, v1, v2, v3, codes, scales, to)
        if planes == 2:
            second = to + plane_groups
            more, v0, v1, v2, v3 = _round_group(v0, v1, v2, v3, codes, scales, second)
            x_sum += more
        sums[to] = x_sum


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
