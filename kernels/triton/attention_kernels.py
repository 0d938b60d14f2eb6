"""The kernels of `attention.py`, which says what they compute. Everything else stands there."""

from __future__ import annotations

import triton
import triton.language as tl

from .kv_parts import load_halves

OF_A_STEP = ["table_stride", "window", "sinks", "reach"]
"""Numbers that change from step to step: not to be compiled anew for 1 or a multiple of 16."""
TABLES = ["tables_ptr", "lens_ptr", "starts_ptr"]
"""Likewise for a table that does not begin at a multiple of 16 bytes, as part of another one."""


@triton.jit
def key_tiles(first_query, end, window, sinks, reach,
              WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Tiles of keys to read: how many, how many of them for sinks, and the gap behind those."""
    last = tl.cdiv(end, BLOCK_N)
    if WINDOWED:
        recent = tl.maximum(first_query - window + 1, 0) // BLOCK_N
        oldest = tl.maximum(first_query - reach + 1, 0)
        sink_tiles = tl.where(oldest < sinks, tl.minimum(tl.cdiv(sinks, BLOCK_N), recent), 0)
        gap = recent - sink_tiles
    else:
        sink_tiles = 0
        gap = 0
    return last - gap, sink_tiles, gap


@triton.jit
def attend(q_low, q_high, query_at, table_ptr, head, first, last, sink_tiles, gap, end,
           k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, scale, window, sinks, reach,
           KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
           DIM: tl.constexpr, PADDED: tl.constexpr,
           K_FORMAT: tl.constexpr, K_GROUP: tl.constexpr,
           V_FORMAT: tl.constexpr, V_GROUP: tl.constexpr,
           WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Running softmax of a tile of queries over key tiles `first` to `last - 1`.

    Args:
        q_low, q_high: [BLOCK_M, PADDED], the halves of the queries' heads.
        query_at: [BLOCK_M] their positions; -1 for rows without a query, which see nothing.
        end: one after the last key that any of them may see.
        scale: on scores, times log2(e).

    Returns:
        weighted sums of V, both halves, not yet divided; the greatest score (base 2); the sum of
        weights. Where nothing was seen: 0, 0, -inf, 0.
    """
    greatest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out_low = tl.zeros([BLOCK_M, PADDED], tl.float32)
    out_high = tl.zeros([BLOCK_M, PADDED], tl.float32)
    for i in range(first, last):
        tile = tl.where(i < sink_tiles, i, i + gap)
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=key < end, other=-1).to(tl.int64)
        there = block >= 0
        rows = (block * BLOCK_SIZE + key % BLOCK_SIZE) * KV_HEADS + head
        k_low, k_high = load_halves(
            k_codes, k_scales, k_zeros, rows, there, q_low.dtype, DIM, PADDED, K_FORMAT, K_GROUP
        )
        scores = tl.dot(q_low, tl.trans(k_low), input_precision=PRECISION)
        scores = tl.dot(q_high, tl.trans(k_high), scores, input_precision=PRECISION)
        seen = there[None, :] & (key[None, :] <= query_at[:, None])
        if WINDOWED:
            near = key[None, :] > query_at[:, None] - window
            near |= key[None, :] < sinks
            seen &= near & (key[None, :] > query_at[:, None] - reach)
        scores = tl.where(seen, scores * scale, float("-inf"))
        greater = tl.maximum(greatest, tl.max(scores, 1))
        finite = tl.where(greater == float("-inf"), 0.0, greater)
        weights = tl.exp2(scores - finite[:, None])
        kept = tl.exp2(greatest - finite)
        total = total * kept + tl.sum(weights, 1)
        greatest = greater
        v_low, v_high = load_halves(
            v_codes, v_scales, v_zeros, rows, there, q_low.dtype, DIM, PADDED, V_FORMAT, V_GROUP
        )
        weights = weights.to(q_low.dtype)
        out_low = tl.dot(weights, v_low, out_low * kept[:, None], input_precision=PRECISION)
        out_high = tl.dot(weights, v_high, out_high * kept[:, None], input_precision=PRECISION)
    return out_low, out_high, greatest, total


@triton.jit(do_not_specialize=OF_A_STEP, do_not_specialize_on_alignment=TABLES)
def decode_attention_kernel(
    out_ptr, partial_ptr, weight_ptr, q_ptr, q_stride, tables_ptr, table_stride, lens_ptr,
    k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, scale, window, sinks, reach,
    RATIO: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr,
    K_FORMAT: tl.constexpr, K_GROUP: tl.constexpr,
    V_FORMAT: tl.constexpr, V_GROUP: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (i, j, s): sequence i, KV head j with its query heads, part s of the keys."""
    i = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1)
    split = tl.program_id(2)
    HALF: tl.constexpr = DIM // 2
    channel = tl.arange(0, PADDED)
    row = tl.arange(0, BLOCK_M)
    head = j * RATIO + row
    inside = (row < RATIO)[:, None] & (channel < HALF)[None, :]
    q_at = q_ptr + i * q_stride + head[:, None] * DIM + channel[None, :]
    q_low = tl.load(q_at, mask=inside, other=0.0)
    q_high = tl.load(q_at + HALF, mask=inside, other=0.0)

    context = tl.load(lens_ptr + i).to(tl.int32)
    query_at = tl.where(row < RATIO, context - 1, -1)
    num_tiles, sink_tiles, gap = key_tiles(
        context - 1, context, window, sinks, reach, WINDOWED, BLOCK_N
    )
    share = tl.cdiv(num_tiles, SPLITS)
    out_low, out_high, greatest, total = attend(
        q_low, q_high, query_at, tables_ptr + i * table_stride, j,
        split * share, tl.minimum((split + 1) * share, num_tiles), sink_tiles, gap, context,
        k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, scale, window, sinks, reach,
        KV_HEADS, BLOCK_SIZE, DIM, PADDED, K_FORMAT, K_GROUP, V_FORMAT, V_GROUP,
        WINDOWED, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    divisor = tl.where(total > 0.0, total, 1.0)
    out_low /= divisor[:, None]
    out_high /= divisor[:, None]
    place = i * KV_HEADS * RATIO + head
    if SPLITS == 1:
        at = out_ptr + place[:, None] * DIM + channel[None, :]
        tl.store(at, out_low.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(at + HALF, out_high.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        place = place * SPLITS + split
        at = partial_ptr + place[:, None] * DIM + channel[None, :]
        tl.store(at, out_low, mask=inside)
        tl.store(at + HALF, out_high, mask=inside)
        weight = greatest + tl.log2(divisor)  # -inf where nothing was seen
        tl.store(weight_ptr + place, weight, mask=row < RATIO)


@triton.jit
def reduce_splits_kernel(
    out_ptr, partial_ptr, weight_ptr,
    DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr,
):  # fmt: skip
    """Program p: one query head of one sequence; the mean of its splits by their softmax sums."""
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS_PADDED)
    channel = tl.arange(0, PADDED)
    weight = tl.load(weight_ptr + place * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    greatest = tl.max(weight, 0)
    weight = tl.exp2(weight - tl.where(greatest == float("-inf"), 0.0, greatest))
    total = tl.sum(weight, 0)
    at = partial_ptr + (place * SPLITS + split)[:, None] * DIM + channel[None, :]
    inside = (split < SPLITS)[:, None] & (channel < DIM)[None, :]
    partial = tl.load(at, mask=inside, other=0.0)
    out = tl.sum(partial * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + place * DIM + channel, out.to(out_ptr.dtype.element_ty), mask=channel < DIM)


@triton.jit
def find_sequence(starts_ptr, tile, num_sequences, BLOCK_Q: tl.constexpr):
    """The sequence that a tile of queries belongs to, and its first tile.

    Sequence i has the tiles from starts[i] // BLOCK_Q + i on: enough for all its queries, however
    they are aligned, and known without adding up what each sequence before it has.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(starts_ptr + middle).to(tl.int32) // BLOCK_Q + middle
        if first <= tile:
            low = middle
        else:
            high = middle
    return low, tl.load(starts_ptr + low).to(tl.int32) // BLOCK_Q + low


@triton.jit(do_not_specialize=["num_sequences", *OF_A_STEP], do_not_specialize_on_alignment=TABLES)
def prefill_attention_kernel(
    out_ptr, q_ptr, q_stride, starts_ptr, num_sequences, tables_ptr, table_stride, lens_ptr,
    k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, scale, window, sinks, reach,
    RATIO: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr,
    K_FORMAT: tl.constexpr, K_GROUP: tl.constexpr,
    V_FORMAT: tl.constexpr, V_GROUP: tl.constexpr,
    WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Program (t, j): tile t of queries with the heads of KV head j; row r is query r // RATIO."""
    BLOCK_Q: tl.constexpr = BLOCK_M // RATIO
    HALF: tl.constexpr = DIM // 2
    # Later tiles see more keys. Begun first, they do not end last.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    j = tl.program_id(1)
    i, first_tile = find_sequence(starts_ptr, tile, num_sequences, BLOCK_Q)
    start = tl.load(starts_ptr + i).to(tl.int32)
    num_queries = tl.load(starts_ptr + i + 1).to(tl.int32) - start
    first = (tile - first_tile) * BLOCK_Q
    if first >= num_queries:
        return
    row = tl.arange(0, BLOCK_M)
    query = first + row // RATIO
    real = (row < BLOCK_Q * RATIO) & (query < num_queries)
    channel = tl.arange(0, PADDED)
    inside = real[:, None] & (channel < HALF)[None, :]
    token = (start + query).to(tl.int64)
    head = j * RATIO + row % RATIO
    q_at = q_ptr + token[:, None] * q_stride + head[:, None] * DIM + channel[None, :]
    q_low = tl.load(q_at, mask=inside, other=0.0)
    q_high = tl.load(q_at + HALF, mask=inside, other=0.0)

    context = tl.load(lens_ptr + i).to(tl.int32)
    before = context - num_queries
    end = tl.minimum(before + first + BLOCK_Q, context)
    num_tiles, sink_tiles, gap = key_tiles(
        before + first, end, window, sinks, reach, WINDOWED, BLOCK_N
    )
    out_low, out_high, _, total = attend(
        q_low, q_high, tl.where(real, before + query, -1),
        tables_ptr + i.to(tl.int64) * table_stride, j, 0, num_tiles, sink_tiles, gap, end,
        k_codes, k_scales, k_zeros, v_codes, v_scales, v_zeros, scale, window, sinks, reach,
        KV_HEADS, BLOCK_SIZE, DIM, PADDED, K_FORMAT, K_GROUP, V_FORMAT, V_GROUP,
        WINDOWED, PRECISION, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    divisor = tl.where(total > 0.0, total, 1.0)[:, None]
    at = out_ptr + (token * KV_HEADS * RATIO + head)[:, None] * DIM + channel[None, :]
    tl.store(at, (out_low / divisor).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(at + HALF, (out_high / divisor).to(out_ptr.dtype.element_ty), mask=inside)
