"""What goes into the linear layers of a decoder while it reads a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from pdlab.models.decoder import Decoder, DecoderLayer

LINEARS = ("qkv", "output", "gate_up", "down")
"""The linear layers of a `DecoderLayer`, by attribute."""


@torch.no_grad()
def moments(decoder: Decoder, windows: Sequence[Sequence[int]]) -> Iterator[dict[str, Tensor]]:
    """Mean of x^T x over all tokens, float32 [in, in], of what enters each linear layer.

    One dictionary by name (see `LINEARS`) for each layer, and a last one with `head`. Only one
    layer's are held at a time. The decoder is not changed: every layer sees what the unrounded
    ones before it put out.

    Args:
        windows: token ids of stretches of text, each read by itself from position 0.
    """
    hidden = [decoder.embedding[torch.tensor(ids, device=decoder.device)] for ids in windows]
    num_tokens = sum(map(len, hidden))
    for index, layer in enumerate(decoder.layers):
        sums: dict[str, Tensor] = {}
        hooks = [
            getattr(layer, name).register_forward_pre_hook(_adder(sums, name)) for name in LINEARS
        ]
        try:
            hidden = [_through(decoder, layer, index, x) for x in hidden]
        finally:
            for hook in hooks:
                hook.remove()
        yield {name: total / num_tokens for name, total in sums.items()}
    sums = {}
    for x in hidden:
        _adder(sums, "head")(None, (decoder.final_norm(x),))
    yield {"head": sums["head"] / num_tokens}


def _adder(sums: dict[str, Tensor], name: str):  # type: ignore[no-untyped-def]
    """A hook that adds x^T x of a module's input to `sums`."""

    def add(module: object, inputs: tuple[Tensor]) -> None:
        x = inputs[0].float()
        sums[name] = sums[name].addmm_(x.T, x) if name in sums else x.T @ x

    return add


def _through(decoder: Decoder, layer: DecoderLayer, index: int, x: Tensor) -> Tensor:
    """One layer on the hidden states of a whole text, [num_tokens, hidden_size]."""
    q, k, v = layer.project(x, decoder.cos[: len(x)], decoder.sin[: len(x)])
    attended = causal_attention(q, k, v, decoder.config.window(index))
    return layer.mlp(layer.add_attended(x, attended))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Attention of a text over itself; shapes as of `pdlab.models.decoder.Attend`."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.transpose(0, 1) for x in (q, *(y.repeat_interleave(group, dim=1) for y in (k, v))))
    mask = None
    if window is not None and window < q.shape[1]:
        at = torch.arange(q.shape[1], device=q.device)
        behind = at[:, None] - at
        mask = (behind >= 0) & (behind < window)
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return attended.transpose(0, 1)
