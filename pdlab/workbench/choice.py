"""A choice among a few answers that the arrow keys move through, in JupyterLab too."""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets

from pdlab.workbench.widget import read_static


class Choice(anywidget.AnyWidget):
    """Radio buttons; `value` is the chosen option, or None.

    The buttons of ipywidgets lose the arrow keys to JupyterLab, which moves to another cell.
    """

    _esm = read_static("common.js") + read_static("choice.js")
    _css = read_static("choice.css")

    label = traitlets.Unicode().tag(sync=True)
    """What is asked, for a reader who hears the page."""
    options = traitlets.List(traitlets.Unicode()).tag(sync=True)
    value = traitlets.Unicode(None, allow_none=True).tag(sync=True)

    @traitlets.validate("value")
    def _check_value(self, proposal: Any) -> str | None:
        if proposal["value"] is not None and proposal["value"] not in self.options:
            raise ValueError(f"value={proposal['value']!r} is not one of {self.options}")
        return proposal["value"]
