"""How a served workload looks in a terminal: a table that lives while it runs, and its summary."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from pdlab.cli.bench import BAR, bar
from pdlab.cli.text import seconds
from pdlab.workload.levels import Level
from pdlab.workload.replay import Progress
from pdlab.workload.report import Distribution, Summary
from pdlab.workload.serving import SLO, ServingRun

REFRESH_S = 0.25
"""Between two pictures; drawing one takes some milliseconds of the engine's time."""
ROW_S = 2.0
"""Between two rows that stay."""
NUM_ROWS = 12
COLUMNS = ("time", "waiting", "running", "batch", "KV", "tok/s", "finished", "attained")
LATENCIES = {
    "queue": ("queue_s", "to first step"),
    "TTFT": ("ttft_s", "to first token"),
    "ITL": ("itl_s", "each gap"),
    "TPOT": ("tpot_s", "mean gap"),
    "E2E": ("e2e_s", "to last token"),
}
"""Where each stands in a summary, and what it is."""


class LiveView:
    """Follows a replay as its `on_step`. Draws nothing where the output is no terminal.

    Args:
        num_blocks: of the engine's pool.
        num_requests: that will arrive.
        slo: what they should meet.
    """

    def __init__(self, console: Console, num_blocks: int, num_requests: int, slo: SLO):
        self.num_blocks, self.num_requests, self.slo = num_blocks, num_requests, slo
        self.rows: deque[list[str]] = deque(maxlen=NUM_ROWS)
        self.num_ended = self.num_finished = self.num_good = 0
        self._tokens: deque[tuple[float, int]] = deque()
        self._drawn_s = self._row_s = float("-inf")
        self._live = (
            Live(console=console, auto_refresh=False, transient=True)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> LiveView:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def update(self, progress: Progress) -> None:
        """Count, and draw if it is time to."""
        self.num_ended += len(progress.ended)
        self.num_finished += sum(not served.error for served in progress.ended)
        self.num_good += sum(served.meets(self.slo) for served in progress.ended)
        self._tokens.append((progress.now_s, progress.num_tokens))
        while self._tokens[0][0] < progress.now_s - ROW_S:
            self._tokens.popleft()
        if self._live and progress.now_s - self._drawn_s >= REFRESH_S:
            self._draw(self._live, progress)

    def _draw(self, live: Live, progress: Progress) -> None:
        if progress.now_s - self._row_s >= ROW_S or not self.rows:
            self.rows.append([])
            self._row_s = progress.now_s
        self.rows[-1] = self.row(progress)
        self._drawn_s = progress.now_s
        live.update(self.table(), refresh=True)

    def row(self, progress: Progress) -> list[str]:
        """The state after a step; `attained` is the part of those that ended."""
        step = progress.step
        batch = 0 if step is None else len(step.decodes) + len(step.prompts)
        used = 0.0 if step is None else step.num_used_blocks / self.num_blocks
        tokens = sum(count for _, count in self._tokens) / max(1e-9, min(ROW_S, progress.now_s))
        return [
            f"{progress.now_s:.1f} s",
            str(0 if step is None else step.num_waiting),
            str(0 if step is None else step.num_running),
            str(batch),
            f"{bar(used).ljust(BAR)} {used:4.0%}",
            f"{tokens:.1f}",
            f"{self.num_finished} of {self.num_requests}",
            f"{self.num_good / self.num_ended:.0%}" if self.num_ended else "–",
        ]

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold", title="measured")
        for name in COLUMNS:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table


# --- afterwards ----------------------------------------------------------------------------------


def print_summary(
    console: Console, run: ServingRun, summary: Summary, *, interrupted: bool = False
) -> None:
    """Where the numbers come from, latencies, and the rest."""
    if interrupted:
        console.print("[bold]interrupted[/]: only what was served until then", soft_wrap=True)
    on = "; step times" if run.provenance == "simulated" else ""
    console.print(f"[bold]{run.provenance}[/]{on}: {escape(run.basis)}", soft_wrap=True)
    console.print()
    console.print(_latencies(summary))
    console.print()
    console.print(_facts(summary))


def _latencies(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(summary.provenance, no_wrap=True)
    for header in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(header, justify="right", no_wrap=True, min_width=6)
    table.add_column(_without(summary), style="dim", overflow="fold")
    for name, (key, meaning) in LATENCIES.items():
        found: Distribution = getattr(summary, key)
        values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
        cells = ["–" if value is None else seconds(value) for value in values]
        table.add_row(name, *cells, meaning)
    return table


def _without(summary: Summary) -> str:
    """Who is missing in the percentiles, if anybody is."""
    lost = {"refused": summary.num_refused, "aborted": summary.num_aborted}
    counts = " and ".join(f"{number:,} {how}" for how, number in lost.items() if number)
    return f"of those that got there; {counts}" if counts else ""


def _facts(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in _lines(summary).items():
        table.add_row(name, value)
    return table


def _lines(summary: Summary) -> dict[str, str]:
    given_up = summary.num_aborted_waiting
    lines = {
        "requests": f"{summary.num_finished:,} of {summary.num_requests:,} finished"
        + (f", {summary.num_refused:,} refused" if summary.num_refused else "")
        + (f", {summary.num_aborted:,} aborted" if summary.num_aborted else ""),
        "duration": f"{summary.duration_s:,.1f} s, of which {summary.idle_s:,.1f} s in no step",
        "throughput": f"{summary.requests_per_s:.3g} requests/s, "
        f"{summary.output_tokens_per_s:,.1f} output and {summary.prompt_tokens_per_s:,.1f} prompt "
        "tokens/s",
    }
    if summary.slo and summary.goodput_per_s is not None and summary.attainment is not None:
        lines["goodput"] = (
            f"{summary.goodput_per_s:.3g} requests/s with TTFT ≤ {seconds(summary.slo.ttft_s)} and "
            f"TPOT ≤ {seconds(summary.slo.tpot_s)}: {summary.attainment:.0%} of all"
        )
    lines |= {
        "queue": f"{_level(summary.queue_depth)} requests waiting"
        + (f", without {given_up:,} aborted there" if given_up else ""),
        "batch": f"{_level(summary.batch_size)} sequences in a step, "
        f"{_level(summary.running)} admitted",
        "tokens": f"{_level(summary.step_tokens)} in a step",
        "KV": f"{summary.kv_occupancy.mean:.0%} of the blocks held, "
        f"at most {summary.kv_occupancy.max:.0%}",
        "steps": ", ".join(
            f"{share.num_steps:,} {mix} ({seconds(share.wall_s)})"
            for mix, share in summary.steps.items()
            if share.num_steps
        ),
        "preempted": f"{summary.num_preemptions:,} times",
        "prefixes": f"{summary.num_cached_tokens:,} of {summary.num_prompt_tokens:,} prompt tokens "
        "were in the prefix cache",
    }
    return lines


def _level(level: Level) -> str:
    """Means are over time, idle time included."""
    return f"{level.mean:.2f} (at most {level.max:,.0f})"
