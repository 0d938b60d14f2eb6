"""What a caller gets back: text released as soon as it is certain, and the finished request."""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field

from pdlab.engine.metrics import RequestMetrics
from pdlab.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Chunk:
    """A piece of a stream. `text` may be empty while a character's bytes are still incomplete."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    index: int = 0
    """Which of the request's samples it belongs to."""


@dataclass(frozen=True)
class Completion:
    """One sample of a finished request."""

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    """`stop`, `length`, `abort` or `error`."""
    metrics: RequestMetrics


@dataclass
class RequestOutput:
    """A finished request. `error` is set, and all else empty, if it was refused.

    `token_ids`, `text`, `finish_reason` and `metrics` are those of the first sample.
    """

    request_id: str
    prompt: str
    prompt_ids: list[int]
    completions: list[Completion]
    """As many as `SamplingParams.n` asked for; one of a refused request."""
    error: ValueError | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def finish_reason(self) -> str:
        return self.completions[0].finish_reason

    @property
    def metrics(self) -> RequestMetrics:
        return self.completions[0].metrics


@dataclass
class Detokenizer:
    """Turns tokens into text one at a time, never showing half a character.

    With a byte-level vocabulary every token is a string of bytes, and a UTF-8 decoder holds back
    the bytes of an unfinished character; so the pieces joined are the one-shot text. Special tokens
    give no text. Without a tokenizer there is no text at all.
    """

    tokenizer: Tokenizer | None
    _utf8: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    _ids: list[int] = field(default_factory=list)
    _shown: str = ""

    def add(self, token_id: int) -> str:
        """Text that became certain with this token."""
        if self.tokenizer is None or token_id in self.tokenizer.special_ids:
            return ""
        if self.tokenizer.is_byte_level:
            return self._utf8.decode(self.tokenizer.token_bytes(token_id) or b"")
        self._ids.append(token_id)
        if self.tokenizer.is_byte_fallback(token_id):  # its run of bytes may still change meaning
            return ""
        return self._advance(hold_back=True)

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        if self.tokenizer is None:
            return ""
        if self.tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._advance(hold_back=False)

    def _advance(self, hold_back: bool) -> str:
        """For other vocabularies: the whole text again, less what was shown before."""
        assert self.tokenizer is not None
        text = self.tokenizer.decode(self._ids)
        if hold_back and text.endswith("\ufffd"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        return new
