"""How threads share a step: whoever is there takes the next chunk. The compiled half of `team`.

A *step* is one call of a compiled function by all members of a team. It consists of *phases*, one
after the other; a phase is a number of *chunks* that may run in any order, by anyone. A phase
begins when every chunk of those before it is finished.

One word of 64 bits holds the state of a step:

    number of the step (23 bits) | chunks finished since it began (20) | chunks taken (20)

**Invariant: only chunks that someone has taken are waited for.** A chunk is taken by raising the
word from a value that names this step, in one atomic operation (which also reports the chunk that
was finished before). So

- a member that has not arrived yet, or that sleeps between two chunks, delays nobody: the others
  take all chunks, and whoever comes late finds them taken and runs through what is left of the step
  without touching anything but this word;
- the step is over when the caller has seen all its chunks finished. Nobody then holds a chunk of
  it, so its arrays may be reused at once, while late members still run through the step. They
  cannot take a chunk of the next one, because its number differs.

A member that waits spins for some microseconds, then gives its processor away with `sched_yield`,
and after some thousand of those sleeps 50 us at a time: then the chunk's owner has lost its
processor, and to spin would take it from the owner.

Which member runs a chunk must not show in its result: a chunk writes elements that no other chunk
writes, and computes each in a fixed order.
"""

import os
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .compiled import inlined, kernel
from .target import TARGET

NONE = -1
"""What `next_chunk` returns when its phase is over."""
MOST_CHUNKS = (1 << 20) - 1
"""Of one step."""

_ONE_FINISHED, _STEP, _LAST_STEP = 20, 40, (1 << 23) - 1
_SPINS, _YIELDS = 400, 2000

CAN_SHARE = os.name == "posix"
"""Whether there are `sched_yield` and `usleep`, with which members wait; else teams are of one."""

_I64 = ir.IntType(64)


def new_counters() -> np.ndarray:
    """The state of a team, before its first step: the word, alone on its cache lines."""
    return np.zeros(48, np.int64)[16:32]


# --- atomic operations ---------------------------------------------------------------------------


def _word(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """The address of the word, the first element of the array that is the first argument."""
    return context.make_array(signature.args[0])(context, builder, args[0]).data


@intrinsic
def _read(typing: Any, array: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(context, builder, signature, args), "acquire", 8)

    return types.int64(array), codegen


@intrinsic
def _write(typing: Any, array: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(context, builder, signature, args), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def _add(typing: Any, array: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.atomic_rmw("add", _word(context, builder, signature, args), args[1], "acq_rel")
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def _replace(typing: Any, array: Any, before: Any, after: Any) -> Any:
    """Write `after` if the value is `before`; returns whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _word(context, builder, signature, args)
        pair = builder.cmpxchg(at, args[1], args[2], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(array, types.int64, types.int64), codegen


@intrinsic
def _pause(typing: Any) -> Any:
    """Tell the processor that this is a waiting loop."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if TARGET == "avx2":
            signature = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, signature, name), [])
        return context.get_dummy_value()

    return types.void(), codegen


_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


# --- steps, phases and chunks --------------------------------------------------------------------


@inlined
def _wait(waited):
    """Wait a little, for the `waited`-th time in a row; returns the next count."""
    if waited < _SPINS:
        _pause()
    elif waited < _SPINS + _YIELDS:
        _sched_yield()
    else:
        _usleep(np.uint32(50))
    return waited + 1


@inlined
def _finished(word):
    return word >> _ONE_FINISHED & MOST_CHUNKS


@kernel
def begin_step(counters):
    """Begin a step and return its number, after the one before has come to rest.

    Of a step that was left before its end, no more chunks are given out and those taken are waited
    for. To abandon a step is therefore to begin another.
    """
    counts = (1 << _STEP) - 1
    while True:
        now = _read(counters)
        step = (now >> _STEP) % _LAST_STEP + 1
        if _replace(counters, now, step << _STEP | now & counts):
            break
    waited = 0
    while _finished(now) < now & MOST_CHUNKS:
        waited = _wait(waited)
        now = _read(counters)
    _write(counters, step << _STEP)
    return step


@kernel
def next_chunk(counters, step, base, count, finished):
    """Take a chunk of a phase.

    `base` is the number of chunks in all phases before this one and `count` that in this phase;
    `finished` says whether the caller has finished a chunk that it took before. Returns the chunk's
    number in the phase, or `NONE` when all chunks of the phase are finished, or the step is over.
    """
    end = base + count
    report = 1 << _ONE_FINISHED if finished else 0
    waited = 0
    while True:
        now = _read(counters)
        taken = now & MOST_CHUNKS
        if now >> _STEP == step and taken < end:
            if _replace(counters, now, now + report + 1):
                return taken - base
        elif report:
            _add(counters, report)
            report = 0
        elif now >> _STEP != step or _finished(now) >= end:
            return NONE
        else:
            waited = _wait(waited)
