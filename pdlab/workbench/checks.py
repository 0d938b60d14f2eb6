"""Exercises that answer at once: a green line when a check passes, a hint when not yet."""

from __future__ import annotations

import html
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from IPython.display import display

from pdlab.workbench.palette import MEANING

Check = Callable[[], object]
RETURNED_NOTHING = "not yet: your function returned nothing: is there a `return`?"


def check(name: str) -> Callable[[Check], bool]:
    """Run the decorated test now and show its verdict in colour.

        @check("KV bytes of one token")
        def passed():
            assert kv_bytes(config) == 46080, "count K and V, and the KV heads only"

    The decorated name becomes True or False. With PDLAB_STRICT=1, as when the solved lessons are
    tested, a check that fails raises instead.
    """

    def run(test: Check) -> bool:
        try:
            with _last_returned(test) as returned:
                test()
        except Exception as error:
            if os.environ.get("PDLAB_STRICT") == "1":
                raise
            nothing = returned[-1:] == [None] and _raised_in(test, error)
            _show(name, False, RETURNED_NOTHING if nothing else _hint(error))
            return False
        _show(name, True, "passed")
        return True

    return run


def _hint(error: Exception) -> str:
    """What to tell the learner: the test's own message, or the error by name."""
    if isinstance(error, NotImplementedError):
        return "not yet: write your solution in the cell above and run this one again"
    if isinstance(error, NameError):
        return f"not yet: {error}; run the cell above first"
    if isinstance(error, AssertionError):
        return f"not yet: {error}" if str(error) else "not yet: the result is not the expected one"
    return f"not yet: your code raised {type(error).__name__}: {error}"


@contextmanager
def _last_returned(test: Check) -> Iterator[list[object]]:
    """What the notebook's functions that a test calls have returned; only the last is kept."""
    returned: list[object] = []
    before = sys.getprofile()

    def watch(frame: FrameType, event: str, result: Any) -> None:
        caller, code = frame.f_back, frame.f_code
        called_here = caller is not None and caller.f_code is test.__code__
        own = frame.f_globals is test.__globals__ and not code.co_flags & inspect.CO_GENERATOR
        if event == "return" and called_here and own:
            returned[:] = [result]

    sys.setprofile(watch)
    try:
        yield returned
    finally:
        sys.setprofile(before)


def _raised_in(test: Check, error: Exception) -> bool:
    """Whether the test itself raised the error, and not a function that it called."""
    frame = inspect.trace()[-1].frame if error.__traceback__ else None
    return frame is not None and frame.f_code is test.__code__


def _show(name: str, passed: bool, text: str) -> None:
    color = MEANING["cached"] if passed else MEANING["decode"]
    mark = "✓" if passed else "…"
    body = (
        f'<div role="status" style="border-left:4px solid {color};padding:6px 12px;'
        f'font-size:14px"><b>{mark} {html.escape(name)}</b>: {html.escape(text)}</div>'
    )
    display({"text/html": body, "text/plain": f"{mark} {name}: {text}"}, raw=True)
