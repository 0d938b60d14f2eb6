"""Kernels to be timed, at the shapes of models, and what torch has instead; for `gpu_check.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import attention, elementwise, linear, rotary, sampling, work
from .gpu_inputs import KV_FORMATS, Draw, Shape
from .work import Work

CACHE_BYTES = 200e6
"""Inputs that are gone round are at least this much together: more than any card's L2 cache."""


@dataclass(frozen=True)
class Case:
    """A kernel to be timed, at one shape."""

    name: str
    work: Work
    runs: Sequence[Callable[[], Any]]
    """One for each set of inputs."""
    peers: Sequence[Callable[[], Any]]
    """What torch itself offers, likewise; empty if nothing."""


@dataclass(frozen=True)
class Load:
    """How much of each kind is asked for."""

    decode: tuple[tuple[int, int], ...] = ((1, 8192), (32, 4096))
    """Sequences, and tokens of context of each."""
    prefill: tuple[tuple[list[int], list[int]], ...] = (
        ([2048], [2048]),
        ([512] * 4, [4096, 512, 2000, 8192]),
    )
    """Queries of each sequence, and tokens of context."""
    tokens: tuple[int, ...] = (1, 32, 2048)
    """For what is done token by token."""
    rows: tuple[int, ...] = (1, 16, 64)
    """Of matrix products."""
    sampled: tuple[int, ...] = (1, 32)


def sets_for(work_done: Work) -> int:
    """How many sets of inputs are more than the cache."""
    return max(2, min(64, int(CACHE_BYTES // max(1, work_done.bytes)) + 1))


def cases(s: Shape, draw: Draw, load: Load) -> Iterator[Callable[[], Case]]:
    """What is timed at a model's shape; each is made when its turn comes, for their memory."""
    for batch, context in load.decode:
        for kv_format in KV_FORMATS:
            yield partial(_decode_case, draw, s, batch, context, kv_format)
    batch, context = load.decode[-1]
    window = {"window": context // 4, "sinks": 4}
    yield partial(_decode_case, draw, s, batch, context, "bf16", **window)
    for kv_format in ("bf16", "int4"):
        for chunks, lens in load.prefill:
            yield partial(_prefill_case, draw, s, chunks, lens, kv_format)
    for tokens in load.tokens:
        yield partial(_rope_case, draw, s, tokens, "bf16")
        yield partial(_norm_case, draw, s, tokens)
        yield partial(_silu_case, draw, s, tokens)
    yield partial(_rope_case, draw, s, load.tokens[-1], "int4")
    qkv = s.head_dim * (s.heads + 2 * s.kv_heads)
    for size_out, size_in in ((qkv, s.hidden), (2 * s.inner, s.hidden), (s.hidden, s.inner)):
        for rows in load.rows:
            for bits in (8, 4):
                yield partial(_linear_case, draw, rows, size_out, size_in, bits)
    for rows in load.sampled:
        yield partial(_sample_case, draw, s, rows)


def _decode_case(
    draw: Draw, s: Shape, batch: int, context: int, kv_format: str, **window: int
) -> Case:
    def inputs() -> dict[str, Any]:
        kv = draw.paged(kv_format, [context] * batch, s)
        return {"q": draw.floats(batch, s.heads, s.head_dim), **kv, **window}

    first = inputs()
    done = work.decode_attention(**first)
    sets = [first, *(inputs() for _ in range(min(8, sets_for(done)) - 1))]
    runs = [partial(attention.decode_attention, **a) for a in sets]
    name = f"decode-{s.name}-b{batch}-c{context}-{kv_format}" + ("-window" if window else "")
    return Case(name, done, runs, [])


def _prefill_case(draw: Draw, s: Shape, chunks: list[int], lens: list[int], kv_format: str) -> Case:
    args = draw.paged(kv_format, lens, s)
    args["query_starts"] = draw.numbers([0, *chunks]).cumsum(0, dtype=torch.int32)
    args["q"] = draw.floats(sum(chunks), s.heads, s.head_dim)
    done = work.prefill_attention(**args)
    peers: list[Callable[[], Any]] = []
    if len(chunks) == 1 and chunks == lens:
        q, k, v = (draw.floats(1, heads, chunks[0], s.head_dim)
                   for heads in (s.heads, s.kv_heads, s.kv_heads))  # fmt: skip
        attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        peers = [partial(attend, q, k, v)]
    name = f"prefill-{s.name}-{'+'.join(map(str, chunks))}-of-{'+'.join(map(str, lens))}"
    return Case(f"{name}-{kv_format}", done, [partial(attention.prefill_attention, **args)], peers)


def _rope_case(draw: Draw, s: Shape, tokens: int, kv_format: str) -> Case:
    first = draw.rope(kv_format, tokens, s)
    done = work.rope_and_write_kv(*(first[name] for name in ("q", "k", "v", "k_parts", "v_parts")))
    sets = [first, *(draw.rope(kv_format, tokens, s) for _ in range(sets_for(done) - 1))]
    runs = [partial(rotary.rope_and_write_kv, **a) for a in sets]
    return Case(f"rope-{s.name}-t{tokens}-{kv_format}", done, runs, [])


def _torch_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x + residual, weight.shape, weight, 1e-5)


def _torch_silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _norm_case(draw: Draw, s: Shape, tokens: int) -> Case:
    weight = draw.floats(s.hidden)
    shape = (tokens, s.hidden)
    done = work.add_rms_norm(draw.floats(*shape), draw.floats(*shape))
    sets = [(draw.floats(*shape), draw.floats(*shape)) for _ in range(sets_for(done))]
    runs = [partial(elementwise.add_rms_norm, x, r, weight, 1e-5) for x, r in sets]
    peers = [partial(_torch_add_rms_norm, x, r, weight) for x, r in sets]
    return Case(f"add-rms-norm-{s.name}-t{tokens}", done, runs, peers)


def _silu_case(draw: Draw, s: Shape, tokens: int) -> Case:
    done = work.silu_mul(draw.floats(tokens, 2 * s.inner))
    sets = [draw.floats(tokens, 2 * s.inner) for _ in range(sets_for(done))]
    runs = [partial(elementwise.silu_mul, x) for x in sets]
    peers = [partial(_torch_silu_mul, x) for x in sets]
    return Case(f"silu-mul-{s.name}-t{tokens}", done, runs, peers)


def _linear_case(draw: Draw, rows: int, size_out: int, size_in: int, bits: int) -> Case:
    make = draw.int8_weight if bits == 8 else draw.int4_weight
    kernel: Callable[..., Tensor] = linear.int8_linear if bits == 8 else linear.int4_linear
    x, first = draw.floats(rows, size_in), make(size_out, size_in)
    done = work.linear(x, *first)
    sets = [first, *(make(size_out, size_in) for _ in range(sets_for(done) - 1))]
    runs = [partial(kernel, x, *w) for w in sets]
    wide = [draw.floats(size_out, size_in) for _ in range(max(2, len(sets) * bits // 16))]
    peers = [partial(F.linear, x, w) for w in wide]
    return Case(f"int{bits}-linear-{size_out}x{size_in}-m{rows}", done, runs, peers)


def _sample_case(draw: Draw, s: Shape, rows: int) -> Case:
    args = draw.sampling(rows, s.vocab, "seeds")
    run = [partial(sampling.sample, **args)]
    return Case(f"sample-{s.name}-r{rows}", work.sample(args["logits"]), run, [])
