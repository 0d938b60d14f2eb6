"""Products as steps of a team: first the activations are rounded, then panels are multiplied."""

from .activations import quantize_groups, quantize_row
from .chunks import NONE, next_chunk
from .compiled import inlined, kernel
from .product_fp32 import fp32_rows
from .product_int4 import int4_rows
from .product_int8 import int8_rows
from .weights import GROUP, PANEL


@inlined
def _rows_per_chunk(rows):
    """How many rows are rounded in one chunk."""
    return max(8, rows >> 10)


@kernel
def int4_step(counters, step, x, rows, data, out, width, codes, scales, sums, planes, y, per_chunk):
    """y [rows, out] of x [rows, width] in `planes` planes; a chunk is `per_chunk` panels."""
    groups = width // GROUP
    each = _rows_per_chunk(rows)
    phase = -(-rows // each)
    finished = False
    while True:
        chunk = next_chunk(counters, step, 0, phase, finished)
        if chunk == NONE:
            break
        first = chunk * each * groups
        count = min(each * groups, rows * groups - first)
        quantize_groups(x, GROUP * first, codes, scales, sums, first, count, planes, rows * groups)
        finished = True
    panels = -(-out // PANEL)
    chunks = -(-panels // per_chunk)
    finished = False
    while True:
        chunk = next_chunk(counters, step, phase, chunks, finished)
        if chunk == NONE:
            break
        first = chunk * per_chunk
        count = min(per_chunk, panels - first)
        int4_rows(
            data, 0, out, width, codes, scales, sums, planes, rows * groups, 0, rows, y, 0, out,
            first, count, False,
        )  # fmt: skip
        finished = True


@kernel
def int8_step(
    counters, step, x, rows, data, row_scales, grouped, out, width, codes, scales, y, per_chunk
):
    """The same for `q8_0` (`grouped`) and `int8`."""
    each = _rows_per_chunk(rows)
    phase = -(-rows // each)
    finished = False
    while True:
        chunk = next_chunk(counters, step, 0, phase, finished)
        if chunk == NONE:
            break
        for row in range(chunk * each, min(chunk * each + each, rows)):
            quantize_row(x, row * width, codes, scales, row, width)
        finished = True
    panels = -(-out // PANEL)
    chunks = -(-panels // per_chunk)
    finished = False
    while True:
        chunk = next_chunk(counters, step, phase, chunks, finished)
        if chunk == NONE:
            break
        first = chunk * per_chunk
        count = min(per_chunk, panels - first)
        int8_rows(
            data, 0, row_scales, grouped, out, width, codes, scales, 0, rows, y, 0, out, first,
            count, False,
        )  # fmt: skip
        finished = True


@kernel
def fp32_step(counters, step, x, rows, weight, out, width, y, per_chunk):
    """The same for `fp32`; a chunk is `per_chunk` times 16 outputs."""
    each = PANEL * per_chunk
    chunks = -(-out // each)
    finished = False
    while True:
        chunk = next_chunk(counters, step, 0, chunks, finished)
        if chunk == NONE:
            break
        first = chunk * each
        fp32_rows(weight, 0, width, x, 0, 0, rows, y, 0, out, first, min(each, out - first), False)
        finished = True
