"""`pdlab bench speculation`: what drafters bring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdlab.cli.errors import one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

    from pdlab.bench.speculation import Scene


def speculation(
    drafter: Annotated[
        list[str] | None,
        typer.Option(help="As of --speculate, say self:int4:4; may be given several times."),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="fp32, 'fp32, regrouped' or a format; may be given several times."),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="copy or chat; may be given twice.")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(help="Prompts that decode together, 1 to 8; may be given several times."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of each sequence.")] = 64,
    rounds: Annotated[int, typer.Option(help="Of all drafters in turn, after one to warm up.")] = 3,
    backend: Annotated[str, typer.Option(help="cpu or torch.")] = "cpu",
    model: Annotated[
        str, typer.Option(help="A name, a GGUF file, a model directory or a hub id.")
    ] = "smollm2-135m",
    save: Annotated[
        Path | None, typer.Option(help="Write the measurement here, say speculation.json.")
    ] = None,
) -> None:
    """Drafters beside plain decoding, on text that copies and on text that does not."""
    with one_line_errors():
        from rich.console import Console

        from pdlab.bench.speculation import BATCHES, DRAFTERS, TARGETS, measure_speculation
        from pdlab.bench.speculation_prompts import TASKS
        from pdlab.cli.speculation import parse_speculation
        from pdlab.cli.walk import check_save

        check_save(save)
        asked = {text: parse_speculation(text) for text in drafter or ()}
        console = Console(highlight=False)
        found = measure_speculation(
            model,
            targets=target or TARGETS,
            tasks=task or tuple(TASKS),
            batches=batch or BATCHES,
            drafters={name: each for name, each in asked.items() if each} or DRAFTERS,
            num_tokens=tokens,
            rounds=rounds,
            backend=backend,
            progress=console.is_terminal,
        )
        console.print(
            f"[bold]measured[/]: {found.model}, backend {found.backend}, {found.num_tokens} tokens "
            f"of each sequence, medians of {found.rounds} rounds\n"
            "theorem: the gain that theorem 3.8 predicts from the tokens that stood and the time "
            "of drafting, if checking is free; checked: the same with the time that it took\n"
            "draft, check: time of a drafted token and of a step that checks, over a plain "
            "step's\n",
            soft_wrap=True,
        )
        for scene in found.scenes:
            console.print(f"[bold]{scene.target}, {scene.task}, batch {scene.batch}[/]")
            console.print(_table(scene))
            console.print()
        if save:
            found.save(save)
            console.print(f"saved: {save}", soft_wrap=True)


def _table(scene: Scene) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("drafter", no_wrap=True)
    for title in ("tokens/s", "gain", "theorem", "checked", "stood", "draft", "check", "same"):
        table.add_column(title, justify="right", no_wrap=True)
    for cost in scene.costs:
        cells = [f"{cost.tokens_s:.1f}", f"{cost.speedup:.2f}x"]
        if cost.counts.num_drafts:
            cells += [f"{cost.theorem:.2f}x", f"{cost.formula:.2f}x", f"{cost.acceptance:.0%}"]
            cells += [f"{cost.cost_ratio:.2f}", f"{cost.check_ratio:.2f}"]
        else:
            cells += ["", "", "", "", ""]
        table.add_row(cost.drafter, *cells, f"{cost.num_equal}/{cost.num_prompts}")
    return table
