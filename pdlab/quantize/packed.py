"""A decoder's weights in a format that kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np
import torch
from pdlab_kernels.cpu.weights import GROUP, Format, Weight, pack, pack_int4, unpack
from torch import Tensor
from tqdm.auto import tqdm

from pdlab.quantize.calibration import LINEARS, moments
from pdlab.quantize.formats import Method, parse_format
from pdlab.quantize.gptq import gptq
from pdlab.quantize.groups import fitted_grid

if TYPE_CHECKING:
    from pdlab.models.decoder import Decoder


@dataclass(frozen=True, eq=False)
class PackedLayer:
    """The linear layers of one decoder layer; biases and norms stay in the decoder.

    `qkv` has the rows of q, k and v one after the other, in Hugging Face's order; `gate_up` those
    of gate, then of up.
    """

    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight


@dataclass(frozen=True, eq=False)
class PackedWeights:
    """All matrices that a decoding step multiplies with.

    Attributes:
        format: its name, see `formats`; or `file` for the blocks of a GGUF file.
        head: with tied embeddings this is the embedding too. An embedding of its own is not
            packed: a step reads only a row of it for each token.
    """

    format: str
    layers: list[PackedLayer]
    head: Weight

    @property
    def nbytes(self) -> int:
        """Bytes of all of them, which a step with one row reads once."""
        return self.layer_bytes + self.head.nbytes

    @property
    def layer_bytes(self) -> int:
        """The same without the head."""
        return sum(weight.nbytes for name, weight in self.named() if name != "head")

    def named(self) -> Iterator[tuple[str, Weight]]:
        """(name, weight) of each: `layers.0.qkv`, ..., `head`."""
        for index, layer in enumerate(self.layers):
            for name in LINEARS:
                yield f"layers.{index}.{name}", getattr(layer, name)
        yield "head", self.head

    @classmethod
    def from_named(cls, format: str, weights: Iterable[tuple[str, Weight]]) -> PackedWeights:
        """The reverse of `named`."""
        *linears, (_, head) = weights
        several = [weight for _, weight in linears]
        starts = range(0, len(several), len(LINEARS))
        return cls(format, [PackedLayer(*several[i : i + len(LINEARS)]) for i in starts], head)


def matrices(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(name, weight) of the decoder's matrices, named and ordered as in `PackedWeights.named`."""
    for index, layer in enumerate(decoder.layers):
        for name in LINEARS:
            yield f"layers.{index}.{name}", getattr(layer, name).weight
    yield "head", decoder.head


def pack_decoder(
    decoder: Decoder,
    format: str,
    *,
    calibration: Sequence[Sequence[int]] = (),
    progress: bool = False,
) -> PackedWeights:
    """Quantize and pack the weights of a decoder, which keeps its own (`fp32` shares its memory).

    Args:
        format: see `formats`.
        calibration: token ids of stretches of text, for formats that look at activations.

    Raises:
        ValueError: the format is unknown or needs calibration, or a matrix cannot be packed.
    """
    asked = parse_format(format)
    if asked.is_calibrated and not calibration:
        raise ValueError(f"calibration is empty, which weights={format!r} cannot do without")
    seen = _by_matrix(moments(decoder, calibration)) if asked.is_calibrated else repeat(None)
    pairs = zip(matrices(decoder), seen, strict=False)
    packed = []
    with tqdm(pairs, f"to {asked.name}", 4 * len(decoder.layers) + 1, disable=not progress) as bar:
        for (name, weight), second in bar:
            kind = asked.head if name == "head" else asked.layers
            try:
                packed.append((name, pack_matrix(weight, kind, asked.method, second)))
            except ValueError as error:
                raise ValueError(f"weights={format!r} does not fit {name}: {error}") from error
    return PackedWeights.from_named(asked.name, packed)


def _by_matrix(seen: Iterator[dict[str, Tensor]]) -> Iterator[Tensor]:
    for layer in seen:
        yield from (layer[name] for name in (*LINEARS, "head") if name in layer)


def pack_matrix(
    weight: Tensor, format: Format, method: Method = "nearest", moments: Tensor | None = None
) -> Weight:
    """Quantize and pack a matrix [out, in].

    Args:
        method: for `int4`.
        moments: [in, in], for the method `gptq`.

    Raises:
        ValueError: see `pdlab_kernels.cpu.weights.pack`.
    """
    nearest = pack(weight, format)
    if format != "int4" or method == "nearest" or torch.equal(unpack(nearest), weight):
        return nearest
    if method == "fit":
        groups = weight.detach().reshape(-1, GROUP)
        grid = fitted_grid(groups, torch.ones(()))
        codes = grid.codes(groups)
        parts = codes.view_as(weight), *(x.view(len(weight), -1) for x in grid)
    elif moments is None:
        raise ValueError(f"method={method!r} needs moments")
    else:
        parts = gptq(weight.detach(), moments)
    kinds = np.uint8, np.float16, np.float16
    return pack_int4(*(x.numpy().astype(kind) for x, kind in zip(parts, kinds, strict=True)))


@torch.no_grad()
def fill_decoder(decoder: Decoder, packed: PackedWeights) -> None:
    """Give a decoder in float32 exactly the values that packed weights stand for."""
    for (_, target), (_, weight) in zip(matrices(decoder), packed.named(), strict=True):
        target.copy_(unpack(weight))
