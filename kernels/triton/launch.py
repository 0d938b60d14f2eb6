"""How a kernel is launched, and what is checked before.

A launcher first makes a `Launch`, from shapes and dtypes alone, then runs it. `resources.py` makes
the same launches from tensors without memory (device "meta") and compiles them without a GPU: what
is compiled there is what is launched here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LEAST_CAPABILITY = (8, 0)
DEFAULT_NUM_SMS = 132
"""Streaming multiprocessors that a launch is planned for where there is no GPU to ask (H100's)."""

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether TRITON_INTERPRET was set when these kernels were decorated; it cannot change later."""


@dataclass(frozen=True)
class Launch:
    """A kernel and all it is called with."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    """Tensors, numbers; None for a tensor that this variant does not have."""
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    contract: bool = True
    """Whether a * b + c may be computed with one rounding (fused multiply-add)."""

    def run(self) -> None:
        if 0 in self.grid:
            return
        self.kernel[self.grid](
            **self.args,
            **self.constants,
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            enable_fp_fusion=self.contract,
        )


def require(holds: bool, message: str) -> None:
    """Raise ValueError(message) if something does not hold."""
    if not holds:
        raise ValueError(message)


def check_tensors(**tensors: Tensor | None) -> None:
    """All on one device that these kernels run on.

    Raises:
        ValueError: they are on several devices, on a CPU without the interpreter, on a GPU that is
            too old; or in bfloat16 in the interpreter, which computes it wrongly.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(given.values())).device
    for name, tensor in given.items():
        require(tensor.device == first, f"{name} is on {tensor.device}, others are on {first}")
        require(
            not (INTERPRETED and tensor.dtype == torch.bfloat16),
            f"{name} is bfloat16, which Triton's interpreter computes wrongly: use fp32 or fp16",
        )
    if first.type == "cuda":
        capability = _capability(first.index)
        require(
            capability >= LEAST_CAPABILITY,
            f"device={first} has compute capability {capability}, at least "
            f"{LEAST_CAPABILITY} is needed",
        )
    else:
        require(
            INTERPRETED or first.type == "meta",
            f"device={first}: these kernels need a CUDA GPU, or TRITON_INTERPRET=1 set before "
            "they are imported",
        )


def check_float(**tensors: Tensor | None) -> None:
    """All of one dtype, fp32, fp16 or bf16."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first = next(iter(given.values())).dtype
    for name, tensor in given.items():
        require(tensor.dtype in FLOATS, f"{name} has dtype {tensor.dtype}, not one of {FLOATS}")
        require(tensor.dtype == first, f"{name} has dtype {tensor.dtype}, others have {first}")


def check_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """The shape is this one; None stands for any size."""
    fits = tensor.dim() == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    wanted = ["any" if size is None else size for size in shape]
    require(fits, f"{name} has shape {list(tensor.shape)}, must be {wanted}")


def check_contiguous(**tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        require(
            tensor is None or tensor.is_contiguous(),
            f"{name} is not contiguous: strides {None if tensor is None else tensor.stride()}",
        )


def check_rows(**tensors: Tensor) -> None:
    """[rows, size] or [rows, heads, size]: rows may be strided, each of them is in one piece."""
    for name, tensor in tensors.items():
        inside = (tensor.shape[2], 1) if tensor.dim() == 3 else (1,)
        require(
            tensor.stride()[1:] == inside,
            f"{name} has strides {tensor.stride()}: each row must be in one piece",
        )


def check_integers(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        require(
            tensor.dtype in (torch.int32, torch.int64),
            f"{name} has dtype {tensor.dtype}, must be int32 or int64",
        )
        require(tensor.is_contiguous(), f"{name} is not contiguous")


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    return _num_sms(device.index) if device.type == "cuda" else DEFAULT_NUM_SMS


def power_of_2(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def ceil_div(n: int, by: int) -> int:
    return -(-n // by)


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache
def _num_sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
