"""Whether exact mode can keep its promise for a model on this processor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pdlab.attention import QUERY_TILE, ExactAttention
from pdlab.models import Model

NUM_KEYS = 96
"""Context of the attention that is tried: more than one tile of keys."""


def check_rows_are_alike(model: Model, row_tile: int) -> None:
    """Verify, on the model's own weights, that a row's place in a tile does not change its bits.

    Exact mode gives every matrix product the same number of rows. That makes a row's result
    independent of its batch only if the library treats all rows of a product alike. For the sizes
    of real models it does; for very small or odd ones it may not.

    Raises:
        ValueError: a row's bits depend on its place.
    """
    for weight in _one_of_each_shape(model):
        row = _numbers(1, weight.shape[1], like=weight)
        product = F.linear(row.repeat(row_tile, 1), weight)
        if not torch.equal(product, product[:1].expand_as(product)):
            raise _cannot(model, f"a matrix product with a weight of {tuple(weight.shape)}")
    if not _attention_rows_are_alike(model):
        raise _cannot(model, f"attention with head_dim={model.config.head_dim}")


def _one_of_each_shape(model: Model) -> list[Tensor]:
    weights = [model.decoder.head]
    for layer in model.decoder.layers:
        weights += [m.weight for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return list({weight.shape: weight for weight in weights}.values())


def _attention_rows_are_alike(model: Model) -> bool:
    """Whether each query of a full tile gets the same bits alone."""
    c = model.config
    head = model.decoder.head
    q = _numbers(QUERY_TILE, c.q_size, like=head).view(-1, c.num_heads, c.head_dim)
    k = _numbers(NUM_KEYS, c.kv_size, like=head).view(-1, c.num_kv_heads, c.head_dim)
    v = k.flip(0).contiguous()
    attention, first = ExactAttention(), NUM_KEYS - QUERY_TILE
    together = attention.dense(q, k, v)
    return all(
        torch.equal(attention.dense(q[i : i + 1], k[: first + i + 1], v[: first + i + 1])[0], row)
        for i, row in enumerate(together)
    )


def _numbers(rows: int, columns: int, like: Tensor) -> Tensor:
    """Fixed numbers whose products and sums round, [rows, columns]."""
    flat = torch.arange(rows * columns, dtype=like.dtype, device=like.device)
    return (flat * 0.7).sin().view(rows, columns)


def _cannot(model: Model, where: str) -> ValueError:
    return ValueError(
        f"exact=True cannot be kept for {model.name} on this processor: in {where}, "
        "the last bits of a row depend on its place among the rows"
    )
