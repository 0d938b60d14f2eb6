"""Packed weights on disk: what takes a minute to find is found once."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import torch
from pdlab_kernels.cpu.weights import Weight
from torch import Tensor

from pdlab.models.cache import (
    FetchError,
    cache_dir,
    is_complete,
    locked,
    new_directory,
    require_space,
)
from pdlab.models.decoder import Decoder
from pdlab.models.safetensors_file import read_tensors
from pdlab.quantize import PackedWeights, matrices, pack_decoder, parse_format

QUANTIZER = 1
"""Part of what names a directory; raise it when other codes come of the same weights, or when they
are laid out in another way."""
FILENAME = "packed.safetensors"


def packed_once(
    decoder: Decoder, format: str, calibration: list[list[int]], *, progress: bool
) -> PackedWeights:
    """`pack_decoder`, with a calibrated format taken from the cache if it is there.

    The directory is named after the model itself, the format and the text, so nothing can be stale.
    A cache that cannot be read or written costs only time.
    """
    directory = _directory(decoder, format, calibration)
    if is_complete(directory):
        with suppress(OSError, ValueError, KeyError):  # damaged, or being replaced
            return _read(directory / FILENAME, decoder, format)
    packed = pack_decoder(decoder, format, calibration=calibration, progress=progress)
    with suppress(FetchError, OSError):
        require_space(packed.nbytes + 1_000_000, "keeping quantized weights")
        with locked("quantize"), new_directory(directory) as scratch:
            _write(scratch / FILENAME, packed)
    return packed


def _directory(decoder: Decoder, format: str, calibration: list[list[int]]) -> Path:
    what = QUANTIZER, format, calibration, decoder.config.to_dict()
    digest = hashlib.sha256(repr(what).encode())
    for parameter in decoder.parameters():  # the norms too: activations depend on them
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return cache_dir() / "models" / f"packed-{digest.hexdigest()[:16]}"


def _write(path: Path, packed: PackedWeights) -> None:
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, weight in packed.named():
        tensors[f"{name}.data"] = torch.from_numpy(weight.data)
        tensors[f"{name}.scales"] = torch.from_numpy(weight.scales)
    save_file(tensors, path)
    path.chmod(0o644)  # save_file makes it private, but a cache may be shared


def _read(path: Path, decoder: Decoder, format: str) -> PackedWeights:
    asked, stored = parse_format(format), dict(read_tensors(path))

    def weight(name: str, like: Tensor) -> Weight:
        kind = asked.head if name == "head" else asked.layers
        parts = (stored[f"{name}.{part}"].numpy() for part in ("data", "scales"))
        return Weight(kind, *like.shape, *parts)

    named = ((name, weight(name, like)) for name, like in matrices(decoder))
    return PackedWeights.from_named(asked.name, named)
