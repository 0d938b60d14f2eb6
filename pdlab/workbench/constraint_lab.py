"""The ConstraintLab widget: a constrained run, step by step, and what its mask let through."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import traitlets

from pdlab.engine import SamplingParams, admission
from pdlab.engine.admission import Prompt
from pdlab.engine.output import CONSTRAINT_OVER
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.requirements import require_choice
from pdlab.sampling.constraints import CONSTRAINT_BACKENDS
from pdlab.sampling.params import CONSTRAINTS
from pdlab.sampling.regex import compile_regex
from pdlab.workbench.automaton_data import MAX_DRAWN, automaton_drawing
from pdlab.workbench.constraint_lab_data import (
    ConstrainedRun,
    frames,
    own_automaton,
    run_constrained,
)
from pdlab.workbench.widget import TraceWidget

MAX_PROMPT = 512
"""Tokens of the longest prompt."""
MAX_STEPS = 96
"""Most tokens that a run generates: each step is shown."""
EXAMPLES = {
    "regex": r"(19|20)\d\d-(0\d|1[0-2])-[0-3]\d",
    "choice": "yes\nno\nmaybe",
    "json_schema": json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    ),
    "grammar": 'start: term (" + " term)* " = " NUMBER\nterm: NUMBER\nNUMBER: /[0-9]{1,2}/',
}
"""What the box shows when its kind is chosen."""


class ConstraintLab(TraceWidget):
    """Which tokens a constraint allows at each step of a real, seeded run.

    Each step shows the model's most probable tokens before the mask, what of them is allowed, what
    is left after it, and what would have been taken without it. Expressions and choices are masked
    by our own automaton where it reads them; then its states are drawn, too.

    The constraint can be changed in the page, or by `choose(regex=...)`; each change runs the
    engine again. `step` moves through the steps.

    Args:
        prompt: text, token ids or chat messages, of 1 to 512 tokens.
        params: of the run; `max_tokens` is at most 96 here. May hold the constraint.
        regex, json_schema, choice, grammar: the constraint, as in `SamplingParams`; one of them.
        seed: of the draws; None for that of `params`, or else 0.
        backend: `pdlab` or `llguidance` masks; `auto` is pdlab where it can.
        exact: the engine's exact mode.

    Raises:
        ValueError: there is no constraint, or it is faulty or impossible, or the prompt does not
            fit.
    """

    name = "constraint_lab"
    shared = ("transport", "asker", "token_bars")

    header = traitlets.Dict().tag(sync=True)
    """Constants: the prompt, the model, the vocabulary's size, examples, the machine."""
    asked = traitlets.Dict().tag(sync=True)
    """What was run: kind and text of the constraint, backend, temperature, seed."""
    frames = traitlets.List().tag(sync=True)
    """The steps; see `constraint_lab_data.frames`."""
    ending = traitlets.Unicode().tag(sync=True)
    """Why the text ends where it does, in words."""
    automaton = traitlets.Dict().tag(sync=True)
    """The drawing of our own automaton, or why there is none."""
    step = traitlets.Int(0).tag(sync=True)
    """Number of the step shown, from 0 on."""
    num_done = traitlets.Int(0).tag(sync=True)
    """Tokens that a run has so far."""
    answered = traitlets.Int(0).tag(sync=True)
    """Number of the last question from the page that has its answer."""
    message = traitlets.Unicode().tag(sync=True)
    """What was wrong with the last constraint, in words."""

    def __init__(
        self,
        model: Model,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        regex: str | None = None,
        json_schema: dict[str, Any] | str | None = None,
        choice: tuple[str, ...] | list[str] | None = None,
        grammar: str | None = None,
        seed: int | None = None,
        backend: str = "auto",
        exact: bool = False,
    ) -> None:
        self._model, self._exact = model, exact
        params = SamplingParams() if params is None else params
        text, self._prompt_ids = admission.tokenize(model, prompt)
        if not 1 <= len(self._prompt_ids) <= MAX_PROMPT:
            raise ValueError(
                f"prompt has {len(self._prompt_ids)} tokens, ConstraintLab takes 1 to {MAX_PROMPT}"
            )
        if params.n != 1:
            raise ValueError(f"n={params.n}: ConstraintLab shows one sample")
        given = {"regex": regex, "json_schema": json_schema, "choice": choice, "grammar": grammar}
        values = {name: value for name, value in given.items() if value is not None}
        super().__init__(header=self._header(text))
        seed = params.seed or 0 if seed is None else seed
        params = replace(params, seed=seed, max_tokens=min(params.max_tokens, MAX_STEPS))
        self._run(_asked(_Asked(params, backend), values))
        self.on_msg(self._on_message)

    @property
    def params(self) -> SamplingParams:
        """The parameters of the run shown, as an engine takes them."""
        return self._asked.params

    @property
    def text(self) -> str:
        """The text that was generated."""
        return self._run_shown.output.text

    @property
    def frame(self) -> dict[str, Any]:
        """The step shown now."""
        return self.frames[self.step]

    def choose(self, **values: Any) -> None:
        """Run anew with another constraint, temperature, seed or backend.

        Give the constraint as `regex=`, `json_schema=`, `choice=` or `grammar=`. What is wrong is
        said in `message`, and the old run stays.
        """
        try:
            self._run(_asked(self._asked, values))
        except ValueError as error:
            self.message = str(error)
        except KeyboardInterrupt:
            self.message = "Interrupted: nothing was changed."
            raise

    def summary(self) -> str:
        frame = self.frame
        taken = "nothing" if frame["taken"] is None else repr(frame["taken"]["text"])
        return (
            f"ConstraintLab, {self.asked['kind']}, step {self.step + 1} of {len(self.frames)}: "
            f"{frame['num_allowed']:,} of {self.header['vocab_size']:,} tokens are allowed, the "
            f"mask takes {frame['removed']:.1%} of the probability, taken: {taken}; the text: "
            f"{self.text!r}"
        )

    @traitlets.validate("step")
    def _clip_step(self, proposal: Any) -> int:
        return max(0, min(proposal["value"], len(self.frames) - 1))

    # --- running ------------------------------------------------------------------------------

    def _run(self, asked: _Asked) -> None:
        """Run the engine; only if it comes to an end does the page change."""
        automaton = own_automaton(asked.params)
        kind = asked.params.constraint_name
        if kind is None:
            raise ValueError(f"ConstraintLab needs a constraint: one of {', '.join(CONSTRAINTS)}")
        backend = asked.backend
        if backend == "auto":
            backend = "llguidance" if automaton is None else "pdlab"
        self.num_done = 0
        try:
            run = run_constrained(
                self._model,
                self._prompt_ids,
                asked.params,
                backend=backend,
                exact=self._exact,
                progress=self._note_progress,
            )
        except ValueError as error:
            raise in_plain_words(asked.params, error) from error
        made = frames(run, self._token_text, self._spelling, automaton)
        drawing = None if automaton is None else automaton_drawing(automaton)
        self._asked, self._run_shown = asked, run
        with self.hold_sync():
            self.frames = made
            self.step = 0
            self.asked = asked.for_page() | {"masker": MASKERS[backend]}
            self.ending = ending(run)
            self.automaton = {
                "drawing": drawing,
                "num_states": None if automaton is None else automaton.num_states,
                "why": self._why_no_drawing(kind, automaton),
            }
            self.message = "" if run.output.error is None else str(run.output.error)

    def _note_progress(self, num_tokens: int) -> None:
        self.num_done = num_tokens

    def _token_text(self, token_id: int) -> str:
        assert self._model.tokenizer is not None  # a constraint needs one
        return self._model.tokenizer.token_text(token_id)

    def _spelling(self, token_id: int) -> bytes:
        """What a token adds to the text: control tokens nothing."""
        tokenizer = self._model.tokenizer
        assert tokenizer is not None
        if token_id in tokenizer.special_ids:
            return b""
        return tokenizer.token_bytes(token_id) or b""

    def _why_no_drawing(self, kind: str, automaton: Any) -> str:
        if automaton is not None:
            return f"{automaton.num_states} states are too many to draw; up to {MAX_DRAWN} are."
        if kind in ("json_schema", "grammar"):
            return (
                "A finite automaton cannot count brackets that nest, so llguidance keeps the state "
                "of a parser instead."
            )
        return "Our own masker does not read this expression; llguidance does."

    def _header(self, text: str) -> dict[str, Any]:
        machine = describe_machine()
        return {
            "prompt": text,
            "vocab_size": self._model.config.vocab_size,
            "examples": EXAMPLES,
            "model": self._model.name,
            "machine": f"{machine['processor']}, {machine['cores']} cores",
        }

    def _on_message(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        if content.get("type") != "run":
            return
        try:
            values = dict(content["values"])
            self.choose(**_from_page(values))
        except ValueError as error:
            self.message = str(error)
        finally:
            self.answered = content["number"]


MASKERS = {"pdlab": "our own automaton (pdlab)", "llguidance": "llguidance"}


@dataclass(frozen=True)
class _Asked:
    """What is run."""

    params: SamplingParams
    backend: str

    def __post_init__(self) -> None:
        require_choice("backend", self.backend, ("auto", *CONSTRAINT_BACKENDS))

    def for_page(self) -> dict[str, Any]:
        kind = self.params.constraint_name
        assert kind is not None
        return {
            "kind": kind,
            "source": as_source(getattr(self.params, kind)),
            "backend": self.backend,
            "temperature": self.params.temperature,
            "seed": self.params.seed,
        }


def _asked(before: _Asked, values: dict[str, Any]) -> _Asked:
    """What was asked before, with some of it changed; a new constraint replaces the old one.

    Raises:
        ValueError: a value does not fit, or there is no such.
    """
    settable = (*CONSTRAINTS, "temperature", "seed", "backend")
    for name in values:
        if name not in settable:
            raise ValueError(f"{name} is not one of {', '.join(settable)}")
    given = {name: value for name, value in values.items() if name != "backend"}
    if any(name in CONSTRAINTS for name in given):
        given = dict.fromkeys(CONSTRAINTS) | given
    return _Asked(replace(before.params, **given), values.get("backend", before.backend))


def as_source(constraint: Any) -> str:
    """A constraint as the text in the page's box."""
    if isinstance(constraint, str):
        return constraint
    if isinstance(constraint, tuple):
        return "\n".join(constraint)
    return json.dumps(constraint, ensure_ascii=False)


def _from_page(values: dict[str, Any]) -> dict[str, Any]:
    """The box's text as the parameter that its kind names; one text a line for a choice."""
    kind, source = values.pop("kind"), values.pop("source")
    require_choice("kind", kind, CONSTRAINTS)
    constraint = [line for line in source.split("\n") if line] if kind == "choice" else source
    return values | {kind: constraint}


def in_plain_words(params: SamplingParams, error: ValueError) -> ValueError:
    """What our own parser says of a faulty expression: it is plainer than llguidance's report."""
    try:
        if params.regex is not None and str(error).startswith("regex="):
            compile_regex(params.regex)
    except ValueError as plain:
        return plain
    return error


def ending(run: ConstrainedRun) -> str:
    """Why the text ends where it does."""
    output = run.output
    if output.finish_reason == "error":
        return "stuck: no token can go on"
    if output.stop_reason == CONSTRAINT_OVER:
        return "complete: nothing may follow"
    if output.finish_reason == "length":
        return f"cut after {len(output.token_ids)} tokens: not complete"
    return "ended by the model, where the constraint allowed it"
