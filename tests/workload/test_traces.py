"""A trace is read in full or refused with file, line and field."""

import gzip
from itertools import pairwise
from pathlib import Path

import pytest

from pdlab.workload.traces import TraceRequest, find_trace, read_trace, shipped_traces

from . import public

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = HEADER + (
    "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:46.6805900,374,44\n\n"
    "2024-05-10 00:00:00.009930+00:00,5,6"
)
MOONCAKE = (
    '{"timestamp": 3000, "input_length": 1025, "output_length": 2, "hash_ids": [0, 1, 2]}\n'
    '{"timestamp": 1500, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n'
)


@pytest.fixture
def trace(tmp_path: Path):
    def write(text: str | bytes, name: str = "trace.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    return write


def test_azure_is_sorted_and_starts_at_zero(trace) -> None:
    first, second, third = read_trace(trace(AZURE))
    assert first == TraceRequest(0.0, 374, 44)
    assert second == TraceRequest(4.314579, 396, 109)
    assert (third.num_prompt_tokens, third.num_output_tokens) == (5, 6)
    assert third.num_kv_tokens == 10


def test_mooncake_keeps_its_prefix_ids(trace) -> None:
    first, second = read_trace(trace(MOONCAKE))
    assert first == TraceRequest(0.0, 512, 1, (0,), 512)
    assert second == TraceRequest(1.5, 1025, 2, (0, 1, 2), 512)
    line = '{"timestamp": 0, "input_length": 17, "output_length": 1, "hash_ids": [4, 5]}'
    assert read_trace(trace(line), prefix_block_size=16)[0].prefix_block_size == 16


def test_requests_of_one_moment_keep_their_order(trace) -> None:
    lines = [
        f'{{"timestamp": 0, "input_length": {n}, "output_length": 1, "hash_ids": [0]}}'
        for n in (5, 3, 9)
    ]
    assert [r.num_prompt_tokens for r in read_trace(trace("\n".join(lines)))] == [5, 3, 9]


def test_the_content_decides_not_the_name(trace) -> None:
    assert len(read_trace(trace(MOONCAKE, "lengths.csv"))) == 2
    assert len(read_trace(trace(b"\xef\xbb\xbf" + AZURE.encode(), "trace.jsonl"))) == 3


def test_a_gzipped_trace_is_read(trace) -> None:
    assert read_trace(trace(gzip.compress(AZURE.encode()), "a.csv.gz")) == read_trace(trace(AZURE))
    for damaged in (
        gzip.compress(AZURE.encode(), mtime=0)[:-9],
        b"\x1f\x8b\x00",
        b"\x1f\x8b\x08" + b"x" * 30,
    ):
        with pytest.raises(ValueError, match=r"trace\.txt: gzipped, and damaged"):
            read_trace(trace(damaged))
    with pytest.raises(ValueError, match="not a text file"):
        read_trace(trace(gzip.compress(b"\xff")))


def test_the_largest_numbers_are_read(trace) -> None:
    [request] = read_trace(trace(HEADER + "2024-01-01 00:00:00,10000000,0001000000"))
    assert (request.num_prompt_tokens, request.num_output_tokens) == (10**7, 10**6)
    ids = f"[{10**99}]"
    [request] = read_trace(trace(mooncake(timestamp=10**15, hash_ids=ids)))
    assert request.prefix_ids == (10**99,)


def mooncake(**fields: object) -> str:
    """A line with these fields in it, as they would be printed."""
    values = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]} | fields
    return "{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}"


DIGITS = "9" * 5000
DAMAGED = {
    "empty": ("", "the file is empty"),
    "blank": (" \n\n", "the file is empty"),
    "header only": (HEADER, "a header and no requests"),
    "another csv": ("a,b\n1,2\n", "line 1: unknown format"),
    "binary": (b"\x00\xff\xfe\x80", "not a text file"),
    "cut line": (AZURE + "\n2023-11-16 18:1", r"line 6: 1 fields instead of 3"),
    "no time": (HEADER + "yesterday,1,2", r"line 2: TIMESTAMP='yesterday' is no time"),
    "no number": (
        HEADER + "2023-11-16 18:15:46,12.5,2",
        r"line 2: ContextTokens='12.5' is no number",
    ),
    "negative": (HEADER + "2023-11-16 18:15:46,-1,2", r"line 2: ContextTokens='-1'"),
    "no output": (
        HEADER + "2023-11-16 18:15:46,1,0",
        r"line 2: GeneratedTokens=0 is no number of tokens from 1 to 1,000,000",
    ),
    "cut JSON": (MOONCAKE + '{"timestamp": 1', "line 3: no JSON object"),
    "not an object": (MOONCAKE + "[1]", "line 3: no JSON object"),
    "missing field": (
        '{"timestamp": 0, "input_length": 1, "hash_ids": [0]}',
        "line 1: output_length is missing",
    ),
    "text for a number": (
        '{"timestamp": 0, "input_length": "9", "output_length": 1, "hash_ids": [0]}',
        "line 1: input_length='9' is no number",
    ),
    "true for a number": (
        '{"timestamp": 0, "input_length": 9, "output_length": true, "hash_ids": [0]}',
        "line 1: output_length=True is no number",
    ),
    "no such time": (
        '{"timestamp": NaN, "input_length": 9, "output_length": 1, "hash_ids": [0]}',
        "line 1: timestamp=nan is no time",
    ),
    "endless time": (
        '{"timestamp": 1e999, "input_length": 9, "output_length": 1, "hash_ids": [0]}',
        "line 1: timestamp=inf is no time",
    ),
    "ids are no list": (
        '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": 7}',
        "line 1: hash_ids=7 is no list",
    ),
    "an id is no integer": (
        '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": ["x"]}',
        "line 1: hash_ids holds 'x'",
    ),
    "too few ids": (
        '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0]}',
        "line 1: hash_ids has 1 ids; input_length=513 is 2 blocks of 512",
    ),
    "a huge prompt": (
        HEADER + "2024-01-01 00:00:00,1000000000000000000,2",
        "line 2: ContextTokens=1000000000000000000 is no number of tokens from 1 to 10,000,000",
    ),
    "a huge output": (
        HEADER + "2024-01-01 00:00:00,5,1000000000",
        "line 2: GeneratedTokens=1000000000 is no number of tokens from 1 to 1,000,000",
    ),
    "a huge input_length": (mooncake(input_length=10**9), "line 1: input_length=1000000000 is"),
    "a huge output_length": (mooncake(output_length=10**9), "line 1: output_length=1000000000 is"),
    "thousands of digits": (
        f"{HEADER}2024-01-01 00:00:00,{DIGITS},2",
        r"line 2: ContextTokens='99999\d+ \.\.\. is no",
    ),
    "digits of input_length": (mooncake(input_length=DIGITS), "line 1: input_length='9999"),
    "digits of an id": (mooncake(hash_ids=f"[{DIGITS}]"), "line 1: hash_ids holds '9999"),
    "digits of a time": (mooncake(timestamp=DIGITS), "line 1: timestamp='9999"),
    "a time of 400 digits": (mooncake(timestamp="1" * 400), "line 1: timestamp='1111"),
    "a late time": (mooncake(timestamp="1e16"), r"line 1: timestamp=1e\+16 is no time in ms, from"),
    "a long field": (
        f"{HEADER}2024-01-01 00:00:00,{'1' * 200_000},2",
        "line 2: ContextTokens has 200,000 characters",
    ),
    "a long fourth field": (
        f"{HEADER}2024-01-01 00:00:00,1,2,{'x' * 200_000}",
        "line 2: field 4 has 200,000 characters",
    ),
    "a long time": (f"{HEADER}{'x' * 100_000},1,2", r"line 2: TIMESTAMP='x+ \.\.\. is no time"),
    "a long first line": ("x" * 200_000, "line 1: unknown format"),
    "nested JSON": (
        mooncake(hash_ids="[" * 100_000 + "]" * 100_000),
        "line 1: hash_ids is nested too deeply",
    ),
    "nested less deeply": (mooncake(hash_ids="[" * 700 + "]" * 700), "line 1: hash_ids "),
    "nested objects": ('{"a":' * 100_000, "line 1: a is nested too deeply"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_with_line_and_field(name: str, trace) -> None:
    text, message = DAMAGED[name]
    path = trace(text)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < len(str(path)) + 250


def test_prefix_block_size_is_at_least_one(trace) -> None:
    with pytest.raises(ValueError, match="prefix_block_size=0"):
        read_trace(trace(MOONCAKE), prefix_block_size=0)


def test_a_trace_is_found_by_path_or_by_name(trace) -> None:
    path = trace(AZURE)
    assert find_trace(str(path)) == path
    for name, shipped in shipped_traces().items():
        assert find_trace(name) == shipped
    with pytest.raises(ValueError, match=r"trace='nothing' is no file; .*azure-conv-like"):
        find_trace("nothing")
    with pytest.raises(ValueError, match=r"trace='x+ \.\.\. is no file"):
        find_trace("x" * 5000)
    with pytest.raises(ValueError, match="is no file"):
        find_trace("a\0b")


@pytest.mark.parametrize(
    ("path", "requests", "prompt_tokens", "output_tokens"),
    [
        (public.AZURE_CONVERSATION, 19_366, 22_361_870, 4_088_665),
        (public.AZURE_CODE, 8_819, 18_059_974, 245_896),
        (public.MOONCAKE_CONVERSATION, 12_031, 144_793_823, 4_122_048),
    ],
    ids=["azure conversation", "azure code", "mooncake conversation"],
)
def test_public_traces_are_read_in_full(
    path: Path, requests: int, prompt_tokens: int, output_tokens: int
) -> None:
    trace = read_trace(public.there(path))
    assert len(trace) == requests
    assert sum(r.num_prompt_tokens for r in trace) == prompt_tokens
    assert sum(r.num_output_tokens for r in trace) == output_tokens
    assert trace[0].arrival_s == 0
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(trace))
