"""Every kernel against its reference, in any dtype, on any device; for `gpu_check.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from . import attention, elementwise, linear, reference, rotary, sampling
from .gpu_inputs import KV_FORMATS, Draw, Shape

LARGEST_ERROR = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Of ||out - reference|| / ||reference||, by the dtype it is computed in."""


@dataclass(frozen=True)
class Verdict:
    """How far a kernel is from its reference."""

    name: str
    error: float
    """Relative, of the outputs as a whole; of stored codes the greatest difference; of tokens the
    share that differs."""
    limit: float

    @property
    def holds(self) -> bool:
        return self.error <= self.limit  # not for NaN


def relative_error(got: Tensor, expected: Tensor) -> float:
    """||got - expected|| / ||expected||, in float64."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))


@dataclass(frozen=True)
class Trial:
    """On what the kernels are tried."""

    draw: Draw
    shape: Shape
    lens: tuple[int, ...] = (1, 16, 17, 130, 75)
    """Of the sequences' contexts; none fits a tile."""
    chunks: tuple[int, ...] = (1, 3, 17, 70, 0)
    """How many of them are queries of a prefill."""
    rows: tuple[int, ...] = (1, 5, 40)
    """Of the matrix products; the last also of sampling."""

    @property
    def limit(self) -> float:
        return LARGEST_ERROR[self.draw.dtype]


def attention_verdicts(t: Trial) -> Iterator[Verdict]:
    """Decode and prefill in every format, with a window and without."""
    draw, s = t.draw, t.shape
    starts = draw.numbers([0, *t.chunks]).cumsum(0, dtype=torch.int32)
    windows: tuple[dict[str, int], ...] = ({}, {"window": 24, "sinks": 4})
    for kv_format, window in product(KV_FORMATS, windows):
        kv = draw.paged(kv_format, list(t.lens), s)
        name = f"{kv_format}-d{s.head_dim}" + ("-window" if window else "")
        args = {"q": draw.floats(len(t.lens), s.heads, s.head_dim), **kv, **window}
        got = attention.decode_attention(**args, num_splits=4)
        error = relative_error(got, reference.decode_attention(**args))
        yield Verdict(f"decode-{name}", error, t.limit)
        args["q"] = draw.floats(sum(t.chunks), s.heads, s.head_dim)
        got = attention.prefill_attention(**args, query_starts=starts)
        expected = reference.prefill_attention(**args, query_starts=starts)
        yield Verdict(f"prefill-{name}", relative_error(got, expected), t.limit)


def rope_verdicts(t: Trial) -> Iterator[Verdict]:
    """The rotated q and the stored values, in every format."""
    for kv_format in KV_FORMATS:
        yield _rope_verdict(t.draw, kv_format, t.shape, sum(t.chunks))


def elementwise_verdicts(t: Trial) -> Iterator[Verdict]:
    """Norm, the sum beside it, and the gated product."""
    draw, s = t.draw, t.shape
    x, residual, weight = draw.floats(5, s.hidden), draw.floats(5, s.hidden), draw.floats(s.hidden)
    for part, got, expected in zip(
        ("norm", "sum"),
        elementwise.add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        yield Verdict(f"add-rms-norm-{part}", relative_error(got, expected), t.limit)
    gate_up = draw.floats(5, 2 * s.inner)
    error = relative_error(elementwise.silu_mul(gate_up), reference.silu_mul(gate_up))
    yield Verdict("silu-mul", error, t.limit)


def linear_verdicts(t: Trial) -> Iterator[Verdict]:
    """Products with each kind of weight, K in one piece and in several."""
    draw, s = t.draw, t.shape
    for m, splits in product(t.rows, (1, 3)):
        x, bias = draw.floats(m, s.inner), draw.floats(s.hidden)
        name = f"m{m}-s{splits}"
        codes, scales = draw.int8_weight(s.hidden, s.inner)
        in_groups = draw.half(s.hidden, s.inner // 32, scale=0.02)
        for kind, by in (("int8-linear", scales), ("int8-linear-grouped", in_groups)):
            got = linear.int8_linear(x, codes, by, bias, num_splits=splits)
            error = relative_error(got, reference.int8_linear(x, codes, by, bias))
            yield Verdict(f"{kind}-{name}", error, t.limit)
        codes, scales, minima = draw.int4_weight(s.hidden, s.inner)
        got = linear.int4_linear(x, codes, scales, minima, bias, num_splits=splits)
        error = relative_error(got, reference.int4_linear(x, codes, scales, minima, bias))
        yield Verdict(f"int4-linear-{name}", error, t.limit)


def sample_verdicts(t: Trial) -> Iterator[Verdict]:
    """Tokens by both kinds of chance. Logarithms and exponentials are not the same everywhere, so
    near ties may fall the other way."""
    for chance in ("uniforms", "seeds"):
        args = t.draw.sampling(t.rows[-1], t.shape.vocab, chance)
        args["logits"][-1, t.shape.vocab // 2] = math.nan  # nothing can be drawn from this row
        wrong = sampling.sample(**args) != reference.sample(**args)
        yield Verdict(f"sample-{chance}", float(wrong.float().mean()), 0.05)


PARTS: tuple[Callable[[Trial], Iterator[Verdict]], ...] = (
    attention_verdicts, rope_verdicts, elementwise_verdicts, linear_verdicts, sample_verdicts,
)  # fmt: skip


def _rope_verdict(draw: Draw, kv_format: str, s: Shape, tokens: int) -> Verdict:
    """The rotated q and the stored values; codes may be one off, for torch divides otherwise."""
    args = draw.rope(kv_format, tokens, s)
    copies = {name: tuple(part.clone() for part in args[name]) for name in ("k_parts", "v_parts")}
    got = rotary.rope_and_write_kv(**args)
    expected = reference.rope_and_write_kv(**(args | copies))
    errors = [relative_error(got, expected)]
    for name, copy in copies.items():
        errors.append(
            relative_error(
                reference.decode_parts(args[name], s.head_dim),
                reference.decode_parts(copy, s.head_dim),
            )
        )
    return Verdict(f"rope-{kv_format}-d{s.head_dim}", max(errors), LARGEST_ERROR[draw.dtype])
