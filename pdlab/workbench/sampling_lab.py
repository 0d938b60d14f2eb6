"""The SamplingLab widget: one next token, from the model's logits through the chain to the draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import traitlets

from pdlab.engine import SamplingParams, admission
from pdlab.engine.admission import Prompt
from pdlab.machine import describe_machine
from pdlab.models import Model
from pdlab.requirements import LARGEST_SEED, require_int
from pdlab.sampling.constraints import Compiler
from pdlab.sampling.matcher import Matcher
from pdlab.workbench.logits_data import NextLogits, TextSoFar
from pdlab.workbench.sampling_lab_data import (
    Outcome,
    as_result,
    draw_many,
    follow,
    link_names,
    shown_tokens,
)
from pdlab.workbench.widget import TraceWidget

MAX_PROMPT = 512
"""Tokens of the longest prompt."""
MAX_TEXT = 640
"""Tokens of the longest text, prompt and all."""
MAX_DRAWS = 100_000
SETTABLE = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "bad_words",
)
"""The parameters that have a control."""


@dataclass(frozen=True)
class _State:
    """What is asked: all else follows from it."""

    params: SamplingParams
    seed: int
    text_ids: list[int]
    position: int
    num_prompt: int
    bad_words: Matcher | None
    """The start state of the unwanted texts in `params`."""

    def __post_init__(self) -> None:
        require_int("seed", self.seed, least=0, most=LARGEST_SEED)

    @property
    def output_ids(self) -> list[int]:
        return self.text_ids[self.num_prompt : self.position]

    def value(self, name: str) -> Any:
        """A trait's value."""
        if name in ("seed", "position"):
            return getattr(self, name)
        value = getattr(self.params, name)
        return list(value) if name == "bad_words" else value


class SamplingLab(TraceWidget):
    """The next token's real distribution before and after each link of the chain, and the draw.

    The prompt runs through the engine once; after that, a change of parameters runs only the chain
    and the draw, which takes milliseconds. A token that is taken is one more forward pass. Walking
    on with what was drawn writes what `Engine.generate` writes with these parameters and this seed.

    Every parameter with a control is a trait, as are `seed` and `position`, and can be set from
    Python. Click a token of the text to stand again where it was chosen.

    Args:
        prompt: text, token ids or chat messages, of 1 to 512 tokens.
        params: what to begin with; those without a control stay as they are.
        seed: of the draws; None for that of `params`, or else 0.
        exact: compute as the engine does in exact mode (float32 only, slower).

    Raises:
        ValueError: the prompt or a parameter does not fit.
    """

    name = "sampling_lab"
    shared = ("asker", "token_bars")

    header = traitlets.Dict().tag(sync=True)
    """Constants: the model, the machine, the vocabulary's size, the links of the chain."""
    tokens = traitlets.List().tag(sync=True)
    """The text, [token id, its text] each."""
    num_prompt = traitlets.Int().tag(sync=True)
    """How many of the tokens are the prompt."""
    position = traitlets.Int().tag(sync=True)
    """Tokens before the one to be chosen; fewer than there are after going back."""
    temperature = traitlets.Float(0.0).tag(sync=True)
    top_k = traitlets.Int(0).tag(sync=True)
    top_p = traitlets.Float(1.0).tag(sync=True)
    min_p = traitlets.Float(0.0).tag(sync=True)
    typical_p = traitlets.Float(1.0).tag(sync=True)
    repetition_penalty = traitlets.Float(1.0).tag(sync=True)
    frequency_penalty = traitlets.Float(0.0).tag(sync=True)
    presence_penalty = traitlets.Float(0.0).tag(sync=True)
    logit_bias = traitlets.Dict().tag(sync=True, to_json=lambda bias, _: _named(bias))
    """Token id to what is added to its logit."""
    bad_words = traitlets.List().tag(sync=True)
    seed = traitlets.Int(0).tag(sync=True)
    result = traitlets.Dict().tag(sync=True)
    """The stages, the tokens shown, the draw; see `sampling_lab_data.as_result`."""
    counts = traitlets.Dict().tag(sync=True)
    """Real draws: how many, from which seed on, and how often each token shown came."""
    answered = traitlets.Int(0).tag(sync=True)
    """Number of the last question from the page that has its answer."""
    message = traitlets.Unicode().tag(sync=True)
    """What was wrong with the last choice, in words."""

    def __init__(
        self,
        model: Model,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        seed: int | None = None,
        exact: bool = False,
    ) -> None:
        self._model = model
        params = SamplingParams() if params is None else params
        seed = params.seed or 0 if seed is None else seed
        text, self._prompt_ids = admission.tokenize(model, prompt)
        num_prompt = len(self._prompt_ids)
        if not 1 <= num_prompt <= MAX_PROMPT:
            raise ValueError(f"prompt has {num_prompt} tokens, SamplingLab takes 1 to {MAX_PROMPT}")
        self._longest = min(MAX_TEXT, model.config.max_model_len)
        self._compiler = Compiler(model.tokenizer, model.config.vocab_size)
        admission.check_token_ids(model, params)
        if (
            model.tokenizer is not None
        ):  # spell the vocabulary now: a first bad word should not wait
            self._compiler.bad_words(SamplingParams(bad_words=("x",)))
        self._constraint = self._compiler.constraint(params)
        self._logits = NextLogits(model, self._longest, exact=exact)
        self._following = True
        super().__init__(header=self._header(text, params))
        bad_words = self._compiler.bad_words(params)
        self._show(_State(params, seed, self._prompt_ids, num_prompt, num_prompt, bad_words))
        self._following = False
        self.on_msg(self._on_message)

    @property
    def params(self) -> SamplingParams:
        """The parameters now, as an engine takes them."""
        return replace(self._state.params, seed=self._state.seed)

    @property
    def outcome(self) -> Outcome:
        """What is shown now, with the whole distributions."""
        return self._outcome

    @property
    def text(self) -> str:
        """The text up to `position`."""
        ids = self._state.text_ids[: self._state.position]
        tokenizer = self._model.tokenizer
        return tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids))

    @property
    def output_ids(self) -> list[int]:
        """Tokens after the prompt, up to `position`."""
        return self._state.output_ids

    # --- what one can do ----------------------------------------------------------------------

    def choose(self, **values: Any) -> None:
        """Set parameters; what is wrong with them is said in `message`, and the old ones stay."""
        self._say(lambda: self._set(values))

    def draw_again(self) -> None:
        """Draw with the next seed."""
        self._say(lambda: self._set({"seed": (self._state.seed + 1) % (LARGEST_SEED + 1)}))

    def draw_many(self, num: int = 1000) -> dict[int, int]:
        """Draw with the seeds 0 to `num - 1`, and show beside the distribution what came.

        Returns:
            how often each token came, by token id.

        Raises:
            ValueError: more than 100,000 draws, or none.
        """
        require_int("num", num, least=1, most=MAX_DRAWS)
        index = len(self.output_ids)
        counts = draw_many(self._outcome, range(num), index)
        shown = {str(t["id"]): counts.get(t["id"], 0) for t in self.result["tokens"]}
        others = num - sum(shown.values())
        self.counts = {"num": num, "tokens": shown, "others": others}
        return counts

    def take(self, token_id: int | None = None) -> None:
        """Write a token, the drawn one by default, where `position` is, and go on after it.

        What stood there after going back is gone. One forward pass of the model.

        Raises:
            ValueError: there is no such token, the text is full, or a constraint forbids it.
        """
        token_id = self._outcome.draw.token_id if token_id is None else token_id
        require_int("token_id", token_id, least=0, most=self._model.config.vocab_size - 1)
        self._check_takeable(token_id)
        state = self._state
        text_ids = [*state.text_ids[: state.position], token_id]
        if len(text_ids) > self._longest:
            raise ValueError(f"the text has {self._longest} tokens, there is no room for another")
        num_prompt = min(state.num_prompt, state.position)
        position = len(text_ids)
        self._show(replace(state, text_ids=text_ids, position=position, num_prompt=num_prompt))

    def rewind(self, position: int) -> None:
        """Stand where token number `position` of the text was chosen, as before it was.

        Raises:
            ValueError: the text has no such token, or none before it.
        """
        require_int("position", position, least=1, most=len(self._state.text_ids))
        self._show(replace(self._state, position=position))

    def reset(self) -> None:
        """Back to the prompt as it was given."""
        ids = self._prompt_ids
        self._show(replace(self._state, text_ids=ids, position=len(ids), num_prompt=len(ids)))

    def summary(self) -> str:
        stages, draw = self.result["stages"], self.result["draw"]
        how = "greedy" if draw["dart"] is None else f"the dart at {draw['dart']:.3f} hits"
        return (
            f"SamplingLab: {stages[-1]['left']:,} of {stages[0]['left']:,} tokens are left, "
            f"{how} {draw['text']!r} ({draw['chance']:.1%}; "
            f"{float(self._outcome.own[draw['id']]):.1%} in the model's own distribution)"
        )

    def close(self) -> None:
        """Also give the engine's memory back."""
        if hasattr(self, "_logits"):  # __init__ may have raised before there was one
            self._logits.close()
        super().close()

    # --- traits -------------------------------------------------------------------------------

    @traitlets.validate(*SETTABLE, "seed", "position")
    def _try(self, proposal: Any) -> Any:
        """Run what is proposed before it counts: after an error the old state stays."""
        name, value = proposal["trait"].name, proposal["value"]
        if self._following:
            return value
        if name == "position":
            self.rewind(value)
        else:
            self._set({name: value})
        return self._state.value(name)

    def _set(self, values: dict[str, Any]) -> None:
        for name in values:
            if name not in (*SETTABLE, "seed"):
                raise ValueError(f"{name} is not one of {', '.join(SETTABLE)} and seed")
        state = replace(self._state, seed=values.get("seed", self._state.seed))
        given = {name: value for name, value in values.items() if name != "seed"}
        params = replace(state.params, **given)
        admission.check_token_ids(self._model, params)
        bad_words = state.bad_words
        if params.bad_words != state.params.bad_words:
            bad_words = self._compiler.bad_words(params)
        self._show(replace(state, params=params, bad_words=bad_words))

    # --- computing ----------------------------------------------------------------------------

    def _show(self, state: _State) -> None:
        """Compute what follows from a state, and make it what the page shows."""
        outcome = follow(self._logits.after(state.text_ids[: state.position]), self._drawer(state))
        following = state.text_ids[state.position : state.position + 1]
        shown = shown_tokens(outcome, {*state.params.logit_bias, *following})
        self._state, self._outcome = state, outcome
        before, self._following = self._following, True
        try:
            with self.hold_sync():
                self.result = as_result(outcome, shown, self._token_text)
                self.counts, self.message = {}, ""
                self.tokens = [[i, self._token_text(i)] for i in state.text_ids]
                self.num_prompt = state.num_prompt
                for name in (*SETTABLE, "seed", "position"):
                    setattr(self, name, state.value(name))
        finally:
            self._following = before

    def _drawer(self, state: _State) -> TextSoFar:
        eos = () if state.params.ignore_eos else self._model.config.eos_token_ids
        return TextSoFar(
            params=state.params,
            seed=state.seed,
            prompt_ids=state.text_ids[: min(state.num_prompt, state.position)],
            output_ids=state.output_ids,
            stop_ids=frozenset({*eos, *state.params.stop_token_ids}),
            bad_words=state.bad_words and state.bad_words.fork(),
            constraint=self._constraint and self._constraint.fork(),
        )

    def _check_takeable(self, token_id: int) -> None:
        """Refuse what would leave a grammar, or a list of unwanted words, without a state."""
        remover = self._outcome.removed_by.get(token_id)
        if remover in ("constraint", "bad_words"):
            raise ValueError(f"{self._token_text(token_id)!r} is forbidden here by {remover}")
        if self._constraint is not None and token_id in self._drawer(self._state).stop_ids:
            raise ValueError(f"{self._token_text(token_id)!r} ends the text: nothing follows it")

    def _token_text(self, token_id: int) -> str:
        tokenizer = self._model.tokenizer
        return tokenizer.token_text(token_id) if tokenizer else f"<{token_id}>"

    def _header(self, text: str, params: SamplingParams) -> dict[str, Any]:
        config, machine = self._model.config, describe_machine()
        return {
            "prompt": text,
            "prompt_length": len(self._prompt_ids),
            "links": link_names(params),
            "vocab_size": config.vocab_size,
            "stop_ids": sorted({*config.eos_token_ids, *params.stop_token_ids}),
            "min_tokens": params.min_tokens,
            "constraint": params.constraint_name,
            "model": self._model.name,
            "machine": f"{machine['processor']}, {machine['cores']} cores",
        }

    # --- the page's questions -----------------------------------------------------------------

    def _say(self, action: Callable[[], Any]) -> None:
        """Do it; what was wrong goes into `message`."""
        try:
            action()
            self.message = ""
        except (ValueError, traitlets.TraitError) as error:
            self.message = str(error)
        except KeyboardInterrupt:
            self.message = "Interrupted: nothing was changed."
            raise

    def _on_message(self, _widget: Any, content: dict[str, Any], _buffers: Any) -> None:
        actions: dict[str, Callable[[], Any]] = {
            "set": lambda: self._set(_from_page(content["values"])),
            "draw": self.draw_again,
            "many": self.draw_many,
            "take": lambda: self.take(content.get("id")),
            "rewind": lambda: self.rewind(content["position"]),
            "reset": self.reset,
        }
        try:
            self._say(actions[content["type"]])
        finally:
            self.answered = content["number"]


def _from_page(values: dict[str, Any]) -> dict[str, Any]:
    """Numbers that a page wrote as text, and the biases, whose keys JSON made texts."""
    read = dict(values)
    if "logit_bias" in read:
        read["logit_bias"] = {int(i): bias for i, bias in read["logit_bias"].items()}
    return read


def _named(bias: dict[int, float]) -> dict[str, float]:
    """For JSON, whose keys are texts."""
    return {str(token_id): value for token_id, value in bias.items()}
