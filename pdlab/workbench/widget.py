"""The base of our widgets: an anywidget that knows its files, colours and static picture."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, ClassVar

import anywidget

from pdlab.trace.trace import Trace
from pdlab.workbench.fallback import fallback_card
from pdlab.workbench.palette import css_variables
from pdlab.workbench.picture import pictures_wanted, widget_png

STATIC = Path(__file__).parent / "static"


class TraceWidget(anywidget.AnyWidget):
    """A widget drawn from a Trace by a vanilla ES module in `static/`.

    A subclass names its files (`name`, and in `shared` those that come before), keeps what
    JavaScript needs in synced traits, and says in `summary()` what it shows, for readers who see
    only text.
    """

    name: ClassVar[str]
    shared: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" in vars(cls):  # not the class that anywidget derives for each instance
            cls._esm = cls.module()
            cls._css = cls.styles()

    @classmethod
    def module(cls) -> str:
        """The ES module: the shared helpers, then the widget's own code."""
        return "".join(read_static(f"{name}.js") for name in ("common", *cls.shared, cls.name))

    @classmethod
    def styles(cls) -> str:
        names = ("base", *cls.shared, cls.name)
        return css_variables() + "".join(read_static(f"{name}.css") for name in names)

    def view_state(self) -> dict[str, Any]:
        """The synced traits of this widget alone, as its JavaScript reads them."""
        own = set(self.trait_names(sync=True)) - set(anywidget.AnyWidget.class_trait_names())
        return {name: getattr(self, name) for name in own if not name.startswith("_")}

    def summary(self) -> str:
        """One line of text for a reader without pictures."""
        raise NotImplementedError

    def png(self, width: int = 920) -> bytes | None:
        """A picture of the widget in its present state; None where no browser is installed."""
        return widget_png(self, width)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live view and a line of text; for saved notebooks a card, or a picture if wanted.

        JupyterLab would show a card rather than a picture, so an output has one of the two.
        """
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle or {}, {})
        data = {**data, "text/plain": self.summary()}
        picture = self.png() if pictures_wanted() else None
        if picture is not None:
            data["image/png"] = base64.b64encode(picture).decode("ascii")
        else:
            data["text/html"] = fallback_card(self.summary())
        return data, metadata


def machine_line(trace: Trace) -> str:
    """The machine a trace was recorded on, in one line: processor, cores, date."""
    machine = trace.machine
    num_cores = machine.get("cores")
    cores = f"{num_cores} core{'s' * (num_cores != 1)}" if num_cores else None
    date = str(machine.get("date", ""))[:10] or None
    parts = [machine.get("processor") or machine.get("device"), cores, date]
    return ", ".join(str(p) for p in parts if p) or "an unnamed machine"


def read_static(name: str) -> str:
    """Text of a file in `static/`; nothing where there is no such file."""
    path = STATIC / name
    return path.read_text(encoding="utf-8") + "\n" if path.exists() else ""
