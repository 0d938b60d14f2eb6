"""Bytes of activations: what a computation allocates in all, and how much of it lives at once."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class AllocationMeter(TorchDispatchMode):
    """Counts the tensors that operations make while it is entered, and when they go.

    A tensor's memory counts from the operation that returns it until the last view of it is gone.
    Memory that was there before (weights, the KV cache) does not count, nor what an operation uses
    inside itself and what an allocator keeps in reserve.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total_bytes = 0
        self.peak_bytes = 0
        self._live_bytes = 0
        self._views: dict[int, int] = {}
        """Tensors that stand on each counted piece of memory, by its address."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = {_address(x) for x in _tensors([args, kwargs])}
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            self._see(tensor, given)
        return result

    def _see(self, tensor: torch.Tensor, given: set[int]) -> None:
        address, size = _address(tensor), tensor.untyped_storage().nbytes()
        if address in self._views:
            self._views[address] += 1
        elif address in given or size == 0:
            return
        else:
            self._views[address] = 1
            self.total_bytes += size
            self._live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(tensor, self._lose, address, size)

    def _lose(self, address: int, size: int) -> None:
        self._views[address] -= 1
        if self._views[address] == 0:
            del self._views[address]
            self._live_bytes -= size


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
