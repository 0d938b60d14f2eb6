"""The KV cache of a parallel engine, as its own process sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdlab.kvcache import PagedKVCache
from pdlab.models.shard_plan import ShardPlan
from pdlab.parallel.commands import ReadCache
from pdlab.parallel.group import RankGroup


class ShardedKVCache(PagedKVCache):
    """Knows the shape of everything and holds nothing: each rank has its layers and heads of it.

    `read` and `raw` ask them, once there are some.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ranks: RankGroup | None = None
        self._plan: ShardPlan | None = None
        self._on_host = False

    def attach(self, ranks: RankGroup, plan: ShardPlan, *, on_host: bool) -> None:
        """Let it ask these ranks."""
        self._ranks, self._plan, self._on_host = ranks, plan, on_host

    def read(self, block_table: list[int], num_tokens: int) -> Tensor:
        [whole] = self._ask(block_table, num_tokens, is_raw=False, layer_dim=1, head_dim=3)
        return whole

    def raw(self, block_table: list[int], num_tokens: int) -> list[Tensor]:
        return self._ask(block_table, num_tokens, is_raw=True, layer_dim=0, head_dim=2)

    def _ask(
        self, table: list[int], num_tokens: int, *, is_raw: bool, layer_dim: int, head_dim: int
    ) -> list[Tensor]:
        """What all ranks have, put together along layers and heads."""
        assert self._ranks
        assert self._plan
        answers = self._ranks.ask(ReadCache(list(table), num_tokens, self._on_host, is_raw))
        size = self._plan.tensor_parallel
        stages = [answers[i : i + size] for i in range(0, len(answers), size)]
        return [
            torch.cat([torch.cat([a[i] for a in stage], head_dim) for stage in stages], layer_dim)
            for i in range(len(answers[0]))
        ]
