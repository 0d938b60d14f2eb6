"""A team's step ends whatever becomes of the helpers, and its result shows nothing of them."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from pdlab_kernels.cpu.target import TARGET

if TARGET == "torch" or os.name != "posix":
    pytest.skip("no teams here", allow_module_level=True)

from pdlab_kernels.cpu.chunks import MOST_CHUNKS, NONE, begin_step, new_counters, next_chunk
from pdlab_kernels.cpu.compiled import kernel
from pdlab_kernels.cpu.team import Team

PHASES, CHUNKS = 40, 8


@kernel
def mix(counters, step, table, work):
    """Row p + 1 of `table` [phases + 1, chunks] from all of row p: an error in order shows."""
    phases, chunks = table.shape[0] - 1, table.shape[1]
    for phase in range(phases):
        finished = False
        while True:
            chunk = next_chunk(counters, step, phase * chunks, chunks, finished)
            if chunk == NONE:
                break
            value = 0.0
            for turn in range(work):
                value = 0.5 * value + table[phase, (chunk + turn) % chunks]
            table[phase + 1, chunk] = value
            finished = True
    return step


@kernel
def count_calls(counters, step, calls):
    """Every member that comes raises `calls` by one, without a chunk: for tests alone."""
    calls[0] += 1


def first_row() -> np.ndarray:
    table = np.zeros((PHASES + 1, CHUNKS))
    table[0] = np.arange(CHUNKS) + 0.1
    return table


def expected(work: int) -> np.ndarray:
    table = first_row()
    with Team(1) as alone:
        alone.run(mix, table, work)
    return table


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Others that want all of the machine."""
    loop = "print(flush=True)\nwhile True: pass"
    others = [
        subprocess.Popen([sys.executable, "-S", "-c", loop], stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for other in others:
            other.stdout.readline()  # it runs
        yield
    finally:
        for other in others:
            other.kill()
            other.communicate()


def in_time(function, seconds: float = 90) -> None:
    """Run in a thread of its own, so that a step that hangs fails and does not hang the tests."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "the step hangs"
    if failed:
        raise failed[0]


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_results_do_not_depend_on_the_number_of_threads(num_threads: int) -> None:
    wanted = expected(200)
    with Team(num_threads) as team:

        def steps() -> None:
            for _ in range(50):
                table = first_row()
                team.run(mix, table, 200)
                np.testing.assert_array_equal(table, wanted)

        in_time(steps)
        assert team.helper_error is None


def test_beside_busy_processes_every_step_ends_and_has_the_same_bits() -> None:
    wanted = expected(3000)
    with Team(3) as team, busy_processes(4):

        def steps() -> None:
            for _ in range(60):
                table = first_row()
                team.run(mix, table, 3000)
                np.testing.assert_array_equal(table, wanted)

        in_time(steps)


def test_helpers_take_chunks() -> None:
    """Without the caller: what a helper finds begun, it does alone."""
    table, wanted = first_row(), expected(10)
    with Team(2) as team:
        counters = team._board.counters

        def nothing(counters: np.ndarray, step: int) -> None:
            thread = threading.Thread(target=mix, args=(counters, step, table, 10))
            thread.start()
            thread.join()

        team.run(nothing)
        assert counters[0] & MOST_CHUNKS == PHASES * CHUNKS
    np.testing.assert_array_equal(table, wanted)


def test_a_member_that_comes_after_the_step_touches_nothing() -> None:
    counters, table = new_counters(), first_row()
    late = begin_step(counters)
    mix(counters, late, table, 10)
    following = begin_step(counters)
    before, counts = table.copy(), counters.copy()
    table[1:] = -1
    mix(counters, late, table, 10)
    assert (table[1:] == -1).all()
    np.testing.assert_array_equal(counters, counts)
    mix(counters, following, table, 10)
    np.testing.assert_array_equal(table, before)


def test_the_next_step_waits_for_a_chunk_that_is_held() -> None:
    counters = new_counters()
    step = begin_step(counters)
    assert next_chunk(counters, step, 0, 4, False) == 0
    began = threading.Event()

    def begin() -> None:
        begin_step(counters)
        began.set()

    thread = threading.Thread(target=begin, daemon=True)
    thread.start()
    while counters[0] >> 40 == step:  # until it has closed the step
        pass
    assert not began.wait(0.05)
    assert next_chunk(counters, step, 0, 4, True) == NONE
    assert began.wait(60)
    thread.join()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_the_caller_leaves_the_team_usable(error) -> None:
    wanted = expected(100)

    def fail(counters: np.ndarray, step: int, table: np.ndarray) -> None:
        if threading.current_thread() is caller:
            raise error
        mix(counters, step, table, 100)

    caller = threading.current_thread()
    with Team(3) as team:
        for _ in range(20):
            with pytest.raises(error):
                team.run(fail, first_row())
            table = first_row()
            team.run(mix, table, 100)
            np.testing.assert_array_equal(table, wanted)


def test_an_exception_in_the_caller_waits_for_a_chunk_that_a_helper_holds() -> None:
    """Or the helper would write into arrays that the caller thinks are its own again."""
    caller, finished = threading.current_thread(), []
    held, goes_on = threading.Event(), threading.Event()

    def fail(counters: np.ndarray, step: int) -> None:
        if threading.current_thread() is caller:
            assert held.wait(60)
            threading.Timer(0.05, goes_on.set).start()
            raise RuntimeError("the caller fails")
        assert next_chunk(counters, step, 0, 2, False) == 0
        held.set()
        assert goes_on.wait(60)
        finished.append(next_chunk(counters, step, 0, 2, True))

    with Team(2) as team:
        with pytest.raises(RuntimeError, match="the caller fails"):
            team.run(fail)
        waited = goes_on.is_set()
    assert waited
    assert finished == [NONE]  # the other chunk is not given out any more


def test_ctrl_c_during_a_step_is_raised_after_it_and_leaves_the_team_usable() -> None:
    wanted, table = expected(20_000), first_row()
    with Team(2) as team:
        timer = threading.Timer(0.001, signal.raise_signal, [signal.SIGINT])
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it comes anywhere in here
            timer.start()
            while True:
                team.run(mix, table, 20_000)
        team.run(mix, table, 20_000)
    np.testing.assert_array_equal(table, wanted)


def test_a_helper_that_fails_is_reported_and_not_missed() -> None:
    def caller_only(counters: np.ndarray, step: int, table: np.ndarray) -> None:
        if threading.current_thread() is not caller:
            came.set()
            raise MemoryError("no room")
        assert came.wait(60)
        mix(counters, step, table, 100)

    caller, came = threading.current_thread(), threading.Event()
    wanted, table = expected(100), first_row()
    with Team(2) as team:
        team.run(caller_only, table)
        np.testing.assert_array_equal(table, wanted)
        team.close()
        assert isinstance(team.helper_error, MemoryError)


def test_closing_ends_the_threads_and_refuses_more_steps() -> None:
    team = Team(3)
    threads = list(team._threads)
    assert all(thread.is_alive() for thread in threads)
    team.close()
    team.close()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(ValueError, match="team: it is closed"):
        team.run(count_calls, np.zeros(1, np.int64))


def test_threads_end_with_a_team_that_nobody_closed() -> None:
    team = Team(2)
    (thread,) = team._threads
    del team
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_steps_of_two_callers_run_one_after_the_other() -> None:
    wanted = expected(500)
    with Team(2) as team:

        def steps() -> None:
            for _ in range(20):
                table = first_row()
                team.run(mix, table, 500)
                np.testing.assert_array_equal(table, wanted)

        other = threading.Thread(target=steps, daemon=True)
        other.start()
        in_time(steps)
        other.join(60)
        assert not other.is_alive()


def test_a_step_keeps_no_arrays_alive() -> None:
    calls = np.zeros(1, np.int64)
    with Team(2) as team:
        team.run(count_calls, calls)
        assert team._board.job is None
    assert 1 <= calls[0] <= 2
    assert sys.getrefcount(calls) == 2


@pytest.mark.parametrize("num_threads", [0, -1])
def test_a_team_of_none_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads={num_threads}: a team has at least one"):
        Team(num_threads)


def test_the_default_is_a_thread_a_processor() -> None:
    with Team() as team:
        assert 1 <= team.num_threads <= (os.cpu_count() or 1)


def test_a_team_has_as_many_threads_as_asked_for() -> None:
    with Team(3) as team:
        assert team.num_threads == 3
        assert len(team._threads) == 2  # and the caller
