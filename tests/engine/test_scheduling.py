"""Batching modes and policies: who runs in the next step, in what order, and who never waits long.

Time is the number of the step here: the scheduler is driven by hand, with nothing behind it.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import pytest

import pdlab
from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.engine import FCFS, Deadline, LongestPrefix, Policy, Priority, ShortestJob
from pdlab.engine.config import BATCHING_MODES
from pdlab.engine.policies import POLICIES, QueueView, as_policy
from pdlab.engine.scheduler import ScheduledBatch, Scheduler
from pdlab.engine.sequence import Sequence, SequenceState
from pdlab.kvcache import BlockPool, KVManager
from tests.helpers import random_model

CONFIG = EngineConfig(num_blocks=1000, block_size=4, max_num_seqs=4, max_num_batched_tokens=16)


class Line:
    """A scheduler, stepped by hand; each sequence ends after `max_tokens`."""

    def __init__(self, **knobs):
        self.config = replace(CONFIG, **knobs)
        pool = BlockPool(self.config.num_blocks, self.config.block_size)
        self.scheduler = Scheduler(KVManager(pool, BlockPool(0, 4)), self.config)
        self.now_s = 0.0
        self.num_added = 0

    def add(self, num_prompt: int, max_tokens: int = 1, tokens=None, **more) -> Sequence:
        self.num_added += 1
        sequence = Sequence(
            f"s{self.num_added}",
            f"s{self.num_added}",
            tokens or [self.num_added] * num_prompt,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            arrival_s=self.now_s,
            uses_prefix_cache=tokens is not None,
            **more,
        )
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> dict[Sequence, int]:
        """Tokens computed, by sequence."""
        batch = self.scheduler.schedule(self.now_s)
        for drawer in batch.drawers:
            drawer.token_ids.append(0)
        self.scheduler.update(batch)
        for part in batch.scheduled:
            if part.sequence.num_output_tokens == part.sequence.params.max_tokens:
                self.scheduler.finish(part.sequence, "length")
        self.now_s += 1
        return {part.sequence: part.num_tokens for part in batch.scheduled}

    def order(self, sequences: list[Sequence]) -> list[int]:
        """The places of these in the order in which they are admitted."""
        while any(s.num_output_tokens == 0 for s in sequences):
            self.step()
        return [s.turn for s in sequences]


# --- batching modes ------------------------------------------------------------------------------


def test_static_lets_nobody_join_until_all_have_finished():
    line = Line(batching="static")
    short, long = line.add(4, 2), line.add(4, 6)
    assert line.step() == {short: 4, long: 4}
    late = line.add(4, 1)
    for _ in range(5):
        assert late not in line.step()
    assert long.num_output_tokens == 6
    assert line.step() == {late: 4}


def test_static_takes_as_many_as_have_seats_though_they_take_several_steps():
    line = Line(batching="static")
    batch = [line.add(10, 3) for _ in range(5)]
    joined = [line.step() for _ in range(3)]  # 40 prompt tokens, 16 a step
    assert {s for step in joined for s in step} == set(batch[:4])
    assert all(s.num_output_tokens <= 1 for s in batch)
    assert line.step() == dict.fromkeys(batch[:4], 1)


def test_prefill_first_stops_decodes_while_there_are_prompts():
    line = Line(batching="prefill_first")
    running = line.add(4, 5)
    line.step()
    prompt = line.add(40)
    steps = [line.step() for _ in range(4)]
    assert steps == [{prompt: 16}, {prompt: 16}, {prompt: 8}, {running: 1}]


def test_decode_first_stops_prompts_while_there_are_decodes():
    line = Line(batching="decode_first")
    running = line.add(4, 4)
    line.step()
    prompt = line.add(4)
    assert [line.step() for _ in range(4)] == [{running: 1}] * 3 + [{prompt: 4}]


def test_mixed_fills_the_budget_beside_the_decodes():
    line = Line(batching="mixed")
    running = line.add(4, 4)
    line.step()
    prompt = line.add(40)
    steps = [line.step() for _ in range(3)]
    assert steps == [{running: 1, prompt: 15}, {running: 1, prompt: 15}, {running: 1, prompt: 10}]


def test_a_chunk_below_the_budget_lets_short_prompts_run_beside_a_long_one():
    for chunk_size, waits in ((None, 4), (8, 1)):
        line = Line(chunk_size=chunk_size)
        line.add(64)
        line.step()
        short = line.add(4)
        num_steps = 0
        while not short.num_output_tokens:
            line.step()
            num_steps += 1
        assert num_steps == waits


@pytest.mark.parametrize("batching", ["prefill_first", "mixed"])
def test_a_stream_of_prompts_that_fills_every_step_never_stops_decodes(batching):
    """Each prompt is as long as the budget and ends with its first token."""
    line = Line(batching=batching, max_phase_steps=3)
    running = line.add(4, 20)
    line.step()
    gap = gaps = 0
    while running.num_output_tokens < 20:
        for _ in range(3):
            line.add(16)
        gap = 0 if running in line.step() else gap + 1
        gaps += gap > 0
        assert gap <= (3 if batching == "prefill_first" else 0)
    assert gaps or batching == "mixed"


@pytest.mark.parametrize("batching", ["decode_first", "mixed"])
def test_a_stream_of_decodes_never_stops_a_prompt(batching):
    """All seats but one decode; whenever one ends, the next is there."""
    line = Line(batching=batching, max_phase_steps=3, max_num_batched_tokens=4)
    for _ in range(3):
        line.add(1, 30)
    line.step()
    prompt = line.add(20)
    num_steps = num_passed = 0
    while not prompt.num_output_tokens:
        while len(line.scheduler.running) + len(line.scheduler.waiting) < 6:
            line.add(1, 30)
        num_passed += prompt not in line.step()
        num_steps += 1
        assert num_steps < 100, "the prompt starves"
    expected = (20, 0) if batching == "mixed" else (5 + 5 * 3, 5 * 3)  # 1 or 4 tokens of it a step
    assert (num_steps, num_passed) == expected


@pytest.mark.parametrize("batching", BATCHING_MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_whoever_waits_gets_on_under_an_endless_stream(batching, policy):
    """A request that every policy likes least, and a stream of those that they all prefer."""
    line = Line(batching=batching, policy=policy, max_overtakes=5, max_phase_steps=2)
    for _ in range(4):
        line.add(2, 8, tokens=[1] * 9, priority=-9, ttft_slo_s=1e6)
    line.step()
    unloved = line.add(30, 1, priority=9, ttft_slo_s=0.0)
    num_before = line.num_added
    num_steps = 0
    while not unloved.num_output_tokens:
        if len(line.scheduler.waiting) < 8:
            line.add(2, 8, tokens=[1] * 9, priority=-9, ttft_slo_s=1e6)
        line.step()
        num_steps += 1
        assert num_steps < 400
    others = [s for s in line.scheduler.running if s is not unloved]
    overtook = unloved.turn - 1 - num_before + 1
    assert overtook <= 5, f"{overtook} later ones went first"
    assert others or batching == "static"


# --- policies ------------------------------------------------------------------------------------


def test_policies_order_those_that_wait():
    def order(policy, requests):
        line = Line(policy=policy, max_num_seqs=1)
        line.add(1, 3)
        line.step()
        return line.order([line.add(**request) for request in requests])

    lengths = [{"num_prompt": n} for n in (9, 3, 5)]
    assert order("fcfs", lengths) == [2, 3, 4]
    assert order("sjf", lengths) == [4, 2, 3]
    levels = [{"num_prompt": 3, "priority": p} for p in (2, 0, 1, 0)]
    assert order("priority", levels) == [5, 2, 4, 3]
    due = [{"num_prompt": 3, "ttft_slo_s": s} for s in (50.0, 0.0, 20.0, None)]
    assert order(Deadline(ttft_slo_s=30), due) == [4, 5, 2, 3]


def test_waiting_is_worth_a_priority_level_each_ageing_s():
    for ageing_s, first in ((2.0, 0), (50.0, 1)):
        line = Line(policy=Priority(ageing_s=ageing_s), max_num_seqs=1)
        line.add(1, 8)
        line.step()
        old = line.add(2, priority=1)
        for _ in range(4):
            line.step()
        young = line.add(2, priority=0)
        turns = line.order([old, young])
        assert turns.index(min(turns)) == first


def test_the_longest_cached_prefix_goes_first():
    line = Line(policy="longest_prefix", max_num_seqs=1)
    stem = list(range(100, 112))
    line.add(0, 2, tokens=stem)
    line.step()
    fresh = line.add(0, tokens=list(range(200, 214)))
    some = line.add(0, tokens=[*stem[:4], 7, 7, 7, 7])
    most = line.add(0, tokens=[*stem, 8])
    turns = line.order([fresh, some, most])
    assert turns == [4, 3, 2]


def test_nobody_is_overtaken_more_often_than_the_bound_says():
    class LastCome(Policy):
        def rank(self, sequence, view):
            return -sequence.arrival

    line = Line(policy=LastCome(), max_num_seqs=1, max_overtakes=3)
    line.add(1, 2)
    line.step()
    old = [line.add(2) for _ in range(2)]
    for _ in range(40):
        line.add(2)
        line.step()
    assert [s.turn for s in old] == [5, 6]  # after the first and three that came later


def test_a_policy_of_ones_own_serves_an_engine():
    class LongestAnswerLast(pdlab.Policy):
        changes = False

        def rank(self, sequence: Sequence, view: QueueView) -> float:
            return sequence.params.max_tokens

    config = EngineConfig(max_num_seqs=1, num_blocks=20, policy=LongestAnswerLast())
    with Engine(random_model(), config) as engine:
        params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (5, 9, 2)]
        outputs = engine.generate([[1, 2], [3, 4], [5, 6]], params)
        first = [output.metrics.token_times_s[0] for output in outputs]
        assert sorted(range(3), key=first.__getitem__) == [2, 0, 1]
        assert engine.trace.engine["policy"] == "LongestAnswerLast"


class Broken(Policy):
    """Says what it was made to say."""

    def __init__(self, said, changes):
        self.said = said
        self.changes = changes

    def rank(self, sequence, view):
        return self.said(sequence)


@pytest.mark.parametrize(
    "said",
    [lambda s: None, lambda s: "soon", lambda s: math.nan, lambda s: (1, None)],
    ids=["None", "text", "nan", "tuple"],
)
@pytest.mark.parametrize("changes", [False, True])
def test_one_without_a_rank_fails_alone(said, changes):
    """Where ranks do not change at once, or else when it might be admitted."""
    policy = Broken(lambda s: said(s) if s.num_prompt_tokens == 7 else 0.0, changes)
    config = EngineConfig(num_blocks=20, max_num_seqs=2, policy=policy)
    params = SamplingParams(max_tokens=4, ignore_eos=True, n=2)
    with Engine(random_model(), config) as engine:
        prompts = [[1, 2, 3], [1] * 7, [4, 5], [6, 7, 8, 9]]
        good, bad, *others = engine.generate(prompts, params)
        for output in (good, *others):
            assert [c.finish_reason for c in output.completions] == ["length"] * 2
            assert output.completions[0].metrics.num_output_tokens == 4
        assert bad.finish_reason == "error"
        assert isinstance(bad.error, pdlab.engine.PolicyError)
        assert "policy=Broken" in str(bad.error)
        assert "has no rank for r1" in str(bad.error)
        assert engine.pool.num_free == 20
        assert not engine.requests
        with pytest.raises(ValueError, match="has no rank"):
            engine.generate([1] * 7, params)


def raises_key_error(sequence):
    return {}[sequence.num_prompt_tokens]


@pytest.mark.parametrize("changes", [False, True])
def test_those_who_run_do_not_suffer_from_a_policy(changes):
    policy = Broken(lambda s: raises_key_error(s) if s.num_prompt_tokens == 7 else 0, changes)
    with Engine(random_model(), EngineConfig(num_blocks=20, policy=policy)) as engine:
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        good = engine.submit([1, 2], params)
        engine.step()
        with suppress(ValueError):
            engine.submit([1] * 7, params)
        while record := engine.step():
            assert [s.sequence_id for s in record.sequences] == [good]
        assert engine.collect(good).metrics.num_output_tokens == 9
        if changes:
            bad = engine.collect("r1")
            assert "KeyError: 7" in str(bad.completions[0].error)
            assert isinstance(bad.completions[0].error.__cause__, KeyError)


@pytest.mark.parametrize("changes", [False, True])
def test_a_rank_that_does_not_compare_spoils_nothing(changes):
    policy = Broken(lambda s: (1.0, 2.0) if s.num_prompt_tokens == 7 else 1.0, changes)
    with Engine(random_model(), EngineConfig(max_num_seqs=1, policy=policy)) as engine:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        outputs = engine.generate([[1] * n for n in (3, 7, 4, 5, 6)], params)
        reasons = [output.finish_reason for output in outputs]
        assert reasons == ["length", "error", "length", "length", "length"]


def test_an_interrupted_policy_harms_nobody():
    patience = iter([KeyboardInterrupt])

    def rank(sequence):
        for interrupt in patience:
            raise interrupt
        return 0.0

    with Engine(random_model(), EngineConfig(policy=Broken(rank, changes=True))) as engine:
        request_id = engine.submit([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        while engine.step():
            pass
        assert engine.collect(request_id).finish_reason == "length"


def test_a_static_batch_takes_its_own_and_no_latecomer():
    """The latecomer is short, and first by policy."""
    line = Line(batching="static", policy="sjf")
    first, second = line.add(16, 2), line.add(20, 2)
    assert line.step() == {first: 16}
    late = line.add(1)
    assert line.step() == {second: 16}
    while late not in line.step():
        pass
    assert first.num_output_tokens == second.num_output_tokens == 2


def test_only_those_who_were_admitted_count_as_having_overtaken():
    line = Line(policy="priority", max_num_seqs=1, max_overtakes=3)
    line.add(1, 2)
    line.step()
    line.add(2, priority=0)
    unloved = line.add(2, priority=9)
    for sequence in [line.add(2, priority=0) for _ in range(5)]:
        line.scheduler.finish(sequence, "abort")
    last = line.add(2, priority=0)
    assert line.order([unloved, last]) == [4, 3]


def test_a_queue_forgets_those_who_leave_it():
    line = Line(policy="sjf", max_num_seqs=1)
    line.add(1, 99)
    line.step()
    for sequence in [line.add(50) for _ in range(20)]:
        line.scheduler.finish(sequence, "abort")
    queue = line.scheduler.waiting
    assert len(queue) == len(queue._ranked) == len(queue._entries) == 0


def test_of_a_long_queue_only_the_oldest_are_looked_up():
    line = Line(policy="longest_prefix", max_num_seqs=1)
    stem = list(range(100, 112))
    line.add(0, 2, tokens=stem)
    line.step()
    for number in range(LongestPrefix.most_ranked):
        line.add(0, tokens=[number] * 5)
    late = line.add(0, tokens=[*stem, 8])
    oldest = next(iter(line.scheduler.waiting))
    assert line.order([oldest, late]) == [2, 3]


@pytest.mark.parametrize(
    ("knobs", "match"),
    [
        ({"batching": "dynamic"}, "batching='dynamic' must be one of static, prefill_first"),
        ({"policy": "lifo"}, "policy='lifo' must be one of fcfs, sjf"),
        ({"policy": FCFS}, "policy=.*FCFS.* must be one of .*object"),
        ({"policy": None}, "policy=None must be one of"),
        ({"max_overtakes": -1}, "max_overtakes=-1 must be an integer >= 0"),
        ({"max_phase_steps": 0}, "max_phase_steps=0 must be an integer >= 1"),
    ],
)
def test_knobs_out_of_range_are_refused(knobs, match):
    with pytest.raises(ValueError, match=match):
        EngineConfig(**knobs)


@pytest.mark.parametrize(
    ("kind", "knob", "value"),
    [(Priority, "ageing_s", 0), (Deadline, "ttft_slo_s", -1), (Priority, "ageing_s", "soon")],
)
def test_a_policys_knobs_are_checked(kind, knob, value):
    with pytest.raises(ValueError, match=f"{knob}={value!r}"):
        kind(**{knob: value})


@pytest.mark.parametrize(
    ("urgency", "match"),
    [
        ({"priority": 1.5}, "priority=1.5"),
        ({"ttft_slo_s": -1}, "ttft_slo_s=-1"),
        ({"arrival_s": 1e8}, "arrival_s=100000000.0"),
        ({"arrival_s": math.nan}, "arrival_s=nan"),
    ],
)
def test_what_a_request_says_of_its_urgency_is_checked(urgency, match):
    with Engine(random_model()) as engine:
        with pytest.raises(ValueError, match=match):
            engine.submit([1, 2], **urgency)
        assert not engine.requests


def test_latencies_count_from_the_arrival_that_was_given():
    with Engine(random_model()) as engine:
        request_id = engine.submit([1, 2], SamplingParams(max_tokens=1), arrival_s=-5.0)
        while engine.step():
            pass
        assert engine.trace.requests[request_id].arrival_s == -5.0
        assert engine.collect(request_id).metrics.ttft_s > 5


def test_policies_say_their_names():
    assert [str(as_policy(name)) for name in POLICIES] == [
        "fcfs",
        "sjf",
        "priority(ageing_s=10.0)",
        "deadline(ttft_slo_s=1.0)",
        "longest_prefix",
    ]
    assert {type(as_policy(name)) for name in POLICIES} == {
        FCFS,
        ShortestJob,
        Priority,
        Deadline,
        LongestPrefix,
    }


# --- many steps at once --------------------------------------------------------------------------


def test_a_step_repeats_only_while_nothing_can_change():
    def repeats(line: Line, most: int = 50) -> int:
        batch: ScheduledBatch = line.scheduler.schedule()
        for drawer in batch.drawers:
            drawer.token_ids.append(0)
        line.scheduler.update(batch)
        return line.scheduler.num_repeats(batch, most)

    line = Line()
    line.add(4, 99)
    assert repeats(line) == 0  # a prompt
    assert repeats(line) == 50
    line.add(40, 99)
    assert repeats(line) == 0
    full = Line(max_num_seqs=1)
    full.add(4, 99)
    full.add(4, 99)
    full.step()
    assert repeats(full) == 50  # the second has no seat
    turns = Line(batching="decode_first", max_phase_steps=7)
    turns.add(4, 99)
    turns.step()
    turns.add(4, 99)
    assert repeats(turns) == 6  # then it is the prompt's turn
    halfway = Line(batching="decode_first", max_phase_steps=7, chunk_size=4)
    halfway.add(4, 99)
    halfway.step()
    halfway.add(12, 99)
    for _ in range(8):
        halfway.step()  # the last of them is the prompt's
    assert repeats(halfway) == 6  # its other chunks wait as well
    second = halfway.scheduler.running[1]
    assert (second.state, second.num_computed_tokens) == (SequenceState.PREFILLING, 4)
    mixed = Line(chunk_size=4)
    mixed.add(4, 99)
    mixed.step()
    mixed.add(12, 99)
    assert repeats(mixed) == 0  # a chunk in each step
    small = Line(num_blocks=3)
    small.add(4, 99)
    small.step()
    assert repeats(small) == 6  # 12 slots, 5 taken: halved until it fits
