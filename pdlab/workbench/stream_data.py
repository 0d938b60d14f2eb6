"""What a stream holds back and releases, token by token: the data of StreamView.

Text goes to the reader as soon as it is certain, and not before. Two things make it wait: a token
may end within a UTF-8 character, and the end of the text may be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pdlab.engine.detokenizer import Detokenizer
from pdlab.models import Tokenizer
from pdlab.workbench.characters import (
    SHOWN_ERROR,
    CharacterPart,
    announced_size,
    character_parts,
)
from pdlab.workbench.stream_source import Emission, Rules

HELD_BYTES = re.compile(r"<((?:[0-9A-F]{2} )*[0-9A-F]{2})>\Z")
"""How a record writes the bytes of an unfinished character, at the end of what is held back."""


@dataclass(frozen=True)
class StreamRow:
    """A token on its way to the reader; plain data, ready for JSON."""

    step: int | None
    time_s: float | None
    gap_s: float | None
    """Since the token before; of the first one, since the arrival (TTFT)."""
    token_id: int
    name: str
    skipped: bool
    """A special token, which adds nothing to the text."""
    parts: list[CharacterPart]
    open: bool
    """A character is unfinished after this token."""
    released: str
    held_text: str
    held_bytes: list[int]
    reasons: list[str]
    """Why text or bytes are held back after it."""
    finish_reason: str | None
    stop: str
    """The stop string that it completed."""
    cut: str = ""
    """What the end of the stream kept from the reader: the stop string and what came after it."""
    title: str = ""
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def stream_rows(
    emissions: Sequence[Emission], tokenizer: Tokenizer, rules: Rules
) -> list[StreamRow]:
    """A row for each token: its bytes by character, what was released, what is held and why."""
    pieces = [_text_bytes(tokenizer, e.token_id, rules) for e in emissions]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rows: list[StreamRow] = []
    so_far, last_s = b"", 0.0
    for emission, piece, parts in zip(emissions, pieces, character_parts(pieces), strict=True):
        so_far += piece
        decoder.decode(piece)
        pending = decoder.getstate()[0]
        held_text, held_bytes = split_held(emission.held, so_far)
        rows.append(
            StreamRow(
                step=emission.step,
                time_s=emission.time_s,
                gap_s=None if emission.time_s is None else emission.time_s - last_s,
                token_id=emission.token_id,
                name=tokenizer.token_text(emission.token_id),
                skipped=_is_skipped(tokenizer, emission.token_id, rules),
                parts=parts,
                open=bool(pending),
                released=emission.released,
                held_text=held_text,
                held_bytes=list(held_bytes),
                reasons=_reasons(held_text, held_bytes, pending, rules.stop),
                finish_reason=emission.finish_reason,
                stop=_stop_of(emission, rules),
            )
        )
        last_s = emission.time_s or 0.0
    return _captioned(_with_cut(rows, tokenizer, rules), rules)


def split_held(held: str, so_far: bytes) -> tuple[str, bytes]:
    """What is held back, divided into text and the bytes of an unfinished character.

    A text may itself look like such bytes; they are what the tokens so far really end with.
    """
    match = HELD_BYTES.search(held)
    found = bytes.fromhex(match[1]) if match else b""
    if match and so_far.endswith(found):
        return held[: match.start()], found
    return held, b""


def _is_skipped(tokenizer: Tokenizer, token_id: int, rules: Rules) -> bool:
    return rules.skip_special_tokens and token_id in tokenizer.special_ids


def _text_bytes(tokenizer: Tokenizer, token_id: int, rules: Rules) -> bytes:
    """What a token adds to the text, as bytes."""
    if _is_skipped(tokenizer, token_id, rules):
        return b""
    return tokenizer.token_bytes(token_id) or b""


def _reasons(held_text: str, held_bytes: bytes, pending: bytes, stops: Sequence[str]) -> list[str]:
    """Why text and bytes are held back, in words."""
    reasons = []
    if held_text:
        reasons.append(_stop_reason(held_text, stops))
    if held_bytes and held_bytes == pending:
        size = announced_size(held_bytes[0])
        reasons.append(f"unfinished character: {len(held_bytes)} of {size} bytes")
    elif held_bytes:
        reasons.append("a run of byte tokens: the next byte may change what they mean")
    return reasons


def _stop_reason(held_text: str, stops: Sequence[str]) -> str:
    ends = [held_text[i:] for i in range(len(held_text))]
    possible = [repr(stop) for stop in stops if any(stop.startswith(end) for end in ends)]
    if not possible:
        return "held back by the engine"
    noun = "stop string" if len(possible) == 1 else "stop strings"
    return f"could become the {noun} {' or '.join(possible)}"


def _stop_of(emission: Emission, rules: Rules) -> str:
    """The stop string that ended the stream with this token, if one did."""
    reason = emission.stop_reason
    return reason if isinstance(reason, str) and reason in rules.stop else ""


def _with_cut(rows: list[StreamRow], tokenizer: Tokenizer, rules: Rules) -> list[StreamRow]:
    """The last row with what the end kept from the reader: all text, less what was released."""
    if not rows or rows[-1].finish_reason is None:
        return rows
    detokenizer = Detokenizer(tokenizer, rules.skip_special_tokens)
    text = "".join(detokenizer.add(row.token_id) for row in rows) + detokenizer.flush()
    released = "".join(row.released for row in rows)
    cut = text[len(released) :] if text.startswith(released) else ""
    return [*rows[:-1], replace(rows[-1], cut=cut)]


# --- words ----------------------------------------------------------------------------------------


def _captioned(rows: Sequence[StreamRow], rules: Rules) -> list[StreamRow]:
    """The rows with a title, what came in and out, and a note on why."""
    captioned = []
    for i, row in enumerate(rows):
        brought = sum(len(part.bytes) for part in row.parts)
        into = "no text" if row.skipped else _counted(brought, "byte")
        out = _counted(len(row.released), "character") if row.released else "nothing"
        note = " ".join(_sentences(row, rows[i - 1] if i else None, rules))
        captioned.append(replace(row, title=f"Token {i + 1}: {into} in, {out} out", note=note))
    return captioned


def _sentences(row: StreamRow, before: StreamRow | None, rules: Rules) -> list[str]:
    """Why this much came out with a token."""
    found = [*_freed(row, before), *_ended(row, rules)]
    if row.reasons:
        found.append(f"Held back ({'; '.join(row.reasons)}).")
    if row.skipped:
        found.append("A special token: skip_special_tokens leaves it out of the text.")
    return found or ["Nothing that follows can change this text, so it is sent at once."]


def _freed(row: StreamRow, before: StreamRow | None) -> list[str]:
    """What had waited, and waits no longer."""
    found = []
    completed = next((part for part in row.parts if part.before and part.text), None)
    if completed and completed.text != SHOWN_ERROR:
        found.append(f"It completes the {completed.size} bytes of {completed.text!r}.")
    elif before and before.open and row.parts and not row.parts[0].before:
        found.append(f"What waited never became a character: {SHOWN_ERROR} stands for it.")
    waited = before.held_text if before else ""
    if waited and row.released.startswith(waited):
        found.append(f"{waited!r} did not become a stop string after all, so it is sent now.")
    return found


def _ended(row: StreamRow, rules: Rules) -> list[str]:
    """How the stream ended with this token, if it did."""
    found = []
    if row.stop and rules.include_stop:
        found.append(f"The stop string {row.stop!r} was found, and include_stop leaves it there.")
    elif row.stop:
        found.append(f"The stop string {row.stop!r} was found and cut: no part of it was sent.")
    elif row.cut:
        found.append(f"{row.cut!r} is no part of the answer.")
    if row.finish_reason and row.open and row.released.endswith(SHOWN_ERROR):
        found.append(f"The last character stayed unfinished: {SHOWN_ERROR} stands for it.")
    if row.finish_reason:
        found.append(f"Finished: {row.finish_reason}.")
    return found


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
