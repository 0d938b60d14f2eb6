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
from torch import Tensor

from .attention_kernels import (
    decode_attention_kernel,
    prefill_attention_kernel,
    reduce_splits_kernel,
)
from .kv_parts import KVParts, understand_both
from .launch import (
    Launch,
    ceil_div,
    check_float,
    check_integers,
    check_rows,
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
        # Wide heads leave no registers on sm_80 for more: padding and a window take some.
        roomy = head_dim == 64 or (head_dim == 128 and window is None)
        block_m, block_n = 64 if few_rows else 128, 64 if roomy else 32
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
    k, v = understand_both(k_parts, v_parts, q.shape[2])
    check_rows(q=q)
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
