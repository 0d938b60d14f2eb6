"""Model shapes the cost-model tests share."""

from dataclasses import replace

from pdlab.models.config import ModelConfig

TINY = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_model_len=128,
)
TINY_TIED = replace(TINY, tie_word_embeddings=True)
TINY_WINDOWED = replace(TINY, layer_windows=(None, 4, 4))

LLAMA_3_1_8B = ModelConfig(
    family="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=131_072,
)
LLAMA_2_7B = ModelConfig(
    family="llama",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_model_len=4096,
)
QWEN3_8B = ModelConfig(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_model_len=40_960,
    qk_norm=True,
)
