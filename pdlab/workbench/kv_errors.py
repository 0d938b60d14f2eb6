"""How far K, V and attention are from what full precision would have given, by layer and head."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdlab.attention import FusedAttention, Window
from pdlab.kvcache import PagedKVCache
from pdlab.models.config import ModelConfig

Errors = NDArray[np.float64]


class KVErrors:
    """Watches forced runs of one configuration; shown every layer of every chunk.

    `k` and `v` compare what the cache returns with what was written to it. `attended` compares what
    attention over the cache returned with attention of the same queries over the same K and V in
    fp32, in full and without a window (but the model's own). So each layer's error is its own: what
    earlier layers did is in q, K and V on both sides.

    All are relative: the length of the difference over the length of the right answer, L2 norms
    over everything that was watched.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self._written: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
        """K and V of the present text, [2, num_tokens, num_kv_heads, head_dim] a chunk."""
        self._sums = {
            name: np.zeros((2, config.num_layers, heads))
            for name, heads in (
                ("k", config.num_kv_heads),
                ("v", config.num_kv_heads),
                ("attended", config.num_heads),
            )
        }
        """Squares of the difference and of the right answer, added up."""

    def __call__(
        self,
        layer: int,
        tensors: dict[str, Tensor],
        kv_cache: PagedKVCache,
        window: Window | None,
    ) -> None:
        written = self._written[layer]
        written.append(torch.stack((tensors["k"], tensors["v"])).float())
        k, v = torch.cat(written, dim=1)
        size = self.config.window(layer)
        own = None if size is None or size >= len(k) else Window(size)
        right = FusedAttention().dense(tensors["q"].float(), k, v, own)
        self._add("attended", layer, tensors["attended"].float(), right)

    def written(self) -> Tensor:
        """K and V of the present text: [2, num_layers, num_tokens, num_kv_heads, head_dim].

        As they were written, in fp32, and laid out as `PagedKVCache.read` does.
        """
        return torch.stack([torch.cat(chunks, dim=1) for chunks in self._written], dim=1)

    def end_text(self, read: Callable[[], Tensor]) -> None:
        """Compare what the cache holds with what was written; the next text begins.

        Args:
            read: K and V as `PagedKVCache.read` gives them, NaN for what was dropped.
        """
        for layer, kv in enumerate(read().float().unbind(1)):
            kept = ~kv[0, :, 0, 0].isnan()
            written = torch.cat(self._written[layer], dim=1)
            for name, stored, right in zip("kv", kv, written, strict=True):
                self._add(name, layer, stored[kept], right[kept])
        self._written = [[] for _ in self._written]

    def relative(self, name: str) -> Errors:
        """Relative L2 errors of `k`, `v` or `attended`, [num_layers, heads]."""
        difference, right = self._sums[name]
        return np.sqrt(np.divide(difference, right, out=np.zeros_like(right), where=right > 0))

    def _add(self, name: str, layer: int, ours: Tensor, right: Tensor) -> None:
        """ours, right: [num_tokens, heads, head_dim]."""
        for total, x in zip(self._sums[name], (ours - right, right), strict=True):
            total[layer] += x.square().sum((0, 2), dtype=torch.float64).cpu().numpy()
