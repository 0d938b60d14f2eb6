"""Norm, gated MLP product and quantized matrix products against their references."""

import pytest
import torch
from pdlab_kernels.triton import elementwise, linear, reference

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("size", [1, 576, 2048])
def test_add_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(3, size, dtype=dtype) for _ in range(2))
    weight = torch.randn(size, dtype=dtype)
    for got, expected in zip(
        elementwise.add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, residual, weight, 1e-5),
        strict=True,
    ):
        assert_close(got, expected)


def test_norm_alone_leaves_x_as_it_is() -> None:
    x, weight = torch.randn(2, 64), torch.randn(64)
    before = x.clone()
    normed, total = elementwise.add_rms_norm(x, None, weight, 0.1)
    assert total is x
    assert torch.equal(x, before)
    assert_close(normed, reference.add_rms_norm(x, None, weight, 0.1)[0])


def test_rows_in_which_all_is_zero_stay_zero() -> None:
    zeros = torch.zeros(2, 96)
    assert not elementwise.add_rms_norm(zeros, zeros, torch.ones(96), 1e-5)[0].any()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(0, 64), (1, 1), (3, 1536), (2, 2100)])
def test_silu_mul(rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = torch.randn(rows, 2 * size, dtype=dtype) * 5
    assert_close(elementwise.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_of_great_numbers() -> None:
    gate_up = torch.tensor([[-200.0, 200.0, 0.0, 3.0, 4.0, 5.0]])
    assert elementwise.silu_mul(gate_up).tolist() == [[0.0, 800.0, 0.0]]


SHAPES = [(1, 96, 32, 1), (3, 33, 64, 1), (16, 40, 320, 2), (17, 64, 544, 1), (70, 5, 96, 1),
          (2, 33, 1056, 3)]  # fmt: skip
"""Rows, size_out, size_in, splits: one of each, across tiles, and more splits than steps."""


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("rows", "size_out", "size_in", "splits"), SHAPES)
def test_int8_linear(rows, size_out, size_in, splits, dtype) -> None:
    x, bias = torch.randn(rows, size_in, dtype=dtype), torch.randn(size_out, dtype=dtype)
    codes = torch.randint(-128, 128, (size_out, size_in), dtype=torch.int8)
    scales = torch.rand(size_out) / 100
    args = (x, codes, scales, bias if splits < 3 else None)
    got = linear.int8_linear(*args, num_splits=splits)
    assert_close(got, reference.int8_linear(*args))


@pytest.mark.parametrize(("rows", "size_out", "size_in", "splits"), SHAPES)
def test_int8_linear_in_groups(rows, size_out, size_in, splits) -> None:
    x, bias = torch.randn(rows, size_in), torch.randn(size_out)
    codes = torch.randint(-128, 128, (size_out, size_in), dtype=torch.int8)
    scales = (torch.rand(size_out, size_in // 32) / 100).half()
    args = (x, codes, scales, bias if splits < 3 else None)
    got = linear.int8_linear(*args, num_splits=splits)
    assert_close(got, reference.int8_linear(*args))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("rows", "size_out", "size_in", "splits"), SHAPES)
def test_int4_linear(rows, size_out, size_in, splits, dtype) -> None:
    x, bias = torch.randn(rows, size_in, dtype=dtype), torch.randn(size_out, dtype=dtype)
    codes = torch.randint(256, (size_out, size_in // 2), dtype=torch.uint8)
    scales, minima = torch.randn(2, size_out, size_in // 32).half().mul_(0.1).unbind()
    args = (x, codes, scales, minima, bias if splits < 3 else None)
    got = linear.int4_linear(*args, num_splits=splits)
    expected = reference.int4_linear(*args)
    tolerance = TOLERANCE[dtype] * (10 if dtype == torch.float16 else 1)  # weights are rounded
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


def test_int4_is_the_q4_1_of_gguf() -> None:
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    weight = torch.randn(6, 64).numpy()
    packed = quantize(weight, GGMLQuantizationType.Q4_1)
    blocks = torch.from_numpy(packed).view(6, 2, 20)
    scales, minima = (blocks[..., i : i + 2].contiguous().view(torch.float16)[..., 0]
                      for i in (0, 2))  # fmt: skip
    codes = blocks[..., 4:].reshape(6, 32)
    got = linear.int4_linear(torch.eye(64), codes, scales.contiguous(), minima.contiguous())
    expected = dequantize(packed, GGMLQuantizationType.Q4_1)
    np.testing.assert_allclose(got.T.numpy(), expected, atol=1e-6)


def test_int8_in_groups_is_the_q8_0_of_gguf() -> None:
    import numpy as np
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    packed = quantize(torch.randn(6, 64).numpy(), GGMLQuantizationType.Q8_0)
    blocks = torch.from_numpy(packed).view(6, 2, 34)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].contiguous()
    codes = blocks[..., 2:].reshape(6, 64).view(torch.int8)
    got = linear.int8_linear(torch.eye(64), codes, scales)
    expected = dequantize(packed, GGMLQuantizationType.Q8_0)
    np.testing.assert_allclose(got.T.numpy(), expected, atol=1e-6)


def test_no_rows_give_no_rows() -> None:
    codes, scales = torch.zeros(8, 32, dtype=torch.int8), torch.ones(8)
    assert linear.int8_linear(torch.randn(0, 32), codes, scales).shape == (0, 8)
