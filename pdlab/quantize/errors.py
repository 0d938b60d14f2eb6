"""How far packed weights are from the ones they were made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pdlab_kernels.cpu.weights import Weight, unpack
from torch import Tensor

from pdlab.quantize.calibration import LINEARS
from pdlab.quantize.packed import PackedWeights, matrices

if TYPE_CHECKING:
    from pdlab.models.decoder import Decoder


def relative_error(pairs: Iterable[tuple[Tensor, Weight]]) -> float:
    """Size of the error of packed matrices, over the size of what they were (Frobenius norms)."""
    error = size = 0.0
    for weight, packed in pairs:
        error += float((unpack(packed) - weight).square().sum())
        size += float(weight.square().sum())
    return (error / size) ** 0.5 if size else 0.0


def relative_errors(decoder: Decoder, packed: PackedWeights) -> dict[str, float]:
    """The same over all layers, by what the matrix is: `qkv`, ..., `down`, and `head`."""
    pairs: dict[str, list[tuple[Tensor, Weight]]] = {name: [] for name in (*LINEARS, "head")}
    for (name, weight), (_, found) in zip(matrices(decoder), packed.named(), strict=True):
        pairs[name.rpartition(".")[2]].append((weight, found))
    return {name: relative_error(several) for name, several in pairs.items()}
