"""`pdlab calibrate`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from pdlab.cli.text import seconds, si
from pdlab.costmodel import Hardware, calibrate, ridge_point

BUSY_BELOW = 0.8
"""Share of the processor under which the numbers come out too low."""


def show_ceilings(device: str, dtype: str, *, refresh: bool) -> None:
    """Print what this machine reached at most; measures it if that was not done before."""
    console = Console(highlight=False)
    with console.status("measuring (a few seconds, once) ..."):
        hardware = calibrate(device, dtype, refresh=refresh)
    console.print(f"[bold]{hardware.name}[/], measured")
    console.print(_table(hardware, dtype))
    share = hardware.details.get("processor_share", 1.0)
    if share < BUSY_BELOW:
        console.print(
            f"The machine was busy: this process got {share:.0%} of its processors, so these "
            "ceilings may be too low. When it is idle: pdlab calibrate --refresh",
            soft_wrap=True,
        )


def _table(hardware: Hardware, dtype: str) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    rows = [
        (
            f"matrix product, {dtype}",
            si(hardware.peak(dtype), "FLOP/s"),
            "what compute-bound work (prefill) is held against",
        ),
        (
            "memory, read",
            si(hardware.bandwidth_bytes_s, "B/s"),
            "what bandwidth-bound work (decode) is held against",
        ),
        (
            "ridge point",
            f"{ridge_point(hardware, dtype):.0f} FLOP/B",
            "above this intensity compute is the limit, below it memory",
        ),
        ("start of an operation", seconds(hardware.launch_s), "launch overhead"),
    ]
    for name, key, note in (
        ("memory, copy", "copy_bytes_s", "bytes read plus bytes written"),
        ("matrix times vector", "gemv_bytes_s", "what torch's kernel reaches"),
    ):
        if key in hardware.details:
            rows.append((name, si(hardware.details[key], "B/s"), note))
    if hardware.memory_bytes:
        rows.append(("size of memory", si(hardware.memory_bytes, "B"), ""))
    for row in rows:
        table.add_row(*row)
    return table
