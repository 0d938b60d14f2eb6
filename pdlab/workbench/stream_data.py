"""What a stream holds back and releases, token by token: the data of StreamView.

Text goes to the reader as soon as it is certain, and not before. Two things make it wait: a token
may end within a UTF-8 character, and the end of the text may be the beginning of a stop string.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from pdlab.engine.detokenizer import Detokenizer
from pdlab.engine.stops import StopFinder
from pdlab.models import Tokenizer
from pdlab.sampling import SamplingParams
from pdlab.trace.records import SequenceRecord, StepRecord
from pdlab.trace.trace import Trace
from pdlab.workbench.sequences import request_of

HELD_BYTES = re.compile(r"<((?:[0-9A-F]{2} )*[0-9A-F]{2})>\Z")
"""How a record writes the bytes of an unfinished character, at the end of what is held back."""
SHOWN_ERROR = "\ufffd"
"""What stands in the text for bytes that are no character."""
END_OF_TOKENS = "the tokens end here"
"""How hand-made tokens finish."""


class Character(NamedTuple):
    """Bytes `start` to `end - 1` of a text: one character, or bytes that make none.

    `size` is how many bytes the first of them announces, `text` what is shown for them.
    """

    start: int
    end: int
    size: int
    text: str


def utf8_characters(data: bytes) -> Iterator[Character]:
    """Divide bytes into characters.

    Bytes that are none are grouped as Unicode 16.0, section 3.9 advises and Python's `replace`
    does: as many as could have begun a character together, one U+FFFD for each such group.
    """
    at = 0
    while at < len(data):
        end, whole = _one_character(data, at)
        text = data[at:end].decode() if whole else SHOWN_ERROR
        yield Character(at, end, announced_size(data[at]), text)
        at = end


def _one_character(data: bytes, start: int) -> tuple[int, bool]:
    """Where the character at `start` ends, and whether it is one."""
    end = start + announced_size(data[start])
    try:
        data[start:end].decode()
    except UnicodeDecodeError as error:
        return start + error.end, False
    return end, True


def announced_size(byte: int) -> int:
    """How many bytes a character has that begins with this one; 1 where none can (RFC 3629).

    0xxxxxxx is a character alone; 110xxxxx, 1110xxxx and 11110xxx lead 2, 3 and 4 bytes; 10xxxxxx
    only continues one.
    """
    sizes = ((0xC2, 0xDF, 2), (0xE0, 0xEF, 3), (0xF0, 0xF4, 4))
    return next((size for first, last, size in sizes if first <= byte <= last), 1)


@dataclass(frozen=True)
class CharacterPart:
    """The bytes that one token brings of one character."""

    bytes: list[int]
    before: int
    """Bytes of the same character that came with earlier tokens."""
    size: int
    """Bytes of the whole character, as its first one announces."""
    text: str
    """The character, on the part that completes it; elsewhere empty. U+FFFD for what is none."""


@dataclass(frozen=True)
class Emission:
    """What came of one token, as it was recorded, or as the engine's own parts answer to it."""

    token_id: int
    released: str
    held: str
    """Still held back after it: text, then the bytes of an unfinished character as `<F0 9F>`."""
    step: int | None = None
    time_s: float | None = None
    """Since the request arrived."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Rules:
    """What decides about holding back: the stop strings, and whether special tokens are text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True

    @classmethod
    def of(cls, params: dict[str, Any]) -> Rules:
        """Of a recorded request."""
        stop = params.get("stop") or ()
        return cls(
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            include_stop=params.get("include_stop", False),
            skip_special_tokens=params.get("skip_special_tokens", True),
        )


@dataclass(frozen=True)
class HandMade:
    """Tokens that no model made, and the rules by which they are streamed.

    Like a run, their stream ends at a stop string; tokens after it are not read.
    """

    token_ids: list[int]
    rules: Rules


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


# --- where emissions come from --------------------------------------------------------------------


def recorded_emissions(trace: Trace, sequence_id: str) -> list[Emission]:
    """One for each token of a recorded sequence; times are ends of steps, as TTFT is counted.

    Raises:
        ValueError: there is no such sequence, or no token came of it.
    """
    arrival_s = request_of(trace, sequence_id).arrival_s
    emissions = [
        _recorded(step, mine, arrival_s)
        for step, mine in trace.sequence_steps(sequence_id)
        if mine.sampled is not None
    ]
    if not emissions:
        raise ValueError(f"sequence_id={sequence_id!r} has no token in this trace")
    return emissions


def _recorded(step: StepRecord, mine: SequenceRecord, arrival_s: float) -> Emission:
    assert mine.sampled is not None
    return Emission(
        token_id=mine.sampled,
        released=mine.text,
        held=mine.held,
        step=step.step,
        time_s=step.start_s + step.wall_s - arrival_s,
        finish_reason=mine.finish_reason,
        stop_reason=mine.stop_reason,
    )


def replayed_emissions(tokenizer: Tokenizer, tokens: HandMade) -> list[Emission]:
    """What the engine's detokenizer and stop search make of tokens, up to a stop string.

    After the last one comes what was held back, as at the end of a request.
    """
    rules = tokens.rules
    detokenizer = Detokenizer(tokenizer, rules.skip_special_tokens)
    finder = StopFinder(rules.stop, rules.include_stop)
    emissions = []
    for token_id in tokens.token_ids:
        released = finder.push(detokenizer.add(token_id))
        held = finder.held + bytes_shown(detokenizer.held_bytes)
        emissions.append(Emission(token_id, released, held))
        if finder.found is not None:
            break
    rest = ""
    if finder.found is None:
        rest = finder.push(detokenizer.flush()) + finder.flush()
    emissions[-1] = replace(
        emissions[-1],
        released=emissions[-1].released + rest,
        held="",
        finish_reason=END_OF_TOKENS if finder.found is None else "stop",
        stop_reason=finder.found,
    )
    return emissions


def rules_of(stop: str | Sequence[str], include_stop: bool, skip_special_tokens: bool) -> Rules:
    """Checked as the engine checks a request's.

    Raises:
        ValueError: a stop string is empty or no text, or a switch is no bool.
    """
    params = SamplingParams(
        stop=stop,  # type: ignore[arg-type]
        include_stop=include_stop,
        skip_special_tokens=skip_special_tokens,
    )
    return Rules.of(params.to_dict())


def check_token_ids(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """The ids as a list.

    Raises:
        ValueError: there is none, or no token has one of them.
    """
    ids = list(token_ids)
    if not ids:
        raise ValueError("token_ids is empty: a stream needs at least one token")
    for token_id in ids:
        if not isinstance(token_id, int) or tokenizer.token_bytes(token_id) is None:
            raise ValueError(
                f"token_ids: {token_id!r:.40} is none of the {tokenizer.vocab_size:,} tokens"
            )
    return ids


# --- rows -----------------------------------------------------------------------------------------


def stream_rows(
    emissions: Sequence[Emission], tokenizer: Tokenizer, rules: Rules
) -> list[StreamRow]:
    """A row for each token: its bytes by character, what was released, what is held and why."""
    pieces = [_text_bytes(tokenizer, e.token_id, rules) for e in emissions]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rows: list[StreamRow] = []
    so_far, last_s = b"", 0.0
    for emission, piece, parts in zip(emissions, pieces, _parts(pieces), strict=True):
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


def bytes_shown(data: bytes) -> str:
    """Bytes as a record writes them, `<F0 9F>`; nothing for none."""
    return f"<{data.hex(' ').upper()}>" if data else ""


def _is_skipped(tokenizer: Tokenizer, token_id: int, rules: Rules) -> bool:
    return rules.skip_special_tokens and token_id in tokenizer.special_ids


def _text_bytes(tokenizer: Tokenizer, token_id: int, rules: Rules) -> bytes:
    """What a token adds to the text, as bytes."""
    if _is_skipped(tokenizer, token_id, rules):
        return b""
    return tokenizer.token_bytes(token_id) or b""


def _parts(pieces: Sequence[bytes]) -> list[list[CharacterPart]]:
    """The bytes of each token, divided by the characters of the whole text."""
    data = b"".join(pieces)
    found: list[list[CharacterPart]] = [[] for _ in pieces]
    owners = [i for i, piece in enumerate(pieces) for _ in piece]
    for character in utf8_characters(data):
        at = character.start
        while at < character.end:
            owner, first = owners[at], at
            while at < character.end and owners[at] == owner:
                at += 1
            found[owner].append(
                CharacterPart(
                    bytes=list(data[first:at]),
                    before=first - character.start,
                    size=character.size,
                    text=character.text if at == character.end else "",
                )
            )
    return found


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
