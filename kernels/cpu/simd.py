"""Words for 256-bit vectors in Numba: what kernels are written in.

A vector is a value of its own type; each word becomes one or a few LLVM instructions.

| type | lanes | | type | lanes |
|---|---|---|---|---|
| `Floats` | 8 x float32 | | `Bytes` | 32 x 8 bits |
| `Ints` | 8 x int32 | | `Shorts` | 16 x int16 |

LLVM's vector arithmetic is portable: on a processor without 256-bit registers it is split. Only
the words under "by target" have a body for AVX2 and one in portable arithmetic. Both give the same
bits, except `fma`, which rounds twice where the processor has no such instruction.

Memory is addressed as (array, index of an element), any alignment. Nothing is checked.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from .target import TARGET

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_HALF, _FLOAT = ir.HalfType(), ir.FloatType()
_AVX2 = TARGET == "avx2"


class Vector(types.Type):
    """Numba's type of a vector with `lanes` elements of an LLVM type."""

    def __init__(self, name: str, element: ir.Type, lanes: int) -> None:
        self.vector = ir.VectorType(element, lanes)
        super().__init__(name=name)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector_type: Vector) -> None:
        super().__init__(manager, vector_type, vector_type.vector)


Floats = Vector("Floats", _FLOAT, 8)
Ints = Vector("Ints", _I32, 8)
Shorts = Vector("Shorts", _I16, 16)
Bytes = Vector("Bytes", _I8, 32)


# --- emitting LLVM -------------------------------------------------------------------------------


def _constant(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


def _pick(builder: Any, value: Any, lanes: Sequence[int]) -> Any:
    """A vector of some lanes of another."""
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))
    return builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)


def _repeat(builder: Any, scalar: Any, lanes: int) -> Any:
    """A vector with the same scalar in every lane."""
    vector = ir.VectorType(scalar.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(
        first,
        ir.Constant(vector, ir.Undefined),
        ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes),
    )


def _call(builder: Any, name: str, result: ir.Type, args: Sequence[Any]) -> Any:
    """Call an LLVM intrinsic by its name."""
    signature = ir.FunctionType(result, [value.type for value in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _operation(result: types.Type, num_args: int, emit: Callable[..., Any]) -> Any:
    """A word that computes `emit(builder, *args)`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return emit(builder, *args)

    typings = {
        0: lambda typing: (result(), codegen),
        1: lambda typing, a: (result(a), codegen),
        2: lambda typing, a, b: (result(a, b), codegen),
        3: lambda typing, a, b, c: (result(a, b, c), codegen),
    }
    return intrinsic(typings[num_args])


def _load(result: types.Type, raw: ir.Type, then: Callable[..., Any] | None = None) -> Any:
    """A word `(array, index)` that reads `raw` from memory and turns it into `result`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(context, builder, signature.args[0], *args)
        value = builder.load(builder.bitcast(at, raw.as_pointer()), align=1)
        return then(builder, value) if then else value

    return intrinsic(lambda typing, array, index: (result(array, types.int64), codegen))


def _store(given: types.Type, then: Callable[..., Any] | None = None) -> Any:
    """A word `(array, index, vector)` that writes `then(vector)`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array, index, value = args
        value = then(builder, value) if then else value
        at = _address(context, builder, signature.args[0], array, index)
        builder.store(value, builder.bitcast(at, value.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return intrinsic(
        lambda typing, array, index, value: (types.void(array, types.int64, given), codegen)
    )


def _halves(builder: Any, value: Any, join: Callable[..., Any]) -> Any:
    """Join the lanes of a vector of 8 into one scalar, halving it three times."""
    for lanes in (4, 2, 1):
        low = _pick(builder, value, range(lanes))
        value = join(builder, low, _pick(builder, value, range(lanes, 2 * lanes)))
    return builder.extract_element(value, _I32(0))


# --- by target -----------------------------------------------------------------------------------


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    name = "llvm.fma.v8f32" if _AVX2 else "llvm.fmuladd.v8f32"
    return _call(builder, name, Floats.vector, [a, b, c])


def _madd_shorts(builder: Any, a: Any, b: Any) -> Any:
    if _AVX2:
        return _call(builder, "llvm.x86.avx2.pmadd.wd", Ints.vector, [a, b])
    wide = ir.VectorType(_I32, 16)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = _pick(builder, products, range(0, 16, 2)), _pick(builder, products, range(1, 16, 2))
    return builder.add(even, odd)


def _madd_bytes(builder: Any, a: Any, b: Any) -> Any:
    if _AVX2:
        return _call(builder, "llvm.x86.avx2.pmadd.ub.sw", Shorts.vector, [a, b])
    # each pair of bytes is taken apart within its 16 bits: no lane has to move
    a, b = builder.bitcast(a, Shorts.vector), builder.bitcast(b, Shorts.vector)
    eight, mask = _constant(Shorts.vector, 8), _constant(Shorts.vector, 255)
    lower = builder.mul(builder.and_(a, mask), builder.ashr(builder.shl(b, eight), eight))
    return builder.add(lower, builder.mul(builder.lshr(a, eight), builder.ashr(b, eight)))


def _widen_half(builder: Any, bits: Any) -> Any:
    """float16, given as its bits, as float32."""
    if _AVX2:
        half = builder.bitcast(bits, ir.VectorType(_HALF, 8))
        return builder.fpext(half, Floats.vector)
    bits = builder.zext(bits, Ints.vector)
    sign = builder.shl(
        builder.and_(bits, _constant(Ints.vector, 0x8000)), _constant(Ints.vector, 16)
    )
    rest = builder.shl(
        builder.and_(bits, _constant(Ints.vector, 0x7FFF)), _constant(Ints.vector, 13)
    )
    # the exponents' biases differ by 112; a product also puts right what is below the normal range
    size = builder.fmul(builder.bitcast(rest, Floats.vector), _constant(Floats.vector, 2.0**112))
    size = builder.bitcast(size, Ints.vector)
    # infinity and NaN have the largest exponent of both
    special = builder.or_(rest, _constant(Ints.vector, 0x7F800000))
    is_finite = builder.icmp_signed("<", rest, _constant(Ints.vector, 0x7C00 << 13))
    size = builder.select(is_finite, size, special)
    return builder.bitcast(builder.or_(size, sign), Floats.vector)


fma = _operation(Floats, 3, _fma)
"""a * b + c"""
madd_shorts = _operation(Ints, 2, _madd_shorts)
"""a[2i] * b[2i] + a[2i+1] * b[2i+1] of two `Shorts`."""
madd_bytes = _operation(Shorts, 2, _madd_bytes)
"""The same of unsigned `Bytes` a and signed `Bytes` b; the sum must fit int16."""
load_halves = _load(Floats, ir.VectorType(_I16, 8), _widen_half)
"""Eight float16 as `Floats`; the index counts elements of the array, which may be bytes."""


# --- memory --------------------------------------------------------------------------------------


load_floats = _load(Floats, Floats.vector)
load_bytes = _load(Bytes, Bytes.vector)
load_shorts = _load(Shorts, Shorts.vector)
load_widened = _load(
    Shorts, ir.VectorType(_I8, 16), lambda builder, value: builder.sext(value, Shorts.vector)
)
"""Sixteen int8 as `Shorts`."""
repeat_float = _load(Floats, _FLOAT, lambda builder, value: _repeat(builder, value, 8))
repeat_4_bytes = _load(
    Bytes, _I32, lambda builder, value: builder.bitcast(_repeat(builder, value, 8), Bytes.vector)
)
"""Four bytes, eight times."""
repeat_2_shorts = _load(
    Shorts, _I32, lambda builder, value: builder.bitcast(_repeat(builder, value, 8), Shorts.vector)
)
"""Two int16, eight times."""

store_floats = _store(Floats)
store_as_bytes = _store(Ints, lambda builder, value: builder.trunc(value, ir.VectorType(_I8, 8)))
"""Eight int32 as int8, which they must fit."""
store_as_shorts = _store(Ints, lambda builder, value: builder.trunc(value, ir.VectorType(_I16, 8)))
"""Eight int32 as int16, which they must fit."""


def _turned(builder: Any, a: Any, b: Any, c: Any, d: Any) -> list[Any]:
    """Rows and columns of four by four floats exchanged, in both halves of four vectors alike."""

    def both(first: Any, second: Any, lanes: Sequence[int]) -> Any:
        mask = [lane + half for half in (0, 4) for lane in lanes]
        return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(_I32, 8), mask))

    pairs = [
        both(first, second, lanes)
        for lanes in ((0, 8, 1, 9), (2, 10, 3, 11))
        for first, second in ((a, b), (c, d))
    ]
    return [
        both(*rows, lanes)
        for rows in (pairs[:2], pairs[2:])
        for lanes in ((0, 1, 8, 9), (2, 3, 10, 11))
    ]


_FOUR = ir.VectorType(_FLOAT, 4)


def _row_address(context: Any, builder: Any, signature: Any, args: Any, row: int) -> Any:
    """Where row `row` begins: args are an array, an index and how far apart rows are."""
    index = builder.add(args[1], builder.mul(args[2], _I64(row)))
    at = _address(context, builder, signature.args[0], args[0], index)
    return builder.bitcast(at, _FOUR.as_pointer())


@intrinsic
def load_turned(typing: Any, array: Any, index: Any, step: Any) -> Any:
    """Four columns of eight rows that lie `step` floats apart, as four `Floats`."""
    result = types.UniTuple(Floats, 4)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        fours = [
            builder.load(_row_address(context, builder, signature, args, row), align=1)
            for row in range(8)
        ]
        whole = ir.Constant(ir.VectorType(_I32, 8), list(range(8)))
        rows = [builder.shuffle_vector(fours[i], fours[i + 4], whole) for i in range(4)]
        return context.make_tuple(builder, result, _turned(builder, *rows))

    return result(array, types.int64, types.int64), codegen


@intrinsic
def store_turned(
    typing: Any, array: Any, index: Any, step: Any, a: Any, b: Any, c: Any, d: Any
) -> Any:
    """The reverse: four `Floats` as four columns of eight rows."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i, row in enumerate(_turned(builder, *args[3:])):
            for half in (0, 4):
                at = _row_address(context, builder, signature, args, i + half)
                builder.store(_pick(builder, row, range(half, half + 4)), at, align=1)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64, Floats, Floats, Floats, Floats), codegen


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Ask for a line of memory that will be read soon; any address is allowed."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.bitcast(_address(context, builder, signature.args[0], *args), _I8.as_pointer())
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), [at, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


# --- arithmetic ----------------------------------------------------------------------------------


def _rounded(builder: Any, value: Any) -> Any:
    return _call(builder, "llvm.rint.v8f32", Floats.vector, [value])


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _exponential(builder: Any, x: Any) -> Any:
    """e^x = 2^n e^r with n = rint(x / ln 2); e^r by a polynomial (Cephes expf), to 2 ulp."""
    low, high = _constant(Floats.vector, -87.0), _constant(Floats.vector, 88.0)
    x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
    x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
    power = _rounded(builder, builder.fmul(x, _constant(Floats.vector, 1.4426950216293335)))
    # ln 2 in two parts, the first of which has so few bits that the product is exact
    rest = _fma(builder, power, _constant(Floats.vector, -0.693359375), x)
    rest = _fma(builder, power, _constant(Floats.vector, 2.1219444170128554e-4), rest)
    series = _constant(Floats.vector, _EXPONENTIAL[0])
    for factor in _EXPONENTIAL[1:]:
        series = _fma(builder, series, rest, _constant(Floats.vector, factor))
    value = _fma(builder, series, builder.fmul(rest, rest), rest)
    value = builder.fadd(value, _constant(Floats.vector, 1.0))
    exponent = builder.add(builder.fptosi(power, Ints.vector), _constant(Ints.vector, 127))
    scale = builder.shl(exponent, _constant(Ints.vector, 23))
    return builder.fmul(value, builder.bitcast(scale, Floats.vector))


_EXPONENTIAL = (
    1.9875691214110702e-4,
    1.398199936375022e-3,
    8.333452045917511e-3,
    4.166579619050026e-2,
    1.6666665673255920e-1,
    5.0000000000000000e-1,
)


def _largest_or_nan(builder: Any, a: Any, b: Any) -> Any:
    take = builder.or_(builder.fcmp_ordered(">", a, b), builder.fcmp_unordered("uno", a, a))
    return builder.select(take, a, b)


def _smallest_or_nan(builder: Any, a: Any, b: Any) -> Any:
    take = builder.or_(builder.fcmp_ordered("<", a, b), builder.fcmp_unordered("uno", a, a))
    return builder.select(take, a, b)


def _unless_hidden(builder: Any, score: Any, weight: Any) -> Any:
    hidden = builder.fcmp_ordered("==", score, _constant(Floats.vector, float("-inf")))
    return builder.select(hidden, _constant(Floats.vector, 0.0), weight)


zero_floats = _operation(Floats, 0, lambda builder: _constant(Floats.vector, 0.0))
zero_ints = _operation(Ints, 0, lambda builder: _constant(Ints.vector, 0))
zero_shorts = _operation(Shorts, 0, lambda builder: _constant(Shorts.vector, 0))
add_floats = _operation(Floats, 2, lambda builder, a, b: builder.fadd(a, b))
add_ints = _operation(Ints, 2, lambda builder, a, b: builder.add(a, b))
add_shorts = _operation(Shorts, 2, lambda builder, a, b: builder.add(a, b))
subtract = _operation(Floats, 2, lambda builder, a, b: builder.fsub(a, b))
negated = _operation(Floats, 1, lambda builder, a: builder.fneg(a))
multiply = _operation(Floats, 2, lambda builder, a, b: builder.fmul(a, b))
divide = _operation(Floats, 2, lambda builder, a, b: builder.fdiv(a, b))
exponential = _operation(Floats, 1, _exponential)
"""e^x; below -87 that of -87 and above 88 that of 88."""
magnitude = _operation(
    Floats, 1, lambda builder, a: _call(builder, "llvm.fabs.v8f32", Floats.vector, [a])
)
larger = _operation(Floats, 2, _larger)
"""The larger of two; b where one of them is NaN."""
largest_or_nan = _operation(Floats, 2, _largest_or_nan)
smallest_or_nan = _operation(Floats, 2, _smallest_or_nan)
unless_hidden = _operation(Floats, 2, _unless_hidden)
"""b, but 0 in lanes where a is -infinity."""
low_nibbles = _operation(Bytes, 1, lambda builder, a: builder.and_(a, _constant(Bytes.vector, 15)))
high_nibbles = _operation(Bytes, 1, lambda builder, a: builder.lshr(a, _constant(Bytes.vector, 4)))
sum_pairs = _operation(
    Ints, 1, lambda builder, a: _madd_shorts(builder, a, _constant(Shorts.vector, 1))
)
"""Neighbours of `Shorts` added."""
to_floats = _operation(Floats, 1, lambda builder, a: builder.sitofp(a, Floats.vector))
to_ints = _operation(Ints, 1, lambda builder, a: builder.fptosi(_rounded(builder, a), Ints.vector))
"""Rounded to the nearest, ties to even."""
total = _operation(
    types.float32, 1, lambda builder, a: _halves(builder, a, lambda b, x, y: b.fadd(x, y))
)
total_ints = _operation(
    types.int32, 1, lambda builder, a: _halves(builder, a, lambda b, x, y: b.add(x, y))
)
largest = _operation(types.float32, 1, lambda builder, a: _halves(builder, a, _larger))
most = _operation(types.float32, 1, lambda builder, a: _halves(builder, a, _largest_or_nan))
"""The largest lane, NaN if there is one."""
least = _operation(types.float32, 1, lambda builder, a: _halves(builder, a, _smallest_or_nan))


@intrinsic
def repeated(typing: Any, scalar: Any) -> Any:
    """A float32 in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _repeat(builder, args[0], 8)

    return Floats(types.float32), codegen


@intrinsic
def lane(typing: Any, vector: Any, index: Any) -> Any:
    """One lane of `Floats`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.extract_element(args[0], builder.trunc(args[1], _I32))

    return types.float32(Floats, types.int64), codegen


@intrinsic
def opaque(typing: Any, number: Any) -> Any:
    """The same integer, but unknown to the optimizer: a short loop over it is not unrolled.

    Unrolled, the loops of a tile want more registers than there are.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.asm(ir.FunctionType(_I64, [_I64]), "", "=r,0", [args[0]], True)

    return types.int64(types.int64), codegen
