"""The real model over two and three ranks: the same greedy tokens on the oracle's prompts."""

from __future__ import annotations

from functools import cache

import pytest

from pdlab import Engine, EngineConfig, Model, SamplingParams
from tests.helpers import gaps_below_best, load_prompts, relative_error, watch

TOLERANCE = 1e-4
"""Of logits, relative to the largest: what the oracle itself is held to."""
TIE_GAP = 2e-4
"""Logits that lie closer than this are nearly tied: either token may come first."""
PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@cache
def expected(model: Model) -> list:
    return run(model, EngineConfig(backend="torch"))


def run(model: Model, config: EngineConfig) -> list:
    """Tokens of each prompt, and the logits that they were chosen from."""
    with Engine(model, config) as engine:
        seen = watch(engine, kv=False)
        outputs = engine.generate(list(load_prompts().values()), PARAMS)
        return [(output.token_ids, seen[output.request_id].logits) for output in outputs]


@pytest.mark.parametrize("grid", [(2, 1), (3, 1), (1, 2), (1, 3)], ids=lambda g: f"{g[0]}x{g[1]}")
def test_the_oracle_s_prompts(grid: tuple[int, int], smollm2: Model) -> None:
    config = EngineConfig(tensor_parallel=grid[0], pipeline_parallel=grid[1], rank_host="thread")
    for (tokens, logits), (wanted, theirs) in zip(
        run(smollm2, config), expected(smollm2), strict=True
    ):
        for i, (token, want) in enumerate(zip(tokens, wanted, strict=True)):
            assert relative_error(logits[i], theirs[i]) < TOLERANCE
            if token != want:
                assert max(gaps_below_best(theirs[i][None], [token])) < TIE_GAP
                break
