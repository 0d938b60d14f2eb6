"""Ctrl-C between a token and its bookkeeping neither loses text nor leaks a block."""

import signal
import threading

import pytest

from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.engine.interrupts import undisturbed
from tests.helpers import random_model, random_prompt

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
BOOKING = ("schedule", "update", "finish")


def press_ctrl_c(*_args: object) -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_waits_for_the_end_of_the_body() -> None:
    reached = []

    def body() -> None:
        with undisturbed():
            press_ctrl_c()
            reached.append("end")

    with pytest.raises(KeyboardInterrupt):
        body()
    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("method", BOOKING)
@pytest.mark.parametrize("call", range(3))
def test_an_interrupted_step_is_booked_whole_or_not_at_all(method: str, call: int) -> None:
    model, prompt = random_model(), random_prompt(9)
    with Engine(model) as engine:
        expected = engine.generate(prompt, PARAMS)[0]
    with Engine(model, EngineConfig(block_size=4, num_blocks=8)) as engine:
        original, calls = getattr(engine.scheduler, method), []

        def interrupted(*args):
            result = original(*args)
            calls.append(method)
            if len(calls) == call + 1:
                press_ctrl_c()
            return result

        setattr(engine.scheduler, method, interrupted)
        request_id = engine.submit(prompt, PARAMS)
        while engine.scheduler.has_work:
            try:
                engine.step()
            except KeyboardInterrupt:
                calls.append("interrupt")
        output = engine.collect(request_id)
        assert output.token_ids == expected.token_ids
        assert output.metrics.num_output_tokens == PARAMS.max_tokens
        assert engine.trace.output_ids(request_id) == expected.token_ids
        assert engine.pool.num_free == 8
        engine.pool.check([])


def test_threads_take_turns() -> None:
    """Four streams of one engine, each read by a thread of its own."""
    model, prompts = random_model(), [random_prompt(n) for n in (3, 5, 8, 13)]
    with Engine(model) as engine:
        expected = [engine.generate(p, PARAMS)[0].token_ids for p in prompts]
        found: dict[int, list[int]] = {}

        def read(index: int) -> None:
            chunks = engine.stream(prompts[index], PARAMS)
            found[index] = [i for chunk in chunks for i in chunk.token_ids]

        threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [found[i] for i in range(4)] == expected
        assert not engine.requests
