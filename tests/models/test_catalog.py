"""The catalog, and shapes against what transformers makes of them."""

from pathlib import Path
from typing import Any

import pytest

from pdlab.models.catalog import SHAPES, available, converted_directory, shape
from pdlab.models.config import ModelConfig
from pdlab.models.hf_config import DEFAULTS, config_from_hf, config_to_hf
from pdlab.models.random_weights import parameter_shapes

RELEASED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "llama-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "llama-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
}
"""Parameters that the models' publishers state."""
MINIMAL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 30,
    "num_attention_heads": 32,
}


def through_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """The same config.json after transformers has read it and filled in every default."""
    from transformers import AutoConfig

    settings = dict(config)
    return AutoConfig.for_model(settings.pop("model_type"), **settings).to_dict()


@pytest.mark.parametrize("name", RELEASED)
def test_shapes_have_as_many_parameters_as_the_released_models(name: str) -> None:
    assert shape(name).num_parameters == RELEASED[name]


@pytest.mark.parametrize("name", SHAPES)
def test_every_weight_is_listed(name: str) -> None:
    total = 0
    for dimensions in parameter_shapes(shape(name)).values():
        size = 1
        for dimension in dimensions:
            size *= dimension
        total += size
    assert total == shape(name).num_parameters


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_survives_the_way_through_transformers(name: str) -> None:
    config = shape(name)
    assert config_from_hf(config_to_hf(config)) == config
    assert config_from_hf(through_transformers(config_to_hf(config))) == config


def only_the_shape(config: ModelConfig) -> dict[str, Any]:
    values = config.to_dict()
    del values["eos_token_ids"]  # class defaults of end tokens are guesses, not facts about a file
    return values


@pytest.mark.parametrize("family", DEFAULTS)
def test_what_a_config_leaves_out_means_what_it_means_to_transformers(family: str) -> None:
    config = {"model_type": family, **MINIMAL}
    ours = config_from_hf(config)
    assert only_the_shape(ours) == only_the_shape(config_from_hf(through_transformers(config)))


@pytest.mark.parametrize(
    "extra",
    [
        {"sliding_window": 16, "use_sliding_window": True},
        {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 3},
        {"sliding_window": 16, "use_sliding_window": False},
        {"sliding_window": None},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_theta": 5e5},
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0}},
        {"head_dim": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-5},
        {"tie_word_embeddings": True},
    ],
)
@pytest.mark.parametrize("family", DEFAULTS)
def test_settings_mean_what_they_mean_to_transformers(family: str, extra: dict[str, Any]) -> None:
    config = {"model_type": family, **MINIMAL, **extra}
    if family in ("llama", "mistral"):
        config.pop("use_sliding_window", None)
    ours = config_from_hf(config)
    assert only_the_shape(ours) == only_the_shape(config_from_hf(through_transformers(config)))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_experts": 8}, "num_experts"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 0.7}}, "'mscale'"),
        ({"layer_types": ["linear_attention"] * 30}, "'linear_attention'"),
        ({"hidden_size": None}, "config.json lacks hidden_size"),
    ],
)
def test_what_the_decoder_lacks_is_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf({"model_type": "qwen2", **MINIMAL, **extra})


def test_end_tokens_come_from_both_files() -> None:
    config = {"model_type": "llama", **MINIMAL, "eos_token_id": 2}
    assert config_from_hf(config).eos_token_ids == (2,)
    assert config_from_hf(config, {"eos_token_id": [9, 2]}).eos_token_ids == (9, 2)
    assert config_from_hf({"model_type": "llama", **MINIMAL}).eos_token_ids == ()


def test_the_catalog_lists_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path))
    entries = {entry.name: entry for entry in available()}
    assert entries.keys() == {"smollm2-135m", *(f"random:{name}" for name in SHAPES)}
    trained = entries["smollm2-135m"]
    assert (trained.parameters, trained.weight_bytes) == (134_515_008, 538_060_032)
    assert trained.licence == "Apache-2.0"
    assert not trained.cached
    converted_directory().mkdir(parents=True)
    (converted_directory() / "pdlab.json").write_text('{"files": {}}')
    assert available()[0].cached


def test_an_unknown_shape_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no shape is called 'gpt-5'; there are: tiny-llama, "):
        shape("gpt-5")
