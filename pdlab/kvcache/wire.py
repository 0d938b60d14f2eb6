"""K and V on their way from one cache to another: in which numbers they travel, and in what order.

    payload = layer | layer | ...      layer = K | V
    K or V  = codes | scales | zeros                          of a token-wise format
            = codes | scales | zeros | tokens in fp32         of a block-wise one: full blocks, then
                                                              the tokens of the block still filling

each part in the order of tokens, then heads. Nothing of it tells in which blocks, or in how many
groups of heads, either side keeps them. What is scaled token by token travels in whichever format
of the two sides is smaller: who narrows does it before sending, who widens after receiving. A scale
of a block means nothing without its block, so block-wise formats travel as they are between equal
block sizes, and as the values they stand for otherwise. In any case the receiver stores what it
would have stored of the values that the sender has.

Here is what travels; `packing.py` has the bytes, and `pdlab.disagg` moves them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from pdlab.kvcache.formats import KVFormat, parse_kv_format
from pdlab.kvcache.paged import PagedKVCache

FP32 = KVFormat("fp32")


@dataclass(frozen=True)
class KVLayout:
    """What two caches must know of each other; plain data.

    `kv_format` is brought to one spelling: `int8:token:64` is `int8:token` if a head has 64
    channels.

    Raises:
        ValueError: the format does not fit, or a number is below 1.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_format: str = "fp32"
    head_groups: int = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "kv_format" and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.num_kv_heads % self.head_groups:
            raise ValueError(
                f"head_groups={self.head_groups} must divide num_kv_heads={self.num_kv_heads}"
            )
        object.__setattr__(self, "kv_format", _text(self.formats))

    @classmethod
    def of(cls, cache: PagedKVCache) -> KVLayout:
        c, formats = cache.config, _text((cache.k_format, cache.v_format))
        return cls(
            c.num_layers, c.num_kv_heads, c.head_dim, cache.block_size, formats, cache.head_groups
        )

    @property
    def formats(self) -> tuple[KVFormat, KVFormat]:
        """Of K and of V."""
        k, v = (
            replace(each, group=None) if each.group == self.head_dim else each
            for each in parse_kv_format(self.kv_format, self.head_dim)
        )
        return k, v


@dataclass(frozen=True)
class Route:
    """The formats of K, or of V: where it is stored, as it travels, and where it will be stored."""

    sender: KVFormat
    wire: KVFormat
    receiver: KVFormat


@dataclass(frozen=True)
class Wire:
    """How K and V travel from a cache of one layout to a cache of another."""

    sender: KVLayout
    receiver: KVLayout

    @classmethod
    def between(cls, sender: KVLayout, receiver: KVLayout) -> Wire:
        """Choose the formats.

        Raises:
            ValueError: the two caches are not of one model's shape.
        """
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            ours, theirs = getattr(sender, name), getattr(receiver, name)
            if ours != theirs:
                raise ValueError(f"{name}={ours} of the sender is {theirs} at the receiver")
        return cls(sender, receiver)

    @cached_property
    def routes(self) -> tuple[Route, Route]:
        """Of K and of V."""
        k, v = map(self._route, self.sender.formats, self.receiver.formats)
        return k, v

    def _route(self, ours: KVFormat, theirs: KVFormat) -> Route:
        same_blocks = self.sender.block_size == self.receiver.block_size
        if ours == theirs and ours.is_blockwise and same_blocks:
            return Route(ours, ours, theirs)
        tokenwise = [each for each in (ours, theirs) if not each.is_blockwise]
        return Route(ours, min(tokenwise, key=self._token_bytes, default=FP32), theirs)

    def _token_bytes(self, kv_format: KVFormat) -> int:
        """Of one head of a token."""
        return sum(width for _, width in self._parts(kv_format, 1))

    @property
    def can_stream(self) -> bool:
        """Whether a layer can leave as soon as it is written: blocks are quantized after a step."""
        return not any(route.sender.is_blockwise for route in self.routes)

    def settled(self, num_tokens: int) -> int:
        """How many of a sender's tokens are stored as they will stay while it computes more.

        A range that is not the last of a transfer must end here, or the values of an open block
        travel that is quantized later.
        """
        return num_tokens if self.can_stream else num_tokens - num_tokens % self.sender.block_size

    def num_bytes(self, num_tokens: int, num_layers: int | None = None) -> int:
        """Bytes of K and V of so many tokens, of all layers or of `num_layers`.

        Where blocks travel, the tokens begin with a block, and the last, incomplete one is in fp32.
        """
        if num_tokens < 0:
            raise ValueError(f"num_tokens={num_tokens} must be at least 0")
        parts = [part for route in self.routes for part in self._parts(route.wire, num_tokens)]
        layers = self.sender.num_layers if num_layers is None else num_layers
        return layers * self.sender.num_kv_heads * sum(rows * width for rows, width in parts)

    def views(self, payload: Tensor, num_tokens: int) -> tuple[list[Tensor], list[Tensor]]:
        """The parts of K, and of V, in a payload: [num_layers, rows, num_kv_heads, bytes] each."""
        heads, at = self.sender.num_kv_heads, 0
        layers = payload.view(-1, self.num_bytes(num_tokens, 1))
        k: list[Tensor] = []
        v: list[Tensor] = []
        for route, views in zip(self.routes, (k, v), strict=True):
            for rows, width in self._parts(route.wire, num_tokens):
                end = at + rows * heads * width
                views.append(layers[:, at:end].unflatten(1, (rows, heads, width)))
                at = end
        return k, v

    def _parts(self, kv_format: KVFormat, num_tokens: int) -> list[tuple[int, int]]:
        """What travels of a head in a layer: (rows, bytes of a row) of each part.

        A row is a token, or a block if its scale belongs to all of the block.
        """
        size, dim = self.sender.block_size, self.sender.head_dim
        if not kv_format.is_blockwise:
            return [(num_tokens, _bytes(*part)) for part in kv_format.parts(1, 1, dim)]
        blocks, rest = divmod(num_tokens, size)
        parts = kv_format.parts(size, 1, dim)
        full = [(blocks * shape[0], _bytes(shape[1:], dtype)) for shape, dtype in parts]
        return [*full, (rest, _bytes((dim,), torch.float32))]

    def __str__(self) -> str:
        """As stored, as they travel, as stored then, equal neighbours once: `int4 -> fp32`."""
        k, v = self.routes
        stages = [(k.sender, v.sender), (k.wire, v.wire), (k.receiver, v.receiver)]
        return " -> ".join(text for text, _ in groupby(map(_text, stages)))


def _text(formats: tuple[KVFormat, KVFormat]) -> str:
    k, v = map(str, formats)
    return k if k == v else f"{k}/{v}"


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
