"""The experiments of the lesson on paged KV: each shows what the lesson says it shows."""

import re
from dataclasses import replace

import pytest
import torch

from pdlab import EngineConfig, Model
from pdlab.costmodel import kv_bytes
from pdlab.models.catalog import shape
from pdlab.workbench import kv_experiments as kv
from pdlab.workbench.figures import growth
from pdlab.workload.traces import TraceRequest
from tests.helpers import TINY, random_model

PROMPTS = [[7, 8, 9, 10, 11], [21, 22, 23, 24, 25, 26], [31, 32, 33, 34, 35, 36, 37]]
SMALL = {"block_size": 4, "num_blocks": 7, "exact": True, "watermark": 0.0}


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(replace(TINY, vocab_size=97, num_layers=8, max_model_len=512))


@pytest.fixture(scope="module")
def points(model: Model) -> list[kv.MemoryPoint]:
    return kv.memory_by_length(model, [128, 256])


@pytest.fixture(scope="module")
def runs(model: Model) -> dict[str, kv.PressureRun]:
    pools = {
        "roomy": EngineConfig(**SMALL | {"num_blocks": 32}),
        "recompute": EngineConfig(**SMALL, preemption="recompute"),
        "swap": EngineConfig(**SMALL, preemption="swap", num_swap_blocks=7),
    }
    return {
        name: kv.run_under_pressure(model, PROMPTS, config, max_tokens=5)
        for name, config in pools.items()
    }


def test_kv_is_linear_and_counted_from_the_engine(
    model: Model, points: list[kv.MemoryPoint]
) -> None:
    for point in points:
        assert point.kv_bytes == kv_bytes(model.config, point.num_tokens, 4)


def test_only_unfused_activations_grow_faster_than_the_prompt(
    points: list[kv.MemoryPoint],
) -> None:
    factors = {}
    for backend in ("torch", "reference"):
        short, long = (p.peak_bytes for p in points if p.backend == backend)
        factors[backend] = long / short
    assert factors["torch"] == pytest.approx(2, rel=0.02)
    assert factors["reference"] > 3


def test_activations_are_released_and_reused(points: list[kv.MemoryPoint]) -> None:
    assert all(point.total_bytes > 5 * point.peak_bytes for point in points)


def test_growth_exponent_finds_the_power() -> None:
    sizes = [10, 20, 50]
    assert kv.growth_exponent(sizes, [3 * n for n in sizes]) == pytest.approx(1)
    assert kv.growth_exponent(sizes, [0.5 * n**2 for n in sizes]) == pytest.approx(2)


@pytest.mark.parametrize(("sizes", "values"), [([1], [1]), ([1, 2], [1, 0]), ([-1, 2], [1, 1])])
def test_growth_exponent_refuses_what_has_no_power(sizes: list[int], values: list[int]) -> None:
    with pytest.raises(ValueError, match="two or more numbers above 0"):
        kv.growth_exponent(sizes, values)


def test_difference_by_layer_is_zero_only_for_equal_bits() -> None:
    first = torch.ones(2, 3, 1, 4)
    second = first.clone()
    second[1] *= 1.5
    assert kv.difference_by_layer(first, second) == [0.0, pytest.approx(0.5)]


# --- pressure ------------------------------------------------------------------------------------


def test_preemption_costs_time_and_never_the_result(runs: dict[str, kv.PressureRun]) -> None:
    assert runs["roomy"].num_preemptions == 0
    for name in ("recompute", "swap"):
        assert runs[name].num_preemptions > 0
        assert runs[name].equals(runs["roomy"])


def test_recomputing_and_swapping_are_told_apart(runs: dict[str, kv.PressureRun]) -> None:
    recompute, swap = runs["recompute"], runs["swap"]
    assert recompute.recomputed_tokens > 0
    assert recompute.num_swaps == recompute.swapped_bytes == 0
    assert swap.recomputed_tokens == 0
    assert swap.num_swaps == swap.num_preemptions
    block_bytes = 4 * swap.trace.engine["kv_bytes_per_token"]
    assert swap.swapped_bytes % block_bytes == 0
    assert swap.swapped_bytes >= 2 * block_bytes  # out and in


def test_a_run_with_another_bit_is_not_equal(runs: dict[str, kv.PressureRun]) -> None:
    run = runs["swap"]
    changed = [own.clone() for own in run.kv]
    changed[1][0, 3, 2, 0, 0] += 1e-3
    assert not replace(run, kv=changed).equals(run)
    assert not replace(run, token_ids=[[1], [2], [3]]).equals(run)


def test_activations_of_a_pressed_run_are_measured_on_request(model: Model) -> None:
    config = EngineConfig(block_size=4, num_blocks=16)
    run = kv.run_under_pressure(model, PROMPTS[:1], config, 2, measure_activations=True)
    assert all(step.activation_peak_bytes for step in run.trace.steps)
    assert run.wall_s > 0


def test_bringing_back_is_timed_both_ways(model: Model) -> None:
    [back] = kv.bring_back(model, [20], repeats=1)
    assert back.num_tokens == 20
    assert back.recompute_s > 0
    assert back.swap_s > 0


# --- traffic -------------------------------------------------------------------------------------


def lengths_only(count: int = 60) -> list[TraceRequest]:
    return [TraceRequest(i * 0.5, 40 + 7 * i % 61, 20 + 5 * i % 31) for i in range(count)]


def test_paging_wastes_half_a_block_a_request() -> None:
    small, large = kv.waste_by_block_size(lengths_only(), [4, 16])
    assert small.waste < large.waste
    for point in (small, large):
        empty = (point.block_size - 1) / 2
        assert point.waste == pytest.approx(empty / (point.tokens_held + empty), rel=0.15)


def test_a_larger_pool_finds_no_fewer_blocks() -> None:
    requests = [TraceRequest(i * 2.0, 24, 4, (i % 3, 10 + i % 3, 100 + i), 8) for i in range(30)]
    points = kv.hit_rate_points(requests, [2, 5, 12, None])
    assert [count for count, _ in points] == [5, 12, None]  # 2 blocks are too few for a request
    rates = [rate for _, rate in points]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(2 * 27 / 90)  # all but the first three find two blocks


def test_each_knob_saves_and_int8_counts_its_scales() -> None:
    bars = kv.savings(lengths_only(), shape("llama-8b"))
    assert [bar.label for bar in bars] == [
        "reserve the longest",
        "next power of two",
        "paged",
        "paged, int8",
    ]
    sizes = [bar.num_bytes for bar in bars]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] / sizes[2] == pytest.approx((128 + 2) / 256)  # an fp16 scale for 128 channels
    assert all(bar.needed_bytes >= bar.num_bytes for bar in bars)


def test_turn_gaps_count_from_the_last_use_of_the_longest_known_prefix() -> None:
    ids = [(0, 1, 2), (0, 3), (0, 1, 2, 4), (0, 3, 5), (0, 6)]
    requests = [TraceRequest(10.0 * i, 8 * len(p), 4, p, 8) for i, p in enumerate(ids)]
    assert kv.turn_gaps_s(requests) == [20.0, 20.0]  # the shared first block is no turn


def test_a_loop_without_end_over_a_set_is_told_why() -> None:
    known = kv.AskedSet([(1,), (1, 2)], limit=3, hint="stop at the end")

    def endless() -> None:
        found = 0
        while tuple([1, 2][: found + 1]) in known:
            found += 1

    with pytest.raises(AssertionError, match="stop at the end"):
        endless()


def test_a_job_under_a_bar_gives_its_result() -> None:
    assert kv.under_bar("job", lambda: [1, 2]) == [1, 2]


# --- figures -------------------------------------------------------------------------------------


def test_growth_figure_draws_each_backend_and_says_the_factor(
    points: list[kv.MemoryPoint],
) -> None:
    figure = growth.memory_growth(points)
    assert [trace.name for trace in figure.data] == [
        "KV cache",
        "activations at once, fused attention",
        "activations at once, unfused attention",
    ]
    assert list(figure.data[0].y) == [p.kv_bytes / 1e6 for p in points[:2]]
    title = figure.layout.title.text.replace("<br>", " ")
    assert re.match(r"2 times the tokens: 2 times the KV, 3\.\d+ times the activations", title)
    fused_only = growth.memory_growth(points[:2])
    assert fused_only.layout.title.text == "2 times the tokens: 2 times the KV"


def test_savings_figure_names_each_step_down() -> None:
    bars = [
        kv.Saving("next power of two", 4e9, 8e9),
        kv.Saving("paged", 2e9, 4e9),
        kv.Saving("paged, x", 1e9, 2e9),
    ]
    figure = growth.savings(bars, "made for this test")
    [drawn] = figure.data
    assert list(drawn.text) == ["4 GB", "2 GB (-50%)", "1 GB (-50%)"]
    assert "75% less KV memory, on average" in figure.layout.title.text
    from_paged = growth.savings(bars, "made for this test", baseline="paged")
    assert from_paged.layout.title.text.startswith("From “paged” to “paged, x”: 50% less")
    with pytest.raises(ValueError, match="baseline='none' is not one of the bars: next power"):
        growth.savings(bars, "made for this test", baseline="none")
    assert len(set(drawn.marker.color)) == 3


def test_figures_refuse_nothing_to_draw() -> None:
    with pytest.raises(ValueError, match="points is empty"):
        growth.memory_growth([])
    with pytest.raises(ValueError, match="bars is empty"):
        growth.savings([], "")
