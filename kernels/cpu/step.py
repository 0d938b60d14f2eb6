"""A decoder's whole step as one compiled call: what a CUDA graph is to a GPU.

A step is a **program**: a table of phases that the members of a team run one after the other,
sharing the chunks of each (see `chunks`). For 30 layers these are some 300 phases, and no Python
lies between them.

    first   embed
    layer   input norm, project (q, k, v), rotate, write (K and V), attend, combine (the parts of a
            long context), round, add output, MLP norm, gate (and up), round, add down
    last    final norm, logits

To round is to make the integers that an integer weight is multiplied with; norms do it at once, and
`gate` too where a group is enough for it.

All that differs between models, formats and batches stands in tables of int64 (`step_tables`),
addresses of memory included, so that one variant is compiled for all. `decoder` fills them.
"""

import os
import time

from numba import types

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
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.voidptr))


@kernel
def run_program(counters, step, program, layers, model, batch, kv, plan, epsilon):
    """All phases of `program`, int64 [phases, PHASE_WORDS], for a member of a team.

    `layers` int64 [num_layers, LAYER_WORDS]; `model`, `batch`, `kv`, `plan` are int64 tables.
    """
    base = 0
    for number in range(program.shape[0]):
        chunks = program[number, t.CHUNKS]
        finished = False
        while True:
            chunk = next_chunk(counters, step, base, chunks, finished)
            if chunk == NONE:
                break
            if TELLS_TIME and chunk == 0:
                _clock_gettime(_CLOCK, pointer(batch[t.AT_STAMPS] + 16 * number))
            _run_chunk(program[number], chunk, layers, model, batch, kv, plan, epsilon)
            finished = True
        base += chunks


@kernel
def _run_chunk(phase, chunk, layers, model, batch, kv, plan, epsilon):
    """One chunk of a phase."""
    kind, layer, each = phase[t.PHASE], phase[t.LAYER], phase[t.EACH]
    first, words = chunk * each, layers[layer]
    rows = batch[t.NUM_SAMPLES] if kind >= t.FINAL_NORM else batch[t.NUM_ROWS]
    count = min(each, rows - first)
    hidden, qkv = floats_at(batch[t.AT_HIDDEN]), floats_at(batch[t.AT_QKV])
    attended = floats_at(batch[t.AT_ATTENDED])
    size, width = model[t.HIDDEN_SIZE], model[t.NUM_HEADS] * model[t.HEAD_DIM]
    if kind == t.EMBED:
        _embed(model, batch, hidden, first, count)
    elif kind == t.INPUT_NORM:
        norm = words[t.AT_INPUT_NORM]
        _norm_rows(words, t.QKV, norm, model, batch, epsilon, rows, first, count, False)
    elif kind == t.PROJECT:
        out = words[t.QKV + t.OUT]
        normed = floats_at(batch[t.AT_NORMED])
        _product(
            words, t.QKV, model, batch, t.NORMED_CODES, normed, rows, qkv, out, first, each, False
        )
    elif kind == t.ROTATE:
        _rotate(words, model, batch, qkv, epsilon, first, count)
    elif kind == t.WRITE:
        write_chunk(kv, plan, layer, qkv, chunk)
    elif kind == t.ATTEND:
        attend_chunk(kv, plan, layer, words[t.WINDOW_KIND], qkv, attended, chunk)
    elif kind == t.COMBINE:
        combine_chunk(kv, plan, words[t.WINDOW_KIND], attended, chunk)
    elif kind == t.ROUND_ATTENDED:
        for row in range(first, first + count):
            _round_row(words, t.OUTPUT, model, batch, t.NORMED_CODES, attended, row, width, rows)
    elif kind == t.ADD_OUTPUT:
        _product(
            words, t.OUTPUT, model, batch, t.NORMED_CODES, attended, rows, hidden, size, first,
            each, True,
        )  # fmt: skip
    elif kind == t.MLP_NORM:
        norm = words[t.AT_MLP_NORM]
        _norm_rows(words, t.GATE_UP, norm, model, batch, epsilon, rows, first, count, False)
    elif kind == t.GATE:
        _gate(words, model, batch, rows, first, each)
    elif kind == t.ROUND_GATED:
        gated, inner = floats_at(batch[t.AT_GATED]), model[t.INNER_SIZE]
        for row in range(first, first + count):
            _round_row(words, t.DOWN, model, batch, t.GATED_CODES, gated, row, inner, rows)
    elif kind == t.ADD_DOWN:
        gated = floats_at(batch[t.AT_GATED])
        _product(
            words, t.DOWN, model, batch, t.GATED_CODES, gated, rows, hidden, size, first, each, True
        )
    elif kind == t.FINAL_NORM:
        norm = model[t.AT_FINAL_NORM]
        _norm_rows(model, t.HEAD, norm, model, batch, epsilon, rows, first, count, True)
    else:
        out, logits = model[t.HEAD + t.OUT], floats_at(batch[t.AT_LOGITS])
        normed = floats_at(batch[t.AT_NORMED])
        _product(
            model, t.HEAD, model, batch, t.NORMED_CODES, normed, rows, logits, out, first, each,
            False,
        )  # fmt: skip


# --- what is shared by rows ----------------------------------------------------------------------


@kernel
def _embed(model, batch, hidden, first, count):
    """The rows of the embedding, of any format."""
    size, embedding = model[t.HIDDEN_SIZE], floats_at(model[t.AT_EMBEDDING])
    token_ids = longs_at(batch[t.AT_TOKEN_IDS])
    for row in range(first, first + count):
        for k in range(0, size, 8):
            values = load_floats(embedding, token_ids[row] * size + k)
            store_floats(hidden, row * size + k, values)


@kernel
def _norm_rows(words, weight, at_norm, model, batch, epsilon, rows, first, count, sampled):
    """Norm of hidden rows, or of those `sampled` from, rounded as `words[weight]` needs it."""
    size, norm = model[t.HIDDEN_SIZE], floats_at(at_norm)
    hidden, normed = floats_at(batch[t.AT_HIDDEN]), floats_at(batch[t.AT_NORMED])
    for row in range(first, first + count):
        of = longs_at(batch[t.AT_SAMPLE_ROWS])[row] if sampled else row
        rms_norm(hidden, of * size, norm, 0, epsilon, size, normed, row * size)
        _round_row(words, weight, model, batch, t.NORMED_CODES, normed, row, size, rows)


@kernel
def _round_row(words, weight, model, batch, codes, x, row, width, rows):
    """Row `row` of x [rows, width] as the integers that a weight's format asks for."""
    kind = words[weight + t.FORMAT]
    if kind == t.INT4:
        groups = width // GROUP
        quantize_groups(
            x, row * width, codes_at(batch[codes + t.AT_CODES8]),
            floats_at(batch[codes + t.AT_SCALES8]), floats_at(batch[codes + t.AT_SUMS]),
            row * groups, groups, model[t.PLANES], rows * groups,
        )  # fmt: skip
    elif kind != t.FP32:
        codes16, scales = batch[codes + t.AT_CODES16], batch[codes + t.AT_SCALES16]
        quantize_row(x, row * width, shorts_at(codes16), floats_at(scales), row, width)


@inlined
def _rotate_head(qkv, at, cos, sin, angle, half):
    for i in range(0, half, 8):
        first, second = load_floats(qkv, at + i), load_floats(qkv, at + half + i)
        c, s = load_floats(cos, angle + i), load_floats(sin, angle + i)
        minus = multiply(multiply(second, s), repeated(-1.0))
        store_floats(qkv, at + i, fma(first, c, minus))
        store_floats(qkv, at + half + i, fma(first, s, multiply(second, c)))


@kernel
def _rotate(words, model, batch, qkv, epsilon, first, count):
    """Bias, norm of heads, and rotary position, of q and k. Su et al. 2021, RoFormer."""
    heads, kv_heads, head_dim = model[t.NUM_HEADS], model[t.NUM_KV_HEADS], model[t.HEAD_DIM]
    positions, half = longs_at(batch[t.AT_POSITIONS]), head_dim // 2
    cos, sin = floats_at(model[t.AT_COS]), floats_at(model[t.AT_SIN])
    bias, width = words[t.QKV + t.AT_BIAS], words[t.QKV + t.OUT]
    for row in range(first, first + count):
        if bias != 0:
            for k in range(0, width, 8):
                summed = add_floats(
                    load_floats(qkv, row * width + k), load_floats(floats_at(bias), k)
                )
                store_floats(qkv, row * width + k, summed)
        for head in range(heads + kv_heads):
            at = row * width + head * head_dim
            norm = words[t.AT_Q_NORM] if head < heads else words[t.AT_K_NORM]
            if norm != 0:
                rms_norm(qkv, at, floats_at(norm), 0, epsilon, head_dim, qkv, at)
            _rotate_head(qkv, at, cos, sin, positions[row] * half, half)


# --- what is shared by panels --------------------------------------------------------------------


@kernel
def _product(words, weight, model, batch, codes, x, rows, y, y_row, panel, panels, accumulate):
    """Panels of x W^T for all rows, set or added to y; the last chunk may have fewer of them."""
    out, width, kind = words[weight + t.OUT], words[weight + t.WIDTH], words[weight + t.FORMAT]
    panels = min(panels, -(-out // PANEL) - panel)
    data = words[weight + t.AT_DATA]
    if kind == t.FP32:
        first = PANEL * panel
        count = min(PANEL * panels, out - first)
        fp32_rows(floats_at(data), 0, width, x, 0, 0, rows, y, 0, y_row, first, count, accumulate)
    elif kind == t.INT4:
        codes8, scales = codes_at(batch[codes + t.AT_CODES8]), batch[codes + t.AT_SCALES8]
        int4_rows(
            bytes_at(data), 0, out, width, codes8, floats_at(scales),
            floats_at(batch[codes + t.AT_SUMS]), model[t.PLANES], rows * width // GROUP, 0, rows, y,
            0, y_row, panel, panels, accumulate,
        )  # fmt: skip
    else:
        codes16, scales = shorts_at(batch[codes + t.AT_CODES16]), batch[codes + t.AT_SCALES16]
        int8_rows(
            bytes_at(data), 0, floats_at(words[weight + t.AT_SCALES]), kind == t.Q8_0, out, width,
            codes16, floats_at(scales), 0, rows, y, 0, y_row, panel, panels, accumulate,
        )  # fmt: skip


@kernel
def _gate(words, model, batch, rows, panel, panels):
    """Panels of the gate and the same of up, joined at once while they are in the cache."""
    inner = model[t.INNER_SIZE]
    panels = min(panels, inner // PANEL - panel)
    normed, gate_up = floats_at(batch[t.AT_NORMED]), floats_at(batch[t.AT_GATE_UP])
    for first in (panel, panel + inner // PANEL):
        _product(
            words, t.GATE_UP, model, batch, t.NORMED_CODES, normed, rows, gate_up, 2 * inner, first,
            panels, False,
        )  # fmt: skip
    gated, width = floats_at(batch[t.AT_GATED]), PANEL * panels
    for row in range(rows):
        gate, to = 2 * inner * row + PANEL * panel, inner * row + PANEL * panel
        silu_multiply(gate_up, gate, gate_up, gate + inner, width, gated, to)
        if words[t.DOWN + t.FORMAT] == t.INT4:  # whose groups lie within these panels
            codes = t.GATED_CODES
            quantize_groups(
                gated, to, codes_at(batch[codes + t.AT_CODES8]),
                floats_at(batch[codes + t.AT_SCALES8]), floats_at(batch[codes + t.AT_SUMS]),
                to // GROUP, width // GROUP, model[t.PLANES], rows * inner // GROUP,
            )  # fmt: skip
