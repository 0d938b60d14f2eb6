"""Seats and room of an engine that some compute on, some wait on, and some are expected on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from pdlab import Engine, SamplingParams
from pdlab.engine.moving import RequestState
from tests.disagg.test_cluster import EXACT, MODEL
from tests.helpers import random_prompt

PARAMS = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
SMALL = replace(EXACT, num_blocks=6, watermark=0.0, enable_prefix_cache=False)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(MODEL, SMALL) as engine:
        yield engine


def state(num_tokens: int) -> RequestState:
    return RequestState(random_prompt(num_tokens), PARAMS, seed=0)


def reserves(engine: Engine, num_tokens: int, arrival_s: float) -> bool:
    """Whether a request from elsewhere gets its room now."""
    request = engine.prepare(state(num_tokens), arrival_s=arrival_s)
    return engine.reserve(request) is not None


def test_who_waits_here_is_overtaken_only_by_who_came_before(engine: Engine) -> None:
    engine.submit(random_prompt(33), PARAMS, arrival_s=-9.0)
    engine.submit(random_prompt(20), PARAMS, arrival_s=-7.0)  # needs 3 blocks, of which 1 is free
    engine.step()
    assert len(engine.scheduler.waiting) == engine.pool.num_free == 1
    assert not reserves(engine, 8, arrival_s=-6.0)
    assert reserves(engine, 8, arrival_s=-8.0)


def test_who_was_preempted_is_overtaken_by_nobody(engine: Engine) -> None:
    engine.submit(random_prompt(15), PARAMS, arrival_s=-8.0)
    engine.submit(random_prompt(16, seed=1), PARAMS, arrival_s=-7.0)
    engine.step()
    assert len(engine.scheduler.running) == 2
    while not engine.scheduler.waiting:
        assert engine.step()
    assert engine.pool.num_free
    assert not reserves(engine, 1, arrival_s=-9.0)


@pytest.mark.parametrize("num_seats", [1, 2])
def test_a_prompt_that_is_held_keeps_its_seat(num_seats: int) -> None:
    with Engine(MODEL, replace(EXACT, max_num_seqs=num_seats)) as engine:
        held = [engine.resume(state(9), holds=True) for _ in range(num_seats)]
        engine.submit(random_prompt(9), PARAMS)
        for _ in range(3):
            engine.step()
        scheduler = engine.scheduler
        assert (len(scheduler.held), len(scheduler.running)) == (num_seats, 0)
        assert not reserves(engine, 9, arrival_s=-9.0)
        engine.let_go(held[0])
        engine.step()
        assert (len(scheduler.held), len(scheduler.running)) == (num_seats - 1, 1)
