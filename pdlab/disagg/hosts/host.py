"""Where a worker lives: here, in a process of its own, in a Ray actor, on another rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from pdlab.disagg.messages import Command, Event, Hello, Load
from pdlab.disagg.worker import Worker
from pdlab.trace import Trace


class WorkerDied(RuntimeError):
    """A worker is gone."""

    def __init__(self, name: str, reason: str):
        super().__init__(f"worker {name} is lost: {reason}")
        self.name = name
        self.reason = reason


class Host(Protocol):
    """Carries commands to one worker, and events back."""

    @property
    def hello(self) -> Hello:
        """What the worker said when it began; waits for it.

        Raises:
            WorkerDied: it never did.
        """
        ...

    @property
    def clock_offset_s(self) -> float:
        """What to add to a time on the worker's clock, for `time.perf_counter` here."""
        ...

    def post(self, commands: list[Command]) -> None:
        """Give the worker something to do; returns at once."""
        ...

    def poll(self) -> list[Event]:
        """What has happened since the last call; never waits.

        Raises:
            WorkerDied: it is gone.
        """
        ...

    def waitable(self) -> object | None:
        """What `multiprocessing.connection.wait` can wait on for news; None if `poll` works."""
        ...

    def kill(self) -> None:
        """End it as a crash would."""
        ...

    def trace(self) -> Trace:
        """What its engine has recorded."""
        ...

    def load(self) -> Load:
        """How much it has to do, once all is done that was posted before."""
        ...

    def close(self) -> None:
        """End it in good order."""
        ...


@contextmanager
def closed_on_error(hosts: Sequence[Host]) -> Iterator[None]:
    """Closes these hosts, and those that are added meanwhile, if their cluster does not begin."""
    try:
        yield
    except BaseException:
        for host in hosts:
            host.close()
        raise


class LocalHost:
    """A worker in this process: each `poll` is a turn of it. Runs are deterministic."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.hello = worker.hello()
        self.clock_offset_s = 0.0
        self._commands: list[Command] = []
        self._is_dead = False

    def post(self, commands: list[Command]) -> None:
        self._commands += commands

    def poll(self) -> list[Event]:
        if self._is_dead:
            raise WorkerDied(self.worker.name, "it was killed")
        commands, self._commands = self._commands, []
        return self.worker.turn(commands)

    def waitable(self) -> None:
        return None

    def kill(self) -> None:
        """Stop it between two turns; it frees nothing and says nothing any more."""
        if not self._is_dead:
            self._is_dead = True
            self.worker.transport.close()

    def trace(self) -> Trace:
        return self.worker.engine.trace

    def load(self) -> Load:
        return self.worker.load()

    def close(self) -> None:
        self.worker.close()
