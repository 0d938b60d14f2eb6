"""Ranks in real processes: they compute what ranks in threads do, and some of them are killed.

Processes take seconds to begin, so tests share the pair that is not killed, and those that are
killed have computed before. What happens at a certain moment happens when the engine waits for its
ranks, not after some time. The file takes half a minute.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from pdlab import Engine, EngineConfig, Model, Policy, SamplingParams, load
from pdlab.models.loading import load_outline
from pdlab.parallel import ParallelRunner, RankLost
from pdlab.parallel.hosts.processes import ProcessLine
from tests.helpers import random_prompt
from tests.models.test_loading import write_directory
from tests.parallel.models import ODD, while_waiting

PROMPTS = [random_prompt(length, ODD.vocab_size) for length in (13, 4, 22)]
PARAMS = [
    SamplingParams(max_tokens=9, ignore_eos=True),
    SamplingParams(max_tokens=6, temperature=0.8, seed=3, repetition_penalty=1.1),
    SamplingParams(max_tokens=7, prompt_logprobs=2),
]


def config_of(tensor_parallel: int, pipeline_parallel: int = 1, **knobs: Any) -> EngineConfig:
    threads = 1 if knobs.get("rank_host", "process") == "process" else None
    return EngineConfig(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        rank_threads=threads,
        **{"block_size": 4, "num_blocks": 64, "seed": 0} | knobs,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """One with a name: ranks load it for themselves."""
    directory = tmp_path_factory.mktemp("odd")
    write_directory(directory, ODD)
    return load(directory, dtype="fp32")


@pytest.fixture(scope="module")
def pair(model: Model) -> Iterator[Engine]:
    """Two ranks that nobody kills."""
    before = left_over()
    with Engine(model, config_of(2)) as engine:
        yield engine
        processes = processes_of(engine)
    assert [process.returncode for process in processes] == [0, 0]
    assert left_over() == before


def processes_of(engine: Engine) -> list[subprocess.Popen]:
    assert isinstance(engine.runner, ParallelRunner)
    lines = engine.runner.ranks._lines
    return [line._child.process for line in lines if isinstance(line, ProcessLine)]


def left_over() -> int:
    """How many sockets and files are open. What ranks print goes to files without a name."""
    return len(os.listdir("/proc/self/fd"))


def on_threads(model: Model, config: EngineConfig) -> list[list[int]]:
    with Engine(model, replace(config, rank_host="thread", rank_threads=None)) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


# --- nobody dies --------------------------------------------------------------------------------


def test_two_processes_draw_the_tokens_of_two_threads(pair: Engine, model: Model) -> None:
    outputs = pair.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == on_threads(model, pair.config)
    assert pair.pool.num_free == pair.config.num_blocks


def test_ranks_print_nothing_here(pair: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    pair.generate(PROMPTS, PARAMS)
    assert capfd.readouterr() == ("", "")
    for process in processes_of(pair):
        assert os.getsid(process.pid) == process.pid  # nor do they hear a terminal's Ctrl-C


def test_an_interrupted_step_is_done_again(
    pair: Engine, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one rank has computed it and the other has not begun."""
    expected = on_threads(model, pair.config)
    second = processes_of(pair)[1]
    ids = [pair.submit(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
    for _ in range(3):
        second.send_signal(signal.SIGSTOP)
        with (
            while_waiting(monkeypatch, lambda: signal.raise_signal(signal.SIGINT)),
            pytest.raises(KeyboardInterrupt),
        ):
            pair.step()
        second.send_signal(signal.SIGCONT)
        pair.step()
    while pair.step():
        pass
    assert [pair.collect(name).token_ids for name in ids] == expected


def test_interrupts_at_any_moment_change_nothing(pair: Engine, model: Model) -> None:
    expected, num_heard = on_threads(model, pair.config), 0
    for _ in range(3):
        ids = [pair.submit(*each) for each in zip(PROMPTS, PARAMS, strict=True)]
        with interrupted_now_and_then() as attempt:
            while True:
                has_more, was_interrupted = attempt(pair.step)
                num_heard += was_interrupted
                if not has_more and not was_interrupted:
                    break
        assert [pair.collect(name).token_ids for name in ids] == expected
    assert num_heard
    assert pair.pool.num_free == pair.config.num_blocks


@contextmanager
def interrupted_now_and_then() -> Iterator[Callable[[Callable[[], Any]], tuple[Any, bool]]]:
    """Calls something, while another thread presses Ctrl-C; whether it was heard."""
    is_over, is_trying = threading.Event(), False
    before = signal.getsignal(signal.SIGINT)

    def heard(*_: Any) -> None:
        if is_trying:
            raise KeyboardInterrupt

    def press() -> None:
        number = 0
        while not is_over.wait(0.004 + 0.007 * (number % 7)):
            number += 1
            os.kill(os.getpid(), signal.SIGINT)

    def attempt(call: Callable[[], Any]) -> tuple[Any, bool]:
        nonlocal is_trying
        try:
            is_trying = True
            result = call()
            is_trying = False
        except KeyboardInterrupt:
            is_trying = False
            return None, True
        return result, False

    signal.signal(signal.SIGINT, heard)
    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield attempt
    finally:
        is_over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_four_processes_beside_two(pair: Engine, model: Model) -> None:
    """Two engines at the same time; and what only the engine needs may be one's own."""

    class Mine(Policy):
        def rank(self, sequence: Any, view: Any) -> float:
            return 0.0

    config = config_of(2, 2, micro_batches=3, policy=Mine())
    with Engine(load_outline(model.name), config) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        again = pair.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in outputs] == on_threads(model, config)
    assert [output.token_ids for output in again] == on_threads(model, pair.config)


# --- a rank is killed ---------------------------------------------------------------------------


@pytest.mark.parametrize(("grid", "when"), [((1, 2), "idle"), ((3, 1), "computing")])
def test_a_killed_rank_ends_all_requests_with_its_name(
    model: Model, grid: tuple[int, int], when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = left_over()
    config = config_of(*grid)
    with Engine(model, config) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] == on_threads(model, config)
        processes = processes_of(engine)
        ids = [engine.submit(prompt, PARAMS[0]) for prompt in PROMPTS]
        for _ in range(3):
            engine.step()
        last = processes[-1]
        if when == "computing":
            last.send_signal(signal.SIGSTOP)
            doing = while_waiting(monkeypatch, last.kill)
        else:
            last.kill()
            last.wait()
            doing = while_waiting(monkeypatch, lambda: None)
        number = len(processes) - 1
        message = f"rank {number} of {number + 1} is lost: its process was ended by SIGKILL"
        with doing, pytest.raises(RankLost, match=message):
            engine.step()
        for name in ids:
            output = engine.collect(name)
            assert output.finish_reason == "error"
            assert message in str(output.error)
        assert engine.pool.num_free == config.num_blocks
        assert all(process.returncode == -signal.SIGKILL for process in processes)
    del doing
    assert left_over() == before


def test_ranks_do_not_outlive_their_engine() -> None:
    code = """
import pdlab, sys
config = pdlab.EngineConfig(tensor_parallel=2, rank_threads=1)
engine = pdlab.Engine(pdlab.load("random:tiny-llama"), config)
print(*[line.process_id for line in engine.runner.ranks._lines], flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout
        ranks = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(ranks) == 2
    for rank in ranks:
        assert select.select([rank], [], [], 20)[0]
        os.close(rank)


def test_ranks_that_cannot_begin_say_why(model: Model) -> None:
    before = left_over()
    lost = replace(model, name="random:no-such-shape")
    with pytest.raises(ValueError, match="no shape is called 'no-such-shape'"):
        Engine(lost, config_of(2))
    with pytest.raises(ValueError, match=r"num_blocks=10000000000 .* need .* GiB of KV memory"):
        Engine(model, config_of(2, num_blocks=10**10))
    assert left_over() == before


def test_weights_that_were_changed_here_are_noticed() -> None:
    changed = load("random:tiny-llama")
    changed.decoder.layers[0].down.weight.data[-1, -1] += 1
    with pytest.raises(ValueError, match="was changed after it was loaded, and rank 0 loaded"):
        Engine(changed, config_of(1, 2))
