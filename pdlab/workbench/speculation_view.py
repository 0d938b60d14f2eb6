"""The SpeculationView widget: what was drafted, what of it stood, and what that gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import traitlets

from pdlab.requirements import require_choice, require_number
from pdlab.trace.trace import Trace
from pdlab.workbench.frames import token_strings
from pdlab.workbench.sequences import sequence_ids
from pdlab.workbench.speculation_data import Drafting, drafting, drafting_frames, first_told
from pdlab.workbench.widget import TraceWidget, machine_line

MAX_RUNS = 6
MAX_FRAMES = 500
"""Steps that are sent to the browser, half a KB each; the footer says when it cuts."""
MAX_TOKENS = 8192
"""Of the text: the longest that the default model takes."""
LARGEST_RATIO = 1.0
"""Drafting a token for as long as a plain step takes never pays."""


class SpeculationView(TraceWidget):
    """Step by step: the text, the drafted tokens, which of them the model let stand, and why. Over
    the whole run: acceptance by place in the draft, tokens a step, and the speed-up, predicted by
    the formula of Leviathan et al. (2023) and measured.

    Moving through the steps and moving the cost ratio happen in the browser alone. `step` and
    `cost_ratio` can be set from Python.

    Args:
        runs: a recorded run with drafts, or several by name (at most 6), such as one for each
            draft length.
        plain: the same work without drafts: what the speed-up is measured against. Without it,
            steps of the run that had no draft tell, if there are some.
        run: name of the one whose steps are shown.
        sequence_id: whose steps; by default the first sequence's.
        step: the frame to begin with; by default the first that accepts some tokens and rejects
            one.

    Raises:
        ValueError: there is no run, no step that only decodes, or no such sequence.
    """

    name = "speculation_view"
    shared = ("transport",)

    runs = traitlets.List().tag(sync=True)
    """What each run came to; see `speculation_data.Drafting`."""
    run = traitlets.Unicode().tag(sync=True)
    sequences = traitlets.List().tag(sync=True)
    sequence_id = traitlets.Unicode().tag(sync=True)
    tokens = traitlets.List().tag(sync=True)
    """[id, text] of each: the prompt's, then the output's."""
    num_prompt = traitlets.Int().tag(sync=True)
    frames = traitlets.List().tag(sync=True)
    num_cut = traitlets.Int().tag(sync=True)
    """Steps behind the last frame, which are not shown."""
    step = traitlets.Int(0).tag(sync=True)
    """Number of the frame shown."""
    cost_ratio = traitlets.Float(0.0).tag(sync=True)
    """Drafting a token, in plain steps, as the predicted curves have it."""

    def __init__(
        self,
        runs: Trace | Mapping[str, Trace],
        *,
        plain: Trace | None = None,
        run: str | None = None,
        sequence_id: str | None = None,
        step: int | None = None,
    ) -> None:
        self._traces = dict(runs) if isinstance(runs, Mapping) else {"this run": runs}
        if not 1 <= len(self._traces) <= MAX_RUNS:
            raise ValueError(f"runs has {len(self._traces)} runs, not 1 to {MAX_RUNS}")
        for name, trace in self._traces.items():
            if not isinstance(trace, Trace):
                raise ValueError(f"runs[{name!r}]={trace!r:.60} must be a Trace")
        self._told = {name: drafting(trace, plain) for name, trace in self._traces.items()}
        first = run if run is not None else next(iter(self._traces))
        super().__init__(runs=[self._plain_data(name) for name in self._traces])
        self.run = first
        if sequence_id is not None:
            self.sequence_id = sequence_id
        if step is not None:
            self.step = step

    @property
    def told(self) -> Drafting:
        """The figures of the run shown."""
        return self._told[self.run]

    @property
    def frame(self) -> dict[str, Any]:
        """The step shown now."""
        frame: dict[str, Any] = self.frames[self.step]
        return frame

    def summary(self) -> str:
        t = self.told
        gain = "no plain step to compare with" if t.speedup is None else f"{t.speedup:.2f} x"
        return (
            f"Speculation, {t.drafter}: {t.num_accepted} of {t.num_drafted} drafted tokens stood, "
            f"{t.tokens_a_step:.2f} tokens a step, speed-up {gain}; sequence {self.sequence_id}, "
            f"step {self.frame['step']}: {_in_words(self.frame)}; "
            f"recorded on {machine_line(self._traces[self.run])}"
        )

    # --- traits -----------------------------------------------------------------------------------

    @traitlets.validate("run")
    def _check_run(self, proposal: Any) -> str:
        require_choice("run", proposal["value"], tuple(self._traces))
        return str(proposal["value"])

    @traitlets.observe("run")
    def _on_run(self, _change: Any) -> None:
        names = sequence_ids(self._traces[self.run])
        with self.hold_sync():
            self.sequences = names
            self.cost_ratio = min(LARGEST_RATIO, self.told.cost_ratio)
            if self.sequence_id in names:
                self._reload()
            else:
                self.sequence_id = names[0]

    @traitlets.validate("sequence_id")
    def _check_sequence(self, proposal: Any) -> str:
        require_choice("sequence_id", proposal["value"], tuple(self.sequences))
        return str(proposal["value"])

    @traitlets.observe("sequence_id")
    def _on_sequence(self, _change: Any) -> None:
        self._reload()

    @traitlets.validate("step")
    def _clip_step(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self.frames) - 1))

    @traitlets.validate("cost_ratio")
    def _check_ratio(self, proposal: Any) -> float:
        require_number("cost_ratio", proposal["value"], 0, LARGEST_RATIO)
        return float(proposal["value"])

    def _reload(self) -> None:
        trace = self._traces[self.run]
        frames = drafting_frames(trace, self.sequence_id)
        if not frames:
            raise ValueError(f"sequence_id={self.sequence_id!r} has drawn no token in this trace")
        tokens = [list(pair) for pair in token_strings(trace, self.sequence_id)]
        with self.hold_sync():
            self.num_prompt = frames[0]["known"]
            self.frames = frames[:MAX_FRAMES]
            self.num_cut = len(frames) - len(self.frames)
            self.tokens = tokens[:MAX_TOKENS]
            self.step = first_told(self.frames)

    def _plain_data(self, name: str) -> dict[str, Any]:
        """A run as the browser reads it."""
        told = self._told[name]
        return asdict(told) | {
            "name": name,
            "machine": machine_line(self._traces[name]),
            "acceptance": told.acceptance,
            "share": told.share,
            "mean_length": told.mean_length,
            "tokens_a_step": told.tokens_a_step,
        }


def _in_words(frame: Mapping[str, Any]) -> str:
    if not frame["draft"]:
        return "nothing drafted"
    fates = [f"{token['text']!r} {token['fate']}" for token in frame["draft"]]
    drawn = frame["drawn"]
    return ", ".join(fates) + (f", then {drawn['text']!r}, {drawn['kind']}" if drawn else "")
