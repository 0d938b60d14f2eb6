"""The base of the labs: controls that Python answers, and one piece of work beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import traitlets

from pdlab.workbench.background import Background
from pdlab.workbench.policy_lab_data import in_words
from pdlab.workbench.widget import TraceWidget

NOTHING = "nothing"
"""The state of the work before there is any; then `running`, `done`, `stopped` or `failed`."""


class Lab(TraceWidget):
    """Every question of the page has a number, and is answered when `answered` has it.

    A subclass says in `_actions` what it does about each type of question, and in `_under_way` what
    runs beside the kernel, if anything does.
    """

    shared = ("asker", "lab")

    answered = traitlets.Int(0).tag(sync=True)
    """Number of the last question from the page that has its answer."""
    message = traitlets.Unicode().tag(sync=True)
    """What was wrong with the last choice, in words."""

    _num_views = 0

    def stop(self) -> None:
        """End what runs beside the kernel; without, do nothing."""
        if work := self._under_way():
            work.stop()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for what runs beside the kernel; Ctrl-C ends it, too."""
        if not (work := self._under_way()):
            return
        try:
            work.wait(timeout_s)
        except KeyboardInterrupt:
            work.stop()
            raise

    def close(self) -> None:
        """Also end what runs beside the kernel."""
        self.stop()
        super().close()

    def _under_way(self) -> Background | None:
        raise NotImplementedError

    def _actions(self, content: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
        """By type of question."""
        raise NotImplementedError

    def _say(self, action: Callable[[], Any]) -> None:
        """Do it; what was wrong goes into `message`."""
        try:
            action()
            self.message = ""
        except KeyboardInterrupt:
            self.message = "Interrupted: nothing was changed."
            raise
        except Exception as error:  # what a policy raises may be anything
            self.message = in_words(error)

    def _on_message(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content["type"] == "views":
            self._count_views(int(content["change"]))
            return
        try:
            self._say(self._actions(content)[content["type"]])
        finally:
            self.answered = content["number"]

    def _count_views(self, change: int) -> None:
        """With the last view (the cell runs again) the work ends too."""
        self._num_views += change
        if self._num_views <= 0:
            self.stop()


def refuse_unknown(values: Iterable[str], settable: Iterable[str]) -> None:
    """Raises ValueError for a name that is none of those."""
    for name in values:
        if name not in settable:
            raise ValueError(f"{name} is not one of {', '.join(settable)}")
