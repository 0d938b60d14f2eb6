"""Constraints on the text: what a request asks for, compiled to a state for each sequence.

llguidance does the work by default (an Earley parser over a lexer of derivatives, and a trie of the
vocabulary). Our own masker, in `automaton` and `regex`, does the same for expressions and choices
in a few hundred lines that can be read.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pdlab.models.tokenizer import Tokenizer
from pdlab.sampling.automaton import (
    AutomatonMatcher,
    ByteAutomaton,
    TokenBytes,
    TokenMasker,
    avoid,
)
from pdlab.sampling.masks import Mask
from pdlab.sampling.matcher import Matcher
from pdlab.sampling.params import SamplingParams
from pdlab.sampling.regex import compile_choice, compile_regex

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

CONSTRAINT_BACKENDS = ("llguidance", "pdlab")
MAX_COMPILED = 8
"""Constraints kept compiled, for the next request with the same."""
MAX_CHOICES = 1000
MAX_SPECIFICATION = 200_000
"""Characters of a schema, an expression, a grammar, or all choices."""
LARGEST_BOUND = 2**53
MAX_MASK_BYTES = 32 * 2**20
"""Memory for the masks of one compiled constraint."""


class Compiler:
    """Compiles constraints for one vocabulary.

    Args:
        vocab_size: tokens that the model has logits for; may be more than the tokenizer knows.
        backend: one of CONSTRAINT_BACKENDS.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, backend: str = "llguidance"):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.backend = backend
        self._compiled: OrderedDict[Hashable, Matcher] = OrderedDict()
        """Start states made before, the last used at the end; they share their masks."""
        self._lock = threading.Lock()

    def constraint(self, params: SamplingParams) -> Matcher | None:
        """The start state of a request's constraint; None if it has none.

        Raises:
            ValueError: the constraint is faulty or impossible, or the backend has no such kind.
        """
        name = params.constraint_name
        if name is None:
            return None
        return self._once((name, str(getattr(params, name))), lambda: self._compile(name, params))

    def bad_words(self, params: SamplingParams) -> Matcher | None:
        """The start state of a request's unwanted texts; None if it has none.

        Raises:
            ValueError: there are texts and no tokenizer.
        """
        texts = [word for word in params.bad_words if isinstance(word, str)]
        if not texts:
            return None
        if self.tokenizer is None:
            raise ValueError(f"bad_words={texts[0]!r:.60}: the model has no tokenizer for texts")
        for token_id in self.tokenizer.special_ids:
            name = self.tokenizer.token_text(token_id)
            if any(name in text for text in texts):
                raise ValueError(
                    f"bad_words names the control token {name}, which is no text: forbid it by its "
                    f"id, ({token_id},)"
                )
        words = [text.encode() for text in texts]
        return self._once(("bad_words", *texts), lambda: self._avoid(words))

    def _once(self, key: Hashable, make: Callable[[], Matcher]) -> Matcher:
        """What was compiled before, or is now."""
        with self._lock:
            if key not in self._compiled:
                self._compiled[key] = make()
            self._compiled.move_to_end(key)
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return self._compiled[key].fork()

    def _compile(self, name: str, params: SamplingParams) -> Matcher:
        if self.tokenizer is None:
            raise ValueError(f"{name} needs a tokenizer, and this model has none")
        _check_size(name, params)
        own = self.backend == "pdlab"
        matcher = self._own(name, params) if own else self._grammar(name, params, self.tokenizer)
        if not (matcher.may_end or matcher.allowed().any()):
            problem = matcher.problem or "there is no text that tokens can spell"
            raise ValueError(f"{_shown(name, params)}: {problem}")
        return matcher

    def _avoid(self, words: list[bytes]) -> Matcher:
        return AutomatonMatcher(self._masker(avoid(words), textless=True))

    def _masker(self, automaton: ByteAutomaton, textless: bool = False) -> TokenMasker:
        return TokenMasker(
            automaton, self._token_bytes, textless=textless, max_cached_bytes=MAX_MASK_BYTES
        )

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        assert self.tokenizer is not None
        return TokenBytes.of(self.tokenizer, self.vocab_size)

    def _own(self, name: str, params: SamplingParams) -> Matcher:
        if params.regex is not None:
            automaton = compile_regex(params.regex)
        elif params.choice is not None:
            automaton = compile_choice(params.choice)
        else:
            raise ValueError(f"{name} needs constraint_backend='llguidance', not 'pdlab'")
        return AutomatonMatcher(self._masker(automaton))

    def _grammar(self, name: str, params: SamplingParams, tokenizer: Tokenizer) -> Matcher:
        from llguidance import LLMatcher

        if params.choice is not None and len(params.choice) > MAX_CHOICES:
            raise ValueError(
                f"choice has {len(params.choice)} texts, llguidance takes {MAX_CHOICES}; "
                "constraint_backend='pdlab' takes more"
            )
        _check_bounds(params.json_schema)
        ends = {i: tokenizer.token_text(i) for i in tokenizer.eos_token_ids if i < self.vocab_size}
        for end in ends.values():
            if end in (params.grammar or ""):
                raise ValueError(
                    f"grammar names {end}, which ends a text; it comes by itself where the text "
                    "may end"
                )
        try:
            state = LLMatcher(tokenizer.llguidance, _as_grammar(params), log_level=0)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{_shown(name, params)}: {error}") from error
        if state.is_error():
            raise ValueError(f"{_shown(name, params)}: {_in_short(state.get_error())}")
        return GrammarMatcher(state, self.vocab_size, list(ends))


class GrammarMatcher(Matcher):
    """A grammar's state in llguidance."""

    def __init__(self, state: LLMatcher, vocab_size: int, end_ids: Sequence[int]):
        self._state = state
        self._vocab_size = vocab_size
        self._end_ids = list(end_ids)
        self._num_synced = 0

    def sync(self, output_ids: Sequence[int]) -> None:
        for position in range(self._num_synced, len(output_ids)):
            if not self._state.consume_token(output_ids[position]):
                raise ValueError(
                    f"the constraint cannot follow the text after {position} tokens: {self.problem}"
                )
            self._num_synced += 1

    def allowed(self) -> Mask:
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        bits = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        if not self._state.is_stopped():  # that no token goes on shows only now
            known = np.unpackbits(bits, bitorder="little", count=self._vocab_size)
            allowed[: len(known)] = known
            allowed[self._end_ids] = False
        return allowed

    @property
    def may_end(self) -> bool:
        return self._state.is_accepting()

    @property
    def is_over(self) -> bool:
        return self._state.is_stopped() and self._state.is_accepting()

    @property
    def problem(self) -> str:
        return _in_short(self._state.get_error()) if self._state.is_error() else ""

    def fork(self) -> GrammarMatcher:
        fork = GrammarMatcher(self._state.deep_copy(), self._vocab_size, self._end_ids)
        fork._num_synced = self._num_synced
        return fork


def _as_grammar(params: SamplingParams) -> str:
    """The request's constraint as llguidance takes it."""
    from llguidance import LLMatcher

    if params.json_schema is not None:
        # Where white space may stand, a model may write white space for ever.
        compact: JsonCompileOptions = {"whitespace_flexible": False}
        return LLMatcher.grammar_from_json_schema(json.dumps(params.json_schema), defaults=compact)
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        texts = " | ".join(json.dumps(text) for text in params.choice)
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    assert params.grammar is not None
    return LLMatcher.grammar_from_lark(params.grammar)


def _shown(name: str, params: SamplingParams) -> str:
    return f"{name}={getattr(params, name)!r:.60}"


def _check_size(name: str, params: SamplingParams) -> None:
    """Refuse what would take long to compile, as nobody can interrupt that."""
    value = getattr(params, name)
    size = len(json.dumps(value)) if name == "json_schema" else sum(map(len, value))
    if size > MAX_SPECIFICATION:
        raise ValueError(f"{name} has {size} characters, it may have {MAX_SPECIFICATION}")


def _check_bounds(schema: object) -> None:
    """Refuse bounds of numbers that llguidance would not keep.

    It cuts bounds off at 64 bits, and lets a number be what `exclusive` bounds exclude.
    """
    parts = schema.values() if isinstance(schema, dict) else schema
    if isinstance(parts, str) or not isinstance(parts, Iterable):
        return
    if isinstance(schema, dict):
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            bound = schema.get(name)
            if isinstance(bound, int | float) and abs(bound) > LARGEST_BOUND:
                raise ValueError(f"json_schema: {name} is beyond +-{LARGEST_BOUND}")
            excludes = name.startswith("exclusive") and bound is not None
            if excludes and schema.get("type") != "integer":
                raise ValueError(f"json_schema: {name} is supported for integers only")
    for part in parts:
        _check_bounds(part)


def _in_short(message: str) -> str:
    """The first lines of what llguidance says; the state of its parser may follow them."""
    return " ".join(message.split("<state>")[0].split())[:300]
