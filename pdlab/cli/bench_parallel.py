"""`pdlab bench parallel`: what several ranks cost and buy on the same cores."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pdlab.cli.errors import one_line_errors


def parallel(
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences that decode; may be given several times.")
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="Of the prompt whose first token is waited for.")
    ] = 512,
    steps: Annotated[int, typer.Option(help="Decode steps of a round.")] = 16,
    rounds: Annotated[int, typer.Option(help="All ways in turn, after a warm-up.")] = 3,
    model: Annotated[
        str, typer.Option(help="A name, a GGUF file, a model directory or a hub id.")
    ] = "smollm2-135m",
    save: Annotated[
        Path | None, typer.Option(help="Write the measurement here, say parallel.json.")
    ] = None,
) -> None:
    """One process, tensor parallel, pipeline parallel and replicas, on the same cores."""
    with one_line_errors():
        from rich.console import Console
        from rich.table import Table
        from tqdm.auto import tqdm

        from pdlab.bench.parallel import BATCHES, by_work, measure_parallel
        from pdlab.cli.walk import check_save

        check_save(save)
        console = Console(highlight=False)
        found = measure_parallel(
            model,
            batches=batch or BATCHES,
            prompt_tokens=prompt_tokens,
            num_steps=steps,
            rounds=rounds,
            watch=partial(tqdm, unit="round", disable=not console.is_terminal),
        )
        console.print(
            f"[bold]measured[/]: {found.model}, {found.machine['threads']} threads in all, torch "
            f"fp32, medians of {found.rounds} rounds of {found.num_steps} steps; prompts of "
            f"{found.prompt_tokens} tokens\nexchange: the ranks' time in collectives, waiting "
            "included; bubbles: that without a micro-batch (beside what the formula predicts)",
            soft_wrap=True,
        )
        for work, costs in by_work(found).items():
            table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
            for title in (work, "ms", "tokens/s", "gain", "bytes/step", "exchange", "bubbles"):
                table.add_column(title, justify="left" if title == work else "right")
            for cost in costs:
                table.add_row(
                    cost.way,
                    f"{cost.median_s * 1e3:.1f}",
                    f"{cost.tokens_s:.1f}",
                    f"{found.ratio(cost.way, work):.2f}x",
                    "" if not cost.wire_bytes else f"{cost.wire_bytes:,}",
                    "" if not cost.wire_bytes else f"{cost.exchange_share:.0%}",
                    ""
                    if not cost.predicted_idle
                    else f"{cost.idle_share:.0%} ({cost.predicted_idle:.0%})",
                )
            console.print(table)
        if found.busy:
            console.print("Other processes were at work: measure again on an idle machine.")
        if save:
            found.save(save)
            console.print(f"saved: {save}", soft_wrap=True)
