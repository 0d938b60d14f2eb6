"""Random weights for any shape: speed can be studied without a trained model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pdlab.models.config import ModelConfig

SHARED_LIMIT = 100_000_000
"""Up to this many parameters, every device and dtype gets the same weights (rounded to dtype)."""


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every weight; a tied head is not listed."""
    hidden, inner = config.hidden_size, config.intermediate_size
    linears = {
        "self_attn.q_proj": (config.q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (config.kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, config.q_size, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}.weight": (size,) for name, size in norms.items()}
        for name, (rows, columns, has_bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def random_weights(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight, drawn one at a time from a seeded generator.

    A matrix has standard deviation 1 / sqrt(columns), so that what goes in at size 1 comes out at
    size 1; the two that add to the residual stream are smaller by sqrt(2 x layers), so that depth
    does not blow it up (GPT-2). Logits then spread enough for greedy decoding to have clear
    winners. Norm weights lie around 1, so that a norm left out is noticed.
    """
    shared = config.num_parameters <= SHARED_LIMIT
    drawn_on = torch.device("cpu") if shared else device
    drawn_as = torch.float32 if shared else dtype
    generator = torch.Generator(drawn_on).manual_seed(seed)
    for name, shape in parameter_shapes(config).items():
        values = torch.empty(shape, dtype=drawn_as, device=drawn_on)
        if name.endswith("norm.weight"):
            values.normal_(1.0, 0.1, generator=generator)
        elif name.endswith(".bias"):
            values.normal_(0.0, 0.1, generator=generator)
        else:
            std = shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * config.num_layers) ** 0.5
            values.normal_(0.0, std, generator=generator)
        yield name, values.to(device, dtype)
