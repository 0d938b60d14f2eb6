"""`load(weights=)`: a GGUF file's own blocks, quantized formats, the cache, and what is refused."""

from pathlib import Path

import gguf
import pytest
import torch
from pdlab_kernels.cpu.weights import unpack

from pdlab import Engine, EngineConfig, Model, SamplingParams, load
from pdlab.costmodel import Chunk, step_cost
from pdlab.models import packed_cache
from pdlab.models.calibration_text import calibration_windows
from pdlab.models.catalog import shape
from pdlab.quantize import matrices
from tests.models.test_gguf import write_gguf
from tests.models.test_loading import assert_same_weights, write_directory

KINDS = {"Q4_0": "int4", "Q4_1": "int4", "Q8_0": "q8_0"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def assert_worth_its_codes(model: Model) -> None:
    assert model.packed is not None
    for (name, weight), (_, tensor) in zip(
        model.packed.named(), matrices(model.decoder), strict=True
    ):
        assert torch.equal(unpack(weight), tensor), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen3"])
def test_a_files_own_blocks_are_worth_what_it_dequantizes_to(
    name: str, kind: str, tmp_path: Path
) -> None:
    """Tied and untied heads, biases, and rows of q and k in Meta's order."""
    path = tmp_path / "m.gguf"
    write_gguf(path, shape(name), gguf.GGMLQuantizationType[kind])
    plain, packed = load(str(path)), load(str(path), weights="file")
    assert packed.weights == "file"
    assert packed.packed is not None
    assert {weight.format for _, weight in packed.packed.named()} == {KINDS[kind]}
    assert_same_weights(plain, packed)
    assert_worth_its_codes(packed)


def test_the_default_models_own_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix, bit for bit; and int4 finds them again, as that is what the file holds."""
    monkeypatch.delenv("PDLAB_CACHE")
    model = load(weights="file", progress=False)
    assert model.packed is not None
    assert model.packed.head.format == "q8_0"
    assert {layer.down.format for layer in model.packed.layers} == {"int4"}
    assert_worth_its_codes(model)
    assert model.packed.nbytes == 96_436_224


@pytest.mark.parametrize("weights", ["int8", "q8_0", "int4", "int4:gptq/int4"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_torch_computes_the_model_that_the_codes_stand_for(weights: str, name: str) -> None:
    """The engine on the packed model equals it on a plain model with the unpacked weights."""
    packed = load(f"random:{name}", weights=weights, progress=False)
    assert (packed.weights, packed.dtype_name) == (weights, "fp32")
    assert_worth_its_codes(packed)
    plain = load(f"random:{name}")
    for (_, target), (_, weight) in zip(
        matrices(plain.decoder), packed.packed.named(), strict=True
    ):
        with torch.no_grad():
            target.copy_(unpack(weight))
    prompts, params = [[1, 2, 3], list(range(40))], SamplingParams(max_tokens=12, logprobs=3)

    def outputs(model: Model) -> list:
        with Engine(model, EngineConfig(exact=True)) as engine:
            return [(o.token_ids, o.logprobs) for o in engine.generate(prompts, params)]

    assert outputs(packed) == outputs(plain)


def test_a_directory_is_quantized(tmp_path: Path) -> None:
    write_directory(tmp_path / "m", shape("tiny-qwen3"))
    ours = load(str(tmp_path / "m"), weights="int8")
    theirs = load("random:tiny-qwen3", weights="int8")
    assert_same_weights(ours, theirs)


def test_calibrated_codes_are_found_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load("random:tiny-qwen2", weights="int4:gptq", progress=False)
    monkeypatch.setattr(packed_cache, "pack_decoder", None)  # not called again
    second = load("random:tiny-qwen2", weights="int4:gptq", progress=False)
    assert_same_weights(first, second)
    assert second.packed is not None
    assert_worth_its_codes(second)
    assert second.packed.head.data.ctypes.data % 64 == 0
    monkeypatch.undo()
    monkeypatch.setenv("PDLAB_CACHE", str(own_cache))
    load("random:tiny-llama", weights="int4:gptq", progress=False)  # other weights: another place
    load("random:tiny-qwen2", weights="int4:gptq/int4", progress=False)
    assert len(list((own_cache / "models").iterdir())) == 3


def test_a_cache_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDLAB_CACHE", str(tmp_path / "file"))
    assert load("random:tiny-llama", weights="int4:gptq", progress=False).packed is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": "int5"}, "weights='int5'"),
        ({"weights": 4}, "weights=4"),
        (
            {"weights": "int8", "dtype": "bf16"},
            "'int8' needs device='cpu' and dtype='fp32'",
        ),
        ({"weights": "bf16", "dtype": "fp32"}, "weights='bf16' is not dtype=torch.float32"),
        ({"weights": "file"}, "weights='file' needs a model that comes as a GGUF file"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load("random:tiny-llama", **arguments)


def test_blocks_that_kernels_cannot_read_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, shape("tiny-llama"))
    with pytest.raises(ValueError, match=r"needs matrices in Q4_0, Q4_1, Q8_0; .* as F32"):
        load(str(path), weights="file")
    write_directory(tmp_path / "m", shape("tiny-llama"))
    with pytest.raises(ValueError, match="weights='file' needs a model that comes as a GGUF"):
        load(str(tmp_path / "m"), weights="file")


def test_a_dtype_is_a_format_too() -> None:
    model = load("random:tiny-llama", weights="bf16")
    assert (model.weights, model.dtype, model.packed) == ("bf16", torch.bfloat16, None)
    assert load("random:tiny-llama").weights == "fp32"
    assert load("random:tiny-llama", weights="fp32").packed is None


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2"])
def test_a_step_is_charged_what_it_reads(name: str) -> None:
    """Every packed matrix, norms and biases once; of an embedding of its own, some rows."""
    model = load(f"random:{name}", weights="int4")
    assert model.packed is not None
    floats = 4 * sum(p.numel() for p in model.decoder.parameters() if p.ndim == 1)
    embedding = 0 if model.config.tie_word_embeddings else model.decoder.embedding.nbytes
    assert model.weight_bytes == model.packed.nbytes + floats + embedding
    with Engine(model) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        read = engine.trace.steps[1].bytes_moved["weights"]
        assert engine.trace.model["weights"] == "int4"
        assert engine.trace.model["weight_bytes"] == model.weight_bytes
    rows = 0 if model.config.tie_word_embeddings else 64 * model.head_element_bytes
    assert read == model.packed.nbytes + floats + rows


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_plain_weights_are_charged_as_ever(dtype: str) -> None:
    model = load("random:tiny-llama", dtype=dtype)
    size = model.dtype.itemsize
    assert (model.weight_element_bytes, model.head_element_bytes) == (size, size)
    assert model.weight_bytes == model.decoder.weight_bytes
    sizes = {"weight_element_bytes": size, "kv_element_bytes": size}
    heads = {"weight_element_bytes": model.weight_element_bytes, "head_element_bytes": float(size)}
    chunk = [Chunk(5, 3)]
    assert step_cost(model.config, chunk, num_sampled=1, **sizes) == step_cost(
        model.config, chunk, num_sampled=1, kv_element_bytes=size, **heads
    )


def test_what_is_read_for_calibration_is_the_same_each_time(smollm2: Model) -> None:
    windows = calibration_windows(smollm2.tokenizer, smollm2.config)
    assert windows == calibration_windows(smollm2.tokenizer, smollm2.config)
    assert {len(ids) for ids in windows} == {256}
    short = calibration_windows(None, shape("tiny-llama"))
    assert {token for ids in short for token in ids} <= set(range(256))
