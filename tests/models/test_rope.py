"""Rotary frequencies are those of transformers, for each kind of scaling."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdlab.models.hf_config import config_from_hf
from pdlab.models.rope import (
    SUPPORTED_ROPE_TYPES,
    apply_rope,
    inverse_frequencies,
    rope_tables,
)
from tests.helpers import TINY
from tests.models.hf_twins import ROPE, SIZES


def hf_frequencies(rope: dict, theta: float, head_dim: int) -> tuple[torch.Tensor, float, object]:
    config = LlamaConfig(
        **SIZES | {"head_dim": head_dim, "rope_parameters": {"rope_theta": theta, **rope}}
    )
    if rope["rope_type"] == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        frequencies, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequencies, factor, config_from_hf(config.to_dict())


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("theta", [500.0, 10_000.0, 1_000_000.0])
@pytest.mark.parametrize("name", ROPE)
def test_frequencies_and_attention_factor_equal_those_of_transformers(name, theta, head_dim):
    frequencies, factor, config = hf_frequencies(ROPE[name], theta, head_dim)
    ours, amplitude = inverse_frequencies(config)
    torch.testing.assert_close(ours, frequencies, rtol=1e-6, atol=0)
    assert amplitude == pytest.approx(factor, rel=1e-9)


@pytest.mark.parametrize("name", [name for name in ROPE if name != "default"])
def test_scaling_changes_the_frequencies(name):
    plain, _, _ = hf_frequencies(ROPE["default"], 10_000.0, 64)
    scaled, _, _ = hf_frequencies(ROPE[name], 10_000.0, 64)
    assert not torch.allclose(plain, scaled)


def test_every_supported_type_is_compared():
    assert {rope["rope_type"] for rope in ROPE.values()} == set(SUPPORTED_ROPE_TYPES)


def test_an_unknown_scaling_type_is_refused_by_name():
    with pytest.raises(ValueError, match="rope_type='spiral' is not supported"):
        inverse_frequencies(replace(TINY, rope_scaling={"rope_type": "spiral"}))


def test_a_score_depends_on_the_distance_of_positions_only():
    cos, sin = rope_tables(TINY, TINY.max_model_len, "cpu")
    q, k = torch.randn(2, 1, 1, TINY.head_dim)

    def score(query: int, key: int) -> float:
        rotated = [apply_rope(x, cos[p : p + 1], sin[p : p + 1]) for x, p in ((q, query), (k, key))]
        return float((rotated[0] * rotated[1]).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-4)


def test_rotation_keeps_lengths_and_leaves_position_0_alone():
    cos, sin = rope_tables(TINY, 50, "cpu")
    x = torch.randn(50, 3, TINY.head_dim)
    rotated = apply_rope(x, cos, sin)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotated[0], x[0])
