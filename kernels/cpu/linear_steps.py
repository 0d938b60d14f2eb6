"""Products as steps of a team: first the activations are rounded, then panels are multiplied."""

from .activations import quantize_groups, quantize_row
from .chunks import NONE, next_chunk
from .compiled import kernel
from .products import fp32_rows, int4_rows, int8_rows
from .weights import GROUP, PANEL


@kernel
def int4_step(counters, step, x, rows, data, out, width, codes, scales, sums, y, per_chunk):
    """y [rows, out] of x [rows, width]; a chunk is `per_chunk` panels."""
    groups = width // GROUP
    finished = False
    while True:
        row = next_chunk(counters, step, 0, rows, finished)
        if row == NONE:
            break
        quantize_groups(x, row * width, codes, scales, sums, row * groups, groups)
        finished = True
    panels = -(-out // PANEL)
    chunks = -(-panels // per_chunk)
    finished = False
    while True:
        chunk = next_chunk(counters, step, rows, chunks, finished)
        if chunk == NONE:
            break
        first = chunk * per_chunk
        count = min(per_chunk, panels - first)
        int4_rows(data, 0, out, width, codes, scales, sums, 0, rows, y, 0, out, first, count, False)
        finished = True


@kernel
def int8_step(
    counters, step, x, rows, data, row_scales, grouped, out, width, codes, scales, y, per_chunk
):
    """The same for `q8_0` (`grouped`) and `int8`."""
    finished = False
    while True:
        row = next_chunk(counters, step, 0, rows, finished)
        if row == NONE:
            break
        quantize_row(x, row * width, codes, scales, row, width)
        finished = True
    panels = -(-out // PANEL)
    chunks = -(-panels // per_chunk)
    finished = False
    while True:
        chunk = next_chunk(counters, step, rows, chunks, finished)
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
