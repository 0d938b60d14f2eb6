"""Bytes divided into the characters of UTF-8, also where tokens cut one in two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

SHOWN_ERROR = "\ufffd"
"""What stands in the text for bytes that are no character."""


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


def character_parts(pieces: Sequence[bytes]) -> list[list[CharacterPart]]:
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
