"""The bench serves and simulates the same requests, and says how far apart they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pdlab
from pdlab.bench import agreement as agreement_module
from pdlab.bench.agreement import Agreement, Numbers, measure_agreement, telling_slo
from pdlab.bench.published_fits import FitErrors, measure_published
from pdlab.bench.scheduling import (
    SchedulingBench,
    measure_overhead,
    measure_scheduling,
    measure_simulator,
)
from pdlab.cli import app
from pdlab.cli import bench_scheduling as command
from pdlab.costmodel import LinearStepTimes, StepShape, published
from pdlab.engine import EngineConfig
from pdlab.models import Model
from pdlab.workload import WORKLOADS
from pdlab.workload.serving import SLO
from pdlab.workload.simulation import simulate
from pdlab.workload.step_shapes import Sample

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "published"
SLOW = LinearStepTimes("made up", 0.01, 0.0, 0.001, 1e-5, 0.0, 0.001, 0.0, 1e-6)
QUICK = {"num_requests": 3, "repeats": 2, "rate": 100.0}


@pytest.fixture(scope="module")
def model() -> Model:
    return pdlab.load("random:tiny-llama")


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Replaces measuring steps; what is measured and served is noted in its order."""
    order: list[str] = []
    shapes = [StepShape(n, 10 * n, 55 * n, 0, 0) for n in (1, 2, 3, 4)]
    shapes += [StepShape(0, 0, 0, n, 100 * n, 100 + n) for n in (1, 2, 3, 4, 5)]

    def measure(*_: object, **__: object) -> list[Sample]:
        order.append("steps")
        return [(shape, SLOW.step_s(shape)) for shape in shapes]

    serve = agreement_module._serve

    def watched(model: Model, config: EngineConfig, requests: list) -> object:
        [name] = [n for n, w in WORKLOADS.items() if w(len(requests), w.rate_rps * 100) == requests]
        order.append(name)
        return serve(model, config, requests)

    def rehearse(*given: object) -> list[Sample]:
        order.append("rehearsal")
        return []

    monkeypatch.setattr(agreement_module, "measure_steps", measure)
    monkeypatch.setattr(agreement_module, "_rehearse", rehearse)
    monkeypatch.setattr(agreement_module, "_serve", watched)
    return order


# --- agreement -----------------------------------------------------------------------------------


def test_workloads_are_served_in_turns_and_steps_measured_before_each(
    model: Model, calibrations: list[str]
) -> None:
    found, _ = measure_agreement(model, **QUICK)
    names = list(WORKLOADS)
    before = ["steps", "rehearsal"]
    assert calibrations == [*before, *names, *before, *names[1:], names[0]]
    assert [each.workload for each in found] == names
    assert all(len(each.measured) == 2 for each in found)


def test_a_rehearsal_serves_other_requests_than_those_compared(model: Model) -> None:
    config = EngineConfig(num_blocks=200)
    samples = agreement_module._rehearse(model, config, seed=1, rate=100.0)
    assert len(samples) > 10
    assert all(seconds > 0 for _, seconds in samples)
    assert any(shape.num_prompts for shape, _ in samples)
    assert any(shape.num_decodes for shape, _ in samples)


def test_what_is_simulated_are_the_same_requests_with_the_fitted_times(
    model: Model, calibrations: list[str]
) -> None:
    config = EngineConfig(batching="prefill_first", num_blocks=200)
    slo = SLO(0.5, 0.1)
    [found], times = measure_agreement(model, config, workloads=["short chat"], slo=slo, **QUICK)
    assert times.base_s == pytest.approx(SLOW.base_s, rel=0.2)
    requests = WORKLOADS["short chat"](3, 100 * WORKLOADS["short chat"].rate_rps)
    run = simulate(requests, config, times, max_model_len=1024)
    assert found.simulated == Numbers.of(run, slo)
    assert found.slo == slo
    assert found.refitted not in (None, found.simulated)
    assert found.step_ratio > 0


def test_limits_come_from_the_simulation_alone_and_tell_requests_apart(
    model: Model, calibrations: list[str]
) -> None:
    given = QUICK | {"num_requests": 30}
    found, times = measure_agreement(model, workloads=["short chat", "mixed"], **given)
    for each in found:
        workload = WORKLOADS[each.workload]
        run = simulate(
            workload(30, 100 * workload.rate_rps), EngineConfig(), times, max_model_len=1024
        )
        assert each.slo == telling_slo(run)
        assert 0.8 <= each.simulated.attainment <= 0.9


def test_a_limit_is_kept_by_nine_of_ten() -> None:
    times, knobs = published("a100-opt-13b")
    run = simulate(WORKLOADS["mixed"](50), EngineConfig(**knobs), times)
    slo = telling_slo(run)
    assert sum(r.metrics.ttft_s <= slo.ttft_s for r in run.requests) == 45
    paces = [r.metrics.tpot_s for r in run.requests if r.metrics.tpot_s is not None]
    assert sum(pace <= slo.tpot_s for pace in paces) == pytest.approx(0.9 * len(paces), abs=1)


def numbers(ttft_s: float, tpot_s: float, goodput_per_s: float) -> Numbers:
    return Numbers(ttft_s, tpot_s, goodput_per_s, attainment=2 * goodput_per_s)


AGREEMENT = Agreement(
    "short chat",
    40,
    0.5,
    SLO(2.0, 0.25),
    measured=[numbers(1.0, 0.1, 0.5), numbers(1.2, 0.3, 0.4), numbers(9.0, 0.2, 0.3)],
    simulated=numbers(1.2, 0.22, 0.42),
    step_ratio=1.1,
    refitted=numbers(1.2, 0.2, 0.4),
)


def test_ratios_are_to_the_median_of_the_turns() -> None:
    ratios = [AGREEMENT.ratio(name) for name in ("ttft_s", "tpot_s", "goodput_per_s")]
    assert ratios == pytest.approx([1.0, 1.1, 1.05])
    assert AGREEMENT.agrees
    assert not replace(AGREEMENT, simulated=numbers(1.2, 0.22, 0.45)).agrees
    assert not replace(AGREEMENT, simulated=numbers(1.0, 0.22, 0.42)).agrees


@pytest.mark.parametrize("simulated", [0.0, 0.1])
def test_where_nobody_was_served_in_time_nothing_agrees(simulated: float) -> None:
    nobody = [numbers(1.0, 0.1, 0.0)]
    found = replace(AGREEMENT, measured=nobody, simulated=numbers(1.0, 0.1, simulated))
    assert found.is_within("tpot_s")
    assert not found.is_within("goodput_per_s")
    assert not found.agrees
    assert found.ratio("goodput_per_s") is None


def test_a_run_with_few_different_steps_is_not_fitted() -> None:
    shapes = [StepShape(0, 0, 0, 1, n, n) for n in range(1, 9)]
    assert agreement_module._fit_if_enough([(shape, 0.1) for shape in shapes[:7]] * 2) is None
    assert agreement_module._fit_if_enough([(shape, 0.1) for shape in shapes])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_requests": 0}, "num_requests=0"),
        ({"repeats": 0}, "repeats=0"),
        ({"workloads": ["chess"]}, "workloads='chess' must be one of short chat"),
        ({"slo": SLO(-1, 1)}, "ttft_s=-1"),
        ({"rate": 0}, "rate=0"),
    ],
)
def test_bad_arguments_of_the_agreement_are_named(
    model: Model, calibrations: list[str], given: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measure_agreement(model, **QUICK | given)
    assert not calibrations, "nothing was measured in vain"


# --- the other sections --------------------------------------------------------------------------


def test_the_simulator_is_timed_on_all_requests() -> None:
    speed = measure_simulator(50, 2.5)
    assert (speed.num_requests, speed.machine) == (50, "a100-opt-13b")
    assert 15 < speed.duration_s < 60, "50 requests at 2.5/s"
    assert speed.num_steps > 50
    assert speed.wall_s > 0
    with pytest.raises(ValueError, match="num_requests=1 "):
        measure_simulator(1)


@pytest.mark.parametrize("record_trace", [True, False])
def test_the_overhead_is_that_of_decode_steps_of_the_whole_batch(
    model: Model, record_trace: bool
) -> None:
    found = measure_overhead(model, batch=4, num_steps=5, record_trace=record_trace)
    assert set(found.part_s) == {"schedule", "prepare", "deliver", "record"}
    assert all(0 < seconds <= found.total_s for seconds in found.part_s.values())
    assert (found.batch, found.record_trace) == (4, record_trace)
    with pytest.raises(ValueError, match=r"num_steps has .* it must be from 1 to 894"):
        measure_overhead(model, num_steps=1000)


def test_one_request_alone_takes_the_published_times_in_the_simulator() -> None:
    """The formulas of DistServe, by hand: 20 tokens after a prompt of 700."""
    times, knobs = published("a100-opt-13b")
    [request] = WORKLOADS["short chat"](1)
    request = replace(request, arrival_s=0.0, num_prompt_tokens=700, num_output_tokens=20)
    metrics = simulate([request], EngineConfig(**knobs), times).requests[0].metrics
    prefill_ms = 18.10254647486372 + 0.1019122572698738 * 700 + 7.122264314252114e-06 * 700**2
    decode_ms = sum(19.934702624895458 + 0.0006269356524350583 * (700 + i) for i in range(1, 20))
    decode_ms += 19 * 0.03850697740828398
    assert metrics.ttft_s == pytest.approx(prefill_ms / 1e3, rel=1e-9)
    assert metrics.tpot_s == pytest.approx(decode_ms / 19 / 1e3, rel=1e-9)


def test_published_times_are_met_where_they_are_here() -> None:
    if not PUBLISHED.is_dir():
        pytest.skip("the published files are not here")
    found = {(each.name, each.phase): each for each in measure_published(PUBLISHED)}
    for (name, _), errors in found.items():
        if "simulated" in name:
            assert errors.worst < 1e-9, name
    prefill, decode = (found["llama2-70b, all overheads", p] for p in ("prefill", "decode"))
    assert 0.06 < prefill.median < 0.09
    assert prefill.worst < 0.3
    assert 0.9 < prefill.within < 0.95
    assert decode.median < 0.04
    assert decode.within == 1.0
    assert found["llama2-70b, overhead a step alone", "prefill"].median > 0.35
    assert found["llama2-70b, overhead a step alone", "prefill"].within < 0.05


def test_errors_are_counted_without_their_signs() -> None:
    errors = FitErrors.of("x", "decode", [0.1, -0.3, 0.2, -0.05])
    assert errors == FitErrors("x", "decode", 4, pytest.approx(0.15), 0.3, 0.75)


# --- all together --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(model: Model) -> SchedulingBench:
    bench = measure_scheduling(model, sections=["overhead"])
    return replace(
        bench,
        agreements=[AGREEMENT],
        step_times=SLOW,
        speeds=[measure_simulator(20)],
        published=[FitErrors.of("llama2-70b", "prefill", [0.1, 0.3])],
    )


def test_only_what_was_asked_for_is_measured(model: Model, calibrations: list[str]) -> None:
    bench = measure_scheduling(model, sections=["simulator"], num_simulated=10)
    assert [speed.num_requests for speed in bench.speeds] == [10, 10]
    assert (bench.agreements, bench.overheads, bench.published) == ([], [], [])
    assert not calibrations
    with pytest.raises(ValueError, match="sections='luck' must be one of agreement"):
        measure_scheduling(model, sections=["luck"])


def test_a_saved_measurement_is_read_back(found: SchedulingBench, tmp_path: Path) -> None:
    path = tmp_path / "scheduling.json"
    found.save(path)
    again = SchedulingBench.load(path)
    assert again.agreements == found.agreements
    assert again.agreements[0].slo == SLO(2.0, 0.25)
    assert again.machine == found.machine
    assert {"processor", "cores", "threads", "date", "load_before"} <= again.machine.keys()
    assert again.overheads[0].total_s == pytest.approx(found.overheads[0].total_s, rel=1e-3)
    again.save(path)
    assert SchedulingBench.load(path) == again


@pytest.mark.parametrize(("load", "busy"), [(0.1, False), (0.5, True), (None, False)])
def test_a_busy_machine_is_noticed(found: SchedulingBench, load: float | None, busy: bool) -> None:
    machine = found.machine | {"load_before": load}
    assert replace(found, machine=machine).busy is busy


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def printed(found: SchedulingBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    monkeypatch.setattr(command, "measure_scheduling", lambda *_, **__: found)
    monkeypatch.setattr(command, "load", lambda name, device: None)
    path = tmp_path / "scheduling.json"
    result = CliRunner().invoke(app, ["bench", "scheduling", "--save", str(path)])
    assert result.exit_code == 0, result.output
    assert json.loads(path.read_text())["agreements"][0]["workload"] == "short chat"
    return [line.rstrip() for line in result.stdout.splitlines()]


def test_the_table_has_both_sides_the_ratio_and_the_verdict(printed: list[str]) -> None:
    start = printed.index("short chat, 0.5/s")
    rows = [" ".join(line.split()) for line in printed[start + 1 : start + 6]]
    assert rows == [
        "median TTFT 1.20 s 1.00 s to 9.00 s 1.20 s 1.00 15%: yes",
        "median TPOT 200 ms 100 ms to 300 ms 220 ms 1.10 15%: yes",
        "goodput 0.4/s 0.3/s to 0.5/s 0.42/s 1.05 10%: yes",
        "within limits 80% 60% to 100% 84%",
        "all its steps 1.10",
    ]
    assert all(len(line) <= 80 for line in printed[start - 1 : start + 6])
    assert not any("…" in line for line in printed)


def test_what_numbers_rest_on_is_said(printed: list[str]) -> None:
    text = "\n".join(printed)
    assert "measured, and the simulator" in text
    assert "short chat: TTFT up to 2.00 s and TPOT up to 250 ms" in text
    assert "the simulation alone says that 90% of the workload keep it" in text
    assert "published fit, against that fit (composition, not hardware)" in text
    assert "random:tiny-llama, float32" in text
    assert "a100-opt-13b" in text
    assert "4 decodes" not in text
    assert "32 decodes, without model and sampling" in text
    assert "short chat: ratios 1.00, 1.00, 1.00" in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--requests", "0"], "requests=0"),
        (["--repeats", "0"], "repeats=0"),
        (["--ttft-slo-ms", "-1", "--tpot-slo-ms", "9"], "ttft_s=-0.001"),
        (["--ttft-slo-ms", "9"], "ttft_slo_ms and tpot_slo_ms are needed both"),
        (["--rate", "0"], "rate=0"),
        (["--only", "luck"], "only='luck'"),
        (["--published", "/nowhere"], "published='/nowhere' is no directory"),
        (["--save", "/nowhere/x.json"], "save='/nowhere/x.json'"),
    ],
)
def test_a_bad_option_is_named_in_one_line(
    options: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "load", lambda *_, **__: pytest.fail("loaded a model in vain"))
    result = CliRunner().invoke(app, ["bench", "scheduling", *options])
    assert result.exit_code == 2
    assert named in result.stderr
    assert result.stderr.count("\n") == 1
