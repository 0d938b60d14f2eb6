"""Shapes that do not divide evenly, and engines on several ranks of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from pdlab import EngineConfig, ModelConfig
from pdlab.parallel.group import RankGroup
from tests.helpers import TINY

ODD = replace(
    TINY,
    vocab_size=101,
    intermediate_size=47,
    num_layers=5,
    num_heads=6,
    num_kv_heads=3,
    tie_word_embeddings=True,
)
"""As SmolLM2 three KV heads and tied embeddings; nothing of it can be halved."""
SHAPES: dict[str, ModelConfig] = {
    "odd": ODD,
    "untied, biased": replace(
        ODD, tie_word_embeddings=False, qkv_bias=True, output_bias=True, mlp_bias=True
    ),
    "qk norm": replace(ODD, family="qwen3", qk_norm=True),
    "windowed": replace(ODD, family="mistral", layer_windows=(5, None, 17, 3, 9)),
    "a group of one": replace(ODD, num_heads=3),
}
GRIDS = [(2, 1), (3, 1), (1, 2), (1, 3), (1, 5), (2, 2), (3, 2)]
"""(tensor_parallel, pipeline_parallel)."""


def on_threads(tensor_parallel: int, pipeline_parallel: int, **knobs: Any) -> EngineConfig:
    """An engine's configuration for so many ranks."""
    return EngineConfig(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        rank_host="thread",
        **{"block_size": 4, "num_blocks": 64} | knobs,
    )


@contextmanager
def while_waiting(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> Iterator[None]:
    """Act once, when the engine has told its ranks what to do and begins to wait for them."""
    listen, acted = RankGroup._listen, []

    def watched(group: RankGroup, *args: Any) -> None:
        if not acted:
            acted.append(True)
            act()
        listen(group, *args)

    with monkeypatch.context() as patch:
        patch.setattr(RankGroup, "_listen", watched)
        yield
    assert acted
