"""What lessons need besides pictures: predictions, a glossary, a progress bar."""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ipywidgets as widgets  # type: ignore[import-untyped]
from IPython.core.getipython import get_ipython
from IPython.display import HTML, display

from pdlab.workbench.choice import Choice
from pdlab.workbench.fallback import CARD, fallback_card
from pdlab.workbench.palette import MEANING, UNKNOWN

T = TypeVar("T")
Value = float | str

GLOSSARY = Path(__file__).parent / "static" / "glossary.json"
REFRESH_S = 0.1
NUMBER = re.compile(r"(?<![\d.,])(-?)(\d+(?:[.,]\d+)*(?:[eE][+-]?\d+)?)")
THOUSANDS = re.compile(r"[1-9]\d{0,2}(,\d{3})+(\.\d+)?")


class Predictions:
    """What the learner expected before running, to stand beside what the run then showed.

    One object a notebook: `guesses = Predictions()`. Running a cell again keeps what was recorded.
    """

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}

    def predict(
        self,
        question: str,
        options: Sequence[str] | None = None,
        *,
        key: str,
        unit: str = "",
    ) -> PredictionControl:
        """A control that records a prediction: a choice among `options`, or a number in `unit`.

        Its `answer.value` can be set from Python; "" or None means no prediction.
        """
        return PredictionControl(self._values, question, options, key, unit)

    def get(self, key: str) -> Value | None:
        """What was recorded under a key, or None."""
        return self._values.get(key)

    def compare(
        self, key: str, actual: Value, unit: str = "", kind: str = "measured", note: str = ""
    ) -> None:
        """Show the prediction beside what came out.

        Args:
            kind: what `actual` is: measured, recorded, counted, predicted (by the cost model),
                simulated or published.
            note: one sentence on what to make of it.
        """
        guess = self.get(key)
        rows = [
            (
                "your prediction",
                "no prediction recorded: answer above, then run this cell again"
                if guess is None
                else _format(guess, unit),
            ),
            (kind, _format(actual, unit)),
        ]
        verdict = _verdict(guess, actual)
        _show_card(rows, verdict, note, MEANING["prefill"] if guess is not None else UNKNOWN)


class PredictionControl(widgets.VBox):
    """Question, answer, and what is recorded; also readable where widgets do not run."""

    def __init__(
        self,
        store: dict[str, Value],
        question: str,
        options: Sequence[str] | None,
        key: str,
        unit: str,
    ) -> None:
        self._store, self._key, self._unit = store, key, unit
        self._question, self._options = question, list(options or [])
        self.answer = self._choice() if options else self._number()
        self.status = widgets.HTML()
        super().__init__(
            [widgets.HTML(f"<b>{html.escape(question)}</b>"), self.answer, self.status]
        )
        self.answer.observe(self._record, "value")
        self._show_status()

    def _choice(self) -> Choice:
        known = self._store.get(self._key)
        value = known if known in self._options else None
        return Choice(label=self._question, options=self._options, value=value)

    def _number(self) -> widgets.Text:
        known = self._store.get(self._key)
        return widgets.Text(
            value="" if known is None else _digits(float(known), 12).replace(",", ""),
            placeholder=self._number_wanted(),
            continuous_update=False,
        )

    def _number_wanted(self) -> str:
        return f"a number, in {self._unit}" if self._unit else "a number"

    def _record(self, change: Any) -> None:
        value = change["new"]
        if value in (None, ""):
            self._store.pop(self._key, None)
        elif self._options:
            self._store[self._key] = value
        else:
            number = _number_in(value)
            if number is None:
                self._show_status(f"“{value}” is not a number above 0; ")
                return
            self._store[self._key] = number
        self._show_status()

    def _show_status(self, complaint: str = "") -> None:
        known = self._store.get(self._key)
        still = "still " if complaint else ""
        text = complaint + (
            "nothing recorded yet"
            if known is None
            else f"{still}recorded: {_format(known, self._unit)}"
        )
        self.status.value = f"<span style='opacity:.7'>{html.escape(text)}</span>"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        data = dict(super()._repr_mimebundle_(**kwargs))
        answers = " / ".join(self._options) or self._number_wanted()
        data["text/plain"] = f"{self._question} ({answers})"
        data["text/html"] = fallback_card(self._question, answers)
        return data


def glossary(*terms: str) -> None:
    """A table English / 中文 / meaning of some terms, or of all of them.

    Raises:
        ValueError: a term is not in the glossary.
    """
    known = json.loads(GLOSSARY.read_text(encoding="utf-8"))
    missing = [t for t in terms if t not in known]
    if missing:
        raise ValueError(f"terms={missing} are not in the glossary; it has: {', '.join(known)}")
    chosen = {t: known[t] for t in terms or known}
    rows = "".join(
        f"<tr><td style='text-align:left'><b>{html.escape(term)}</b></td>"
        f"<td style='text-align:left;white-space:nowrap'>{html.escape(entry['zh'])}</td>"
        f"<td style='text-align:left'>{html.escape(entry['meaning'])}</td></tr>"
        for term, entry in chosen.items()
    )
    head = "".join(f"<th style='text-align:left'>{h}</th>" for h in ("English", "中文", "meaning"))
    plain = "\n".join(f"{t} ({e['zh']}): {e['meaning']}" for t, e in chosen.items())
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    display({"text/html": table, "text/plain": plain}, raw=True)


def progress(items: Iterable[T], label: str = "", total: int | None = None) -> Iterator[T]:
    """Yield the items under a progress bar that leaves nothing behind in the saved notebook.

    Outside a notebook there is no bar.
    """
    if get_ipython() is None:
        yield from items
        return
    total = total if total is not None else len(items)  # type: ignore[arg-type]
    handle = display(HTML(_bar(label, 0, total)), display_id=True)
    shown_s = time.monotonic()
    try:
        for done, item in enumerate(items, 1):
            yield item
            if time.monotonic() - shown_s > REFRESH_S:
                shown_s = time.monotonic()
                handle.update(HTML(_bar(label, done, total)))
    finally:  # also when the loop around it fails or is interrupted
        handle.update(HTML(""))


def _bar(label: str, done: int, total: int) -> str:
    text = html.escape(label)
    return (
        f"<label style='font-size:14px'>{text} <progress value='{done}' max='{total}'></progress>"
        f" {done} of {total}</label>"
    )


def _number_in(text: str) -> float | None:
    """The first finite number above 0 in a text: "about 10", "3,5", "1,000", "3 times"."""
    for sign, digits in NUMBER.findall(text):
        thousands = THOUSANDS.fullmatch(digits)
        plain = digits.replace(",", "") if thousands else digits.replace(",", ".")
        try:
            number = float(plain)
        except ValueError:  # 1.2.3
            continue
        if not sign and 0 < number < math.inf:
            return number
    return None


def _format(value: Value, unit: str) -> str:
    text = value if isinstance(value, str) else _digits(value, 4)
    return f"{text} {unit}".strip()


def _digits(value: float, significant: int) -> str:
    """1234.56 to two digits -> `1,200`: rounded, and written out rather than as a power of ten."""
    return f"{float(f'{value:.{significant}g}'):,.12g}"


def _verdict(guess: Value | None, actual: Value) -> str:
    if guess is None:
        return ""
    if isinstance(guess, str) or isinstance(actual, str):
        return "as you predicted" if guess == actual else "not what you predicted"
    if not (math.isfinite(guess) and math.isfinite(actual)):
        return ""
    if guess <= 0 or actual <= 0:
        return f"off by {_digits(actual - guess, 4)}"
    ratio = math.exp(math.log(actual) - math.log(guess))  # no division by what rounds to 0
    if 0.9 <= ratio <= 1.1:
        return "within 10 % of your prediction"
    return (
        f"{_digits(ratio, 2)} times your prediction"
        if ratio > 1
        else f"your prediction is {_digits(guess / actual, 2)} times too high"
    )


def _show_card(rows: list[tuple[str, str]], verdict: str, note: str, color: str) -> None:
    cells = "".join(
        f"<span style='margin-right:2em'><span style='opacity:.7'>{html.escape(name)}</span> "
        f"<b>{html.escape(value)}</b></span>"
        for name, value in rows
    )
    remarks = [text for text in (verdict, note) if text]
    tail = "".join(f"<div>{html.escape(text)}</div>" for text in remarks)
    body = f"<div style='{CARD.format(color=color)}'>{cells}{tail}</div>"
    plain = "; ".join([*(f"{name}: {value}" for name, value in rows), *remarks])
    display({"text/html": body, "text/plain": plain}, raw=True)
