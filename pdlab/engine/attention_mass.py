"""How much attention each KV block receives: what H2O decides by."""

from __future__ import annotations

import torch
from torch import Tensor

from pdlab.attention import Window
from pdlab.engine.probe import part_weights
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.kvcache import PagedKVCache


class AttentionMass:
    """Adds up the attention weights that a step puts on each block, over layers, heads and queries.

    Zhang et al. 2023, "H2O: Heavy-Hitter Oracle", section 4: a token's score is the sum of the
    attention it has received. H2O keeps a set of tokens for each head; here whole blocks are kept,
    the same for all layers and heads, because blocks are what the pool can give back. The weights
    are recomputed by the reference path: fused attention has none.
    """

    def __init__(self, batch: ScheduledBatch, block_size: int):
        self._batch = batch
        self._block_size = block_size
        self._mass = [torch.zeros(len(p.sequence.block_table)) for p in batch.scheduled]

    @property
    def block_mass(self) -> dict[str, list[float]]:
        """Attention received in this step, by sequence id, for each block of its table."""
        parts = zip(self._batch.scheduled, self._mass, strict=True)
        return {part.sequence.sequence_id: mass.tolist() for part, mass in parts}

    def __call__(
        self,
        layer: int,
        tensors: dict[str, Tensor],
        kv_cache: PagedKVCache,
        window: Window | None,
    ) -> None:
        row = 0
        for part, mass in zip(self._batch.scheduled, self._mass, strict=True):
            q = tensors["q"][row : (row := row + part.num_tokens)]
            weights, positions = part_weights(q, part, layer, kv_cache, window)
            received = weights.sum((0, 1)).cpu()
            mass.index_add_(0, (positions // self._block_size).cpu(), received)
