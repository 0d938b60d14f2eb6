"""A step ends whatever becomes of its chunks, and says so."""

import numpy as np
import pytest
from pdlab_kernels.cpu.target import TARGET

if TARGET == "torch":
    pytest.skip("compiled steps need Numba", allow_module_level=True)

from pdlab_kernels.cpu import step_tables as t
from pdlab_kernels.cpu.ahead import _address
from pdlab_kernels.cpu.compiled import kernel
from pdlab_kernels.cpu.step import run_program
from pdlab_kernels.cpu.team import Team


@kernel
def want_room(phase, chunk, model, batch, kv, plan, epsilon):
    """Chunk 1 needs so many floats."""
    room = np.empty(phase[t.EACH] if chunk == 1 else 1, np.float32)
    room[0] = chunk
    model[chunk] = np.int64(room[0]) + 1


@pytest.mark.parametrize(("floats", "failed"), [(1, 0), (1 << 50, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_chunk_that_finds_no_memory_is_told(threads: int, floats: int, failed: int) -> None:
    program = np.zeros((2, t.PHASE_WORDS), np.int64)
    program[:, t.AT_FUNCTION], program[:, t.CHUNKS], program[:, t.EACH] = _address(want_room), 3, 1
    program[0, t.EACH] = floats
    stamps, done, nothing = np.zeros(4, np.int64), np.zeros(3, np.int64), np.zeros(1, np.int64)
    batch = np.zeros(t.BATCH_WORDS, np.int64)
    batch[t.AT_STAMPS] = stamps.ctypes.data
    with Team(threads) as team:
        team.run(run_program, program, done, batch, nothing, nothing, np.float32(0))
    assert batch[t.FAILED] == failed
    assert done.tolist() == [1, 2, 3]  # of the phase after it
