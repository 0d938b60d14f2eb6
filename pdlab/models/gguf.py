"""From GGUF to the decoder: shape, and weights under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from pdlab.models.config import ModelConfig
from pdlab.models.gguf_file import GGUFFile
from pdlab.models.gguf_tokenizer import eos_token_ids
from pdlab.models.rope import inverse_frequencies

FAMILIES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF architecture -> family. Mistral's models are stored as architecture `llama`."""

TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The model's shape, from metadata and from which tensors there are.

    Raises:
        ValueError: a feature that the decoder lacks, named, or metadata that is missing.
    """
    metadata, tensors = file.metadata, file.tensors
    architecture = metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise ValueError(
            f"GGUF architecture {architecture!r} is not supported; {list(FAMILIES)} are"
        )
    if metadata.get("split.count", 1) > 1:
        raise ValueError(f"{file.path} is one of {metadata['split.count']} parts; merge them first")

    def value(key: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{key}", default)
        if found is None:
            raise ValueError(f"{file.path} lacks the metadata {architecture}.{key}")
        return found

    if value("expert_count", 0):
        raise ValueError("mixture of experts is not supported (expert_count > 0)")
    num_layers, num_heads = value("block_count"), value("attention.head_count")
    hidden_size = value("embedding_length")
    head_dim = value("attention.key_length", hidden_size // num_heads)
    _require_equal("attention.value_length", value("attention.value_length", head_dim), head_dim)
    _require_equal("rope.dimension_count", value("rope.dimension_count", head_dim), head_dim)
    window = metadata.get(f"{architecture}.attention.sliding_window")
    config = ModelConfig(
        family=FAMILIES[architecture],
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=value("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=value("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_model_len=value("context_length"),
        rms_norm_eps=_shortest(value("attention.layer_norm_rms_epsilon")),
        rope_theta=_shortest(value("rope.freq_base", 10_000.0)),
        rope_scaling=_rope_scaling(metadata, architecture),
        tie_word_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        layer_windows=(window,) * num_layers if window else (),
        eos_token_ids=eos_token_ids(metadata),
    )
    return _with_rope_factors(config, file) if ROPE_FACTORS in tensors else config


def weights_from_gguf(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, float32 tensor) of every weight, one at a time.

    Raises:
        ValueError: a tensor that has no place in the decoder.
    """
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue
        values = in_hugging_face_order(name, file.read(name), config)
        yield hugging_face_name(name), torch.from_numpy(values)


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.{kind}"
    block, _, rest = stem.partition(".")
    layer, _, part = rest.partition(".")
    if block != "blk" or part not in LAYER_NAMES:
        raise ValueError(f"GGUF tensor {name!r} has no place in a Llama-family decoder")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def in_hugging_face_order(name: str, rows: np.ndarray, config: ModelConfig) -> np.ndarray:
    """The rows of a GGUF tensor, values or blocks, in the order that Hugging Face has them in."""
    part = name.split(".")[-2]
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(part)
    if config.family != "llama" or heads is None:
        return rows
    return _undo_rotary_permutation(rows, heads)


def _undo_rotary_permutation(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from Meta's order to Hugging Face's.

    Rotary embedding turns pairs of a head's rows. Meta, and GGUF's llama architecture, keep a pair
    side by side (0,1), (2,3), ...; Hugging Face pairs row i with row i + head_dim / 2.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _rope_scaling(metadata: dict[str, Any], architecture: str) -> dict[str, Any]:
    prefix = f"{architecture}.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise ValueError(
            f"rope scaling type {kind!r} is not supported in GGUF; linear and yarn are"
        )
    scaling = {"rope_type": kind, "factor": _shortest(metadata[prefix + "factor"])}
    if kind == "yarn":
        original = prefix + "original_context_length"
        scaling["original_max_position_embeddings"] = metadata[original]
    return scaling


def _with_rope_factors(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    """Llama 3's scaling, which GGUF stores as one divisor per frequency.

    The parameters are those of every released Llama 3 model except the factor, which is the
    largest divisor; if they do not give back the stored divisors, the model is refused.
    """
    stored = torch.from_numpy(file.read(ROPE_FACTORS))
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaled = replace(config, rope_scaling=scaling)
    plain = replace(config, rope_scaling={"rope_type": "default"})
    divisors = inverse_frequencies(plain)[0] / inverse_frequencies(scaled)[0]
    if not torch.allclose(divisors, stored, rtol=1e-3):
        raise ValueError(f"the rope frequency factors in {file.path} are not those of Llama 3")
    return scaled


def _require_equal(key: str, found: int, head_dim: int) -> None:
    if found != head_dim:
        raise ValueError(f"{key}={found} differs from head_dim={head_dim}; not supported")


def _shortest(value: float) -> float:
    """A float32 as the shortest decimal that names it: 9.99999975e-06 was meant as 1e-05."""
    return float(str(np.float32(value)))
