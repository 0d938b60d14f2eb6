"""Norm, gate and choice of the largest compute what torch does."""

import numpy as np
import pytest
import torch
from pdlab_kernels.cpu import reference
from pdlab_kernels.cpu.target import TARGET

if TARGET == "torch":
    pytest.skip("no compiled kernels here", allow_module_level=True)

from pdlab_kernels.cpu.elementwise import rms_norm, silu_multiply

EPSILON = 1e-5


@pytest.mark.parametrize("width", [8, 64, 576])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rms_norm(width: int, size: float) -> None:
    x, weight = torch.randn(3, width) * size, torch.randn(width)
    out = np.empty(3 * width, np.float32)
    for row in range(3):
        rms_norm(
            x.view(-1).numpy(), row * width, weight.numpy(), 0, EPSILON, width, out, row * width
        )
    expected = reference.rms_norm(x, weight, EPSILON)
    torch.testing.assert_close(torch.from_numpy(out).view(3, width), expected)


def test_silu_multiply_from_the_smallest_to_the_largest() -> None:
    gate = torch.cat([torch.linspace(-100, 100, 4000), torch.tensor([0.0, -0.0] * 4)])
    up, out = torch.randn(len(gate)), np.empty(len(gate), np.float32)
    silu_multiply(gate.numpy(), 0, up.numpy(), 0, len(gate), out, 0)
    expected = reference.silu_multiply(gate.double(), up.double()).float()
    torch.testing.assert_close(torch.from_numpy(out), expected, rtol=1e-6, atol=1e-30)


def test_silu_multiply_may_write_over_its_input_and_keeps_nan() -> None:
    both = torch.randn(32)
    both[3] = torch.nan
    expected = reference.silu_multiply(both[:16], both[16:])
    silu_multiply(both.numpy(), 0, both.numpy(), 16, 16, both.numpy(), 0)
    torch.testing.assert_close(both[:16], expected, equal_nan=True)
