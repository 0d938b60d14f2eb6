"""Small models in transformers and their twins in pdlab, with the same random weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from pdlab import Model
from pdlab.models.decoder import Decoder
from pdlab.models.hf_config import config_from_hf

SIZES = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
ROPE: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-stated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
}
"""Rotary settings beside their `rope_theta`."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biased-tied": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "mistral-windowed": ("Mistral", {"sliding_window": 7, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2-some-layers-windowed": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
} | {
    f"llama-rope-{name}": ("Llama", {"rope_parameters": {"rope_theta": 500.0, **scaling}})
    for name, scaling in ROPE.items()
    if name != "default"
}
"""Class prefix in transformers, and settings beside SIZES. None has head_dim = hidden / heads by
accident where the family lets it differ."""


@cache
def twins(family: str) -> tuple[Any, Model]:
    """(transformers model, pdlab model); every weight random, norms and biases included."""
    import transformers

    prefix, settings = FAMILIES[family]
    hf_config = getattr(transformers, f"{prefix}Config")(**SIZES | settings)
    hf_config._attn_implementation = "eager"
    theirs = getattr(transformers, f"{prefix}ForCausalLM")(hf_config).eval()
    _randomize(theirs)
    config = config_from_hf(hf_config.to_dict())
    ours = Decoder(config)
    ours.load_weights(theirs.state_dict().items())
    device = torch.device("cpu")
    return theirs, Model(family, config, ours, None, device, torch.float32, "a test", "none")


def _randomize(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = name.endswith("norm.weight") or "layernorm" in name
            mean, std = (1.0, 0.2) if norm else (0.0, 0.15)
            parameter.normal_(mean, std, generator=generator)


@torch.inference_mode()
def hf_logits(theirs: Any, token_ids: list[int]) -> torch.Tensor:
    """Logits at every position, [num_tokens, vocab_size]."""
    return theirs(torch.tensor([token_ids])).logits[0]
