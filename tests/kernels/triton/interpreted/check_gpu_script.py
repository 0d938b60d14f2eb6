"""The script for a GPU, as far as it goes without one: its checks, at a tiny shape in fp16."""

from dataclasses import replace

import pytest
import torch
from pdlab_kernels.triton import gpu_check
from pdlab_kernels.triton.gpu_check import TINY, Verdict, verdicts


@pytest.fixture(scope="module")
def found() -> list[Verdict]:
    torch.manual_seed(0)
    return list(verdicts("cpu", torch.float16, TINY, lens=(40, 5), chunks=(3, 1), rows=(3,)))


KINDS = ("decode", "prefill", "rope", "add-rms-norm", "silu-mul", "int8-linear", "int4-linear",
         "sample")  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_is_checked_and_right(kind: str, found: list[Verdict]) -> None:
    of_kind = [verdict for verdict in found if verdict.name.startswith(kind)]
    assert of_kind
    assert all(verdict.holds for verdict in of_kind), of_kind


def test_nothing_is_checked_that_is_no_kernel(found: list[Verdict]) -> None:
    assert all(verdict.name.startswith(KINDS) for verdict in found)
    assert len({verdict.name for verdict in found}) == len(found)


def test_a_wrong_kernel_would_be_told() -> None:
    right = Verdict("x", 0.0, 1e-3)
    assert right.holds
    assert not replace(right, error=2e-3).holds
    assert not replace(right, error=float("nan")).holds


def test_without_a_device_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(gpu_check.NoDevice, match="no CUDA device"):
        gpu_check.check()
