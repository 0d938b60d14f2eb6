"""What goes into the linear layers of a decoder while it reads a text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from pdlab.models.decoder import Decoder, DecoderLayer

LINEARS = ("qkv", "output", "gate_up", "down")
"""The linear layers of a `DecoderLayer`, by attribute."""


@torch.no_grad()
def moments(
    decoder: Decoder, windows: Sequence[Sequence[int]], names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """(name, mean of x^T x over all tokens) of what enters the matrices called `names`.

    Float32 [in, in]; in the order of `pdlab.quantize.matrices`, and only one layer's are held at a
    time. The decoder is not changed: every layer sees what the unrounded ones before it put out.

    Args:
        windows: token ids of stretches of text, each read by itself from position 0.
    """
    hidden = [decoder.embedding[torch.tensor(ids, device=decoder.device)] for ids in windows]
    num_tokens = sum(map(len, hidden))
    for index, layer in enumerate(decoder.layers):
        sums: dict[str, Tensor] = {}
        hooks = [
            getattr(layer, part).register_forward_pre_hook(_adder(sums, name))
            for part in LINEARS
            if (name := f"layers.{index}.{part}") in names
        ]
        try:
            hidden = [_through(decoder, layer, index, x) for x in hidden]
        finally:
            for hook in hooks:
                hook.remove()
        for name, total in sums.items():
            yield name, total / num_tokens
    if "head" in names:
        sums = {}
        add = _adder(sums, "head")
        for x in hidden:
            add(None, (decoder.final_norm(x),))
        yield "head", sums["head"] / num_tokens


def _adder(sums: dict[str, Tensor], name: str) -> Callable[[Any, tuple[Tensor]], None]:
    """A hook that adds x^T x of a module's input x to `sums`."""

    def add(module: Any, inputs: tuple[Tensor]) -> None:
        x = inputs[0]
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
