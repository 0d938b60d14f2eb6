"""The base of the labs: controls that Python answers, and one piece of work beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import traitlets

from pdlab.workbench.background import Background
from pdlab.workbench.policy_lab_data import in_words
from pdlab.workbench.widget import TraceWidget

NOTHING = "nothing"
"""The state of the work before there is any; then `running`, `done`, `stopped` or `failed`."""


class Lab(TraceWidget):
    """Every question of the page has a number, and is answered when `answered` has it.

    What can be chosen are the fields of one frozen object of settings. Those that have a control
    (`settable`) are traits of the same names, which can be set from Python, too.

    A subclass validates these traits with `Lab.tried`. It says in `_set` what other settings do, in
    `_actions` what it does about each other type of question, and in `_under_way` what runs beside
    the kernel, if anything does. When it is made, it calls `_listen`.
    """

    shared = ("asker", "lab")
    settable: ClassVar[tuple[str, ...]]

    answered = traitlets.Int(0).tag(sync=True)
    """Number of the last question from the page that has its answer."""
    message = traitlets.Unicode().tag(sync=True)
    """What was wrong with the last choice, in words."""

    _settings: Any
    _following = True
    """Whether traits are set after the settings, and need not be tried: also until `_listen`."""
    _num_views = 0

    def choose(self, **values: Any) -> None:
        """Set controls; what is wrong with them is said in `message`, and the old ones stay."""
        self._say(lambda: self._set(values))

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

    # --- settings -----------------------------------------------------------------------------

    def _set(self, values: Mapping[str, Any]) -> None:
        """Other values of some settings hold and are shown; or, with an error, all is as before."""
        raise NotImplementedError

    def tried(self, proposal: Any) -> Any:
        """Set what is proposed for a trait before it counts: after an error the old state stays."""
        name, value = proposal["trait"].name, proposal["value"]
        if self._following:
            return value
        self._set({name: value})
        return getattr(self._settings, name)

    def _follow(self, settings: Any, **shown: Any) -> None:
        """These settings hold; the traits follow, at once with other ones that are `shown`."""
        self._settings = settings
        before, self._following = self._following, True
        try:
            with self.hold_sync():
                for name in self.settable:
                    setattr(self, name, getattr(settings, name))
                for name, value in shown.items():
                    setattr(self, name, value)
        finally:
            self._following = before

    # --- questions of the page ----------------------------------------------------------------

    def _listen(self) -> None:
        """From here on traits are tried, and questions answered."""
        self._following = False
        self.on_msg(self._on_message)

    def _actions(self, content: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
        """By type of question, beside `set` and `stop`."""
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
        actions = {"set": lambda: self._set(content["values"]), "stop": self.stop}
        try:
            self._say((actions | self._actions(content))[content["type"]])
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
