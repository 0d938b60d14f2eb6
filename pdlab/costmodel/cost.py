"""FLOPs and bytes of one engine step, counted from shapes.

This module knows a model's shape and how many tokens of which sequences a step computes. It knows
no tensors, no hardware and no time: `predict` turns these counts into seconds.

Conventions, the same everywhere in pdlab:

- A multiply-add is 2 FLOPs (Kaplan et al. 2020, "Scaling Laws for Neural Language Models", section
  2.1: a forward pass costs about 2N FLOPs a token, plus attention).
- Matrix products are counted, and nothing else: norms, rotary positions, softmax, activations and
  bias additions are below 1% of a real model's FLOPs.
- Attention counts the pairs a query may see: the query at position p sees p + 1 keys, or
  min(window, p + 1). A kernel that computes a square and masks half of it does more work than that;
  the extra work is waste and not part of the count (`dense_step_cost` counts it).
- Bytes are the least a step can move (Pope et al. 2022, "Efficiently Scaling Transformer
  Inference", section 2): every weight once, every visible K and V once for each chunk, every new K
  and V once. Activations are left out: they are small at decode and stay in cache or registers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from pdlab.costmodel.checks import check_positive
from pdlab.costmodel.memory import embedding_parameters
from pdlab.models.config import ModelConfig

FLOP_PARTS = ("qkv", "attention", "output", "mlp", "logits")
BYTE_PARTS = ("weights", "kv_read", "kv_write")


class Chunk(NamedTuple):
    """Tokens of one sequence computed in one step.

    The chunk stands at positions `start` to `start + num_tokens - 1`: a whole prompt is
    `Chunk(0, n)`, a decode step `Chunk(context, 1)`, and a prompt behind a prefix hit
    `Chunk(num_cached_tokens, rest)`.
    """

    start: int
    """Tokens of context already in the KV cache."""
    num_tokens: int
    """Tokens computed in this step."""


@dataclass(frozen=True)
class StepCost:
    """FLOPs and bytes of a step, or of several steps added up.

    `flops` has the parts qkv, attention, output, mlp, logits; `bytes` has weights, kv_read,
    kv_write: the same parts as `StepRecord.flops` and `StepRecord.bytes_moved`.
    """

    flops: dict[str, int]
    bytes: dict[str, int]

    @classmethod
    def zero(cls) -> StepCost:
        """The cost of nothing: the start of `sum(costs, StepCost.zero())`."""
        return cls(dict.fromkeys(FLOP_PARTS, 0), dict.fromkeys(BYTE_PARTS, 0))

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs for each byte moved, in FLOP/byte; 0 for a step that moves nothing."""
        return self.total_flops / self.total_bytes if self.total_bytes else 0.0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            {part: self.flops[part] + other.flops[part] for part in FLOP_PARTS},
            {part: self.bytes[part] + other.bytes[part] for part in BYTE_PARTS},
        )


def causal_pairs(start: int, num_tokens: int, window: int | None = None) -> int:
    """Query-key pairs of a chunk under the causal mask, in one layer and one head.

    The query at position p sees min(window, p + 1) keys, so the count is the sum of that over
    p = start .. start + num_tokens - 1. Chunks add up: cutting a prompt changes no pair.
    """
    return _pairs_up_to(start + num_tokens, window) - _pairs_up_to(start, window)


def _pairs_up_to(length: int, window: int | None) -> int:
    """Sum of min(window, i) for i = 1 .. length: the pairs of a whole prompt of `length` tokens."""
    if window is None or length <= window:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


def visible_positions(start: int, num_tokens: int, window: int | None = None) -> int:
    """Positions that at least one query of the chunk sees, the chunk's own included."""
    end = start + num_tokens
    return end if window is None else min(end, num_tokens + window - 1)


def step_cost(
    config: ModelConfig,
    chunks: Sequence[Chunk | tuple[int, int]],
    *,
    num_sampled: int,
    weight_element_bytes: float,
    kv_element_bytes: float,
    head_element_bytes: float | None = None,
) -> StepCost:
    """FLOPs and bytes of a step that computes `chunks`, one chunk for each sequence.

    Args:
        num_sampled: rows the step computes logits for (0 while every chunk is inside its prompt).
        weight_element_bytes: mean bytes of a weight, scales of a quantized format included.
        kv_element_bytes: mean bytes of a cached element, scales included.
        head_element_bytes: mean bytes of an element of the embedding and of the head, where they
            are kept in another format than the layers.

    The bytes assume that nothing is read twice: one pass over the weights serves all rows, and K
    and V of a visible position are read once for a chunk, for all of its queries and for all
    query heads that share a KV head, the chunk's own positions included (they are written to
    the cache first and attention reads them there). Two sequences that share a prefix read it
    twice.

    Raises:
        ValueError: for a chunk that starts below 0 or is empty, for `num_sampled` outside
            0 .. number of tokens, and for element sizes that are not positive.
    """
    head_bytes = weight_element_bytes if head_element_bytes is None else head_element_bytes
    check_positive(
        weight_element_bytes=weight_element_bytes,
        kv_element_bytes=kv_element_bytes,
        head_element_bytes=head_bytes,
    )
    num_tokens = _count_tokens(chunks, num_sampled)
    pairs = positions = 0  # summed over layers
    for window, layers in _layers_by_window(config.layer_windows, config.num_layers):
        for start, length in chunks:
            pairs += layers * causal_pairs(start, length, window)
            positions += layers * visible_positions(start, length, window)
    weights = _layer_weights(config) * weight_element_bytes if num_tokens else 0.0
    weights += _embedding_and_head_weights(config, num_tokens, num_sampled) * head_bytes
    kv_bytes = 2 * config.kv_size * kv_element_bytes  # K and V of one token in one layer
    return StepCost(
        flops=_flops(config, num_tokens, pairs, num_sampled),
        bytes={
            "weights": round(weights),
            "kv_read": round(positions * kv_bytes),
            "kv_write": round(config.num_layers * num_tokens * kv_bytes),
        },
    )


def dense_step_cost(
    config: ModelConfig,
    num_tokens: int,
    *,
    num_sampled: int = 1,
    weight_element_bytes: float,
    causal: bool = False,
) -> StepCost:
    """FLOPs and bytes of a step of the naive generator, which keeps no cache.

    Each new token runs the whole sequence of `num_tokens` tokens again. With `causal=False` the
    attention computes all num_tokens^2 pairs and masks afterwards, as a plain `softmax(Q K^T) V`
    does, in every layer and whatever its window; with `causal=True` only the visible pairs count.
    There is no cache, so kv_read and kv_write are 0: K and V are activations of the step.
    """
    check_positive(weight_element_bytes=weight_element_bytes)
    _count_tokens([Chunk(0, num_tokens)], num_sampled)
    if causal:
        groups = _layers_by_window(config.layer_windows, config.num_layers)
        pairs = sum(layers * causal_pairs(0, num_tokens, window) for window, layers in groups)
    else:
        pairs = config.num_layers * num_tokens**2
    elements = _layer_weights(config) + _embedding_and_head_weights(config, num_tokens, num_sampled)
    return StepCost(
        flops=_flops(config, num_tokens, pairs, num_sampled),
        bytes={"weights": round(elements * weight_element_bytes), "kv_read": 0, "kv_write": 0},
    )


def _flops(config: ModelConfig, num_tokens: int, pairs: int, num_sampled: int) -> dict[str, int]:
    """FLOPs by part; `pairs` is summed over layers.

    A pair costs one dot product of head_dim for the score (Q K^T) and one scaled addition of
    head_dim for the output (P V) in each query head: 4 * num_heads * head_dim FLOPs.
    """
    rows = 2 * config.num_layers * num_tokens
    hidden = config.hidden_size
    return {
        "qkv": rows * hidden * (config.q_size + 2 * config.kv_size),
        "attention": 4 * config.q_size * pairs,
        "output": rows * config.q_size * hidden,
        "mlp": rows * 3 * hidden * config.intermediate_size,
        "logits": 2 * num_sampled * hidden * config.vocab_size,
    }


def _layer_weights(config: ModelConfig) -> int:
    """Elements of everything but the embedding and the head: what each step reads in full."""
    return config.num_parameters - embedding_parameters(config)


def _embedding_and_head_weights(config: ModelConfig, num_tokens: int, num_sampled: int) -> int:
    """Elements read of the embedding (only rows looked up) and of the head (only to sample).

    A tied head that is read in full holds the rows that were looked up: they count once.
    """
    rows = min(num_tokens, config.vocab_size)
    if num_sampled:
        rows = config.vocab_size + (0 if config.tie_word_embeddings else rows)
    return rows * config.hidden_size


@lru_cache(maxsize=64)
def _layers_by_window(
    layer_windows: tuple[int | None, ...], num_layers: int
) -> tuple[tuple[int | None, int], ...]:
    """(window, number of layers that have it); layers of one window cost the same."""
    return tuple(Counter(layer_windows or (None,) * num_layers).items())


def _count_tokens(chunks: Sequence[Chunk | tuple[int, int]], num_sampled: int) -> int:
    """Tokens of the step, after checking the chunks and that every sampled row is one of them."""
    num_tokens = 0
    for start, length in chunks:
        if start < 0:
            raise ValueError(f"start={start} of a chunk is below the limit 0")
        if length < 1:
            raise ValueError(f"num_tokens={length} of a chunk is below the limit 1")
        num_tokens += length
    if not 0 <= num_sampled <= num_tokens:
        raise ValueError(f"num_sampled={num_sampled} is not within 0 to {num_tokens} (num_tokens)")
    return num_tokens
