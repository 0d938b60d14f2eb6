"""`pdlab bench weights`: what weight formats cost in quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pdlab.cli.errors import one_line_errors

if TYPE_CHECKING:
    from rich.table import Table

    from pdlab.bench.weights import WeightCosts


def weights(
    formats: Annotated[
        list[str] | None,
        typer.Argument(help="Such as int8, q8_0, int4, int4/int4, int4:gptq."),
    ] = None,
    regrouped: Annotated[
        list[str] | None,
        typer.Option(help="A format to measure on regrouped channels; may be given again."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Of the text.")] = 20_000,
    window: Annotated[int, typer.Option(help="Tokens that are read from one start.")] = 512,
    model: Annotated[
        str, typer.Option(help="A name, a GGUF file, a model directory or a hub id.")
    ] = "smollm2-135m",
    save: Annotated[
        Path | None, typer.Option(help="Write the measurement here, say weights.json.")
    ] = None,
) -> None:
    """What weight formats cost: perplexity, KL divergence and greedy tokens."""
    with one_line_errors():
        from rich.console import Console

        from pdlab.bench.weights import FORMATS, REGROUPED, measure_weights
        from pdlab.cli.walk import check_save

        check_save(save)
        console = Console(highlight=False)
        given = formats is not None or regrouped is not None
        found = measure_weights(
            model,
            (formats or ()) if given else FORMATS,
            regrouped=(regrouped or ()) if given else REGROUPED,
            num_tokens=tokens,
            window=window,
            progress=console.is_terminal,
        )
        console.print(_introduction(found), soft_wrap=True)
        console.print(_table(found))
        if save:
            found.save(save)
            console.print(f"saved: {save}", soft_wrap=True)


def _introduction(found: WeightCosts) -> str:
    return (
        f"[bold]measured[/]: {found.model}, {found.num_tokens:,} tokens of {found.text} in windows "
        f"of {found.window}; plain fp32 weights take {found.nbytes / 1e6:.0f} MB and have "
        f"perplexity {found.perplexity:.3f}\n"
        f"greedy: {found.greedy_tokens} tokens after each prompt; how many are equal before the "
        "first that differs, and prompts where all are\n"
        "regrouped: the same model with its channels in another order, as if it did not come from "
        "a file of this format\n"
    )


def _table(found: WeightCosts) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("weights", no_wrap=True)
    for title in ("MB", "perplexity", "KL", "same top", "greedy", "prompts"):
        table.add_column(title, justify="right", no_wrap=True)
    for cost in found.costs:
        table.add_row(
            cost.weights + (", regrouped" if cost.regrouped else ""),
            f"{cost.nbytes / 1e6:.1f}",
            f"{found.increase(cost):+.2%}",
            f"{cost.kl:.5f}",
            f"{cost.agreement:.1%}",
            f"{cost.equal_tokens:.1f}",
            f"{cost.equal_prompts}/{len(cost.greedy)}",
        )
    return table
