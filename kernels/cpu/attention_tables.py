"""The words of attention's tables, in the order in which they stand there; see `attention_plan`.

Numba takes the integers of a module for constants, so these are plain numbers and no `Enum`.
Words that begin with `AT_` hold an address.
"""

TILE = 64
"""Keys that are weighed at once, counted from position 0; sums are joined tile by tile."""
RUN = 16
"""Keys of a tile that lie equally far apart."""
LANES = 16
"""Queries stand in panels of so many: a query is a row and a head, heads innermost."""

# --- PagedKV -------------------------------------------------------------------------------------
NUM_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, HEADS_A_GROUP, AT_PLACES = range(6)
K_SIDE, V_SIDE, AREAS = 6, 13, 20

# one side, K or V
FORMAT, BLOCKWISE, PER_SCALE, ROW_BYTES, CODES_LAYER, SCALES_LAYER, OPEN_LAYER = range(7)
FP32, FP16, BF16, FP8, INT8, INT4 = range(6)
"""Values of FORMAT, in the order of `attention_plan.FORMATS`."""

# one area: of a side and a head group
AT_CODES, AT_SCALES, AT_ZEROS, AT_OPEN = range(4)
AREA_WORDS = 4

# --- AttentionPlan -------------------------------------------------------------------------------
WRITE_CHUNKS, AT_TABLES, AT_KINDS, AT_PARTS = range(4)
ROW_UNITS, BLOCK_UNITS, OPEN_UNITS = 4, 7, 10

# what is written: slots or blocks, and the rows that go there
NUM_UNITS, AT_UNITS, AT_ROWS = range(3)

# a kind: layers with the same window
SIZE, SINKS, REACH, AT_ITEMS, AT_JOINS = range(5)
KIND_WORDS = 5
EVERYTHING = 1 << 40
"""SIZE or REACH of what has none."""

# an item: queries of a sequence that look through some tiles, with some KV heads one by one
ROW, QUERIES, POSITION, TABLE, HEAD, HEADS = range(6)
SINK_TILE, SINK_TILES, RECENT_TILE, BEGIN, END, PART = range(6, 12)
ITEM_WORDS = 12
NO_PART = -1

# a join: a KV head of queries whose tiles were shared by several items
JOIN_ROW, JOIN_QUERIES, JOIN_HEAD, JOIN_TILES, JOIN_PART = range(5)
JOIN_WORDS = 5
