"""`pdlab bench disaggregation`: what the same cores do under four plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdlab.bench.cluster_agreement import METRICS, TOLERANCE, ClusterAgreement
from pdlab.bench.disaggregation import (
    SECTIONS,
    DisaggregationBench,
    Overlap,
    PlanFigures,
    measure_disaggregation,
)
from pdlab.cli.text import seconds
from pdlab.cli.walk import check_save
from pdlab.link import LINKS
from pdlab.models import load
from pdlab.requirements import require_choice, require_int


def bench_disaggregation(
    model: str, *, sections: Sequence[str], repeats: int, link: str, save: Path | None
) -> None:
    """Measure, and print it.

    Raises:
        ValueError: a parameter is out of range; nothing was loaded yet.
    """
    check_save(save)
    require_int("repeats", repeats, least=1, most=1000)
    require_choice("link", link, tuple(LINKS))
    for name in sections:
        require_choice("only", name, SECTIONS)
    console = Console(highlight=False)
    found = measure_disaggregation(
        load(model),
        sections=sections or SECTIONS,
        repeats=repeats,
        links=(link,),
        progress=console.is_terminal,
    )
    for part in _report(found):
        console.print(part, soft_wrap=isinstance(part, str))
    if save:
        found.save(save)
        console.print(f"saved: {save}", soft_wrap=True)


def _report(found: DisaggregationBench) -> Iterator[str | Table]:
    yield (
        f"on {escape(str(found.machine['processor']))}; {escape(found.model)}; each served "
        f"{found.repeats} times, in turns: medians, and lowest–highest"
    )
    for workload in dict.fromkeys(each.workload for each in found.plans):
        yield f"\n[bold]{workload}[/], measured"
        yield _plans([each for each in found.plans if each.workload == workload])
    for overlap in found.overlaps:
        yield from _overlap(overlap)
    if found.agreements:
        yield (
            "\n[bold]1P1D in two processes, and simulated[/] with step times of a rehearsal: "
            f"medians over the requests, within {TOLERANCE:.0%} or not"
        )
        yield _agreements(found.agreements)


def _plans(plans: list[PlanFigures]) -> Table:
    """Two rows for each: medians, and from the lowest to the highest."""
    table = Table("plan", "ITL p50", "ITL p99", "TTFT p50", "tokens/s", box=None, pad_edge=False)
    for each in plans:
        rate, low, high = each.tokens_per_s
        times_s = each.itl_p50_s, each.itl_p99_s, each.ttft_p50_s
        table.add_row(each.plan, *(seconds(middle) for middle, _, _ in times_s), f"{rate:.1f}")
        ranges = [f"{seconds(low_s)}–{seconds(high_s)}" for _, low_s, high_s in times_s]
        table.add_row("", *ranges, f"{low:.1f}–{high:.1f}", style="dim")
    return table


def _agreements(agreements: list[ClusterAgreement]) -> Table:
    table = Table("", "measured", "simulated", "ratio", "within", box=None, pad_edge=False)
    for each in agreements:
        for metric in METRICS:
            measured = _spread(each.spread(metric))
            ratio = each.ratio(metric)
            table.add_row(
                f"{each.workload}, {metric.removesuffix('_s').upper()}",
                measured,
                seconds(each.simulated[metric]),
                f"{ratio:.2f}",
                "yes" if abs(ratio - 1) <= TOLERANCE else "no",
            )
    return table


def _overlap(found: Overlap) -> Iterator[str]:
    yield (
        f"\n[bold]K and V of {found.num_tokens} tokens[/], {found.num_bytes / 1e6:.1f} MB, over "
        f"{found.link}, simulated: {seconds(found.link_s)} by its bandwidth"
    )
    yield "from the first token until the decode worker goes on, measured:"
    yield f"  the whole prompt at once  {_spread(found.push_wait_s)}"
    yield f"  layer by layer            {_spread(found.stream_wait_s)}"
    yield f"  so layer by layer hides {found.hidden:.0%} of it"


def _spread(values: tuple[float, float, float]) -> str:
    middle, low, high = map(seconds, values)
    return f"{middle} ({low} to {high})"
