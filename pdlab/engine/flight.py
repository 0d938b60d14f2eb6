"""A step between its planning and its booking, and the thread that computes it meanwhile.

The thread sees a batch, a runner and the KV memory's bytes. It never sees the scheduler or the
block pool, and takes no lock: so whoever holds the memory's lock may wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from pdlab.engine.allocations import AllocationMeter
from pdlab.engine.runner import Runner, StepOutput
from pdlab.engine.scheduler import ScheduledBatch, ScheduledSequence
from pdlab.engine.sequence import SequenceState
from pdlab.engine.timing import StageClock
from pdlab.kvcache import Release
from pdlab.trace import BlockMove


class ComputeThread:
    """One thread, made when it is first needed. It ends with whoever holds this, or by `close`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        self._ident: int | None = None

    @property
    def is_current(self) -> bool:
        """Whether it is the one that asks."""
        return self._ident == threading.get_ident()

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Let it work with as many threads for torch as the one that calls would have."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "pdlab-compute")
            self._ident = self._pool.submit(_enter, self._device).result()
        return self._pool.submit(_work, work, torch.get_num_threads())

    def close(self) -> None:
        """End it, when it has done what it was given."""
        if self._pool:
            self._pool.shutdown()


def _enter(device: torch.device) -> int:
    """What torch keeps by thread; the thread's name for itself."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return threading.get_ident()


def _work(work: Callable[[], None], num_threads: int) -> None:
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
    work()


@dataclass(eq=False)
class Flight:
    """A planned step. Computed, it has an `output`; then it is to be booked.

    Where `orders` are left, they are carried out before anything is computed.
    """

    batch: ScheduledBatch
    runner: Runner
    device: torch.device
    step: int
    start_s: float
    """On the engine's clock, as all times here but those of `computed_at`."""
    moves: list[BlockMove]
    orders: list[BlockMove | Release]
    planning_s: dict[str, float] = field(default_factory=dict)
    """How long the caller's thread was at it, by stage."""
    computing_s: dict[str, float] = field(default_factory=dict)
    output: StepOutput | None = None
    activations: AllocationMeter | None = None
    computed_at: tuple[float, float] = (0.0, 0.0)
    """When computing began and ended, by `time.perf_counter`."""
    is_apart: bool = False
    """Whether the thread computes it."""
    _future: Future[None] | None = None
    _is_committed: bool = False

    def launch(self, thread: ComputeThread) -> None:
        """Give it to the thread.

        Returns when that is at work: with the GIL it would wait up to 5 ms for it otherwise, until
        the caller has nothing left to do, and nothing would lie beside the computation.
        """
        self.is_apart = True
        begun = threading.Event()
        self._future = thread.start(lambda: self._compute_and_commit(begun))
        begun.wait()

    def _compute_and_commit(self, begun: threading.Event) -> None:
        begun.set()
        self.compute()
        self.commit()

    def compute(self) -> None:
        """Copy blocks, run the model, draw."""
        begin = time.perf_counter()
        if self.orders:
            self.runner.carry_out(self.orders)
            self.computing_s["schedule"] = time.perf_counter() - begin
        clock = StageClock(self.device)
        output = self.runner.run(self.batch, clock, self.step)
        self.computing_s |= clock.stage_s
        self.computed_at = begin, time.perf_counter()
        self.output = output

    def commit(self) -> None:
        """Make what was computed count; once is enough."""
        if not self._is_committed:
            self.runner.commit()
            self._is_committed = True

    @property
    def live(self) -> list[ScheduledSequence]:
        """The parts of those that are still there."""
        gone = SequenceState.FINISHED
        return [part for part in self.batch.scheduled if part.sequence.state is not gone]

    @property
    def failed(self) -> bool:
        """Whether something kept it from being computed."""
        return self._future is not None and self._future.exception() is not None

    def land(self) -> None:
        """Wait for the thread, if it has it."""
        if self._future:
            self._future.exception()

    def raise_error(self) -> None:
        """Raise what kept it from being computed."""
        future, self._future = self._future, None
        if future and (error := future.exception()):
            try:
                raise error
            finally:
                del error, future  # its traceback leads here, and to all KV memory

    @property
    def stage_s(self) -> dict[str, float]:
        """All stages so far. Copying blocks is a part of `schedule`, whoever does it."""
        both = self.planning_s | self.computing_s
        if "schedule" in self.computing_s:
            both["schedule"] += self.planning_s["schedule"]
        return both
