"""What a product costs by its rows and its weight's format, and what rounding its rows loses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pdlab.bench.topics import topic_tokens
from pdlab.models import Model
from pdlab.quantize import causal_attention
from pdlab.workbench.lesson import progress

if TYPE_CHECKING:
    from pdlab_kernels.cpu.weights import Format

FORMATS: tuple[Format, ...] = ("fp32", "int8", "int4")
ROWS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = (0, 7, 15, 22, 29)


@dataclass(frozen=True)
class RowCosts:
    """One matrix [out, in], multiplied with so many rows."""

    shape: tuple[int, int]
    nbytes: dict[str, int]
    """By format."""
    seconds: dict[str, dict[int, float]]
    """By format and rows, medians."""

    def free_rows(self, name: str, factor: float = 1.5) -> int:
        """The most rows that take less than `factor` times as long as one."""
        times = self.seconds[name]
        return max(rows for rows, s in times.items() if s <= factor * times[1])

    def turning_point(self, name: str) -> float:
        """Rows at which the arithmetic takes as long as the reading of the weight.

        The last two numbers of rows tell what a further row costs, one row what reading costs.
        """
        times = self.seconds[name]
        *_, fewer, more = sorted(times)
        a_row = (times[more] - times[fewer]) / (more - fewer)
        return times[1] / a_row


def row_costs(
    model: Model,
    formats: Sequence[Format] = FORMATS,
    rows: Sequence[int] = ROWS,
    rounds: int = 5,
) -> RowCosts:
    """The model's head, its largest matrix, in several formats in turns, by compiled kernels."""
    from pdlab_kernels.cpu.linear import linear
    from pdlab_kernels.cpu.team import Team
    from pdlab_kernels.cpu.weights import pack

    head = model.decoder.head
    weights = {name: pack(head, name) for name in formats}
    times: dict[str, dict[int, list[float]]] = {f: {n: [] for n in rows} for f in formats}
    with torch.inference_mode(), Team(torch.get_num_threads()) as team:
        for turn in progress(range(rounds + 1), "rows"):
            for n in rows:
                x = torch.randn(n, head.shape[1])
                for name, weight in weights.items():
                    start_s = perf_counter()
                    linear(x, weight, team)
                    if turn:  # the first one warms up
                        times[name][n].append(perf_counter() - start_s)
    return RowCosts(
        (head.shape[0], head.shape[1]),
        {name: weight.nbytes for name, weight in weights.items()},
        {name: {n: median(each) for n, each in of.items()} for name, of in times.items()},
    )


@dataclass(frozen=True)
class RoundingError:
    """How far products lie from exact ones: the norm of the difference over that of the result."""

    name: str
    mean: float
    worst: float
    """Of all the matrices looked at."""


def rounding_errors(model: Model, num_tokens: int = 48) -> list[RoundingError]:
    """What rounding costs, on rows that the model itself computes from a text.

    For the linear layers of some of the model's layers: rows rounded as the kernels do, with the
    weight that they read held exact; and, beside it, the weight rounded and the rows exact.
    """
    from pdlab_kernels.cpu.linear import linear
    from pdlab_kernels.cpu.weights import pack, unpack

    found: dict[str, list[float]] = {}

    def note(name: str, product: Tensor, exact: Tensor) -> None:
        error = (product.double() - exact).norm() / exact.norm()
        found.setdefault(name, []).append(float(error))

    with torch.inference_mode():
        for x, matrix in _inputs(model, num_tokens):
            int8, int4 = pack(matrix, "int8"), pack(matrix, "int4")
            plain = x.double() @ matrix.double().T
            of8 = x.double() @ unpack(int8).double().T
            of4 = x.double() @ unpack(int4).double().T
            note("rows as int16 (beside weights in int8)", linear(x, int8), of8)
            note("rows as two planes of int8 (beside int4)", linear(x, int4), of4)
            note("rows as one plane of int8", linear(x, int4, planes=1), of4)
            note("weights as int8, one scale a row", of8, plain)
    return [RoundingError(name, sum(e) / len(e), max(e)) for name, e in found.items()]


def _inputs(model: Model, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
    """(rows [num_tokens, in], weight [out, in]) of the linear layers of some layers."""
    decoder, found = model.decoder, []
    token_ids = topic_tokens(model, num_tokens)
    chosen = [decoder.layers[i] for i in LAYERS if i < len(decoder.layers)]
    linears = [part for la in chosen for part in (la.qkv, la.output, la.gate_up, la.down)]
    hooks = [
        part.register_forward_pre_hook(
            lambda module, inputs: found.append((inputs[0].clone(), module.weight))
        )
        for part in linears
    ]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(q, k, v, decoder.config.window(layer))

    try:
        decoder(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
    finally:
        for hook in hooks:
            hook.remove()
    return found
