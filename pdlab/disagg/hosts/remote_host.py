"""The router's end of a worker elsewhere, whatever carries the messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any, Literal, Protocol

from pdlab.disagg.hosts.host import WorkerDied
from pdlab.disagg.hosts.loop import ANSWER_S, Answer, Ask
from pdlab.disagg.messages import Command, Event, Hello, Load
from pdlab.trace import Trace

NUM_CLOCK_LOOKS = 8
LONGEST_LOOK_S = 0.1
"""Between two looks: what a channel could not send at once has to be sent meanwhile."""


class Channel(Protocol):
    """Carries messages to a worker, and those from it into an inbox."""

    def fileno(self) -> int:
        """Readable while there is something to receive."""
        ...

    def send(self, message: Any) -> None:
        """Queue a message. If nobody is there any more, `receive` says so."""
        ...

    def receive(self) -> list[Any]:
        """What has come; never waits.

        Raises:
            EOFError: there will be no more; it says why.
        """
        ...


class RemoteHost:
    """A worker that `pdlab.disagg.hosts.loop.serve` runs at the other end of a channel.

    How it is killed and closed depends on where it lives: subclasses add that.

    Args:
        start_timeout_s: how long it may take to begin, loading its model included.
        shares_clock: whether its `time.perf_counter` is ours: on Linux, that of this machine.
    """

    def __init__(
        self, name: str, channel: Channel, *, start_timeout_s: float, shares_clock: bool = False
    ):
        self.name = name
        self.channel = channel
        self._start_timeout_s = start_timeout_s
        self._hello: Hello | None = None
        self._clock_offset_s = 0.0 if shares_clock else None
        self._events: list[Event] = []
        self._num_asked = 0
        self._answers: dict[int, Any] = {}
        """By the number of the question."""

    @property
    def hello(self) -> Hello:
        if self._hello is None:
            try:
                self._wait_for(lambda: self._hello is not None, self._start_timeout_s)
            except TimeoutError as error:
                raise WorkerDied(self.name, f"it did not begin: {error}") from error
        assert self._hello is not None
        return self._hello

    @property
    def clock_offset_s(self) -> float:
        if self._clock_offset_s is None:
            self._clock_offset_s = self._measure_clock_offset_s()
        return self._clock_offset_s

    def post(self, commands: list[Command]) -> None:
        self.channel.send(commands)

    def poll(self) -> list[Event]:
        if not self._events:
            self._listen()
        events, self._events = self._events, []
        return events

    def waitable(self) -> Channel:
        return self.channel

    def load(self) -> Load:
        """How much it has to do, and how many blocks are free, now.

        Raises:
            WorkerDied, TimeoutError: it does not answer.
        """
        load: Load = self._ask("load")
        return load

    def trace(self) -> Trace:
        """What its engine has recorded.

        Raises:
            WorkerDied, TimeoutError: it does not answer.
        """
        trace: Trace = self._ask("trace")
        return trace

    # --- talking --------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take in what has come.

        Raises:
            WorkerDied: it is gone, and all it said has been taken in.
        """
        try:
            messages = self.channel.receive()
        except EOFError as error:
            raise WorkerDied(self.name, str(error)) from None
        for message in messages:
            match message:
                case Hello():
                    self._hello = message
                case Answer():
                    self._answers[message.number] = message.value
                case _:
                    self._events += message

    def _ask(self, what: Literal["trace", "load", "clock"]) -> Any:
        _ = self.hello
        self._num_asked += 1
        number = self._num_asked
        self._answers.clear()  # those that came too late
        self.channel.send(Ask(what, number))
        self._wait_for(lambda: number in self._answers, ANSWER_S)
        return self._answers.pop(number)

    def _wait_for(self, has_come: Callable[[], bool], timeout_s: float) -> None:
        """Listen until something has come.

        Raises:
            WorkerDied: it is gone.
            TimeoutError: it took too long.
        """
        end_s = time.monotonic() + timeout_s
        self._listen()
        while not has_come():
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"worker {self.name} said nothing for {timeout_s:g} s")
            wait([self.channel.fileno()], min(left_s, LONGEST_LOOK_S))
            self._listen()

    def _measure_clock_offset_s(self) -> float:
        """By round trips: the quickest is the most exact."""
        looks = []
        for _ in range(NUM_CLOCK_LOOKS):
            start_s = time.perf_counter()
            there_s = self._ask("clock")
            end_s = time.perf_counter()
            looks.append((end_s - start_s, (start_s + end_s) / 2 - there_s))
        return min(looks)[1]
