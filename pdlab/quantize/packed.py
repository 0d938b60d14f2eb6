"""A decoder's weights in a format that kernels read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from pdlab_kernels.cpu.weights import Weight, pack, pack_int4, unpack
from torch import Tensor
from tqdm.auto import tqdm

from pdlab.quantize.calibration import LINEARS, moments
from pdlab.quantize.formats import parse_format
from pdlab.quantize.gptq import gptq

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
    weights, packed = dict(matrices(decoder)), {}
    hidden = not progress
    for name, weight in tqdm(weights.items(), f"to {asked.name}", unit="matrix", disable=hidden):
        try:
            packed[name] = pack(weight, asked.head if name == "head" else asked.layers)
        except ValueError as error:
            raise ValueError(f"weights={format!r} does not fit {name}: {error}") from error
    if asked.is_calibrated:
        # a weight from a 4-bit file lies on the nearest grid already and is left there
        four = {name for name, weight in packed.items() if weight.format == "int4"}
        rough = {name for name in four if not torch.equal(unpack(packed[name]), weights[name])}
        seen = moments(decoder, calibration, rough) if rough else ()
        for name, second in tqdm(seen, "gptq", len(rough), unit="matrix", disable=hidden):
            packed[name] = pack_gptq(weights[name], second)
    return PackedWeights.from_named(asked.name, packed.items())


def pack_gptq(weight: Tensor, moments: Tensor) -> Weight:
    """Quantize to `int4` as `gptq` does, and pack; see there."""
    codes, scales, minima = (x.numpy() for x in gptq(weight.detach(), moments))
    half = np.float16
    return pack_int4(codes.astype(np.uint8), scales.astype(half), minima.astype(half))


@torch.no_grad()
def fill_decoder(decoder: Decoder, packed: PackedWeights) -> None:
    """Give a decoder in float32 exactly the values that packed weights stand for."""
    for (_, target), (_, weight) in zip(matrices(decoder), packed.named(), strict=True):
        target.copy_(unpack(weight))
