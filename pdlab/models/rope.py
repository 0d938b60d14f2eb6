"""Rotary position embedding (Su et al. 2021, RoFormer) and how its frequencies are stretched."""

from __future__ import annotations

import math
from typing import Any

import torch

from pdlab.models.config import ModelConfig

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def rope_tables(
    config: ModelConfig, max_positions: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for every position, both float32 of shape [max_positions, head_dim / 2].

    Computed once, so a position has the same bits in whatever batch it stands.
    """
    inverse, amplitude = inverse_frequencies(config)
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse)
    return (angles.cos() * amplitude).to(device), (angles.sin() * amplitude).to(device)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by its position's angle.

    Args:
        x: [num_tokens, heads, head_dim].
        cos, sin: [num_tokens, head_dim / 2], rows of `rope_tables`.
    """
    cos, sin = cos.unsqueeze(1).to(x.dtype), sin.unsqueeze(1).to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Angle per position of each pair, [head_dim / 2], and the factor on cos and sin (YaRN's).

    Raises:
        ValueError: the scaling type is not one of SUPPORTED_ROPE_TYPES.
    """
    scaling = config.rope_scaling
    kind = scaling.get("rope_type", "default")
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inverse = 1.0 / config.rope_theta**exponents
    if kind == "default":
        return inverse, 1.0
    if kind == "linear":  # position interpolation, Chen et al. 2023
        return inverse / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    if kind == "yarn":
        return _yarn(inverse, scaling, config)
    raise ValueError(f"rope_type={kind!r} is not supported; supported: {SUPPORTED_ROPE_TYPES}")


def _llama3(inverse: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Slow frequencies are divided, fast ones kept, others blended (Llama 3.1 reference code)."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * inverse / (2 * math.pi)  # full turns within the original context
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inverse + (1 - keep) * inverse / scaling["factor"]


def _yarn(
    inverse: torch.Tensor, scaling: dict[str, Any], config: ModelConfig
) -> tuple[torch.Tensor, float]:
    """NTK-by-parts interpolation with a temperature on attention (Peng et al. 2023, YaRN)."""
    factor = scaling["factor"]
    original = scaling.get("original_max_position_embeddings") or config.max_model_len

    def dimension(turns: float) -> float:
        wavelength_ratio = original / (turns * 2 * math.pi)
        return config.head_dim * math.log(wavelength_ratio) / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (torch.arange(len(inverse), dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    amplitude = scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0
    return keep * inverse + (1 - keep) * inverse / factor, amplitude
