"""`pdlab bench scheduling`: simulator beside engine, and what simulating and scheduling take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pdlab.bench.agreement import METRICS, TOLERANCES, WITHIN_LIMIT, Agreement, Turn
from pdlab.bench.published_fits import FitErrors
from pdlab.bench.scheduling import (
    SECTIONS,
    SchedulingBench,
    SimulatorSpeed,
    StepOverhead,
    measure_scheduling,
)
from pdlab.cli.text import counted, seconds
from pdlab.cli.walk import check_save
from pdlab.models import load
from pdlab.requirements import LARGEST_SEED, require_choice, require_int, require_number
from pdlab.workload import WORKLOADS
from pdlab.workload.serving import SLO

HEADS = {"ttft_s": "median TTFT", "tpot_s": "median TPOT", "goodput_per_s": "goodput"}


@dataclass(frozen=True)
class AskedScheduling:
    """What was asked for on the command line."""

    model: str
    device: str
    num_requests: int
    repeats: int
    seed: int
    rate: float
    """Of the workloads, as a multiple of their own."""
    ttft_slo_ms: float | None
    tpot_slo_ms: float | None
    """Both, or neither for limits that suit each workload."""
    sections: Sequence[str]
    workloads: Sequence[str]
    """Of the agreement; none for all."""
    published: Path | None
    save: Path | None


def bench_scheduling(asked: AskedScheduling) -> None:
    """Measure what is asked for, and print it.

    Raises:
        ValueError: a parameter is out of range; nothing was loaded yet if that could be told.
    """
    check_save(asked.save)
    for name in asked.sections:
        require_choice("only", name, SECTIONS)
    for name in asked.workloads:
        require_choice("workload", name, tuple(WORKLOADS))
    for name, value in {"requests": asked.num_requests, "repeats": asked.repeats}.items():
        require_int(name, value, least=1, most=10_000)
    require_int("seed", asked.seed, 0, LARGEST_SEED // 4)
    if asked.published and not asked.published.is_dir():
        raise ValueError(f"published={str(asked.published)!r} is no directory")
    require_number("rate", asked.rate, 0.01, 100)
    earlier = _earlier(asked.save)
    slo = _slo(asked.ttft_slo_ms, asked.tpot_slo_ms)
    console = Console(highlight=False)
    found = measure_scheduling(
        load(asked.model, device=asked.device),
        sections=asked.sections or SECTIONS,
        workloads=asked.workloads or tuple(WORKLOADS),
        num_requests=asked.num_requests,
        repeats=asked.repeats,
        seed=asked.seed,
        rate=asked.rate,
        slo=slo,
        published_data=asked.published,
        earlier=earlier,
        progress=console.is_terminal,
    )
    for part in _report(found):
        console.print(part, soft_wrap=isinstance(part, str))
    if asked.save:
        found.save(asked.save)
        console.print(f"saved: {asked.save}", soft_wrap=True)


def _earlier(path: Path | None) -> SchedulingBench | None:
    """What stands in the file that is to be written; None if there is none yet."""
    if path is None or not path.exists():
        return None
    try:
        return SchedulingBench.load(path)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"save={str(path)!r} is there, and holds no such measurement") from error


def _slo(ttft_ms: float | None, tpot_ms: float | None) -> SLO | None:
    if ttft_ms is None and tpot_ms is None:
        return None
    if ttft_ms is None or tpot_ms is None:
        raise ValueError("ttft_slo_ms and tpot_slo_ms are needed both, or neither")
    return SLO(ttft_ms / 1e3, tpot_ms / 1e3).checked()


def _report(found: SchedulingBench) -> Iterator[str | Table]:
    machine, model = found.machine, found.model
    yield (
        f"on {escape(str(machine['processor']))}, "
        f"{counted(int(machine['threads'] or 1), 'thread')}, {machine['device']}; "
        f"{escape(model['name'])}, {model['dtype']}"
    )
    if found.busy:
        yield (
            "Other processes were at work: measured times may be too high, and change from one "
            "moment to the next."
        )
    if found.agreements:
        yield from _agreement(found.agreements)
    if found.speeds:
        yield from _speeds(found.speeds)
    if found.overheads:
        yield from _overheads(found.overheads)
    if found.published:
        yield from _published(found.published)


def _agreement(agreements: Sequence[Agreement]) -> Iterator[str | Table]:
    yield (
        "\n[bold]the engine, measured, and the simulator[/] with step times measured between the "
        "steps of the same run"
    )
    yield (
        "goodput: requests a second within both limits; unless given, each limit is where the "
        f"simulation alone says that {WITHIN_LIMIT:.0%} of the workload keep it"
    )
    for agreement in agreements:
        yield (
            f"  {agreement.workload}: {counted(agreement.num_requests, 'request')}, TTFT up to "
            f"{seconds(agreement.slo.ttft_s)} and TPOT up to {seconds(agreement.slo.tpot_s)}"
        )
    table = _new_table("", "measured", "simulated", "ratio", "within")
    for agreement in agreements:
        table.add_row(f"{agreement.workload}, {agreement.rate_rps:g}/s")
        for metric in METRICS:
            table.add_row(*_agreement_row(agreement, metric))
        shares = (agreement.measured.attainment, agreement.simulated.attainment)
        table.add_row("  within limits", *(f"{share:.0%}" for share in shares))
    yield table
    for agreement in agreements:
        for turn in agreement.turns:
            yield _turn(agreement.workload, turn)
    yield (
        "the same, simulated at the pace of the served runs (all step times multiplied by one "
        "number a turn, so that the runs' steps take as long in all):"
    )
    for agreement in agreements:
        ratios = [f"{HEADS[metric]} {_times(agreement.paced_ratio(metric))}" for metric in METRICS]
        yield f"  {agreement.workload}: ratios of {', '.join(ratios)}"


def _agreement_row(agreement: Agreement, metric: str) -> list[str]:
    most = TOLERANCES[metric]
    return [
        f"  {HEADS[metric]}",
        _shown(metric, getattr(agreement.measured, metric)),
        _shown(metric, getattr(agreement.simulated, metric)),
        _times(agreement.ratio(metric)),
        f"{most:.0%}: {'yes' if agreement.is_within(metric) else 'no'}",
    ]


def _turn(workload: str, turn: Turn) -> str:
    times = turn.step_times
    return (
        f"  {workload}, seed {turn.seed}: {counted(times.num_samples, 'step')} fitted, median "
        f"error {times.median_error:.1%}, worst {times.worst_error:.0%}; all steps of the run: "
        f"ratio {turn.step_ratio:.2f}; {turn.processor_share:.0%} of the processor"
    )


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _shown(metric: str, value: float) -> str:
    return f"{value:.3g}/s" if metric == "goodput_per_s" else seconds(value)


def _speeds(speeds: list[SimulatorSpeed]) -> Iterator[str | Table]:
    yield "\n[bold]the simulator's own time[/], measured: requests like Azure's conversations"
    table = _new_table("machine", "requests", "rate", "steps", "simulated", "took")
    for speed in speeds:
        table.add_row(
            speed.machine,
            f"{speed.num_requests:,}",
            f"{speed.rate_rps:g}/s",
            f"{speed.num_steps:,}",
            seconds(speed.duration_s),
            seconds(speed.wall_s),
        )
    yield table


def _overheads(overheads: list[StepOverhead]) -> Iterator[str | Table]:
    yield (
        f"\n[bold]the engine's own time a step[/], measured: {overheads[0].batch} decodes, without "
        "model and sampling"
    )
    names = list(overheads[0].part_s)
    table = _new_table("trace", *names, "all")
    for overhead in overheads:
        parts = [seconds(overhead.part_s[name]) for name in names]
        kept = "kept" if overhead.record_trace else "not kept"
        table.add_row(kept, *parts, seconds(overhead.total_s))
    yield table


def _published(fits: list[FitErrors]) -> Iterator[str | Table]:
    yield "\n[bold]against what was published[/]: relative errors"
    yield (
        "opt-13b: the simulator on a published fit, against that fit (composition, not hardware)\n"
        "llama2-70b: predicted, against measured steps that the overheads were not fitted to"
    )
    table = _new_table("", "phase", "steps", "median", "worst", "within 20%")
    for fit in fits:
        table.add_row(
            fit.name,
            fit.phase,
            f"{fit.num_steps:,}",
            f"{fit.median:.1%}",
            f"{fit.worst:.1%}",
            f"{fit.within:.0%}",
        )
    yield table


def _new_table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
