"""Measurements as files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_by_line(path: Path, data: dict[str, Any], name: str, entries: Iterable[str]) -> None:
    """Write JSON that is small and readable in a diff: a line for each entry of one list.

    Args:
        data: all but that list.
        name: of the list, which comes last.
        entries: JSON texts.
    """
    rest = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in data.items())
    body = ",\n".join("  " + entry for entry in entries)
    path.write_text(f'{{\n{rest} "{name}": [\n{body}\n ]\n}}\n', encoding="utf-8")
