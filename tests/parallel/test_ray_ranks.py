"""Ranks as Ray actors, on a Ray of this process's own and on one that was there before.

Ray takes seconds to begin: the file takes half a minute.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
from pathlib import Path

import pytest

import pdlab
from pdlab import Engine, EngineConfig, SamplingParams
from pdlab.parallel import ParallelRunner, RankLost
from tests.helpers import random_prompt

if "CI" not in os.environ and importlib.util.find_spec("ray") is None:
    pytest.skip("ray is not installed", allow_module_level=True)

MODEL = pdlab.load("random:tiny-llama")
PROMPTS = [random_prompt(length, MODEL.config.vocab_size) for length in (13, 4, 22)]
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def tokens(config: EngineConfig) -> list[list[int]]:
    with Engine(MODEL, config) as engine:
        return [output.token_ids for output in engine.generate(PROMPTS, PARAMS)]


def test_on_a_ray_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from pdlab.parallel.hosts import ray_actors

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config = EngineConfig(tensor_parallel=2, rank_host="ray", rank_threads=os.cpu_count())
    with Engine(MODEL, config) as engine:
        outputs = engine.generate(PROMPTS, PARAMS)
        threads = EngineConfig(tensor_parallel=2, rank_host="thread")
        assert [output.token_ids for output in outputs] == tokens(threads)
        monkeypatch.setattr(ray_actors, "ROOM_S", 0.1)
        with pytest.raises(ValueError, match=r"Ray found no room for .*within 0\.1 s"):
            Engine(MODEL, config)
        assert ray.is_initialized()  # the first engine's

        ids = [engine.submit(prompt, SamplingParams(max_tokens=400)) for prompt in PROMPTS]
        for _ in range(3):
            engine.step()
        os.kill(process_of(engine, 1), signal.SIGKILL)
        with pytest.raises(RankLost, match=r"rank 1 of 2 is lost: ActorDiedError"):
            run(engine)
        assert [engine.collect(name).finish_reason for name in ids] == ["error"] * 3
        assert engine.pool.num_free == config.num_blocks
        assert not ray.is_initialized()
    assert not list(tmp_path.glob("pdlab-*"))


def run(engine: Engine) -> None:
    while engine.step():
        pass


def process_of(engine: Engine, rank: int) -> int:
    import ray

    assert isinstance(engine.runner, ParallelRunner)
    line = engine.runner.ranks._lines[rank]
    process_id: int = ray.get(line._calls._actor.home.remote())[2]  # type: ignore[attr-defined]
    return process_id


def test_on_a_ray_that_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not ended; and engines come and go on it, two at the same time."""
    import ray

    from pdlab.child import own_ray

    aside = own_ray._aside()  # or Ray's processes take long to begin
    for name, value in own_ray._environment(aside.name).items():
        monkeypatch.setenv(name, value)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        config = EngineConfig(pipeline_parallel=2, rank_host="ray", micro_batches=3)
        with Engine(MODEL, config) as engine:
            expected = tokens(EngineConfig())
            assert tokens(config) == expected
            outputs = engine.generate(PROMPTS, PARAMS)
            assert [output.token_ids for output in outputs] == expected
        assert ray.is_initialized()
    finally:
        ray.shutdown()
        aside.cleanup()
