"""A decoder's whole step as one compiled call: what a CUDA graph is to a GPU.

A step is a **program**: a table of phases that the members of a team run one after the other,
sharing the chunks of each (see `chunks`). A phase names a function by its address, and what that
reads and writes. For 30 layers these are some 300 phases, and no Python lies between them.

    first   embed
    layer   input norm, project (q, k, v), rotate, write (K and V), attend, combine (the parts of a
            long context), round, output, MLP norm, gate and up, gate, down
    last    final norm, logits

To round is to make the integers that an integer weight is multiplied with; norms and gate do it
at once.

All that differs between models, formats and batches stands in tables of int64 (`step_tables`),
addresses of memory included, so that each function is compiled once. `decoder` fills them. That the
functions are called by address is for the compiler's sake: it would else compile each of them anew
into all that call it.
"""

import os
import time
from typing import Any

from numba import types
from numba.core import cgutils
from numba.core.callconv import RETCODE_NONE, RETCODE_OK
from numba.extending import intrinsic

from . import step_tables as t
from .activations import quantize_groups, quantize_row
from .attention_chunks import attend_chunk, combine_chunk, write_chunk
from .chunks import NONE, next_chunk
from .compiled import inlined, kernel
from .elementwise import rms_norm, silu_multiply
from .memory import bytes_at, codes_at, floats_at, longs_at, pointer, shorts_at
from .product_fp32 import fp32_rows
from .product_int4 import int4_rows
from .product_int8 import int8_rows
from .simd import add_floats, fma, load_floats, multiply, repeated, store_floats
from .weights import GROUP, PANEL

TELLS_TIME = os.name == "posix"
_CLOCK = time.CLOCK_MONOTONIC if TELLS_TIME else 0


def now_s() -> float:
    """The clock of the stamps."""
    return time.clock_gettime(_CLOCK) if TELLS_TIME else time.perf_counter()


_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))


@intrinsic
def _call(typing, function, phase, chunk, model, batch, kv, plan, epsilon):  # type: ignore[no-untyped-def]
    """Call the kernel at an address, which takes these arguments; returns whether it came through.

    An exception ends it, which can only be that it found no memory for its scratch.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        argument_types = signature.args[1:]
        function_type = context.call_conv.get_function_type(types.none, argument_types)
        callee = builder.inttoptr(args[0], function_type.as_pointer())
        result, error = (cgutils.alloca_once(builder, x.pointee) for x in function_type.args[:2])
        packer = context.call_conv._get_arg_packer(argument_types)
        code = builder.call(callee, [result, error, *packer.as_arguments(builder, args[1:])])
        done = (builder.icmp_signed("==", code, x) for x in (RETCODE_OK, RETCODE_NONE))
        return builder.or_(*done)

    return types.boolean(types.int64, phase, chunk, model, batch, kv, plan, epsilon), codegen


@kernel
def run_program(counters, step, program, model, batch, kv, plan, epsilon):
    """All phases of `program`, int64 [phases, PHASE_WORDS], for a member of a team.

    `model`, `batch`, `kv`, `plan` are int64 tables. What fails is told there.
    """
    base = 0
    for number in range(program.shape[0]):
        phase, chunks = program[number], program[number, t.CHUNKS]
        finished = False
        while True:
            chunk = next_chunk(counters, step, base, chunks, finished)
            if chunk == NONE:
                break
            if TELLS_TIME and chunk == 0:
                _clock_gettime(_CLOCK, pointer(batch[t.AT_STAMPS] + 16 * number))
            if not _call(phase[t.AT_FUNCTION], phase, chunk, model, batch, kv, plan, epsilon):
                batch[t.FAILED] = 1  # and the step goes on: nobody may wait for a chunk in vain
            finished = True
        base += chunks


@inlined
def _rows_of(phase, chunk, batch):
    """The rows of a chunk: their first, their end, and how many there are in all."""
    rows, each = batch[phase[t.ROWS]], phase[t.EACH]
    return chunk * each, min(chunk * each + each, rows), rows


# --- shared by rows ------------------------------------------------------------------------------


@kernel
def embed(phase, chunk, model, batch, kv, plan, epsilon):
    """Rows of the embedding."""
    first, end, _ = _rows_of(phase, chunk, batch)
    size, embedding = model[t.HIDDEN_SIZE], floats_at(model[t.AT_EMBEDDING])
    token_ids, hidden = longs_at(batch[t.AT_TOKEN_IDS]), floats_at(batch[t.AT_HIDDEN])
    for row in range(first, end):
        for k in range(0, size, 8):
            values = load_floats(embedding, token_ids[row] * size + k)
            store_floats(hidden, row * size + k, values)


@kernel
def norm(phase, chunk, model, batch, kv, plan, epsilon):
    """Norm of hidden rows, or of those that are sampled from, rounded as the weight needs it."""
    first, end, rows = _rows_of(phase, chunk, batch)
    size, factors, sampled = model[t.HIDDEN_SIZE], floats_at(phase[t.AT_MORE]), phase[t.ROWS] != 0
    hidden, normed = floats_at(batch[t.AT_HIDDEN]), floats_at(batch[t.AT_NORMED])
    for row in range(first, end):
        of = longs_at(batch[t.AT_SAMPLE_ROWS])[row] if sampled else row
        rms_norm(hidden, of * size, factors, 0, epsilon, size, normed, row * size)
        _round_row(phase, model, batch, normed, row, size, rows)


@kernel
def round_rows(phase, chunk, model, batch, kv, plan, epsilon):
    """Rows as the integers that a weight is multiplied with."""
    first, end, rows = _rows_of(phase, chunk, batch)
    x, width = floats_at(batch[phase[t.X]]), longs_at(phase[t.AT_WEIGHT])[t.WIDTH]
    for row in range(first, end):
        _round_row(phase, model, batch, x, row, width, rows)


@kernel
def gate(phase, chunk, model, batch, kv, plan, epsilon):
    """Gate and up of each row joined, and rounded for the weight that follows."""
    first, end, rows = _rows_of(phase, chunk, batch)
    inner, gate_up = model[t.INNER_SIZE], floats_at(batch[t.AT_GATE_UP])
    gated = floats_at(batch[t.AT_GATED])
    for row in range(first, end):
        at = 2 * inner * row
        silu_multiply(gate_up, at, gate_up, at + inner, inner, gated, inner * row)
        _round_row(phase, model, batch, gated, row, inner, rows)


@inlined
def _round_row(phase, model, batch, x, row, width, rows):
    """Row `row` of x [rows, width] as the weight's format asks for."""
    kind, codes, at = longs_at(phase[t.AT_WEIGHT])[t.FORMAT], phase[t.CODES], row * width
    if kind == t.INT4:
        quantize_groups(
            x, at, codes_at(batch[codes + t.AT_CODES8]), floats_at(batch[codes + t.AT_SCALES8]),
            floats_at(batch[codes + t.AT_SUMS]), at // GROUP, width // GROUP, model[t.PLANES],
            rows * width // GROUP,
        )  # fmt: skip
    elif kind != t.FP32:
        codes16, scales = batch[codes + t.AT_CODES16], batch[codes + t.AT_SCALES16]
        quantize_row(x, at, shorts_at(codes16), floats_at(scales), row, width)


@inlined
def _rotate_head(qkv, at, cos, sin, angle, half):
    for i in range(0, half, 8):
        first, second = load_floats(qkv, at + i), load_floats(qkv, at + half + i)
        c, s = load_floats(cos, angle + i), load_floats(sin, angle + i)
        minus = multiply(multiply(second, s), repeated(-1.0))
        store_floats(qkv, at + i, fma(first, c, minus))
        store_floats(qkv, at + half + i, fma(first, s, multiply(second, c)))


@kernel
def rotate(phase, chunk, model, batch, kv, plan, epsilon):
    """Bias of q, k, v; norm of heads and rotary position of q, k. Su et al. 2021, RoFormer."""
    first, end, _ = _rows_of(phase, chunk, batch)
    words, qkv = longs_at(phase[t.AT_MORE]), floats_at(batch[t.AT_QKV])
    heads, kv_heads, head_dim = model[t.NUM_HEADS], model[t.NUM_KV_HEADS], model[t.HEAD_DIM]
    positions, half = longs_at(batch[t.AT_POSITIONS]), head_dim // 2
    cos, sin = floats_at(model[t.AT_COS]), floats_at(model[t.AT_SIN])
    bias, width = words[t.QKV + t.AT_BIAS], words[t.QKV + t.OUT]
    for row in range(first, end):
        if bias != 0:
            for k in range(0, width, 8):
                at = row * width + k
                summed = add_floats(load_floats(qkv, at), load_floats(floats_at(bias), k))
                store_floats(qkv, at, summed)
        for head in range(heads + kv_heads):
            at = row * width + head * head_dim
            factors = words[t.AT_Q_NORM] if head < heads else words[t.AT_K_NORM]
            if factors != 0:
                rms_norm(qkv, at, floats_at(factors), 0, epsilon, head_dim, qkv, at)
            _rotate_head(qkv, at, cos, sin, positions[row] * half, half)


# --- attention -----------------------------------------------------------------------------------


@kernel
def write(phase, chunk, model, batch, kv, plan, epsilon):
    """K and V of some rows, into the cache."""
    write_chunk(kv, plan, phase[t.LAYER], floats_at(batch[t.AT_QKV]), chunk)


@kernel
def attend(phase, chunk, model, batch, kv, plan, epsilon):
    """Some queries and keys."""
    qkv, attended = floats_at(batch[t.AT_QKV]), floats_at(batch[t.AT_ATTENDED])
    attend_chunk(kv, plan, phase[t.LAYER], phase[t.WINDOW_KIND], qkv, attended, chunk)


@kernel
def combine(phase, chunk, model, batch, kv, plan, epsilon):
    """The parts of a context that several chunks attended to."""
    combine_chunk(kv, plan, phase[t.WINDOW_KIND], floats_at(batch[t.AT_ATTENDED]), chunk)


# --- shared by panels ----------------------------------------------------------------------------


@kernel
def multiply_panels(phase, chunk, model, batch, kv, plan, epsilon):
    """Panels of x W^T for all rows, set or added to y."""
    weight, codes, rows = longs_at(phase[t.AT_WEIGHT]), phase[t.CODES], batch[phase[t.ROWS]]
    x, y = floats_at(batch[phase[t.X]]), floats_at(batch[phase[t.Y]])
    out, width, kind = weight[t.OUT], weight[t.WIDTH], weight[t.FORMAT]
    panel, accumulate, data = chunk * phase[t.EACH], phase[t.ACCUMULATE] != 0, weight[t.AT_DATA]
    panels = min(phase[t.EACH], -(-out // PANEL) - panel)
    if kind == t.FP32:
        first = PANEL * panel
        count = min(PANEL * panels, out - first)
        fp32_rows(floats_at(data), 0, width, x, 0, 0, rows, y, 0, out, first, count, accumulate)
    elif kind == t.INT4:
        codes8, scales = codes_at(batch[codes + t.AT_CODES8]), batch[codes + t.AT_SCALES8]
        int4_rows(
            bytes_at(data), 0, out, width, codes8, floats_at(scales),
            floats_at(batch[codes + t.AT_SUMS]), model[t.PLANES], rows * width // GROUP, 0, rows, y,
            0, out, panel, panels, accumulate,
        )  # fmt: skip
    else:
        codes16, scales = shorts_at(batch[codes + t.AT_CODES16]), batch[codes + t.AT_SCALES16]
        int8_rows(
            bytes_at(data), 0, floats_at(weight[t.AT_SCALES]), kind == t.Q8_0, out, width, codes16,
            floats_at(scales), 0, rows, y, 0, out, panel, panels, accumulate,
        )  # fmt: skip


FUNCTIONS = (embed, norm, round_rows, rotate, write, attend, combine, multiply_panels, gate)
"""What a phase may call."""
