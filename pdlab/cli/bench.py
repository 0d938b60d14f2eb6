"""`pdlab bench`: what is measured side by side, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdlab.bench import MixCost, SamplingCosts, measure_sampling
from pdlab.cli.text import counted, seconds
from pdlab.cli.walk import check_save
from pdlab.models import load

BAR = 12
"""Characters of a bar that stands for the dearest mix."""
EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True)
class SamplingBench:
    """What was asked for on the command line."""

    batch: int
    context_len: int
    repeats: int
    model: str
    device: str
    constraint_backend: str
    save: Path | None


def bench_sampling(asked: SamplingBench) -> None:
    """Measure what sampling costs beside a decode step, and print it.

    Raises:
        ValueError: a parameter is out of range; nothing was loaded yet if that could be told.
    """
    check_save(asked.save)
    console = Console(highlight=False)
    found = measure_sampling(
        load(asked.model, device=asked.device),
        batch=asked.batch,
        context_len=asked.context_len,
        repeats=asked.repeats,
        constraint_backend=asked.constraint_backend,
        progress=console.is_terminal,
    )
    for line in _introduction(found):
        console.print(line, soft_wrap=True)
    console.print(_table(found.costs))
    if found.busy:
        console.print(
            f"Other processes were at work (load {found.machine['load_before']}): these times may "
            "be too high, and the parts of a step too. Measure again on an idle machine.",
            soft_wrap=True,
        )
    if asked.save:
        found.save(asked.save)
        console.print(f"saved: {asked.save}", soft_wrap=True)


def _introduction(found: SamplingCosts) -> list[str]:
    machine, model = found.machine, found.model
    steps = found.repeats * found.num_steps
    return [
        f"[bold]measured[/] on {escape(str(machine['processor']))}, "
        f"{counted(int(machine['threads'] or 1), 'thread')}, {machine['device']}",
        f"{escape(model['name'])}, {model['dtype']}, {model['vocab_size']:,} tokens in the "
        f"vocabulary; {counted(found.batch, 'sequence')} decoding at {found.context_len} tokens "
        f"of context",
        f"medians of {steps} decode steps, in {counted(found.repeats, 'round')} of all mixes in "
        f"turn; sampling is from logits to tokens, step is the whole of it",
        "",
    ]


def _table(costs: list[MixCost]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("parameters", no_wrap=True)
    table.add_column("sampling", justify="right", no_wrap=True)
    table.add_column("middle half, ms", justify="right", no_wrap=True, style="dim")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("of step", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    most = max(cost.share for cost in costs)
    for cost in costs:
        low, high = cost.quartiles_s
        table.add_row(
            cost.name,
            seconds(cost.median_sample_s),
            f"{_milliseconds(low)} to {_milliseconds(high)}",
            seconds(cost.median_step_s),
            f"{cost.share:.1%}",
            bar(cost.share / most),
        )
    return table


def bar(part: float) -> str:
    """A bar of up to BAR characters, to an eighth of one."""
    eighths = round(8 * BAR * part)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _milliseconds(value: float) -> str:
    return f"{1000 * value:.0f}" if value >= 0.0995 else f"{1000 * value:.3g}"
