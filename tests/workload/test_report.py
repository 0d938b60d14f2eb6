"""A run in numbers: against hand-computed runs, and against numpy."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pdlab import EngineConfig
from pdlab.costmodel.step_times import LinearStepTimes
from pdlab.engine.metrics import RequestMetrics
from pdlab.workload.report import (
    MOST_BINS,
    Distribution,
    attainment_by,
    latency_samples,
    over_time,
    summarize,
)
from pdlab.workload.serving import SLO, ServedRequest, ServingRun, StepSpan
from pdlab.workload.simulation import simulate
from pdlab.workload.traces import TraceRequest


def request(
    name: str,
    arrival_s: float,
    begun_s: float | None = None,
    tokens_s: tuple[float, ...] = (),
    reason: str | None = "length",
    **counts: int,
) -> ServedRequest:
    counts = {"num_prompt_tokens": 8} | counts
    metrics = RequestMetrics(arrival_s, begun_s, list(tokens_s), **counts)
    return ServedRequest(name, metrics, reason, error="too long" if reason == "error" else "")


def span(
    start_s: float,
    wall_s: float,
    decodes: str = "",
    prompts: dict[str, int] | None = None,
    running: int = 1,
    blocks: int = 1,
    **more: object,
) -> StepSpan:
    decoding = [*decodes]
    return StepSpan(start_s, wall_s, decoding, prompts or {}, 0, running, blocks, **more)  # type: ignore[arg-type]


def run_of(
    requests: list[ServedRequest], steps: list[StepSpan], num_blocks: int = 10
) -> ServingRun:
    return ServingRun("measured", "a test", {}, requests, steps, num_blocks)


def tiny_run() -> ServingRun:
    """Ten seconds: a runs alone, then with b; idle from 5 to 7; then c; d is refused.

    a: comes at 0, prompt in step 1 to 2, tokens at 2, 3, 5
    b: comes at 1.5 (during a step), begins at 3, tokens at 5, 5 is the end: one token
    c: comes at 7, prompt 7 to 8, tokens at 8, 9, 10
    """
    return run_of(
        [
            request("a", 0, 1, (2, 3, 5)),
            request("b", 1.5, 3, (5,), num_prompt_tokens=6, num_cached_tokens=2),
            request("d", 6, reason="error"),
            request("c", 7, 7, (8, 9, 10), reason="stop"),
        ],
        [
            span(1, 1, prompts={"a": 8}, running=1, blocks=1),
            span(2, 1, "a", running=1, blocks=2),
            span(3, 2, "a", {"b": 4}, running=2, blocks=4),
            span(7, 1, prompts={"c": 8}, running=1, blocks=2),
            span(8, 2, "c", running=1, blocks=3, num_steps=2),
        ],
    )


def test_a_run_computed_by_hand() -> None:
    found = summarize(tiny_run(), SLO(ttft_s=2, tpot_s=1.5))
    assert (found.num_requests, found.num_finished) == (4, 3)
    assert (found.num_refused, found.num_aborted) == (1, 0)
    assert found.duration_s == 10
    assert found.queue_s.mean == pytest.approx((1 + 1.5 + 0) / 3)
    assert (found.ttft_s.max, found.ttft_s.p50) == (3.5, 2)
    assert (found.itl_s.num_samples, found.itl_s.mean) == (4, 5 / 4)
    assert (found.tpot_s.num_samples, found.tpot_s.max) == (2, 1.5)
    assert found.e2e_s.mean == pytest.approx((5 + 3.5 + 3) / 3)
    assert found.requests_per_s == 0.3
    assert found.output_tokens_per_s == 0.7
    assert found.prompt_tokens_per_s == 2.2
    assert (found.goodput_per_s, found.attainment) == (0.2, 0.5)  # a and c; b came too late
    assert (found.num_cached_tokens, found.num_preemptions) == (2, 0)


def test_levels_computed_by_hand() -> None:
    found = summarize(tiny_run())
    assert found.queue_depth == pytest.approx(((1 + 1.5) / 10, 1))
    assert found.batch_size == pytest.approx((1 * 5 / 10 + 2 * 2 / 10, 2))
    assert found.running == pytest.approx((5 / 10 + 2 * 2 / 10, 2))
    assert found.step_tokens == pytest.approx(((8 + 1 + 5 * 2 + 8 + 1 * 2) / 10, 8))
    assert found.kv_occupancy == pytest.approx(((1 + 2 + 4 * 2 + 2 + 3 * 2) / 100, 0.4))
    assert found.steps == {"prefill": (2, 2.0), "decode": (3, 3.0), "mixed": (1, 2.0)}
    assert found.idle_s == 3


def test_blocks_of_a_span_of_many_steps_are_taken_in_its_course() -> None:
    """From 2 to 8 blocks in 4 s, then a pause of 1 s in which they stay, then 8 for 1 s."""
    steps = [
        span(0, 4, "a", blocks=8, num_steps=40, num_grown_blocks=6),
        span(5, 1, "a", blocks=8),
    ]
    run = run_of([request("a", 0, 0, (4, 6))], steps)
    assert summarize(run).kv_occupancy == pytest.approx((0.1 * (5 * 4 + 8 * 2) / 6, 0.8))
    assert over_time(run, 6).kv_occupancy.tolist() == pytest.approx(
        [0.275, 0.425, 0.575, 0.725, 0.8, 0.8]
    )
    assert over_time(run, 12).kv_occupancy.mean() == pytest.approx(summarize(run).kv_occupancy.mean)


def test_a_span_without_length_grows_not() -> None:
    steps = [span(0, 0, "a", blocks=8, num_grown_blocks=6), span(0, 2, "a", blocks=4)]
    found = summarize(run_of([request("a", 0, 0, (2,))], steps))
    assert found.kv_occupancy.mean == pytest.approx(0.4)


def test_leaps_change_no_occupancy() -> None:
    """Simulated step by step, and with equal steps in one go."""
    asked = [TraceRequest(3 + 2 * i, 16 + i, 400 + 250 * i) for i in range(4)]
    times = LinearStepTimes("round numbers", 0.01, 0, 0, 0.001, 0, 0.002, 0, 0)
    config = EngineConfig(num_blocks=200)
    leaping, single = (simulate(asked, config, times, leaps=leaps) for leaps in (True, False))
    assert len(leaping.steps) < len(single.steps) / 10
    a_block = 4 / 200  # one of each request
    ours, theirs = summarize(leaping), summarize(single)
    assert ours.kv_occupancy.mean == pytest.approx(theirs.kv_occupancy.mean, abs=a_block)
    assert ours.kv_occupancy.max == theirs.kv_occupancy.max
    occupancies = [over_time(run, 10).kv_occupancy for run in (leaping, single)]
    assert occupancies[0] == pytest.approx(occupancies[1], abs=a_block)
    for name in ("queue_depth", "batch_size", "running", "step_tokens"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name))


def test_time_begins_at_the_first_arrival() -> None:
    """The same run an hour later, as a trace that does not begin at 0 would have it."""
    early, late = tiny_run(), tiny_run()
    for served in late.requests:
        m = served.metrics
        m.arrival_s += 3600
        m.first_scheduled_s = None if m.first_scheduled_s is None else m.first_scheduled_s + 3600
        m.token_times_s = [time_s + 3600 for time_s in m.token_times_s]
    for step in late.steps:
        step.start_s += 3600
    assert summarize(late, SLO(2, 1.5)).to_dict() == summarize(early, SLO(2, 1.5)).to_dict()
    ours, theirs = over_time(late, 5), over_time(early, 5)
    assert ours.edges_s.tolist() == [3600 + edge_s for edge_s in theirs.edges_s]
    for name in ("queue_depth", "batch_size", "kv_occupancy", "output_tokens_per_s"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name))


def test_steps_before_the_first_arrival_do_not_count() -> None:
    """Somebody else's request, computed from 0 to 3; ours comes at 2."""
    steps = [span(0, 3, "other", blocks=5), span(3, 1, prompts={"a": 8}, blocks=1)]
    found = summarize(run_of([request("a", 2, 3, (4,))], steps))
    assert (found.duration_s, found.idle_s) == (2, 0)
    assert found.kv_occupancy.mean == pytest.approx(0.3)
    assert found.queue_depth.mean == 0.5


def test_somebody_elses_preemption_is_not_our_queue() -> None:
    steps = [span(0, 1, "a", preempted=["other"]), span(1, 1, "a")]
    assert summarize(run_of([request("a", 0, 0, (1, 2))], steps)).queue_depth == (0, 0)


def test_the_mean_queue_depth_obeys_littles_law() -> None:
    run = tiny_run()
    found, waits = summarize(run), latency_samples(run.requests)["queue_s"]
    assert found.queue_depth.mean * found.duration_s == pytest.approx(sum(waits))


def test_blocks_are_held_through_a_pause_between_two_steps_of_a_sequence() -> None:
    """The caller took half a second between the steps; nothing was computed then."""
    steps = [span(0, 1, prompts={"a": 8}, blocks=4), span(1.5, 0.5, "a", blocks=4)]
    found = summarize(run_of([request("a", 0, 0, (1, 2))], steps))
    assert found.kv_occupancy == (0.4, 0.4)
    assert found.running == (1, 1)
    assert found.batch_size == (0.75, 1)


def test_a_preempted_sequence_waits_until_its_next_step() -> None:
    steps = [
        span(0, 1, prompts={"a": 8, "b": 8}, running=2),
        span(1, 2, "a", preempted=["b"]),
        span(3, 1, prompts={"b": 9}),
    ]
    requests = [request("a", 0, 0, (1, 3)), request("b", 0, 0, (1, 4), num_preemptions=1)]
    found = summarize(run_of(requests, steps))
    assert found.queue_depth == (0.5, 1)
    assert found.num_preemptions == 1


def test_who_still_waits_at_the_end_waits_until_then_and_meets_no_slo() -> None:
    requests = [
        request("a", 0, 0, (1,)),
        request("b", 1, reason=None),
        request("c", 1, reason="abort"),
    ]
    steps = [span(0, 1, prompts={"a": 8}), span(1, 3, "a")]
    found = summarize(run_of(requests, steps), SLO(9, 9))
    assert found.queue_depth == (0.75, 1)
    assert (found.num_finished, found.num_aborted, found.attainment) == (1, 1, pytest.approx(1 / 3))
    assert found.num_aborted_waiting == 1


def test_who_was_aborted_after_a_step_did_not_give_up_waiting() -> None:
    found = summarize(run_of([request("a", 0, 0, reason="abort")], [span(0, 1, prompts={"a": 8})]))
    assert (found.num_aborted, found.num_aborted_waiting) == (1, 0)


def test_percentiles_are_numpys() -> None:
    samples = np.random.default_rng(0).exponential(size=137)
    found = Distribution.of(samples)
    assert found.num_samples == 137
    assert found.mean == pytest.approx(samples.mean())
    assert found.max == samples.max()
    for percent in (50, 90, 95, 99):
        assert getattr(found, f"p{percent}") == pytest.approx(np.percentile(samples, percent))
    assert Distribution.of([1, 2]).p90 == pytest.approx(1.9)  # between the two, not one of them


def test_no_sample_is_none_and_not_zero() -> None:
    found = summarize(run_of([request("d", 0, reason="error")], []), SLO(1, 1))
    assert found.ttft_s == Distribution(0, None, None, None, None, None, None)
    assert (found.duration_s, found.requests_per_s, found.goodput_per_s) == (0, 0, 0)
    assert found.attainment == 0
    assert found.queue_depth == (0, 0)
    assert summarize(run_of([], [])).attainment is None


def test_a_summary_is_json() -> None:
    raw = summarize(tiny_run(), SLO(2, 1.5)).to_dict()
    again = json.loads(json.dumps(raw, allow_nan=False))
    assert again == raw
    assert raw["slo"] == {"ttft_s": 2, "tpot_s": 1.5}
    assert raw["steps"]["decode"] == {"num_steps": 3, "wall_s": 3.0}
    assert raw["queue_depth"] == {"mean": 0.25, "max": 1.0}
    assert raw["ttft_s"]["p50"] == 2


def test_spans_of_time_average_to_the_whole() -> None:
    run = tiny_run()
    found, whole = over_time(run, 7), summarize(run)
    assert found.edges_s.shape == (8,)
    assert found.queue_depth.mean() == pytest.approx(whole.queue_depth.mean)
    assert found.batch_size.mean() == pytest.approx(whole.batch_size.mean)
    assert found.kv_occupancy.mean() == pytest.approx(whole.kv_occupancy.mean)
    assert found.output_tokens_per_s.mean() == pytest.approx(whole.output_tokens_per_s)


def test_spans_of_time_computed_by_hand() -> None:
    found = over_time(tiny_run(), 5)  # of two seconds each
    assert found.batch_size.tolist() == pytest.approx([0.5, 1.5, 1, 0.5, 1])
    assert found.kv_occupancy.tolist() == pytest.approx([0.05, 0.3, 0.2, 0.1, 0.3])
    assert found.queue_depth.tolist() == pytest.approx([0.75, 0.5, 0, 0, 0])
    assert found.output_tokens_per_s.tolist() == [0, 1, 1, 0, 1.5]


def test_spans_of_time_of_a_run_without_steps_are_empty() -> None:
    found = over_time(run_of([request("d", 0, reason="error")], []), 3)
    assert found.output_tokens_per_s.tolist() == [0, 0, 0]
    assert found.kv_occupancy.tolist() == [0, 0, 0]


@pytest.mark.parametrize("num_bins", [0, MOST_BINS + 1, 2.5])
def test_a_number_of_spans_out_of_range_is_refused(num_bins: int) -> None:
    with pytest.raises(ValueError, match="num_bins"):
        over_time(tiny_run(), num_bins)


def test_attainment_by_ttft_counts_what_meets_says() -> None:
    run = tiny_run()
    limits = [0, 0.99, 1, 2, 3.4, 3.5, 100]
    for tpot_s in (0.5, 1, 1.5):
        counted = [sum(r.meets(SLO(t, tpot_s)) for r in run.requests) / 4 for t in limits]
        assert attainment_by(run, limits, tpot_s).tolist() == counted
    assert attainment_by(run, limits, 1.5).tolist() == [0, 0, 0.25, 0.5, 0.5, 0.75, 0.75]


def test_an_slo_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="ttft_s=-1"):
        summarize(tiny_run(), SLO(-1, 1))
