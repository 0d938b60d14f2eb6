"""Drafts from models: the target's output stays what it is, and nothing is lost on the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdlab import (
    DraftModel,
    EarlyExit,
    EngineConfig,
    Model,
    SamplingParams,
    SelfDraft,
)
from pdlab.engine.drafting import Speculation

from ..helpers import TINY, random_model, random_prompt
from .running import run

SHAPE = replace(TINY, hidden_size=64, intermediate_size=96, head_dim=16, num_layers=3)
CONFIG = EngineConfig(exact=True, num_blocks=128, block_size=4)
PROMPTS = [random_prompt(5 + 3 * i, seed=i) for i in range(8)]


def target() -> Model:
    return random_model(SHAPE)


DRAFTERS: dict[str, Speculation] = {
    "itself": DraftModel(target()),
    "another": DraftModel(random_model(SHAPE, seed=1), num_tokens=2),
    "int8": SelfDraft("int8", kv_format="int8"),
    "first layers": EarlyExit(2, num_tokens=3),
    "in chunks": DraftModel(target(), chunk_size=7),
    "short of room": DraftModel(target(), num_blocks=17),
    "adaptive": DraftModel(target(), num_tokens="auto"),
}


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("speculation", DRAFTERS.values(), ids=DRAFTERS)
def test_greedy_output_is_that_of_plain_decoding_bit_for_bit(speculation, batch) -> None:
    params = [SamplingParams(max_tokens=12 + i) for i in range(batch)]
    plain = run(target(), CONFIG, PROMPTS[:batch], params)
    drafted = run(target(), replace(CONFIG, speculation=speculation), PROMPTS[:batch], params)
    assert drafted.num_drafted > 0
    for ours, theirs in zip(drafted.seen, plain.seen, strict=True):
        assert ours.is_same(theirs)
    assert drafted.leftovers == 0


def test_the_target_as_its_own_drafter_is_always_right() -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    drafted = run(target(), replace(CONFIG, speculation=DraftModel(target())), PROMPTS[:3], params)
    assert drafted.num_accepted == drafted.num_drafted > 0
    # the first token comes with the prompt, and then 5 with each step, the last of which has 4
    assert [len(drafted.trace.sequence_steps(f"r{i}")) for i in range(3)] == [7, 7, 7]
