"""The StreamView widget: how tokens become text that a reader sees, and what waits on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import traitlets

from pdlab.engine import Engine, EngineConfig
from pdlab.engine.admission import Prompt
from pdlab.models import Model, Tokenizer
from pdlab.sampling import SamplingParams
from pdlab.trace.trace import Trace
from pdlab.workbench.sequences import request_of, sequence_ids
from pdlab.workbench.stream_data import stream_rows
from pdlab.workbench.stream_source import (
    Emission,
    HandMade,
    Rules,
    check_token_ids,
    recorded_emissions,
    replayed_emissions,
    rules_of,
)
from pdlab.workbench.widget import TraceWidget, machine_line

MAX_ROWS = 500
"""Tokens that one StreamView sends to the browser, about 0.5 KB each; its footer says when it
cuts."""
HAND_MADE = "hand-made tokens, no run"


class StreamView(TraceWidget):
    """Bytes held back and released, a row a token, and the text as its reader sees it.

    `StreamView(trace, model)` walks through a recorded run, at its measured times.
    `StreamView.of_run(model, prompt, params)` runs a prompt and shows that.
    `StreamView.from_tokens(model, token_ids, stop=...)` shows what the engine's own detokenizer and
    stop search make of any tokens: no model has run, so there are no times.

    `widget.step = 3` shows the stream after its third token; 0 is before the first.

    Args:
        trace: a recorded run; text waited in it as its requests' own parameters said.
        source: the model, or its tokenizer, which knows the bytes of every token.
        step: how many tokens have arrived at first; None is all of them.

    Raises:
        ValueError: there is no such sequence, no token came of it, or there is no tokenizer.
    """

    name = "stream_view"
    shared = ("transport",)

    header = traitlets.Dict().tag(sync=True)
    """Constants: sequences, stop strings, provenance, machine; and how many rows are left out."""
    sequence_id = traitlets.Unicode().tag(sync=True)
    rows = traitlets.List().tag(sync=True)
    """A `StreamRow` each, as a dict."""
    step = traitlets.Int(0).tag(sync=True)
    """How many tokens have arrived."""

    def __init__(
        self,
        trace: Trace | HandMade,
        source: Model | Tokenizer,
        sequence_id: str | None = None,
        *,
        step: int | None = None,
    ) -> None:
        self._trace = trace
        self._tokenizer = tokenizer_of(source)
        names = _sequences(trace)
        if not names:
            raise ValueError("trace holds no request: run the engine first")
        super().__init__()
        self.sequence_id = sequence_id or names[0]
        self.step = len(self.rows) if step is None else step

    @classmethod
    def of_run(
        cls,
        model: Model,
        prompt: Prompt,
        params: SamplingParams | None = None,
        config: EngineConfig | None = None,
    ) -> StreamView:
        """Run one prompt to its end, and show that."""
        tokenizer_of(model)
        with Engine(model, config) as engine:
            engine.generate(prompt, params)
            return cls(engine.trace, model)

    @classmethod
    def from_tokens(
        cls,
        source: Model | Tokenizer,
        token_ids: Sequence[int],
        *,
        stop: str | Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        step: int | None = None,
    ) -> StreamView:
        """Tokens made by hand, through the engine's own detokenizer and stop search.

        Raises:
            ValueError: there are no tokens, or some that the vocabulary lacks; a stop string is
                empty.
        """
        ids = check_token_ids(tokenizer_of(source), token_ids)
        rules = rules_of(stop, include_stop, skip_special_tokens)
        return cls(HandMade(ids, rules), source, step=step)

    @property
    def row(self) -> dict[str, Any] | None:
        """The newest token's row; None before the first."""
        return self.rows[self.step - 1] if self.step else None

    @property
    def text(self) -> str:
        """What the reader has been sent."""
        return "".join(row["released"] for row in self.rows[: self.step])

    def summary(self) -> str:
        row = self.row
        what = row["title"] if row else "nothing has arrived"
        why = f"; held back: {'; '.join(row['reasons'])}" if row and row["reasons"] else ""
        of = f"{HAND_MADE}" if self.header["by_hand"] else f"sequence {self.sequence_id}"
        return f"Stream of {of}, {self.step} of {len(self.rows)} tokens. {what}{why}"

    @traitlets.observe("sequence_id")
    def _on_sequence(self, _change: Any) -> None:
        self._reload()

    @traitlets.validate("sequence_id")
    def _check_sequence(self, proposal: Any) -> str:
        """Refuse what cannot be shown before anything changes."""
        self._emissions(proposal["value"])
        return str(proposal["value"])

    @traitlets.validate("step")
    def _clip_step(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self.rows)))

    def _reload(self) -> None:
        emissions = self._emissions(self.sequence_id)
        rules = self._rules()
        rows = stream_rows(emissions, self._tokenizer, rules)
        with self.hold_sync():
            self.rows = [row.to_dict() for row in rows[:MAX_ROWS]]
            self.header = self._header(rules) | {"cut": max(0, len(rows) - MAX_ROWS)}
            self.step = min(self.step, len(self.rows))

    def _emissions(self, sequence_id: str) -> list[Emission]:
        if isinstance(self._trace, HandMade):
            return replayed_emissions(self._tokenizer, self._trace)
        return recorded_emissions(self._trace, sequence_id)

    def _rules(self) -> Rules:
        if isinstance(self._trace, HandMade):
            return self._trace.rules
        return Rules.of(request_of(self._trace, self.sequence_id).params)

    def _header(self, rules: Rules) -> dict[str, Any]:
        by_hand = isinstance(self._trace, HandMade)
        return {
            "sequences": _sequences(self._trace),
            "by_hand": by_hand,
            "provenance": HAND_MADE if by_hand else "recorded",
            "machine": "" if isinstance(self._trace, HandMade) else machine_line(self._trace),
            "stop": list(rules.stop),
            "include_stop": rules.include_stop,
        }


def _sequences(trace: Trace | HandMade) -> list[str]:
    return [HAND_MADE] if isinstance(trace, HandMade) else sequence_ids(trace)


def tokenizer_of(source: Model | Tokenizer) -> Tokenizer:
    """The tokenizer, given alone or with its model.

    Raises:
        ValueError: it is neither, or the model has none.
    """
    tokenizer = source.tokenizer if isinstance(source, Model) else source
    if not isinstance(tokenizer, Tokenizer):
        raise ValueError(f"source={source!r:.60} has no tokenizer, which knows the tokens' bytes")
    return tokenizer
