"""An engine survives what happens to it, and gives its memory back."""

from __future__ import annotations

import contextlib
import gc
import weakref

import pytest

from pdlab import Engine, EngineConfig, SamplingParams
from tests.helpers import random_model, random_prompt

PROMPTS = [random_prompt(length) for length in (9, 4, 17)]
PARAMS = SamplingParams(max_tokens=6)


def break_in(engine: Engine, at_call: int, error: BaseException, after_work: bool) -> None:
    """Let the runner raise at its `at_call`-th call, before or after it has done the work."""
    run, calls = engine.runner.run, iter(range(1000))

    def broken(batch, clock, step):
        if next(calls) != at_call:
            return run(batch, clock, step)
        if after_work:
            run(batch, clock, step)
        raise error

    engine.runner.run = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("after_work", [False, True])
@pytest.mark.parametrize("at_call", [0, 1, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_an_interrupted_generate_leaves_the_engine_usable_and_empty(error, at_call, after_work):
    config = EngineConfig(block_size=4, num_blocks=16, chunk_size=8)
    with Engine(random_model(), config) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS, PARAMS)]
        break_in(engine, at_call, error, after_work)
        with pytest.raises(type(error)):
            engine.generate(PROMPTS, PARAMS)
        assert engine.pool.num_free == 16
        assert not engine.requests
        assert not engine.scheduler.has_work
        assert [o.token_ids for o in engine.generate(PROMPTS, PARAMS)] == expected


def test_an_interrupted_generate_does_not_end_the_requests_of_others():
    with Engine(random_model()) as engine:
        expected = engine.generate(PROMPTS[0], PARAMS)[0].token_ids
        mine = engine.submit(PROMPTS[0], PARAMS)
        break_in(engine, 2, KeyboardInterrupt(), after_work=True)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPTS[1:], PARAMS)
        while engine.step():
            pass
        assert engine.collect(mine).token_ids == expected


def test_an_interrupted_step_can_be_made_again():
    with Engine(random_model()) as engine:
        expected = [o.token_ids for o in engine.generate(PROMPTS, PARAMS)]
        ids = [engine.submit(prompt, PARAMS) for prompt in PROMPTS]
        for _ in range(3):
            break_in(engine, 1, KeyboardInterrupt(), after_work=True)
            engine.step()
            with pytest.raises(KeyboardInterrupt):
                engine.step()
        while engine.step():
            pass
        assert [engine.collect(i).token_ids for i in ids] == expected


def test_an_interrupted_stream_frees_its_blocks():
    with Engine(random_model()) as engine:
        break_in(engine, 2, KeyboardInterrupt(), after_work=False)
        with pytest.raises(KeyboardInterrupt):
            list(engine.stream(PROMPTS[0], PARAMS))
        assert engine.pool.num_free == engine.config.num_blocks
        assert not engine.requests


# --- the end ----------------------------------------------------------------------------------


def kv_storage(engine: Engine) -> weakref.ref:
    return weakref.ref(engine.kv_cache.tensors[0])


@pytest.mark.parametrize("overlap", [False, True])
def test_closing_gives_the_kv_memory_back(overlap):
    """Also while a thread computes the next step."""
    engine = Engine(random_model(), EngineConfig(overlap=overlap))
    storage = kv_storage(engine)
    engine.generate(PROMPTS, PARAMS)
    engine.submit(PROMPTS[0])
    engine.step()
    gc.disable()  # at once, and not when Python next looks for cycles
    try:
        engine.close()
        assert storage() is None
    finally:
        gc.enable()


def test_leaving_with_an_error_gives_the_kv_memory_back():
    engine = Engine(random_model())
    storage = kv_storage(engine)
    with contextlib.suppress(KeyError), engine:
        engine.submit(PROMPTS[0])
        engine.step()
        raise KeyError
    assert storage() is None


def test_closing_twice_is_closing_once():
    with Engine(random_model()) as engine:
        engine.close()
    engine.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.step(),
        lambda engine: engine.submit([1]),
        lambda engine: engine.generate([1]),
        lambda engine: engine.generate([[1], [2]]),
        lambda engine: engine.stream([1]),
        lambda engine: engine.read_kv("r0"),
        lambda engine: engine.probe().__enter__(),
    ],
    ids=["step", "submit", "generate", "generate many", "stream", "read_kv", "probe"],
)
def test_using_a_closed_engine_is_a_runtime_error(use):
    engine = Engine(random_model())
    engine.submit(PROMPTS[0])
    engine.close()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        use(engine)


def test_the_trace_outlives_the_engine_and_running_requests_end_as_aborted():
    with Engine(random_model()) as engine:
        finished = engine.generate(PROMPTS[0], PARAMS)[0]
        running = engine.submit(PROMPTS[1], PARAMS)
        engine.step()
    assert engine.trace.output_ids(finished.request_id) == finished.token_ids
    assert engine.collect(running).finish_reason == "abort"
    assert engine.pool.num_free == engine.config.num_blocks


def test_two_engines_on_one_model_know_nothing_of_each_other():
    model = random_model()
    with Engine(model) as one, Engine(model, EngineConfig(block_size=3)) as other:
        ids = [engine.submit(PROMPTS[0], PARAMS) for engine in (one, other)]
        assert ids == ["r0", "r0"]
        while one.step():
            other.step()
        outputs = [engine.collect("r0").token_ids for engine in (one, other)]
    assert outputs[0] == outputs[1]
    assert [len(engine.trace.requests) for engine in (one, other)] == [1, 1]
