"""`load`: a name becomes a model that is ready to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path

import torch

from pdlab.models import catalog, checkpoint
from pdlab.models.cache import is_complete, locked, new_directory, require_space
from pdlab.models.calibration_text import calibration_windows
from pdlab.models.config import ModelConfig
from pdlab.models.decoder import Decoder
from pdlab.models.fetch import SMOLLM2_WHEEL, fetch_model_file
from pdlab.models.gguf import config_from_gguf, weights_from_gguf
from pdlab.models.gguf_file import GGUFFile
from pdlab.models.gguf_packed import FILE, packed_from_gguf
from pdlab.models.gguf_tokenizer import tokenizer_from_gguf, tokenizer_settings
from pdlab.models.hub import fetch_from_hub, is_hub_id
from pdlab.models.packed_cache import packed_once
from pdlab.models.random_weights import random_weights
from pdlab.models.tokenizer import Tokenizer, tokenizer_from_directory, tokenizer_from_settings
from pdlab.quantize import (
    PackedWeights,
    WeightFormat,
    fill_decoder,
    pack_decoder,
    parse_format,
)

DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}
AUTO = "auto"
"""The value of `weights` that asks for the plain dtype."""
CPU = torch.device("cpu")
NOWHERE = torch.device("meta")
"""Tensors there have a shape and no content."""


@dataclass(frozen=True, eq=False)
class Model:
    """Weights ready to compute with, and what is known about them.

    Attributes:
        decoder: where there are `packed` weights its matrices hold exactly what those stand for, so
            that torch computes the same model as the kernels that read them.
        tokenizer: None for random weights, which speak no language.
        device: what computes; an outline's decoder has no content on any.
        source: where the weights come from: a path, a hub id, or a description.
        license: of the weights, as far as the source says it.
    """

    name: str
    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer | None
    device: torch.device
    dtype: torch.dtype
    source: str
    license: str
    packed: PackedWeights | None = None

    @property
    def outline(self) -> Model:
        """The same without weights and tokenizer: small enough to send."""
        decoder = Decoder(self.config, self.dtype, NOWHERE)
        return replace(self, decoder=decoder, tokenizer=None, packed=None)

    @property
    def has_weights(self) -> bool:
        """Whether it can compute, or is an outline only."""
        return self.decoder.device != NOWHERE

    @property
    def weights(self) -> str:
        """The format of the weights: that of `packed`, else the name of the dtype."""
        return self.packed.format if self.packed else self.dtype_name

    @property
    def dtype_name(self) -> str:
        """`fp32`, `bf16` or `fp16`: how engine and cost model call the dtype of the weights."""
        return next(name for name, dtype in DTYPES.items() if dtype is self.dtype)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in their format; tied embeddings count once."""
        embedding = 0 if self.config.tie_word_embeddings else self.decoder.embedding.nbytes
        return self._layer_bytes + embedding + self._head_bytes

    @property
    def weight_element_bytes(self) -> float:
        """Mean bytes of a weight outside embedding and head."""
        return self._layer_bytes / sum(x.numel() for x in self._layer_weights)

    @property
    def head_element_bytes(self) -> float:
        """Mean bytes of a weight of the head."""
        return self._head_bytes / self.decoder.head.numel()

    @property
    def _layer_weights(self) -> list[torch.Tensor]:
        d = self.decoder
        return [x for x in d.parameters() if x is not d.embedding and x is not d.head]

    @property
    def _layer_bytes(self) -> int:
        if self.packed is None:
            return sum(x.nbytes for x in self._layer_weights)
        return self.packed.layer_bytes + sum(x.nbytes for x in self._layer_weights if x.ndim == 1)

    @property
    def _head_bytes(self) -> int:
        return self.packed.head.nbytes if self.packed else self.decoder.head.nbytes


def load(
    name: str | PathLike[str] = catalog.DEFAULT_MODEL,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    weights: str = AUTO,
    progress: bool = True,
) -> Model:
    """Load a model by name.

    Args:
        name: `smollm2-135m` (fetched once, then offline); `random:SHAPE` (see `catalog`); the path
            of a GGUF file or of a Hugging Face model directory; or a hub id, `org/model`.
        dtype: of the computation, and of weights that are not packed; float32 on a CPU and
            bfloat16 on a GPU unless given.
        weights: `auto` for the dtype itself; a format to quantize to, such as `int8`, `int4` or
            `int4:gptq` (see `pdlab.quantize.formats`); or `file` for the blocks of a GGUF file,
            `Q4_0`, `Q4_1` or `Q8_0`, as they are. Packed weights are for the CPU, in float32.
        progress: show a bar while fetching, converting and quantizing.

    Raises:
        ValueError: the name, device, dtype or weights are unknown, do not go together, or the model
            needs what is not supported.
        FetchError: the model has to be fetched and cannot be.
    """
    if not isinstance(weights, str):
        raise ValueError(f"weights={weights!r:.60} must be the name of a format")
    target = _device(device)
    kind = _dtype(weights if dtype is None and weights in DTYPES else dtype, target)
    if weights == AUTO or DTYPES.get(weights) == kind:
        return _load(name, target, kind, progress)
    _check_packable(weights, target, kind)
    if weights == FILE:
        file = GGUFFile(_gguf_path(name, progress))
        model = _load(name, target, kind, progress)
        return replace(model, packed=packed_from_gguf(file, model.config))
    model = _load(name, target, kind, progress)
    packed = _quantized(model, parse_format(weights), progress)
    fill_decoder(model.decoder, packed)
    return replace(model, packed=packed)


def load_outline(
    name: str | PathLike[str] = catalog.DEFAULT_MODEL,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | str | None = None,
    progress: bool = True,
) -> Model:
    """A model without its weights, for who needs its tokenizer and its limits only: a router, or an
    engine of several ranks, which load their shares themselves.

    Args:
        name, progress: as of `load`. What has to be fetched is fetched whole.
        device, dtype: as of `load`, of those ranks.

    Raises:
        ValueError, FetchError: as `load`.
    """
    target = _device(device)
    found = _found(name, progress)
    return found.model(fspath(name), Decoder(found.config, _dtype(dtype, target), NOWHERE), target)


def weights_by_name(
    name: str | PathLike[str], dtype: torch.dtype, device: torch.device
) -> Iterable[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) of every weight of a model, one at a time, for who keeps a part.

    Args:
        name: as of `load`.
        dtype, device: where weights are not stored but drawn, as they are drawn for these.

    Raises:
        ValueError, FetchError: as `load`.
    """
    return _found(name, progress=False).weights(dtype, device)


def _load(
    name: str | PathLike[str], target: torch.device, kind: torch.dtype, progress: bool
) -> Model:
    found = _found(name, progress)
    model = found.model(fspath(name), Decoder(found.config, kind, target), target)
    model.decoder.load_weights(found.weights(kind, target))
    return model


@dataclass(frozen=True)
class _Found:
    """What a name stands for; nothing big is read yet."""

    config: ModelConfig
    weights: Callable[[torch.dtype, torch.device], Iterable[tuple[str, torch.Tensor]]]
    tokenizer: Callable[[], Tokenizer | None]
    source: str
    license: str = "see source"

    def model(self, name: str, decoder: Decoder, device: torch.device) -> Model:
        return Model(
            name,
            self.config,
            decoder,
            self.tokenizer(),
            device,
            decoder.dtype,
            self.source,
            self.license,
        )


def _found(name: str | PathLike[str], progress: bool) -> _Found:
    if not isinstance(name, str | PathLike):
        raise ValueError(f"name={name!r} must be a name or a path")
    name = fspath(name)
    if name == catalog.DEFAULT_MODEL:
        source = f"{SMOLLM2_WHEEL.member} from {SMOLLM2_WHEEL.requirement}"
        return _in_directory(default_model_directory(progress=progress), source, "Apache-2.0")
    if name.startswith(catalog.RANDOM):
        return _at_random(name)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _in_directory(path, str(path))
    if path.is_file():
        return _in_gguf(path)
    if is_hub_id(name) and path.suffix != ".gguf":
        return _in_directory(fetch_from_hub(name), f"hub: {name}")
    raise ValueError(
        f"no model is called {name!r}, and no such file or directory exists. Known names: "
        f"{', '.join(entry.name for entry in catalog.available())}"
    )


def _check_packable(weights: str, device: torch.device, dtype: torch.dtype) -> None:
    if weights in DTYPES:
        raise ValueError(f"weights={weights!r} is not dtype={dtype}; give one of the two")
    if weights != FILE:
        parse_format(weights)
    if device.type != "cpu" or dtype != torch.float32:
        raise ValueError(
            f"weights={weights!r} needs device='cpu' and dtype='fp32', not {device} and {dtype}"
        )


def _gguf_path(name: str | PathLike[str], progress: bool) -> Path:
    """The GGUF file that a name stands for."""
    if name == catalog.DEFAULT_MODEL:
        return fetch_model_file(SMOLLM2_WHEEL, progress=progress)
    if isinstance(name, str | PathLike) and (path := Path(name).expanduser()).is_file():
        return path
    raise ValueError(
        f"weights={FILE!r} needs a model that comes as a GGUF file: {catalog.DEFAULT_MODEL} or the "
        f"path of such a file, not name={name!r}. Quantize it instead, say weights='int8'."
    )


def _quantized(model: Model, asked: WeightFormat, progress: bool) -> PackedWeights:
    if not asked.is_calibrated:
        return pack_decoder(model.decoder, asked.name, progress=progress)
    windows = calibration_windows(model.tokenizer, model.config)
    return packed_once(model.decoder, asked.name, windows, progress=progress)


def default_model_directory(*, progress: bool = True) -> Path:
    """The default model as a directory that transformers can load too; made on first use.

    Raises:
        FetchError: it has to be fetched and cannot be, or the disk is full.
    """
    directory = catalog.converted_directory()
    if not is_complete(directory):
        source = fetch_model_file(SMOLLM2_WHEEL, progress=progress)
        with locked("convert"):
            if not is_complete(directory):  # another process may have made it meanwhile
                size_bytes = catalog.shape(catalog.DEFAULT_MODEL).num_parameters * 4
                require_space(size_bytes + 20_000_000, "converting the model")
                with new_directory(directory) as scratch:
                    checkpoint.write_from_gguf(source, scratch, progress=progress)
    return directory


def _in_directory(directory: Path, source: str, license: str = "see source") -> _Found:
    config = checkpoint.config_from_directory(directory)
    return _Found(
        config,
        lambda dtype, device: checkpoint.weights_from_directory(directory),
        lambda: tokenizer_from_directory(directory, config.eos_token_ids),
        source,
        license,
    )


def _in_gguf(path: Path) -> _Found:
    """Dequantized in memory: nothing is written, and a GGUF file may be bigger than the cache."""
    file = GGUFFile(path)
    config = config_from_gguf(file)
    return _Found(
        config,
        lambda dtype, device: weights_from_gguf(file, config),
        lambda: tokenizer_from_settings(
            tokenizer_from_gguf(file.metadata),
            tokenizer_settings(file.metadata),
            config.eos_token_ids,
        ),
        str(path),
        file.metadata.get("general.license", "see source"),
    )


def _at_random(name: str) -> _Found:
    config = catalog.shape(name.removeprefix(catalog.RANDOM))
    return _Found(
        config,
        lambda dtype, device: random_weights(config, dtype, device),
        lambda: None,
        "drawn at random",
        "none",
    )


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is not a device: {error}") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device={str(device)!r} is not supported; use cpu or cuda")
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r}, but torch finds no CUDA GPU here")
    return found


def _dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ValueError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    return found
