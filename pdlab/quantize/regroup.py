"""The same model with its channels in another order, so that other weights share a group.

Quantizing a model that comes from a 4-bit file to 4 bits finds that file's grids again and loses
nothing, which says nothing about other models. A decoder computes the same function when the
channels of its residual stream, of each MLP and of each head's values are put in another order,
with the columns and rows that belong to them; but the groups of 32 inputs are then other ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pdlab.models.decoder import Decoder, DecoderLayer


@torch.no_grad()
def regroup(decoder: Decoder, seed: int = 0) -> None:
    """Shuffle the channels of a decoder in place."""
    generator = torch.Generator().manual_seed(seed)
    stream = torch.randperm(decoder.config.hidden_size, generator=generator)
    _take(decoder.final_norm.weight, stream)
    for matrix in {id(x): x for x in (decoder.embedding, decoder.head)}.values():
        _take(matrix, stream, dim=1)
    for layer in decoder.layers:
        _regroup_layer(layer, stream, generator)


def _regroup_layer(layer: DecoderLayer, stream: Tensor, generator: torch.Generator) -> None:
    c = layer.config
    inner = torch.randperm(c.intermediate_size, generator=generator)
    values = [torch.randperm(c.head_dim, generator=generator) for _ in range(c.num_kv_heads)]
    attended = [c.head_dim * i + values[i // c.group_size] for i in range(c.num_heads)]
    v = [c.q_size + c.kv_size + c.head_dim * i + order for i, order in enumerate(values)]
    q_and_k = torch.arange(c.q_size + c.kv_size)
    for norm in (layer.input_norm, layer.mlp_norm):
        _take(norm.weight, stream)
    for linear, rows, columns in (
        (layer.qkv, torch.cat((q_and_k, *v)), stream),
        (layer.output, stream, torch.cat(attended)),
        (layer.gate_up, torch.cat((inner, inner + c.intermediate_size)), stream),
        (layer.down, stream, inner),
    ):
        _take(linear.weight, rows)
        _take(linear.weight, columns, dim=1)
        if linear.bias is not None:
            _take(linear.bias, rows)


def _take(values: Tensor, order: Tensor, dim: int = 0) -> None:
    values.copy_(values.index_select(dim, order))
