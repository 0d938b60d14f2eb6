"""A trace is read in full or refused with file, line and field."""

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
    "no output": (HEADER + "2023-11-16 18:15:46,1,0", r"line 2: GeneratedTokens=0 must be at"),
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
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_with_line_and_field(name: str, trace) -> None:
    text, message = DAMAGED[name]
    path = trace(text)
    with pytest.raises(ValueError, match=message) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


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
