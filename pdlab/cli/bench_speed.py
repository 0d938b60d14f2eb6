"""`pdlab bench`: pdlab beside its peers and beside the machine's own floor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdlab.bench.contest import Entry
from pdlab.bench.entries import MODES, REFERENCE, mode_entry, peer_entry, transformers_entry
from pdlab.bench.speed import CASES, Column, Contestant, SpeedBench, Spread
from pdlab.bench.speed_agreement import Likeness, measure_likeness
from pdlab.bench.speed_run import measure_speed
from pdlab.cli.text import counted, si
from pdlab.cli.walk import check_save
from pdlab.machine import num_cores
from pdlab.models import load, load_outline

QUICK_ROUNDS, QUICK_TOKENS, QUICK_CASES = 2, 24, CASES[:1]
"""Of `--quick`: one prompt of 128 tokens is all that is tried."""


@dataclass(frozen=True)
class AskedSpeed:
    """What was asked for on the command line."""

    modes: Sequence[str] = MODES
    peers: Sequence[str] = ()
    rounds: int = 5
    num_tokens: int = 48
    threads: int | None = None
    transformers: bool = True
    quick: bool = False
    save: Path | None = None
    chart: Path | None = None


def bench_speed(asked: AskedSpeed) -> None:
    """Measure, and print it.

    Raises:
        ValueError: a parameter is out of range; nothing was measured yet.
        FetchError: the model has to be fetched and cannot be.
    """
    check_save(asked.save)
    check_save(asked.chart, "chart")
    entries = _entries(asked)
    console = Console(highlight=False)
    model = load_outline()
    found = measure_speed(
        model,
        entries,
        rounds=QUICK_ROUNDS if asked.quick else asked.rounds,
        num_tokens=QUICK_TOKENS if asked.quick else asked.num_tokens,
        cases=QUICK_CASES if asked.quick else CASES,
        threads=asked.threads or num_cores(),
        tell=lambda line: console.print(escape(line), soft_wrap=True),
        progress=console.is_terminal,
    )
    with console.status("comparing texts ..."):
        alike = measure_likeness(found, load(model.name, progress=False), REFERENCE)
    for part in report(found, alike):
        console.print(part, soft_wrap=isinstance(part, str))
    if asked.save:
        found.save(asked.save, [each.to_dict() for each in alike])
        console.print(f"saved: {asked.save}", soft_wrap=True)
    if asked.chart:
        _draw(found, asked.chart)
        console.print(f"chart: {asked.chart}", soft_wrap=True)


def _entries(asked: AskedSpeed) -> list[Entry]:
    entries = [mode_entry(mode) for mode in asked.modes]
    if asked.transformers:
        entries.append(transformers_entry())
    return entries + [peer_entry(peer) for peer in asked.peers]


def _draw(found: SpeedBench, path: Path) -> None:
    """A page of its own for `.html`, and plotly's JSON otherwise."""
    from pdlab.workbench.figures.peers import peers_figure

    figure = peers_figure(found)
    if path.suffix == ".html":
        figure.write_html(path, include_plotlyjs=True)
    else:
        path.write_text(json.dumps(figure.to_plotly_json(), default=list), encoding="utf-8")


# --- what is printed -----------------------------------------------------------------------------


def report(found: SpeedBench, alike: Sequence[Likeness]) -> Iterator[str | Table]:
    """Lines and tables, in the order in which they are printed."""
    bandwidth = Spread.of([c.bandwidth_bytes_s for c in found.ceilings])
    flops = Spread.of([c.flops_s for c in found.ceilings])
    yield (
        f"[bold]measured[/] on {escape(str(found.machine['processor']))}, "
        f"{counted(found.threads, 'thread')}; {escape(found.model)}, greedy, "
        f"{found.num_tokens} tokens a prompt; medians of {counted(found.rounds, 'round')} in "
        "turns, and lowest–highest"
    )
    yield (
        f"the machine in this run: {si(bandwidth.median, 'B/s')} read "
        f"({si(bandwidth.least, '')}–{si(bandwidth.most, '')}), {si(flops.median, 'FLOP/s')} in "
        f"fp32 products ({si(flops.least, '')}–{si(flops.most, '')})"
    )
    if found.busy:
        yield "[bold]other processes were at work[/]: compare nothing but ratios, if that"
    yield ""
    yield numbers_table(found)
    if any(not contestant.is_pdlab for contestant in found.contestants):
        yield ""
        yield ratios_table(found)
    if alike:
        yield ""
        yield f"text, beside {REFERENCE}:"
        for each in alike:
            yield f"  {escape(each.name)}: {each.describe()}"
    for name, reason in found.skipped.items():
        yield f"left out: {escape(name)}: {escape(reason)}"


def numbers_table(found: SpeedBench) -> Table:
    """A row for each contestant: medians, spread, and the share of the floor."""
    table = _table("tok/s after the first\nor s; share of floor")
    columns = found.columns()
    for column in columns:
        table.add_column(_head(column), justify="right", no_wrap=True)
    for contestant in found.contestants:
        cells = [_cell(found, contestant, column) for column in columns]
        table.add_row(escape(contestant.name), *cells)
    return table


def _table(corner: str) -> Table:
    """Narrow enough for five columns on a page of 80 characters."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(corner, no_wrap=True)
    return table


def _cell(found: SpeedBench, contestant: Contestant, column: Column) -> str:
    """Median and share of the floor; below them the least and the most."""
    spread, share = found.spread(contestant.name, column), found.share(contestant, column)
    if spread is None or share is None:
        return "-"
    low, high = _number(spread.least, 2), _number(spread.most, 2)
    return f"{_number(spread.median)} {share:.0%}\n[dim]{low}–{high}[/]"


def ratios_table(found: SpeedBench) -> Table:
    """pdlab's fastest mode in each column, over each peer."""
    table = _table("pdlab's best mode,\ntimes as fast as")
    columns = found.columns()
    best = {column: found.best(column, pdlab=True) for column in columns}
    for column in columns:
        table.add_column(_head(column), justify="right", no_wrap=True)
    modes = (f"[dim]{escape(b.name) if b else '-'}[/]" for b in best.values())
    table.add_row("[dim]its name[/]", *modes)
    peers = [contestant for contestant in found.contestants if not contestant.is_pdlab]
    for peer in peers:
        cells = (_ratio(found, best[column], peer, column) for column in columns)
        table.add_row(escape(peer.name), *cells)
    cells = (
        _ratio(found, best[column], found.best(column, pdlab=False), column) for column in columns
    )
    table.add_row("the fastest of them", *cells, style="bold")
    return table


def _ratio(
    found: SpeedBench, ours: Contestant | None, peer: Contestant | None, column: Column
) -> str:
    ratio = found.ratio(ours.name, peer.name, column) if ours and peer else None
    return "-" if ratio is None else f"{ratio:.2f}x"


def _head(column: Column) -> str:
    return column.name.replace(", ", "\n").replace("TTFT ", "TTFT\n")


def _number(value: float, digits: int = 3) -> str:
    """So many significant digits, or all that stand before the point."""
    return f"{value:.0f}" if value >= 99.5 else f"{value:.{digits}g}"
