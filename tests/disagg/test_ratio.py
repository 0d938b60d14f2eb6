"""How many prefill and how many decode: the formula, and what a simulation says of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import EngineConfig
from pdlab.costmodel import LinearStepTimes
from pdlab.disagg.ratio import (
    Need,
    batch_of,
    corrected,
    measured_over_predicted,
    need_of,
    split,
    splits,
)
from pdlab.disagg.router import RouterConfig
from pdlab.disagg.serving import ClusterRun
from pdlab.disagg.simulated.cluster import simulate_cluster
from pdlab.disagg.simulated.spec import SimulatedSpec
from pdlab.workload.traces import TraceRequest

TIMES = LinearStepTimes("made up", 0.01, 0.0, 0.0, 0.001, 1e-6, 0.0005, 1e-6, 0.0)
CONFIG = EngineConfig(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=256)
REQUESTS = [TraceRequest(i * 0.01, 100 + i % 50, 20 + i % 11) for i in range(60)]


def run(num_prefill: int, num_decode: int, slower: float = 1.0) -> ClusterRun:
    times = TIMES
    if slower != 1:
        costs = {k: v * slower for k, v in TIMES.to_dict().items() if k.endswith("_s") and v}
        times = replace(TIMES, **costs)
    workers = {f"p{i}": SimulatedSpec("prefill", CONFIG, times) for i in range(num_prefill)}
    workers |= {f"d{i}": SimulatedSpec("decode", CONFIG, times) for i in range(num_decode)}
    return simulate_cluster(REQUESTS, workers, RouterConfig())


def test_what_one_request_needs_by_hand():
    times = LinearStepTimes("made up", 1.0, 0.0, 0.0, 0.1, 0.0, 0.5, 0.01, 0.0)
    need = need_of([TraceRequest(0, 10, 5)], times, times, batch=2)
    assert need.prefill_s == pytest.approx(1 + 10 * 0.1)
    assert need.decode_s == pytest.approx(4 * (1 + 2 * 0.5 + 2 * 12 * 0.01) / 2)


@pytest.mark.parametrize(
    ("need", "num_workers", "expected"),
    [
        (Need(1.0, 1.0), 4, "2P2D"),
        (Need(3.0, 1.0), 4, "3P1D"),
        (Need(1.0, 3.0), 4, "1P3D"),
        (Need(1.0, 100.0), 4, "1P3D"),
        (Need(1.0, 0.0), 4, "3P1D"),
        (Need(0.0, 1.0), 4, "1P3D"),
        (Need(1.0, 1.0), 3, "1P2D"),
        (Need(1.0, 1.0), 2, "1P1D"),
    ],
)
def test_both_sides_are_busy(need, num_workers, expected):
    assert str(split(need, num_workers)) == expected


def test_the_busier_side_is_the_limit():
    [few, even, many] = splits(Need(2.0, 1.0), 4)
    assert [each.capacity_rps for each in (few, even, many)] == [0.5, 1.0, 1.0]
    assert (few.prefill_use, few.decode_use) == (1.0, pytest.approx(1 / 6))
    assert (many.prefill_use, many.decode_use) == (pytest.approx(2 / 3), 1.0)


def test_the_split_that_the_formula_says_is_done_first():
    """Under more load than any split can bear, of six divisions of seven workers."""
    need = need_of(REQUESTS, TIMES, TIMES, batch=batch_of(REQUESTS, CONFIG))
    best = split(need, 7)
    took = {p: run(p, 7 - p).serving.duration_s for p in range(1, 7)}
    assert took[best.num_prefill] <= 1.1 * min(took.values())
    assert took[best.num_prefill] < 0.7 * max(took.values())


def test_the_batch_has_seats_and_room():
    requests = [TraceRequest(0, 100, 40)]
    assert batch_of(requests, CONFIG) == 8
    tight = replace(CONFIG, num_blocks=30, watermark=0.0)
    assert batch_of(requests, tight) == 30 * tight.block_size // 120


def test_a_simulation_takes_what_its_step_times_say():
    done = run(2, 2)
    for worker in done.workers.values():
        assert measured_over_predicted(worker.steps, done.requests, TIMES) == pytest.approx(
            1, rel=0.01
        )


def test_measurements_correct_the_need():
    need = Need(2.0, 3.0)
    done = run(2, 2, slower=1.5)
    after = corrected(need, done, TIMES, TIMES)
    assert after.prefill_s == pytest.approx(3.0, rel=0.01)
    assert after.decode_s == pytest.approx(4.5, rel=0.01)


def test_without_steps_nothing_is_corrected():
    assert measured_over_predicted([], [], TIMES) == 1.0


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: split(Need(1, 1), 1), "num_workers=1"),
        (lambda: need_of([], TIMES, TIMES), "requests has no request"),
        (lambda: batch_of([], CONFIG), "requests has no request"),
        (lambda: need_of(REQUESTS, TIMES, TIMES, batch=0), "batch=0"),
        (lambda: Need(1, 1).corrected(0, 1), "prefill=0"),
    ],
)
def test_what_makes_no_sense_is_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
