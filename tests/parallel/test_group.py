"""Ranks are told together and waited for together, and a failure is never overheard."""

from __future__ import annotations

from typing import Any

import pytest

from pdlab.parallel import RankLost
from pdlab.parallel.commands import Commit, Failed, ReadCache, Run
from pdlab.parallel.group import RankGroup

LOOK = ReadCache([0], 1, on_host=False, is_raw=False)


class Told:
    """A rank that answers what a test says."""

    def __init__(self) -> None:
        self.answers: list[tuple[int | None, Any]] = []
        self.sent: list[tuple[int | None, Any]] = []
        self.was_forced: bool | None = None

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self, patience_s: float) -> list[Any]:
        answers, self.answers = self.answers, []
        return answers

    def close(self, force: bool) -> None:
        self.was_forced = force


def failed(text: str) -> Failed:
    return Failed(ValueError(text), text)


def test_an_answer_that_nobody_waits_for_any_more_is_dropped() -> None:
    first, second = Told(), Told()
    group = RankGroup([first, second])
    first.answers = [(0, "of a question before"), (1, "a")]
    second.answers = [(1, "b")]
    assert group.ask(LOOK) == ["a", "b"]
    assert [number for number, _ in first.sent] == [1]


def test_what_cannot_be_read_is_an_error_of_that_question_alone() -> None:
    first, second = Told(), Told()
    group = RankGroup([first, second])
    first.answers, second.answers = [(1, failed("no such block"))], [(1, "b")]
    with pytest.raises(ValueError, match="no such block"):
        group.ask(LOOK)
    first.answers, second.answers = [(2, "a")], [(2, "b")]
    assert group.ask(LOOK) == ["a", "b"]


@pytest.mark.parametrize("number", [None, 1], ids=["told", "interrupted"])
def test_a_failure_that_nobody_waited_for_ends_all(number: int | None) -> None:
    """Of what was told without waiting, or of a step whose waiting was interrupted."""
    first, second = Told(), Told()
    group = RankGroup([first, second])
    group.tell(Commit())
    first.answers = [(2, "a")]
    second.answers = [(number, failed("no memory")), (2, "b")]
    with pytest.raises(RankLost, match="rank 1 of 2 failed: no memory"):
        group.ask(LOOK)
    assert first.was_forced
    with pytest.raises(RankLost, match="no memory"):
        group.ask(Run([]))


def test_closing_says_stop_once() -> None:
    line = Told()
    group = RankGroup([line])
    group.close()
    group.close()
    assert len(line.sent) == 1
    assert line.was_forced is False
