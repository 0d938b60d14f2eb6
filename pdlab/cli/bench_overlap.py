"""`pdlab bench overlap`: the next step computed beside the last one's telling."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pdlab.cli.errors import one_line_errors


def overlap(
    backend: Annotated[
        list[str] | None,
        typer.Option(help="torch fp32, cpu fp32 or cpu int8; may be given several times."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences that decode; may be given several times.")
    ] = None,
    reader_ms: Annotated[
        list[float] | None,
        typer.Option(help="Milliseconds that a reader takes for a chunk; several times too."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Decode steps of a round.")] = 12,
    rounds: Annotated[int, typer.Option(help="With and without in turn, after a warm-up.")] = 5,
    model: Annotated[
        str, typer.Option(help="A name, a GGUF file, a model directory or a hub id.")
    ] = "smollm2-135m",
    save: Annotated[
        Path | None, typer.Option(help="Write the measurement here, say overlap.json.")
    ] = None,
) -> None:
    """Decode steps with and without overlap, for readers who take their time and who do not."""
    with one_line_errors():
        from rich.console import Console
        from rich.table import Table

        from pdlab.bench.overlap import BACKENDS, BATCHES, READERS_MS, measure_overlap
        from pdlab.cli.walk import check_save

        check_save(save)
        console = Console(highlight=False)
        found = measure_overlap(
            model,
            backends=backend or BACKENDS,
            batches=batch or BATCHES,
            readers_ms=reader_ms or READERS_MS,
            num_steps=steps,
            rounds=rounds,
            progress=console.is_terminal,
        )
        console.print(
            f"[bold]measured[/]: {found.model}, {found.machine['threads']} threads, from step to "
            f"step, reading included, medians of {found.rounds} rounds of {found.num_steps} steps",
            soft_wrap=True,
        )
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("backend", "batch", "reader", "plain", "overlap", "gain", "at most"):
            table.add_column(title, justify="left" if title == "backend" else "right")
        for cost in found.costs:
            plain_s, overlap_s = sorted(cost.plain_s), sorted(cost.overlap_s)
            table.add_row(
                cost.backend,
                str(cost.batch),
                f"{cost.reader_ms:g} ms",
                f"{plain_s[len(plain_s) // 2] * 1e3:.1f} ms",
                f"{overlap_s[len(overlap_s) // 2] * 1e3:.1f} ms",
                f"{cost.gain:.2f}x",
                f"{cost.most:.2f}x",
            )
        console.print(table)
        if found.busy:
            console.print("Other processes were at work: measure again on an idle machine.")
        if save:
            found.save(save)
            console.print(f"saved: {save}", soft_wrap=True)
