"""How threads share a step: whoever is there takes the next chunk. The compiled half of `team`.

A *step* is one call of a compiled function by all members of a team. It consists of *phases*, one
after the other; a phase is a number of *chunks* that may run in any order, by anyone. A phase
begins when every chunk of those before it is finished.

Two counters hold the whole state of a step:

    taken     step number (high 32 bits) | chunks taken since the step began (low 32 bits)
    finished  chunks finished since the step began

**Invariant: only chunks that someone has taken are waited for.** A chunk is taken by raising
`taken` from a value that names this step, in one atomic operation. So

- a member that has not arrived yet, or that sleeps between two chunks, delays nobody: the others
  take all chunks, and whoever comes late finds them taken and runs through what is left of the step
  without touching anything but these two counters;
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

TAKEN, FINISHED, COUNTERS = 0, 16, 32
"""Where the counters lie in an array of int64, each on its own pair of cache lines."""
NONE = -1
"""What `next_chunk` returns when its phase is over."""

_STEP_BITS, _COUNT_MASK = 32, 0xFFFFFFFF
_SPINS, _YIELDS = 400, 2000

CAN_SHARE = os.name == "posix"
"""Whether there are `sched_yield` and `usleep`, with which members wait; else teams are of one."""

_I64 = ir.IntType(64)


def new_counters() -> np.ndarray:
    """The counters of a team, before its first step."""
    return np.zeros(COUNTERS, np.int64)


# --- atomic operations ---------------------------------------------------------------------------


def _address(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


@intrinsic
def _read(typing: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(_address(context, builder, signature, args), "acquire", 8)

    return types.int64(array, types.int64), codegen


@intrinsic
def _write(typing: Any, array: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(context, builder, signature, args)
        builder.store_atomic(args[2], at, "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), codegen


@intrinsic
def _add_one(typing: Any, array: Any, index: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(context, builder, signature, args)
        builder.atomic_rmw("add", at, _I64(1), "acq_rel")
        return context.get_dummy_value()

    return types.void(array, types.int64), codegen


@intrinsic
def _exchange(typing: Any, array: Any, index: Any, value: Any) -> Any:
    """Write a value; returns the one before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(context, builder, signature, args)
        return builder.atomic_rmw("xchg", at, args[2], "acq_rel")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def _replace(typing: Any, array: Any, index: Any, before: Any, after: Any) -> Any:
    """Write `after` if the value is `before`; returns whether it was."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = _address(context, builder, signature, args)
        pair = builder.cmpxchg(at, args[2], args[3], "acq_rel", "acquire")
        return builder.extract_value(pair, 1)

    return types.boolean(array, types.int64, types.int64, types.int64), codegen


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


@kernel
def begin_step(counters):
    """Begin a step and return its number, after the one before has come to rest.

    Of a step that was left before its end, no more chunks are given out and those taken are waited
    for. To abandon a step is therefore to begin another.
    """
    step = (_read(counters, TAKEN) >> _STEP_BITS) + 1
    if step >= 1 << 31:
        step = 1
    before = _exchange(counters, TAKEN, step << _STEP_BITS)
    waited = 0
    while _read(counters, FINISHED) < before & _COUNT_MASK:
        waited = _wait(waited)
    _write(counters, FINISHED, 0)
    return step


@kernel
def next_chunk(counters, step, base, count, finished):
    """Take a chunk of a phase.

    `base` is the number of chunks in all phases before this one and `count` that in this phase;
    `finished` says whether the caller has finished a chunk that it took before. Returns the chunk's
    number in the phase, or `NONE` when all chunks of the phase are finished, or the step is over.
    """
    if finished:
        _add_one(counters, FINISHED)
    end = base + count
    waited = 0
    while True:
        now = _read(counters, TAKEN)
        if now >> _STEP_BITS != step:
            return NONE
        taken = now & _COUNT_MASK
        if taken < end:
            if _replace(counters, TAKEN, now, now + 1):
                return taken - base
        elif _read(counters, FINISHED) >= end:
            return NONE
        else:
            waited = _wait(waited)
