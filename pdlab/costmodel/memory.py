"""Bytes a model holds in memory: weights, KV cache, and the activations of one step.

Weights are fixed, the KV cache grows linearly with the tokens kept, and activations live for one
layer of one step. Only a score matrix that is written out (unfused attention) grows with the
square of the length.
"""

from __future__ import annotations

from pdlab.costmodel.checks import check_at_least, check_positive
from pdlab.models.config import ModelConfig

FP32_BYTES = 4


def weight_bytes(
    config: ModelConfig, element_bytes: float, *, head_element_bytes: float | None = None
) -> int:
    """Bytes of all weights; a tied embedding counts once.

    Args:
        element_bytes: mean bytes of a weight, scales of a quantized format included.
        head_element_bytes: the same for embedding and head, where they are kept in another format.
    """
    head_bytes = element_bytes if head_element_bytes is None else head_element_bytes
    check_positive(element_bytes=element_bytes, head_element_bytes=head_bytes)
    layers = config.num_parameters - embedding_parameters(config)
    return round(layers * element_bytes + embedding_parameters(config) * head_bytes)


def embedding_parameters(config: ModelConfig) -> int:
    """Elements of the embedding and the head: one matrix where they are tied, else two."""
    matrices = 1 if config.tie_word_embeddings else 2
    return matrices * config.vocab_size * config.hidden_size


def kv_bytes(config: ModelConfig, num_tokens: int, element_bytes: float) -> int:
    """Bytes of K and V of `num_tokens` tokens over all layers: linear in the tokens.

    2 * num_layers * num_kv_heads * head_dim * element_bytes a token (Pope et al. 2022, section
    3.3). Every layer keeps every token here; a cache that drops what a sliding window no longer
    sees holds less, and one that hands out whole blocks holds up to a block more.
    """
    check_at_least(0, num_tokens=num_tokens)
    check_positive(element_bytes=element_bytes)
    return round(num_tokens * config.kv_bytes_per_token(element_bytes))


def activation_bytes(
    config: ModelConfig, num_tokens: int, element_bytes: float, *, num_sampled: int = 1
) -> int:
    """Peak bytes of activations in a step of `num_tokens` rows, with fused attention.

    The largest of three moments, each beside the residual stream [num_tokens, hidden_size]:

    - attention: the normed input, q, k, v and the attention output;
    - MLP: the normed input, and the gate, up and product rows (SwiGLU);
    - head: the sampled rows and their logits, which are fp32: [num_sampled, vocab_size].

    Left out: temporaries inside a kernel, what an allocator keeps in reserve, and the score matrix
    of unfused attention (`score_matrix_bytes`).
    """
    check_at_least(0, num_tokens=num_tokens, num_sampled=num_sampled)
    check_positive(element_bytes=element_bytes)
    hidden = config.hidden_size
    attention = hidden + 2 * config.q_size + 2 * config.kv_size
    mlp = hidden + 3 * config.intermediate_size
    layer = num_tokens * (hidden + max(attention, mlp)) * element_bytes
    head = (num_tokens + num_sampled) * hidden * element_bytes
    head += num_sampled * config.vocab_size * FP32_BYTES
    return round(max(layer, head))


def score_matrix_bytes(
    num_queries: int, num_keys: int, element_bytes: float = FP32_BYTES, *, num_heads: int = 1
) -> int:
    """Bytes of Q K^T written out, [num_heads, num_queries, num_keys], for one layer.

    Tiled attention never holds it (Dao et al. 2022, "FlashAttention", section 3.1): it is the one
    quadratic term, 1 MiB a head at 512 tokens and 64 MiB at 4,096 in fp32.
    """
    check_at_least(0, num_queries=num_queries, num_keys=num_keys, num_heads=num_heads)
    check_positive(element_bytes=element_bytes)
    return round(num_heads * num_queries * num_keys * element_bytes)
