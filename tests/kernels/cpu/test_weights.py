"""Packing loses nothing but what the format loses, and GGUF's blocks keep every bit."""

import gguf
import numpy as np
import pytest
import torch
from pdlab_kernels.cpu.weights import (
    FORMATS,
    Weight,
    codes_and_scales,
    pack,
    pack_gguf,
    pack_int4,
    pack_int8,
    pack_q8_0,
    unpack,
)

SHAPES = [(1, 32), (16, 64), (37, 96), (100, 1536)]


def random_weight(out: int, inputs: int) -> torch.Tensor:
    return torch.randn(out, inputs, generator=torch.Generator().manual_seed(out)) * 0.05


@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_int4_codes_scales_and_minima_come_back(out: int, inputs: int) -> None:
    random = np.random.default_rng(out)
    codes = random.integers(0, 16, (out, inputs), np.uint8)
    scales, minima = random.normal(size=(2, out, inputs // 32)).astype(np.float16)
    found = codes_and_scales(pack_int4(codes, scales, minima))
    for given, back in zip((codes, scales, minima), found, strict=True):
        np.testing.assert_array_equal(given, back)


@pytest.mark.parametrize(("out", "inputs"), SHAPES)
def test_int8_and_q8_0_codes_and_scales_come_back(out: int, inputs: int) -> None:
    random = np.random.default_rng(out)
    codes = random.integers(-128, 128, (out, inputs), np.int8)
    scales = random.normal(size=(out, inputs // 32)).astype(np.float16)
    found = codes_and_scales(pack_q8_0(codes, scales))
    np.testing.assert_array_equal(codes, found[0])
    np.testing.assert_array_equal(scales, found[1])
    row_scales = random.normal(size=out).astype(np.float32)
    found = codes_and_scales(pack_int8(codes, row_scales))
    np.testing.assert_array_equal(codes, found[0])
    np.testing.assert_array_equal(row_scales[:, None], found[1])


@pytest.mark.parametrize(("format", "steps"), [("int8", 127), ("q8_0", 127), ("int4", 15)])
def test_rounding_is_to_the_nearest_code(format, steps: int) -> None:
    weight = random_weight(37, 96)
    error = (unpack(pack(weight, format)) - weight).abs().view(37, -1, 32)
    groups = weight.view(37, -1, 32)
    if format == "int4":
        step = (groups.amax(2) - groups.amin(2)) / steps
    else:
        whole = groups if format == "q8_0" else weight.view(37, 1, -1).expand(37, 3, 96)
        step = whole.abs().amax(2) / steps
    # half a step, and what rounding scale and minimum to float16 moves
    assert (error.amax(2) <= 0.5 * step + 2e-3 * groups.abs().amax(2)).all()


def test_fp32_shares_the_memory_of_the_tensor() -> None:
    weight = random_weight(5, 64)
    packed = pack(weight, "fp32")
    assert packed.data.ctypes.data == weight.data_ptr()
    assert torch.equal(unpack(packed), weight)


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_of_zeros_stays_zero(format) -> None:
    assert not unpack(pack(torch.zeros(3, 64), format)).any()


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize(("out", "inputs"), [(1, 32), (37, 96)])
def test_gguf_blocks_are_worth_what_the_gguf_package_says(name, out: int, inputs: int) -> None:
    kind = gguf.GGMLQuantizationType[name]
    blocks = gguf.quantize(random_weight(out, inputs).numpy(), kind)
    packed = pack_gguf(blocks, name, inputs)
    assert (packed.out_features, packed.in_features) == (out, inputs)
    np.testing.assert_array_equal(unpack(packed).numpy(), gguf.dequantize(blocks, kind))


def test_bytes_a_weight() -> None:
    per_weight = {
        format: pack(random_weight(32, 1024), format).nbytes / (32 * 1024) for format in FORMATS
    }
    assert per_weight == {"fp32": 4, "int8": 1 + 4 / 1024, "q8_0": 1.0625, "int4": 0.625}


CODES = np.zeros((2, 64), np.uint8)
HALVES = np.ones((2, 2), np.float16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(torch.zeros(2, 32), "int5"), "format='int5'"),
        (lambda: pack(torch.zeros(32), "int8"), "weight: a float matrix"),
        (lambda: pack(torch.zeros(2, 32, dtype=torch.int8), "int8"), "weight: a float matrix"),
        (lambda: pack(torch.zeros(2, 48), "int8"), "48 columns; a multiple of 32"),
        (lambda: pack(torch.zeros(0, 32), "int8"), "0 rows"),
        (lambda: pack(torch.full((1, 32), torch.nan), "int4"), "NaN"),
        (lambda: pack(torch.full((1, 32), 1e9), "q8_0"), "scales: they hold NaN or infinity"),
        (lambda: pack_int4(CODES + 16, HALVES, HALVES), "codes: they reach 16"),
        (lambda: pack_int4(CODES, HALVES[:1], HALVES), r"scales: float16 \(1, 2\)"),
        (lambda: pack_int4(CODES, HALVES, HALVES * np.inf), "minima: they hold"),
        (lambda: pack_int8(CODES, np.ones(2, np.float32)), "codes: a matrix of int8"),
        (lambda: pack_q8_0(CODES.view(np.int8), HALVES.astype(np.float32)), "scales: float32"),
        (lambda: pack_gguf(CODES, "Q5_0", 32), "type_name='Q5_0'"),
        (lambda: pack_gguf(CODES, "Q4_1", 33), "in_features=33"),
        (lambda: pack_gguf(CODES, "Q4_1", 32), "rows of 20"),
        (lambda: codes_and_scales(pack(torch.zeros(1, 32), "fp32")), "fp32 has no codes"),
    ],
)
def test_bad_input_is_refused(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_weight_prints_without_its_bytes() -> None:
    weight: Weight = pack(torch.zeros(2, 32), "int4")
    assert repr(weight) == "Weight(format='int4', out_features=2, in_features=32)"
