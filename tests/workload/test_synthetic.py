"""Shipped traces are what the generator makes, and look like the public ones."""

import statistics
from collections.abc import Callable

import pytest

from pdlab.shipped import shipped
from pdlab.workload.synthetic import (
    AZURE_CODE,
    AZURE_CONVERSATION,
    MOONCAKE_CONVERSATION,
    PERCENTILES,
    SHIPPED,
    TrafficStatistics,
    azure_like,
    mean,
    mooncake_like,
)
from pdlab.workload.traces import TraceRequest, read_trace

from . import public

FOLDER = shipped("data") / "traces"
ALL = {
    "azure-conv-like": (AZURE_CONVERSATION, public.AZURE_CONVERSATION),
    "azure-code-like": (AZURE_CODE, public.AZURE_CODE),
    "mooncake-conv-like": (MOONCAKE_CONVERSATION, public.MOONCAKE_CONVERSATION),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_what_the_generator_makes(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == SHIPPED[name]()


def test_shipped_files_are_small() -> None:
    files = [path for path in FOLDER.iterdir() if path.suffix in (".csv", ".jsonl")]
    assert {path.name for path in files} == set(SHIPPED)
    assert sum(path.stat().st_size for path in files) < 150_000


@pytest.mark.parametrize("name", ALL)
def test_lengths_have_the_quantiles_of_the_public_trace(name: str) -> None:
    wanted, _ = ALL[name]
    [file] = [file for file in SHIPPED if file.startswith(name)]
    requests = read_trace(FOLDER / file)
    check_lengths([r.num_prompt_tokens for r in requests], wanted.prompt_tokens)
    check_lengths([r.num_output_tokens for r in requests], wanted.output_tokens)


def check_lengths(lengths: list[int], quantiles: tuple[int, ...]) -> None:
    """Share of lengths below each quantile: within 6 points, 3 deviations of 600 draws."""
    assert min(lengths) >= quantiles[0]
    assert max(lengths) <= quantiles[-1]
    for percentile, value in zip(PERCENTILES, quantiles, strict=True):
        below = sum(length < value for length in lengths) / len(lengths)
        at_most = sum(length <= value for length in lengths) / len(lengths)
        assert below - 0.06 <= percentile / 100 <= at_most + 0.06
    assert statistics.mean(lengths) == pytest.approx(mean(quantiles), rel=0.12)


@pytest.mark.parametrize("name", ALL)
def test_quantiles_are_those_of_the_public_trace(name: str) -> None:
    wanted, path = ALL[name]
    requests = read_trace(public.there(path))
    for quantiles, lengths in (
        (wanted.prompt_tokens, [r.num_prompt_tokens for r in requests]),
        (wanted.output_tokens, [r.num_output_tokens for r in requests]),
    ):
        lengths.sort()
        for percentile, value in zip(PERCENTILES, quantiles, strict=True):
            exact = lengths[round((len(lengths) - 1) * percentile / 100)]
            assert value == pytest.approx(exact, rel=0.02, abs=1)


def blocks_hit(requests: list[TraceRequest]) -> float:
    """Share of prompt blocks that an earlier request had, counted without any cache."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += next(
            (i for i, block in enumerate(request.prefix_ids) if block not in seen),
            len(request.prefix_ids),
        )
        seen.update(request.prefix_ids)
    return hits / sum(len(request.prefix_ids) for request in requests)


def test_conversations_share_as_much_as_in_the_public_trace() -> None:
    assert 0.36 <= blocks_hit(read_trace(FOLDER / "mooncake-conv-like.jsonl")) <= 0.37
    assert blocks_hit(read_trace(public.there(public.MOONCAKE_CONVERSATION))) == pytest.approx(
        0.3664, abs=5e-5
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: azure_like(AZURE_CODE, 50, seed),
        lambda seed: mooncake_like(MOONCAKE_CONVERSATION, 50, 600, seed),
    ],
    ids=["azure", "mooncake"],
)
def test_a_seed_gives_one_trace(make: Callable[[int], list[TraceRequest]]) -> None:
    assert make(5) == make(5)
    assert make(5) != make(6)
    arrivals = [request.arrival_s for request in make(5)]
    assert arrivals == sorted(arrivals)


def test_prefix_ids_fit_their_prompts() -> None:
    for request in mooncake_like(MOONCAKE_CONVERSATION, 100, 900):
        assert len(request.prefix_ids) == -(-request.num_prompt_tokens // 512)
        assert len(set(request.prefix_ids)) == len(request.prefix_ids)


def test_arrivals_keep_the_rate_although_their_tail_is_long() -> None:
    statistics_ = TrafficStatistics(
        AZURE_CODE.prompt_tokens, AZURE_CODE.output_tokens, AZURE_CODE.gap_ms, 100.0
    )
    requests = azure_like(statistics_, 20_000)
    assert requests[-1].arrival_s / 20_000 == pytest.approx(0.1, rel=0.1)
