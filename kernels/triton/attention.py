"""Attention over the paged KV cache: one kernel for decode, one for chunks of prompts.

Both read K and V in place, block by block through the table, in whatever format they are stored
(`kv_parts.py`), and keep a running softmax (Dao 2023, FlashAttention-2, section 3.1), so that no
score is ever written. The query heads of a group share a KV head (GQA, Ainslie et al. 2023): their
rows are put into one tile, so that K and V are read once for all of them, as vLLM's unified Triton
attention does.

Decode has one query a sequence and would leave most of a GPU idle: its keys are split over several
programs, and a second kernel puts their results together (Dao et al. 2023, Flash-Decoding). The
number of splits depends on shapes alone, never on lengths, so that a CUDA graph can be replayed
with other lengths.

Which keys a query sees: those up to itself, in blocks that are not dropped (table entry < 0), and
of these, if there is a window, the last `window` and the first `sinks`; the latter no further back
than `reach`. Tiles of keys that no query of a program can see are not read:

    sinks   |        gap        |    recent
    [0][1]                       [7][8][9]         tiles read: 0 1 7 8 9
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kv_parts import HEAD_DIMS, KVParts, load_halves, understand
from .launch import (
    Launch,
    ceil_div,
    check_float,
    check_integers,
    check_shape,
    check_tensors,
    num_sms,
    power_of_2,
    require,
)

MAX_GQA_RATIO = 16
MAX_SPLITS = 64
LOG2_E = 1.4426950408889634
FAR = 1 << 30
"""A window that hides nothing."""


# --- kernels -------------------------------------------------------------------------------------


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


@triton.jit
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


@triton.jit
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


# --- launchers -----------------------------------------------------------------------------------


def decode_attention(
    q: Tensor,
    k_parts: tuple[Tensor, ...],
    v_parts: tuple[Tensor, ...],
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    reach: int | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of one query a sequence over its paged KV.

    Args:
        q: [num_sequences, num_heads, head_dim], fp32, fp16 or bf16; rows may be strided, as a view
            of a fused projection is.
        k_parts, v_parts: of one layer, see `kv_parts.py`; each in its own format.
        block_tables: int32 or int64 [num_sequences, width]; < 0 for dropped blocks.
        context_lens: int32 or int64 [num_sequences], in tokens, the query's own among them. Its key
            is written already. 0 gives zeros, for the empty rows of a batch bucket.
        scale: on scores; head_dim ** -0.5 if not given.
        window, sinks, reach: in tokens, see above.
        num_splits: programs that share the keys of a sequence and KV head; None chooses so that the
            GPU is full for tables that are.

    Returns:
        [num_sequences, num_heads, head_dim], dtype of q.

    Raises:
        ValueError: for what the kernel cannot do.
    """
    out, launches = plan_decode_attention(
        q, k_parts, v_parts, block_tables, context_lens,
        scale=scale, window=window, sinks=sinks, reach=reach, num_splits=num_splits,
    )  # fmt: skip
    for launch in launches:
        launch.run()
    return out


def plan_decode_attention(
    q: Tensor,
    k_parts: tuple[Tensor, ...],
    v_parts: tuple[Tensor, ...],
    block_tables: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    reach: int | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, list[Launch]]:
    """The result's tensor, and the launches that fill it; see `decode_attention`."""
    k, v = _check(q, k_parts, v_parts, block_tables, context_lens, len(q), window, sinks, reach)
    num_sequences, num_heads, head_dim = q.shape
    fp32 = q.dtype == torch.float32
    block_n = 32 if fp32 else 64 if head_dim > 64 else 128
    if num_splits is None:
        programs = max(1, num_sequences * k.num_kv_heads)
        num_tiles = ceil_div(block_tables.shape[1] * k.block_size, block_n)
        wanted = power_of_2(ceil_div(2 * num_sms(q.device), programs))
        num_splits = max(1, min(wanted, MAX_SPLITS, num_tiles))
    require(1 <= num_splits <= MAX_SPLITS, f"num_splits={num_splits}, must be 1 to {MAX_SPLITS}")
    out = torch.empty((num_sequences, num_heads, head_dim), dtype=q.dtype, device=q.device)
    partial = weight = None
    if num_splits > 1:
        shape = (num_sequences, num_heads, num_splits, head_dim)
        partial = torch.empty(shape, dtype=torch.float32, device=q.device)
        weight = torch.empty(shape[:-1], dtype=torch.float32, device=q.device)
    args = _args(q, k, v, block_tables, context_lens, scale, window, sinks, reach)
    results = {"out_ptr": out, "partial_ptr": partial, "weight_ptr": weight}
    constants = _constants(q, k, v, window)
    constants |= {"BLOCK_M": 16, "BLOCK_N": block_n, "SPLITS": num_splits}
    launches = [
        Launch(
            decode_attention_kernel,
            (num_sequences, k.num_kv_heads, num_splits),
            results | args,
            constants,
            num_warps=4,
            num_stages=1 if fp32 else 3,
        )
    ]
    if num_splits > 1:
        sizes = {"DIM": head_dim, "PADDED": power_of_2(head_dim), "SPLITS": num_splits}
        sizes |= {"SPLITS_PADDED": power_of_2(num_splits)}
        grid = (num_sequences * num_heads,)
        launches.append(Launch(reduce_splits_kernel, grid, results, sizes, num_warps=2))
    return out, launches


def prefill_attention(
    q: Tensor,
    k_parts: tuple[Tensor, ...],
    v_parts: tuple[Tensor, ...],
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    reach: int | None = None,
) -> Tensor:
    """Attention of a ragged batch of chunks over their paged KV.

    Sequence i owns the rows query_starts[i] to query_starts[i + 1] - 1 of q; the last of them
    stands at position context_lens[i] - 1, and K and V of all of them are written already.

    Args:
        q: [num_tokens, num_heads, head_dim], fp32, fp16 or bf16; rows may be strided.
        query_starts: int32 or int64 [num_sequences + 1], ascending from 0.
        others: as for `decode_attention`.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of q. Rows behind the last query are not written.

    Raises:
        ValueError: for what the kernel cannot do.
    """
    out, launch = plan_prefill_attention(
        q, k_parts, v_parts, block_tables, query_starts, context_lens,
        scale=scale, window=window, sinks=sinks, reach=reach,
    )  # fmt: skip
    launch.run()
    return out


def plan_prefill_attention(
    q: Tensor,
    k_parts: tuple[Tensor, ...],
    v_parts: tuple[Tensor, ...],
    block_tables: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    reach: int | None = None,
) -> tuple[Tensor, Launch]:
    """The result's tensor, and the launch that fills it; see `prefill_attention`."""
    num_sequences = len(context_lens)
    k, v = _check(
        q, k_parts, v_parts, block_tables, context_lens, num_sequences, window, sinks, reach
    )
    check_tensors(q=q, query_starts=query_starts)
    check_integers(query_starts=query_starts)
    check_shape("query_starts", query_starts, num_sequences + 1)
    num_tokens, num_heads, head_dim = q.shape
    ratio = num_heads // k.num_kv_heads
    if q.dtype == torch.float32:
        block_m, block_n = 32, 32
    else:
        few_rows = num_tokens * ratio <= 64 * num_sequences
        # Heads that are padded take the registers of the next power of two, and their masks.
        block_m, block_n = 64 if few_rows else 128, 64 if head_dim in (64, 128) else 32
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    args = _args(q, k, v, block_tables, context_lens, scale, window, sinks, reach)
    args |= {"out_ptr": out, "starts_ptr": query_starts, "num_sequences": num_sequences}
    num_tiles = num_tokens // (block_m // ratio) + num_sequences if num_sequences else 0
    launch = Launch(
        prefill_attention_kernel,
        (num_tiles if num_tokens else 0, k.num_kv_heads),
        args,
        _constants(q, k, v, window) | {"BLOCK_M": block_m, "BLOCK_N": block_n},
        num_warps=8 if block_m == 128 else 4,
        num_stages=1 if q.dtype == torch.float32 else 3 if k.format == v.format == "float" else 2,
    )
    return out, launch


def _check(
    q: Tensor,
    k_parts: tuple[Tensor, ...],
    v_parts: tuple[Tensor, ...],
    block_tables: Tensor,
    context_lens: Tensor,
    num_sequences: int,
    window: int | None,
    sinks: int,
    reach: int | None,
) -> tuple[KVParts, KVParts]:
    check_float(q=q)
    check_shape("q", q, None, None, None)
    head_dim = q.shape[2]
    require(head_dim in HEAD_DIMS, f"head_dim={head_dim}, must be one of {list(HEAD_DIMS)}")
    require(
        q.stride(2) == 1 and q.stride(1) == head_dim,
        f"q has strides {q.stride()}: each row must be in one piece",
    )
    k, v = understand("k_parts", k_parts, head_dim), understand("v_parts", v_parts, head_dim)
    check_shape("v_parts codes", v.codes, *k.codes.shape[:3], None)
    require(
        q.shape[1] % k.num_kv_heads == 0 and 1 <= q.shape[1] // k.num_kv_heads <= MAX_GQA_RATIO,
        f"num_heads={q.shape[1]} must be 1 to {MAX_GQA_RATIO} times num_kv_heads={k.num_kv_heads}",
    )
    check_integers(block_tables=block_tables, context_lens=context_lens)
    check_shape("block_tables", block_tables, num_sequences, None)
    check_shape("context_lens", context_lens, num_sequences)
    check_tensors(
        q=q, block_tables=block_tables, context_lens=context_lens,
        **k.kernel_args("k"), **v.kernel_args("v"),
    )  # fmt: skip
    require(window is None or window >= 1, f"window={window}, must be at least 1")
    require(sinks >= 0, f"sinks={sinks}, must be at least 0")
    require(
        reach is None or (window is not None and reach >= window),
        f"reach={reach} must be at least window={window}, and be given with it only",
    )
    return k, v


def _args(
    q: Tensor,
    k: KVParts,
    v: KVParts,
    block_tables: Tensor,
    context_lens: Tensor,
    scale: float | None,
    window: int | None,
    sinks: int,
    reach: int | None,
) -> dict[str, Any]:
    """What both kernels are called with."""
    return {
        "q_ptr": q,
        "q_stride": q.stride(0),
        "tables_ptr": block_tables,
        "table_stride": block_tables.shape[1],
        "lens_ptr": context_lens,
        **k.kernel_args("k"),
        **v.kernel_args("v"),
        "scale": (q.shape[2] ** -0.5 if scale is None else scale) * LOG2_E,
        "window": FAR if window is None else min(window, FAR),
        "sinks": sinks,
        "reach": FAR if reach is None else min(reach, FAR),
    }


def _constants(q: Tensor, k: KVParts, v: KVParts, window: int | None) -> dict[str, Any]:
    """What both kernels are compiled for."""
    head_dim = q.shape[2]
    return {
        "RATIO": q.shape[1] // k.num_kv_heads,
        "KV_HEADS": k.num_kv_heads,
        "BLOCK_SIZE": k.block_size,
        "DIM": head_dim,
        "PADDED": power_of_2(head_dim // 2),
        **k.kernel_constants("k"),
        **v.kernel_constants("v"),
        "WINDOWED": window is not None,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
