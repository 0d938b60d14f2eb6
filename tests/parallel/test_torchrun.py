"""One model on the ranks of a torch.distributed job: under torchrun, and begun by hand.

Rank 0 of the second kind is this process. The file takes a quarter of a minute.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import pdlab
from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.link import Link
from pdlab.parallel import ParallelRunner, RankLost
from pdlab.parallel.command_line import prompt_of
from pdlab.parallel.hosts.torchrun import serve_rank

NAME = "random:tiny-llama"
PROMPTS = [[3 + (7 * i + n) % 50 for i in range(n)] for n in (1, 16, 33)]
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
PATIENCE_S = 120.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def tokens(engine: Engine) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def on_threads(**grid: int) -> list[list[int]]:
    with Engine(pdlab.load(NAME), EngineConfig(rank_host="thread", **grid)) as engine:
        return tokens(engine)


def test_under_torchrun() -> None:
    texts = [",".join(map(str, prompt)) for prompt in PROMPTS]
    knobs = ["--tensor-parallel", "2", "--ignore-eos", "--max-tokens", "6", "--json"]
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "pdlab.parallel.torchrun"]
    run = subprocess.run(
        [*command, "--model", NAME, *knobs, "--", *texts],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert [output["token_ids"] for output in said["outputs"]] == on_threads(tensor_parallel=2)
    assert said["num_steps"] == 6
    assert said["wire_bytes"] > 0
    assert 0 < said["share"] < 1


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen]:
    """Makes this process rank 0 of two; the other one serves two engines."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    code = "from pdlab.parallel.hosts.torchrun import serve_rank\nserve_rank()\nserve_rank()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RANK": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as other:
        monkeypatch.setenv("RANK", "0")
        yield other
        other.kill()


def test_one_engine_after_another_and_a_rank_that_is_killed(job: subprocess.Popen) -> None:
    before = {thread.name for thread in threading.enumerate()}
    model = pdlab.load(NAME)
    with Engine(model, EngineConfig(pipeline_parallel=2, rank_host="torchrun")) as engine:
        assert tokens(engine) == on_threads(pipeline_parallel=2)
    with Engine(model, EngineConfig(tensor_parallel=2, rank_host="torchrun")) as engine:
        request_id = engine.submit(PROMPTS[2], SamplingParams(max_tokens=400))
        for _ in range(3):
            engine.step()
        job.send_signal(signal.SIGKILL)
        job.wait()
        with pytest.raises(RankLost, match=r"rank 1 of 2 is lost: rank 1: .*(reset|closed)"):
            engine.step()
        assert engine.collect(request_id).finish_reason == "error"
        assert engine.pool.num_free == engine.config.num_blocks
    assert {thread.name for thread in threading.enumerate()} == before
    printed, said = job.communicate()
    assert printed == ""
    assert "Traceback" not in said  # torch's store may warn of a connection that was reset


def test_a_rank_whose_engine_is_gone_ends(job: subprocess.Popen) -> None:
    """Even in the middle of a step: it waits for a rank that will not answer any more."""
    with Engine(pdlab.load(NAME), EngineConfig(tensor_parallel=2, rank_host="torchrun")) as engine:
        assert isinstance(engine.runner, ParallelRunner)
        first, second = engine.runner.ranks._lines
        engine.submit(PROMPTS[2], PARAMS)
        send = first.send
        first.send = lambda message: None  # type: ignore[method-assign]
        ask = engine.runner.ranks.ask

        def tell_and_fail(command: Any) -> Any:
            engine.runner.ranks.tell(command)
            raise RankLost("this is a test")

        engine.runner.ranks.ask = tell_and_fail  # type: ignore[method-assign]
        with pytest.raises(RankLost):
            engine.step()
        engine.runner.ranks.ask, first.send = ask, send  # type: ignore[method-assign]
        second.close(force=True)
        assert job.wait(PATIENCE_S) == 1


def test_what_does_not_fit_the_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = pdlab.load(NAME)
    config = EngineConfig(tensor_parallel=2, pipeline_parallel=3, rank_host="torchrun")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=r"RANK.* not set: this is no rank"):
        Engine(model, config)
    meeting = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in meeting.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="this is rank 0: make an engine"):
        serve_rank()
    with pytest.raises(ValueError, match="pipeline_parallel=3 need 6 ranks: the job has 2"):
        Engine(model, config)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    slow = EngineConfig(tensor_parallel=2, rank_host="torchrun", rank_link=Link.named("10GbE"))
    with pytest.raises(ValueError, match=r"rank_link=.* machines have a clock each"):
        Engine(model, slow)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="this is rank 1, and rank 0 has the engine"):
        Engine(model, config)


def test_prompts_without_a_tokenizer_are_token_ids() -> None:
    model = pdlab.load(NAME)
    assert prompt_of("3,14,15", model) == [3, 14, 15]
    with pytest.raises(ValueError, match="'one two' must be token ids"):
        prompt_of("one two", model)
