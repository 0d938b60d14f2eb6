"""The ranks of one engine, seen from its process: told together, waited for together."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

from pdlab.engine.interrupts import undisturbed
from pdlab.engine.runner import RunnerLost
from pdlab.parallel.commands import Command, Failed, Logits, Ready, Run, Stop
from pdlab.parallel.rank import Rank

START_S = 180.0
"""How long a rank may take to begin: it imports torch and reads its weights."""
ANSWER_S = 600.0
"""How long it may take to answer. Ranks that wait for one another in vain give up sooner."""
GLANCE_S = 0.1
"""While one rank is waited for, the others are looked after so often."""
LAST_WORDS_S = 3.0
"""How long is waited for the end of a rank, when another has said that it cannot hear it."""


class RankLost(RunnerLost):
    """A rank is gone, or cannot go on; so its engine cannot, either."""


class Line(Protocol):
    """The way to one rank. Messages arrive in order."""

    def send(self, message: Any) -> None:
        """Give it something to do; returns at once."""
        ...

    def receive(self, patience_s: float) -> list[Any]:
        """What it has said; waits so long if there is nothing.

        Raises:
            RankLost: it is gone.
        """
        ...

    def close(self, force: bool) -> None:
        """End it: in good order, or at once. Closing again does nothing."""
        ...


class Replies(Protocol):
    """The rank's end of a line."""

    def send(self, message: tuple[int | None, Any]) -> None: ...


class RankGroup:
    """Asks all ranks the same thing, and waits for all answers.

    Interrupted, it can be asked something else: answers to what nobody waits for any more are
    dropped. When a rank is lost, or fails in a step, all are ended.

    Args:
        lines: by rank. They are the group's from now on.
    """

    def __init__(self, lines: Sequence[Line]):
        self._lines = list(lines)
        self._number = 0
        self._lost: str | None = None
        self.ready: list[Ready] = []

    def begin(self) -> None:
        """Wait until all ranks are there; `ready` has what they said.

        Raises:
            RankLost: one did not begin.
            ValueError: one cannot do what it is made for.
        """
        try:
            self.ready = self._answers(START_S, is_fatal=False)
        except BaseException:
            if self._lost is None:
                self._lost = "the ranks did not begin"
                self._end(force=True)
            raise

    def ask(self, command: Command) -> list[Any]:
        """Have all ranks do something; their answers, by rank.

        Raises:
            RankLost: one is gone, or failed in computing.
            Exception: that of the first rank which could not, where it was not computing.
        """
        return self.ask_each([command] * len(self._lines))

    def ask_each(self, commands: Sequence[Command | None]) -> list[Any]:
        """As `ask`, with a command of its own for each rank; None for those that do nothing."""
        self._number += 1
        self._send(commands)
        is_fatal = any(isinstance(command, Run | Logits) for command in commands)
        return self._answers(ANSWER_S, [c is not None for c in commands], is_fatal)

    def tell(self, command: Command) -> None:
        """As `ask`, without waiting: what fails is heard of with the next answer."""
        self._number += 1
        self._send([command] * len(self._lines), answered=False)

    def _send(self, commands: Sequence[Command | None], answered: bool = True) -> None:
        if self._lost:
            raise RankLost(self._lost)
        with undisturbed():  # or one would wait for another that was told nothing
            for line, command in zip(self._lines, commands, strict=True):
                if command is not None:
                    line.send((self._number if answered else None, command))

    def _answers(
        self, patience_s: float, asked: Sequence[bool] | None = None, is_fatal: bool = True
    ) -> list[Any]:
        """One answer of each rank that was asked, None of the others."""
        pending = [i for i in range(len(self._lines)) if asked is None or asked[i]]
        answers: list[Any] = [None] * len(self._lines)
        give_up_s = time.perf_counter() + patience_s
        while pending:
            with undisturbed():  # what was heard is not to be lost
                self._listen(pending, answers, is_fatal)
            if pending and time.perf_counter() > give_up_s:
                self._fail(f"rank {pending[0]} did not answer for {patience_s:.0f} s")
        for answer in answers:
            if isinstance(answer, Failed):
                raise answer.error
        return answers

    def _listen(self, pending: list[int], answers: list[Any], is_fatal: bool) -> None:
        """Hear all who have not answered yet; wait a moment for the first of them."""
        for place, rank in enumerate(list(pending)):
            for number, answer in self._hear(rank, GLANCE_S if place == 0 else 0.0):
                is_old = number != self._number  # nobody waits for it: it was interrupted, or told
                if isinstance(answer, Failed) and (is_fatal or is_old):
                    self._blame(rank, answer)
                if number == self._number and rank in pending:
                    answers[rank] = answer
                    pending.remove(rank)

    def _blame(self, rank: int, failed: Failed) -> NoReturn:
        """A rank has failed; or, if it could not hear one that is gone, that one is lost."""
        if isinstance(failed.error, ConnectionError):
            give_up_s = time.perf_counter() + LAST_WORDS_S
            others = [other for other in range(len(self._lines)) if other != rank]
            while time.perf_counter() < give_up_s:
                for other in others:
                    self._hear(other, GLANCE_S / len(others))
        self._fail(f"rank {rank} of {len(self._lines)} failed: {failed.trace}")

    def _hear(self, rank: int, patience_s: float) -> list[tuple[int | None, Any]]:
        try:
            return self._lines[rank].receive(patience_s)
        except RankLost as lost:
            self._fail(f"rank {rank} of {len(self._lines)} is lost: {lost}")

    def _fail(self, reason: str) -> NoReturn:
        self._lost = reason
        self._end(force=True)
        raise RankLost(reason)

    def close(self) -> None:
        """End all ranks in good order. Closing again does nothing."""
        if self._lost is None:
            self._lost = "the ranks were ended"
            for line in self._lines:
                line.send((None, Stop()))
            self._end(force=False)

    def _end(self, force: bool) -> None:
        for line in self._lines:
            line.close(force)


def serve(
    make: Callable[[], Rank], messages: Iterable[tuple[int | None, Command]], line: Replies
) -> None:
    """Be a rank: until a `Stop`, or until there are no more messages."""
    rank: Rank | None = None
    try:
        rank = make()
        line.send((0, rank.ready))
        for number, command in messages:
            if isinstance(command, Stop):
                return
            _obey(rank, number, command, line)
    except Exception as error:
        line.send((0, Failed(error, traceback.format_exc())))
    finally:
        if rank:
            rank.close()


def _obey(rank: Rank, number: int | None, command: Command, line: Replies) -> None:
    try:
        answer = rank.obey(command)
    except Exception as error:
        answer = Failed(error, traceback.format_exc())
    if number is not None or isinstance(answer, Failed):
        line.send((number, answer))
