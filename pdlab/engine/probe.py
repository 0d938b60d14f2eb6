"""Looking into a running step: attention weights and intermediate tensors of chosen layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdlab.attention import AttentionInputs, ReferenceAttention, Window, gather_visible
from pdlab.engine.scheduler import ScheduledBatch, ScheduledSequence
from pdlab.kvcache import PagedKVCache
from pdlab.models.config import ModelConfig
from pdlab.trace import Capture

CAPTURED = ("attention", "q", "k", "v", "attended")


@dataclass(frozen=True)
class Probe:
    """What to keep of each step.

    `q`, `k` and `v` are the tensors the step itself used (q and k with their rotary positions),
    `attended` is what its attention returned. `attention` weights are recomputed by the reference
    path, from the step's own q and the K that stands in the cache: a fused kernel never has them in
    one place.

    `heads` are query heads; of `k` and `v` the KV heads are kept that these read.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...]
    names: tuple[str, ...]
    group_size: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        names: Iterable[str] = ("attention",),
    ) -> Probe:
        """A probe for a model; None means every layer, or every head.

        Raises:
            ValueError: there is no such layer, head, or tensor to keep.
        """
        probe = cls(
            layers=tuple(range(config.num_layers) if layers is None else layers),
            heads=tuple(range(config.num_heads) if heads is None else heads),
            names=tuple(names),
            group_size=config.group_size,
        )
        _require_among("layers", probe.layers, range(config.num_layers))
        _require_among("heads", probe.heads, range(config.num_heads))
        _require_among("names", probe.names, CAPTURED)
        return probe

    def heads_of(self, name: str) -> list[int]:
        """Numbers of the heads kept of a tensor."""
        if name in ("k", "v"):
            return sorted({head // self.group_size for head in self.heads})
        return list(self.heads)

    def observe(self, batch: ScheduledBatch, step: int) -> Observer:
        return Observer(self, batch, step)


def _require_among(name: str, values: Iterable[object], known: Sequence[object]) -> None:
    for value in values:
        if value not in known:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(map(str, known))}")


class LayerObserver(Protocol):
    """Shown every layer of a step, right after its attention.

    Args:
        tensors: q, k, v and attended of the whole batch, [num_tokens, heads, head_dim].
    """

    def __call__(
        self,
        layer: int,
        tensors: dict[str, Tensor],
        kv_cache: PagedKVCache,
        window: Window | None,
    ) -> None: ...


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
        tensors: dict[str, Tensor],
        kv_cache: PagedKVCache,
        window: Window | None,
    ) -> None:
        """Take what is asked for from one layer."""
        if layer not in self._probe.layers:
            return
        row = 0
        for part in self._batch.scheduled:
            rows = slice(row, row := row + part.num_tokens)
            for name in self._probe.names:
                heads = self._probe.heads_of(name)
                if name == "attention":
                    weights, positions = part_weights(
                        tensors["q"][rows], part, layer, kv_cache, window
                    )
                    kept = weights.new_zeros(len(heads), part.num_tokens, part.end)
                    kept[:, :, positions] = weights[heads]
                else:
                    kept = tensors[name][rows][:, heads].float()
                self.captures.append(
                    Capture(
                        step=self._step,
                        sequence_id=part.sequence.sequence_id,
                        layer=layer,
                        name=name,  # type: ignore[arg-type]
                        source="reference" if name == "attention" else "engine",
                        start=part.start,
                        heads=heads,
                        array=kept.cpu().numpy().copy(),
                    )
                )


def part_weights(
    q: Tensor,
    part: ScheduledSequence,
    layer: int,
    kv_cache: PagedKVCache,
    window: Window | None,
) -> tuple[Tensor, Tensor]:
    """Attention weights of one sequence's part, and the positions of the keys they are on.

    Returns:
        float32 [num_heads, num_tokens, num_keys] and int64 [num_keys], of the blocks that any of
        the queries sees.
    """
    inputs = AttentionInputs([0, len(q)], [part.end], [part.sequence.block_table])
    keys, _, positions = gather_visible(layer, q, kv_cache, inputs, 0, window)
    if positions is None:
        positions = torch.arange(len(keys), device=q.device)
    return ReferenceAttention().weights(q, keys, window, positions), positions
