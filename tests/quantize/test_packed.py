"""A decoder packed in every format: what comes back, what it weighs, and what is refused."""

import pytest
import torch
from pdlab_kernels.cpu.weights import pack, unpack

from pdlab.models.catalog import shape
from pdlab.models.decoder import Decoder
from pdlab.models.random_weights import random_weights
from pdlab.quantize import (
    fill_decoder,
    matrices,
    pack_decoder,
    relative_error,
    relative_errors,
)
from tests.helpers import TINY

CPU = torch.device("cpu")
TEXT = [[(7 * i + 3 * j) % 256 for i in range(32)] for j in range(4)]
MOST_ERROR = {"fp32": 0.0, "int8": 0.02, "q8_0": 0.02, "int4": 0.15}
FORMATS = ["fp32", "int8", "q8_0", "int4", "int4/int4", "int4:gptq", "int4:gptq/int4"]


def decoder(name: str = "tiny-qwen2") -> Decoder:
    config = shape(name)
    made = Decoder(config)
    made.load_weights(random_weights(config, torch.float32, CPU))
    return made


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-mistral", "tiny-qwen2", "tiny-qwen3"])
@pytest.mark.parametrize("format", FORMATS)
def test_a_filled_decoder_holds_what_the_codes_stand_for(name: str, format: str) -> None:
    original, filled = decoder(name), decoder(name)
    packed = pack_decoder(original, format, calibration=TEXT)
    fill_decoder(filled, packed)
    assert packed.format == format
    for (key, weight), (_, tensor), (_, before) in zip(
        packed.named(), matrices(filled), matrices(original), strict=True
    ):
        assert torch.equal(unpack(weight), tensor), key
        assert relative_error([(before, weight)]) <= MOST_ERROR[weight.format], key
    ours, theirs = dict(filled.named_parameters()), dict(original.named_parameters())
    for key in (key for key, parameter in theirs.items() if parameter.ndim == 1):
        assert torch.equal(ours[key], theirs[key]), key
    untied = original.embedding is not original.head
    assert torch.equal(filled.embedding, original.embedding if untied else unpack(packed.head))


def test_fp32_shares_the_decoders_memory() -> None:
    original = decoder()
    packed = pack_decoder(original, "fp32")
    assert packed.head.data.ctypes.data == original.head.data_ptr()
    assert packed.layers[0].down.data.ctypes.data == original.layers[0].down.weight.data_ptr()


def test_bytes_count_the_head_once() -> None:
    packed = pack_decoder(decoder(), "int4")
    assert packed.nbytes == sum(weight.nbytes for _, weight in packed.named())
    assert packed.layer_bytes == packed.nbytes - packed.head.nbytes
    assert packed.head.nbytes == 256 * 64 * 1.0625
    assert packed.layers[1].down.nbytes == 64 * 160 * 0.625


@pytest.mark.parametrize("format", ["int4:gptq/int4", "int4/int4"])
def test_the_same_codes_come_each_time(format: str) -> None:
    first, second = (pack_decoder(decoder(), format, calibration=TEXT) for _ in range(2))
    for (name, ours), (_, theirs) in zip(first.named(), second.named(), strict=True):
        assert ours.data.tobytes() == theirs.data.tobytes(), name


@pytest.mark.parametrize("format", ["int4/int4", "int4:gptq/int4"])
def test_weights_that_lie_on_a_grid_of_four_bits_stay(format: str) -> None:
    """As those of a model that was read from a 4-bit file do."""
    original = decoder()
    fill_decoder(original, pack_decoder(original, "int4/int4"))
    errors = relative_errors(original, pack_decoder(original, format, calibration=TEXT))
    assert set(errors.values()) == {0.0}


def test_errors_are_told_by_linear_layer() -> None:
    original = decoder()
    packed = pack_decoder(original, "int4")
    errors = relative_errors(original, packed)
    assert list(errors) == ["qkv", "output", "gate_up", "down", "head"]
    assert errors["head"] == pytest.approx(relative_error([(original.head, packed.head)]))
    assert all(0.04 < errors[name] < 0.12 for name in ("qkv", "output", "gate_up", "down"))
    assert set(relative_errors(original, pack_decoder(original, "fp32")).values()) == {0.0}
    zeros = torch.zeros(2, 32)
    assert relative_error([(zeros, pack(zeros, "int8"))]) == 0.0


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueError, match="calibration is empty"):
        pack_decoder(decoder(), "int4:gptq")
    narrow = Decoder(TINY)
    narrow.load_weights(random_weights(TINY, torch.float32, CPU))
    with pytest.raises(ValueError, match=r"'int8' does not fit layers\.0\.down.*48 columns"):
        pack_decoder(narrow, "int8")
