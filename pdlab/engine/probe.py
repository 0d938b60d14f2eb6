"""Looking into a running step: attention weights and intermediate tensors of chosen layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from pdlab.attention import ReferenceAttention
from pdlab.engine.scheduler import ScheduledBatch
from pdlab.kvcache import PagedKVCache
from pdlab.models.config import ModelConfig
from pdlab.trace import Capture

CAPTURED = ("attention", "q", "k", "v")


@dataclass(frozen=True)
class Probe:
    """What to keep of each step.

    `q`, `k` and `v` are the tensors the step itself used (q and k with their rotary positions).
    `attention` weights are recomputed by the reference path, from the step's own q and the K that
    stands in the cache: a fused kernel never has them in one place.
    """

    layers: tuple[int, ...]
    names: tuple[str, ...] = ("attention",)

    @classmethod
    def of(cls, config: ModelConfig, layers: Iterable[int] | None, names: Iterable[str]) -> Probe:
        """A probe on layers of a model; None means every layer.

        Raises:
            ValueError: there is no such layer, or no such tensor to keep.
        """
        chosen = tuple(range(config.num_layers) if layers is None else layers)
        for layer in chosen:
            if not 0 <= layer < config.num_layers:
                raise ValueError(f"layers: {layer} is not one of 0 to {config.num_layers - 1}")
        for name in (names := tuple(names)):
            if name not in CAPTURED:
                raise ValueError(f"names: {name!r} is not one of {', '.join(CAPTURED)}")
        return cls(chosen, names)

    def observe(self, batch: ScheduledBatch, step: int) -> Observer:
        return Observer(self, batch, step)


class Observer:
    """Keeps what one step shows the probe."""

    def __init__(self, probe: Probe, batch: ScheduledBatch, step: int):
        self.captures: list[Capture] = []
        self._probe = probe
        self._batch = batch
        self._step = step

    def __call__(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: PagedKVCache,
        window: int | None,
    ) -> None:
        """Take what is asked for from one layer's q, k, v of the whole batch."""
        if layer not in self._probe.layers:
            return
        row = 0
        for part in self._batch.scheduled:
            rows = slice(row, row := row + part.num_tokens)
            for name in self._probe.names:
                if name == "attention":
                    table = torch.tensor(part.sequence.block_table, device=q.device)
                    keys, _ = kv_cache.gather(layer, table, q.dtype)
                    kept = ReferenceAttention().weights(q[rows], keys[: part.end], window)
                else:
                    kept = {"q": q, "k": k, "v": v}[name][rows].float()
                self.captures.append(
                    Capture(
                        step=self._step,
                        request_id=part.sequence.request_id,
                        layer=layer,
                        name=name,  # type: ignore[arg-type]
                        source="reference" if name == "attention" else "engine",
                        start=part.start,
                        array=kept.cpu().numpy().copy(),
                    )
                )
