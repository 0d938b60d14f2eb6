"""How the next token is chosen and when to stop: what one request asks for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from pdlab.requirements import LARGEST_SEED, require_bool, require_int, require_number, shown

if TYPE_CHECKING:
    from pdlab.sampling.processors import LogitsProcessor

MAX_TEMPERATURE = 1000
"""Beyond this every token is as likely as any other."""
GREEDY_BELOW = 1e-5
"""Temperatures under this choose the most probable token: the difference could not be seen."""
MAX_PENALTY = 100
MAX_LOGPROBS = 1000
CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")
"""Parameters that say what text may be written; a request has at most one."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when to stop.

    What changes logits comes in one order, whatever the order here; `pdlab.sampling.CHAIN` is that
    order.

    Raises:
        ValueError: a field is out of range, or two do not go together.
    """

    temperature: float = 0.0
    """0 takes the most probable token; so does anything below GREEDY_BELOW."""
    top_k: int = 0
    """Keep only the k most probable tokens, and those as probable as the last of them. 0 and -1
    keep all, and so does any number from the vocabulary's size on."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens that have this probability together (Holtzman et al.
    2020, nucleus sampling). The best token always stays, at 0 it stays alone."""
    min_p: float = 0.0
    """Keep tokens that have at least this part of the best token's probability (Nguyen et al.
    2024)."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest to the expected one, until they have this
    probability together (Meister et al. 2023, locally typical sampling)."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt or the output
    (Keskar et al. 2019, CTRL). Above 1 discourages, below 1 encourages."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it stands in the output."""
    presence_penalty: float = 0.0
    """Subtracted from a token's logit if it stands in the output at all."""
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """Added to the logits of single tokens, -100 to 100."""
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    """What must not be written: texts, which no combination of tokens may spell (control tokens are
    no text), or exact sequences of token ids."""
    seed: int | None = None
    """With a seed, the same tokens each time, alone or in company."""
    max_tokens: int = 128
    """Most tokens to generate, at least 1; the token that ends the text counts."""
    min_tokens: int = 0
    """Until so many tokens are there, nothing stops the text: tokens that would are forbidden, and
    stop strings are plain text."""
    stop: tuple[str, ...] = ()
    """Texts that end the output where they first stand complete; one or several."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, besides the model's own."""
    include_stop: bool = False
    """Leave the stop string, or the text of the token that stopped, in the text. Control tokens
    have text only without `skip_special_tokens`."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""
    logprobs: int | None = None
    """Return the log probability of each token, and of so many most probable ones beside it, in the
    model's own distribution: before anything here changed it."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt. Such a request does not use the prefix cache: of what
    is not computed there are no logits. A stream does not bring them."""
    n: int = 1
    """Samples of the same prompt. They share its K and V, and each block until they write to it."""
    prefix_cache: bool = True
    """Read from the engine's prefix cache, and leave this request's own blocks in it."""
    json_schema: Mapping[str, Any] | str | None = field(default=None, hash=False)
    """Write only JSON that this schema allows (an object, or its text). Under this and the other
    constraints, stop strings and stop tokens of the request still end the text where they come."""
    regex: str | None = None
    """Write only a text that this expression matches from its first character to its last."""
    choice: tuple[str, ...] | None = None
    """Write one of these texts."""
    grammar: str | None = None
    """Write only what this Lark grammar derives, as llguidance reads it."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Your own changes to the logits; see `pdlab.sampling.LogitsProcessor`."""
    best_of: None = None
    """Not supported: ask for `n` samples and choose among them by their logprobs."""

    def __post_init__(self) -> None:
        require_number("temperature", self.temperature, 0, MAX_TEMPERATURE)
        require_int("top_k", self.top_k, least=-1)
        for name in ("top_p", "min_p", "typical_p"):
            require_number(name, getattr(self, name), 0, 1)
        require_number("repetition_penalty", self.repetition_penalty, 1 / MAX_PENALTY, MAX_PENALTY)
        for name in ("frequency_penalty", "presence_penalty"):
            require_number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        for name in ("max_tokens", "n"):
            require_int(name, getattr(self, name), least=1)
        require_int("min_tokens", self.min_tokens, least=0)
        for name in ("include_stop", "ignore_eos", "skip_special_tokens", "prefix_cache"):
            require_bool(name, getattr(self, name))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                require_int(name, getattr(self, name), least=0, most=MAX_LOGPROBS)
        if self.seed is not None:
            require_int("seed", self.seed, least=0, most=LARGEST_SEED)
        self._check_lists()
        self._check_together()

    def _check_lists(self) -> None:
        from pdlab.sampling.processors import LogitsProcessor  # it knows SamplingParams

        self._set("stop", _texts("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        self._set("bad_words", _bad_words(self.bad_words))
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias={shown(self.logit_bias)} must map token ids to numbers")
        for token_id, bias in self.logit_bias.items():
            require_int("logit_bias: token id", token_id, least=0)
            require_number(f"logit_bias[{token_id}]", bias, -100, 100)
        self._set("logit_bias", dict(self.logit_bias))
        if not isinstance(self.logits_processors, list | tuple):
            raise ValueError(
                f"logits_processors={shown(self.logits_processors)} must be a list of processors"
            )
        for processor in self.logits_processors:
            if not isinstance(processor, LogitsProcessor):
                raise ValueError(f"logits_processors: {processor!r:.60} is no LogitsProcessor")
            if not isinstance(processor.name, str) or not processor.name:
                raise ValueError(f"logits_processors: {processor!r:.60} has no name")
        self._set("logits_processors", tuple(self.logits_processors))

    def _check_together(self) -> None:
        if self.best_of is not None:
            raise ValueError(
                f"best_of={shown(self.best_of)} is not supported: ask for n samples with "
                "logprobs=0 and take the best"
            )
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than {self.max_tokens=}")
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[0]} and {given[1]} are both given, a request has one at most")
        if self.choice is not None:
            self._set("choice", _texts("choice", self.choice, least=1))
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"{name}={shown(getattr(self, name))} must be text")
            _check_unicode(name, getattr(self, name) or "")
        if self.json_schema is not None:
            self._set("json_schema", _schema(self.json_schema))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def constraint_name(self) -> str | None:
        """Which of the CONSTRAINTS it has."""
        return next((name for name in CONSTRAINTS if getattr(self, name) is not None), None)

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON knows them; a user's own processors by their names."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        values["bad_words"] = [w if isinstance(w, str) else list(w) for w in self.bad_words]
        values["logits_processors"] = [p.name for p in self.logits_processors]
        values["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        return values


def _texts(name: str, value: object, least: int = 0) -> tuple[str, ...]:
    """One text, or several, as a tuple."""
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"{name}={shown(value)} must be text or a list of texts")
    for text in texts:
        _check_unicode(name, text)
    if len(texts) < least:
        raise ValueError(f"{name} has {len(texts)} texts, it must have at least {least}")
    if name == "stop" and "" in texts:
        raise ValueError("stop has an empty text: it would stop at once")
    return tuple(texts)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name}={shown(value)} must be a list of token ids")
    for token_id in value:
        require_int(f"{name}: token id", token_id, least=0)
    return tuple(value)


def _bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise ValueError(f"bad_words={value!r:.60} must be a list of texts or token id lists")
    words = [w if isinstance(w, str) else _token_ids("bad_words", w) for w in value]
    if not all(words):
        raise ValueError("bad_words has an empty entry: it would forbid everything")
    for word in words:
        _check_unicode("bad_words", word if isinstance(word, str) else "")
    return tuple(words)


def _schema(value: Mapping[str, Any] | str) -> dict[str, Any]:
    """A JSON schema as plain data: what JSON cannot say is no schema."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        schema = json.loads(text, parse_constant=_no_number)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json_schema={shown(value)} is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema={shown(value)} must be a JSON object")
    return schema


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no number in JSON")


def _check_unicode(name: str, text: str) -> None:
    """Raise a ValueError for half a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} is not valid Unicode: {error}") from error
