"""The checks of arguments that several modules share."""

from __future__ import annotations


def check_positive(**values: float) -> None:
    """Refuse a value that is not above 0, naming it."""
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value} is not above the limit 0")


def check_at_least(limit: int, **values: int) -> None:
    """Refuse a value below `limit`, naming both."""
    for name, value in values.items():
        if value < limit:
            raise ValueError(f"{name}={value} is below the limit {limit}")
