"""Checks of what a caller gives: a ValueError names the parameter, its value and the limit."""

from __future__ import annotations

import reprlib
from typing import Any

LARGEST_SEED = 2**64 - 1
LARGEST_INT = 10**15
"""More than any memory has bytes; beyond it even the message could not be computed."""


def require_int(name: str, value: Any, least: int, most: int = LARGEST_INT) -> None:
    """Raise a ValueError unless `value` is an int (not a bool) from `least` to `most`."""
    if isinstance(value, int) and abs(value) > most:
        if abs(value) < 10_000:
            raise ValueError(f"{name}={value} must be an integer from {least} to {most}")
        digits = len(hex(abs(value))) - 2
        raise ValueError(f"{name} has {digits} hex digits, it must be from {least} to {most}")
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={shown(value)} must be an integer >= {least}")


def require_number(name: str, value: Any, least: float, most: float) -> None:
    """Raise a ValueError unless `value` is a number (not a bool) from `least` to `most`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        raise ValueError(f"{name}={shown(value)} must be a number from {least} to {most}")


def require_bool(name: str, value: Any) -> None:
    """Raise a ValueError unless `value` is a bool: the text "no" would count as true."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} must be True or False")


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise a ValueError unless `value` is one of `choices`."""
    if value not in choices:
        raise ValueError(f"{name}={shown(value)} must be one of {', '.join(choices)}")


def shown(value: Any) -> str:
    """A value as a message shows it: short, however deep or long it is."""
    if isinstance(value, int) and abs(value) > LARGEST_INT:
        return f"an integer of {len(hex(abs(value))) - 2} hex digits"
    return reprlib.repr(value)[:60]
