"""A workload on the real engine, in real time: what came of it, and what is left behind."""

from __future__ import annotations

import json
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdlab import Engine, EngineConfig, SamplingParams, Trace
from pdlab.engine.policies import Policy, QueueView
from pdlab.engine.sequence import Sequence
from pdlab.workload.arrivals import ClosedLoop, OpenLoop
from pdlab.workload.export import to_json
from pdlab.workload.replay import Progress, Prompts, ReplayInterrupted, replay
from pdlab.workload.report import summarize
from pdlab.workload.serving import SLO, ServingRun
from pdlab.workload.traces import TraceRequest
from tests.helpers import TINY, random_model

serve = partial(replay, warm_up=False)
CONFIG = EngineConfig(block_size=4, num_blocks=64, max_num_seqs=4, max_num_batched_tokens=32)


def engine_of(config: EngineConfig = CONFIG) -> Engine:
    return Engine(random_model(), config)


def requests(count: int = 8, gap_s: float = 0.002) -> list[TraceRequest]:
    return [TraceRequest(i * gap_s, 5 + 3 * i, 1 + i % 4) for i in range(count)]


TOO_LONG = TraceRequest(0.0, TINY.max_model_len + 1, 2)


def test_every_request_is_served_as_the_trace_has_it() -> None:
    asked = requests()
    with engine_of() as engine:
        run = serve(engine, asked)
        assert run.provenance == "measured"
        assert run.config == engine.config.to_dict()
    assert [r.metrics.arrival_s for r in run.requests] == pytest.approx(
        [r.arrival_s for r in asked]
    )
    for served, request in zip(run.requests, asked, strict=True):
        metrics = served.metrics
        assert metrics.num_prompt_tokens == request.num_prompt_tokens
        assert metrics.num_output_tokens == request.num_output_tokens
        assert served.finish_reason == "length"
        assert metrics.first_scheduled_s is not None
        assert metrics.arrival_s <= metrics.first_scheduled_s < metrics.token_times_s[0]
        assert metrics.token_times_s == sorted(metrics.token_times_s)
    computed = sum(step.num_prompt_tokens for step in run.steps)
    assert computed == sum(r.num_prompt_tokens for r in asked)


def test_its_times_are_those_of_the_trace() -> None:
    with engine_of() as engine:
        run = serve(engine, requests())
        recorded = ServingRun.of_trace(engine.trace)
    assert len(run.steps) == len(recorded.steps)
    assert [s.decodes for s in run.steps] == [s.decodes for s in recorded.steps]
    assert [s.prompts for s in run.steps] == [s.prompts for s in recorded.steps]
    for ours, theirs in zip(run.requests, recorded.requests, strict=True):
        assert ours.request_id == theirs.request_id
        assert ours.finish_reason == theirs.finish_reason
        assert ours.metrics.queue_s == pytest.approx(theirs.metrics.queue_s, abs=1e-9)
        holding = [s for s in run.steps if ours.request_id in [*s.decodes, *s.prompts]]
        tokens_s = ours.metrics.token_times_s
        for step, time_s in zip(holding[-len(tokens_s) :], tokens_s, strict=True):
            assert step.start_s < time_s <= step.end_s


def test_its_numbers_are_those_of_the_trace() -> None:
    """Also where nobody comes at first. A trace's tokens come at the end of their step, which is a
    little later."""
    late = [replace(r, arrival_s=r.arrival_s + 0.05) for r in requests(12)]
    slo = SLO(ttft_s=10, tpot_s=10)
    with engine_of() as engine:
        run = serve(engine, late)
        ours, theirs = summarize(run, slo), summarize(ServingRun.of_trace(engine.trace), slo)
    assert run.start_s == pytest.approx(0.05)
    assert ours.num_finished == theirs.num_finished == 12
    for name in ("duration_s", "idle_s", "goodput_per_s", "requests_per_s", "output_tokens_per_s"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), abs=1e-6)
    for name in ("queue_depth", "batch_size", "running", "step_tokens", "kv_occupancy"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-6)
    for name in ("ttft_s", "e2e_s"):
        recording_s = max(step.wall_s for step in run.steps)
        gap_s = getattr(theirs, name).mean - getattr(ours, name).mean
        assert 0 <= gap_s < recording_s


def test_nothing_is_left_in_the_engine() -> None:
    with engine_of() as engine:
        serve(engine, [*requests(), TOO_LONG])
        assert engine.pool.num_free == engine.pool.num_blocks
        assert not engine.requests
        assert not engine.scheduler.has_work


def test_what_the_engine_did_before_is_no_part_of_the_run() -> None:
    params = SamplingParams(max_tokens=2)
    with engine_of() as engine:
        engine.generate([[1, 2, 3]], params)
        kept = engine.submit([4, 5], params)
        while engine.step():
            pass
        num_before = len(engine.trace.steps)
        run = serve(engine, requests(3))
        assert len(run.steps) == len(engine.trace.steps) - num_before
        assert [r.request_id for r in run.requests] == ["r2", "r3", "r4"]
        assert run.requests[0].metrics.arrival_s == pytest.approx(0, abs=1e-9)
        assert run.steps[0].start_s >= 0
        assert len(engine.collect(kept).token_ids) == 2  # it was not ours to collect


def test_warming_up_leaves_no_mark_on_the_engine() -> None:
    with engine_of() as engine:
        run = replay(engine, requests(1), warm_up=True)
        assert len(engine.trace.requests) == 1
        assert len(engine.trace.steps) == len(run.steps)


def test_a_run_without_a_trace_keeps_no_records() -> None:
    with engine_of(replace(CONFIG, record_trace=False)) as engine:
        run = serve(engine, requests())
        assert len(run.steps) > 0
        assert not engine.trace.steps
    assert summarize(run).num_finished == 8


def test_a_refused_request_fails_alone() -> None:
    asked = [*requests(3), replace(TOO_LONG, arrival_s=0.001, priority=7)]
    with engine_of() as engine:
        run = serve(engine, asked)
    refused = run.requests[1]
    assert (refused.finish_reason, refused.priority) == ("error", 7)
    assert "max_model_len is 128" in refused.error
    assert refused.metrics.arrival_s == 0.001
    assert [r.finish_reason for r in run.requests] == ["length", "error", "length", "length"]
    assert summarize(run).num_refused == 1


IMPOSSIBLE = {
    "no output": ({"num_output_tokens": 0}, "num_output_tokens=0 must be"),
    "text": ({"num_prompt_tokens": "many"}, "num_prompt_tokens='many' must be"),
    "output in words": ({"num_output_tokens": "many"}, "num_output_tokens='many' must be"),
    "half a token": ({"num_prompt_tokens": 2.5}, "num_prompt_tokens=2.5 must be"),
    "no prompt": ({"num_prompt_tokens": -1}, "num_prompt_tokens=-1 must be"),
    "endless": ({"num_prompt_tokens": 10**12}, "num_prompt_tokens has"),
    "priority": ({"priority": 10**400}, "priority has"),
    "priority in words": ({"priority": "high"}, "priority='high' must be"),
    "blocks": ({"prefix_block_size": 0}, "prefix_block_size=0 must be"),
    "ids": ({"prefix_block_size": 4}, "prefix_ids has 0 ids, it must have 2"),
    "no ids": ({"prefix_block_size": 4, "prefix_ids": (1, None)}, "prefix_ids=(1, None) must be"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_request_fails_alone(name: str) -> None:
    fields, message = IMPOSSIBLE[name]
    asked = requests(3)
    asked.insert(1, replace(TraceRequest(0.0, 8, 2), **fields))  # type: ignore[arg-type]
    with engine_of() as engine:
        run = serve(engine, asked)
        assert not engine.requests
    refused = run.requests[1]
    assert message in refused.error
    assert [r.finish_reason for r in run.requests] == ["length", "error", "length", "length"]
    assert summarize(run).num_refused == 1
    json.loads(to_json(run, summarize(run)))


def test_a_client_goes_on_after_a_refusal() -> None:
    with engine_of() as engine:
        run = serve(engine, ClosedLoop([TOO_LONG, TOO_LONG, *requests(2), TOO_LONG], 1))
    reasons = [r.finish_reason for r in run.requests]
    assert reasons == ["error", "error", "length", "length", "error"]


def test_a_closed_loop_has_no_more_outstanding_than_clients() -> None:
    outstanding: list[int] = []
    ended = 0

    def watch(progress: Progress) -> None:
        nonlocal ended
        ended += len(progress.ended)
        outstanding.append(progress.num_arrived - ended)
        assert progress.step is not None
        assert progress.step.num_running + progress.step.num_waiting <= 3

    with engine_of() as engine:
        run = serve(engine, ClosedLoop(requests(10), num_clients=3), on_step=watch)
    assert max(outstanding) == 3
    assert len(run.requests) == 10
    ends = {step.end_s for step in run.steps}
    sent = [r.metrics.arrival_s for r in run.requests]
    assert sent[:3] == pytest.approx([0, 0, 0], abs=1e-9)
    for time_s in sent[3:]:  # each when the answer before it was complete
        assert min(abs(time_s - end_s) for end_s in ends) < 1e-9


def test_clients_that_think_send_later() -> None:
    pauses = 0

    def watch(progress: Progress) -> None:
        nonlocal pauses
        pauses += progress.step is None

    with engine_of() as engine:
        run = serve(engine, ClosedLoop(requests(3), 1, think_s=0.01), on_step=watch)
    assert pauses >= 2
    for before, after in zip(run.requests, run.requests[1:], strict=False):
        assert after.metrics.arrival_s >= before.metrics.token_times_s[-1] + 0.01


def test_who_watches_hears_of_everything_once() -> None:
    heard: list[Progress] = []
    with engine_of() as engine:
        run = serve(engine, [*requests(), TOO_LONG], on_step=heard.append)
    ended = [served for progress in heard for served in progress.ended]
    assert sorted(r.request_id for r in ended) == sorted(r.request_id for r in run.requests)
    assert [p.step for p in heard if p.step] == run.steps
    assert heard[-1].num_arrived == 9
    assert sum(p.num_tokens for p in heard) == sum(r.metrics.num_output_tokens for r in ended)
    assert [p.now_s for p in heard] == sorted(p.now_s for p in heard)


def test_what_was_served_until_ctrl_c_is_not_lost() -> None:
    def interrupt(progress: Progress) -> None:
        if progress.ended:
            raise KeyboardInterrupt

    asked = [TraceRequest(0, 6, 2), TraceRequest(0, 6, 40), TraceRequest(1e6, 6, 2)]
    with engine_of() as engine, pytest.raises(ReplayInterrupted) as caught:
        serve(engine, asked, on_step=interrupt)
    run = caught.value.run
    assert [r.finish_reason for r in run.requests] == ["length", "abort"]
    assert [r.metrics.num_output_tokens for r in run.requests] == [2, 2]
    assert summarize(run).num_finished == 1


@pytest.mark.parametrize("after", [1, 3, 6])
def test_ctrl_c_leaves_nothing_and_the_engine_goes_on(after: int, tmp_path: Path) -> None:
    heard: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        heard.append(progress)
        if len(heard) == after:
            signal.raise_signal(signal.SIGINT)

    with engine_of() as engine:
        with pytest.raises(KeyboardInterrupt):
            serve(engine, [replace(r, arrival_s=0) for r in requests()], on_step=interrupt)
        assert len(heard) == after
        assert engine.pool.num_free == engine.pool.num_blocks
        assert not engine.requests
        assert engine.step() is None
        engine.trace.save(tmp_path / "run.json.gz")
        [output] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
        assert len(output.token_ids) == 3
    run = ServingRun.of_trace(Trace.load(tmp_path / "run.json.gz"))
    assert len(run.requests) == 8
    assert len(run.steps) == after
    assert "abort" in {r.finish_reason for r in run.requests}


def test_a_failing_watcher_is_as_an_interrupt() -> None:
    def fail(progress: Progress) -> None:
        raise RuntimeError("the screen is gone")

    with engine_of() as engine:
        with pytest.raises(RuntimeError, match="screen"):
            serve(engine, requests(), on_step=fail)
        assert not engine.requests
        assert engine.pool.num_free == engine.pool.num_blocks


def test_a_request_that_somebody_aborts_ends_so() -> None:
    def abort_first(progress: Progress) -> None:
        engine.abort("r0")

    asked = [TraceRequest(0, 9, 50), TraceRequest(0, 9, 3)]
    with engine_of() as engine:
        run = serve(engine, ClosedLoop([*asked, *asked[1:]], 1), on_step=abort_first)
    assert [r.finish_reason for r in run.requests] == ["abort", "length", "length"]
    assert run.requests[0].metrics.num_output_tokens == 1
    assert summarize(run).num_aborted == 1


def test_requests_of_others_are_left_alone() -> None:
    """One that is longer than the replay, one that ends during it, and one of two samples."""
    others: list[str] = []

    def join_in(progress: Progress) -> None:
        if not others:
            for tokens, n in ((100, 1), (3, 1), (3, 2)):
                params = SamplingParams(max_tokens=tokens, n=n, ignore_eos=True)
                others.append(engine.submit([1, 2, 3], params))

    heard: list[Progress] = []

    def watch(progress: Progress) -> None:
        join_in(progress)
        heard.append(progress)

    asked = [TraceRequest(0, 9, 12) for _ in range(2)]
    with engine_of() as engine:
        run = serve(engine, asked, on_step=watch)
        assert [r.request_id for r in run.requests] == ["r0", "r1"]
        assert [r.finish_reason for r in run.requests] == ["length", "length"]
        assert sum(progress.num_tokens for progress in heard) == 24
        assert max(len(step.decodes) for step in run.steps) > 2  # their work is part of the steps
        summary = summarize(run)
        assert (summary.num_requests, summary.num_output_tokens) == (2, 24)
        assert set(engine.requests) == set(others)
        assert not engine.requests[others[0]].finished
        while engine.step():
            pass
        lengths = [len(engine.collect(name).token_ids) for name in others]
        assert lengths == [100, 3, 3]


def test_another_thread_may_use_the_engine() -> None:
    outputs: list[int] = []

    def use() -> None:
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        for _ in range(5):
            outputs.extend(len(o.token_ids) for o in engine.generate([[1, 2], [3]], params))

    with engine_of() as engine:
        thread = threading.Thread(target=use)

        def start(progress: Progress) -> None:
            if thread.ident is None:
                thread.start()

        run = serve(engine, requests(12), on_step=start)
        thread.join(timeout=60)
    assert outputs == [5] * 10
    assert [r.finish_reason for r in run.requests] == ["length"] * 12
    assert [r.metrics.num_output_tokens for r in run.requests] == [1 + i % 4 for i in range(12)]


def test_ctrl_c_ends_no_request_of_others() -> None:
    others: list[str] = []

    def interrupt(progress: Progress) -> None:
        others.append(engine.submit([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)))
        raise KeyboardInterrupt

    with engine_of() as engine:
        with pytest.raises(KeyboardInterrupt):
            serve(engine, requests(3), on_step=interrupt)
        assert list(engine.requests) == others
        while engine.step():
            pass
        assert engine.collect(others[0]).finish_reason == "length"


class PickyAtOnce(Policy):
    """Has no rank for long prompts, which shows when one is submitted."""

    changes = False

    def rank(self, sequence: Sequence, view: QueueView) -> float:
        return 1 / (sequence.num_prompt_tokens < 10)


class PickyLater(PickyAtOnce):
    """The same, which shows when the queue is looked at."""

    changes = True


@pytest.mark.parametrize("policy", [PickyAtOnce(), PickyLater()])
def test_who_has_no_rank_fails_alone(policy: Policy) -> None:
    asked = [TraceRequest(0, 6, 2), TraceRequest(0, 20, 2), TraceRequest(0, 7, 2)]
    with engine_of(replace(CONFIG, policy=policy)) as engine:
        run = serve(engine, asked)
        assert not engine.requests
    assert [r.finish_reason for r in run.requests] == ["length", "error", "length"]
    assert "rank" in run.requests[1].error


def test_priorities_reach_the_scheduler() -> None:
    asked = [TraceRequest(0, 6, 2, priority=p) for p in (3, 1, 2, 0)]
    config = replace(CONFIG, policy="priority", max_num_seqs=1)
    with engine_of(config) as engine:
        run = serve(engine, asked)
    begun = sorted(run.requests, key=lambda r: r.metrics.first_scheduled_s or 0)
    assert [r.priority for r in begun] == [0, 1, 2, 3]
    assert [r.priority for r in run.requests] == [3, 1, 2, 0]


def test_preemptions_are_told() -> None:
    asked = [TraceRequest(0, 8, 20) for _ in range(4)]
    with engine_of(replace(CONFIG, num_blocks=12, watermark=0)) as engine:
        run = serve(engine, asked)
        assert engine.pool.num_free == 12
    summary = summarize(run)
    assert summary.num_preemptions == sum(len(step.preempted) for step in run.steps) > 0
    assert summary.num_finished == 4
    assert summary.queue_depth.mean > 0


# --- prompts -------------------------------------------------------------------------------------


def test_equal_prefixes_of_the_trace_are_found_in_the_cache() -> None:
    asked = [
        TraceRequest(0, 20, 1, (5, -6, 7), 8),
        TraceRequest(0.001, 24, 1, (5, -6, 10**90), 8),
        TraceRequest(0.002, 24, 1, (6, -6, 7), 8),
    ]
    with engine_of(replace(CONFIG, max_num_seqs=1)) as engine:
        run = serve(engine, asked)
    assert [r.metrics.num_cached_tokens for r in run.requests] == [0, 16, 0]
    assert summarize(run).num_cached_tokens == 16


def test_prompts_are_the_same_for_the_same_seed() -> None:
    model, request = random_model(), TraceRequest(0, 40, 1)
    first, again, other = (Prompts(model, seed) for seed in (0, 0, 1))
    assert first.make(request, 3) == again.make(request, 3)
    assert first.make(request, 3) != first.make(request, 4)
    assert first.make(request, 3) != other.make(request, 3)
    assert len(first.make(request, 3)) == 40


def test_an_unfilled_block_begins_as_the_full_one() -> None:
    prompts = Prompts(random_model())
    full = prompts.make(TraceRequest(0, 16, 1, (1, 2), 8), 0)
    part = prompts.make(TraceRequest(0, 11, 1, (1, 2), 8), 1)
    assert part == full[:11]
    assert full != prompts.make(TraceRequest(0, 16, 1, (1, -2), 8), 0)


def test_prompts_hold_no_special_token_and_stay_below_vocab_size() -> None:
    tokenizer = SimpleNamespace(special_ids=frozenset({0, 3}), vocab_size=50)
    model = replace(random_model(), tokenizer=tokenizer)  # type: ignore[arg-type]
    request = TraceRequest(0, 2000, 1)
    assert set(Prompts(model).make(request, 0)) == set(range(50)) - {0, 3}
    assert set(Prompts(model, vocab_size=5).make(request, 0)) == {1, 2, 4}
    with pytest.raises(ValueError, match="vocab_size=1: all tokens below it are special"):
        Prompts(model, vocab_size=1)


# --- refusals ------------------------------------------------------------------------------------


def test_an_engine_at_work_is_refused() -> None:
    with engine_of() as engine:
        engine.submit([1, 2, 3])
        with pytest.raises(ValueError, match="1 unfinished requests"):
            serve(engine, requests())


class NothingLeft(OpenLoop):
    def __init__(self) -> None:
        super().__init__(requests(1))
        self.take_due(1e9)


def test_arrivals_that_were_used_up_are_refused() -> None:
    arrivals = ClosedLoop(requests(3), 2)
    with engine_of() as engine:
        assert len(serve(engine, arrivals).requests) == 3
        for used in (arrivals, NothingLeft()):
            with pytest.raises(ValueError, match="arrivals has no request left"):
                serve(engine, used)
        with pytest.raises(ValueError, match=r"requests\[1\]=7 must be a TraceRequest"):
            serve(engine, [*requests(1), 7])  # type: ignore[list-item]


def test_shared_memory_is_refused() -> None:
    memory = Engine.memory_for(random_model(), CONFIG)
    with (
        Engine(random_model(), CONFIG, memory=memory) as engine,
        Engine(random_model(), CONFIG, memory=memory),
        pytest.raises(ValueError, match="shares its KV memory with 1 other"),
    ):
        serve(engine, requests())


@pytest.mark.parametrize("bad", [{"seed": -1}, {"seed": 0.5}, {"vocab_size": 0}])
def test_numbers_out_of_range_are_refused(bad: dict) -> None:
    with engine_of() as engine, pytest.raises(ValueError, match=next(iter(bad))):
        serve(engine, OpenLoop(requests()), **bad)
