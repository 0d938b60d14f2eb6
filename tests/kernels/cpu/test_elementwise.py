"""Norm, gate and choice of the largest compute what torch does."""

import numpy as np
import pytest
import torch
from pdlab_kernels.cpu import reference
from pdlab_kernels.cpu.target import TARGET

if TARGET == "torch":
    pytest.skip("no compiled kernels here", allow_module_level=True)

from pdlab_kernels.cpu.elementwise import argmax, rms_norm, silu_multiply

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


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_argmax_is_the_first_of_the_largest(count: int) -> None:
    values = torch.randn(count + 2).clamp(max=1.0)  # with ties where some are clamped
    values[0] = values[-1] = 9  # outside
    found = argmax(values.numpy(), 1, count)
    inside = values[1:-1]
    assert found == (inside == inside.max()).nonzero()[0].item()


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ([torch.nan] * 9, 0),
        ([1.0, torch.inf, torch.nan, torch.nan], 2),
        ([1.0] * 8 + [torch.nan, 2.0], 8),
        ([1.0, torch.inf, torch.inf] * 4, 1),
        ([-torch.inf] * 20, 0),
        ([-torch.inf] * 19 + [-3e38], 19),
    ],
)
def test_argmax_of_what_is_not_finite(values: list[float], first: int) -> None:
    assert argmax(np.array(values, np.float32), 0, len(values)) == first
    assert torch.tensor(values).argmax().item() == first
