"""Numbers for people, with three digits and a unit."""

from __future__ import annotations

PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def si(value: float, unit: str) -> str:
    """`538 MB`, `6.61 GFLOP`: powers of 1000, so that a GB is 10^9 bytes."""
    index = 0
    while abs(value) >= 999.5 and index < len(PREFIXES) - 1:
        value /= 1000
        index += 1
    if index == 0:
        return f"{value:.3g} {unit}".rstrip()
    return f"{_three_digits(value)} {PREFIXES[index]}{unit}".rstrip()


def seconds(value: float) -> str:
    """`85 µs`, `18.2 ms`, `1.25 s`."""
    if value >= 0.9995:
        return f"{_three_digits(value)} s"
    if value >= 0.9995e-3:
        return f"{_three_digits(value * 1e3)} ms"
    return f"{value * 1e6:.0f} µs"


def counted(number: int, noun: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _three_digits(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
