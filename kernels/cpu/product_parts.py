"""Products of a panel or a row of a packed weight with rows of activations; see `weights`.

Each `..._rows` computes y[row, i] for a range of rows and of panels (`fp32`: of outputs), and
nothing else, so that a team can share a product by chunks and a larger kernel can call it inline.

One row reads the weight as fast as memory gives it. More rows go in fours, for which a code is
unpacked once; a tile of 16 outputs x 4 rows keeps its sums in registers. Both add in the same
order: a row's result has the same bits alone and among others, whoever computes it.
"""

from .compiled import inlined
from .simd import add_floats, lane, load_floats, prefetch, store_floats
from .weights import PANEL

BLOCK = 64  # rows whose codes stay in the second-level cache while panels pass
AHEAD = 2048  # bytes


@inlined
def approach(data, at, item_bytes):
    """Ask for the first bytes of a range, before those that its loop asks for."""
    for line in range(0, AHEAD // item_bytes, 64 // item_bytes):
        prefetch(data, at + line)


@inlined
def put(y, at, low, high, outputs, accumulate):
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
