"""Request traces: when requests arrived, how long they were, and which prefixes they share.

No text and no tokens: the public traces hold lengths, and at most hashes of the prompt's blocks.
Two formats are read, told apart by their content:

- Azure LLM inference 2023 (Patel et al. 2024, Splitwise; CC-BY), CSV:
  `TIMESTAMP,ContextTokens,GeneratedTokens`
- Mooncake (Qin et al. 2025, FAST; Apache-2.0), JSON lines:
  `{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}`

Either may be compressed with gzip.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from pdlab.engine.request import MOST_PRIORITY
from pdlab.requirements import require_int, require_number
from pdlab.shipped import shipped

AZURE_HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_BLOCK_SIZE = 512
"""Tokens that one of Mooncake's hash ids stands for; the file itself does not say."""

LONGEST_PROMPT = 10_000_000
"""Tokens: as long as the longest context that a published model claims (Llama 4 Scout)."""
LONGEST_OUTPUT = 1_000_000
"""Tokens: each may be an event of a replay, so that more would seem to hang."""
LATEST_MS = 10**15
"""Far behind any clock's time since 1970, and still exact to a millisecond."""
LONGEST_INTEGER = 100
"""Digits: hashes are shorter, and beyond 4300 Python refuses to convert them."""


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace.

    Attributes:
        arrival_s: seconds since the workload began; in a trace that was read, since its first
            request.
        num_prompt_tokens: at least 1.
        num_output_tokens: at least 1.
        prefix_ids: one id for each `prefix_block_size` tokens of the prompt, the last block perhaps
            partly filled. Equal ids mean equal tokens up to the end of that block, from the first
            token on. Empty where the trace does not tell.
        prefix_block_size: tokens; None where the trace has no prefix ids.
        priority: for the policy that looks at it; the lower number goes first.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()
    prefix_block_size: int | None = None
    priority: int = 0

    def checked(self) -> TraceRequest:
        """Itself.

        Raises:
            ValueError: a field is of another kind or out of range; names it.
        """
        require_number("arrival_s", self.arrival_s, 0, LATEST_MS / 1000)
        require_int("num_prompt_tokens", self.num_prompt_tokens, 1, LONGEST_PROMPT)
        require_int("num_output_tokens", self.num_output_tokens, 1, LONGEST_OUTPUT)
        require_int("priority", self.priority, -MOST_PRIORITY, MOST_PRIORITY)
        size = self.prefix_block_size
        if size is not None:
            require_int("prefix_block_size", size, 1)
        num_ids = 0 if size is None else -(-self.num_prompt_tokens // size)
        ids = self.prefix_ids
        if not isinstance(ids, tuple | list) or not all(map(_is_int, ids)):
            raise ValueError(f"prefix_ids={_short(ids)} must be integers")
        if len(ids) < num_ids:
            raise ValueError(
                f"prefix_ids has {len(ids)} ids, it must have {num_ids}: one for each {size} of "
                f"{self.num_prompt_tokens} tokens"
            )
        return self

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output together."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_kv_tokens(self) -> int:
        """Most tokens it ever has in the KV cache: the last one sampled is never fed back."""
        return self.num_tokens - 1


def read_trace(
    path: Path | str, *, prefix_block_size: int = MOONCAKE_BLOCK_SIZE
) -> list[TraceRequest]:
    """The requests of a trace file, by time of arrival; the first arrives at 0.

    Args:
        path: a file in one of the two formats, perhaps gzipped; its name does not matter.
        prefix_block_size: tokens that one hash id stands for.

    Raises:
        ValueError: not a trace, empty, or damaged; names the file, the line and the field.
        OSError: the file cannot be read.
    """
    if prefix_block_size < 1:
        raise ValueError(f"prefix_block_size={prefix_block_size} must be at least 1")
    path = Path(path)
    lines = _text(path).splitlines()
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ValueError(f"{path}: the file is empty")
    first = numbered[0][1]
    if first.lstrip().startswith("{"):
        requests = _read(path, numbered, lambda line: _mooncake_request(line, prefix_block_size))
    elif _cells(first[:1000]) == AZURE_HEADER:
        requests = _read(path, numbered[1:], _azure_request)
    else:
        raise ValueError(
            f"{path}, line {numbered[0][0]}: unknown format; a trace starts with the line "
            f"{','.join(AZURE_HEADER)!r} or is JSON lines with {', '.join(MOONCAKE_FIELDS)}"
        )
    if not requests:
        raise ValueError(f"{path}: a header and no requests")
    start_s = min(request.arrival_s for request in requests)
    requests = [replace(r, arrival_s=round(r.arrival_s - start_s, 6)) for r in requests]
    return sorted(requests, key=lambda request: request.arrival_s)


def shipped_traces() -> dict[str, Path]:
    """The traces that come with pdlab (synthetic: see `pdlab.workload.synthetic`), by name."""
    folder = shipped("data") / "traces"
    paths = sorted(p for p in folder.iterdir() if p.suffix in (".csv", ".jsonl"))
    return {path.stem: path for path in paths}


def find_trace(name: str) -> Path:
    """A trace file from its path, or from the name of one that comes with pdlab.

    Raises:
        ValueError: neither a file nor a name; lists the names.
    """
    if os.path.isfile(name):  # `Path.is_file` fails if the name is too long
        return Path(name)
    named = shipped_traces()
    if name not in named:
        raise ValueError(
            f"trace={_short(name, 300)} is no file; by name there are: {', '.join(named)}"
        )
    return named[name]


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text file, so not a trace: {error}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: gzipped, and damaged: {error}") from error


def _read(
    path: Path, lines: Iterable[tuple[int, str]], parse: Callable[[str], TraceRequest]
) -> list[TraceRequest]:
    requests = []
    for number, line in lines:
        try:
            requests.append(parse(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        except RecursionError as error:
            nested = re.search(r'"(\w+)"\s*:\s*[\[{][\s\w":]*[\[{]', line)
            name = nested[1] if nested else "a value"
            raise ValueError(f"{path}, line {number}: {name} is nested too deeply") from error
    return requests


# --- Azure ---------------------------------------------------------------------------------------


def _cells(line: str) -> tuple[str, ...]:
    try:
        return tuple(cell.strip() for row in csv.reader([line]) for cell in row)
    except csv.Error as error:
        sizes = [len(cell) for cell in line.split(",")]
        where = sizes.index(max(sizes))
        name = AZURE_HEADER[where] if where < len(AZURE_HEADER) else f"field {where + 1}"
        raise ValueError(f"{name} has {max(sizes):,} characters: {error}") from error


def _azure_request(line: str) -> TraceRequest:
    cells = _cells(line)
    if len(cells) != len(AZURE_HEADER):
        raise ValueError(f"{len(cells)} fields instead of {len(AZURE_HEADER)}: {_short(line)}")
    fields = dict(zip(AZURE_HEADER, cells, strict=True))
    try:
        # microseconds: the seventh decimal that the files have is dropped by `fromisoformat`
        time = datetime.fromisoformat(fields["TIMESTAMP"])
    except ValueError as error:
        raise ValueError(f"TIMESTAMP={_short(fields['TIMESTAMP'])} is no time") from error
    time = time.replace(tzinfo=time.tzinfo or UTC)  # no summer time in a difference
    prompt = _count_in_text("ContextTokens", fields, LONGEST_PROMPT)
    output = _count_in_text("GeneratedTokens", fields, LONGEST_OUTPUT)
    return TraceRequest(time.timestamp(), prompt, output)


def _count_in_text(field: str, fields: dict[str, str], most: int) -> int:
    text = fields[field]
    return _count(field, _integer(text) if text.isascii() and text.isdigit() else text, most)


# --- Mooncake ------------------------------------------------------------------------------------


def _mooncake_request(line: str, block_size: int) -> TraceRequest:
    try:
        fields = json.loads(line, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON object: {error.msg} in {_short(line)}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"no JSON object: {_short(line)}")
    for name in MOONCAKE_FIELDS:
        if name not in fields:
            raise ValueError(f"{name} is missing: {_short(line)}")
    arrival_ms = fields["timestamp"]
    is_number = _is_int(arrival_ms) or isinstance(arrival_ms, float)
    if not is_number or not 0 <= arrival_ms <= LATEST_MS:
        value = _short(arrival_ms)
        raise ValueError(f"timestamp={value} is no time in ms, from 0 to {LATEST_MS:,}")
    prompt = _count("input_length", fields["input_length"], LONGEST_PROMPT)
    output = _count("output_length", fields["output_length"], LONGEST_OUTPUT)
    prefix_ids = tuple(_prefix_ids(fields["hash_ids"]))
    if len(prefix_ids) != -(-prompt // block_size):
        raise ValueError(
            f"hash_ids has {len(prefix_ids)} ids; input_length={prompt} is "
            f"{-(-prompt // block_size)} blocks of {block_size} tokens"
        )
    return TraceRequest(arrival_ms / 1000, prompt, output, prefix_ids, block_size)


def _prefix_ids(ids: object) -> Iterator[int]:
    if not isinstance(ids, list):
        raise ValueError(f"hash_ids={_short(ids)} is no list")
    for item in ids:
        if not _is_int(item):
            raise ValueError(
                f"hash_ids holds {_short(item)}, which is no integer "
                f"of up to {LONGEST_INTEGER} digits"
            )
        yield item


# --- numbers -------------------------------------------------------------------------------------


def _integer(text: str) -> int | str:
    """The number; text that is too long for one stays text, and is refused where it stands."""
    return int(text) if len(text) <= LONGEST_INTEGER else text


def _count(field: str, value: object, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{field}={_short(value)} is no number of tokens from 1 to {most:,}")
    return value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 4] + " ..."
