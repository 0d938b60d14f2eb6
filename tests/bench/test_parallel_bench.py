"""`pdlab bench parallel` keeps what it measured, and refuses what it cannot measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdlab.bench.parallel import ParallelCost, ParallelCosts, Way, by_work, measure_parallel
from pdlab.link import LINKS


def cost(way: str, load: str, seconds: list[float], tokens_s: float) -> ParallelCost:
    return ParallelCost(way, load, seconds, tokens_s, 100, 0.25, 0.5, 0.5)


def test_gains_are_those_of_the_median_round_and_count_all_sequences() -> None:
    found = ParallelCosts(
        [
            cost("one process", "prefill", [1.0, 2.0, 1.0], 10.0),
            cost("TP=2", "prefill", [0.5, 0.5, 1.0], 20.0),
            cost("one process", "decode b2", [0.1], 20.0),
            cost("DP=2", "decode b2", [0.1], 20.0),
        ],
        "a model", 10, 4, 3, False, {}, {},
    )  # fmt: skip
    assert found.ratio("TP=2", "prefill") == 2.0
    assert found.ratio("DP=2", "decode b2") == 1.0
    assert list(by_work(found)) == ["prefill", "decode b2"]


def test_ways_have_names() -> None:
    assert Way().name == "one process"
    assert Way(tensor_parallel=2, pipeline_parallel=3).name == "TP=2 PP=3"
    assert Way(pipeline_parallel=2, micro_batches=1).name == "PP=2, 1 micro-batch"
    assert Way(tensor_parallel=2, link=LINKS["1GbE"]).name == "TP=2, 1GbE"
    assert Way(replicas=2).name == "DP=2"


def test_what_was_measured_survives_saving(tmp_path: Path) -> None:
    ways = (Way(), Way(tensor_parallel=2))
    found = measure_parallel(
        "random:tiny-llama", ways=ways, batches=[2], prompt_tokens=8, num_steps=2, rounds=1
    )
    found.save(tmp_path / "parallel.json")
    assert ParallelCosts.load(tmp_path / "parallel.json") == found
    assert [(c.way, c.work) for c in found.costs] == [
        (way, work)
        for way in ("one process", "TP=2")
        for work in ("prefill b1", "prefill b2", "decode b2")
    ]
    assert not found.of("one process", "prefill b2").wire_bytes
    assert found.of("TP=2", "decode b2").wire_bytes


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        ({"batches": [0]}, "batch"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"num_steps": 1}, "num_steps"),
        ({"rounds": 0}, "rounds"),
    ],
)
def test_what_cannot_be_measured_is_refused(knobs: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        measure_parallel("no such model", **knobs)
