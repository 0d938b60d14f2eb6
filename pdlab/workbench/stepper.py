"""The Stepper widget: one sequence's walk through the engine, step by step, recorded or live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import traitlets

from pdlab.trace.trace import Trace
from pdlab.workbench.frames import stepper_frames, token_strings
from pdlab.workbench.sequences import request_of, sequence_ids
from pdlab.workbench.widget import TraceWidget, machine_line

if TYPE_CHECKING:
    from pdlab.engine import Engine


MAX_FRAMES = 1000
"""Frames that one Stepper sends to the browser, about 1 KB each; its footer says when it cuts."""


class Stepper(TraceWidget):
    """Tokenize, prefill, decode, decode ...: every picture is a recorded step.

    `Stepper(trace)` walks through a recording. `Stepper(engine=engine, sequence_id=...)` is live:
    at the end of what is recorded, its forward button runs one `engine.step()`. Moving through the
    frames happens in the browser alone; `widget.step = 3` moves it from Python, to frame 3. Frame 0
    is the prompt, so the engine's own step numbers differ; the page shows both.
    """

    name = "stepper"
    shared = ("transport",)

    header = traitlets.Dict().tag(sync=True)
    """Constants of the run: sequences, block size, machine, provenance."""
    sequence_id = traitlets.Unicode().tag(sync=True)
    prompt = traitlets.Unicode().tag(sync=True)
    tokens = traitlets.List().tag(sync=True)
    frames = traitlets.List().tag(sync=True)
    step = traitlets.Int(0).tag(sync=True)
    """Number of the frame shown; 0 is the tokenized prompt, 1 the first engine step of its life."""
    live = traitlets.Bool(False).tag(sync=True)
    busy = traitlets.Bool(False).tag(sync=True)
    done = traitlets.Bool(False).tag(sync=True)
    message = traitlets.Unicode().tag(sync=True)
    """What went wrong in the last live step, if anything."""

    def __init__(
        self,
        trace: Trace | None = None,
        sequence_id: str | None = None,
        *,
        engine: Engine | None = None,
        step: int = 0,
    ) -> None:
        if (trace is None) == (engine is None):
            raise ValueError("Stepper takes a trace or an engine, one of the two")
        self._engine = engine
        self._trace = engine.trace if engine is not None else trace or Trace()
        if not self._trace.requests:
            raise ValueError("trace holds no request: run the engine first, or submit a prompt")
        first = next(iter(self._trace.requests))
        super().__init__(live=engine is not None, header=self._header())
        self.on_msg(self._on_message)
        self.sequence_id = sequence_id or first
        self.step = step

    @classmethod
    def live_run(cls, engine: Engine, prompt: Any, params: Any = None) -> Stepper:
        """Submit a prompt and step through it: each forward is one `engine.step()`."""
        return cls(engine=engine, sequence_id=engine.submit(prompt, params))

    @property
    def frame(self) -> dict[str, Any]:
        """The frame shown now, as `stepper_frames` made it."""
        return self.frames[self.step]

    def advance(self) -> None:
        """Run one engine step and show it; after the end, or without an engine, do nothing."""
        if self._engine is None or self.done:
            self.busy = False
            return
        self.busy = True
        try:
            self._engine.step()
            self.message = ""
        except Exception as error:
            self.message = f"{type(error).__name__}: {error}"
        finally:
            self._reload()
            self.step = len(self.frames) - 1
            self.busy = False

    def summary(self) -> str:
        frame = self.frame
        where = "prompt" if frame["step"] is None else f"engine step {frame['step']}"
        return f"Stepper, sequence {self.sequence_id}, frame {self.step}, {where}: {frame['title']}"

    @traitlets.observe("sequence_id")
    def _on_sequence(self, _change: Any) -> None:
        self._reload()

    @traitlets.validate("step")
    def _clip_step(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self.frames) - 1))

    def _reload(self) -> None:
        with self.hold_sync():
            self.prompt = request_of(self._trace, self.sequence_id).prompt
            self.tokens = [list(pair) for pair in token_strings(self._trace, self.sequence_id)]
            frames = stepper_frames(self._trace, self.sequence_id)
            self.frames = frames[:MAX_FRAMES]
            self.header = self._header() | {"cut": max(0, len(frames) - MAX_FRAMES)}
            self.step = min(self.step, len(self.frames) - 1)
            self.done = frames[-1]["finish_reason"] is not None or len(frames) >= MAX_FRAMES

    def _header(self) -> dict[str, Any]:
        engine = self._trace.engine
        return {
            "sequences": [{"id": name} for name in sequence_ids(self._trace)],
            "block_size": engine["block_size"],
            "num_blocks": engine["num_blocks"],
            "machine": machine_line(self._trace),
            "provenance": "recorded" if self._engine is None else "measured",
        }

    def _on_message(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("type") == "advance":
            self.advance()
