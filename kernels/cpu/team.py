"""A team of threads that runs compiled functions, and cannot be held up by a busy machine.

The functions run without the GIL and share their work by `chunks`, whose invariant makes the team
robust: what a step waits for is only what somebody has begun. The caller alone can do a whole step;
the helpers are asked to come and are never waited for. So a helper that gets no processor for a
while, that waits for the GIL, or that does not exist any more (after a fork) costs its share of the
speed, and nothing else.

Between steps helpers sleep in the kernel, on a lock; within a step they stay in compiled code.
"""

import os
import threading
import weakref
from queue import SimpleQueue
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from .chunks import CAN_SHARE, begin_step, new_counters


class _Job(NamedTuple):
    """One step: `function(counters, step, *arguments)`, run by every member that comes."""

    function: Any
    step: int
    arguments: tuple[Any, ...]


class _Board:
    """What the caller and the helpers share; holds no reference to the team."""

    def __init__(self, helpers: int) -> None:
        self.counters: np.ndarray = new_counters()
        self.job: _Job | None = None
        self.error: BaseException | None = None
        self.closed = False
        self.bells: list[SimpleQueue[None]] = [SimpleQueue() for _ in range(helpers)]

    def ring(self) -> None:
        """Wake the helpers; one that has not heard the last ring yet needs no other."""
        for bell in self.bells:
            if bell.empty():
                bell.put(None)

    def close(self) -> None:
        self.closed = True
        self.ring()


def _help(board: _Board, bell: "SimpleQueue[None]") -> None:
    """The life of a helper."""
    while True:
        bell.get()
        if board.closed:
            return
        job = board.job
        if job is None:
            continue
        try:
            job.function(board.counters, job.step, *job.arguments)
        except BaseException as error:  # raised before any chunk was taken; the caller goes on
            board.error = error.with_traceback(None)  # whose frames would keep the arrays
        del job


class Team:
    """`num_threads` threads, the caller among them.

    Steps of one team run one after the other, whichever threads call `run`. Close it, or use it as
    a context manager, to end the threads; they also end with the team and with the program.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
        wanted = num_threads or processors or os.cpu_count() or 1
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads={num_threads}: a team has at least one thread")
        self.num_threads = wanted if CAN_SHARE else 1
        self._board = _Board(self.num_threads - 1)
        self._one_step_at_a_time = threading.Lock()
        self._threads = [
            threading.Thread(
                target=_help, args=(self._board, bell), name=f"kernel-helper-{i}", daemon=True
            )
            for i, bell in enumerate(self._board.bells)
        ]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._board.close)

    def run(self, function: Any, *arguments: Any) -> Any:
        """Run `function(counters, step, *arguments)` in all members; returns the caller's result.

        The function is a `compiled.kernel` that takes chunks by `chunks.next_chunk`, and writes
        nothing unless it holds one. Raises ValueError when the team is closed.
        """
        board = self._board
        with self._one_step_at_a_time:
            if board.closed:
                raise ValueError("team: it is closed")
            step = begin_step(board.counters)
            over = False
            try:
                board.job = _Job(function, step, arguments)
                board.ring()
                result = function(board.counters, step, *arguments)
                over = True
            finally:
                board.job = None
                if not over:
                    begin_step(board.counters)  # which ends the one that was left
        return result

    @property
    def helper_error(self) -> BaseException | None:
        """The last error that a helper met; None while all went well."""
        return self._board.error

    def close(self) -> None:
        """End the threads; again is no error."""
        self._board.close()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
