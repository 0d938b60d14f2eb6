"""`pdlab bench --gpu`: a CUDA GPU's kernels and models."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdlab.bench.gpu import GpuBench, measure_gpu
from pdlab.cli.bench_speed import numbers_table, ratios_table
from pdlab.cli.errors import FAILED
from pdlab.cli.walk import check_save


def bench_gpu(*, minutes: float, save: Path | None) -> None:
    """Measure, and print it; exit status 1 where a kernel is wrong.

    Raises:
        ValueError: there is no CUDA GPU, or a parameter is out of range.
    """
    check_save(save)
    console = Console(highlight=False)
    found = measure_gpu(
        minutes=minutes, tell=lambda line: console.print(escape(line), soft_wrap=True)
    )
    for part in report(found):
        console.print(part, soft_wrap=isinstance(part, str))
    if save:
        found.save(save)
        console.print(f"saved: {save}", soft_wrap=True)
    if not found.is_right:
        raise typer.Exit(FAILED)


def report(found: GpuBench) -> Iterator[str | Table]:
    """Lines and tables, in the order in which they are printed."""
    yield escape(import_module("pdlab_kernels.triton.gpu_check").report(found.kernels))
    for shape, bench in found.models.items():
        yield ""
        yield f"[bold]{escape(shape)}[/], random weights, bf16, {bench.num_tokens} tokens a prompt"
        if bench.samples:
            yield numbers_table(bench)
            if any(not contestant.is_pdlab for contestant in bench.contestants):
                yield ratios_table(bench)
        for name, reason in bench.skipped.items():
            yield f"left out: {escape(name)}: {escape(reason)}"
    for name in found.not_reached:
        yield f"no time left for {escape(name)}"
    yield f"{found.seconds:.0f} s in all"
