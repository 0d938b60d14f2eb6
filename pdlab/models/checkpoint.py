"""Model directories as Hugging Face lays them out: config.json, *.safetensors, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from pdlab.models.config import ModelConfig
from pdlab.models.gguf import config_from_gguf, weights_from_gguf
from pdlab.models.gguf_file import GGUFFile
from pdlab.models.gguf_tokenizer import tokenizer_from_gguf, tokenizer_settings
from pdlab.models.hf_config import config_from_hf, config_to_hf
from pdlab.models.safetensors_file import read_tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def config_from_directory(directory: Path) -> ModelConfig:
    """The shape that config.json describes, with the end tokens of generation_config.json.

    Raises:
        ValueError: no config.json, or what it asks for is not supported.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json, so it is not a model directory")
    generation = directory / "generation_config.json"
    return config_from_hf(
        json.loads(path.read_text()),
        json.loads(generation.read_text()) if generation.is_file() else None,
    )


def weights_from_directory(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight, one at a time.

    Raises:
        ValueError: there are no safetensors, the index names a missing file, or one is damaged.
    """
    for path in _weight_files(directory):
        yield from read_tensors(path)


def _weight_files(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    elif (directory / SINGLE).is_file():
        names = [SINGLE]
    else:
        names = sorted(path.name for path in directory.glob("*.safetensors"))
    if not names:
        raise ValueError(f"{directory} has no *.safetensors; other weight formats are not read")
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise ValueError(f"{directory} lacks {', '.join(missing)}, named in {INDEX}")
    return [directory / name for name in names]


def write_from_gguf(source: Path, directory: Path, *, progress: bool = True) -> None:
    """Convert a GGUF file to files that pdlab and transformers load fast, in `directory`.

    The weights are written as float32, which holds every dequantized value exactly.
    """
    from safetensors.torch import save_file

    file = GGUFFile(source)
    config = config_from_gguf(file)
    weights = weights_from_gguf(file, config)
    bar = tqdm(weights, "converting", len(file.tensors), unit="tensor", disable=not progress)
    save_file(dict(bar), directory / SINGLE, metadata={"format": "pt"})
    (directory / SINGLE).chmod(0o644)  # save_file makes it private, but a cache may be shared
    eos = list(config.eos_token_ids)
    _write_json(directory / "config.json", config_to_hf(config))
    _write_json(directory / "generation_config.json", {"eos_token_id": eos})
    _write_json(directory / "tokenizer_config.json", tokenizer_settings(file.metadata))
    tokenizer_from_gguf(file.metadata).save(str(directory / "tokenizer.json"), pretty=False)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
