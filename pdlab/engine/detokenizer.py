"""Tokens to text, one at a time: never half a character, and never one that is not certain yet."""

from __future__ import annotations

import codecs

from pdlab.models.tokenizer import Tokenizer

WINDOW = 16
"""Tokens that are decoded again, at most, where text depends on the tokens before."""


class Detokenizer:
    """Turns one sequence's tokens into pieces of text whose sum is the one-shot text.

    With a byte-level vocabulary every token is a string of bytes, and a UTF-8 decoder holds back
    the bytes of an unfinished character. Characters that readers see as one (a letter and its
    combining mark, the parts of a family emoji) may come in several pieces: no one can know that
    nothing more will join them. Without a tokenizer there is no text at all.

    Args:
        skip_special_tokens: leave control tokens out.
    """

    def __init__(self, tokenizer: Tokenizer | None, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids: list[int] = []
        self._shown = ""
        self._bytes = b""

    def add(self, token_id: int) -> str:
        """Text that became certain with this token."""
        tokenizer = self._tokenizer
        if tokenizer is None or (self._skips and token_id in tokenizer.special_ids):
            return ""
        if tokenizer.is_byte_level:
            return self._utf8.decode(tokenizer.token_bytes(token_id) or b"")
        self._ids.append(token_id)
        if tokenizer.is_byte_fallback(token_id):  # its run of bytes may still change meaning
            self._bytes += tokenizer.token_bytes(token_id) or b""
            return ""
        return self._advance(tokenizer)

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        if self._tokenizer is None:
            return ""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._advance(self._tokenizer)

    @property
    def held_bytes(self) -> bytes:
        """Bytes of the unfinished character."""
        return self._bytes or self._utf8.getstate()[0]

    def _advance(self, tokenizer: Tokenizer) -> str:
        """For other vocabularies: the last tokens' text again, less what was shown of it before."""
        text = tokenizer.decode(self._ids, skip_special_tokens=self._skips)
        new, self._shown, self._bytes = text[len(self._shown) :], text, b""
        if len(self._ids) > WINDOW:
            # One token stays: a decoder strips the space before the first.
            self._ids = self._ids[-1:]
            self._shown = tokenizer.decode(self._ids, skip_special_tokens=self._skips)
        return new
