"""The simulator decides what the engine decides, and booking many steps at once changes nothing."""

from __future__ import annotations

import gc
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.costmodel import LinearStepTimes
from pdlab.engine.config import BATCHING_MODES
from pdlab.engine.fake import FakeRunner
from pdlab.engine.policies import POLICIES, Policy, PolicyError
from pdlab.workload.arrivals import ClosedLoop, OpenLoop
from pdlab.workload.serving import ServingRun
from pdlab.workload.simulation import simulate, tokens_of
from pdlab.workload.traces import TraceRequest
from tests.engine.promises import LastCome
from tests.helpers import TINY, random_model

TIMES = LinearStepTimes("made up", 0.01, 0.0, 0.0, 0.002, 1e-6, 0.001, 1e-5, 0.0)
ONE_S = LinearStepTimes("a second a step", 1.0, *[0.0] * 7)


@st.composite
def requests(draw: st.DrawFn) -> list[TraceRequest]:
    """Some at once, some apart; half with prefixes that begin alike."""
    drawn = draw(
        st.lists(
            st.tuples(
                st.floats(0, 0.5), st.integers(1, 40), st.integers(1, 30), st.integers(-1, 2)
            ),
            min_size=1,
            max_size=12,
        )
    )
    shares = draw(st.booleans())
    made = []
    for gap_s, num_prompt, num_output, group in drawn:
        arrival_s = (made[-1].arrival_s if made else 0.0) + gap_s
        ids = tuple(10 * max(group, 0) + i for i in range(-(-num_prompt // 4)))
        made.append(
            TraceRequest(
                arrival_s,
                num_prompt,
                num_output,
                ids if shares else (),
                4 if shares else None,
                priority=group,
            )
        )
    return made


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    max_num_seqs = draw(st.integers(1, 6))
    return EngineConfig(
        block_size=4,
        num_blocks=draw(st.sampled_from([12, 18, 25, 200])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 5, 30])),
        chunk_size=draw(st.sampled_from([None, 3, 10])),
        batching=draw(st.sampled_from(BATCHING_MODES)),
        policy=draw(st.sampled_from([*POLICIES, LastCome()])),
        max_overtakes=draw(st.sampled_from([0, 2, 100])),
        max_phase_steps=draw(st.sampled_from([1, 4, 16])),
        enable_prefix_cache=draw(st.booleans()),
        watermark=draw(st.sampled_from([0, 0.1, 0.4])),
        preemption="recompute",
    )


def one_by_one(run: ServingRun) -> list[tuple]:
    """What each step held, spans of several steps taken apart."""
    steps = []
    for span in run.steps:
        one = (sorted(span.decodes), span.prompts, span.num_waiting, span.num_running)
        steps += [(*one, span.preempted)] * span.num_steps
    return steps


@settings(max_examples=150)
@given(requests=requests(), config=configs(), clients=st.sampled_from([None, 1, 3]))
def test_leaps_change_nothing(requests, config, clients):
    """No time, no decision, and no preemption."""

    def run(leaps: bool) -> ServingRun:
        arrivals = ClosedLoop(requests, clients, 0.02) if clients else OpenLoop(requests)
        return simulate(arrivals, config, TIMES, leaps=leaps)

    leaping, walking = run(True), run(False)
    assert one_by_one(leaping) == one_by_one(walking)
    for mine, theirs in zip(leaping.requests, walking.requests, strict=True):
        assert mine.metrics.token_times_s == pytest.approx(theirs.metrics.token_times_s)
        assert replace(mine.metrics, token_times_s=[]) == replace(theirs.metrics, token_times_s=[])
        assert mine.finish_reason == theirs.finish_reason


@settings(max_examples=60)
@given(requests=requests(), config=configs())
def test_the_engine_runs_the_same_steps(requests, config):
    """All requests come at once: then time decides nothing, and the steps can be compared."""
    requests = [replace(request, arrival_s=0.0) for request in requests]
    simulated = simulate(requests, config, ONE_S, max_model_len=64)
    model = random_model(replace(TINY, max_model_len=64, vocab_size=10_000))
    with Engine(model, config) as engine:
        engine.runner = SilentRunner(config.num_blocks, config.block_size, vocab_size=1)
        for number, request in enumerate(requests):
            params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True)
            tokens = [token % 10_000 for token in tokens_of(request, number)]
            with suppress(ValueError):  # then it is refused by the simulator, too: see below
                engine.submit(tokens, params, priority=request.priority, arrival_s=0.0)
        while engine.step():
            pass
        measured = ServingRun.of_trace(engine.trace)
    served = [r for r in simulated.requests if r.finish_reason == "length"]
    names = {served[i].request_id: r.request_id for i, r in enumerate(measured.requests)}
    assert len(names) == len(served)
    assert one_by_one(measured) == [
        (
            sorted(names[i] for i in d),
            {names[i]: n for i, n in p.items()},
            *rest,
            [names[i] for i in x],
        )
        for d, p, *rest, x in one_by_one(simulated)
    ]
    for mine, theirs in zip(served, measured.requests, strict=True):
        assert mine.metrics.num_output_tokens == theirs.metrics.num_output_tokens
        assert mine.metrics.num_cached_tokens == theirs.metrics.num_cached_tokens
        assert mine.metrics.num_preemptions == theirs.metrics.num_preemptions


class SilentRunner(FakeRunner):
    """Says token 0 always, as the simulator does."""


def test_times_follow_from_the_steps():
    """Two requests by hand: prompts of 4 and 6 tokens, the second comes in the first one's step."""
    requests = [TraceRequest(0.0, 4, 3), TraceRequest(0.5, 6, 2)]
    run = simulate(requests, EngineConfig(preemption="recompute"), ONE_S)
    first, second = (r.metrics for r in run.requests)
    assert first.token_times_s == [1, 2, 3]
    assert second.token_times_s == [2, 3]
    assert (second.first_scheduled_s, second.ttft_s, second.tpot_s) == (1, 1.5, 1)
    assert [(s.prompts, s.decodes, s.num_steps) for s in run.steps] == [
        ({"r0": 4}, [], 1),
        ({"r1": 6}, ["r0"], 1),
        ({}, ["r0", "r1"], 1),
    ]
    assert run.provenance == "simulated"
    assert run.basis == "a second a step"


def test_a_refused_request_does_not_stop_the_others():
    requests = [TraceRequest(0, 400, 9), TraceRequest(0, 4, 2), TraceRequest(0, 60, 9)]
    config = EngineConfig(num_blocks=5, block_size=4, preemption="recompute", max_model_len=100)
    run = simulate(ClosedLoop(requests, 1), config, ONE_S)
    assert [r.finish_reason for r in run.requests] == ["error", "length", "error"]
    assert "max_model_len is 100" in run.requests[0].error
    assert "num_blocks is 5" in run.requests[2].error


def test_the_output_ends_where_the_model_does():
    config = EngineConfig(max_model_len=10, preemption="recompute")
    [request] = simulate([TraceRequest(0, 8, 50)], config, ONE_S).requests
    assert request.metrics.num_output_tokens == 2


def test_a_policy_without_a_rank_ends_the_simulation():
    class Broken(Policy):
        def __init__(self, changes):
            self.changes = changes

        def rank(self, sequence, view):
            return 1 / (sequence.num_prompt_tokens - 5)

    for changes in (False, True):
        config = EngineConfig(policy=Broken(changes), preemption="recompute")
        with pytest.raises(PolicyError, match="no rank for r1: ZeroDivisionError"):
            simulate([TraceRequest(0, 4, 3), TraceRequest(0, 5, 3)], config, ONE_S)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_rests_and_is_then_as_it_was(enabled):
    seen = []

    class Times:
        basis = "looks at the collector"

        def step_s(self, shape):
            seen.append(gc.isenabled())
            return 1 / 0 if len(seen) > 5 else 1.0

    def run(num_output_tokens):
        requests = [TraceRequest(0, 4, num_output_tokens)]
        simulate(requests, EngineConfig(preemption="recompute"), Times())

    (gc.enable if enabled else gc.disable)()
    try:
        run(3)
        assert gc.isenabled() is enabled
        with pytest.raises(ZeroDivisionError):
            run(9)
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert seen == [False] * 6


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0])
def test_a_step_that_takes_no_time_is_refused(seconds):
    class Times:
        basis = "a broken clock"

        def step_s(self, shape):
            return seconds

    with pytest.raises(ValueError, match=r"a broken clock.*s for StepShape"):
        simulate([TraceRequest(0, 4, 3)], EngineConfig(preemption="recompute"), Times())


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (TraceRequest(0, 0, 3), "num_prompt_tokens=0"),
        (TraceRequest(0, 4, 0), "num_output_tokens=0"),
        (TraceRequest(0, "3", 4), "num_prompt_tokens='3'"),
        (TraceRequest(0, 4, 3, priority=10**400), "priority has"),
        (
            TraceRequest(0, 100, 3, (1,), 16),
            "prefix_ids has 1 ids, it must have 7: one for each 16 of 100 tokens",
        ),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_alone(request_, match):
    run = simulate([request_, TraceRequest(0, 4, 3)], EngineConfig(preemption="recompute"), ONE_S)
    assert match in run.requests[0].error
    assert [r.finish_reason for r in run.requests] == ["error", "length"]


def test_arrivals_that_were_used_up_are_refused():
    arrivals = OpenLoop([TraceRequest(0, 4, 3)])
    config = EngineConfig(preemption="recompute")
    simulate(arrivals, config, ONE_S)
    with pytest.raises(ValueError, match="arrivals has no request left"):
        simulate(arrivals, config, ONE_S)


def test_after_a_refusal_the_client_sends_its_next_at_once():
    requests = [TraceRequest(0, 400, 9), TraceRequest(0, 4, 2), TraceRequest(0, 5, 2)]
    config = EngineConfig(preemption="recompute", max_model_len=100)
    run = simulate(ClosedLoop(requests, 2), config, ONE_S)
    assert [r.metrics.arrival_s for r in run.requests] == [0, 0, 0]
    assert run.steps[0].prompts == {"r1": 4, "r2": 5}


def test_a_leap_says_how_many_blocks_it_took():
    config = EngineConfig(preemption="recompute", block_size=4, num_blocks=100)
    run = simulate([TraceRequest(0, 4, 41)], config, ONE_S)
    spans = [(s.num_steps, s.num_used_blocks, s.num_grown_blocks) for s in run.steps]
    assert spans == [(1, 1, 0), (1, 2, 0), (39, 11, 9)]


def test_shared_prefixes_are_found():
    size = 16
    requests = [
        TraceRequest(0, 40, 1, (1, 2, 3), size),
        TraceRequest(9, 40, 1, (1, 2, 4), size),
        TraceRequest(18, 40, 1, (5, 2, 4), size),
    ]
    run = simulate(requests, EngineConfig(preemption="recompute"), ONE_S)
    assert [r.metrics.num_cached_tokens for r in run.requests] == [0, 32, 0]


@pytest.mark.parametrize(
    ("knob", "value"), [("num_swap_blocks", 4), ("window", 8), ("heavy_tokens", 8)]
)
def test_what_cannot_be_simulated_is_refused(knob, value):
    knobs = {knob: value} | ({"window": 8, "enable_prefix_cache": False} if "heavy" in knob else {})
    with pytest.raises(ValueError, match=f"{knob}={value} cannot be simulated"):
        simulate([TraceRequest(0, 4, 3)], EngineConfig(**knobs), ONE_S)
