"""Measured step times: which steps are run, what their shapes are, and the cache."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pdlab
from pdlab.costmodel import LinearStepTimes, StepShape, causal_pairs, published
from pdlab.engine import Engine, EngineConfig
from pdlab.models import Model
from pdlab.sampling import SamplingParams
from pdlab.trace import Trace
from pdlab.workload import step_calibration
from pdlab.workload.step_calibration import (
    SCENES,
    Calibration,
    IdleRunner,
    Measurement,
    Prompts,
    Scene,
    computing_nothing,
    measure_steps,
    measure_with_share,
    measured_step_times,
)
from pdlab.workload.step_shapes import Sample, samples_of, shape_of, shape_of_record

FEW = (
    Scene((), (Prompts((40,)), Prompts((8, 24)), Prompts((16,), 32))),
    Scene((20, 50), (Prompts(), Prompts((30,)))),
    Scene((2000,), (Prompts(),)),
)


@pytest.fixture(scope="module")
def model() -> Model:
    return pdlab.load("random:tiny-llama")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path))
    return tmp_path / "step_times"


def shapes(samples: list[Sample]) -> list[StepShape]:
    return [shape for shape, _ in samples]


# --- shapes --------------------------------------------------------------------------------------


def test_a_planned_and_a_recorded_step_have_the_same_shape(model: Model) -> None:
    """Chunked prompts beside decodes, preemption, and a prefix found in the cache."""
    config = EngineConfig(num_blocks=16, max_num_batched_tokens=40, chunk_size=24, watermark=0)
    prompts = [[i] * 50 for i in (1, 2, 3, 1)]
    planned: list[StepShape] = []
    with Engine(model, config) as engine:
        schedule = engine.scheduler.schedule

        def note(*args: object) -> object:
            batch = schedule(*args)
            planned.append(shape_of(batch))
            return batch

        engine.scheduler.schedule = note
        engine.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
        records = engine.trace.steps
    assert planned == [shape_of_record(record) for record in records]
    assert any(record.preempted for record in records), "the pool was to be too small"
    assert any(s.num_prompts and s.num_decodes for s in planned)


def test_a_shape_counts_tokens_pairs_and_contexts(model: Model) -> None:
    with Engine(model, EngineConfig(chunk_size=16)) as engine:
        engine.submit([1] * 10, SamplingParams(max_tokens=5, ignore_eos=True))
        engine.submit([2] * 40, SamplingParams(max_tokens=5, ignore_eos=True))
        steps = [engine.step() for _ in range(4)]
    found = [shape_of_record(step) for step in steps if step]
    assert found == [
        StepShape(2, 26, causal_pairs(0, 10) + causal_pairs(0, 16), 0, 0, 0),
        StepShape(1, 16, causal_pairs(16, 16), 1, 11, 11),
        StepShape(1, 8, causal_pairs(32, 8), 1, 12, 12),
        StepShape(0, 0, 0, 2, 13 + 41, 41),
    ]


def test_a_recorded_run_gives_samples_and_leaves_out_the_time_it_idled(model: Model) -> None:
    with Engine(model, EngineConfig()) as engine:
        engine.generate([[1] * 10], SamplingParams(max_tokens=4, ignore_eos=True))
        trace = engine.trace
    steps = trace.steps
    busy = [replace(s, start_s=0.1 * i, wall_s=0.099) for i, s in enumerate(steps)]
    trace.steps[:] = [*busy[:3], replace(busy[3], start_s=7.0)]
    assert shapes(samples_of(trace)) == [shape_of_record(step) for step in steps]
    assert [s for _, s in samples_of(trace)] == pytest.approx([0.1, 0.1, 0.099, 0.099])


# --- measuring -----------------------------------------------------------------------------------


def test_every_step_that_was_designed_is_run(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_calibration, "SCENES", FEW)
    samples = measure_steps(model)
    assert shapes(samples) == [
        StepShape(1, 40, causal_pairs(0, 40), 0, 0, 0),
        StepShape(2, 32, causal_pairs(0, 8) + causal_pairs(0, 24), 0, 0, 0),
        StepShape(1, 16, causal_pairs(32, 16), 0, 0, 0),
        StepShape(0, 0, 0, 2, 70, 50),
        StepShape(1, 30, causal_pairs(0, 30), 2, 72, 51),
    ], "and a context of 2,000 tokens is more than the model takes"
    assert all(seconds > 0 for _, seconds in samples)


@pytest.mark.parametrize(
    "knobs",
    [
        {"exact": True},
        {"kv_format": "int8:channel"},
        {"block_size": 32, "kv_head_groups": 2},
        {"window": 64, "sink_tokens": 4},
        {"window": 64, "heavy_tokens": 32, "enable_prefix_cache": False},
        {"num_blocks": 4, "max_num_seqs": 1, "max_num_batched_tokens": 8},
    ],
    ids=str,
)
def test_steps_are_measured_under_any_knobs(
    model: Model, monkeypatch: pytest.MonkeyPatch, knobs: dict
) -> None:
    monkeypatch.setattr(step_calibration, "SCENES", FEW)
    monkeypatch.setattr(step_calibration, "ROUNDS", 1)
    samples = measure_steps(model, EngineConfig(**knobs))
    assert StepShape(1, 30, causal_pairs(0, 30), 2, 72, 51) in shapes(samples)
    chunk = StepShape(1, 16, causal_pairs(32, 16), 0, 0, 0)
    assert (chunk in shapes(samples)) is ("heavy_tokens" not in knobs)


def test_the_designed_steps_tell_all_costs_apart() -> None:
    """A cost that no step separates from the others would be a guess."""
    import numpy as np

    from pdlab.costmodel.step_times import COSTS

    amounts = []
    for contexts, beside in SCENES:
        for lengths, start in beside:
            pairs = sum(causal_pairs(start, n) for n in lengths)
            decodes = (len(contexts), sum(contexts), max(contexts, default=0))
            shape = StepShape(len(lengths), sum(lengths), pairs, *decodes)
            units = [
                LinearStepTimes("", *(float(cost == name) for cost in COSTS)) for name in COSTS
            ]
            amounts.append([unit.step_s(shape) for unit in units])
    matrix = np.array(amounts) / np.max(amounts, axis=0)
    assert np.linalg.matrix_rank(matrix) == len(COSTS)
    assert np.linalg.cond(matrix) < 50


def test_whatever_had_the_least_time_is_measured_next(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of 500 ms runs once while one of 125 runs four times; no scene without a step does."""
    few = (*FEW[:2], Scene((9,), (Prompts(), Prompts())), FEW[2])
    monkeypatch.setattr(step_calibration, "SCENES", few)
    seconds = {0: 0.5, 1: 0.125, 2: 0.0625}
    played: list[int] = []

    def play(_: object, contexts: tuple, beside: dict, __: object) -> Iterator:
        scene = [each.contexts for each in few].index(tuple(contexts)) if contexts else 0
        played.append(scene)
        yield from ((i, (StepShape(1, scene, i, 0, 0), seconds[scene])) for i in beside)

    with Calibration(model) as calibration:
        monkeypatch.setattr(step_calibration, "_play", play)
        assert calibration.num_scenes == 3
        for _ in range(1 + 4 + 8):
            calibration.play_next()
        assert sorted(played[:3]) == [0, 1, 2]
        assert [played.count(scene) for scene in range(3)] == [1, 4, 8]
        assert calibration.spent_s == pytest.approx((3 + 2 + 2) * 0.5)
        samples = calibration.samples(sum)
        assert samples[-1] == (StepShape(1, 2, 1, 0, 0), 0.5)
        assert len(samples) == 3 + 2 + 2


def test_steps_are_averaged_as_one_likes(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_calibration, "SCENES", FEW)
    with Calibration(model) as calibration:
        for _ in range(3):
            calibration.play(1)
        calibration.play(1, enough_s=0.0)
        slowest, fastest = (dict(calibration.samples(average)) for average in (max, min))
    assert slowest.keys() == fastest.keys()
    assert len(slowest) == 2
    assert all(slowest[shape] > fastest[shape] > 0 for shape in slowest)


def test_requests_that_nobody_serves_can_be_left_out(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_calibration, "SCENES", FEW)
    with Calibration(model, longest=47) as calibration:
        assert calibration.num_scenes == 1
        calibration.play(0)
        assert [shape.num_prompt_tokens for shape in shapes(calibration.samples(min))] == [40, 32]
    with Calibration(model, longest=48) as calibration:
        calibration.play(0)
        found = shapes(calibration.samples(min))
        assert [shape.num_prompt_tokens for shape in found] == [40, 32, 16], "16 behind 32 cached"


def test_an_idle_runner_lets_the_engine_do_the_rest(model: Model) -> None:
    with Engine(model, EngineConfig()) as engine:
        runner = engine.runner
        with computing_nothing(engine):
            assert isinstance(engine.runner, IdleRunner)
            ids = [engine.submit([5] * 20, SamplingParams(max_tokens=3, ignore_eos=True))]
            while engine.step():
                pass
        assert engine.runner is runner
        assert engine.collect(ids[0]).completions[0].token_ids == [0, 0, 0]
        assert engine.pool.num_free == engine.pool.num_blocks


# --- the cache -----------------------------------------------------------------------------------


@pytest.fixture
def shares() -> list[float]:
    """Of the processor, for the measurements to come; then 1."""
    return []


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch, shares: list[float]) -> Iterator[list[Sample]]:
    """Replaces measuring; grows with every measurement, each slower than the last."""
    taken: list[Sample] = []
    times, _ = published("a100-opt-13b")

    def measure(*_: object, **__: object) -> Measurement:
        taken.append((StepShape(0, 0, 0, 1, 1, 1), 1.0))
        few = [StepShape(n, 10 * n, 55 * n, 0, 0) for n in (1, 2, 3, 4)]
        few += [StepShape(0, 0, 0, n, 100 * n, 100 + n) for n in (1, 2, 3, 4, 5, 6)]
        samples = [(shape, len(taken) * times.step_s(shape)) for shape in few]
        return Measurement(samples, shares.pop(0) if shares else 1.0)

    monkeypatch.setattr(step_calibration, "measure_with_share", measure)
    return taken


def test_the_second_call_reads_the_cache(
    model: Model, measurements: list[Sample], cache: Path
) -> None:
    first = measured_step_times(model)
    assert measured_step_times(model, EngineConfig()) == first
    assert len(measurements) == len(list(cache.iterdir())) == 1
    assert first.basis.startswith("measured on ")
    assert model.name in first.basis


def test_what_was_slowed_by_others_says_so_and_is_measured_again(
    model: Model, measurements: list[Sample], shares: list[float]
) -> None:
    shares += [0.55, 0.9]
    assert measured_step_times(model).basis.endswith(
        "; slowed by other processes, 55% of the processor"
    )
    quiet = measured_step_times(model)
    assert "slowed" not in quiet.basis
    assert measured_step_times(model) == quiet
    assert len(measurements) == 2


def test_after_three_attempts_the_least_disturbed_is_believed(
    model: Model, measurements: list[Sample], shares: list[float]
) -> None:
    shares += [0.3, 0.6, 0.5]
    found = [measured_step_times(model) for _ in range(5)]
    assert len(measurements) == 3
    assert found[1] == found[2] == found[3] == found[4]
    assert "60% of the processor" in found[4].basis


@pytest.mark.parametrize(("count", "named"), [(1, "1 thread, cpu"), (2, "2 threads, cpu")])
def test_the_basis_counts_threads(
    model: Model,
    measurements: list[Sample],
    monkeypatch: pytest.MonkeyPatch,
    count: int,
    named: str,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    assert f", {named}, " in measured_step_times(model).basis


def test_the_share_is_processor_time_over_the_time_of_all_threads(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_calibration, "SCENES", FEW)
    clock = {"wall": 0.0, "processor": 0.0}

    def tick(name: str, step: float) -> float:
        clock[name] += step
        return clock[name]

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(step_calibration.time, "process_time", lambda: tick("processor", 1.2))
    monkeypatch.setattr(step_calibration.time, "perf_counter", lambda: tick("wall", 1.0))
    assert measure_with_share(model, rounds=1).processor_share == pytest.approx(0.6)


def test_refresh_measures_again_and_replaces(model: Model, measurements: list[Sample]) -> None:
    first, second = measured_step_times(model), measured_step_times(model, refresh=True)
    assert second.base_s == pytest.approx(2 * first.base_s)
    assert measured_step_times(model) == second


def test_only_what_decides_the_time_of_a_step_is_measured_apart(
    model: Model, measurements: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    for same in ({}, {"num_blocks": 99}, {"max_num_seqs": 3}, {"chunk_size": 8}, {"seed": 1}):
        measured_step_times(model, EngineConfig(**same))
    assert len(measurements) == 1
    for other in ({"exact": True}, {"kv_format": "int8"}, {"window": 64}, {"block_size": 8}):
        measured_step_times(model, EngineConfig(**other))
    assert len(measurements) == 5
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    measured_step_times(model)
    measured_step_times(pdlab.load("random:tiny-qwen2"))
    assert len(measurements) == 7


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: text.replace('"base_s"', '"bass_s"'),
        lambda text: text.replace('"attempts": 1', '"attempts": null'),
        lambda text: json.dumps(json.loads(text) | {"key": {}}),
        lambda text: json.dumps(
            json.loads(text) | {"step_times": {**json.loads(text)["step_times"], "decode_s": -1}}
        ),
    ],
    ids=["empty", "cut", "list", "null", "other-field", "no-count", "other-key", "negative"],
)
def test_a_damaged_cache_is_measured_again(
    model: Model, measurements: list[Sample], cache: Path, damage
) -> None:
    first = measured_step_times(model)
    [path] = cache.iterdir()
    path.write_text(damage(path.read_text()))
    again = measured_step_times(model)
    assert again.base_s == pytest.approx(2 * first.base_s)
    assert measured_step_times(model) == again


def test_a_cache_that_cannot_be_written_costs_only_time(
    model: Model, measurements: list[Sample], cache: Path
) -> None:
    cache.write_text("a file where the folder should be")
    measured_step_times(model)
    measured_step_times(model)
    assert len(measurements) == 2


def test_a_trace_without_steps_has_no_samples() -> None:
    assert samples_of(Trace()) == []
