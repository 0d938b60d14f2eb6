"""Compiling before the first step: some seconds, once for each version of these kernels."""

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import typeof, types
from numba.core import event

from . import step
from .chunks import begin_step, new_counters
from .survey import survey_rows

_PHASE = (
    *(types.Array(types.int64, 1, "C"), types.int64),  # the phase, the chunk
    *[types.Array(types.int64, 1, "C")] * 4,  # model, batch, K and V, plan
    types.float32,  # epsilon
)
"""What every function of a phase takes."""


class _Teller(event.Listener):
    """Tells the name of every function whose compilation begins."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell = tell

    def on_start(self, event: event.Event) -> None:
        self.tell(event.data["dispatcher"].py_func.__name__)

    def on_end(self, event: event.Event) -> None:
        """Nothing is told when it ends."""


def compile_step(tell: Callable[[str], None]) -> None:
    """Have all that a step and its survey need as machine code, from the disk where it lies there.

    `tell` gets the name of each function that has to be compiled.
    """
    word, table = types.int64, types.Array(types.int64, 2, "C")
    floats, matrix = types.Array(types.float32, 1, "C"), types.Array(types.float32, 2, "C")
    longs, counters = types.Array(types.int64, 1, "C"), typeof(new_counters())
    with event.install_listener("numba:compile", _Teller(tell)):
        addresses()
        begin_step.compile((counters,))
        step.run_program.compile((counters, word, table, *_PHASE[2:]))
        survey_rows.compile((floats, word, word, table, matrix, longs))


@cache
def addresses() -> dict[Any, int]:
    """Where the machine code of each of `step.FUNCTIONS` lies."""
    return {function: _address(function) for function in step.FUNCTIONS}


def _address(function: Any) -> int:
    function.compile(_PHASE)
    compiled = function.overloads[_PHASE]
    at: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return at
