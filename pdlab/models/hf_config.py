"""Between a Hugging Face config.json and a ModelConfig, without importing transformers.

Files on the hub omit what equals their class's default, put rotary settings in one of two places,
and may ask for features the decoder lacks. Defaults are filled in as transformers does (a test
compares), and what is not supported is refused by name: a model that loads is computed right.
"""

from __future__ import annotations

from typing import Any

from pdlab.models.config import ModelConfig

DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    },
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32_768},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32_768, "head_dim": 128},
}
"""What a config.json of each family means where it is silent."""

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
ROPE_KEYS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "truncate",
        }
    ),
}
"""Rotary scaling types that the decoder computes, and the parameters it heeds."""


def config_from_hf(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    """The ModelConfig of a config.json (and generation_config.json, for more end tokens).

    Raises:
        ValueError: the family or a feature is not supported, or a key is missing.
    """
    family = config.get("model_type")
    if family not in DEFAULTS:
        raise ValueError(f"model_type={family!r} is not supported; supported: {list(DEFAULTS)}")
    if missing := [key for key in REQUIRED if config.get(key) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    values = DEFAULTS[family] | config
    _refuse_unsupported(values)
    rope_theta, rope_scaling = _rope(values)
    num_heads = values["num_attention_heads"]
    attention_bias = bool(values.get("attention_bias", False)) and family in ("llama", "qwen3")
    return ModelConfig(
        family=family,
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads") or num_heads,
        head_dim=values.get("head_dim") or values["hidden_size"] // num_heads,
        max_model_len=values["max_position_embeddings"],
        rms_norm_eps=values.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        tie_word_embeddings=values.get("tie_word_embeddings", False),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(values.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        layer_windows=_layer_windows(values),
        eos_token_ids=_eos_token_ids(generation or {}, config),
    )


def config_to_hf(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """A config.json for transformers, which describes the same computation.

    Raises:
        ValueError: the family has no way to say it (say, biases on q, k, v but not on the output).
    """
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, **config.rope_scaling},
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": list(config.eos_token_ids) or None,
        "bos_token_id": None,
        "dtype": dtype,
    }
    if config.family in ("llama", "qwen3"):
        values["attention_bias"] = config.output_bias
    if config.family == "llama":
        values["mlp_bias"] = config.mlp_bias
    values |= _window_settings(config)
    if config_from_hf(values) != config:
        raise ValueError(f"a {config.family} config.json cannot describe {config}")
    return values


def _refuse_unsupported(values: dict[str, Any]) -> None:
    refused = {
        "hidden_act": values.get("hidden_act", "silu") not in ("silu", "swish"),
        "quantization_config": values.get("quantization_config") is not None,
        "num_experts": bool(values.get("num_experts") or values.get("num_local_experts")),
        "partial_rotary_factor": values.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, is_refused in refused.items():
        if is_refused:
            raise ValueError(f"{key}={values.get(key)!r} is not supported by the decoder")


def _rope(values: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base and scaling, from `rope_parameters` (transformers 5) or the two fields before it."""
    given = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    theta = given.pop("rope_theta", None) or values.get("rope_theta") or 10_000.0
    kind = given.pop("rope_type", None) or given.get("type") or "default"
    given.pop("type", None)
    if given.pop("partial_rotary_factor", 1.0) not in (1.0, None):
        raise ValueError("partial_rotary_factor other than 1 is not supported by the decoder")
    if kind not in ROPE_KEYS:
        raise ValueError(f"rope_type={kind!r} is not supported; supported: {list(ROPE_KEYS)}")
    scaling = {key: value for key, value in given.items() if value is not None}
    if unknown := set(scaling) - ROPE_KEYS[kind]:
        raise ValueError(f"rope_type={kind!r} with {sorted(unknown)} is not supported")
    if kind in ("llama3", "yarn"):
        scaling.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    return float(theta), {"rope_type": kind, **scaling}


def _layer_windows(values: dict[str, Any]) -> tuple[int | None, ...]:
    """Sliding window of each layer, empty if none has one.

    Mistral gives all layers the window; Qwen only with `use_sliding_window`, and only to the
    layers from `max_window_layers` on, or to those that `layer_types` names.
    """
    window, num_layers = values.get("sliding_window"), values["num_hidden_layers"]
    family = values["model_type"]
    if family == "llama":
        return ()
    if family == "mistral":
        if values.get("layer_types"):
            raise ValueError("mistral with layer_types is not supported by the decoder")
        return (window,) * num_layers if window else ()
    window = (window or 4096) if values.get("use_sliding_window") else None
    first = values.get("max_window_layers", 28)
    kinds = values.get("layer_types") or [
        "sliding_attention" if window and layer >= first else "full_attention"
        for layer in range(num_layers)
    ]
    if unknown := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer_types {sorted(unknown)} are not supported by the decoder")
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _window_settings(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `_layer_windows`."""
    sizes = {window for window in config.layer_windows if window}
    if config.family == "mistral":
        return {"sliding_window": next(iter(sizes), None)}
    if config.family == "llama" or not sizes:
        return {}
    kinds = ["sliding_attention" if w else "full_attention" for w in config.layer_windows]
    return {"use_sliding_window": True, "sliding_window": next(iter(sizes)), "layer_types": kinds}


def _eos_token_ids(*sources: dict[str, Any]) -> tuple[int, ...]:
    """The union of every `eos_token_id`, each a number, a list or absent, in order."""
    found: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(found))
