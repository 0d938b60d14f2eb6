"""What the lesson on scheduling runs: the scene, the simulator beside it, policies and claims."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import EngineConfig
from pdlab.costmodel import LinearStepTimes, StepShape
from pdlab.engine.metrics import RequestMetrics
from pdlab.workbench import scheduling_experiments as lab
from pdlab.workbench.figures import scheduling as pictures
from pdlab.workload import WORKLOADS, Between, Fixed, TraceRequest
from pdlab.workload.report import summarize
from pdlab.workload.serving import SLO, ServedRequest, ServingRun, StepSpan
from pdlab.workload.simulation import simulate
from tests.helpers import TINY, random_model

SEATS = EngineConfig(num_blocks=1024, max_num_seqs=8, max_num_batched_tokens=256)
SMALL = EngineConfig(num_blocks=128, max_num_batched_tokens=64)
UNIT = LinearStepTimes("one second a step", 1.0, 0, 0, 0, 0, 0, 0, 0)
"""Every step takes a second, so that times count steps."""


def simulated(requests: list[TraceRequest], config: EngineConfig) -> lab.Played:
    """A run whose steps took exactly what `RECORDED` says, as if it were measured."""
    samples: list[tuple[StepShape, float]] = []

    class Noted:
        basis = "steps of the test"

        def step_s(self, shape: StepShape) -> float:
            samples.append((shape, lab.RECORDED.step_s(shape)))
            return samples[-1][1]

    return lab.Played(simulate(requests, config, Noted(), leaps=False), samples)


@pytest.fixture
def plans() -> dict[str, EngineConfig]:
    modes = ("static", "prefill_first", "decode_first")
    whole = {
        name: EngineConfig(num_blocks=128, batching=name, max_phase_steps=lab.PHASE_STEPS)
        for name in modes
    }
    chunks = EngineConfig(num_blocks=128, max_num_batched_tokens=64, chunk_size=32)
    return whole | {"mixed": SMALL, "chunks": chunks}


@pytest.fixture
def played(plans: dict[str, EngineConfig]) -> dict[str, lab.Played]:
    requests = lab.scene_for(lab.RECORDED).requests
    return {name: simulated(requests, config) for name, config in plans.items()}


# --- the scene -----------------------------------------------------------------------------------


def test_the_scene_keeps_its_story_on_any_machine() -> None:
    slow, fast = lab.scene(1.0), lab.scene(0.01)
    assert slow.roles == fast.roles == ["chat"] * 4 + ["document"] + ["question"] * 3
    assert slow.labels[2:6] == ["chat 3", "chat 4", "document", "question 1"]
    arrivals = [r.arrival_s for r in slow.requests]
    assert arrivals == sorted(arrivals) == [0, 0, 0, 0, 4, 6, 6.5, 7]
    assert [r.arrival_s for r in fast.requests] == pytest.approx([0.01 * s for s in arrivals])
    with pytest.raises(ValueError, match="step_s"):
        lab.scene(0)


def test_an_engine_serves_the_scene_and_its_steps_are_timed() -> None:
    model = random_model(replace(TINY, max_model_len=1024))
    found = lab.play(model, lab.scene(0.002).requests, {"small": SMALL})["small"]
    assert found.run.provenance == "measured"
    assert len(found.samples) == len(found.run.steps)
    outcome = lab.Outcome.of(found.run, lab.scene(0.002).roles)
    assert outcome.done_s == found.run.duration_s
    assert 0 < outcome.question_ttft_s < outcome.done_s


def test_the_pace_has_decode_steps_of_four_chats_and_of_fewer() -> None:
    pace = lab.pace(random_model())
    assert all(pace.decode_step_s(n) > 0 for n in (1, 2, 3, 4))
    with pytest.raises(ValueError, match="num_decodes=5"):
        pace.decode_step_s(5)


def served_at(name: str, arrival_s: float, times_s: list[float]) -> ServedRequest:
    return ServedRequest(name, RequestMetrics(arrival_s, times_s[0], times_s), "length")


def test_an_outcome_reads_each_role_for_itself() -> None:
    requests = [
        served_at("r0", 0, [1, 2, 7]),
        served_at("r1", 1, [5, 6]),
        served_at("r2", 2, [4]),
        served_at("r3", 3, [9]),
    ]
    steps = [StepSpan(0, 9, [], {}, 0, 0, 0, num_steps=9)]
    run = ServingRun("measured", "by hand", {}, requests, steps, 8)
    found = lab.Outcome.of(run, ["chat", "document", "question", "question"])
    assert found == lab.Outcome(6, 5, 4, 9, 9)
    with pytest.raises(ValueError, match="zip"):
        lab.Outcome.of(run, ["chat"])


OTHER_MACHINES = {
    "as recorded": lab.RECORDED,
    "cheap prompts": replace(lab.RECORDED, prompt_token_s=0.0006, prompt_pair_s=3e-7),
    "dear prompts": replace(lab.RECORDED, prompt_token_s=0.0032),
    "cheap steps": replace(lab.RECORDED, base_s=0.02, rows_s=0.02),
}


@pytest.mark.parametrize("slower", [0.5, 0.7, 1.0, 1.5, 2.0])
@pytest.mark.parametrize("machine", OTHER_MACHINES)
def test_the_scene_tells_its_story_also_where_the_pace_was_measured_wrongly(
    machine: str, slower: float, plans: dict[str, EngineConfig]
) -> None:
    """What the lesson says of each plan, with arrivals `slower` than they should be."""
    times = OTHER_MACHINES[machine]
    step_s = lab.scene_for(times).requests[4].arrival_s / lab.DOCUMENT_AFTER
    scene = lab.scene(step_s * slower)
    found = {
        name: lab.Outcome.of(simulate(scene.requests, config, times), scene.roles)
        for name, config in plans.items()
    }
    gaps = {name: each.chat_gap_s / step_s for name, each in found.items()}
    waits = {name: each.question_ttft_s for name, each in found.items()}
    assert gaps["static"] < 1.5 < gaps["mixed"] < 5
    assert gaps["prefill_first"] > 2.5 * gaps["mixed"]
    assert gaps["decode_first"] > 2.5 * gaps["mixed"]
    assert waits["prefill_first"] < 0.8 * waits["mixed"] < 0.8 * waits["static"]
    assert waits["chunks"] < 0.4 * waits["mixed"]
    assert found["chunks"].document_ttft_s > 1.2 * found["mixed"].document_ttft_s
    assert found["chunks"].done_s == pytest.approx(found["mixed"].done_s, rel=0.05)


def test_without_the_document_the_questions_still_take_their_time(
    played: dict[str, lab.Played], plans: dict[str, EngineConfig]
) -> None:
    scene = lab.without_document(lab.scene_for(lab.RECORDED))
    assert scene.roles == ["chat"] * 4 + ["question"] * 3
    found = lab.Outcome.of(simulate(scene.requests, plans["mixed"], lab.RECORDED), scene.roles)
    assert found.document_ttft_s is None
    with_it = lab.Outcome.of(played["chunks"].run, lab.scene(1).roles)
    assert 0 < found.question_ttft_s < with_it.question_ttft_s


def test_a_run_is_the_same_when_its_requests_are_called_by_their_roles(
    played: dict[str, lab.Played],
) -> None:
    run, labels = played["chunks"].run, lab.scene(1).labels
    named = lab.named(run, labels)
    assert [r.request_id for r in named.requests] == labels
    assert named.steps[0].prompts == {f"chat {i}": 32 for i in (1, 2)}
    assert summarize(named) == summarize(run)
    assert lab.num_chunks(named, "document") == 17  # of 520 tokens, 32 at a time
    assert lab.num_chunks(named, "nobody") == 0
    assert run.requests[0].request_id == "r0"
    with pytest.raises(ValueError, match="zip"):
        lab.named(run, labels[:3])


# --- the simulator beside it ---------------------------------------------------------------------


def test_a_run_is_predicted_without_its_own_steps(
    played: dict[str, lab.Played], plans: dict[str, EngineConfig]
) -> None:
    slowed = [(shape, 100 * seconds) for shape, seconds in played["chunks"].samples]
    odd = played | {"chunks": lab.Played(played["chunks"].run, slowed)}
    assert lab.fitted(odd, but="chunks") == lab.fitted(
        {name: each for name, each in played.items() if name != "chunks"}
    )
    assert lab.fitted(odd).worst_error > 0.9
    found = lab.predict_each(played, lab.scene_for(lab.RECORDED), plans)
    assert list(found) == list(plans)
    for each in found.values():
        assert each.run.provenance == "simulated"
        assert all(0.9 < ratio < 1.1 for ratio in each.ratios().values())


def test_a_good_fit_is_used_and_a_poor_one_is_not(
    played: dict[str, lab.Played], plans: dict[str, EngineConfig]
) -> None:
    found = lab.predict_each(played, lab.scene_for(lab.RECORDED), plans)
    good = lab.ground(played, found)
    assert good.is_own
    assert good.times == lab.fitted(played)
    assert "Good enough" in good.line
    longer = found["mixed"].simulated._replace(done_s=1.3 * found["mixed"].measured.done_s)
    odd = found | {"mixed": found["mixed"]._replace(simulated=longer)}
    noisy = {
        name: lab.Played(
            each.run, [(shape, s * (1 + i % 2)) for i, (shape, s) in enumerate(each.samples)]
        )
        for name, each in played.items()
    }
    for poor in (lab.ground(played, odd), lab.ground(noisy, found)):
        assert not poor.is_own
        assert poor.times == lab.RECORDED
        assert "Too poor" in poor.line
        assert lab.RECORDED.basis in poor.line


# --- many users ----------------------------------------------------------------------------------


def test_limits_are_thrice_a_document_and_a_step() -> None:
    assert lab.limits(UNIT) == SLO(3, 3)


def test_saturation_is_what_gets_through_when_somebody_always_waits() -> None:
    requests = [TraceRequest(100.0 * i, 10, 10) for i in range(16)]
    assert lab.saturation_rps(requests, SEATS, UNIT) == pytest.approx(16 / 20)
    assert requests[1].arrival_s == 100


def test_the_best_rate_is_the_last_before_the_first_miss() -> None:
    mixed = WORKLOADS["mixed"]
    slo = lab.limits(lab.RECORDED)
    rates = [0.3, 0.9, 1.3]
    sweep = lab.load_sweep(lambda r: mixed(150, r), rates, {"m": SEATS}, lab.RECORDED, slo)
    shares = [load.summary.attainment for load in sweep["m"]]
    assert shares[0] > 0.9 > shares[2]
    good = [rate for rate, share in zip(rates, shares, strict=True) if share >= 0.9]
    assert lab.best_rate(sweep["m"]) == lab.best_rate(sweep["m"][::-1]) == max(good)
    assert lab.best_rate(sweep["m"][1:], attainment=1.0) == 0
    alone = lab.knee(lambda r: mixed(150, r), rates[::-1], SEATS, lab.RECORDED, slo)
    assert alone == lab.best_rate(sweep["m"])
    for rates, named in (([], {"m": SEATS}), ([1.0], {})):
        with pytest.raises(ValueError, match="is empty"):
            lab.load_sweep(lambda r: mixed(150, r), rates, named, lab.RECORDED, slo)


def test_the_share_near_the_mean_by_hand() -> None:
    requests = [served_at(f"r{i}", 0, [t]) for i, t in enumerate((1, 3, 3, 5))]
    run = ServingRun("simulated", "by hand", {}, requests, [], 8)
    assert lab.share_near_mean(run) == 0.5
    assert lab.share_near_mean(run, within=0.7) == 1


@pytest.mark.parametrize("batching", ["static", "prefill_first", "decode_first", "mixed"])
def test_littles_law_holds_between_steps_and_requests(batching: str) -> None:
    config = EngineConfig(num_blocks=1024, max_num_seqs=4, batching=batching)
    law = lab.Little.of(simulate(WORKLOADS["mixed"](150, 0.8), config, lab.RECORDED))
    assert law.counted == pytest.approx(law.product, rel=0.05)


def test_littles_law_by_hand() -> None:
    """Two requests that stay 4 s and 2 s of 4: 1.5 inside, on average."""
    requests = [served_at("r0", 0, [2, 4]), served_at("r1", 2, [4])]
    steps = [
        StepSpan(0, 2, [], {"r0": 1}, num_waiting=0, num_running=1, num_used_blocks=1),
        StepSpan(2, 2, ["r0"], {"r1": 1}, num_waiting=0, num_running=2, num_used_blocks=2),
    ]
    law = lab.Little.of(ServingRun("simulated", "by hand", {}, requests, steps, 8))
    assert (law.rate_rps, law.mean_s, law.counted, law.product) == (0.5, 3, 1.5, 1.5)


def test_a_closed_loop_hides_the_overload_that_an_open_one_shows() -> None:
    slo = lab.limits(lab.RECORDED)
    requests = WORKLOADS["mixed"](200, 2.0)
    closed = lab.closed_loop(requests, 8, SEATS, lab.RECORDED, slo)
    shown = summarize(simulate(requests, SEATS, lab.RECORDED), slo)
    assert closed.attainment > 0.95 > 0.5 > shown.attainment
    assert closed.requests_per_s == pytest.approx(shown.requests_per_s, rel=0.1)


# --- who is next ---------------------------------------------------------------------------------


def test_a_policy_of_ones_own_decides_and_has_its_name() -> None:
    own = lab.OwnPolicy("longest first", lambda sequence, view: -sequence.num_prompt_tokens)
    assert str(own) == "longest first"
    requests = [
        TraceRequest(0.0, length, 4, priority=int(length > 40)) for length in (9, 30, 50, 80)
    ]
    slo = SLO(3.5, 10)
    config = EngineConfig(num_blocks=64, max_num_seqs=1)
    found = lab.under_policies(requests, {"sjf": "sjf", "own": own}, config, UNIT, slo)
    assert (found["sjf"].chats.max, found["sjf"].documents.max) == (5, 13)
    assert (found["own"].chats.max, found["own"].documents.max) == (13, 5)
    assert found["own"].attainment == 0.25


def test_the_bound_on_overtaking_bounds_the_longest_wait() -> None:
    requests = WORKLOADS["mixed"](200, 1.6)
    slo = lab.limits(lab.RECORDED)
    waits = []
    for most in (10**6, 10):
        config = EngineConfig(
            num_blocks=1024, max_num_seqs=8, max_num_batched_tokens=256, max_overtakes=most
        )
        served = lab.under_policies(requests, {"sjf": "sjf"}, config, lab.RECORDED, slo)["sjf"]
        waits.append(served.documents.max)
    assert waits[1] < 0.7 * waits[0]


# --- claims --------------------------------------------------------------------------------------


def test_continuous_batching_gains_nothing_where_all_answers_are_alike() -> None:
    alike = lab.simulated_speedup(Fixed(24), SEATS, lab.RECORDED)
    assert alike.step_ratio == 1
    assert alike.ratio == pytest.approx(1, abs=0.02)
    spread = lab.simulated_speedup(Between(4, 44), SEATS, lab.RECORDED)
    assert spread.ratio > 1.2
    with pytest.raises(ValueError, match="num_requests"):
        lab.simulated_speedup(Fixed(24), SEATS, lab.RECORDED, num_requests=0)


def test_a_burst_comes_all_at_once() -> None:
    assert lab.burst([3, 5], 7) == [TraceRequest(0.0, 7, 3), TraceRequest(0.0, 7, 5)]


def test_who_keeps_a_limit_on_every_gap_by_hand() -> None:
    requests = [
        served_at("slow start", 0, [3, 4, 5]),
        served_at("one gap", 0, [1, 2, 9]),
        served_at("good", 0, [1, 2, 3]),
        served_at("one token", 0, [1]),
        ServedRequest("refused", RequestMetrics(0), "error", error="too long"),
    ]
    run = ServingRun("simulated", "by hand", {}, requests, [], 8)
    assert lab.Kept.of(run, ttft_s=2, gap_s=1) == lab.Kept(0.6, 0.6, 0.4)


def test_between_a_budget_too_small_and_one_too_large_most_are_served_well() -> None:
    """A limit on the mean gap does not see it; one on every gap does."""
    slo = lab.limits(lab.RECORDED)
    requests = WORKLOADS["mixed"](150, 0.65)
    small, good, large = lab.budget_sweep(
        requests, [16, 64, 2048], SEATS, lab.RECORDED, slo, slo.tpot_s
    )
    assert small.kept.gaps == good.kept.gaps == 1
    assert large.kept.first_token > 0.95 > 0.5 > small.kept.first_token
    assert good.kept.both > large.kept.both + 0.1
    assert large.summary.attainment > 0.9
    with pytest.raises(ValueError, match="budgets is empty"):
        lab.budget_sweep(requests, [], SEATS, lab.RECORDED, slo, 1.0)


def test_a_small_budget_shortens_gaps_and_costs_time() -> None:
    slo = lab.limits(lab.RECORDED)
    small, large = lab.budget_sweep(
        WORKLOADS["mixed"](100, 0.9), [32, 2048], SEATS, lab.RECORDED, slo, slo.tpot_s
    )
    assert (small.budget, large.budget) == (32, 2048)
    assert small.summary.itl_s.p99 < large.summary.itl_s.p99
    assert small.summary.ttft_s.p50 > large.summary.ttft_s.p50
    assert small.all_at_once_s > large.all_at_once_s


# --- exercises -----------------------------------------------------------------------------------


def test_the_policies_that_the_engine_has_solve_only_half_of_the_exercise() -> None:
    crowd = lab.recorded_crowd()
    fcfs, sjf = (lab.under_recorded(crowd, policy) for policy in ("fcfs", "sjf"))
    assert sjf.chats.p50 < 0.7 * fcfs.chats.p50
    assert sjf.documents.p99 > 2 * fcfs.documents.p99


def test_what_a_policy_of_an_exercise_raises_comes_out_as_it_was() -> None:
    def open_exercise(sequence: object, view: object) -> float:
        raise NotImplementedError("your code here")

    with pytest.raises(NotImplementedError, match="your code here"):
        lab.under_recorded(lab.recorded_crowd(8), lab.OwnPolicy("yours", open_exercise))


@pytest.mark.parametrize(
    ("budget", "chunk_size", "fits"),
    [
        (128, 64, True),
        (160, 56, True),
        (2048, 72, True),
        (64, None, False),
        (64, 32, False),
        (2048, None, False),
        (128, 128, False),
    ],
)
def test_few_pairs_of_knobs_keep_all_three_limits(
    budget: int, chunk_size: int | None, fits: bool
) -> None:
    found = lab.recorded_outcome(budget, chunk_size)
    kept = (found.question_ttft_s <= 0.65, found.chat_gap_s <= 0.34, found.document_ttft_s <= 2.25)
    assert all(kept) is fits


def test_saturation_of_the_recorded_machine_grows_with_seats() -> None:
    few, many = lab.recorded_saturation(2, 100), lab.recorded_saturation(8, 100)
    assert few[:2] == many[:2]
    assert few.requests_per_s < many.requests_per_s < 4 * few.requests_per_s


# --- pictures ------------------------------------------------------------------------------------


def test_lanes_draw_every_request_under_every_plan(played: dict[str, lab.Played]) -> None:
    figure = pictures.lanes(
        {name: each.run for name, each in played.items()}, lab.scene(0.1).labels
    )
    names = [note.text.split(":")[0] for note in figure.layout.annotations]
    assert names == list(played)
    drawn = {(bar.yaxis, label) for bar in figure.data for label in bar.y}
    assert len(drawn) == len(played) * 8
    assert {bar.name for bar in figure.data} == {"waiting", "prefill", "decode", "stalled"}
    assert sum(bar.showlegend for bar in figure.data) == 4
    with pytest.raises(ValueError, match="runs is empty"):
        pictures.lanes({}, [])


def test_agreement_is_drawn_as_a_ratio_for_every_plan(
    played: dict[str, lab.Played], plans: dict[str, EngineConfig]
) -> None:
    found = lab.predict_each(played, lab.scene_for(lab.RECORDED), plans)
    figure = pictures.predicted_against_measured(found)
    assert [len(trace.x) for trace in figure.data] == [len(plans)] * 4
    assert "20 of 20" in figure.layout.title.text
    assert figure.data[3].x[0] == found["static"].ratios()["done_s"]
    places = [y for trace in figure.data for y in trace.y]
    assert len(set(places)) == 20, "one mark hides another"
    assert list(figure.layout.yaxis.ticktext) == list(plans)


def test_sweeps_are_drawn_with_their_limits_and_their_source() -> None:
    slo = lab.limits(lab.RECORDED)
    mixed = WORKLOADS["mixed"]
    sweep = lab.load_sweep(lambda r: mixed(40, r), [0.3, 0.9], {"m": SEATS}, lab.RECORDED, slo)
    budgets = lab.budget_sweep(mixed(40, 0.9), [64, 256], SEATS, lab.RECORDED, slo, 0.4)
    served = lab.under_policies(mixed(40, 0.9), {"fcfs": "fcfs"}, SEATS, lab.RECORDED, slo)
    for figure in (
        pictures.load_curves(sweep, slo),
        pictures.budget_curves(budgets, slo.ttft_s, 0.4),
        pictures.policy_ranges(served, slo),
    ):
        source = figure.layout.title.subtitle.text.replace("<br>", " ")
        assert "simulated: recorded: smollm2-135m" in source
        assert "TTFT 4.8 s" in source
        dashed = [s for s in figure.layout.shapes if s.line.dash == "dash"]
        assert dashed
    shares = [100 * point.kept.both for point in budgets]
    drawn = pictures.budget_curves(budgets, slo.ttft_s, 0.4).data
    assert shares in [list(line.y) for line in drawn if line.name == "both limits"]
    goodput = [load.summary.goodput_per_s for load in sweep["m"]]
    assert goodput in [list(line.y) for line in pictures.load_curves(sweep, slo).data]
    gaps = [point.summary.itl_s.p99 for point in budgets]
    assert gaps in [list(line.y) for line in pictures.budget_curves(budgets, slo.ttft_s, 0.4).data]
