"""With overlap a thread computes the next step, and nobody can tell but by the clock."""

from __future__ import annotations

import gc
import signal
import threading
import weakref
from dataclasses import replace
from random import Random

import pytest

from pdlab import Engine, EngineConfig, SamplingParams, Trace
from pdlab.engine.fake import FakeRunner, expected_tokens
from pdlab.sampling import LogitsProcessor
from pdlab.trace import StepRecord
from tests.engine.guessing import Guess
from tests.helpers import random_model, random_prompt

PROMPTS = [random_prompt(length) for length in (9, 4, 17)]
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
OVERLAP = EngineConfig(overlap=True)


class Gate:
    """Holds a runner's work back as long as one likes."""

    def __init__(self, engine: Engine):
        self.open = threading.Event()
        self.open.set()
        self.at_work = threading.Event()
        self.engine = weakref.proxy(engine)
        self.run, engine.runner.run = engine.runner.run, self.wait  # type: ignore[method-assign]

    def shut(self) -> None:
        """From the next step on: what is in flight lands first."""
        self.engine.memory.settle()
        self.at_work.clear()
        self.open.clear()

    def wait(self, batch, clock, step):
        self.at_work.set()
        assert self.open.wait(20)
        return self.run(batch, clock, step)


def timeless(record: StepRecord) -> StepRecord:
    return replace(record, start_s=0, wall_s=0, stage_s={}, spans=[])


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("pdlab-compute")]


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"exact": True, "block_size": 4, "num_blocks": 9, "chunk_size": 5},
        {"block_size": 4, "num_blocks": 9, "num_swap_blocks": 20, "preemption": "swap"},
        {"batching": "static", "max_num_seqs": 2, "policy": "sjf"},
        {"window": 6, "sink_tokens": 2, "block_size": 2},
        {"window": 6, "heavy_tokens": 4, "block_size": 2, "enable_prefix_cache": False},
        {"kv_format": "int8:channel"},
    ],
    ids=lambda knobs: ", ".join(knobs) or "default",
)
def test_the_record_of_every_step_is_that_of_the_plain_run(knobs):
    """Tokens, blocks, preemptions, logprobs, text: all but the times, step by step."""
    params = [
        SamplingParams(max_tokens=9, temperature=0.8, seed=1, logprobs=2, n=2),
        SamplingParams(max_tokens=12, ignore_eos=True, frequency_penalty=0.5),
        SamplingParams(max_tokens=3, regex="(a|b)+"),
    ]
    traces: list[Trace] = []
    for overlap in (False, True):
        config = EngineConfig(**knobs, overlap=overlap, seed=0)
        with Engine(random_model(), config) as engine:
            outputs = engine.generate(PROMPTS, params)
            assert engine.pool.num_free == config.num_blocks
        traces.append(engine.trace)
    plain, beside = traces
    assert [timeless(r) for r in plain.steps] == [timeless(r) for r in beside.steps]
    assert all(record.spans for record in beside.steps)
    assert not any(record.wasted for record in beside.steps)
    assert [plain.output_ids(name) for name in ("r0", "r0.1", "r1", "r2")] == [
        c.token_ids for output in outputs for c in output.completions
    ]


def test_a_stop_string_ends_a_text_before_the_next_step_is_planned(speaker):
    """Also inside a draft: nothing is computed for a text that has ended."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3)
    with Engine(speaker) as engine:
        whole = engine.generate([1, 2, 3], params)[0]
    stop = whole.text[2:4]
    truth = whole.token_ids

    def knowing(sequence, length):
        return truth[sequence.num_output_tokens :][:length]

    for right in (None, 1.0):
        guess = right and Guess(knowing, speaker.config.vocab_size, Random(0), right)
        found = []
        for overlap in (False, True):
            config = EngineConfig(overlap=overlap, speculation=guess)
            with Engine(speaker, config) as engine:
                output = engine.generate([1, 2, 3], replace(params, stop=[stop]))[0]
                found.append((output.text, output.token_ids, output.stop_reason))
                assert not engine.has_flight
        assert found[0] == found[1]
        assert found[0][2] == stop


def test_the_next_step_is_computed_while_the_caller_has_the_last():
    with Engine(random_model(), OVERLAP) as engine:
        gate = Gate(engine)
        request_id = engine.submit(PROMPTS[0], PARAMS)
        engine.step()
        gate.shut()
        engine.step()
        assert gate.at_work.wait(20)
        assert engine.requests[request_id].num_unread == 2  # of the steps before
        gate.open.set()


@pytest.mark.parametrize("drafts", [False, True])
def test_an_abort_in_mid_flight_frees_blocks_when_the_step_is_computed(drafts):
    """The others go on; what was computed for the one that left is recorded as wasted."""
    guess = Guess(lambda s, n: s.token_ids[:n], 61, Random(0), 0.5) if drafts else None
    with Engine(random_model(), EngineConfig(speculation=guess)) as engine:
        expected = engine.generate(PROMPTS[0], PARAMS)[0].token_ids
    config = EngineConfig(overlap=True, block_size=4, num_blocks=32, speculation=guess)
    with Engine(random_model(), config) as engine:
        gate = Gate(engine)
        stays, goes = (engine.submit(prompt, PARAMS) for prompt in PROMPTS[:2])
        engine.step()
        gate.shut()
        engine.step()
        aborting = threading.Thread(target=engine.abort, args=(goes,))
        aborting.start()
        assert not engine.requests[goes].finished
        gate.open.set()
        aborting.join(20)
        assert engine.requests[goes].finished
        engine.pool.check([engine.sequence_of(stays).block_table])
        record = engine.step()
        assert [part.sequence_id for part in record.wasted] == [goes]
        assert [part.sequence_id for part in record.sequences] == [stays]
        assert sum(record.flops.values()) > 0
        while engine.step():
            pass
        assert engine.collect(stays).token_ids == expected
        assert engine.pool.num_free == 32


def test_a_step_in_which_nobody_is_left_is_none():
    with Engine(random_model(), OVERLAP) as engine:
        gone = engine.submit(PROMPTS[0], PARAMS)
        engine.step()
        engine.abort(gone)
        assert engine.step() is None
        assert engine.pool.num_free == engine.config.num_blocks
        engine.submit(PROMPTS[1], PARAMS)
        record = engine.step()
        assert record.step == 1
        assert [part.sequence_id for part in record.wasted] == [gone]


def test_what_was_computed_in_vain_survives_saving(tmp_path):
    with Engine(random_model(), OVERLAP) as engine:
        gone = engine.submit(PROMPTS[0], PARAMS)
        engine.submit(PROMPTS[1], PARAMS)
        engine.step()
        engine.abort(gone)
        engine.step()
    engine.trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json")
    assert loaded.steps == engine.trace.steps
    assert loaded.steps[1].wasted
    assert loaded.steps[1].spans


@pytest.mark.parametrize("at_call", [0, 1, 4])
def test_an_error_of_the_thread_is_raised_by_the_step_that_would_have_booked_it(at_call):
    with Engine(random_model()) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS, PARAMS)]
    with Engine(random_model(), OVERLAP) as engine:
        run, calls = engine.runner.run, iter(range(1000))

        def broken(batch, clock, step):
            output = run(batch, clock, step)
            if next(calls) == at_call:
                raise MemoryError("too big")
            return output

        engine.runner.run = broken  # type: ignore[method-assign]
        ids = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
        for _ in range(at_call):
            engine.step()
        with pytest.raises(MemoryError, match="too big"):
            engine.step()
        assert engine.step().step == at_call
        while engine.step():
            pass
        assert [engine.collect(i).token_ids for i in ids] == expected
        assert engine.pool.num_free == engine.config.num_blocks


def test_an_error_of_planning_ahead_is_raised_by_the_next_step():
    """The step that was over is over."""
    with Engine(random_model(), OVERLAP) as engine:
        request_id = engine.submit(PROMPTS[0], PARAMS)
        schedule, calls = engine.scheduler.rank, iter(range(1000))

        def broken(now_s):
            if next(calls) == 1:
                raise ZeroDivisionError
            schedule(now_s)

        engine.scheduler.rank = broken  # type: ignore[method-assign]
        assert engine.step().step == 0
        with pytest.raises(ZeroDivisionError):
            engine.step()
        while engine.step():
            pass
        assert len(engine.collect(request_id).token_ids) == 6


def test_an_interrupted_wait_loses_nothing():
    with Engine(random_model()) as engine:
        expected = engine.generate(PROMPTS[0], PARAMS)[0].token_ids
    with Engine(random_model(), OVERLAP) as engine:
        gate = Gate(engine)
        gate.shut()
        request_id = engine.submit(PROMPTS[0], PARAMS)

        interrupted = threading.Event()

        def interrupt_once(*_):
            if not interrupted.is_set():
                interrupted.set()
                raise KeyboardInterrupt

        def press_ctrl_c() -> None:
            """Until it is heard: one that comes just before the wait begins does not end it."""
            assert gate.at_work.wait(20)
            while not interrupted.wait(0.05):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        pressing = threading.Thread(target=press_ctrl_c)
        former = signal.signal(signal.SIGINT, interrupt_once)
        try:
            pressing.start()
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            pressing.join(20)
        finally:
            signal.signal(signal.SIGINT, former)
        gate.open.set()
        while engine.step():
            pass
        assert engine.collect(request_id).token_ids == expected


@pytest.mark.parametrize("method", ["schedule", "update", "rank", "finish"])
@pytest.mark.parametrize("call", range(3))
def test_ctrl_c_between_two_steps_leaves_both_whole(method, call):
    with Engine(random_model()) as engine:
        expected = engine.generate(PROMPTS[0], PARAMS)[0].token_ids
    with Engine(random_model(), OVERLAP) as engine:
        original, calls = getattr(engine.scheduler, method), []

        def interrupted(*args):
            result = original(*args)
            calls.append(method)
            if len(calls) == call + 1:
                signal.raise_signal(signal.SIGINT)
            return result

        setattr(engine.scheduler, method, interrupted)
        request_id = engine.submit(PROMPTS[0], PARAMS)
        while engine.scheduler.has_work:
            try:
                engine.step()
            except KeyboardInterrupt:
                calls.append("interrupt")
        output = engine.collect(request_id)
        assert output.token_ids == expected == engine.trace.output_ids(request_id)
        assert [record.step for record in engine.trace.steps] == list(range(6))
        assert engine.pool.num_free == engine.config.num_blocks


def test_closing_waits_for_the_thread_and_ends_it():
    before = len(threads())
    engine = Engine(random_model(), OVERLAP)
    gate = Gate(engine)
    engine.submit(PROMPTS[0], PARAMS)
    engine.step()
    assert len(threads()) == before + 1
    gate.shut()
    engine.step()
    closing = threading.Thread(target=engine.close)
    closing.start()
    assert engine.memory is not None
    gate.open.set()
    closing.join(20)
    assert engine.memory is None
    assert len(threads()) == before


def test_an_engine_that_is_forgotten_in_mid_flight_leaves_nothing():
    before = set(threading.enumerate())
    engine = Engine(random_model(), OVERLAP)
    storage = weakref.ref(engine.kv_cache.tensors[0])
    engine.submit(PROMPTS[0], PARAMS)
    engine.step()
    made = [t for t in threading.enumerate() if t not in before]
    assert len(made) == 1
    del engine
    gc.collect()
    made[0].join(20)
    assert not made[0].is_alive()
    gc.collect()
    assert storage() is None


def test_a_stream_that_is_left_ends_its_request_and_others_go_on():
    with Engine(random_model()) as engine:
        expected = engine.generate(PROMPTS[1], PARAMS)[0].token_ids
    with Engine(random_model(), OVERLAP) as engine:
        other = engine.submit(PROMPTS[1], PARAMS)
        stream = engine.stream(PROMPTS[0], PARAMS)
        next(stream)
        stream.close()
        assert len(engine.requests) == 1
        while engine.step():
            pass
        assert engine.collect(other).token_ids == expected


def test_a_reader_who_does_not_read_pauses_its_request_no_later():
    counts = []
    for overlap in (False, True):
        with Engine(random_model(), EngineConfig(overlap=overlap)) as engine:
            slow = engine.stream(PROMPTS[0], SamplingParams(max_tokens=20), max_unread=3)
            engine.generate(PROMPTS[1], SamplingParams(max_tokens=12, ignore_eos=True))
            [request] = engine.requests.values()
            counts.append(request.num_unread)
            slow.close()
    assert counts == [3, 3]


class Meddler(LogitsProcessor):
    """Does something to the engine whose step it is part of."""

    name = "meddler"

    def __init__(self, meddle):
        self.meddle = meddle

    def process(self, logits, drawers):
        self.meddle()
        return logits


def test_a_step_may_not_change_the_engine_that_waits_for_it():
    """Rather an error than two who wait for each other."""
    with Engine(random_model(), OVERLAP) as engine:
        meddler = Meddler(lambda: engine.abort("r0"))
        engine.submit(PROMPTS[0], replace(PARAMS, logits_processors=[meddler]))
        engine.step()
        assert "inside its own computation" in str(engine.collect("r0").error)


def test_probing_runs_without_overlap():
    with Engine(random_model(), OVERLAP) as engine:
        engine.submit(PROMPTS[0], PARAMS)
        engine.step()
        with engine.probe():
            engine.step()
            before = len(engine.trace.captures)
            engine.step()
            assert len(engine.trace.captures) > before
            assert not engine.has_flight
        with engine.measure_activations():
            assert engine.step().activation_peak_bytes
            assert not engine.has_flight


def test_engines_that_share_memory_wait_for_each_other():
    """The oracle checks every slot that each of them reads."""
    model = random_model()
    config = EngineConfig(
        overlap=True, block_size=2, num_blocks=24, max_num_seqs=3, num_swap_blocks=8
    )
    for seed in range(20):
        rng = Random(seed)
        memory = Engine.memory_for(model, config, 2)
        runner = FakeRunner(24, 2, 61, num_swap_blocks=8)
        engines = [Engine(model, config, memory=memory) for _ in range(2)]
        asked: list[tuple[Engine, str, list[int]]] = []
        for engine in engines:
            engine.runner = runner
        for _ in range(60):
            engine = rng.choice(engines)
            if rng.random() < 0.2:
                prompt = random_prompt(rng.randint(1, 9), seed=rng.randint(0, 1))
                asked.append((engine, engine.submit(prompt, PARAMS), prompt))
            elif rng.random() < 0.05 and asked:
                owner, request_id, _ = asked.pop(rng.randrange(len(asked)))
                owner.discard(request_id)
            else:
                engine.step()
        while any(engine.scheduler.has_work for engine in engines):
            for engine in engines:
                engine.step()
        for engine, request_id, prompt in asked:
            assert engine.collect(request_id).token_ids == expected_tokens(prompt, 6, 61)
        assert memory.manager.pool.num_free == 24
        for engine in engines:
            engine.close()
