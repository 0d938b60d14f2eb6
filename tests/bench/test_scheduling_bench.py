"""The bench serves and simulates the same requests, and says how far apart they are."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pdlab
from pdlab.bench import agreement as agreement_module
from pdlab.bench.agreement import (
    Agreement,
    Latencies,
    Numbers,
    Turn,
    measure_agreement,
    telling_slo,
)
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
from pdlab.workload import WORKLOADS, TraceRequest
from pdlab.workload.serving import SLO
from pdlab.workload.simulation import simulate
from pdlab.workload.step_shapes import Sample

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "data" / "published"
SLOW = LinearStepTimes("made up", 0.01, 0.0, 0.001, 1e-5, 0.0, 0.001, 0.0, 1e-6)
QUICK = {"num_requests": 3, "repeats": 2, "rate": 100.0}


@pytest.fixture(scope="module")
def model() -> Model:
    return pdlab.load("random:tiny-llama")


class Timed:
    """In place of a calibration: every step that it plays takes a tenth of a second."""

    SHAPES = (
        *(StepShape(n, 10 * n, 55 * n, 0, 0) for n in (1, 2, 3, 4)),
        *(StepShape(0, 0, 0, n, 100 * n, 100 + n) for n in range(1, 7)),
    )
    made: list[Timed]

    def __init__(self, model: Model, config: EngineConfig, *, longest: int, seed: int):
        self.longest, self.seed, self.num_played = longest, seed, 0
        self.share = lambda: 0.9
        self.share.test = lambda: None
        self.made.append(self)

    def __enter__(self) -> Timed:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    @property
    def spent_s(self) -> float:
        return 0.1 * self.num_played

    def play_next(self) -> None:
        self.num_played += 1
        time.sleep(0.02)

    def samples(self, average: object) -> list[Sample]:
        assert average is statistics.mean, "a median would leave out the slow moments"
        return [(shape, SLOW.step_s(shape)) for shape in self.SHAPES]


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[Timed]:
    """Replaces measuring steps."""
    Timed.made = []
    monkeypatch.setattr(agreement_module, "Calibration", Timed)
    return Timed.made


# --- agreement -----------------------------------------------------------------------------------


def test_each_turn_serves_other_requests_beginning_with_another_workload(
    model: Model, calibrations: list[Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    turn = agreement_module._turn

    def watched(model: Model, config: EngineConfig, requests: list, seed: int) -> object:
        order.append((requests, seed))
        return turn(model, config, requests, seed)

    monkeypatch.setattr(agreement_module, "_turn", watched)
    found = measure_agreement(model, seed=7, **QUICK)
    names = list(WORKLOADS)
    turns = [*((name, 7) for name in names), *((name, 8) for name in (*names[1:], names[0]))]
    assert order == [
        (WORKLOADS[name](3, 100 * WORKLOADS[name].rate_rps, seed), seed) for name, seed in turns
    ]
    assert [each.workload for each in found] == names
    assert [each.num_requests for each in found] == [6, 6, 6]
    assert all(len(each.turns) == 2 for each in found)
    assert [each.seed for each in calibrations] == [7, 7, 7, 8, 8, 8]
    assert all(each.closed for each in calibrations)


def test_steps_are_measured_between_the_steps_of_the_run(
    model: Model, calibrations: list[Timed], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So much of them as the run has had, and the run's clock knows nothing of it."""
    monkeypatch.setattr(agreement_module, "CALIBRATION_SHARE", 20.0)
    requests = [TraceRequest(1000.0 * i, 20, 5) for i in range(3)]
    start_s = time.perf_counter()
    served = agreement_module._serve(model, EngineConfig(num_blocks=200), requests, seed=0)
    wall_s = time.perf_counter() - start_s
    [calibration] = calibrations
    stepped_s = sum(step.wall_s for step in served.run.steps)
    assert calibration.num_played >= 1
    assert calibration.longest == 31, "a quarter more than 25"
    assert 20 * stepped_s <= calibration.spent_s < 20 * stepped_s + 0.1
    assert wall_s < 500, "nobody waits for who comes in a quarter of an hour"
    assert served.run.duration_s >= 2000
    assert [r.metrics.arrival_s for r in served.run.requests] == [0.0, 1000.0, 2000.0]
    ends = [step.end_s for step in served.run.steps]
    starts = [step.start_s for step in served.run.steps[1:]]
    gaps = [start - end for end, start in zip(ends, starts, strict=False)]
    assert len([gap for gap in gaps if gap > 900]) == 2, "between two requests"
    assert len(served.samples) == 15
    assert served.processor_share == 0.9


def test_a_clock_stands_still_and_leaps(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"s": 100.0}
    monkeypatch.setattr("pdlab.engine.engine.time.perf_counter", lambda: now["s"])
    engine = agreement_module._Clockwork(model, EngineConfig())

    def stop_and_fail() -> None:
        with engine.standing_still():
            now["s"] += 10
            raise KeyError

    with engine:
        now["s"] += 1
        with pytest.raises(KeyError):
            stop_and_fail()
        assert engine.now_s() == pytest.approx(1)
        engine.leap(5)
        now["s"] += 1
        assert engine.now_s() == pytest.approx(7)


def test_what_is_simulated_are_the_same_requests_with_the_fitted_times(
    model: Model, calibrations: list[Timed]
) -> None:
    config = EngineConfig(batching="prefill_first", num_blocks=200)
    slo, workload = SLO(0.5, 0.1), WORKLOADS["short chat"]
    [found] = measure_agreement(model, config, workloads=["short chat"], slo=slo, **QUICK)
    for seed, turn in enumerate(found.turns):
        times = turn.step_times
        assert times.base_s == pytest.approx(SLOW.base_s, rel=0.2)
        assert times.basis.endswith(f"between the steps of a served run: {model.name}")
        requests = workload(3, 100 * workload.rate_rps, seed)
        run = simulate(requests, config, times, max_model_len=1024)
        assert turn.simulated == Latencies.of(run)
        paced = simulate(requests, config, times.times(1 / turn.step_ratio), max_model_len=1024)
        assert turn.paced == Latencies.of(paced) != turn.simulated
        assert turn.measured != turn.simulated
        assert turn.step_ratio > 0
        assert turn.seed == seed
    assert found.slo == slo
    assert found.simulated == Numbers.of([turn.simulated for turn in found.turns], slo)
    assert found.measured == Numbers.of([turn.measured for turn in found.turns], slo)
    assert found.paced == Numbers.of([turn.paced for turn in found.turns], slo)


def test_limits_come_from_the_simulation_alone_and_tell_requests_apart(
    model: Model, calibrations: list[Timed]
) -> None:
    given = {"num_requests": 30, "repeats": 1, "rate": 100.0}
    for each in measure_agreement(model, workloads=["short chat", "mixed"], **given):
        workload = WORKLOADS[each.workload]
        run = simulate(
            workload(30, 100 * workload.rate_rps),
            EngineConfig(),
            each.turns[0].step_times,
            max_model_len=1024,
        )
        assert each.slo == telling_slo([Latencies.of(run)])
        assert 0.8 <= each.simulated.attainment <= 0.9


def test_the_requests_of_all_turns_count_together() -> None:
    """With the good ones as `ServedRequest.meets` counts them."""
    times, knobs = published("a100-opt-13b")
    workload, slo = WORKLOADS["mixed"], SLO(0.03, 0.03)
    runs = [simulate(workload(n, seed=n), EngineConfig(**knobs), times) for n in (10, 30)]
    both = Numbers.of([Latencies.of(run) for run in runs], slo)
    requests = [request for run in runs for request in run.requests]
    good = sum(request.meets(slo) for request in requests)
    assert 0 < good < 40
    assert both.attainment == good / 40
    assert both.goodput_per_s == good / (runs[0].duration_s + runs[1].duration_s)
    assert both.ttft_s == statistics.median(r.metrics.ttft_s for r in requests)
    paces = [r.metrics.tpot_s for r in requests if r.metrics.tpot_s is not None]
    assert both.tpot_s == pytest.approx(statistics.median(paces))


def test_who_was_refused_is_not_good_and_one_token_has_no_pace() -> None:
    found = Latencies([0.1, None, 0.2, 0.3], [0.5, None, None, 0.1], 10.0)
    assert found.num_good(SLO(0.25, 0.2)) == 1
    assert found.num_good(SLO(0.3, 0.5)) == 3
    assert Numbers.of([found], SLO(0.25, 0.2)) == (0.2, 0.3, 0.1, 0.25)
    assert Numbers.of([Latencies([None], [None], 0.0)], SLO(1, 1)) == (0, 0, 0, 0)


def test_a_limit_is_kept_by_nine_of_ten() -> None:
    times, knobs = published("a100-opt-13b")
    run = simulate(WORKLOADS["mixed"](50), EngineConfig(**knobs), times)
    slo = telling_slo([Latencies.of(run)])
    assert sum(r.metrics.ttft_s <= slo.ttft_s for r in run.requests) == 45
    paces = [r.metrics.tpot_s for r in run.requests if r.metrics.tpot_s is not None]
    assert sum(pace <= slo.tpot_s for pace in paces) == pytest.approx(0.9 * len(paces), abs=1)


def latencies(ttft_s: float, tpot_s: float, num_good: int) -> Latencies:
    """Of 40 requests in 80 s, nearly all alike; some are too slow, half of them in each way."""
    few, many = (40 - num_good) // 2, (40 - num_good + 1) // 2
    ttfts = [ttft_s] * (40 - few) + [9.0] * few
    return Latencies(ttfts, [0.9] * many + [tpot_s] * (40 - many), 80.0)


SIMULATED = latencies(1.2, 0.22, 34)
TURN = Turn(3, latencies(1.2, 0.2, 32), SIMULATED, latencies(1.2, 0.2, 32), SLOW, 1.1, 0.97)
AGREEMENT = Agreement("short chat", 0.5, SLO(2.0, 0.25), [TURN])


def simulated(*values: float) -> Agreement:
    return replace(AGREEMENT, turns=[replace(TURN, simulated=latencies(*values))])


def test_ratios_are_simulated_over_measured() -> None:
    ratios = [AGREEMENT.ratio(name) for name in ("ttft_s", "tpot_s", "goodput_per_s")]
    assert ratios == pytest.approx([1.0, 1.1, 1.0625])
    assert AGREEMENT.agrees
    assert not simulated(1.2, 0.22, 36).agrees
    assert not simulated(1.0, 0.22, 34).agrees
    assert AGREEMENT.paced_ratio("tpot_s") == 1.0


def test_turns_of_other_seeds_join_and_those_of_the_same_are_replaced() -> None:
    others = [replace(TURN, seed=seed, step_ratio=0.5) for seed in (9, 3, 1)]
    joined = AGREEMENT.with_turns_of(replace(AGREEMENT, turns=others))
    assert joined.turns == [others[2], TURN, others[0]]
    assert joined.num_requests == 120
    other_rate = replace(AGREEMENT, rate_rps=0.7, turns=others)
    assert AGREEMENT.with_turns_of(other_rate) == AGREEMENT


@pytest.mark.parametrize("num_good", [0, 8])
def test_where_nobody_was_served_in_time_nothing_agrees(num_good: int) -> None:
    turn = replace(TURN, measured=latencies(1.2, 0.22, 0), simulated=latencies(1.2, 0.22, num_good))
    found = replace(AGREEMENT, turns=[turn], given_slo=SLO(1.3, 0.23))
    assert found.measured.goodput_per_s == 0
    assert not found.is_within("goodput_per_s")
    assert not found.agrees
    assert found.ratio("goodput_per_s") is None


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
    model: Model, calibrations: list[Timed], given: dict, message: str
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
    with pytest.raises(ValueError, match="num_steps=1000 must be an integer from 1 to 894"):
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
        speeds=[measure_simulator(20)],
        published=[FitErrors.of("llama2-70b", "prefill", [0.1, 0.3])],
    )


def test_only_what_was_asked_for_is_measured(model: Model, calibrations: list[Timed]) -> None:
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
    assert isinstance(again.agreements[0].turns[0].measured, Latencies)
    assert again.machine == found.machine
    assert {"processor", "cores", "threads", "date", "processor_share"} <= again.machine.keys()
    assert again.overheads[0].total_s == pytest.approx(found.overheads[0].total_s, rel=1e-3)
    again.save(path)
    assert SchedulingBench.load(path) == again


def test_what_was_not_measured_now_stays(found: SchedulingBench) -> None:
    mixed, longer = replace(AGREEMENT, workload="mixed"), replace(AGREEMENT, rate_rps=0.7)
    now = replace(found, agreements=[mixed, longer], speeds=[], overheads=[found.overheads[0]])
    both = now.with_parts_of(found)
    assert both.agreements == [longer, mixed], "in the order of the workloads"
    assert both.overheads == now.overheads
    assert (both.speeds, both.published) == (found.speeds, found.published)
    assert both.machine == now.machine


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"machine": {"processor": "an abacus"}}, "processor='an abacus'"),
        ({"machine": {"threads": 99}}, "threads=99"),
        ({"model": {"name": "another"}}, "model differs in name"),
        ({"config": {"block_size": 8}}, "config differs in block_size"),
    ],
)
def test_parts_of_something_else_are_refused(
    found: SchedulingBench, model: Model, other: dict, named: str, calibrations: list[Timed]
) -> None:
    [(part, values)] = other.items()
    changed = replace(found, **{part: getattr(found, part) | values})
    with pytest.raises(ValueError, match=named):
        changed.with_parts_of(found)
    with pytest.raises(ValueError, match=named.split("=")[0]):
        measure_scheduling(model, earlier=changed)
    assert not calibrations, "nothing was measured in vain"


@pytest.mark.parametrize(
    ("before", "meanwhile", "busy"),
    [(0.95, 0.9, False), (0.7, 0.9, True), (0.95, 0.7, True), (None, 0.9, False)],
)
def test_a_busy_machine_is_noticed(
    found: SchedulingBench, before: float | None, meanwhile: float, busy: bool
) -> None:
    agreement = replace(AGREEMENT, turns=[TURN, replace(TURN, processor_share=meanwhile)])
    machine = found.machine | {"processor_share": before}
    assert replace(found, machine=machine, agreements=[agreement]).busy is busy


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
    rows = [" ".join(line.split()) for line in printed[start + 1 : start + 5]]
    assert rows == [
        "median TTFT 1.20 s 1.20 s 1.00 15%: yes",
        "median TPOT 200 ms 220 ms 1.10 15%: yes",
        "goodput 0.4/s 0.425/s 1.06 10%: yes",
        "within limits 80% 85%",
    ]
    assert all(len(line) <= 80 for line in printed[start - 1 : start + 5])
    assert not any("…" in line for line in printed)


def test_what_numbers_rest_on_is_said(printed: list[str]) -> None:
    text = "\n".join(printed)
    assert "measured, and the simulator" in text
    assert "short chat: 40 requests, TTFT up to 2.00 s and TPOT up to 250 ms" in text
    assert "all steps of the run: ratio 1.10; 97% of the processor" in text
    assert "the simulation alone says that 90% of the workload keep it" in text
    assert "published fit, against that fit (composition, not hardware)" in text
    assert "random:tiny-llama, float32" in text
    assert "a100-opt-13b" in text
    assert "4 decodes" not in text
    assert "32 decodes, without model and sampling" in text
    assert "short chat: ratios of median TTFT 1.00, median TPOT 1.00, goodput 1.00" in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--requests", "0"], "requests=0"),
        (["--repeats", "0"], "repeats=0"),
        (["--ttft-slo-ms", "-1", "--tpot-slo-ms", "9"], "ttft_s=-0.001"),
        (["--ttft-slo-ms", "9"], "ttft_slo_ms and tpot_slo_ms are needed both"),
        (["--rate", "0"], "rate=0"),
        (["--only", "luck"], "only='luck'"),
        (["--workload", "chess"], "workload='chess'"),
        (["--save", str(Path(__file__))], "holds no such measurement"),
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
