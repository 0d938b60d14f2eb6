"""Every kernel against its reference, in any dtype, on any device; for `gpu_check.py`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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


def verdicts(
    device: str,
    dtype: torch.dtype,
    s: Shape,
    lens: tuple[int, ...] = (1, 16, 17, 130, 75),
    chunks: tuple[int, ...] = (1, 3, 17, 70, 0),
    rows: tuple[int, ...] = (1, 5, 40),
) -> Iterator[Verdict]:
    """Every kernel against its reference, at lengths that do not fit any tile.

    Args:
        lens, chunks: of the sequences' contexts, and how many of them are queries of a prefill.
        rows: of the matrix products; the last also of sampling.
    """
    draw, limit = Draw(device, dtype), LARGEST_ERROR[dtype]
    starts = draw.numbers([0, *chunks]).cumsum(0, dtype=torch.int32)
    windows: tuple[dict[str, int], ...] = ({}, {"window": 24, "sinks": 4})
    for kv_format in KV_FORMATS:
        for window in windows:
            kv = draw.paged(kv_format, list(lens), s)
            name = f"{kv_format}-d{s.head_dim}" + ("-window" if window else "")
            args = {"q": draw.floats(len(lens), s.heads, s.head_dim), **kv, **window}
            got = attention.decode_attention(**args, num_splits=4)
            error = relative_error(got, reference.decode_attention(**args))
            yield Verdict(f"decode-{name}", error, limit)
            args["q"] = draw.floats(sum(chunks), s.heads, s.head_dim)
            got = attention.prefill_attention(**args, query_starts=starts)
            expected = reference.prefill_attention(**args, query_starts=starts)
            yield Verdict(f"prefill-{name}", relative_error(got, expected), limit)
        yield _rope_verdict(draw, kv_format, s, sum(chunks))
    x, residual, weight = draw.floats(5, s.hidden), draw.floats(5, s.hidden), draw.floats(s.hidden)
    for part, got, expected in zip(
        ("norm", "sum"),
        elementwise.add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        yield Verdict(f"add-rms-norm-{part}", relative_error(got, expected), limit)
    gate_up = draw.floats(5, 2 * s.inner)
    error = relative_error(elementwise.silu_mul(gate_up), reference.silu_mul(gate_up))
    yield Verdict("silu-mul", error, limit)
    for m in rows:
        x, bias = draw.floats(m, s.inner), draw.floats(s.hidden)
        int8, int4 = draw.int8_weight(s.hidden, s.inner), draw.int4_weight(s.hidden, s.inner)
        q8_0 = int8[0], draw.half(s.hidden, s.inner // 32, scale=0.02)
        for splits in (1, 3):
            got = linear.int8_linear(x, *int8, bias, num_splits=splits)
            error = relative_error(got, reference.int8_linear(x, *int8, bias))
            yield Verdict(f"int8-linear-m{m}-s{splits}", error, limit)
            got = linear.int8_linear(x, *q8_0, bias, num_splits=splits)
            error = relative_error(got, reference.int8_linear(x, *q8_0, bias))
            yield Verdict(f"int8-linear-grouped-m{m}-s{splits}", error, limit)
            got = linear.int4_linear(x, *int4, bias, num_splits=splits)
            error = relative_error(got, reference.int4_linear(x, *int4, bias))
            yield Verdict(f"int4-linear-m{m}-s{splits}", error, limit)
    for chance in ("uniforms", "seeds"):
        args = draw.sampling(rows[-1], s.vocab, chance)
        wrong = sampling.sample(**args) != reference.sample(**args)
        # Noise is computed by another logarithm: near ties may fall the other way.
        yield Verdict(f"sample-{chance}", float(wrong.float().mean()), 0.05)


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
