"""Constraints on the text: what a request asks for, compiled to a state for each sequence.

llguidance does the work by default (an Earley parser over a lexer of derivatives, and a trie of the
vocabulary). Our own masker, in `automaton` and `regex`, does the same for expressions and choices
in a few hundred lines that can be read.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from pdlab.models.tokenizer import Tokenizer
from pdlab.sampling.automaton import AutomatonMatcher, TokenBytes, TokenMasker, avoid
from pdlab.sampling.masks import Mask
from pdlab.sampling.matcher import Matcher
from pdlab.sampling.params import CONSTRAINTS, SamplingParams
from pdlab.sampling.regex import compile_choice, compile_regex

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

CONSTRAINT_BACKENDS = ("llguidance", "pdlab")
MAX_COMPILED = 16
"""Constraints kept compiled, for the next request with the same."""


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

    def constraint(self, params: SamplingParams) -> Matcher | None:
        """The start state of a request's constraint; None if it has none.

        Raises:
            ValueError: the constraint is faulty or impossible, or the backend has no such kind.
        """
        name = constraint_name(params)
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
        words = [text.encode() for text in texts]
        return self._once(("bad_words", *texts), lambda: self._avoid(words))

    def _once(self, key: Hashable, make: Callable[[], Matcher]) -> Matcher:
        """What was compiled before, or is now."""
        if key not in self._compiled:
            self._compiled[key] = make()
        self._compiled.move_to_end(key)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return self._compiled[key].fork()

    def _compile(self, name: str, params: SamplingParams) -> Matcher:
        if self.tokenizer is None:
            raise ValueError(f"{name} needs a tokenizer, and this model has none")
        own = self.backend == "pdlab"
        matcher = self._own(name, params) if own else self._grammar(name, params, self.tokenizer)
        if not (matcher.may_end or matcher.allowed().any()):
            raise ValueError(f"{_shown(name, params)}: there is no text that tokens can spell")
        return matcher

    def _avoid(self, words: list[bytes]) -> Matcher:
        return AutomatonMatcher(TokenMasker(avoid(words), self._token_bytes, textless=True))

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
        return AutomatonMatcher(TokenMasker(automaton, self._token_bytes))

    def _grammar(self, name: str, params: SamplingParams, tokenizer: Tokenizer) -> Matcher:
        from llguidance import LLMatcher

        state = LLMatcher(tokenizer.llguidance, _as_grammar(params), log_level=0)
        if state.is_error():
            raise ValueError(f"{_shown(name, params)}: {' '.join(state.get_error().split())}")
        end_ids = [i for i in tokenizer.eos_token_ids if i < self.vocab_size]
        return GrammarMatcher(state, self.vocab_size, end_ids)


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
                raise ValueError(f"token {output_ids[position]} is not allowed at {position}")
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

    def fork(self) -> GrammarMatcher:
        fork = GrammarMatcher(self._state.deep_copy(), self._vocab_size, self._end_ids)
        fork._num_synced = self._num_synced
        return fork


def constraint_name(params: SamplingParams) -> str | None:
    """Which of the CONSTRAINTS a request has."""
    return next((name for name in CONSTRAINTS if getattr(params, name) is not None), None)


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
