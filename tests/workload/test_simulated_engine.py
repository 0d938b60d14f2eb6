"""An engine in simulated time, driven from outside: what was not yet, is not booked."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.engine.metrics import RequestMetrics
from pdlab.engine.moving import RequestState, Reservation
from pdlab.workload.serving import StepSpan, span_of
from pdlab.workload.simulated_engine import SimulatedEngine
from pdlab.workload.simulation import simulate, state_of
from pdlab.workload.step_calibration import IdleRunner
from pdlab.workload.traces import TraceRequest
from tests.helpers import TINY, random_model
from tests.workload.test_simulation import ONE_S, TIMES, configs, one_by_one, requests

SMALL = EngineConfig(block_size=4, num_blocks=50, preemption="recompute")


def state(num_prompt: int, max_tokens: int, num_output: int = 0, first: int = 1) -> RequestState:
    """Prompts that begin with another token have no prefix in common."""
    prompt_ids = list(range(first, first + num_prompt))
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return RequestState(prompt_ids, params, [0] * num_output)


def step(engine: SimulatedEngine, now_s: float = 0.0):
    """One step or leap; None if there is nothing to do."""
    end_s = engine.begin(now_s)
    return None if end_s is None else engine.finish(end_s)


def reserve(engine, asked: RequestState, **how):
    """Room, if there is any now."""
    return engine.reserve(engine.prepare(asked, **how))


# --- leaps ---------------------------------------------------------------------------------------


def serve(
    coming: list[TraceRequest], engine: SimulatedEngine, interrupts: list[float]
) -> tuple[list[StepSpan], list[RequestMetrics]]:
    """Serve by interrupts alone: the engine is not told when somebody will come."""
    waiting, spans, metrics, now_s = deque(coming), [], [], 0.0
    while True:
        while waiting and waiting[0].arrival_s <= now_s:
            request, name = waiting.popleft(), f"r{len(metrics)}"
            metrics.append(RequestMetrics(request.arrival_s))
            with suppress(ValueError):  # then the other one refuses it, too
                engine.resume(
                    state_of(request, len(metrics)),
                    request_id=name,
                    arrival_s=request.arrival_s,
                    priority=request.priority,
                    metrics=metrics[-1],
                )
        end_s = engine.begin(now_s)
        if end_s is None:
            if not waiting:
                return spans, metrics
            now_s = waiting[0].arrival_s
            continue
        for time_s in sorted([*interrupts, *(r.arrival_s for r in waiting)]):
            if now_s < time_s < end_s:
                end_s = engine.interrupt(time_s)
        spans.append(engine.finish(end_s).span)
        now_s = end_s


@settings(max_examples=150)
@given(
    requests=requests(),
    config=configs(),
    interrupts=st.lists(st.floats(0, 1), max_size=20),
)
def test_leaps_that_are_cut_change_nothing(requests, config, interrupts):
    expected = simulate(requests, config, TIMES, leaps=False)
    spans, metrics = serve(requests, SimulatedEngine(config, TIMES), interrupts)
    assert one_by_one(replace(expected, steps=spans)) == one_by_one(expected)
    times_s = [r.metrics.token_times_s for r in expected.requests]
    assert [m.token_times_s for m in metrics] == times_s


def test_what_was_cut_off_has_not_happened():
    """Prompt of 4, 50 tokens, a second each: one with the prompt, one decode, then a leap."""
    engine, metrics = SimulatedEngine(SMALL, ONE_S), RequestMetrics(0.0)
    engine.resume(state(4, 50), arrival_s=0.0, metrics=metrics)
    assert step(engine, 0).times_s == [1]
    assert step(engine, 1).times_s == [2]
    assert engine.begin(2) == 50
    assert engine.interrupt(60) == 50, "nobody can come before then"
    assert engine.interrupt(10.5) == 11
    assert engine.interrupt(10) == 10, "the step that ends then runs, and none begins"
    assert metrics.token_times_s == [1, 2]
    outcome = engine.finish(10)
    assert outcome.times_s == metrics.token_times_s[2:] == [3, 4, 5, 6, 7, 8, 9, 10]
    assert (outcome.span.num_steps, outcome.span.num_used_blocks) == (8, 4)
    assert (outcome.sampled, outcome.ended) == (["r0"], [])
    assert step(engine, 10).times_s == [11], "who came may have changed what comes next"
    assert step(engine, 11).ended == ["r0"]
    assert metrics.token_times_s == list(range(1, 51))
    assert (engine.begin(50), engine.pool.num_free) == (None, 50)


def test_a_known_arrival_ends_the_leap_as_an_interrupt_would():
    engine = SimulatedEngine(SMALL, ONE_S)
    engine.resume(state(4, 50), arrival_s=0.0)
    step(engine, 0)
    step(engine, 1)
    assert engine.begin(2, until_s=10.5) == 11


def test_a_step_is_not_cut():
    engine = SimulatedEngine(SMALL, ONE_S)
    engine.resume(state(4, 50), arrival_s=0.0)
    assert (engine.interrupt(0), engine.begin(0), engine.interrupt(0.5)) == (None, 1, 1)


def test_whoever_comes_between_ends_the_repetition():
    """After an equal number of leavings and comings the batch looks whole, and is another one."""
    engine = SimulatedEngine(SMALL, ONE_S)
    engine.resume(state(4, 50), arrival_s=0.0)
    step(engine, 0)
    step(engine, 1)
    engine.abort("r0")
    assert reserve(engine, state(8, 50), request_id="new", arrival_s=2.0)
    engine.admit("new")
    assert step(engine, 2).sampled == ["new"]


def test_time_goes_its_way():
    engine = SimulatedEngine(SMALL, ONE_S)
    with pytest.raises(ValueError, match="now_s=1: what is under way ends at None"):
        engine.finish(1)
    engine.resume(state(4, 5), arrival_s=0.0)
    engine.begin(0)
    with pytest.raises(ValueError, match=r"now_s=0\.5: what is under way ends at 1"):
        engine.finish(0.5)
    for come in (
        lambda: engine.begin(0.5),
        lambda: engine.resume(state(4, 5), arrival_s=0.5),
        lambda: reserve(engine, state(4, 5), arrival_s=0.5),
        lambda: engine.abort("r0"),
    ):
        with pytest.raises(RuntimeError, match=r"under way until 1\.0 s"):
            come()
    assert engine.finish(1).sampled == ["r0"]


# --- from one engine to another ------------------------------------------------------------------


def test_one_engine_begins_and_another_goes_on():
    prefill, decode = SimulatedEngine(SMALL, ONE_S), SimulatedEngine(SMALL, ONE_S)
    metrics = RequestMetrics(0.0)
    prefill.resume(state(10, 4), request_id="a", arrival_s=0.0, holds=True, metrics=metrics)
    outcome = step(prefill, 0)
    assert (outcome.sampled, outcome.held, outcome.ended) == (["a"], ["a"], [])
    assert (prefill.pool.num_free, prefill.begin(1)) == (47, None)

    room = reserve(decode, state(10, 4), request_id="a", arrival_s=0.0, metrics=metrics)
    assert room == Reservation("a", num_tokens=10, num_cached_tokens=0)
    assert (decode.pool.num_free, decode.begin(1)) == (47, None)
    decode.admit("a")
    prefill.let_go("a")
    assert prefill.pool.num_free == 50
    assert step(decode, 5).span.decodes == ["a"]
    outcome = step(decode, 6)
    assert (outcome.times_s, outcome.ended) == ([7, 8], ["a"])
    assert metrics.token_times_s == [1, 6, 7, 8]
    assert metrics.first_scheduled_s == 0
    assert decode.pool.num_free == 50


def test_who_has_all_tokens_is_not_held():
    engine = SimulatedEngine(SMALL, ONE_S)
    engine.resume(state(10, 1), arrival_s=0.0, holds=True)
    outcome = step(engine)
    assert (outcome.ended, outcome.held, engine.pool.num_free) == (["r0"], [], 50)


def test_what_the_cache_has_need_not_travel():
    engine = SimulatedEngine(SMALL, ONE_S)
    reserve(engine, state(10, 4), arrival_s=0.0)
    engine.admit("r0")
    assert reserve(engine, state(10, 4), arrival_s=0.0).num_cached_tokens == 8
    assert reserve(engine, state(10, 4, first=2), arrival_s=0.0).num_cached_tokens == 0


def test_reserved_blocks_let_others_wait():
    engine = SimulatedEngine(replace(SMALL, num_blocks=10), ONE_S)
    assert reserve(engine, state(30, 4), arrival_s=0.0)
    assert reserve(engine, state(30, 4, first=50), arrival_s=1.0) is None
    engine.resume(state(20, 4, first=90), arrival_s=2.0)
    assert engine.begin(3) is None
    engine.abort("r0")
    assert step(engine, 4).span.prompts == {"r1": 20}


def test_a_resumed_request_computes_what_it_had_and_makes_the_rest():
    engine = SimulatedEngine(SMALL, ONE_S)
    engine.resume(state(10, 4, num_output=2), arrival_s=0.0)
    assert step(engine, 0).span.prompts == {"r0": 12}
    assert step(engine, 1).ended == ["r0"]


@pytest.mark.parametrize("where", ["waiting", "prefilling", "running", "held", "reserved"])
def test_an_abort_frees_everything(where):
    engine = SimulatedEngine(replace(SMALL, max_num_batched_tokens=32, chunk_size=8), ONE_S)
    if where == "reserved":
        assert reserve(engine, state(10, 9), request_id="a", arrival_s=0.0)
    else:
        engine.resume(state(10, 9), request_id="a", arrival_s=0.0, holds=where == "held")
    for _ in range({"waiting": 0, "prefilling": 1, "running": 3, "held": 2, "reserved": 0}[where]):
        step(engine)
    assert engine._jobs["a"].sequence.state.value == where
    for _ in range(2):
        engine.abort("a")
    assert (engine.pool.num_free, engine.scheduler.has_work) == (50, False)


def test_what_makes_no_sense_is_refused():
    engine = SimulatedEngine(replace(SMALL, max_model_len=20), ONE_S)
    with pytest.raises(ValueError, match="prompt has 21 tokens, max_model_len is 20"):
        reserve(engine, state(21, 4), arrival_s=0.0)
    with pytest.raises(ValueError, match="output_ids has 4 tokens, the limit is 3"):
        engine.resume(state(10, 4, num_output=4), arrival_s=0.0)
    with pytest.raises(ValueError, match="output_ids has 5 tokens, the limit is 4"):
        reserve(engine, state(15, 9, num_output=5), arrival_s=0.0)
    engine.resume(state(4, 4), request_id="a", arrival_s=0.0)
    with pytest.raises(ValueError, match="'a' is the name of another"):
        reserve(engine, state(4, 4), request_id="a", arrival_s=0.0)
    with pytest.raises(ValueError, match="'a' is waiting, not held"):
        engine.let_go("a")
    with pytest.raises(ValueError, match="'a' is waiting, not reserved"):
        engine.admit("a")
    with pytest.raises(ValueError, match="'b' is unknown"):
        engine.let_go("b")


# --- as the engine does --------------------------------------------------------------------------


class Twins(RuleBasedStateMachine):
    """Requests come, leave and are handed on: the same answers, steps and free blocks."""

    @initialize(config=configs())
    def start(self, config):
        if config.policy == "deadline":
            config = replace(config, policy="fcfs")  # the two do not have one clock
        self.model = random_model(replace(TINY, max_model_len=64))
        self.engine = Engine(self.model, config)
        self.engine.runner = IdleRunner()
        self.simulated = SimulatedEngine(self.engine.config, ONE_S, leaps=False)
        self.num_asked = 0

    @rule(
        num_prompt=st.integers(1, 20),
        group=st.integers(0, 2),
        num_output=st.sampled_from([0, 0, 3]),
        num_left=st.integers(2, 8),
        how=st.sampled_from([("resume", False), ("resume", True), ("reserve", None)]),
    )
    def come(self, num_prompt, group, num_output, num_left, how):
        how, holds = how
        asked = state(num_prompt, num_output + num_left, num_output, first=1 + 20 * group)
        self.num_asked += 1
        call = {"request_id": f"x{self.num_asked}", "arrival_s": self.num_asked - 1e6}
        call |= {} if holds is None else {"holds": holds}
        mine, theirs = (
            reserve(each, asked, **call) if how == "reserve" else each.resume(asked, **call)
            for each in self.both
        )
        assert mine == theirs

    @rule(draw=st.integers(0, 99), token_id=st.integers(0, 9))
    def admit(self, draw, token_id):
        if name := self.one_of("reserved", draw):
            for each in self.both:
                each.admit(name, token_id)

    @rule(draw=st.integers(0, 99))
    def let_go(self, draw):
        if name := self.one_of("held", draw):
            for each in self.both:
                each.let_go(name)

    @rule(draw=st.integers(0, 99))
    def abort(self, draw):
        if name := self.one_of(None, draw):
            for each in self.both:
                each.abort(name)

    @rule(times=st.integers(1, 4))
    def step(self, times):
        for _ in range(times):
            outcome, record = step(self.simulated), self.engine.step()
            assert (outcome is None) == (record is None)
            if outcome and record:
                mine, theirs = outcome.span, span_of(record, 0.0, self.simulated.pool.num_blocks)
                assert (mine.prompts, mine.preempted) == (theirs.prompts, theirs.preempted)
                assert sorted(mine.decodes) == sorted(theirs.decodes)

    @invariant()
    def holds_the_same(self):
        if hasattr(self, "engine"):
            assert self.simulated.pool.num_free == self.engine.pool.num_free
            assert self.queues(self.simulated) == self.queues(self.engine)
            tables = [s.block_table for s in self.simulated.scheduler.holders]
            self.simulated.pool.check(tables)

    def teardown(self):
        if hasattr(self, "engine"):
            for name in list(self.simulated._jobs):
                self.simulated.abort(name)
            assert self.simulated.pool.num_free == self.simulated.pool.num_blocks
            self.engine.close()

    @property
    def both(self):
        return self.simulated, self.engine

    def one_of(self, where: str | None, draw: int) -> str | None:
        """A request that is there, or one in this state."""
        jobs = self.simulated._jobs.items()
        names = [n for n, job in jobs if where in (None, job.sequence.state.value)]
        return names[draw % len(names)] if names else None

    @staticmethod
    def queues(engine):
        scheduler = engine.scheduler
        queues = (scheduler.running, scheduler.held, scheduler.reserved, scheduler.waiting)
        return [[(s.request_id, s.token_ids) for s in queue] for queue in queues]


TestTwins = Twins.TestCase
TestTwins.settings = settings(max_examples=60, stateful_step_count=30)
