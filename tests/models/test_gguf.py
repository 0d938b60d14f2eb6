"""GGUF: read against the `gguf` package, converted against transformers' own conversion."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pdlab.models.catalog import shape
from pdlab.models.config import ModelConfig
from pdlab.models.gguf import (
    LAYER_NAMES,
    TOP_NAMES,
    config_from_gguf,
    hugging_face_name,
    weights_from_gguf,
)
from pdlab.models.gguf_file import GGUFFile
from pdlab.models.gguf_tokenizer import eos_token_ids, tokenizer_from_gguf
from pdlab.models.random_weights import random_weights
from pdlab.models.rope import apply_rope, inverse_frequencies, rope_tables

F32, Q8_0, Q4_1 = (gguf.GGMLQuantizationType[name] for name in ("F32", "Q8_0", "Q4_1"))
VOCABULARY = ["<|endoftext|>", "<|im_end|>", *(chr(code) for code in range(33, 127)), "Ġ", "ab"]


def gguf_name(name: str) -> str:
    """The inverse of `hugging_face_name`, from the same tables."""
    stem, _, kind = name.rpartition(".")
    for ours, theirs in TOP_NAMES.items():
        if stem == theirs:
            return f"{ours}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    (ours,) = [ours for ours, theirs in LAYER_NAMES.items() if theirs == part]
    return f"blk.{layer}.{ours}.{kind}"


def permute(weights: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter does to q and k of architecture llama."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    path: Path,
    config: ModelConfig,
    quantization: gguf.GGMLQuantizationType = F32,
    **metadata: Any,
) -> dict[str, torch.Tensor]:
    """Write random weights as llama.cpp would; give back what a reader should find."""
    architecture = "llama" if config.family == "mistral" else config.family
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_model_len)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3, 3] + [1] * (len(VOCABULARY) - 2))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    for key, value in metadata.items():
        key = key.replace("__", ".").replace("ARCH", architecture)
        add: dict[type, Any] = {
            str: writer.add_string,
            int: writer.add_uint32,
            float: writer.add_float32,
        }
        add[type(value)](key, value)
    expected = {}
    for name, tensor in random_weights(config, torch.float32, torch.device("cpu")):
        values = tensor.numpy()
        kind = quantization if values.ndim == 2 else F32
        if architecture == "llama" and ".q_proj." in name:
            values = permute(values, config.num_heads)
        if architecture == "llama" and ".k_proj." in name:
            values = permute(values, config.num_kv_heads)
        stored = gguf.quants.quantize(values, kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=kind)
        expected[name] = tensor
    if config.rope_scaling["rope_type"] == "llama3":
        plain = replace(config, rope_scaling={"rope_type": "default"})
        divisors = inverse_frequencies(plain)[0] / inverse_frequencies(config)[0]
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_config_and_weights_come_back(name: str, tmp_path: Path) -> None:
    config = shape(name)
    expected = write_gguf(tmp_path / "m.gguf", config)
    file = GGUFFile(tmp_path / "m.gguf")
    found = config_from_gguf(file)
    family = "llama" if config.family == "mistral" else config.family
    assert found == replace(config, family=family, layer_windows=(), eos_token_ids=(1, 0))
    weights = dict(weights_from_gguf(file, found))
    assert weights.keys() == expected.keys()
    for key, tensor in weights.items():
        assert torch.equal(tensor, expected[key]), key


def test_a_sliding_window_in_the_metadata_is_kept(tmp_path: Path) -> None:
    config = shape("tiny-mistral")
    write_gguf(tmp_path / "m.gguf", config, ARCH__attention__sliding_window=24)
    found = config_from_gguf(GGUFFile(tmp_path / "m.gguf"))
    assert found.layer_windows == config.layer_windows


def test_converted_projections_attend_as_the_stored_ones_do(tmp_path: Path) -> None:
    """GGUF's q and k turn neighbouring rows as pairs (as Meta's code does), Hugging Face's rows
    half a head apart. Scores of the first on what is stored equal those of the second on what is
    converted."""
    config = shape("tiny-llama")
    write_gguf(tmp_path / "m.gguf", config)
    file = GGUFFile(tmp_path / "m.gguf")
    converted = dict(weights_from_gguf(file, config))
    x = torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(config, 5, "cpu")
    turns = torch.complex(cos, sin)[:, None]

    def neighbours(stored: str) -> torch.Tensor:
        heads = (x @ torch.from_numpy(file.read(stored)).T).unflatten(-1, (-1, config.head_dim))
        pairs = torch.view_as_complex(heads.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2)

    def halves(name: str) -> torch.Tensor:
        heads = (x @ converted[name].T).unflatten(-1, (-1, config.head_dim))
        return apply_rope(heads, cos, sin)

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(config.group_size, dim=1))

    stored = scores(neighbours("blk.1.attn_q.weight"), neighbours("blk.1.attn_k.weight"))
    prefix = "model.layers.1.self_attn."
    ours = scores(halves(f"{prefix}q_proj.weight"), halves(f"{prefix}k_proj.weight"))
    torch.testing.assert_close(ours, stored, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", [F32, Q8_0, Q4_1])
def test_reading_equals_the_gguf_package(
    quantization: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, shape("tiny-llama"), quantization)
    file, reference = GGUFFile(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = file.read(tensor.name)
        assert found.dtype == np.float32
        assert found.flags.writeable
        assert np.array_equal(found, expected.reshape(found.shape)), tensor.name
    for key, value in file.metadata.items():
        assert reference.fields[key].contents() == value


def test_llama_3_scaling_is_found_in_its_divisors(tmp_path: Path) -> None:
    scaling = shape("llama-1b").rope_scaling
    config = replace(shape("tiny-llama"), rope_scaling=scaling, rope_theta=500_000.0, head_dim=32)
    write_gguf(tmp_path / "m.gguf", config)
    assert config_from_gguf(GGUFFile(tmp_path / "m.gguf")).rope_scaling == scaling


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    scaling = shape("llama-1b").rope_scaling | {"high_freq_factor": 8.0}
    config = replace(shape("tiny-llama"), rope_scaling=scaling, rope_theta=500_000.0, head_dim=32)
    write_gguf(tmp_path / "m.gguf", config)
    with pytest.raises(ValueError, match="not those of Llama 3"):
        config_from_gguf(GGUFFile(tmp_path / "m.gguf"))


def test_yarn_scaling_is_read(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "m.gguf",
        shape("tiny-qwen2"),
        ARCH__rope__scaling__type="yarn",
        ARCH__rope__scaling__factor=4.0,
        ARCH__rope__scaling__original_context_length=256,
    )
    assert config_from_gguf(GGUFFile(tmp_path / "m.gguf")).rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"ARCH__expert_count": 8}, "mixture of experts"),
        ({"ARCH__rope__dimension_count": 8}, "rope.dimension_count=8 differs from head_dim=16"),
        ({"ARCH__rope__scaling__type": "longrope"}, "'longrope' is not supported"),
        ({"split__count": 3}, "one of 3 parts"),
    ],
)
def test_what_the_decoder_lacks_is_refused(
    metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", shape("tiny-llama"), **metadata)
    with pytest.raises(ValueError, match=message):
        config_from_gguf(GGUFFile(tmp_path / "m.gguf"))


def test_unknown_tensors_and_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'blk\.0\.ssm_in\.weight' has no place"):
        hugging_face_name("blk.0.ssm_in.weight")
    write_gguf(tmp_path / "m.gguf", shape("tiny-llama"))
    file = GGUFFile(tmp_path / "m.gguf")
    file.metadata["general.architecture"] = "mamba"
    with pytest.raises(ValueError, match="'mamba' is not supported"):
        config_from_gguf(file)


@pytest.mark.parametrize("keep", [0.001, 0.01, 0.5, 0.999])
def test_a_file_cut_short_is_refused(keep: float, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, shape("tiny-llama"))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])

    def read_all() -> None:
        file = GGUFFile(path)
        list(weights_from_gguf(file, config_from_gguf(file)))

    with pytest.raises(ValueError, match="cut short"):
        read_all()


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ValueError, match="is not a GGUF file"):
        GGUFFile(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"GGUF\x01\x00\x00\x00" + bytes(100))
    with pytest.raises(ValueError, match="GGUF version 1"):
        GGUFFile(tmp_path / "m.gguf")


def test_unknown_tokenizers_are_refused() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": ["a", "b"],
        "tokenizer.ggml.merges": [],
    }
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre='tekken' .* smollm, llama-bpe"):
        tokenizer_from_gguf(metadata)
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model='llama' is not supported"):
        tokenizer_from_gguf(metadata | {"tokenizer.ggml.model": "llama"})


def test_end_tokens_are_the_declared_one_and_other_control_tokens() -> None:
    metadata = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": ["<|endoftext|>", "x", "<|im_end|>", "</s>"],
        "tokenizer.ggml.token_type": [3, 1, 3, 1],  # this </s> is ordinary text
    }
    assert eos_token_ids(metadata) == (2, 0)
