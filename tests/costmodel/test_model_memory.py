"""Bytes held in memory, against published figures and against transformers."""

from dataclasses import replace

import pytest
import torch
import transformers

from pdlab.costmodel import activation_bytes, kv_bytes, score_matrix_bytes, weight_bytes
from pdlab.models.config import ModelConfig

from .shapes import LLAMA_2_7B, LLAMA_3_1_8B, QWEN3_8B, TINY, TINY_TIED

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("config", "kib"),
    [(LLAMA_3_1_8B, 128), (QWEN3_8B, 144), (LLAMA_2_7B, 512)],
    ids=["llama-3.1-8b", "qwen3-8b", "llama-2-7b"],
)
def test_kv_of_a_token_is_the_published_size(config: ModelConfig, kib: int) -> None:
    assert kv_bytes(config, 1, 2) == kib * KIB
    assert kv_bytes(config, 1000, 2) == 1000 * kib * KIB


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA_3_1_8B, 8_030_261_248),
        (LLAMA_2_7B, 6_738_415_616),
        (QWEN3_8B, 8_190_735_360),
    ],
    ids=["llama-3.1-8b", "llama-2-7b", "qwen3-8b"],
)
def test_weights_are_the_published_number_of_parameters(
    config: ModelConfig, parameters: int
) -> None:
    assert weight_bytes(config, 2) == 2 * parameters


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_weights_are_as_many_as_in_transformers(family: str, tied: bool) -> None:
    config = replace(
        TINY,
        family=family.lower(),
        tie_word_embeddings=tied,
        qkv_bias=family == "Qwen2",
        qk_norm=family == "Qwen3",
    )
    if family == "Qwen2":  # it has no head_dim of its own
        config = replace(config, hidden_size=config.q_size)
    reference_config = getattr(transformers, f"{family}Config")(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(reference_config)
        model.tie_weights()
    assert weight_bytes(config, 1) == sum(p.numel() for p in model.parameters())


def test_head_in_another_format_is_counted_apart() -> None:
    head = TINY_TIED.vocab_size * TINY_TIED.hidden_size
    expected = (TINY_TIED.num_parameters - head) / 2 + 2 * head
    assert weight_bytes(TINY_TIED, 0.5, head_element_bytes=2) == expected


def test_a_score_matrix_is_quadratic_and_the_rest_linear() -> None:
    assert score_matrix_bytes(512, 512) == 1 * MIB
    assert score_matrix_bytes(4096, 4096) == 64 * MIB
    assert score_matrix_bytes(4096, 4096, 2, num_heads=32) == 1024 * MIB
    assert kv_bytes(TINY, 4096, 4) == 8 * kv_bytes(TINY, 512, 4)


def test_activations_peak_where_the_largest_tensors_live() -> None:
    """Prefill of an 8B model peaks in the MLP, and sampling every row peaks at the logits."""
    config, n = LLAMA_3_1_8B, 1024
    residual_and_normed = 2 * n * config.hidden_size * 2
    gate_up_product = 3 * n * config.intermediate_size * 2
    assert activation_bytes(config, n, 2) == residual_and_normed + gate_up_product
    logits = n * config.vocab_size * 4
    rows = 2 * n * config.hidden_size * 2
    assert activation_bytes(config, n, 2, num_sampled=n) == logits + rows


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kv_bytes(TINY, -1, 2), "num_tokens=-1 is below the limit 0"),
        (lambda: kv_bytes(TINY, 1, 0), "element_bytes=0 is not above the limit 0"),
        (lambda: weight_bytes(TINY, -2), "element_bytes=-2 is not above the limit 0"),
        (lambda: score_matrix_bytes(1, -1), "num_keys=-1 is below the limit 0"),
    ],
)
def test_bad_values_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
