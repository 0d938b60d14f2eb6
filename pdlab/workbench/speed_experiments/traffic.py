"""What the operators of one decode step move through memory, counted, and how fast torch reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pdlab.models import Model
from pdlab.workbench.speed_experiments.timelines import decoding

SPARSE = {"index_select", "index", "gather", "embedding"}
"""Read only some rows of their first input."""


@dataclass
class Traffic:
    """Operators that ran and the bytes that they read and wrote, weights apart."""

    operators: int = 0
    views: int = 0
    weight_bytes: int = 0
    other_bytes: int = 0
    by_name: dict[str, int] = field(default_factory=dict)
    """How often each operator ran that was no view."""


class _Counting(TorchDispatchMode):
    """Counts what comes to torch's kernels, once composed operators are taken apart."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self._weights = weights
        self.traffic = Traffic()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        inputs, outputs = list(_tensors(args)), list(_tensors(result))
        pointers = {x.untyped_storage().data_ptr() for x in inputs}
        writes = any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)
        aliased = all(x.untyped_storage().data_ptr() in pointers for x in outputs)
        if outputs and aliased and not writes:
            self.traffic.views += 1
            return result
        self._count(name, inputs, outputs, writes)
        return result

    def _count(self, name: str, inputs: list[Tensor], outputs: list[Tensor], writes: bool) -> None:
        t = self.traffic
        t.operators += 1
        t.by_name[name] = t.by_name.get(name, 0) + 1
        if name in SPARSE:  # what it gives is what it reads
            t.other_bytes += 2 * sum(map(_nbytes, outputs))
            return
        if writes:  # into its first input, as much as the largest of the others has
            t.other_bytes += 2 * max(map(_nbytes, inputs[1:]), default=_nbytes(inputs[0]))
            return
        for x in inputs:
            if x.untyped_storage().data_ptr() in self._weights:
                t.weight_bytes += _nbytes(x)
            else:
                t.other_bytes += _nbytes(x)
        t.other_bytes += sum(map(_nbytes, outputs))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for each in values:
            yield from _tensors(each)


def _nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


@contextmanager
def counting(model: Model) -> Iterator[Traffic]:
    """Counts all that torch does within."""
    weights = {p.untyped_storage().data_ptr() for p in model.decoder.parameters()}
    with _Counting(weights) as mode:
        yield mode.traffic


def count_step(model: Model) -> Traffic:
    """One decode step of the torch backend, from schedule to delivery."""
    with decoding(model, "torch") as engine, counting(model) as traffic:
        engine.step()
    return traffic


@dataclass(frozen=True)
class Reading:
    """All weights of one kind, multiplied with a single row, one layer after the other."""

    name: str
    nbytes: int
    torch_s: float
    compiled_s: float


def linear_rates(model: Model, rounds: int = 5) -> list[Reading]:
    """How long each kind of matrix takes in torch and in the compiled kernel, in fp32.

    All 30 layers in turn, so that no matrix is in the cache when it is read.
    """
    from pdlab_kernels.cpu.linear import linear
    from pdlab_kernels.cpu.team import Team
    from pdlab_kernels.cpu.weights import pack

    found = []
    with torch.inference_mode(), Team(torch.get_num_threads()) as team:
        for name, matrices in _kinds(model).items():
            packed = [pack(matrix, "fp32") for matrix in matrices]
            x = torch.randn(1, matrices[0].shape[1])
            times: tuple[list[float], list[float]] = [], []
            for turn in range(rounds + 1):
                start_s = perf_counter()
                for matrix in matrices:
                    F.linear(x, matrix)
                middle_s = perf_counter()
                for weight in packed:
                    linear(x, weight, team)
                if turn:  # the first one warms up
                    times[0].append(middle_s - start_s)
                    times[1].append(perf_counter() - middle_s)
            nbytes = sum(map(_nbytes, matrices))
            found.append(Reading(name, nbytes, median(times[0]), median(times[1])))
    return found


def _kinds(model: Model) -> dict[str, list[Tensor]]:
    layers = model.decoder.layers
    kinds = {
        name: [getattr(layer, attribute).weight for layer in layers]
        for name, attribute in (
            ("q, k, v", "qkv"), ("output", "output"), ("gate, up", "gate_up"), ("down", "down")
        )
    }  # fmt: skip
    return kinds | {"head": [model.decoder.head]}
