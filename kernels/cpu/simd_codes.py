"""Numbers of 16, 8 and 4 bits as `Floats` and back: what K and V are stored in.

Stores round to the nearest, ties to even, by every target to the same bits (but those of a NaN).
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .simd import (
    _AVX2,
    _HALF,
    _I8,
    _I16,
    _I32,
    Floats,
    Ints,
    _constant,
    _largest_or_nan,
    _load,
    _operation,
    _repeat,
    _smallest_or_nan,
    _store,
    _widen_half,
)

# --- emitting LLVM -------------------------------------------------------------------------------


def _narrow_half(builder: Any, value: Any) -> Any:
    """The bits of the nearest float16, ties to even."""
    if _AVX2:
        half = builder.fptrunc(value, ir.VectorType(_HALF, 8))
        return builder.bitcast(half, ir.VectorType(_I16, 8))
    bits = builder.bitcast(value, Ints.vector)
    sign = builder.and_(bits, _constant(Ints.vector, -(1 << 31)))
    size = builder.xor(bits, sign)
    # rounding may carry into the exponent, and from the largest one into infinity
    odd = builder.and_(builder.lshr(size, _constant(Ints.vector, 13)), _constant(Ints.vector, 1))
    normal = builder.add(builder.add(size, odd), _constant(Ints.vector, 0xFFF - (112 << 23)))
    normal = builder.lshr(normal, _constant(Ints.vector, 13))
    # below the normal range, numbers lie as far apart as those of float32 beside a half do
    half = _constant(Floats.vector, 0.5)
    small = builder.bitcast(builder.fadd(builder.bitcast(size, Floats.vector), half), Ints.vector)
    small = builder.sub(small, builder.bitcast(half, Ints.vector))
    infinite = _constant(Ints.vector, 0x7F800000)
    beyond = builder.select(
        builder.icmp_signed(">", size, infinite),
        _constant(Ints.vector, 0x7E00),
        _constant(Ints.vector, 0x7C00),
    )
    is_small = builder.icmp_signed("<", size, _constant(Ints.vector, 113 << 23))
    is_beyond = builder.icmp_signed(">=", size, _constant(Ints.vector, 143 << 23))
    narrow = builder.select(is_beyond, beyond, builder.select(is_small, small, normal))
    narrow = builder.or_(narrow, builder.lshr(sign, _constant(Ints.vector, 16)))
    return builder.trunc(narrow, ir.VectorType(_I16, 8))


def _widen_bfloat(builder: Any, bits: Any) -> Any:
    wide = builder.shl(builder.zext(bits, Ints.vector), _constant(Ints.vector, 16))
    return builder.bitcast(wide, Floats.vector)


def _narrow_bfloat(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, Ints.vector)
    odd = builder.and_(builder.lshr(bits, _constant(Ints.vector, 16)), _constant(Ints.vector, 1))
    bits = builder.add(builder.add(bits, odd), _constant(Ints.vector, 0x7FFF))
    bits = builder.lshr(bits, _constant(Ints.vector, 16))
    nan = builder.fcmp_unordered("uno", value, value)
    bits = builder.select(nan, _constant(Ints.vector, 0x7FC0), bits)
    return builder.trunc(bits, ir.VectorType(_I16, 8))


def _widen_fp8(builder: Any, codes: Any) -> Any:
    """float8_e4m3fn, given as its bits: moved to where float16 has them, 2^-8 of the value."""
    shorts = ir.VectorType(_I16, 8)
    codes = builder.zext(codes, shorts)
    rest = builder.and_(codes, _constant(shorts, 0x7F))
    sign = builder.shl(builder.and_(codes, _constant(shorts, 0x80)), _constant(shorts, 8))
    half = builder.or_(sign, builder.shl(rest, _constant(shorts, 7)))
    value = builder.fmul(_widen_half(builder, half), _constant(Floats.vector, 2.0**8))
    is_nan = builder.icmp_signed("==", rest, _constant(shorts, 0x7F))
    return builder.select(is_nan, _constant(Floats.vector, float("nan")), value)


def _whole_floats(builder: Any, codes: Any, shift: int | None = None) -> Any:
    """Eight bytes as floats: signed, or the four bits from `shift` on."""
    if shift is None:
        return builder.sitofp(builder.sext(codes, Ints.vector), Floats.vector)
    wide = builder.lshr(builder.zext(codes, Ints.vector), _constant(Ints.vector, shift))
    return builder.sitofp(builder.and_(wide, _constant(Ints.vector, 15)), Floats.vector)


def _to_fp8(builder: Any, value: Any) -> Any:
    bits = builder.bitcast(value, Ints.vector)
    size = builder.and_(bits, _constant(Ints.vector, 0x7FFFFFFF))
    odd = builder.and_(builder.lshr(size, _constant(Ints.vector, 20)), _constant(Ints.vector, 1))
    normal = builder.add(builder.add(size, odd), _constant(Ints.vector, 0x7FFFF - (120 << 23)))
    normal = builder.lshr(normal, _constant(Ints.vector, 20))
    # below 2^-6 numbers lie 2^-9 apart, as those of float32 do at 2^14
    high = _constant(Floats.vector, 2.0**14)
    small = builder.bitcast(builder.fadd(builder.bitcast(size, Floats.vector), high), Ints.vector)
    small = builder.sub(small, builder.bitcast(high, Ints.vector))
    is_small = builder.icmp_signed("<", size, _constant(Ints.vector, 121 << 23))
    code = builder.select(is_small, small, normal)
    is_nan = builder.icmp_signed(">", size, _constant(Ints.vector, 0x7F800000))
    code = builder.select(is_nan, _constant(Ints.vector, 0x7F), code)
    sign = builder.and_(builder.lshr(bits, _constant(Ints.vector, 24)), _constant(Ints.vector, 128))
    return builder.or_(code, sign)


# --- words ---------------------------------------------------------------------------------------

repeat_half = _load(
    Floats, _I16, lambda builder, value: _widen_half(builder, _repeat(builder, value, 8))
)
"""One float16, eight times."""
store_halves = _store(Floats, _narrow_half)
"""Eight floats as the nearest float16, ties to even."""
store_first_half = _store(
    Floats, lambda builder, value: builder.extract_element(_narrow_half(builder, value), _I32(0))
)
"""The first of eight floats as float16."""
to_half = _operation(Floats, 1, lambda builder, a: _widen_half(builder, _narrow_half(builder, a)))
"""The nearest float16 of each lane, ties to even."""
_EIGHT_BYTES = ir.VectorType(_I8, 8)

load_bfloats = _load(Floats, ir.VectorType(_I16, 8), _widen_bfloat)
"""Eight bfloat16 as `Floats`; the index counts elements of the array, which may be bytes."""
load_fp8 = _load(Floats, _EIGHT_BYTES, _widen_fp8)
"""Eight float8_e4m3fn as `Floats`."""
load_int8 = _load(Floats, _EIGHT_BYTES, _whole_floats)
"""Eight int8 as `Floats`."""
load_low_nibbles = _load(Floats, _EIGHT_BYTES, lambda b, codes: _whole_floats(b, codes, 0))
"""The low four bits of eight bytes as `Floats`."""
load_high_nibbles = _load(Floats, _EIGHT_BYTES, lambda b, codes: _whole_floats(b, codes, 4))
store_bfloats = _store(Floats, _narrow_bfloat)
"""Eight floats as bfloat16."""
join_nibbles = _operation(
    Ints, 2, lambda builder, a, b: builder.or_(a, builder.shl(b, _constant(Ints.vector, 4)))
)
"""a + 16 b, of numbers from 0 to 15."""
to_fp8 = _operation(Ints, 1, _to_fp8)
"""The code of the nearest float8_e4m3fn of floats up to 448."""


@intrinsic
def clamped(typing: Any, values: Any, low: Any, high: Any) -> Any:
    """Floats between two float32 numbers; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high = (_repeat(builder, limit, 8) for limit in args[1:])
        return _smallest_or_nan(builder, _largest_or_nan(builder, args[0], low), high)

    return Floats(Floats, types.float32, types.float32), codegen
