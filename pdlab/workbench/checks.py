"""Exercises that answer at once: a green line when a check passes, a hint when not yet."""

from __future__ import annotations

import html
import os
from collections.abc import Callable

from IPython.display import display

from pdlab.workbench.palette import MEANING

Check = Callable[[], object]


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
            test()
        except Exception as error:
            if os.environ.get("PDLAB_STRICT") == "1":
                raise
            _show(name, False, _hint(error))
            return False
        _show(name, True, "passed")
        return True

    return run


def _hint(error: Exception) -> str:
    """What to tell the learner: the test's own message, or the error by name."""
    if isinstance(error, NotImplementedError):
        return "not yet: write your solution in the cell above and run this one again"
    if isinstance(error, AssertionError):
        return f"not yet: {error}" if str(error) else "not yet: the result is not the expected one"
    return f"not yet: your code raised {type(error).__name__}: {error}"


def _show(name: str, passed: bool, text: str) -> None:
    color = MEANING["cached"] if passed else MEANING["decode"]
    mark = "✓" if passed else "…"
    body = (
        f'<div role="status" style="border-left:4px solid {color};padding:6px 12px;'
        f'font-size:14px"><b>{mark} {html.escape(name)}</b>: {html.escape(text)}</div>'
    )
    display({"text/html": body, "text/plain": f"{mark} {name}: {text}"}, raw=True)
