"""Traces as files: JSON, compressed when the name ends in .gz."""

from __future__ import annotations

import gzip
import json
import zlib
from os import PathLike
from pathlib import Path
from typing import Any


def write_json(path: str | PathLike[str], raw: dict[str, Any]) -> None:
    """Write compact JSON; the same bytes for the same content."""
    data = json.dumps(raw, ensure_ascii=False, separators=(",", ":")).encode()
    Path(path).write_bytes(gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def read_json(path: str | PathLike[str], what: str) -> Any:
    """Read what `write_json` wrote, whatever the file's name.

    Args:
        what: what an error says that the file is not.

    Raises:
        ValueError: it is no JSON.
    """
    data = Path(path).read_bytes()
    try:
        return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, RecursionError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a {what}: {error}") from error
