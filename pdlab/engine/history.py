"""Which tokens of a conversation may stay when its text goes on."""

from __future__ import annotations

from collections.abc import Sequence

from pdlab.models import Tokenizer


def continue_tokens(tokenizer: Tokenizer, seen: list[int], rendered: str) -> list[int]:
    """Token ids that spell `rendered`, beginning with as many of `seen` as possible.

    All of `seen` stays if it spells the beginning of the text; a last end token that the template
    does not write falls away (after `stop` it is `<|im_end|>`, which a template does write; after
    `length` and `abort` there is none). The rest is encoded apart. Where the template has rewritten
    history (Qwen3 drops the thinking) or somebody has (`undo`), what is encoded begins at a special
    token, for there a tokenizer always cuts: each message is in the tokens it had, or in those that
    the tokenizer gives it, never in a mixture.
    """
    whole = tokenizer.encode(rendered)
    text = spell(tokenizer, whole)  # not `rendered`: a normalizer may have changed it
    kept = _num_kept(tokenizer, seen, text)
    rest = text[len(spell(tokenizer, seen[:kept])) :]
    joined = seen[:kept] + tokenizer.encode(rest)
    return joined if spell(tokenizer, joined) == text else whole


def _num_kept(tokenizer: Tokenizer, seen: list[int], text: str) -> int:
    """How many of `seen` may stand before the rest of the text, which is encoded."""
    without_end = len(seen) - (bool(seen) and seen[-1] in tokenizer.eos_token_ids)
    for count in (len(seen), without_end):
        if text.startswith(spell(tokenizer, seen[:count])):
            return count
    special, end, kept = tokenizer.special_ids, 0, 0
    octets = text.encode()
    names = tuple(name for i in special if (name := tokenizer.token_bytes(i)))
    for count, token_id in enumerate(seen):
        piece = tokenizer.token_bytes(token_id) or b""
        if octets.startswith(names, end) or end == len(octets):
            kept = count  # what comes next is cut off here by the tokenizer, too
        if not octets.startswith(piece, end):
            break
        end += len(piece)
    return kept


def spell(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """The tokens' bytes as text, special tokens by their names; U+FFFD where they are none."""
    octets = b"".join(tokenizer.token_bytes(token_id) or b"" for token_id in token_ids)
    return octets.decode(errors="replace")
