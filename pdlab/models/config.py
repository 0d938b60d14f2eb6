"""The shape of a model: everything the engine and the cost model need to know, and no weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class ModelConfig:
    """Shape and constants of a Llama-family decoder.

    One class describes Llama, SmolLM2, Mistral, Qwen2/2.5 and Qwen3: they differ in biases, in a
    norm on q and k, in tied embeddings, in how rotary frequencies are scaled, and in which layers
    look through a sliding window.
    """

    family: str
    """`llama`, `mistral`, `qwen2` or `qwen3` (the `model_type` of its Hugging Face config)."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    """Longest sequence the rotary positions were trained for, in tokens."""
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    layer_windows: tuple[int | None, ...] = ()
    """Sliding window of each layer in tokens, None for full attention; empty means all full."""
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layer_windows", "eos_token_ids"):  # JSON has lists only
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.layer_windows and len(self.layer_windows) != self.num_layers:
            raise ValueError(
                f"layer_windows has {len(self.layer_windows)} entries for {self.num_layers} layers"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (GQA, Ainslie et al. 2023)."""
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of K (or of V) for one token in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Elements of q, k and v for one token: the fused projection is cut there."""
        return self.q_size, self.kv_size, self.kv_size

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer in tokens, or None for full attention."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def windows(self) -> list[int | None]:
        """`window` of every layer."""
        return [self.window(layer) for layer in range(self.num_layers)]

    @property
    def num_parameters(self) -> int:
        """Weights in the model; tied embeddings count once."""
        hidden, layers = self.hidden_size, self.num_layers
        attention = hidden * (self.q_size + 2 * self.kv_size) + self.q_size * hidden
        attention += self.qkv_bias * (self.q_size + 2 * self.kv_size) + self.output_bias * hidden
        attention += self.qk_norm * 2 * self.head_dim
        mlp = 3 * hidden * self.intermediate_size
        mlp += self.mlp_bias * (2 * self.intermediate_size + hidden)
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        return layers * (attention + mlp + 2 * hidden) + hidden + embeddings

    def kv_bytes_per_token(self, bytes_per_element: float) -> float:
        """KV cache bytes of one token over all layers: 2 x layers x KV heads x head_dim x size."""
        return 2 * self.num_layers * self.kv_size * bytes_per_element

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON; `ModelConfig(**fields)` is equal to this."""
        values = asdict(self).items()
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values}
