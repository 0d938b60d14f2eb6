"""`--speculate`: who guesses tokens ahead, in a word."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlab.engine.drafting import Speculation
    from pdlab.engine.metrics import RequestMetrics

FORMS = {
    "prompt_lookup": "prompt_lookup[:TOKENS]",
    "self": "self:WEIGHTS[:TOKENS]",
    "early_exit": "early_exit:LAYERS[:TOKENS]",
    "model": "model:NAME[:TOKENS]",
}


def parse_speculation(text: str | None) -> Speculation | None:
    """`prompt_lookup:5`, `self:int4:4`, `early_exit:10:3`, `model:NAME:auto`; None for None.

    TOKENS is a number or `auto`, and may be left out. What stands between it and the first word may
    have colons of its own: `self:int4:gptq:4`.

    Raises:
        ValueError: it is of none of these forms, or a number is out of range.
    """
    if text is None:
        return None
    from pdlab.speculate import DraftModel, EarlyExit, PromptLookup, SelfDraft

    kind, *words = text.split(":")
    if kind not in FORMS:
        raise ValueError(f"speculate={text!r:.60} must be one of {', '.join(FORMS.values())}")
    num_tokens: dict[str, Any] = {}
    if words and _is_length(words[-1]):
        num_tokens["num_tokens"] = _number(words.pop())
    subject = ":".join(words)
    try:
        if kind == "prompt_lookup" and not words:
            return PromptLookup(**num_tokens)
        if kind == "self" and subject:
            return SelfDraft(subject, **num_tokens)
        if kind == "model" and subject:
            return DraftModel(subject, **num_tokens)
        if kind == "early_exit" and (subject or num_tokens):
            # of one number alone, it is that of the layers
            layers = _number(subject) if subject else num_tokens.pop("num_tokens")
            if isinstance(layers, int):
                return EarlyExit(layers, **num_tokens)
    except ValueError as error:
        raise ValueError(f"speculate={text!r:.60}: {error}") from error
    raise ValueError(f"speculate={text!r:.60} must be {FORMS[kind]}")


def _is_length(word: str) -> bool:
    return word == "auto" or _number(word) != word


def _number(word: str) -> int | str:
    """A number, or the word itself."""
    return int(word) if word.isascii() and word.isdigit() and len(word) < 10 else word


def drafts_line(metrics: RequestMetrics) -> str:
    """What came of a request's drafts."""
    drafted, accepted = metrics.num_draft_tokens, metrics.num_accepted_tokens
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    return f"drafts: {accepted:,} of {drafted:,} tokens were accepted{share}"
